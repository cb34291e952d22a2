# SPDX-License-Identifier: MIT
"""Every figure of the paper, benchmarks, and the tables of the documents, all from run folders.

python plots.py                                     # every figure that the runs at hand allow
python plots.py meta_training --runs runs --pdf     # one figure of your own runs, also as PDF
python plots.py --compare runs/ant_dir/trmrl-seed7  # your run over ours: is it on track?
python plots.py film --env ant_dir                  # an animation of an agent that adapts
python plots.py benchmark --env ant_dir             # speed, beside the limits of this machine
python plots.py tables                              # the tables of docs/results.md

1. Look   2. Runs   3. Learning curves (Fig. 4, 5, 6, 10 to 13)
4. Inside an agent (Fig. 2, 3, 7, 8, 9)   5. Film   6. Benchmark   7. Tables   8. Command line
"""

import csv
import itertools
import json
import math
import os
import re
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

import gymnasium
import matplotlib.pyplot as plt
import mujoco
import numpy as np
import torch
from matplotlib.mlab import GaussianKDE
from matplotlib.ticker import FixedLocator, LogLocator, PercentFormatter

import trmrl

# ---- 1. Look -------------------------------------------------------------------------------------

WIDTH = 7.0  # inches, the text width of a paper; in a README an inch is about 120 pixels
BLUE, RED, GREY = "#0b5fa5", "#c0392b", "#666666"
BAND = dict(color=BLUE, alpha=0.18, linewidth=0)  # velocities close to the target
NOTE = dict(color=RED, ha="right", bbox=dict(facecolor="white", edgecolor="none", alpha=0.8, pad=1))
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "font.size": 9.5,
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,  # letters stay letters
    "savefig.dpi": 200,
    "xtick.color": GREY,
    "ytick.color": GREY,
}

# An agent looks the same in all figures. Lines and markers differ, so that grey is enough.
AGENTS = {  # label, colour, line, marker
    "trmrl": ("TrMRL", BLUE, "-", "o"),
    "rl2": ("RL²", "#e08214", "--", "s"),
    "varibad": ("VariBAD", "#2c8c5a", "-.", "D"),
    "pearl": ("PEARL", "#8e44ad", (0, (1, 1)), "v"),
    "maml": ("MAML", "#8c6d1f", (0, (5, 1, 1, 1, 1, 1)), "P"),
    "oracle": ("oracle", "#333333", ":", "^"),
    "yours": ("your run", RED, "-", "*"),
}
ENVS = {"halfcheetah_vel": "HalfCheetahVel", "ant_dir": "AntDir"}
ENVS |= {"ml1_reach": "ML1-Reach", "ml1_push": "ML1-Push", "ml45_train": "ML45-Train"}


def shade(value, values):
    """Dark for small, light for large values: the order shows without colour, too."""
    return plt.cm.viridis(0.8 * (value - min(values)) / max(np.ptp(values), 1e-9))


def title(ax, words, note):
    """A title and, in small letters below it, a note."""
    ax.set_title(words, pad=17, loc="left")
    ax.annotate(note, (0, 1), (0, 5), "axes fraction", "offset points", color=GREY, fontsize=8)


def save(figure, name, options, sources):
    """Write the picture, with one legend for all panels, and say what it was made from."""
    legend = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            legend.setdefault(label, handle)
    if legend:
        letters = sum(len(label) + 8 for label in legend)  # 77 fit in a line
        columns = math.ceil(len(legend) / math.ceil(letters / 77))
        figure.legend(legend.values(), legend, loc="outside lower center", ncols=columns)

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.png"
    figure.savefig(path)
    if options.pdf:
        figure.savefig(path.with_suffix(".pdf"))
    plt.close(figure)
    origin = plural(len(sources), "run") if sources else "this machine"
    report(f"{path}: from {origin}", sources, options)


def report(line, details, options):
    """Print the line; with --verbose also the details."""
    print(line)
    if options.verbose:
        for detail in details:
            print(f"    {detail}")


def plural(n, word):
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


# ---- 2. Runs -------------------------------------------------------------------------------------
#
# A run folder has a config.json and an eval.csv. Those of the first edition have other settings and
# no column `actions` (theirs are mean actions); their learning curves are read all the same.


@dataclass
class Run:
    path: Path
    env: str
    agent: str  # "yours": drawn over ours by --compare
    ablation: str  # of .../ablations/<ablation>/<run>
    settings: dict  # config.json
    rows: list  # eval.csv
    tests: list  # rows with the family's usual actions: sampled ones on arms, else mean ones
    value: str  # what is shown: "success" if the family has it, else "return"
    steps: int
    finished: bool


def is_arm(env):
    return env.startswith(("ml1_", "ml45_"))


