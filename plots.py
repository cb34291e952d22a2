# SPDX-License-Identifier: MIT
"""Every figure of the paper, benchmarks, and the tables of the documents, all from run folders.

    python plots.py                                     # every figure that the runs at hand allow
    python plots.py meta_training --runs runs --pdf     # one figure of your own runs, also as PDF
    python plots.py --compare runs/ant_dir/trmrl-seed7  # your run over ours: is it on track?
    python plots.py film --env ant_dir                  # an animation of an agent that adapts
    python plots.py benchmark --env ant_dir             # speed, beside the limits of this machine
    python plots.py scaling                             # speed for other sizes of the agent
    python plots.py tables                              # the tables of docs/results.md

A function named after a figure draws data into axes; call it from a notebook. Its partner draw_...
finds the data, and `save` writes the picture.

    1. Look   2. Runs   3. Learning curves (Fig. 4, 5, 6, 10 to 13)
    4. Inside an agent (Fig. 2, 3, 7, 8, 9)   5. Film   6. Benchmark   7. Tables   8. Command line
"""

import csv
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
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

import trmrl

# ---- 1. Look -------------------------------------------------------------------------------------

WIDTH = 7.0  # inches, the text width of a paper; in a README an inch is about 120 pixels
BLUE, RED, GREY = "#0b5fa5", "#c0392b", "#666666"
NOTE = dict(color=RED, ha="right", bbox=dict(facecolor="white", edgecolor="none", alpha=0.8, pad=1))
STYLE = {
    "axes": dict(grid=True, axisbelow=True, edgecolor=GREY, titlelocation="left", titlesize=10),
    "axes.spines": dict(top=False, right=False),
    "figure": {"titlesize": 11, "constrained_layout.use": True},
    "font": dict(size=9.5),
    "grid": dict(color="#e3e3e3", linewidth=0.7),
    "legend": dict(frameon=False, columnspacing=1.2, handlelength=2.6),
    "lines": dict(markersize=4.5),
    "pdf": dict(fonttype=42),  # letters stay letters
    "savefig": dict(dpi=200),
    ("xtick", "ytick"): dict(color=GREY),
}

# An agent looks the same in all figures. Lines and markers differ, so that grey is enough.
AGENTS = {  # label, colour, line, marker
    "trmrl": ("TrMRL", BLUE, "-", "o"),
    "rl2": ("RL²", "#d9730d", "--", "s"),
    "varibad": ("VariBAD", "#2c8c5a", "-.", "D"),
    "pearl": ("PEARL", "#8e44ad", (0, (1, 1)), "v"),
    "maml": ("MAML", "#a8860b", (0, (5, 1, 1, 1, 1, 1)), "P"),
    "oracle": ("oracle", "#444444", ":", "^"),
    "yours": ("your run", RED, "-", "*"),
}
ENVS = {"halfcheetah_vel": "HalfCheetahVel", "ant_dir": "AntDir", "ml1_reach": "ML1-Reach"}
ENVS |= {"ml1_push": "ML1-Push", "ml45_train": "ML45-Train"}


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
        fits = sum(len(label) + 8 for label in legend) < 11 * figure.get_figwidth()
        columns = len(legend) if fits else math.ceil(len(legend) / 2)
        figure.legend(legend.values(), legend, loc="outside lower center", ncols=columns)
    options.out.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".pdf") if options.pdf else (".png",):
        figure.savefig(options.out / f"{name}{suffix}")
    plt.close(figure)
    origin = plural(len(sources), "run") if sources else "this machine"
    print(f"{options.out / name}.png: from {origin}")
    tell(sources, options)


def tell(lines, options):
    if options.verbose:
        print("".join(f"    {line}\n" for line in lines), end="")


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
        rows.append(row | {"split": line["split"], "actions": line.get("actions") or "mean"})
    return Run(path, content["env"], content.get("agent", "trmrl"), settings, rows)


def find_runs(folders):
    """All runs below these folders; damaged ones are named and skipped."""
    runs = []
    for folder in folders:
        for config in sorted(Path(folder).rglob("config.json")):
            try:
                runs.append(read_run(config.parent))
            except Exception as error:  # whatever a damaged file provokes
                reason = trmrl.one_line(error)
                print(f"skipped {config.parent}: damaged ({reason})", file=sys.stderr)
    return runs


def why_not(run, seeds):
    """Why a run does not belong to the curve of these seeds; '' if it does."""
    if not run.rows:
        return "it has no meta-test yet"
    for other in seeds[:1]:
        own = {"seed", "device", "threads", "run_dir", "versions", "compile"}
        shared = (run.settings.keys() & other.settings.keys()) - own
        if other.finished and not run.finished:
            return "it is not finished"
        if any(run.settings[name] != other.settings[name] for name in shared):
            return f"its settings are not those of {other.path}"
    if run.settings["seed"] in [other.settings["seed"] for other in seeds]:
        return "another run has its seed"
    return ""


def group_runs(runs, key, options):
    """{env: {key(run): [runs of equal settings, one per seed]}}."""
    groups = defaultdict(lambda: defaultdict(list))
    left_out = []
    for run in sorted(runs, key=lambda run: not run.finished):
        seeds = groups[run.env][key(run)]
        reason = why_not(run, seeds)
        if reason:
            left_out.append(f"left out {run.path}: {reason}")
        else:
            seeds.append(run)
    if left_out and not options.verbose:
        print(f"left out: {plural(len(left_out), 'run')} (--verbose lists them)")
    tell(left_out, options)
    groups = {env: {k: runs for k, runs in each.items() if runs} for env, each in groups.items()}
    return {env: each for env, each in groups.items() if each}


# ---- 3. Learning curves (Fig. 4, 5, 6 and 10 to 13) ----------------------------------------------

