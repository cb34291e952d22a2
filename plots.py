# SPDX-License-Identifier: MIT
"""Every figure of the paper, benchmarks, and the tables of the documents, all from run folders.

    python plots.py                                     # every figure that the runs at hand allow
    python plots.py meta_training --runs runs --pdf     # one figure of your own runs, also as PDF
    python plots.py --compare runs/ant_dir/trmrl-seed7  # your run over ours: is it on track?
    python plots.py film --env ant_dir                  # an animation of an agent that adapts
    python plots.py benchmark --env ant_dir             # speed, beside the limits of this machine
    python plots.py scaling                             # speed for other sizes of the agent
    python plots.py tables                              # the tables of docs/results.md

draw_... finds the data of a figure and draws it; `save` writes the picture.

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
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import gymnasium
import matplotlib.pyplot as plt
import mujoco
import numpy as np
import torch
from matplotlib.mlab import GaussianKDE

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
    "figure.titlesize": 11,
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
    "pearl": ("PEARL", "#c07fd8", (0, (1, 1)), "v"),
    "maml": ("MAML", "#8c6d1f", (0, (5, 1, 1, 1, 1, 1)), "P"),
    "oracle": ("oracle", "#333333", ":", "^"),
    "yours": ("your run", RED, "-", "*"),
}
ENVS = {"halfcheetah_vel": "HalfCheetahVel", "ant_dir": "AntDir"}
ENVS |= {"ml1_reach": "ML1-Reach", "ml1_push": "ML1-Push", "ml45_train": "ML45-Train"}


def shade(target, targets):
    """Dark for slow, light for fast: the order shows without colour, too."""
    return plt.cm.viridis(0.9 * (target - min(targets)) / max(np.ptp(targets), 1e-9))


def save(figure, name, options, sources):
    """Write the picture, with one legend for all panels, and say what it was made from."""
    legend = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            legend.setdefault(label, handle)
    if legend:
        letters = sum(len(label) + 8 for label in legend)
        lines = math.ceil(letters / (11 * WIDTH))
        columns = math.ceil(len(legend) / lines)
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
    agent: str
    settings: dict  # config.json
    rows: list  # eval.csv
    yours: bool = False  # drawn over ours by --compare

    @property
    def ablation(self):
        """Runs of an ablation are in .../ablations/<ablation>/<run>."""
        parts = self.path.resolve().parts
        return parts[-2] if parts[-3:-2] == ("ablations",) else ""

    @property
    def steps(self):
        return max((row["step"] for row in self.rows), default=0)

    @property
    def finished(self):
        return self.steps >= self.settings["total_steps"]

    @property
    def value(self):
        """What is shown of a family: the success rate if it has one, else the return."""
        return "return" if all(np.isnan(row["success"]) for row in self.rows) else "success"

    @cached_property
    def tests(self):
        """Rows with the family's usual actions: sampled ones on arms, else mean ones."""
        usual = "sampled" if is_arm(self.env) else "mean"
        return [row for row in self.rows if row["actions"] == usual] or self.rows


def agent_of(run):
    """The key of AGENTS that says how a run is drawn."""
    return "yours" if run.yours else run.agent


def is_arm(env):
    return env.startswith(("ml1_", "ml45_"))