def read_csv(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def read_run(path):
    content = json.loads((path / "config.json").read_text())
    env = content["env"]
    settings = asdict(trmrl.Config(env=env)) | {"agent": "trmrl"} | content
    rows = []
    for line in read_csv(path / "eval.csv"):
        row = {name: int(line[name]) for name in ("step", "task", "episode")}
        row |= {name: float(line[name] or "nan") for name in ("return", "success")}
        row |= {"split": line["split"], "actions": line.get("actions") or "mean"}
        rows.append(row)

    parts = path.resolve().parts
    ablation = parts[-2] if parts[-3:-2] == ("ablations",) else ""
    usual = "sampled" if is_arm(env) else "mean"
    tests = [row for row in rows if row["actions"] == usual] or rows
    value = "return" if all(np.isnan(row["success"]) for row in rows) else "success"
    steps = max((row["step"] for row in rows), default=0)
    done = steps >= settings["total_steps"]
    return Run(path, env, settings["agent"], ablation, settings, rows, tests, value, steps, done)


def find_runs(folders):
    """All runs below these folders; damaged ones are named and skipped."""
    runs = []
    for folder in folders:
        for config in sorted(Path(folder).rglob("config.json")):
            try:
                runs.append(read_run(config.parent))
            except Exception as error:  # whatever a damaged file provokes
                reason = " ".join(str(error).split())[:200]
                print(f"skipped {config.parent}: damaged ({reason})", file=sys.stderr)
    return runs


def same_settings(run, other, besides=()):
    """Whether two runs differ at most in their seeds, their machines and the settings `besides`."""
    own = {"seed", "device", "threads", "run_dir", "versions", "compile", *besides}
    shared = (run.settings.keys() & other.settings.keys()) - own
    return all(run.settings[name] == other.settings[name] for name in shared)


def why_not(run, seeds):
    """Why a run does not belong to the curve of these seeds; '' if it does."""
    if not run.rows:
        return "it has no meta-test yet"
    first = seeds[0] if seeds else run
    if first.finished and not run.finished:
        return "it is not finished"
    if not same_settings(run, first):
        return f"its settings are not those of {first.path}"
    if run.tests[0]["actions"] != first.tests[0]["actions"]:
        return f"its actions are not {first.tests[0]['actions']} ones"
    if run.settings["seed"] in [other.settings["seed"] for other in seeds]:
        return "another run has its seed"
    return ""


def group_runs(runs, key, options):
    """{env: {key(run): [runs of equal settings, one per seed]}}."""
    groups = {}
    left_out = []
    for run in sorted(runs, key=lambda run: not run.finished):
        seeds = groups.get(run.env, {}).get(key(run), [])
        reason = why_not(run, seeds)
        if reason:
            left_out.append(f"left out {run.path}: {reason}")
        else:
            groups.setdefault(run.env, {})[key(run)] = [*seeds, run]
    if left_out:
        words = f"left out: {plural(len(left_out), 'run')} (--verbose lists them)"
        report(words, left_out, options)
    return groups


# ---- 3. Learning curves (Fig. 4, 5, 6 and 10 to 13) ----------------------------------------------

PEER = "SB3 RecurrentPPO"  # of results/recurrent_ppo.py: in tables, but not in the paper's figures
# PEARL and MAML adapt from one episode to the next, so Fig. 4 shows their third episode.
SHOWN_EPISODE = {"pearl": 3, "maml": 3}
LABELLED = dict(AGENTS)
for agent, episode in SHOWN_EPISODE.items():
    LABELLED[agent] = f"{AGENTS[agent][0]}, episode {episode}", *AGENTS[agent][1:]

# Returns of simple policies. No adaptation: the best that one policy scores in all tasks.
REFERENCES = {
    "halfcheetah_vel": {-150: "no\nadaptation", -300: "standing\nstill"},
    "ant_dir": {200: "standing\nstill"},
    "ood": {-700: "standing\nstill"},
}


def means(run, by, **wanted):
    """Means over the tasks of some rows of eval.csv, as a curve: {step or episode: mean}."""
    values = defaultdict(list)
    for row in run.rows if "actions" in wanted else run.tests:
        if all(row[name] == value for name, value in wanted.items()):
            values[row[by]].append(row[run.value])
    return {x: np.mean(values[x]) for x in sorted(values)}


def learning_curve(run):
    """{step: mean over the test tasks}."""
    return means(run, "step", split="test", episode=SHOWN_EPISODE.get(run.settings["agent"], 1))


def episode_curve(run, split="test"):
    """{episode: mean over the tasks} of the last meta-test, if it has at least three episodes."""
    curve = means(run, "episode", split=split, step=run.steps)
    return curve if len(curve) > 2 else {}


def draw_curve(ax, curves, label, color, linestyle, marker, unit=1):
    """The mean of the curves of several seeds, over their range."""
    steps = sorted(set.intersection(*map(set, curves)))
    seeds = np.array([[curve[step] for step in steps] for curve in curves])
    x = np.array(steps) / unit
    look = dict(color=color, linestyle=linestyle, linewidth=2 if len(seeds) > 1 else 1.4, zorder=3)
    look["markevery"] = 0.15 if len(x) > 10 else 1  # a fraction: equal distances on paper
    look["markerfacecolor"] = "white" if linestyle == "--" else color
    ax.plot(x, seeds.mean(axis=0), label=label, marker=marker, **look)
    if len(seeds) > 1:
        ax.fill_between(x, seeds.min(axis=0), seeds.max(axis=0), color=color, alpha=0.16, lw=1)


def meta_training(ax, curves, looks):
    """Fig. 4, 10 to 13: {key of looks: [{step: value} of each seed]}."""
    for key, seeds in curves.items():
        draw_curve(ax, seeds, *looks[key], unit=1e6)
    ax.set_xlabel("million steps")
    last = [max(curve) for key, seeds in curves.items() for curve in seeds if key != "yours"]
    if last and max(last) > 4 * min(last):
        ax.set_xscale("log", subs=[])
        ax.set_xlabel("million steps (log scale)")
        ax.xaxis.set_major_locator(LogLocator(subs=[1, 2, 5]))
    else:
        ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter("{x:g}")


def adaptation(ax, curves, looks):
    """Fig. 5, 6: {key of looks: [{episode: value} of each seed]}."""
    for key, seeds in curves.items():
        draw_curve(ax, seeds, *looks[key])
    ax.set_xlabel("episode")
    ax.set_xticks(sorted({episode for seeds in curves.values() for episode in seeds[0]}))


def log_axis(ax):
    """Logarithmic in minus the return: -20 and -30 are as far apart as -200 and -300."""
    ax.set_yscale("symlog", linthresh=5, linscale=0.2)  # linear above -5: 0 has its place, too
    ticks = -np.outer(10.0 ** np.arange(1, 5), [1, 2, 3, 5, 7])
    ax.yaxis.set_major_locator(FixedLocator(ticks.ravel()))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylabel("return (log scale)")


def draw_references(ax, references):
    """Lines at returns of simple policies, named on the right, where no curve runs."""
    highest = ax.dataLim.y1
    for y, words in references.items():
        ax.axhline(y, color=GREY, linewidth=0.8, linestyle=(0, (1, 3)))
        look = dict(color=GREY, fontsize=8, va="center", transform=ax.get_yaxis_transform())
        ax.text(1.01, y, words, **look)
    # A collapse far below them must not squeeze all curves.
    lowest = min(references, default=0)
    if lowest < 0 and highest > 1.1 * lowest:
        ax.set_ylim(1.15 * lowest, max(0.5 * lowest, ax.get_ylim()[1]))


def env_panels(envs):
    """A figure and {env: its axes}: arms below the others if there are many."""
    envs = sorted(envs, key=[*ENVS, *envs].index)
    arms = [env for env in envs if is_arm(env)]
    others = [env for env in envs if not is_arm(env)]
    rows = [others, arms] if others and arms and len(envs) > 2 else [envs]
    figure = plt.figure(figsize=(WIDTH, 2.4 * len(rows) + 0.5))
    axes = {}
    for part, row in zip(figure.subfigures(len(rows), squeeze=False).flat, rows):
        panels = part.subplots(1, len(row), squeeze=False)
        axes |= zip(row, panels.flat)
    return figure, axes


def draw_runs(name, runs, options, read, plot, which="", key=None, looks=AGENTS):
    """A panel per env, a curve per agent or other key: what `read` finds in the runs, if any."""
    if key is None:
        key = attrgetter("agent")
        runs = [run for run in runs if not run.ablation and run.agent != PEER]
    groups = group_runs([run for run in runs if read(run)], key, options)
    if not groups:
        return "needs a finished run: python trmrl.py --env halfcheetah_vel"

    figure, axes = env_panels(groups)
    for env, ax in axes.items():
        each = groups[env]
        for other in each.keys() - looks.keys():  # an agent of your own
            looks = looks | {other: (str(other), "#111111", (0, (3, 3)), "x")}
        ax.set_ylabel("return")
        if env == "halfcheetah_vel":  # its best agents differ by a few of 300 points
            log_axis(ax)
        plot(ax, {k: [read(run) for run in each[k]] for k in looks if k in each}, looks)
        if next(iter(each.values()))[0].value == "success":
            ax.set(ylabel="success rate", ylim=(-0.03, 1.03))
            ax.yaxis.set_major_formatter(PercentFormatter(1))
        draw_references(ax, REFERENCES.get("ood" if name == "ood" else env, {}))
        title(ax, ENVS.get(env, env) + which, panel_note(env, each, looks))
    sources = [run.path for each in groups.values() for seeds in each.values() for run in seeds]
    save(figure, name, options, sources)


def panel_note(env, groups, looks=AGENTS):
    """How many seeds the curves have and, for an arm, how it acted in the meta-tests."""
    counts = {key: len(seeds) for key, seeds in groups.items() if key != "yours"}
    usual = max(Counter(counts.values()).items(), key=lambda item: item[::-1], default=(1, 0))[0]
    note = plural(usual, "seed")
    if usual > 1 and not is_arm(env):
        note = f"mean and range of {note}"
    labels = looks | AGENTS  # "PEARL", not "PEARL, episode 3"
    for n in sorted(set(counts.values()) - {usual}):
        names = ", ".join(labels[k][0] for k in counts if counts[k] == n)
        note += f" ({'thin lines' if n == 1 else names}: {n})"
    if is_arm(env):
        actions = {run.tests[0]["actions"] for seeds in groups.values() for run in seeds}
        note += f", {' and '.join(sorted(actions))}"  # actions; the panels are narrow
    return note


# An ablation: its settings, and the values of them that we compare.
ABLATIONS = {
    "tfixup": (("layers", "tfixup"), [(2, True), (2, False), (12, True), (12, False)]),
    "memory": (("memory_length",), [(1,), (5,), (25,)]),
    "layers": (("layers",), [(1,), (2,), (4,), (12,)]),
    "heads": (("heads",), [(1,), (4,), (16,)]),
}
LABELS = {"memory_length": "memory length", "tfixup": "T-Fixup"}


def ablation_runs(which, runs):
    """Its own runs and those with default settings, as far as they belong to this ablation."""
    found = [run for run in runs if run.ablation in (which, "default")]
    if which == "tfixup":  # only depths that were also trained without it
        depths = {run.settings["layers"] for run in found if not run.settings["tfixup"]}
        found = [run for run in found if run.settings["layers"] in depths]
    if which == "layers":  # also those of the T-Fixup ablation that differ in nothing else
        for run in (run for run in runs if run.ablation == "tfixup" and run.settings["tfixup"]):
            others = [other for other in found if other.env == run.env]
            if all(same_settings(run, other, besides=["layers"]) for other in others):
                found.append(run)
    return found


def ablation_key(which):
    """A function of a run: what tells the curves of an ablation apart."""
    return lambda run: tuple(run.settings[name] for name in ABLATIONS[which][0])


def ablation_label(which, values):
    """(2, False) -> layers: 2, T-Fixup: off."""
    names = [LABELS.get(name, name) for name in ABLATIONS[which][0]]
    values = [("off", "on")[v] if isinstance(v, bool) else v for v in values]
    return ", ".join(f"{name}: {v}" for name, v in zip(names, values))


def ablation_looks(which, keys):
    """The lighter the line, the larger the setting; dashed without T-Fixup."""
    sizes = sorted({key[0] for key in keys})
    looks = {}
    for key in keys:
        rank = sizes.index(key[0])
        line = "--" if key[1:] == (False,) else "-"
        color = shade(rank, range(len(sizes)))
        looks[key] = ablation_label(which, key), color, line, "osD^vP"[rank % 6]
    return looks


def draw_ablation(which, runs, options):
    names, wanted = ABLATIONS[which]
    key = ablation_key(which)
    ours = ablation_runs(which, runs)
    keys = sorted({key(run) for run in ours})
    variants = [env for env, _ in {(run.env, key(run)) for run in ours}]
    ours = [run for run in ours if variants.count(run.env) > 1]
    if ours:
        how = dict(read=learning_curve, plot=meta_training, key=key)
        draw_runs(f"ablation_{which}", ours, options, **how, looks=ablation_looks(which, keys))

    missing = [k for k in wanted if k not in keys]
    if missing:
        flags = " ".join(f"{trmrl.flag(name)} {v}" for name, v in zip(names, missing[0]))
        flags = flags.replace(" --tfixup True", "").replace("--tfixup False", "--no-tfixup")
        command = f"python trmrl.py --total-steps 6e5 {flags} --run-dir runs/ablations/{which}/a1"
        return f"no run has {'; '.join(ablation_label(which, k) for k in missing)}: {command}"


def draw_compare(runs, options):
    """Your run over ours of the same env, and whether it is on track."""
    found = find_runs([options.compare])
    if len(found) != 1 or not learning_curve(found[0]):
        raise trmrl.UserError(f"--compare takes a run with a meta-test, not {options.compare}")
    yours = found[0]
    yours.agent = "yours"
    yours.ablation = ""
    ours = [run for run in runs if run.env == yours.env and not run.path.samefile(yours.path)]
    for name in options.figures or ["meta_training"]:
        (FIGURES | OTHERS)[name]([*ours, yours], options)

    curve = learning_curve(yours)
    last = max(curve)
    line = f"after {last / 1e6:.2f} M steps: {yours.value} {curve[last]:.4g}"
    alike = [run for run in ours if run.agent == yours.settings["agent"] and not run.ablation]
    others = [other for other in map(learning_curve, alike) if other and last >= min(other)]
    if others:
        reached = [np.interp(last, list(other), list(other.values())) for other in others]
        low, high = min(reached), max(reached)
        place = "behind" if curve[last] < low else "ahead" if curve[last] > high else "on track"
        line += f", ours {low:.4g} to {high:.4g}: {place}"
    print(line)


# ---- 4. Inside an agent (Fig. 2, 3, 7, 8, 9) -----------------------------------------------------
#
# Each draw_... takes trained agents and returns a figure.

TARGETS = np.array([0.5, 1.0, 1.5, 2.0, 2.5])  # velocities that figures show, m/s
TEST_TARGETS = 3 * (np.arange(20) + 0.5) / 20  # of the test tasks
TOLERANCE = 0.3  # m/s


def meet(agent, targets, episodes=1):
    """Buffer of the agent's mean actions on these tasks; always the same starting states."""
    tasks = np.reshape(targets, (len(targets), -1))
    envs = trmrl.make_tasks(agent.config.env, len(tasks))
    return trmrl.collect(agent, envs, tasks, episodes * envs.episode_length, False, trmrl.TEST_SEED)


def attention_weights(layer, e, visible):
    """alpha of Eq. 4, (M, heads, N, N). PyTorch's call in Layer.forward returns only mu, Eq. 5."""
    q = layer.query(e).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
    k = layer.key(e).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1)