# PEARL and MAML adapt from one episode to the next, so Fig. 4 shows their third episode.
SHOWN_EPISODE = {"pearl": 3, "maml": 3}
REFERENCES = {"halfcheetah_vel": {-300: "standing still", -150: "no adaptation"}}
REFERENCES["ant_dir"] = {200: "standing still"}


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
    style = dict(linestyle=linestyle, linewidth=width, marker=marker, markevery=len(x) // 8 or 1)
    ax.plot(x, seeds.mean(axis=0), color=color, label=label, zorder=3, **style)
    if lines:
        ax.plot(x, seeds.T, color=color, linewidth=0.6, alpha=0.6)
    elif len(seeds) > 1:
        low, high = seeds.min(axis=0), seeds.max(axis=0)
        ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def meta_training(ax, curves, looks, env="", lines=False):
    """Fig. 4, 10 to 13: {key of looks: [{step: value} of each seed]}."""
    for key, seeds in curves.items():
        draw_curve(ax, seeds, *looks[key], unit=1e6, lines=lines)
    for y, words in REFERENCES.get(env, {}).items():
        ax.axhline(y, color=GREY, linewidth=0.8, linestyle=(0, (1, 3)))
        place = dict(
            transform=ax.get_yaxis_transform(), ha="right", va="bottom" if y > 0 else "top"
        )
        ax.text(0.99, y, words, fontsize=8, color=GREY, **place)
    ax.set_xlabel("million steps")
    last = [max(curve) for key, seeds in curves.items() for curve in seeds if key != "yours"]
    if last and max(last) > 4 * min(last):
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
    else:
        ax.set_xlim(left=0)
    if env == "halfcheetah_vel":  # the collapse of one seed must not squeeze all curves
        ax.set_ylim(bottom=-340)


def adaptation(ax, curves, looks, env=""):
    """Fig. 5, 6: {key of looks: [{episode: value} of each seed]}."""
    for key, seeds in curves.items():
        draw_curve(ax, seeds, *looks[key])
    ax.set_xlabel("episode")
    ax.set_xticks(sorted({episode for seeds in curves.values() for episode in seeds[0]}))
    ax.margins(y=0.15)


def draw_runs(name, runs, options, read, plot, which, key=lambda run: run.agent, looks=AGENTS):
    """A panel per env, a curve per key: what `read` finds in the runs, if anything."""
    groups = group_runs([run for run in runs if read(run)], key, options)
    if not groups:
        return False
    others = {k for each in groups.values() for k in each if k not in looks}
    looks = looks | {k: (str(k), "#111111", (0, (3, 3)), "x") for k in others}

    # Locomotion in a row, arms in the next; three panels fit into one.
    envs = sorted(groups, key=[*ENVS, *groups].index)  # locomotion comes first
    kinds = [[env for env in envs if not is_arm(env)], [env for env in envs if is_arm(env)]]
    rows = [row[i : i + 3] for row in kinds for i in range(0, len(row), 3)]
    grid = rows if len(envs) > 3 else [envs]
    columns = math.lcm(*map(len, grid))  # rows of 2 and 3 panels: 6 columns, aaabbb and ccddee
    cells = [[env for env in row for _ in range(columns // len(row))] for row in grid]
    size = (WIDTH if len(envs) > 1 else 4.5, 2.4 * len(grid) + 0.5)
    figure, axes = plt.subplot_mosaic(cells, figsize=size)
    sources = []
    for env, ax in axes.items():
        seeds = {k: groups[env][k] for k in looks if k in groups[env]}
        plot(ax, {k: [read(run) for run in each] for k, each in seeds.items()}, looks, env=env)
        ax.set_title(panel_title(env, seeds))
        sources += [run for each in seeds.values() for run in each]
        if sources[-1].value == "success":
            ax.set_ylim(-0.03, max(0.5, ax.dataLim.y1 + 0.05))
            ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    for row in rows:
        axes[row[0]].set_ylabel(f"{'success rate' if is_arm(row[0]) else 'return'}, {which}")
    save(figure, name, options, [run.path for run in sources])
    return True


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


def draw_meta_training(runs, options):
    ours = [run for run in runs if not run.ablation]
    looks = dict(AGENTS)
    for agent, episode in SHOWN_EPISODE.items():
        label, *look = AGENTS[agent]
        looks[agent] = f"{label}, episode {episode}", *look
    how = learning_curve, meta_training, "episode 1"
    if not draw_runs("meta_training", ours, options, *how, looks=looks):
        return "needs a run: python trmrl.py --env halfcheetah_vel"


def draw_adaptation(name, split, runs, options):
    ours = [run for run in runs if not run.ablation]
    read = partial(episode_curve, split=split)
    which = {"test": "test tasks", "ood": "out of distribution"}[split]
    if not draw_runs(name, ours, options, read, adaptation, which):
        return "needs a finished run: python trmrl.py --env halfcheetah_vel"


# An ablation: its settings, and the values of them that the paper compares.
ABLATIONS = {
    "tfixup": (("layers", "tfixup"), [(2, True), (2, False), (12, True), (12, False)]),
    "memory": (("memory_length",), [(1,), (5,), (25,)]),
    "layers": (("layers",), [(1,), (4,), (12,)]),
    "heads": (("heads",), [(1,), (4,), (16,)]),
}
LABELS = {"layers": "L = {}", "memory_length": "N = {}", "heads": "heads: {}"}
LABELS["tfixup"] = "T-Fixup: {}"


def ablation_runs(which, runs):
    """Runs of the ablation, those with default settings, and deep ones that T-Fixup shares."""
    others = {"tfixup": (), "layers": ("default", "tfixup")}.get(which, ("default",))
    shared = [run for run in runs if run.ablation in others and run.settings["tfixup"]]
    return [run for run in runs if run.ablation == which] + shared


def ablation_key(which):
    """What tells the curves of an ablation apart: a function of a run."""
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
    default = tuple(getattr(trmrl.Config(), name) for name in names)
    order = sorted(keys, key=lambda k: k != default)  # the default always looks the same
    variants = dict(zip(order, itertools.cycle(AGENTS.values())))
    looks = {k: (ablation_label(which, k), *variants[k][1:]) for k in keys}
    if len(keys) > 1:
        how = learning_curve, partial(meta_training, lines=True), "episode 1"
        draw_runs(f"ablation_{which}", ours, options, *how, key=key, looks=looks)
    missing = [k for k in wanted if k not in keys]
    if missing:
        pairs = zip(map(trmrl.flag, names), missing[0])
        flags = " ".join(name if value is True else f"{name} {value}" for name, value in pairs)
        flags = flags.replace("--tfixup False", "--no-tfixup")
        command = f"python trmrl.py --total-steps 6e5 {flags} --run-dir runs/ablations/{which}/a1"
        return f"no run has {'; '.join(ablation_label(which, k) for k in missing)}: {command}"


def draw_compare(runs, options):
    """Your run over ours of the same env, and whether it is on track."""
    yours = find_runs([options.compare])
    if len(yours) != 1 or not yours[0].rows:
        raise trmrl.UserError(f"--compare takes a run with a meta-test, not {options.compare}")
    yours = yours[0]
    agent, yours.agent = yours.agent, "yours"
    steps = learning_curve(yours)
    others = [run for run in runs if run.env == yours.env]
    others = [run for run in others if run.path.resolve() != yours.path.resolve()]
    for name in options.figures or ["meta_training"]:
        (FIGURES | OTHERS)[name]([*others, yours], options)

    last = max(steps)
    line = f"after {last / 1e6:.2f} M steps: {yours.value} {steps[last]:.4g}"
    curves = [learning_curve(run) for run in others if run.agent == agent and not run.ablation]
    reached = [np.interp(last, list(curve), list(curve.values())) for curve in curves if curve]
    if reached:
        low, high = min(reached), max(reached)
        place = "behind" if steps[last] < low else "ahead" if steps[last] > high else "on track"
        line += f", ours {low:.4g} to {high:.4g}: {place}"
    print(line)


# ---- 4. Inside an agent (Fig. 2, 3, 7, 8, 9) -----------------------------------------------------
#
# Each draw_... takes trained agents and returns a figure and rows of numbers for a csv file.

TARGETS = np.array([0.5, 1.0, 1.5, 2.0, 2.5])  # velocities that figures show, m/s
TEST_TARGETS = 3 * (np.arange(20) + 0.5) / 20  # of the test tasks
TOLERANCE = 0.3  # m/s


def meet(agent, targets, episodes=1):
    """Trials of the agent's mean actions on these tasks; always the same starting states."""
    tasks = np.reshape(targets, (len(targets), -1))
    envs = trmrl.make_tasks(agent.config.env, len(tasks))
    steps = episodes * envs.episode_length
    return trmrl.collect(agent, envs, tasks, steps, False, trmrl.TEST_SEED)


def attention_weights(layer, query_memories, e, visible):
    """Eq. 4, alpha (M, heads, Q, N): how relevant each memory of e is to each query."""
    q, k = layer.query(query_memories), layer.key(e)
    q, k = (x.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for x in (q, k))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1)


@torch.no_grad()
def look_inside(agent, trials):
    """Memories of every step after 0, ..., L layers, (L + 1, R, T, d), and attention (R, T, N).

    The attention is that of the last layer, mean over its heads, to the memory 0, 1, ... steps ago;
    NaN where there is no such memory.
    """
    N = agent.config.memory_length
    t = torch.arange(trials.reward.shape[1], device=agent.device)
    slot = torch.arange(N, device=agent.device)
    causal = slot[:, None] >= slot
    memories, attention = [], []
    for row in range(len(trials.token)):
        slots, current = trmrl.window(trials, torch.full_like(t, row), t, N)
        e = [agent.phi(slots) + agent.positions]  # e^0, (T, N, d)
        for layer in agent.transformer.layers:
            e.append(layer(e[-1], e[-1], causal))
        memories.append(torch.stack([x[t, current] for x in e]))

        alpha = attention_weights(agent.transformer.layers[-1], e[-2], e[-2], causal)
        alpha = alpha[t, :, current].mean(dim=1)  # (T, N)
        ago = current[:, None] - slot  # current slot 2: the slots 2 1 0 are 0 1 2 steps ago
        attention.append(alpha.gather(1, ago.clamp(min=0)).masked_fill(ago < 0, math.nan))
    return torch.stack(memories, dim=1).cpu().numpy(), torch.stack(attention).cpu().numpy()


def settled(velocity, target):
    """Steps until the velocity (T,) stays near its target; None if it never does."""
    away = np.flatnonzero(np.abs(velocity - target) >= TOLERANCE)
    steps = int(away.max(initial=-1)) + 1
    return None if steps == len(velocity) else steps


def online_adaptation(axes, velocity, targets, steps=60):
    """Fig. 9: velocity (B, T), a panel for each target; returns the steps until each settles."""
    found = []
    for ax, v, target in zip(axes, velocity[:, :steps], targets):
        ax.axhspan(target - TOLERANCE, target + TOLERANCE, color=BLUE, alpha=0.18, linewidth=0)
        ax.plot(v, color=BLUE, linewidth=1.4)
        reached = settled(v, target)
        words = "not settled"
        if reached is not None:
            words = plural(reached, "step")
            found.append(reached)
            ax.axvline(reached, color=RED, linewidth=0.8)
            ax.plot(reached, v[reached], "o", color=RED)
        ax.text(0.97, 0.04, words, transform=ax.transAxes, **NOTE)
        ax.set(title=f"{target:.1f} m/s", xticks=range(0, steps + 1, 20), xlim=(-2, steps))
    return found


def draw_online_adaptation(agents, options):
    figure, axes = plt.subplots(1, 5, figsize=(WIDTH, 2.3), sharey=True)
    found = online_adaptation(axes, meet(agents[0], TARGETS).info["x_velocity"], TARGETS)
    axes[0].set_ylabel("velocity (m/s)")
    axes[2].set_xlabel("time step of the first episode")
    within = f" within {plural(max(found), 'time step')}" if found else ""
    figure.suptitle(f"{len(found)} of {len(TARGETS)} hidden target velocities found{within}")

    # The same for all test tasks, over whole episodes.
    rows = []
    for agent in agents:
        velocity = meet(agent, TEST_TARGETS).info["x_velocity"]
        steps = [settled(v, target) for v, target in zip(velocity, TEST_TARGETS)]
        steps = [math.inf if k is None else k for k in steps]
        row = {"run": agent.folder.name, "test tasks": len(steps), "median steps": np.median(steps)}
        rows.append(row | {"settled within 20 steps": sum(k <= 20 for k in steps)})
    return figure, rows


def pca(x, k):
    """Rows x (M, d) -> the first k principal components (k, d), their shares of the variance."""
    _, s, vt = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    return vt[:k], s[:k] ** 2 / (s**2).sum()


def discriminants(memories):
    """Fisher's discriminants: the directions (d, B - 1) that tell B tasks (B, T, d) best apart."""
    within = (memories - memories.mean(axis=1, keepdims=True)).reshape(-1, memories.shape[-1])
    _, s, vt = np.linalg.svd(within, full_matrices=False)
    used = s > 1e-4 * s[0]
    whiten = vt[used].T / s[used] * math.sqrt(len(within))
    centres = memories.mean(axis=1) @ whiten
    _, _, directions = np.linalg.svd(centres - centres.mean(axis=0), full_matrices=False)
    return whiten @ directions[: len(memories) - 1].T


def density(points, at):
    """Gaussian kernel density, by Scott's rule, of points (n, k) at places (m, k)."""
    n, k = points.shape
    covariance = n ** (-2 / (k + 4)) * np.atleast_2d(np.cov(points.T)) + 1e-12 * np.eye(k)
    difference = at[:, None] - points
    exponent = np.einsum("mni,ij,mnj->mn", difference, np.linalg.inv(covariance), difference)
    return np.exp(-0.5 * exponent).mean(axis=1) / math.sqrt(np.linalg.det(2 * np.pi * covariance))


def latent(ax, points, targets):
    """Fig. 8: points (B, T, 2) of B tasks; a contour holds 80 % of the points of its task."""
    low, high = points.min(axis=(0, 1)), points.max(axis=(0, 1))
    margin = 0.1 * (high - low)
    x, y = (np.linspace(*ends, 60) for ends in zip(low - margin, high + margin))
    grid = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    for target, task in zip(targets, points):
        color = shade(target, targets)
        ax.scatter(*task.T, s=3, color=color, alpha=0.5, linewidth=0)
        level = np.quantile(density(task, task), 0.2)
        ax.contour(x, y, density(task, grid).reshape(60, 60), [level], colors=[color])
        ax.plot([], [], "o", color=color, label=f"{target:.1f} m/s")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def draw_latent(agents, options):
    """The paper's view, the plane of largest variance, and the plane that separates best."""
    tokens = meet(agents[0], TARGETS, episodes=2).token[:, :-1]
    memories = agents[0].phi(tokens).numpy()  # (B, T, d)
    first, second = memories[:, 20:200], memories[:, 220:400]  # without the first 20 steps
    components, shares = pca(np.concatenate(first), 3)
    points = first @ components.T  # (B, T, 3)

    # Planes between the tasks: a memory belongs to the nearest centre after Fisher's projection.
    along = discriminants(first)
    centres = first.mean(axis=1) @ along
    distance = np.linalg.norm((second @ along)[:, :, None] - centres, axis=-1)  # (B, T, B)
    separated = (distance.argmin(axis=-1) == np.arange(len(TARGETS))[:, None]).mean()

    figure = plt.figure(figsize=(WIDTH, 2.9))
    left = figure.add_subplot(1, 3, 1, projection="3d")
    middle, right = (figure.add_subplot(1, 3, i) for i in (2, 3))
    for target, task in zip(TARGETS, points):
        left.scatter(*task.T, s=3, color=shade(target, TARGETS), depthshade=False)
    left.set(xticklabels=[], yticklabels=[], zticklabels=[])
    left.set_title(f"principal components 1 to 3\n({shares.sum():.0%} of the variance)", loc="left")
    latent(middle, points[..., :2], TARGETS)
    middle.set_title(f"components 1 and 2\n({shares[:2].sum():.0%} of the variance)")
    latent(right, first @ along[:, :2], TARGETS)
    right.set_title(f"planes separate {separated:.0%}\nof new memories")
    row = {"run": agents[0].folder.name, "variance of three components": float(shares.sum())}
    return figure, [row | {"separated by planes": separated}]


def task_distributions(ax, values, targets):
    """Fig. 2: densities of the memories (B, T) of B tasks along a line; neighbours' overlaps."""
    margin = 0.15 * np.ptp(values)
    grid = np.linspace(values.min() - margin, values.max() + margin, 400)
    densities = [density(row[:, None], grid[:, None]) for row in values]
    overlaps = [np.trapezoid(np.minimum(*pair), grid) for pair in itertools.pairwise(densities)]

    height = 0.6 * np.max(densities)  # from a ridge to the next
    for i, y in enumerate(densities):
        style = dict(facecolor=shade(targets[i], targets), edgecolor="white", zorder=3 - 0.1 * i)
        ax.fill_between(grid, i * height, i * height + y, alpha=0.85, **style)
    place = dict(transform=ax.get_yaxis_transform(), ha="right", fontsize=8, color=GREY)
    for i, overlap in enumerate(overlaps):
        ax.text(1.0, (i + 0.45) * height, f"{overlap:.0%} shared", **place)
    ax.set_yticks(np.arange(len(targets)) * height, [f"{target:.1f} m/s" for target in targets])
    ax.set(xticks=[], xlim=(grid[0], grid[-1] + 2 * margin))
    ax.spines["left"].set_visible(False)
    ax.grid(False)
    return overlaps


def draw_task_distributions(agents, options):
    memories = agents[0].phi(meet(agents[0], TARGETS).token[:, :-1]).numpy()  # (B, T, d)
    lines = {
        "between the means of the tasks": pca(memories.mean(axis=1), 1)[0][0],
        "of the largest variance (gait)": pca(np.concatenate(memories), 1)[0][0],
    }
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.0))
    rows = []
    for ax, (name, direction) in zip(axes, lines.items()):
        overlaps = task_distributions(ax, memories @ direction, TARGETS)
        ax.set_xlabel(f"memories along the direction\n{name}")
        rows.append({"direction": name, "lowest": min(overlaps), "highest": max(overlaps)})
    return figure, rows


def regression_error(x, y, x_test, y_test):
    """Mean squared error on new rows of a linear regression from x (M, d) to y (M, A)."""
    x, x_test = (np.pad(z, ((0, 0), (0, 1)), constant_values=1.0) for z in (x, x_test))
    solution = np.linalg.lstsq(x, y, rcond=None)[0]
    return np.square(x_test @ solution - y_test).mean()


def refinement_errors(agent, trials, train):
    """Per layer: 1 - cosine similarity to e^L, and the error of regressing the mean action."""
    memories, _ = look_inside(agent, trials)  # (L + 1, R, T, d)
    action = trials.action.cpu().numpy()
    unit = memories / np.linalg.norm(memories, axis=-1, keepdims=True)
    representation = 1 - (unit * unit[-1]).sum(axis=-1).mean(axis=(1, 2))
    regression = []
    for e in memories:
        parts = e[:train], action[:train], e[train:], action[train:]
        regression.append(regression_error(*map(np.concatenate, parts)))
    return representation, np.array(regression)


def refinement(axes, errors):
    """Fig. 7: both errors of each agent and layer, (agents, 2, L + 1)."""
    titles = "1 - cosine similarity to the last layer", "error of a linear model of the action"
    layers = range(errors.shape[-1])
    for i, (ax, title) in enumerate(zip(axes, titles)):
        curves = [dict(zip(layers, agent[i])) for agent in errors]
        draw_curve(ax, curves, None, BLUE, "-", "o")
        ax.set_xticks(layers, [r"$\phi$", *layers[1:]])
        ax.set(xlabel="memory after layer", title=title)
        ax.set_ylim(bottom=0)
        ax.ticklabel_format(axis="y", scilimits=(-2, 4))
    words = "n = 1" if len(errors) == 1 else f"mean and range of {len(errors)} agents"
    axes[1].text(0.99, 0.9, words, transform=axes[1].transAxes, ha="right", color=GREY)


def draw_refinement(agents, options):
    velocities = np.random.default_rng(trmrl.TEST_SEED).uniform(0, 3, 30)
    errors = [refinement_errors(a, meet(a, velocities, episodes=3), train=20) for a in agents]
    errors = np.array(errors, dtype=float)
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.6))
    refinement(axes, errors)
    rows = []
    for agent, both in zip(agents, errors):
        for layer, (cosine, regression) in enumerate(both.T):
            rows.append(dict(run=agent.folder.name, layer=layer, cosine=cosine, mse=regression))
    return figure, rows