def read_csv(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def read_run(path):
    content = json.loads((path / "config.json").read_text())
    settings = asdict(trmrl.Config(env=content["env"])) | content
    rows = []
    for line in read_csv(path / "eval.csv"):
        row = {name: int(line[name]) for name in ("step", "task", "episode")}
        row |= {name: float(line[name] or "nan") for name in ("return", "success")}
        row |= {"split": line["split"], "actions": line.get("actions") or "mean"}
        rows.append(row)
    return Run(path, content["env"], content.get("agent", "trmrl"), settings, rows)


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


def why_not(run, seeds):
    """Why a run does not belong to the curve of these seeds; '' if it does."""
    if not run.rows:
        return "it has no meta-test yet"
    first = seeds[0] if seeds else run
    if first.finished and not run.finished:
        return "it is not finished"
    own = {"seed", "device", "threads", "run_dir", "versions", "compile"}
    shared = (run.settings.keys() & first.settings.keys()) - own
    if any(run.settings[name] != first.settings[name] for name in shared):
        return f"its settings are not those of {first.path}"
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
        count = plural(len(left_out), "run")
        report(f"left out: {count} (--verbose lists them)", left_out, options)
    return groups


# ---- 3. Learning curves (Fig. 4, 5, 6 and 10 to 13) ----------------------------------------------

# PEARL and MAML adapt from one episode to the next, so Fig. 4 shows their third episode.
SHOWN_EPISODE = {"pearl": 3, "maml": 3}
LABELLED = dict(AGENTS)
for agent, episode in SHOWN_EPISODE.items():
    LABELLED[agent] = f"{AGENTS[agent][0]}, episode {episode}", *AGENTS[agent][1:]

# Returns worth knowing: {env: {return: (its meaning, where the words stand)}}.
REFERENCES = {
    "halfcheetah_vel": {-300: ("standing still", "top"), -150: ("no adaptation", "bottom")},
    "ant_dir": {200: ("standing still", "bottom")},
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
    return means(run, "step", split="test", episode=SHOWN_EPISODE.get(run.agent, 1))


def episode_curve(run, split="test"):
    """{episode: mean over the tasks} of the last meta-test, if it has several episodes."""
    curve = means(run, "episode", split=split, step=run.steps)
    return curve if len(curve) > 1 else {}


def draw_curve(ax, curves, label, color, linestyle, marker, unit=1, lines=False):
    """The mean of the curves of several seeds, over their range or over thin lines of each."""
    x = sorted(set.intersection(*map(set, curves)))
    seeds = np.array([[curve[at] for at in x] for curve in curves])
    x = np.array(x) / unit
    width = 2 if len(seeds) > 1 else 1
    style = dict(color=color, linestyle=linestyle, linewidth=width, marker=marker)
    every = 0.15 if len(x) > 10 else 1  # a fraction: equal distances on paper
    ax.plot(x, seeds.mean(axis=0), label=label, markevery=every, zorder=3, **style)
    if lines:
        ax.plot(x, seeds.T, color=color, linewidth=0.6, alpha=0.6)
    elif len(seeds) > 1:
        low, high = seeds.min(axis=0), seeds.max(axis=0)
        ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def meta_training(ax, curves, looks, env="", lines=False):
    """Fig. 4, 10 to 13: {key of looks: [{step: value} of each seed]}."""
    for key, seeds in curves.items():
        draw_curve(ax, seeds, *looks[key], unit=1e6, lines=lines)

    ax.set_xlabel("million steps")
    last = [max(curve) for key, seeds in curves.items() for curve in seeds if key != "yours"]
    if last and max(last) > 4 * min(last):
        ax.set_xscale("log")
    else:
        ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter("{x:g}")

    # The collapse of one seed must not squeeze all curves.
    low, high = ax.get_ylim()
    if env == "halfcheetah_vel" and high > -340:
        low, high = ax.set_ylim(-340, max(high, -250))
    for y, (words, place) in REFERENCES.get(env, {}).items():
        if low < y < high:
            ax.axhline(y, color=GREY, linewidth=0.8, linestyle=(0, (1, 3)))
            look = NOTE | dict(color=GREY, fontsize=8, va=place, zorder=2)
            ax.text(0.99, y, words, transform=ax.get_yaxis_transform(), **look)


def adaptation(ax, curves, looks, env=""):
    """Fig. 5, 6: {key of looks: [{episode: value} of each seed]}."""
    for key, seeds in curves.items():
        draw_curve(ax, seeds, *looks[key])
    ax.set_xlabel("episode")
    ax.set_xticks(sorted({episode for seeds in curves.values() for episode in seeds[0]}))
    ax.margins(y=0.15)


def env_panels(envs):
    """A figure and {env: its axes}: locomotion in one row, arms in the next if there are many."""
    envs = sorted(envs, key=[*ENVS, *envs].index)
    arms = [env for env in envs if is_arm(env)]
    others = [env for env in envs if not is_arm(env)]
    rows = [others, arms] if len(envs) > 3 and arms and others else [envs]
    figure = plt.figure(figsize=(WIDTH, 2.4 * len(rows) + 0.5))
    axes = {}
    for grid, row in zip(figure.add_gridspec(len(rows), 1), rows):
        for cell, env in zip(grid.subgridspec(1, len(row)), row):
            axes[env] = figure.add_subplot(cell)
    return figure, axes


def draw_runs(name, runs, options, read, plot, which, key=agent_of, looks=AGENTS):
    """A panel per env, a curve per key: what `read` finds in the runs, if anything."""
    groups = group_runs([run for run in runs if read(run)], key, options)
    if not groups:
        return "needs a finished run: python trmrl.py --env halfcheetah_vel"
    for each in groups.values():
        for other in each.keys() - looks.keys():  # an agent of your own
            looks = looks | {other: (str(other), "#111111", (0, (3, 3)), "x")}

    figure, axes = env_panels(list(groups))
    sources = []
    labelled = set()
    for env, ax in axes.items():
        seeds = {k: groups[env][k] for k in looks if k in groups[env]}
        curves = {k: [read(run) for run in each] for k, each in seeds.items()}
        plot(ax, curves, looks, env=env)
        ax.set_title(panel_title(env, seeds))
        sources += [run for each in seeds.values() for run in each]

        value = sources[-1].value
        if value == "success":
            ax.set_ylim(-0.03, max(0.5, ax.dataLim.y1 + 0.05))
            ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        if value not in labelled:
            words = {"return": "return", "success": "success rate"}
            ax.set_ylabel(f"{words[value]}, {which}")
            labelled.add(value)
    save(figure, name, options, [run.path for run in sources])


def panel_title(env, seeds):
    """The env, how many seeds there are, and whether an arm was tested with mean actions."""
    counts = {len(runs) for key, runs in seeds.items() if key != "yours"}
    several = [str(n) for n in sorted(counts) if n > 1]
    notes = [f"{' to '.join(several)} seeds"] if several else []
    if 1 in counts:
        notes.append("thin: n = 1" if several else "n = 1")
    tests = [run.tests[0]["actions"] for runs in seeds.values() for run in runs]
    if is_arm(env) and "mean" in tests:
        notes.append("mean actions")
    return f"{ENVS.get(env, env)}\n{', '.join(notes)}"


def draw_learning(name, read, plot, which, looks, runs, options):
    """Fig. 4, 5, 6."""
    ours = [run for run in runs if run.yours or not run.ablation]
    return draw_runs(name, ours, options, read, plot, which, looks=looks)


# An ablation: its settings, and the values of them that we compare.
ABLATIONS = {
    "tfixup": (("layers", "tfixup"), [(2, True), (2, False), (12, True), (12, False)]),
    "memory": (("memory_length",), [(1,), (5,), (25,)]),
    "layers": (("layers",), [(1,), (2,), (4,), (12,)]),
    "heads": (("heads",), [(1,), (4,), (16,)]),
}
LABELS = {"layers": "L = {}", "memory_length": "N = {}", "heads": "heads: {}"}
LABELS["tfixup"] = "T-Fixup: {}"


def ablation_runs(which, runs):
    """Its own runs, those with default settings and, of T-Fixup's, those that differ in layers."""
    found = [run for run in runs if run.ablation in (which, "default")]
    if which == "layers":
        found += [run for run in runs if run.ablation == "tfixup" and run.settings["tfixup"]]
    return found


def ablation_key(which):
    """A function of a run: what tells the curves of an ablation apart."""
    return lambda run: tuple(run.settings[name] for name in ABLATIONS[which][0])


def ablation_label(which, values):
    """(2, False) -> L = 2, T-Fixup: off."""
    values = [("off", "on")[v] if isinstance(v, bool) else v for v in values]
    return ", ".join(LABELS[name].format(v) for name, v in zip(ABLATIONS[which][0], values))


def draw_ablation(which, runs, options):
    names, wanted = ABLATIONS[which]
    key = ablation_key(which)
    ours = ablation_runs(which, runs)
    keys = sorted({key(run) for run in ours})
    variants = [env for env, _ in {(run.env, key(run)) for run in ours}]
    ours = [run for run in ours if variants.count(run.env) > 1]
    if ours:
        # The default looks the same in all ablations.
        default = tuple(getattr(trmrl.Config(), name) for name in names)
        order = sorted(keys, key=lambda k: k != default)
        styles = dict(zip(order, itertools.cycle(AGENTS.values())))
        looks = {k: (ablation_label(which, k), *styles[k][1:]) for k in keys}
        how = learning_curve, partial(meta_training, lines=True), "episode 1"
        draw_runs(f"ablation_{which}", ours, options, *how, key=key, looks=looks)

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
    yours.yours = True
    ours = [run for run in runs if run.env == yours.env and not run.path.samefile(yours.path)]
    for name in options.figures or ["meta_training"]:
        (FIGURES | OTHERS)[name]([*ours, yours], options)

    curve = learning_curve(yours)
    last = max(curve)
    line = f"after {last / 1e6:.2f} M steps: {yours.value} {curve[last]:.4g}"
    reached = []
    for run in [run for run in ours if run.agent == yours.agent and not run.ablation]:
        points = learning_curve(run)
        if points and last >= min(points):
            reached.append(np.interp(last, list(points), list(points.values())))
    if reached:
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
    steps = episodes * envs.episode_length
    return trmrl.collect(agent, envs, tasks, steps, False, trmrl.TEST_SEED)


def attention_weights(layer, query_memories, e, visible):
    """Eq. 4, alpha (M, heads, Q, N); PyTorch's call in Layer.forward returns only mu, Eq. 5."""
    q = layer.query(query_memories).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
    k = layer.key(e).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1)


@torch.no_grad()
def look_inside(agent, buffer):
    """Memories of every step after 0, ..., L layers, (L + 1, R, T, d), and attention (R, T, N).

    The attention is that of the last layer, mean over its heads, to the memory 0, 1, ... steps ago;
    NaN where there is no such memory.
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
    alpha = attention_weights(agent.transformer.layers[-1], e[-2], e[-2], causal)
    alpha = alpha[each, :, current].mean(dim=1)  # (R T, N)
    ago = current[:, None] - slot  # current slot 2: the slots 2 1 0 are 0 1 2 steps ago
    alpha = alpha.gather(1, ago.clamp(min=0)).masked_fill(ago < 0, math.nan)
    return memories.unflatten(1, (R, T)).cpu().numpy(), alpha.unflatten(0, (R, T)).cpu().numpy()


def settled(velocity, target):
    """Steps until the velocity (T,) stays near its target; None if for less than 10 steps."""
    away = np.flatnonzero(np.abs(velocity - target) >= TOLERANCE)
    steps = int(away.max(initial=-1)) + 1
    return None if steps > len(velocity) - 10 else steps


def online_adaptation(axes, velocity, targets, steps=60):
    """Fig. 9: velocity (B, T), a panel for each target; returns the steps until each settles."""
    found = []
    for ax, v, target in zip(axes, velocity[:, :steps], targets):
        ax.axhspan(target - TOLERANCE, target + TOLERANCE, **BAND)
        ax.plot(v, color=BLUE, linewidth=1.4)
        reached = settled(v, target)
        words = "not settled"
        if reached is not None:
            words = plural(reached, "step")
            found.append(reached)
            ax.axvline(reached, color=RED, linewidth=0.8)
            ax.plot(reached, v[reached], "o", color=RED)
        ax.text(0.97, 0.04, words, transform=ax.transAxes, **NOTE)
        ax.margins(y=0.2)
        ax.set_title(f"{target:.1f} m/s")
        ax.set_xticks(range(0, steps + 1, 20))
        ax.set_xlim(-2, steps)
    return found


def draw_online_adaptation(agents, options):
    figure, axes = plt.subplots(1, 5, figsize=(WIDTH, 2.3), sharey=True)
    velocity = meet(agents[0], TARGETS).info["x_velocity"]
    found = online_adaptation(axes, velocity, TARGETS)
    axes[0].set_ylabel("velocity (m/s)")
    axes[2].set_xlabel(f"time step of the first episode (band: target ± {TOLERANCE} m/s)")
    within = f" within {plural(max(found), 'time step')}" if found else ""
    figure.suptitle(f"{len(found)} of {len(TARGETS)} hidden target velocities found{within}")
    return figure


def pca(x, k):
    """Rows x (M, d) -> the first k principal components (k, d), their shares of the variance."""
    _, s, vt = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    return vt[:k], s[:k] ** 2 / (s**2).sum()


def discriminants(memories):
    """Fisher's discriminants: the directions (d, B - 1) that tell B tasks (B, T, d) best apart."""
    centres = memories.mean(axis=1)
    within = np.cov(np.concatenate(memories - centres[:, None]).T)
    within += 1e-9 * np.trace(within) * np.eye(len(within))
    whiten = np.linalg.cholesky(np.linalg.inv(within))  # afterwards every direction varies alike
    directions, _ = pca(centres @ whiten, len(memories) - 1)
    return whiten @ directions.T


def density(points, at):
    """Gaussian kernel density, by Scott's rule, of points (n, k) at places (m, k)."""
    return GaussianKDE(points.T)(at.T)


def distances(points, centres):
    """Of points (..., k) to B centres (B, k): (..., B)."""
    return np.linalg.norm(points[..., None, :] - centres, axis=-1)


def latent(ax, points, targets, borders=False):
    """Fig. 8: points (B, T, 2) of B tasks; a contour holds 80 % of the points of its task.

    The borders are lines between the places that are nearest to the mean of one task.
    """
    low, high = points.min(axis=(0, 1)), points.max(axis=(0, 1))
    margin = 0.1 * (high - low)
    x, y = np.linspace(low - margin, high + margin, 80).T
    grid = np.stack(np.meshgrid(x, y), axis=-1)  # (80, 80, 2)
    away = distances(grid, points.mean(axis=1))  # (80, 80, B)
    for i, (target, task) in enumerate(zip(targets, points)):
        color = shade(target, targets)
        ax.scatter(*task.T, s=4, color=color, alpha=0.6, linewidth=0)
        level = np.quantile(density(task, task), 0.2)
        heights = density(task, grid.reshape(-1, 2)).reshape(80, 80)
        ax.contourf(x, y, heights, [level, np.inf], colors=[color], alpha=0.25)
        ax.contour(x, y, heights, [level], colors=[color], linewidths=1.2)
        ax.plot([], [], "o", color=color, label=f"{target:.1f} m/s")
        if borders:
            others = np.delete(away, i, axis=-1).min(axis=-1)
            ax.contour(x, y, away[..., i] - others, [0], colors=[GREY], linewidths=0.6)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def draw_latent(agents, options):
    """The paper's view, the plane of largest variance, and the plane that separates best."""
    tokens = meet(agents[0], TARGETS, episodes=2).token[:, :-1]
    memories = agents[0].phi(tokens).cpu().numpy()  # (B, T, d)
    first, second = memories[:, 20:200], memories[:, 220:400]  # without the first 20 steps
    components, shares = pca(np.concatenate(first), 3)
    points = first @ components.T  # (B, T, 3)

    # A memory of the second episode belongs to the task with the nearest mean.
    plane = discriminants(first)[:, :2]
    nearest = distances(second @ plane, first.mean(axis=1) @ plane).argmin(axis=-1)  # (B, T)
    separated = (nearest == np.arange(len(TARGETS))[:, None]).mean()

    figure = plt.figure(figsize=(WIDTH, 2.9))
    left = figure.add_subplot(1, 3, 1, projection="3d")
    middle = figure.add_subplot(1, 3, 2)
    right = figure.add_subplot(1, 3, 3)
    for target, task in zip(TARGETS, points):
        left.scatter(*task.T, s=3, color=shade(target, TARGETS), depthshade=False)
    left.set(xticklabels=[], yticklabels=[], zticklabels=[])
    left.set_title(f"principal components 1 to 3\n({shares.sum():.0%} of the variance)", loc="left")
    latent(middle, points[..., :2], TARGETS)
    middle.set_title(f"components 1 and 2\n({shares[:2].sum():.0%} of the variance)")
    latent(right, first @ plane, TARGETS, borders=True)
    right.set_title(f"planes fitted to the tasks:\n{separated:.0%} of new memories")
    return figure


def task_distributions(ax, values, targets):
    """Fig. 2: densities of the memories (B, T) of B tasks along a line; neighbours' overlaps."""
    margin = 0.15 * np.ptp(values)
    grid = np.linspace(values.min() - margin, values.max() + margin, 400)
    densities = [density(row[:, None], grid[:, None]) for row in values]
    overlaps = [np.trapezoid(np.minimum(*pair), grid) for pair in itertools.pairwise(densities)]

    height = 0.6 * np.max(densities)  # from a ridge to the next
    for i, (y, target) in enumerate(zip(densities, targets)):
        ridge = ax.fill_between(grid, i * height, i * height + y, alpha=0.85)
        ridge.set(facecolor=shade(target, targets), edgecolor="white", zorder=3 - 0.1 * i)
    right = dict(transform=ax.get_yaxis_transform(), ha="right", fontsize=8, color=GREY)
    for i, overlap in enumerate(overlaps):
        ax.text(1.0, (i + 0.45) * height, f"{overlap:.0%} shared", **right)
    ax.set_yticks(np.arange(len(targets)) * height, [f"{target:.1f} m/s" for target in targets])
    ax.set(xticks=[], xlim=(grid[0], grid[-1] + 2 * margin))
    ax.spines["left"].set_visible(False)
    ax.grid(False)
    return overlaps


def draw_task_distributions(agents, options):
    tokens = meet(agents[0], TARGETS).token[:, :-1]
    memories = agents[0].phi(tokens).cpu().numpy()  # (B, T, d)
    direction, _ = pca(memories.mean(axis=1), 1)
    figure, ax = plt.subplots(figsize=(WIDTH, 2.9))
    overlaps = task_distributions(ax, memories @ direction[0], TARGETS)
    ax.set_xlabel("memories along the direction between the means of the tasks")
    low, high = min(overlaps), max(overlaps)
    figure.suptitle(f"Neighbouring tasks share {low:.0%} to {high:.0%} of their densities")
    return figure


def refinement_errors(agent, buffer, train):
    """Per layer: 1 - cosine similarity to e^L, and the error of regressing the mean action."""
    memories, _ = look_inside(agent, buffer)  # (L + 1, R, T, d)
    action = buffer.action.cpu().numpy()
    unit = memories / np.linalg.norm(memories, axis=-1, keepdims=True)
    representation = 1 - (unit * unit[-1]).sum(axis=-1).mean(axis=(1, 2))
    regression = []
    for e in memories:
        e = np.pad(e, ((0, 0), (0, 0), (0, 1)), constant_values=1.0)  # for the bias
        x, y = np.concatenate(e[:train]), np.concatenate(action[:train])
        solution, *_ = np.linalg.lstsq(x, y)
        regression.append(np.square(e[train:] @ solution - action[train:]).mean())
    return representation, np.array(regression)


def draw_refinement(agents, options):
    """Fig. 7."""
    velocities = np.random.default_rng(trmrl.TEST_SEED).uniform(0, 3, 30)
    errors = [refinement_errors(a, meet(a, velocities, episodes=3), train=20) for a in agents]
    errors = np.array(errors)  # (agents, 2, L + 1)
    layers = range(errors.shape[-1])
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.5))
    for i, ax in enumerate(axes):
        curves = [dict(zip(layers, agent[i])) for agent in errors]
        draw_curve(ax, curves, None, BLUE, "-", "o")
        ax.set_xticks(layers, [r"$\phi$", *layers[1:]])
        ax.set_xlabel("memory after layer")
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("1 - cosine similarity\nto the last layer")
    axes[1].set_ylabel("squared error of a linear\nmodel of the action")
    words = "n = 1" if len(agents) == 1 else f"mean and range of {len(agents)} agents"
    axes[1].set_title(words, loc="right", fontsize=8, color=GREY)
    return figure