@torch.no_grad()
def look_inside(agent, buffer):
    """Memories of every step after 0, ..., L layers, (L + 1, R, T, d), and attention (R, T, N).

    Attention of the last layer, mean over its heads, to the memory 0, 1, ... steps ago, or NaN.
    """
    N = agent.config.memory_length
    R, T = buffer.reward.shape
    row = torch.arange(R, device=agent.device).repeat_interleave(T)  # 0 0 0 1 1 1
    t = torch.arange(T, device=agent.device).repeat(R)  # 0 1 2 0 1 2
    tokens, current = trmrl.window(buffer, row, t, N)
    slot = torch.arange(N, device=agent.device)
    causal = slot[:, None] >= slot
    e = [agent.phi(tokens) + agent.positions]  # e^0, (R T, N, d)
    for layer in agent.transformer.layers:
        e.append(layer(e[-1], e[-1], causal))

    each = torch.arange(R * T, device=agent.device)
    memories = torch.stack([x[each, current] for x in e])
    alpha = attention_weights(layer, e[-2], causal)
    alpha = alpha[each, :, current].mean(dim=1)  # (R T, N)
    ago = current[:, None] - slot  # current slot 2: the slots 2 1 0 are 0 1 2 steps ago
    alpha = alpha.gather(1, ago.clamp(min=0)).masked_fill(ago < 0, math.nan)
    return memories.unflatten(1, (R, T)).cpu().numpy(), alpha.unflatten(0, (R, T)).cpu().numpy()