def attention(axes, weights, velocity, targets, shown):
    """Fig. 3: weights (B, T, N) to the memory 0, 1, ... steps ago; one task, then their mean."""
    top, image, bars = axes
    _, T, N = weights.shape
    full = min(T, N) - 1  # from this step on the memory is full
    steps = min(T, max(60, 2 * N))
    v, target = velocity[shown, :steps], targets[shown]
    top.axhspan(target - TOLERANCE, target + TOLERANCE, color=BLUE, alpha=0.18, linewidth=0)
    top.plot(v, color=BLUE)
    top.set(ylabel="velocity\n(m/s)", title=f"one task: {target:.3g} m/s")
    style = dict(aspect="auto", origin="lower", cmap="Greys", interpolation="nearest", vmin=0)
    most = np.nanmax(weights[shown, full:steps])
    picture = image.imshow(weights[shown, :steps].T, vmax=most, **style)
    image.set(xlabel="time step of the first episode", ylabel="age of the memory\n(steps)")
    image.set_facecolor("#f3dcc8")  # no memory yet
    image.grid(False)
    image.set_xlim(-0.5, steps - 0.5)
    style = dict(orientation="horizontal", fraction=0.08, aspect=40)
    bar = image.figure.colorbar(picture, ax=image, label="attention, mean of the heads", **style)
    bar.outline.set_visible(False)

    reached = settled(v, target)
    for ax in () if reached is None else (top, image):
        ax.axvline(reached - 0.5, color=RED, linewidth=1.2)
    words = "not settled" if reached is None else f"settled after {plural(reached, 'step')}"
    top.text(0.99, 0.08, words, transform=top.transAxes, **NOTE)

    mean = weights[:, full:].mean(axis=(0, 1))
    bars.barh(np.arange(N), mean, color=BLUE)
    bars.set(xlabel="mean attention", title=f"{len(weights)} tasks")
    for ax in (image, bars):
        ax.set_yticks(np.arange(0, N, max(1, N // 10)))
    return mean


def draw_attention(agents, options):
    trials = meet(agents[0], TEST_TARGETS)
    _, weights = look_inside(agents[0], trials)
    ratios = dict(width_ratios=[3, 1], height_ratios=[1, 1.8])
    cells = [["top", "bars"], ["image", "bars"]]
    figure, axes = plt.subplot_mosaic(cells, figsize=(WIDTH, 3.5), **ratios)
    axes["top"].sharex(axes["image"])
    axes = [axes[name] for name in ("top", "image", "bars")]
    mean = attention(axes, weights, trials.info["x_velocity"], TEST_TARGETS, shown=13)
    return figure, [{"age": age, "attention": float(x)} for age, x in enumerate(mean)]


def load_agents(runs):
    """The first agent that loads and others like it, and why some were refused."""
    agents, refused = [], []
    for run in runs:
        try:
            agent = trmrl.load_agent(run.path)
            agents.append((run.finished, agent.config.layers, agent))
        except trmrl.UserError as error:
            refused.append(str(error))
    return [agent for *kind, agent in agents if kind == list(agents[0][:2])], refused


def draw_agents(name, draw, runs, options, count=1, env="halfcheetah_vel", layers=0):
    """A figure of up to `count` agents, finished ones first; some figures need several layers."""
    runs = [run for run in runs if (run.env, run.agent) == (env, "trmrl")]
    if layers:
        runs = [run for run in runs if run.settings["layers"] > 1 and run.settings["tfixup"]]
    else:
        runs = [run for run in runs if not run.ablation]
    runs.sort(key=lambda run: (not run.finished, layers and run.settings["layers"] != layers))
    agents, refused = load_agents(runs)
    tell(refused, options)
    if not agents:
        command = f"python trmrl.py --env {env}" + (f" --layers {layers}" if layers else "")
        why = f" (refused {plural(len(refused), 'run')}: {refused[0]})" if refused else ""
        return f"needs a trained agent: {command}{why}"

    agents = agents[:count]
    figure, rows = draw(agents, options)
    trained, total = agents[0].trained_steps / 1e6, agents[0].config.total_steps / 1e6
    if trained < total:
        words = f"half-trained: {trained:.3g} of {total:.3g} M steps"
        figure.supxlabel(words, x=0.995, ha="right", fontsize=8, color=GREY)
    name = f"film_{env}" if name == "film" else name
    save(figure, name, options, [agent.folder for agent in agents])
    if rows:
        write_rows(options.out / f"{name}.csv", rows)


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(trmrl.csv_text(rows, header=True))


# ---- 5. Film -------------------------------------------------------------------------------------

FILMS = {"halfcheetah_vel": {f"target: {v} m/s": v for v in (0.5, 1.5, 2.5)}}
FILMS["ant_dir"] = {"forward": 1.0, "backward": -1.0}


def record(agent, envs, tasks, steps):
    """Play an episode: where all joints are (B, T, nq), and velocity or reward (B, T)."""
    player = trmrl.Player(agent, len(tasks), steps)
    observation, _ = envs.reset(seed=trmrl.TEST_SEED, options={"tasks": tasks})
    positions, values = [], []
    for _ in range(steps):
        action = player.act(observation, sample=envs.sample_at_test)
        observation, reward, terminated, truncated, info = envs.step(action)
        player.observe(action, reward, terminated, truncated)
        if hasattr(envs, "arms"):
            positions.append([arm.data.qpos.copy() for arm in envs.arms])
        else:
            positions.append(envs.physics[:, 1 : 1 + envs.model.nq])
        values.append(info.get("x_velocity", reward))
    return np.array(positions).swapaxes(0, 1), np.array(values).T


def render(folder):
    """Draw what `photograph` saved. A process of its own, as MuJoCo picks its OpenGL at import."""
    films = []
    for body in sorted(Path(folder).glob("*.mjb")):
        model = mujoco.MjModel.from_binary_path(str(body))
        data = mujoco.MjData(model)
        inputs = np.load(body.with_suffix(".npz"))
        camera, frames = "track", []
        if len(inputs["goals"]):  # an arm
            camera = mujoco.MjvCamera()
            camera.lookat[:] = 0, 0.7, 0.15
            camera.distance, camera.azimuth, camera.elevation = 1.4, 215, -25
        with mujoco.Renderer(model, height=160, width=240) as renderer:
            for qpos in inputs["qpos"]:
                data.qpos = qpos
                mujoco.mj_forward(model, data)
                renderer.update_scene(data, camera=camera)
                for goal in inputs["goals"]:  # a green sphere
                    shape = mujoco.mjtGeom.mjGEOM_SPHERE, np.full(3, 0.02), goal, np.eye(3).ravel()
                    green = np.array([0.1, 0.9, 0.2, 1], dtype=np.float32)
                    geom = renderer.scene.geoms[renderer.scene.ngeom]
                    mujoco.mjv_initGeom(geom, *shape, green)
                    renderer.scene.ngeom += 1
                frames.append(renderer.render())
        films.append(frames)
    np.save(f"{folder}/frames.npy", np.array(films))


def photograph(models, positions, goals):
    """B models, their qpos (B, T, nq) and goals -> frames (B, T, height, width, 3)."""
    environment = {"MUJOCO_GL": "egl" if sys.platform == "linux" else ""} | os.environ
    with tempfile.TemporaryDirectory() as folder:
        for i, (model, qpos, goal) in enumerate(zip(models, positions, goals)):
            mujoco.mj_saveModel(model, f"{folder}/{i}.mjb")
            np.savez(f"{folder}/{i}.npz", qpos=qpos, goals=goal)
        command = [sys.executable, "-c", f"import plots; plots.render({folder!r})"]
        where = dict(cwd=Path(__file__).parent, env=environment)
        child = subprocess.run(command, capture_output=True, text=True, **where)
        if child.returncode == 0:
            return np.load(f"{folder}/frames.npy")
    tried = f"MUJOCO_GL={environment['MUJOCO_GL']}: {' '.join(child.stderr.split())[-100:]}"
    raise trmrl.UserError(f"film needs off-screen OpenGL, such as Debian's libegl1 ({tried})")


def film(frames, values, captions, ylabel, targets=()):
    """A picture of every second step: bodies (B, T, height, width, 3), above a curve (B, T)."""
    figure, axes = plt.subplots(2, len(frames), figsize=(WIDTH, 3.1), sharex="row", sharey="row")
    for ax, target in zip(axes[1], targets):
        ax.axhspan(target - TOLERANCE, target + TOLERANCE, color=BLUE, alpha=0.18, linewidth=0)
    images, lines = [], []
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
    return figure, pictures


def write_gif(path, pictures, most_bytes=1_500_000):
    """An animation; it gets fewer colours, then fewer pictures, until it is small enough."""
    from PIL import Image  # comes with Matplotlib

    for colors, every in ((64, 1), (32, 1), (16, 1), (16, 2), (16, 3)):
        images = [Image.fromarray(picture) for picture in pictures[::every]]
        images = [image.quantize(colors, dither=Image.Dither.NONE) for image in images]
        how = dict(append_images=images[1:], duration=100 * every, loop=0)
        images[0].save(path, save_all=True, **how)
        if path.stat().st_size <= most_bytes:
            break


def draw_film(agents, options):
    env = agents[0].config.env
    tasks = FILMS.get(env, {"goal 1": 0, "goal 2": 0, "goal 3": 0})
    envs = trmrl.make_tasks(env, len(tasks), split="test")
    targets = np.reshape(list(tasks.values()), (-1, 1))
    arms = getattr(envs, "arms", ())
    positions, values = record(agents[0], envs, envs.tasks if arms else targets, steps=80)
    models = [arm.model for arm in arms] or [envs.model] * len(tasks)
    goals = [[arm._target_pos] for arm in arms] or [[]] * len(tasks)
    frames = photograph(models, positions, goals)
    ylabel = "reward" if arms else "velocity (m/s)"
    bands = targets[:, 0] if env == "halfcheetah_vel" else ()
    figure, pictures = film(frames, values, list(tasks), ylabel, bands)
    options.out.mkdir(parents=True, exist_ok=True)
    write_gif(options.out / f"film_{env}.gif", pictures)
    return figure, None


# ---- 6. Benchmark --------------------------------------------------------------------------------

BODIES = {"halfcheetah_vel": "HalfCheetah-v5", "ant_dir": "Ant-v5"}


def rates(works, seconds=0.5, rounds=6):
    """{name: (work, steps)} -> {name: environment steps per second}, the best round."""
    speeds = dict.fromkeys(works, 0.0)
    for round in range(rounds + 1):  # in turn: other programs slow all works down alike
        for name, (work, steps) in works.items():
            calls, began = 0, time.perf_counter()
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
    rng, shape = np.random.default_rng(0), envs.action_space.shape
    by_hand = envs.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.DISABLED

    def work():
        envs.reset(seed=0)
        for _ in range(calls):
            actions = rng.uniform(-1, 1, shape).astype(np.float32)
            _, _, terminated, truncated, _ = envs.step(actions)
            done = terminated | truncated
            if by_hand and done.any():
                envs.reset(options={"reset_mask": done})

    return work, calls * shape[0]


def network_alone(agent):
    """Forward and backward of ten minibatches of random windows."""
    M, N = agent.config.minibatch, agent.config.memory_length
    slots = torch.randn(M, N, agent.phi.in_features, device=agent.device)
    current = torch.full((M,), N - 1, device=agent.device)

    def work():
        for _ in range(10):
            agent.zero_grad()
            e = agent.transformer(agent.phi(slots) + agent.positions, current)
            (agent.policy(e).mean() + agent.value(e).mean()).backward()
        agent.phi.weight.grad.sum().item()  # wait for the device

    return work, 10 * M / agent.config.epochs


def setup(env, device, **changes):
    """Environments, a new agent with the preset of an env, and the halves of an iteration."""
    config = trmrl.Config(env=env, device=device, **changes)
    config, envs, _ = trmrl.prepare(config, trmrl.make_tasks)
    agent = trmrl.TrMRL(config, envs.sizes).to(config.device)
    optimizer = torch.optim.Adam(agent.parameter_groups(), eps=1e-5, fused=True)
    generator = torch.Generator(config.device)
    collect = partial(trmrl.collect, agent, envs, envs.tasks, envs.episode_length, True, 0)
    update = partial(agent.update, optimizer=optimizer, generator=generator)
    return envs, agent, collect, update


def measure(env, device):
    """Rows of group, what and steps per second, for the preset of an env."""
    envs, agent, collect, update = setup(env, device)
    steps = envs.num_envs * envs.episode_length
    bodies = [lambda: gymnasium.make(BODIES[env])] * envs.num_envs
    trials = collect()
    works = {
        ("physics", "raw MuJoCo"): raw_physics(envs),
        ("physics", "SyncVectorEnv of gym.make"): stepping(gymnasium.vector.SyncVectorEnv(bodies)),
        ("physics", "our tasks"): stepping(envs),
        ("network", "network alone"): network_alone(agent),
        ("network", "our update"): (lambda: update(trials), steps),
        ("end to end", "our iteration"): (lambda: update(collect()), steps),
    }
    speeds = rates(works).items()
    return [dict(group=g, what=what, steps_per_second=speed) for (g, what), speed in speeds]


def benchmark(axes, rows):
    """Speeds, a panel for each group; ours in blue, limits and others in grey."""
    most = max(row["steps_per_second"] for row in rows)
    for ax, (group, each) in zip(axes, itertools.groupby(rows, lambda row: row["group"])):
        speeds = {row["what"]: row["steps_per_second"] for row in each}
        colors = [BLUE if name.startswith("our") else "#bbbbbb" for name in speeds]
        bars = ax.barh(list(speeds), list(speeds.values()), color=colors)
        ax.bar_label(bars, fmt="{:,.0f}", padding=4)
        ax.invert_yaxis()
        ax.set(title=group, xticks=[], xlim=(0, 1.15 * most))
        ax.grid(False)
        ax.spines[:].set_visible(False)


def draw_benchmark(runs, options):
    if options.env not in BODIES:
        raise trmrl.UserError(f"benchmark takes --env {' or '.join(BODIES)}, not {options.env}")
    rows = measure(options.env, options.device)
    print(trmrl.csv_text(rows, header=True), end="")
    figure, axes = plt.subplots(3, 1, figsize=(WIDTH, 2.9), height_ratios=[3, 2, 1])
    benchmark(axes, rows)
    figure.supxlabel(f"environment steps per second, {ENVS[options.env]}", fontsize=9.5)
    name = "benchmark" if options.env == "halfcheetah_vel" else f"benchmark_{options.env}"
    save(figure, name, options, [])
    write_rows(options.out / f"{name}.csv", rows)


SIZES = {"memory_length": (1, 5, 10, 25, 50), "layers": (1, 2, 4, 8, 12)}
SIZES |= {"d_model": (32, 64, 128, 256), "num_tasks": (5, 10, 20, 40, 80)}


def draw_scaling(runs, options):
    """Speed of HalfCheetahVel's preset with one size changed at a time, into scaling.csv."""
    rows = []
    for name, value in [(name, value) for name, values in SIZES.items() for value in values]:
        envs, _, collect, update = setup("halfcheetah_vel", options.device, **{name: value})
        steps = envs.num_envs * envs.episode_length
        works = {"collect": (collect, steps), "update": (partial(update, collect()), steps)}
        seconds = {f"{half}_seconds": steps / v for half, v in rates(works, 0.1, 2).items()}
        speed = round(steps / sum(seconds.values()))
        rows.append({"setting": name, "value": value, **seconds, "steps_per_second": speed})
        print(trmrl.csv_text(rows[-1:], header=len(rows) == 1), end="", flush=True)
    write_rows(options.out / "scaling.csv", rows)


# ---- 7. Tables -----------------------------------------------------------------------------------
#
# A document has lines <!-- table NAME --> and <!-- end -->; what is between them is written anew.
# NAME is summary, an env, ablation_<ablation>, classes, or the name of a csv file in results/.

DOCUMENTS = "README.md", "docs/results.md"
THRESHOLDS = {"halfcheetah_vel": -50, "ant_dir": 300}


def markdown(rows):
    """Dictionaries with equal keys, as a Markdown table."""
    if not rows:
        return "No runs yet."
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[str(cell) for cell in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(values, value="return", spread=False):
    """The mean of the seeds as -20.1, 814 or 97 %, with the lowest and the highest if asked."""
    if not values or np.isnan(values).any():
        return "-"

    digits = int(abs(np.mean(values)) < 200)

    def show(x):
        return f"{100 * x:.0f} %" if value == "success" else f"{x:.{digits}f}"

    text = show(np.mean(values))
    if spread and len(values) > 1:
        text += f" ({show(min(values))} to {show(max(values))})"
    return text


def episode_cell(seeds, episode, spread=False, **wanted):
    """An episode of the last meta-test, mean over tasks and seeds."""
    unusual = is_arm(seeds[0].env) and seeds[0].tests[0]["actions"] == "mean"
    note = " (mean actions)" if unusual and "actions" not in wanted else ""
    wanted = {"split": "test"} | wanted
    curves = [means(run, "episode", step=run.steps, **wanted) for run in seeds]
    return cell([curve.get(episode, math.nan) for curve in curves], seeds[0].value, spread) + note


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
        lines = [read_csv(run.path / "progress.csv") for run in seeds]
        minutes = np.mean([float(each[-1]["seconds"]) / 60 for each in lines])
        speed = np.median([float(line["steps_per_second"]) for each in lines for line in each])
        table.append(row | {"minutes": f"{minutes:.0f}", "steps/s": f"{speed:,.0f}"})
    return markdown(table)


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
            row[AGENTS[agent][0]] = text + (" (n = 1)" if len(seeds) == 1 else "")
        table.append(row)
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


def classes_table(path):
    """The classes of ML45-Train by their success, from the csv of a meta-test; they take turns."""
    import metaworld

    names = list(metaworld.env_dict.ML45_V3["train"])
    rows = read_csv(path) if path.exists() else []
    classes = defaultdict(list)
    for i, name in enumerate(names if rows else ()):
        success = [float(row["success"]) for row in rows if int(row["task"]) % len(names) == i]
        classes[np.mean(success)].append(name.removesuffix("-v3"))
    ordered = sorted(classes.items(), reverse=True)
    return markdown([{"success": f"{x:.0%}", "classes": ", ".join(each)} for x, each in ordered])


def make_table(name, groups, runs, folder, options):
    """The table of that name, from runs, from {env: {agent: runs}}, or from a csv file."""
    if name == "summary":
        return summary_table(groups)
    if name == "classes":
        return classes_table(folder / "ml45_train" / "classes.csv")
    if name in ENVS or name in groups:
        return env_table(name, groups.get(name, {}))
    if name.removeprefix("ablation_") in ABLATIONS:
        return ablation_table(name.removeprefix("ablation_"), runs, options)
    if (folder / f"{name}.csv").exists():
        return markdown(read_csv(folder / f"{name}.csv"))
    known = ["summary", "classes", *groups, *(f"ablation_{which}" for which in ABLATIONS)]
    known += [path.stem for path in folder.glob("*.csv")]
    raise trmrl.UserError(f"no table {name!r}; there are: {', '.join(known)}")


def fill_tables(text, make):
    """Write make(NAME) between <!-- table NAME --> and <!-- end -->, wherever they are."""
    pattern = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n{make(found[2])}\n\n{found[3]}", text)


def write_tables(runs, options):
    folder = Path(options.runs or "results")
    ours = [run for run in runs if not run.ablation]
    groups = group_runs(ours, lambda run: run.agent, options)
    make = partial(make_table, groups=groups, runs=runs, folder=folder, options=options)
    for document in map(Path, DOCUMENTS):
        if document.exists():
            text = document.read_text()
            document.write_text(fill_tables(text, make))
            print(f"{document}: {plural(text.count('<!-- table '), 'table')}")
        else:
            print(f"{document} does not exist")


# ---- 8. Command line -----------------------------------------------------------------------------

FIGURES = {
    "meta_training": draw_meta_training,
    "fast_adaptation": partial(draw_adaptation, "fast_adaptation", "test"),
    "ood": partial(draw_adaptation, "ood", "ood"),
    "refinement": partial(draw_agents, "refinement", draw_refinement, count=3, layers=4),
    "latent": partial(draw_agents, "latent", draw_latent),
    "online_adaptation": partial(draw_agents, "online_adaptation", draw_online_adaptation, count=3),
    "task_distributions": partial(draw_agents, "task_distributions", draw_task_distributions),
    "attention": partial(draw_agents, "attention", draw_attention),
}
FIGURES |= {f"ablation_{which}": partial(draw_ablation, which) for which in ABLATIONS}
OTHERS = {
    "film": lambda runs, options: draw_agents("film", draw_film, runs, options, env=options.env),
    "benchmark": draw_benchmark,
    "scaling": draw_scaling,
    "tables": write_tables,
}


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
    for group, values in STYLE.items():
        plt.rc(group, **values)
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