def draw_attention(agents, options):
    """Fig. 3: attention to the memory 0, 1, ... steps ago: in one task, and the mean of many."""
    buffer = meet(agents[0], TEST_TARGETS)
    _, weights = look_inside(agents[0], buffer)
    _, T, N = weights.shape
    steps = min(T, max(60, 2 * N))
    full = min(T, N) - 1  # from this step on the memory is full
    shown = 13
    target = TEST_TARGETS[shown]
    velocity = buffer.info["x_velocity"][shown, :steps]
    cells = [["top", "."], ["image", "bars"]]
    ratios = dict(width_ratios=[3, 1], height_ratios=[1, 2])
    figure, axes = plt.subplot_mosaic(cells, figsize=(WIDTH, 3.2), **ratios)
    top, image, bars = axes["top"], axes["image"], axes["bars"]
    top.sharex(image)
    bars.sharey(image)
    top.axhspan(target - TOLERANCE, target + TOLERANCE, **BAND)
    top.plot(velocity, color=BLUE)
    top.margins(y=0.5)
    top.set(ylabel="velocity\n(m/s)", title=f"{target:.3g} m/s; below: attention (beige: none yet)")
    reached = settled(velocity, target)
    words = "not settled"
    if reached is not None:
        words = f"settled after {plural(reached, 'step')}"
        for ax in (top, image):
            ax.axvline(reached - 0.5, color=RED, linewidth=1.2)
    top.text(0.99, 0.08, words, transform=top.transAxes, **NOTE)

    picture = image.imshow(weights[shown, :steps].T, aspect="auto", origin="lower", cmap="Greys")
    picture.set_clim(0, np.nanmax(weights[shown, full:steps]))
    image.set(xlabel="time step of the first episode", ylabel="age of the memory\n(steps)")
    image.set_facecolor("#f3dcc8")  # no memory yet
    image.set_xlim(-0.5, steps - 0.5)
    image.set_yticks(np.arange(0, N, max(1, N // 10)))
    image.grid(False)
    bars.barh(np.arange(N), weights[:, full:].mean(axis=(0, 1)), color=BLUE)
    bars.set(xlabel="attention", title=f"mean of {len(weights)} tasks")
    return figure


def find_agents(runs, env="halfcheetah_vel", count=1, layers=0):
    """Up to `count` agents alike, the best trained first; or none, and what is missing.

    Fig. 7 asks for `layers`: it also takes agents of an ablation, and any with several layers.
    """
    runs = [run for run in runs if run.env == env and run.agent == "trmrl"]
    if layers:
        runs = [run for run in runs if run.settings["layers"] > 1 and run.settings["tfixup"]]
    else:
        runs = [run for run in runs if not run.ablation]

    def rank(run):
        other_layers = layers and run.settings["layers"] != layers
        return not run.finished, other_layers, -run.settings["total_steps"]

    found = []
    refused = []
    for run in sorted(runs, key=rank):
        try:
            found.append((rank(run), trmrl.load_agent(run.path)))
        except trmrl.UserError as error:
            refused.append(str(error))
    agents = [agent for kind, agent in found if kind == found[0][0]]
    if agents:
        return agents[:count], ""
    command = f"python trmrl.py --env {env}" + (f" --layers {layers}" if layers else "")
    why = f" (refused {plural(len(refused), 'run')}: {refused[0]})" if refused else ""
    return [], f"needs a trained agent: {command}{why}"


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

FILMS = {  # captions and tasks
    "halfcheetah_vel": {f"hidden target: {v} m/s": v for v in (0.5, 1.5, 2.5)},
    "ant_dir": {"hidden task: run forward": 1.0, "hidden task: run backward": -1.0},
}


def record(agent, envs, tasks, steps):
    """Play an episode: where all joints are (B, T, nq), and velocity or reward (B, T)."""
    player = trmrl.Player(agent, len(tasks), steps)
    observation, _ = envs.reset(seed=trmrl.TEST_SEED, options={"tasks": tasks})
    positions = []
    values = []
    for _ in range(steps):
        action = player.act(observation, sample=envs.sample_at_test)
        observation, reward, terminated, truncated, info = envs.step(action)
        player.observe(observation, reward, terminated, truncated)
        if hasattr(envs, "arms"):
            positions.append([arm.data.qpos.copy() for arm in envs.arms])
        else:
            positions.append(envs.physics[:, 1 : 1 + envs.model.nq])
        values.append(info.get("x_velocity", reward))
    return np.array(positions).swapaxes(0, 1), np.array(values).T


def render(model, positions, goals):
    """Frames of a body whose qpos are the positions (T, nq), and of an arm's goals."""
    camera = "track"
    if goals:
        camera = mujoco.MjvCamera()
        camera.lookat[:] = 0, 0.7, 0.15
        camera.distance, camera.azimuth, camera.elevation = 1.4, 215, -25
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
        lines += bottom.plot(value, color=BLUE)
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
    from PIL import Image  # comes with Matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    images = [Image.fromarray(picture) for picture in pictures]
    images = [image.quantize(64, dither=Image.Dither.NONE) for image in images]  # to make it small
    images[0].save(path, save_all=True, append_images=images[1:], duration=100, loop=0)


def draw_film(runs, options):
    env = options.env
    agents, missing = find_agents(runs, env=env)
    if missing:
        return missing
    tasks = FILMS.get(env, {"hidden goal 1": 0, "hidden goal 2": 0, "hidden goal 3": 0})
    targets = list(tasks.values())
    envs = trmrl.make_tasks(env, len(tasks), split="test")
    arms = getattr(envs, "arms", ())
    hidden = envs.tasks if arms else np.reshape(targets, (-1, 1))
    positions, values = record(agents[0], envs, hidden, steps=80)
    models = [arm.model for arm in arms] or [envs.model] * len(tasks)
    goals = [[arm._target_pos] for arm in arms] or [[]] * len(tasks)
    frames = photograph(models, positions, goals)
    ylabel = "reward" if arms else "velocity (m/s)"
    bands = targets if env == "halfcheetah_vel" else ()
    path = options.out / f"film_{env}.gif"
    write_gif(path, film(frames, values, list(tasks), ylabel, bands))
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

    def work():
        envs.pool.rollout(envs.model, envs.thread_data, start, controls)

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


def all_works(env, device, **changes):
    """{(group, what): (work, steps)} for the preset of an env."""
    config = trmrl.Config(env=env, device=device, **changes)
    run = trmrl.Run("", config, trmrl.make_tasks, trmrl.TrMRL)
    agent, envs = run.agent, run.envs
    generator = torch.Generator(agent.device)
    bodies = [lambda: gymnasium.make(BODIES[env])] * envs.num_envs
    by_hand = gymnasium.vector.AutoresetMode.DISABLED
    gym_envs = gymnasium.vector.SyncVectorEnv(bodies, autoreset_mode=by_hand)
    steps = envs.num_envs * envs.episode_length

    def collect():
        return trmrl.collect(agent, envs, envs.tasks, envs.episode_length, True, 0)

    def update(buffer):
        agent.update(buffer, run.optimizer, generator)

    return {
        ("physics", "raw MuJoCo"): raw_physics(envs),
        ("physics", "SyncVectorEnv of gym.make"): stepping(gym_envs),
        ("physics", "our tasks"): stepping(envs),
        ("network", "network alone"): network_alone(agent),
        ("network", "our update"): (partial(update, collect()), steps),
        ("end to end", "our iteration"): (lambda: update(collect()), steps),
    }


def draw_benchmark(runs, options):
    """Speeds, a panel for each group; ours in blue, limits and others in grey."""
    if options.env not in BODIES:
        raise trmrl.UserError(f"benchmark takes --env {' or '.join(BODIES)}, not {options.env}")
    rows = []
    for (group, what), speed in rates(all_works(options.env, options.device)).items():
        rows.append(dict(group=group, what=what, steps_per_second=speed))

    figure, axes = plt.subplots(3, 1, figsize=(WIDTH, 2.9), height_ratios=[3, 2, 1], sharex=True)
    for ax, (group, each) in zip(axes, itertools.groupby(rows, lambda row: row["group"])):
        speeds = {row["what"]: row["steps_per_second"] for row in each}
        colors = [BLUE if what.startswith("our") else "#bbbbbb" for what in speeds]
        bars = ax.barh(list(speeds), list(speeds.values()), color=colors)
        ax.bar_label(bars, fmt="{:,.0f}", padding=4)
        ax.invert_yaxis()
        ax.set(title=group, xticks=[])
        ax.margins(x=0.15)
        ax.grid(False)
        ax.spines[:].set_visible(False)
    figure.supxlabel(f"environment steps per second, {ENVS[options.env]}", fontsize=9.5)
    name = "benchmark" if options.env == "halfcheetah_vel" else f"benchmark_{options.env}"
    save(figure, name, options, [])
    (options.out / f"{name}.csv").write_text(trmrl.csv_text(rows, header=True))


SIZES = {"memory_length": (1, 5, 10, 25, 50), "layers": (1, 2, 4, 8, 12)}
SIZES |= {"d_model": (32, 64, 128, 256), "num_tasks": (5, 10, 20, 40, 80)}


def draw_scaling(runs, options):
    """Speed of HalfCheetahVel's preset with one size changed at a time, into scaling.csv."""
    rows = []
    for name, values in SIZES.items():
        for value in values:
            works = all_works("halfcheetah_vel", options.device, **{name: value})
            whole = {name: works["end to end", "our iteration"]}
            speed = rates(whole, seconds=0.3, rounds=2)[name]
            rows.append(dict(setting=name, value=value, steps_per_second=round(speed)))
            print(trmrl.csv_text(rows[-1:], header=len(rows) == 1), end="", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scaling.csv").write_text(trmrl.csv_text(rows, header=True))


# ---- 7. Tables -----------------------------------------------------------------------------------
#
# A document has lines <!-- table NAME --> and <!-- end -->; what is between them is written anew.
# NAME is summary, an env, ablation_<ablation>, classes, or the name of a csv file in results/.

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
    """An episode of the last meta-test: the mean as -20.1, 814 or 97 %, the range if asked."""
    wanted = {"split": "test"} | wanted
    curves = [means(run, "episode", step=run.steps, **wanted) for run in seeds]
    values = [curve.get(episode, math.nan) for curve in curves]
    if np.isnan(values).any():
        return "-"
    digits = int(abs(np.mean(values)) < 200)

    def show(x):
        return f"{100 * x:.0f} %" if seeds[0].value == "success" else f"{x:.{digits}f}"

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
            row["out of distribution"] = episode_cell(seeds, 1, spread=True, split="ood")
        if env in THRESHOLDS:
            row[f"M steps to {THRESHOLDS[env]}"] = steps_to(seeds, THRESHOLDS[env])
        lines = [line for run in seeds for line in read_csv(run.path / "progress.csv")]
        speed = np.median([float(line["steps_per_second"]) for line in lines])
        table.append(row | {"minutes": minutes(seeds), "steps/s": f"{speed:,.0f}"})
    return markdown(table)


def minutes(seeds):
    """Wall-clock minutes of a run, mean over seeds."""
    lines = [read_csv(run.path / "progress.csv")[-1] for run in seeds]
    return f"{np.mean([float(line['seconds']) for line in lines]) / 60:.0f}" if seeds else "-"


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
    if (folder / f"{name}.csv").exists():
        return markdown(read_csv(folder / f"{name}.csv"))
    known = ["summary", "classes", *groups, *(f"ablation_{which}" for which in ABLATIONS)]
    known += [path.stem for path in folder.glob("*.csv")]
    raise trmrl.UserError(f"no table {name!r}; there are: {', '.join(known)}")


def write_tables(runs, options):
    folder = Path(options.runs or "results")
    ours = [run for run in runs if not run.ablation]
    groups = group_runs(ours, agent_of, options)

    def fill(found):
        table = make_table(found[2], groups, runs, folder, options)
        return f"{found[1]}\n{table}\n\n{found[3]}"

    pattern = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
    for document in filter(Path.exists, DOCUMENTS):
        text, count = pattern.subn(fill, document.read_text())
        document.write_text(text)
        print(f"{document}: {plural(count, 'table')}")


# ---- 8. Command line -----------------------------------------------------------------------------

FIG_4 = learning_curve, meta_training, "episode 1", LABELLED
FIG_5 = episode_curve, adaptation, "test tasks", AGENTS
FIG_6 = partial(episode_curve, split="ood"), adaptation, "out of distribution", AGENTS
FIGURES = {
    "meta_training": partial(draw_learning, "meta_training", *FIG_4),
    "fast_adaptation": partial(draw_learning, "fast_adaptation", *FIG_5),
    "ood": partial(draw_learning, "ood", *FIG_6),
    "refinement": partial(draw_agents, "refinement", draw_refinement, count=3, layers=4),
    "latent": partial(draw_agents, "latent", draw_latent),
    "online_adaptation": partial(draw_agents, "online_adaptation", draw_online_adaptation),
    "task_distributions": partial(draw_agents, "task_distributions", draw_task_distributions),
    "attention": partial(draw_agents, "attention", draw_attention),
}
FIGURES |= {f"ablation_{which}": partial(draw_ablation, which) for which in ABLATIONS}
OTHERS = {"film": draw_film, "benchmark": draw_benchmark, "scaling": draw_scaling}
OTHERS["tables"] = write_tables


def parse(argv):
    parser = trmrl.Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    names = ", ".join([*FIGURES, *OTHERS])
    add = parser.add_argument
    add("figures", nargs="*", metavar="FIGURE", help=f"{names} (default: all but the last four)")
    add("--runs", metavar="DIR", help="where the runs are (default: results and runs)")
    add("--out", metavar="DIR", default=Path("figures"), type=Path, help="default: figures")
    add("--pdf", action="store_true", help="also write a PDF of each picture")
    add("--verbose", action="store_true", help="list the runs of each figure and those left out")
    add("--compare", metavar="RUN", type=Path, help="draw this run over ours")
    add("--env", default="halfcheetah_vel", help="of film and benchmark (default: halfcheetah_vel)")
    add("--device", default="auto", help="of benchmark and scaling (default: auto)")
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