def settling_step(velocity, target):
    """The step from which a velocity (T,) stays near its target until the end, or None."""
    outside = np.flatnonzero(np.abs(velocity - target) >= TOLERANCE)
    step = int(outside.max(initial=-1)) + 1
    return step if step <= len(velocity) - 10 else None  # it stays for at least 10 steps


def draw_velocity(ax, velocity, target, steps):
    """The first steps of a velocity (T,), the band around its target, and where it settles."""
    ax.axhspan(target - TOLERANCE, target + TOLERANCE, **BAND)
    ax.plot(velocity[:steps], color=BLUE, linewidth=1.4)
    settled = settling_step(velocity, target)
    words = "not settled"
    if settled is not None:
        words = plural(settled, "step")
        ax.axvline(settled, color=RED, linewidth=0.8)
        ax.plot(settled, velocity[settled], "o", color=RED)
    ax.text(0.97, 0.08, words, transform=ax.transAxes, **NOTE)
    return settled


def online_adaptation(axes, velocity, targets, steps=60):
    """Fig. 9: velocity (B, T), a panel for each target."""
    for ax, v, target in zip(axes, velocity, targets):
        draw_velocity(ax, v, target, steps)
        ax.margins(y=0.2)
        ax.set(title=f"{target:.1f} m/s", xticks=range(0, steps + 1, 20), xlim=(-2, steps))


def draw_online_adaptation(agents, options):
    figure, axes = plt.subplots(1, 5, figsize=(WIDTH, 2.3), sharey=True)
    online_adaptation(axes, meet(agents[0], TARGETS).info["x_velocity"], TARGETS)
    axes[0].set_ylabel("velocity (m/s)")
    axes[2].set_xlabel(f"time step (band: target ± {TOLERANCE} m/s)")

    velocity = meet(agents[0], TEST_TARGETS).info["x_velocity"]
    found = [step for step in map(settling_step, velocity, TEST_TARGETS) if step is not None]
    words = f"Target found in {len(found)} of {len(velocity)} test tasks"
    if found:
        words += f": median {np.median(found):g} steps, slowest {max(found)}"
    figure.suptitle(words)
    return figure


def pca(x, k):
    """Rows x (M, d) -> the first k principal components (k, d), their shares of the variance."""
    _, s, vt = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    return vt[:k], s[:k] ** 2 / (s**2).sum()


def discriminants(memories):
    """Fisher's discriminants: the directions (d, B - 1) that tell B tasks (B, T, d) best apart."""
    centres = memories.mean(axis=1)
    _, s, vt = np.linalg.svd(np.concatenate(memories - centres[:, None]), full_matrices=False)
    whiten = vt.T / np.sqrt(s**2 + 1e-9 * (s**2).sum())  # afterwards all directions vary alike
    directions, _ = pca(centres @ whiten, len(memories) - 1)
    return whiten @ directions.T


def scatter(ax, points, targets):
    """Points (B, T, k) of B tasks, which take turns, so that no task hides another."""
    coordinates = points.T.reshape(points.shape[-1], -1)
    colors = [shade(target, targets) for target in targets] * points.shape[1]
    ax.scatter(*coordinates, s=4, color=colors, alpha=0.6, linewidth=0)


def latent(ax, points, targets):
    """Fig. 8: points (B, T, 2) of B tasks, contours with 80% of each, and lines between them."""
    low, high = points.min(axis=(0, 1)), points.max(axis=(0, 1))
    margin = 0.1 * (high - low)
    x, y = np.linspace(low - margin, high + margin, 150).T
    grid = np.stack(np.meshgrid(x, y), axis=-1)  # (150, 150, 2)
    distances = np.linalg.norm(grid[:, :, None] - points.mean(axis=1), axis=-1)  # to each mean
    scatter(ax, points, targets)
    for i, (target, task) in enumerate(zip(targets, points)):
        density = GaussianKDE(task.T)
        level = np.quantile(density(task.T), 0.2)
        heights = density(grid.reshape(-1, 2).T).reshape(150, 150)
        ax.contour(x, y, heights, [level], colors=[shade(target, targets)], linewidths=1.2)
        others = np.delete(distances, i, axis=-1).min(axis=-1)
        ax.contour(x, y, distances[..., i] - others, [0], colors=GREY, linewidths=0.8)
        top = task[:, 1].max() + 0.2 * margin[1]
        ax.text(task[:, 0].mean(), top, f"{target:.1f}", ha="center", fontsize=8)


def draw_latent(agents, options):
    """The paper's view, the same in two dimensions, and the plane that separates best."""
    tokens = meet(agents[0], TARGETS, episodes=2).token[:, :-1]
    memories = agents[0].phi(tokens).cpu().numpy()  # (B, T, d)
    first = memories[:, 20:200]  # without the first 20 steps of an episode
    second = memories[:, 220:400]
    components, shares = pca(np.concatenate(first), 3)
    plane = discriminants(first)[:, :2]

    figure = plt.figure(figsize=(WIDTH, 2.9))
    bare = dict(xticks=[], yticks=[])
    space = figure.add_subplot(1, 3, 1, projection="3d")
    scatter(space, first @ components.T, TARGETS)
    space.set(xticklabels=[], yticklabels=[], zticklabels=[])
    title(space, "three principal components", f"{shares.sum():.0%} of the variance")
    flat = figure.add_subplot(1, 3, 2, xlabel="component 1", ylabel="component 2", **bare)
    scatter(flat, first @ components[:2].T, TARGETS)
    title(flat, "two of them", f"{shares[:2].sum():.0%} of the variance")
    best = figure.add_subplot(1, 3, 3, xlabel="discriminant 1", ylabel="discriminant 2", **bare)
    latent(best, first @ plane, TARGETS)

    # A new memory, of the second episode, is recognised by the nearest mean of a task.
    distances = (second @ plane)[:, :, None] - (first @ plane).mean(axis=1)  # (B, T, B, 2)
    found = np.linalg.norm(distances, axis=-1).argmin(axis=-1)  # (B, T)
    share = (found.T == np.arange(len(TARGETS))).mean()
    title(best, "best separation (labels: m/s)", f"lines separate {share:.0%} of new memories")
    return figure


def task_distributions(ax, values, targets):
    """Fig. 2: densities of the memories (B, T) of B tasks along a line; neighbours' overlaps."""
    margin = 0.15 * np.ptp(values)
    grid = np.linspace(values.min() - margin, values.max() + margin, 400)
    densities = [GaussianKDE(row)(grid) for row in values]
    overlaps = [np.trapezoid(np.minimum(*pair), grid) for pair in itertools.pairwise(densities)]

    height = 1.15 * np.max(densities)  # from a ridge to the next
    for i, (y, target) in enumerate(zip(densities, targets)):
        base = i * height
        look = dict(color=shade(target, targets), linewidth=0, zorder=3 - 0.1 * i)
        ax.fill_between(grid, base, base + y, alpha=0.35, **look)
        ax.plot(grid, base + y, **look | dict(linewidth=1.2))
        if i < len(overlaps):
            ax.fill_between(grid, base, base + np.minimum(y, densities[i + 1]), **look)
            words = f"{overlaps[i]:.0%} shared with {targets[i + 1]:.1f} m/s"
            ax.text(grid[-1], base + 0.2 * height, words, fontsize=8)
            neighbour = shade(targets[i + 1], targets)
            ax.plot(grid, base + densities[i + 1], color=neighbour, linewidth=0.8, zorder=4)
    ax.set_yticks(np.arange(len(targets)) * height, [f"{target:.1f} m/s" for target in targets])
    ax.set(xticks=[], xlim=(grid[0], grid[-1] + 2.5 * margin), ylabel="target velocity")
    ax.set_xlabel("working memory, along the line on which task means differ most", x=0.4)
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_bounds(grid[0], grid[-1])
    ax.grid(False)
    return overlaps


def draw_task_distributions(agents, options):
    tokens = meet(agents[0], TARGETS).token[:, :-1]
    memories = agents[0].phi(tokens).cpu().numpy()  # (B, T, d)
    direction, _ = pca(memories.mean(axis=1), 1)
    figure, ax = plt.subplots(figsize=(WIDTH, 3.3))
    overlaps = task_distributions(ax, memories @ direction[0], TARGETS)
    low, high = min(overlaps), max(overlaps)
    figure.suptitle(f"Neighbouring densities overlap by {low:.0%} to {high:.0%} (dark areas)")
    return figure


def refinement_errors(agent, buffer, train):
    """Per layer: 1 - cosine similarity to e^L; share of the actions' variance that is not linear.

    A linear model is fitted to the actions of the first `train` rows and tested on the others.
    """
    memories, _ = look_inside(agent, buffer)  # (L + 1, R, T, d)
    unit = memories / np.linalg.norm(memories, axis=-1, keepdims=True)
    representation = 1 - (unit * unit[-1]).sum(axis=-1).mean(axis=(1, 2))

    action = buffer.action.cpu().numpy()
    known = np.concatenate(action[:train])
    unknown = np.concatenate(action[train:])
    regression = []
    for e in memories:
        e = np.pad(e, ((0, 0), (0, 0), (0, 1)), constant_values=1.0)  # for the bias
        solution, *_ = np.linalg.lstsq(np.concatenate(e[:train]), known)
        error = np.concatenate(e[train:]) @ solution - unknown
        regression.append(np.square(error).mean() / unknown.var(axis=0).mean())
    return representation, np.array(regression)


def draw_refinement(agents, options):
    """Fig. 7; for comparison also of untrained weights that see the same steps."""
    velocities = np.random.default_rng(trmrl.TEST_SEED).uniform(0, 3, 30)
    buffers = [meet(agent, velocities, episodes=3) for agent in agents]
    torch.manual_seed(0)
    untrained = [trmrl.TrMRL(agent.config, agent.sizes).requires_grad_(False) for agent in agents]

    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3))
    looks = ("trained", BLUE, "-", "o"), ("untrained", GREY, "--", "s")
    for group, look in zip((agents, untrained), looks):
        errors = [refinement_errors(*pair, train=20) for pair in zip(group, buffers)]
        for ax, each in zip(axes, zip(*errors)):
            draw_curve(ax, [dict(enumerate(error)) for error in each], *look)
    layers = range(len(errors[0][0]))
    for ax, ylabel in zip(axes, ("1 - cosine similarity", "share of the variance")):
        ax.set_xticks(layers, ["input", *(f"layer {i}" for i in layers[1:])])
        ax.set(ylim=(0, None), ylabel=ylabel)
    words = "n = 1 agent" if len(agents) == 1 else f"mean and range of {len(agents)} agents"
    title(axes[0], "distance to the final memory", f"{words}; the last is 0 by definition")
    title(axes[1], "action left unexplained", "by a linear model of the memories, on new tasks")
    axes[1].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def draw_attention(agents, options):
    """Fig. 3: attention to the memory 0, 1, ... steps ago: in one task, and the mean of many."""
    buffer = meet(agents[0], TEST_TARGETS)
    _, weights = look_inside(agents[0], buffer)
    _, T, N = weights.shape
    steps = min(T, max(60, 2 * N))
    full = min(T, N) - 1  # from this step on the memory is full
    task = 13
    target = TEST_TARGETS[task]
    ratios = dict(width_ratios=[3, 1], height_ratios=[1, 2])
    figure, ((top, scale), (image, bars)) = plt.subplots(2, 2, figsize=(WIDTH, 3.4), **ratios)
    top.sharex(image)
    bars.sharey(image)

    reached = draw_velocity(top, buffer.info["x_velocity"][task], target, steps)
    top.tick_params(labelbottom=False)
    top.set(ylabel="velocity\n(m/s)", title=f"one task: run at {target:.3g} m/s", ymargin=0.3)
    if reached is not None:
        image.axvline(reached, color=RED, linewidth=0.8)
    picture = image.imshow(weights[task, :steps].T, aspect="auto", origin="lower", cmap="Greys")
    picture.set_clim(0, max(2 / N, np.nanmax(weights[task, full:steps])))
    image.set(xlabel="time step of the first episode", ylabel="attention to\nthe memory of")
    image.patch.set(facecolor="white", hatch="////", edgecolor="#bbbbbb")  # no memory yet
    image.set_xlim(-0.5, steps - 0.5)
    ages = np.arange(0, N, max(1, N // 10))
    image.set_yticks(ages, ["now", *(f"{plural(age, 'step')} ago" for age in ages[1:])])
    image.grid(False)

    figure.colorbar(picture, scale, orientation="horizontal", extend="max")
    scale.set_box_aspect(0.12)
    title(scale, "attention", "last layer, mean of heads")
    scale.set_xlabel("hatched: no memory yet", fontsize=8)
    bars.barh(np.arange(N), weights[:, full:].mean(axis=(0, 1)), color=BLUE)
    bars.axvline(1 / N, color="#111111", linewidth=1.2, linestyle="--")
    bars.tick_params(labelleft=False)
    bars.set_xlabel(f"mean of {len(weights)} tasks\n(dashed: equal)")
    return figure


def find_agents(runs, env="halfcheetah_vel", count=1, layers=0):
    """Up to `count` agents alike, the best trained first; or none, and what is missing."""
    runs = [run for run in runs if run.env == env and run.agent == "trmrl"]
    if layers:  # Fig. 7: best with so many, else with several; also of an ablation
        runs = [run for run in runs if run.settings["layers"] > 1 and run.settings["tfixup"]]
    else:
        runs = [run for run in runs if not run.ablation]

    def rank(run):
        other_layers = layers and run.settings["layers"] != layers
        return not run.finished, other_layers, -run.settings["total_steps"]

    agents = defaultdict(list)  # by rank
    refused = ""
    for run in sorted(runs, key=rank):
        try:
            agent = trmrl.load_agent(run.path)
            agents[rank(run)].append(agent)
        except trmrl.UserError as error:
            refused = refused or f" (refused: {error})"
    if agents:
        return agents[min(agents)][:count], ""
    command = f"python trmrl.py --env {env}" + (f" --layers {layers}" if layers else "")
    return [], f"needs a trained agent: {command}{refused}"


def draw_agents(name, draw, runs, options, **wanted):
    """A figure of trained agents."""
    agents, missing = find_agents(runs, **wanted)
    if missing:
        return missing
    figure = draw(agents, options)
    trained, total = agents[0].trained_steps / 1e6, agents[0].config.total_steps / 1e6
    if trained < total:
        note = f"half-trained: {trained:.3g} of {total:.3g} M steps"
        figure.supxlabel(note, x=0.995, ha="right", fontsize=8, color=GREY)
    save(figure, name, options, [agent.folder for agent in agents])


# ---- 5. Film -------------------------------------------------------------------------------------

FILMS = {  # captions and tasks; the agent is not told them
    "halfcheetah_vel": {f"hidden target: {v} m/s": v for v in (0.5, 1.5, 2.5)},
    "ant_dir": {"hidden task: run forward": 1.0, "hidden task: run backward": -1.0},
}
ARM_FILM = "hidden goal 1 (green)", "hidden goal 2 (green)", "hidden goal 3 (green)"


def record(agent, envs, tasks, steps):
    """Play an episode: where all joints are (B, T, nq), and velocity or reward (B, T)."""
    arms = getattr(envs, "arms", ())
    player = trmrl.Player(agent, len(tasks), steps)
    observation, _ = envs.reset(seed=trmrl.TEST_SEED, options={"tasks": tasks})
    positions = []
    values = []
    for _ in range(steps):
        action = player.act(observation, sample=envs.sample_at_test)
        observation, reward, terminated, truncated, info = envs.step(action)
        player.observe(observation, reward, terminated, truncated)
        qpos = [arm.data.qpos for arm in arms] if arms else envs.physics[:, 1 : 1 + envs.model.nq]
        positions.append(np.array(qpos))
        values.append(info.get("x_velocity", reward))
    return np.array(positions).swapaxes(0, 1), np.array(values).T


def render(model, positions, goals):
    """Frames of a body whose qpos are the positions (T, nq), and of an arm's goals."""
    camera = "track"
    if goals:
        camera = mujoco.MjvCamera()
        camera.lookat[:] = 0, 0.75, 0.2
        camera.distance, camera.azimuth, camera.elevation = 1.0, 215, -20
    data = mujoco.MjData(model)
    frames = []
    with mujoco.Renderer(model, height=180, width=240) as renderer:
        for qpos in positions:
            data.qpos = qpos
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera=camera)
            for goal in goals:  # a green sphere
                geom = renderer.scene.geoms[renderer.scene.ngeom]
                shape = mujoco.mjtGeom.mjGEOM_SPHERE, np.full(3, 0.02), goal, np.eye(3).ravel()
                mujoco.mjv_initGeom(geom, *shape, np.array([0.1, 0.9, 0.2, 1], np.float32))
                renderer.scene.ngeom += 1
            frames.append(renderer.render())
    return frames


def photograph(models, positions, goals):
    """B models, their qpos (B, T, nq) and goals -> frames (B, T, height, width, 3)."""
    try:
        if sys.platform == "linux" and "MUJOCO_GL" not in os.environ:
            from mujoco.egl import GLContext  # needs no screen

            mujoco.gl_context.GLContext = GLContext
        return np.array([render(*each) for each in zip(models, positions, goals)])
    except Exception as error:  # whatever a missing library provokes
        needs = "film needs off-screen OpenGL, such as Debian's libegl1"
        raise trmrl.UserError(f"{needs} ({error})") from None


def film(frames, values, captions, ylabel, targets=()):
    """A picture of every second step: bodies (B, T, height, width, 3), above a curve (B, T)."""
    how = dict(sharex="row", sharey="row", height_ratios=[1.5, 1])
    figure, axes = plt.subplots(2, len(frames), figsize=(WIDTH, 3.4), **how)
    for ax, target in zip(axes[1], targets):
        ax.axhspan(target - TOLERANCE, target + TOLERANCE, **BAND)
    images = []
    lines = []
    for (top, bottom), caption, body, value in zip(axes.T, captions, frames, values):
        top.set_title(caption)
        top.axis("off")
        bottom.set_xlabel("time step")
        images.append(top.imshow(body[0]))
        lines += bottom.plot(value, color=BLUE, linewidth=2)
    axes[1, 0].set_ylabel(ylabel)

    pictures = []
    for t in range(0, values.shape[1], 2):
        for image, line, body, value in zip(images, lines, frames, values):
            image.set_data(body[t])
            line.set_data(np.arange(t + 1), value[: t + 1])
        figure.canvas.draw()
        figure.set_layout_engine("none")  # the layout of the first picture stays
        pictures.append(np.asarray(figure.canvas.buffer_rgba())[..., :3].copy())
    plt.close(figure)
    return pictures


def write_gif(path, pictures):
    """Few colours make it small; those of the last picture, where the curves are long."""
    from PIL import Image  # comes with Matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    images = [Image.fromarray(picture) for picture in pictures]
    palette = images[-1].quantize(160, method=Image.Quantize.MAXCOVERAGE)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    images[0].save(path, save_all=True, append_images=images[1:], duration=100, loop=0)


def draw_film(runs, options):
    """A film for --env or, without it, for each env that has a trained agent."""
    filmed = {run.env for run in runs if run.env.startswith((*FILMS, "ml1_"))}
    for env in [options.env] if options.env else sorted(filmed) or ["halfcheetah_vel"]:
        agents, missing = find_agents(runs, env=env)
        if missing:
            print(f"film: {missing}")
            continue
        captions = FILMS.get(env, ARM_FILM)
        envs = trmrl.make_tasks(env, len(captions), split="test")
        tasks = envs.tasks if is_arm(env) else np.reshape(list(captions.values()), (-1, 1))
        positions, values = record(agents[0], envs, tasks, steps=80)
        arms = getattr(envs, "arms", ())
        models = [arm.model for arm in arms] or [envs.model] * len(tasks)
        goals = [[arm._target_pos] for arm in arms] or [[]] * len(tasks)
        frames = photograph(models, positions, goals)

        ylabel = "reward" if arms else "velocity (m/s)"
        targets = captions.values() if env == "halfcheetah_vel" else ()
        path = options.out / f"film_{env}.gif"
        write_gif(path, film(frames, values, captions, ylabel, targets))
        report(f"{path}: from 1 run", [agents[0].folder], options)


# ---- 6. Benchmark --------------------------------------------------------------------------------

BODIES = {"halfcheetah_vel": "HalfCheetah-v5", "ant_dir": "Ant-v5"}


def rates(works, seconds=0.5, rounds=6):
    """{name: (work, steps)} -> {name: environment steps per second}, the best round."""
    speeds = dict.fromkeys(works, 0.0)
    for round in range(rounds + 1):  # in turn: other programs slow all works down alike
        for name, (work, steps) in works.items():
            calls = 0
            began = time.perf_counter()
            while (now := time.perf_counter()) - began < seconds:
                work()
                calls += 1
            if round > 0:  # round 0 is to warm up
                speeds[name] = max(speeds[name], calls * steps / (now - began))
    return speeds


def raw_physics(envs, calls=200):
    """MuJoCo alone: the same bodies under random actions, all their steps in one native call."""
    envs.reset(seed=0)
    start = envs.physics.copy()
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (envs.num_envs, calls, envs.model.nu))
    controls = np.repeat(actions, envs.frame_skip, axis=1)
    work = partial(envs.pool.rollout, envs.model, envs.thread_data, start, controls)
    return work, calls * envs.num_envs


def stepping(envs, calls=200):
    """A VectorEnv under random actions; where an episode ends, the next one begins."""
    rng = np.random.default_rng(0)
    shape = envs.action_space.shape

    def work():
        envs.reset(seed=0)
        for _ in range(calls):
            actions = rng.uniform(-1, 1, shape).astype(np.float32)
            _, _, terminated, truncated, _ = envs.step(actions)
            done = terminated | truncated
            if done.any():
                envs.reset(options={"reset_mask": done})

    return work, calls * shape[0]


def network_alone(agent):
    """Forward and backward of ten minibatches of random windows."""
    M, N = agent.config.minibatch, agent.config.memory_length
    tokens = torch.randn(M, N, agent.phi.in_features, device=agent.device)
    current = torch.full((M,), N - 1, device=agent.device)

    def work():
        for _ in range(10):
            agent.zero_grad()
            e = agent.transformer(agent.phi(tokens) + agent.positions, current)
            loss = agent.policy_head(e).mean() + agent.value_head(e).mean()
            loss.backward()
        agent.phi.weight.grad.sum().item()  # wait for the device

    return work, 10 * M / agent.config.epochs


def all_works(env, device):
    """{(group, what): (work, steps)} for the preset of an env."""
    config = trmrl.Config(env=env, device=device)
    run = trmrl.Run("", config, trmrl.make_tasks, trmrl.TrMRL)
    agent, envs = run.agent, run.envs
    generator = torch.Generator(agent.device)
    bodies = [lambda: gymnasium.make(BODIES[env])] * envs.num_envs
    by_hand = gymnasium.vector.AutoresetMode.DISABLED
    gym_envs = gymnasium.vector.SyncVectorEnv(bodies, autoreset_mode=by_hand)
    steps = envs.num_envs * envs.episode_length
    collect = partial(trmrl.collect, agent, envs, envs.tasks, envs.episode_length, True, 0)
    update = partial(agent.update, optimizer=run.optimizer, generator=generator)
    return {
        ("physics", "raw MuJoCo (limit)"): raw_physics(envs),
        ("physics", "Gymnasium's SyncVectorEnv"): stepping(gym_envs),
        ("physics", "our environments"): stepping(envs),
        ("PPO update", "forward and backward passes (limit)"): network_alone(agent),
        ("PPO update", "our update"): (partial(update, collect()), steps),
        ("whole iteration", "our iteration"): (lambda: update(collect()), steps),
    }


def draw_benchmark(runs, options):
    """Speeds, a panel for each group; ours in blue, others in grey, limits hollow."""
    env = options.env or "halfcheetah_vel"
    if env not in BODIES:
        raise trmrl.UserError(f"benchmark takes --env {' or '.join(BODIES)}, not {env}")
    speeds = rates(all_works(env, options.device))
    rows = [dict(group=k[0], what=k[1], steps_per_second=round(speeds[k])) for k in speeds]
    figure, axes = plt.subplots(3, 1, figsize=(WIDTH, 2.9), height_ratios=[3, 2, 1], sharex=True)
    for ax, (group, each) in zip(axes, itertools.groupby(rows, lambda row: row["group"])):
        for row in each:
            what = row["what"]
            color = BLUE if what.startswith("our") else "#999999"
            fill = "white" if what.endswith("(limit)") else color
            bar = ax.barh(what, row["steps_per_second"], facecolor=fill, edgecolor=color)
            ax.bar_label(bar, fmt="{:,.0f}", padding=4)
        ax.invert_yaxis()
        ax.set(title=group, xticks=[], xmargin=0.15, frame_on=False)
        ax.grid(False)
    figure.supxlabel(f"environment steps per second, {ENVS[env]}", fontsize=9.5)
    name = "benchmark" if env == "halfcheetah_vel" else f"benchmark_{env}"
    save(figure, name, options, [])
    (options.out / f"{name}.csv").write_text(trmrl.csv_text(rows, header=True))


# ---- 7. Tables -----------------------------------------------------------------------------------
#
# A document has lines <!-- table NAME --> and <!-- end -->; what is between them is written anew.
# NAME is summary, an env, ablation_<ablation>, classes or benchmark.

DOCUMENTS = Path("README.md"), Path("docs/results.md")
THRESHOLDS = {"halfcheetah_vel": -50, "ant_dir": 300}


def markdown(rows):
    """Dictionaries with equal keys, as a Markdown table."""
    if not rows:
        return "No runs yet."
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[str(cell) for cell in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def episode_cell(seeds, episode, spread=False, **wanted):
    """An episode of the last meta-test: the mean as -20.1, 814 or 97%, the range if asked."""
    wanted = {"split": "test"} | wanted
    curves = [means(run, "episode", step=run.steps, **wanted) for run in seeds]
    values = [curve.get(episode, math.nan) for curve in curves]
    if np.isnan(values).any():
        return "-"
    digits = int(abs(np.mean(values)) < 200)

    def show(x):
        return f"{x:.0%}" if seeds[0].value == "success" else f"{x:.{digits}f}"

    text = show(np.mean(values))
    if spread and len(values) > 1:
        text += f" ({show(min(values))} to {show(max(values))})"
    return text


def env_table(env, groups):
    """A row per agent: episodes of the last meta-test, steps and minutes."""
    table = []
    for agent, seeds in sorted(groups.items(), key=lambda item: [*AGENTS, *groups].index(item[0])):
        row = {"agent": AGENTS.get(agent, [agent])[0], "seeds": len(seeds)}
        row["M steps"] = f"{seeds[0].steps / 1e6:.1f}"
        row["episode 1"] = episode_cell(seeds, 1, spread=True)
        row |= {f"episode {k}": episode_cell(seeds, k) for k in (2, 3, 6)}
        if is_arm(env):
            row["episode 1, mean actions"] = episode_cell(seeds, 1, spread=True, actions="mean")
        if env == "halfcheetah_vel":
            row["episode 1, out of distribution"] = episode_cell(seeds, 1, spread=True, split="ood")
        if env in THRESHOLDS:
            row[f"M steps to {THRESHOLDS[env]}"] = steps_to(seeds, THRESHOLDS[env])
        row |= {"minutes": minutes(seeds), "CPU minutes": minutes(seeds, "cpu_seconds")}
        table.append(row | {"parameters": parameters(seeds[0])})
    return markdown(table)


def minutes(seeds, column="seconds"):
    """Minutes of a run, median over the seeds that noted them."""
    lines = [read_csv(run.path / "progress.csv")[-1] for run in seeds]
    values = [float(line[column]) / 60 for line in lines if column in line]
    return f"{np.median(values):.0f}" if values else "-"


def parameters(run):
    """How many numbers gradients change."""
    path = run.path / "agent.pt"
    weights = torch.load(path, weights_only=True).get("weights", {}) if path.exists() else {}
    kept = re.compile("normalizer|stats|positions|targets|betas|replay")  # other numbers
    count = sum(x.numel() for name, x in weights.items() if not kept.search(name))
    return f"{count:,}" if count else "-"


def steps_to(seeds, threshold):
    """Median of the steps to the first meta-test as good as that, in millions."""
    curves = [learning_curve(run) for run in seeds]
    steps = [[x for x, y in curve.items() if y >= threshold] for curve in curves]
    return f"{np.median([min(each) for each in steps]) / 1e6:.2f}" if all(steps) else "-"


def summary_table(groups):
    """A row per env, a column per agent: what Fig. 4 shows at its end."""
    agents = [agent for agent in AGENTS if any(agent in each for each in groups.values())]
    table = []
    for env in sorted(groups, key=[*ENVS, *groups].index):
        row = {"env": ENVS.get(env, env)}
        for agent in agents:
            seeds = groups[env].get(agent, [])
            text = episode_cell(seeds, SHOWN_EPISODE.get(agent, 1)) if seeds else "-"
            row[AGENTS[agent][0]] = text + (f" (n = {len(seeds)})" if 0 < len(seeds) < 3 else "")
        table.append(row | {"minutes": minutes(groups[env].get("trmrl", []))})
    return markdown(table)


def ablation_table(which, runs, options):
    """A row per env and setting: the last meta-test."""
    table = []
    groups = group_runs(ablation_runs(which, runs), ablation_key(which), options)
    for env, each in groups.items():
        for values, seeds in sorted(each.items()):
            row = {"env": ENVS.get(env, env), "setting": ablation_label(which, values)}
            row |= {"seeds": len(seeds), "episode 1": episode_cell(seeds, 1, spread=True)}
            table.append(row)
    return markdown(table)


def classes_list(path):
    """The classes of ML45-Train by their success, from the csv of a meta-test; they take turns."""
    import metaworld

    names = list(metaworld.env_dict.ML45_V3["train"])
    rows = read_csv(path) if path.exists() else []
    classes = defaultdict(list)
    for i, name in enumerate(names if rows else ()):
        success = [float(row["success"]) for row in rows if int(row["task"]) % len(names) == i]
        classes[np.mean(success)].append(name.removesuffix("-v3"))
    ordered = sorted(classes.items(), reverse=True)
    return "\n".join(f"- {x:.0%} success: {', '.join(each)}" for x, each in ordered)


def benchmark_table(folder):
    """A row per measurement, a column per env: environment steps per second."""
    table = defaultdict(dict)
    for env, name in {"halfcheetah_vel": "benchmark", "ant_dir": "benchmark_ant_dir"}.items():
        path = folder / f"{name}.csv"
        for line in read_csv(path) if path.exists() else []:
            what = f"{line['group']}: {line['what']}"
            table[what] |= {"steps per second": what}
            table[what][ENVS[env]] = f"{int(line['steps_per_second']):,}"
    return markdown(list(table.values()))


def make_table(name, groups, runs, folder, options):
    """The table of that name, from runs, from {env: {agent: runs}}, or from a csv file."""
    if name == "summary":
        return summary_table(groups)
    if name == "classes":
        return classes_list(folder / "ml45_train" / "classes.csv")
    if name in ENVS or name in groups:
        return env_table(name, groups.get(name, {}))
    if name.removeprefix("ablation_") in ABLATIONS:
        return ablation_table(name.removeprefix("ablation_"), runs, options)
    if name == "benchmark":
        return benchmark_table(folder)
    known = ["summary", "classes", "benchmark", *groups, *(f"ablation_{x}" for x in ABLATIONS)]
    raise trmrl.UserError(f"no table {name!r}; there are: {', '.join(known)}")


def write_tables(runs, options):
    folder = Path(options.runs or "results")
    groups = group_runs([r for r in runs if not r.ablation], attrgetter("agent"), options)

    def fill(found):
        table = make_table(found[2], groups, runs, folder, options)
        return f"{found[1]}\n{table}\n\n{found[3]}"

    pattern = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
    for document in filter(Path.exists, DOCUMENTS):
        text, count = pattern.subn(fill, document.read_text())
        document.write_text(text)
        print(f"{document}: {plural(count, 'table')}")


# ---- 8. Command line -----------------------------------------------------------------------------

FIG_4 = dict(read=learning_curve, plot=meta_training, looks=LABELLED)
FIG_6 = dict(read=partial(episode_curve, split="ood"), plot=adaptation, which=", 3 to 4 m/s")
FIGURES = {
    "meta_training": partial(draw_runs, "meta_training", **FIG_4),
    "fast_adaptation": partial(draw_runs, "fast_adaptation", read=episode_curve, plot=adaptation),
    "ood": partial(draw_runs, "ood", **FIG_6),
    "refinement": partial(draw_agents, "refinement", draw_refinement, count=3, layers=4),
    "latent": partial(draw_agents, "latent", draw_latent),
    "online_adaptation": partial(draw_agents, "online_adaptation", draw_online_adaptation),
    "task_distributions": partial(draw_agents, "task_distributions", draw_task_distributions),
    "attention": partial(draw_agents, "attention", draw_attention),
}
FIGURES |= {f"ablation_{which}": partial(draw_ablation, which) for which in ABLATIONS}
OTHERS = {"film": draw_film, "benchmark": draw_benchmark, "tables": write_tables}


def parse(argv):
    parser = trmrl.Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    names = ", ".join([*FIGURES, *OTHERS])
    add = parser.add_argument
    add("figures", nargs="*", metavar="FIGURE", help=f"{names} (default: all but the last three)")
    add("--runs", metavar="DIR", help="where the runs are (default: results and runs)")
    add("--out", metavar="DIR", default=Path("figures"), type=Path, help="default: figures")
    add("--pdf", action="store_true", help="also write a PDF of each picture")
    add("--verbose", action="store_true", help="list the runs of each figure and those left out")
    add("--compare", metavar="RUN", type=Path, help="draw this run over ours")
    add("--env", help="of film (default: all) and benchmark (default: halfcheetah_vel)")
    add("--device", default="auto", help="of benchmark (default: auto)")
    options = parser.parse_args(argv)
    for name in options.figures:
        if name not in FIGURES and name not in OTHERS:
            hint = trmrl.did_you_mean(name, [*FIGURES, *OTHERS])
            raise trmrl.UserError(f"unknown figure {name!r}{hint}; there are: {names}")
    if options.runs and not Path(options.runs).is_dir():
        raise trmrl.UserError(f"there is no folder {options.runs}")
    return options


def main(argv=None):
    """Exit status: 0, 1 if a figure failed, 2 for a user's mistake."""
    plt.switch_backend("Agg")
    plt.rcParams.update(STYLE)
    torch.set_num_threads(1)
    status = 0
    try:
        options = parse(argv)
        ours = options.compare or options.figures == ["tables"]
        default = ["results"] if ours else ["results", "runs"]
        runs = find_runs([options.runs] if options.runs else default)
        if options.compare:
            draw_compare(runs, options)
            return 0
        for name in options.figures or FIGURES:
            try:
                missing = (FIGURES | OTHERS)[name](runs, options)
                if missing:
                    print(f"{name}: {missing}")
            except (trmrl.UserError, OSError):  # would stop the other figures, too
                raise
            except Exception as error:
                print(f"{name}: not drawn ({error!r})", file=sys.stderr)
                status = 1
    except (trmrl.UserError, OSError) as error:
        print(f"plots.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, trmrl.UserError) else 1
    return status


if __name__ == "__main__":
    sys.exit(main())
