"""Every figure of the paper, from runs. Each is one function, data in, axes out: take it into a notebook.

    python plots.py [FIGURE ...] [--runs DIR] [--out DIR]          # all that the runs at hand allow
    python plots.py film [--env E]                                 # frames and a GIF of one adaptation
    python plots.py benchmark [--env E] [--device D] [--threads K] # how fast, against this machine's limits
    python plots.py scaling [--device D]                           # how the speed depends on the sizes
"""
from __future__ import annotations

import copy
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gymnasium
import matplotlib.pyplot as plt
import mujoco
import numpy as np
import torch

import trmrl

BLUE, RED = "#0b6e99", "#c0392b"
AGENTS = {                                                 # an agent looks the same everywhere, also in grey
    "trmrl": dict(label="TrMRL", color=BLUE, linestyle="-", marker="o"),
    "rl2": dict(label="RL$^2$", color="#d9730d", linestyle="--", marker="s"),
    "oracle": dict(label="oracle", color="#555555", linestyle=":", marker="^")}
VARIANTS = [("#08306b", "-", "o"), (RED, "--", "s"), ("#e69f00", "-.", "^"), ("#5aa9d6", ":", "D"),
            ("#7a7a7a", (0, (5, 1, 1, 1, 1, 1)), "v"), ("#111111", (0, (1, 3)), "x")]   # of an ablation
ENVS = {"halfcheetah_vel": "HalfCheetahVel", "ant_dir": "AntDir", "ml1_reach": "ML1-Reach",
        "ml1_push": "ML1-Push", "ml45_train": "ML45-Train"}
STYLE = {"axes.titlesize": 11, "figure.titlesize": 12, "grid.alpha": 0.3, "legend.edgecolor": "none",
         "legend.fontsize": 9, "legend.columnspacing": 1, "legend.handlelength": 2.4}


# ---- runs ------------------------------------------------------------------------------------------------

class Found(NamedTuple):
    path: Path
    config: trmrl.Config
    rows: list                                             # of eval.csv

    @property
    def ablation(self):
        """Which one of .../ablations/<which>/<run> this is, if any."""
        parts = self.path.resolve().parts
        return parts[-2] if parts[-3:-2] == ("ablations",) else ""

    @property
    def finished(self):
        return max((r["step"] for r in self.rows), default=0) >= self.config.total_steps


def whole(rows):
    """Whether all meta-tests of an eval.csv have the same splits and tasks, each task all its episodes."""
    tests = defaultdict(set)
    for r in rows:
        tests[r["step"], r["split"]].add((r["task"], r["episode"]))
    tasks, splits = len({r["task"] for r in rows}), len({r["split"] for r in rows})
    return len(tests) == splits * len({r["step"] for r in rows}) and all(
        cells == set(itertools.product(range(tasks), range(1, 1 + max(k for _, k in cells))))
        for cells in tests.values())


def find_runs(folders):
    """All runs below these folders; damaged ones are named and skipped."""
    runs, names = [], set(trmrl.Config.__dataclass_fields__)
    for path in sorted(p.parent for folder in folders for p in Path(folder).rglob("config.json")):
        try:
            content = json.loads((path / "config.json").read_text())
            config = trmrl.Config(**{k: v for k, v in content.items() if k in names})
            trmrl.check(config)
            with open(path / "eval.csv", newline="") as f:
                lines = list(csv.DictReader(f))
            if any(None in line.values() for line in lines):
                raise ValueError("eval.csv ends within a line")
            rows = [{**{k: int(r[k]) for k in ("step", "task", "episode")}, "split": r["split"],
                     "return": float(r["return"]), "success": float(r["success"].strip() or "nan")}
                    for r in lines]
            if not whole(rows):
                raise ValueError("eval.csv lacks rows")
            runs.append(Found(path, config, rows))
        except FileNotFoundError as error:
            print(f"skipped {path}: it has no {Path(error.filename).name}", file=sys.stderr)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
            print(f"skipped {path}: damaged ({repr(error)[:120]})", file=sys.stderr)
    return runs


def group(runs, key, figure):
    """{env: {key of a config: [runs, one per seed, of equal settings]}}; what is left out is said."""
    groups = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda run: not run.finished):
        seeds = groups[run.config.env][key(run.config)]
        same = dict(seed=0, device="", threads=1, run_dir="", tag="", compile=False, checkpoint_every=0)
        settings = [replace(r.config, **same) for r in (*seeds, run)]
        why = {"has a tag": run.config.tag and not run.ablation, "has no meta-test yet": not run.rows,
               "has a seed that is there already": run.config.seed in [r.config.seed for r in seeds],
               "is not finished, as others are": seeds and seeds[0].finished and not run.finished,
               f"has other settings than {seeds and seeds[0].path}": settings[0] != settings[-1]}
        if any(why.values()):
            print(f"{figure}: left out {run.path}: it {next(k for k, v in why.items() if v)}")
        else:
            seeds.append(run)
    return {env: {k: seeds for k, seeds in curves.items() if seeds}
            for env, curves in groups.items() if any(curves.values())}


def learning_curve(rows, value="return", split="test", episode=1):
    """(steps, mean over the tasks)."""
    at = defaultdict(list)
    for r in rows:
        if r["split"] == split and r["episode"] == episode:
            at[r["step"]].append(r[value])
    return np.array(sorted(at)), np.array([np.mean(at[step]) for step in sorted(at)])


def over_seeds(curves):
    """Curves of several seeds -> (steps that all have, mean, low and high end of its bootstrap interval)."""
    steps = sorted(set.intersection(*(set(x.tolist()) for x, _ in curves)))
    values = np.array([[dict(zip(x.tolist(), y))[step] for step in steps] for x, y in curves])
    low, high = np.array([trmrl.bootstrap(column) for column in values.T]).T.reshape(2, -1)
    return np.array(steps), values.mean(axis=0), low, high


def last_test(rows, value="return", split="test", episodes=6):
    """(tasks, episodes) of the last meta-test; None where it had fewer episodes."""
    step = max((r["step"] for r in rows), default=0)
    cells = {(r["task"], r["episode"]): r[value] for r in rows if (r["step"], r["split"]) == (step, split)}
    tasks = sorted({task for task, _ in cells})
    values = np.array([[cells.get((task, k + 1), np.nan) for k in range(episodes)] for task in tasks])
    return values if tasks and np.isfinite(values).all() else None


# ---- Fig. 4, 5, 6 and 10 to 13: from the meta-tests of runs ----------------------------------------------

def plural(n, what):
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def for_scale(ax, env):
    known = {"halfcheetah_vel": (-150, "without adapting"), "ant_dir": (200, "standing still")}
    if env in known:
        ax.axhline(known[env][0], color="black", linewidth=1, linestyle=(0, (1, 3)), label=known[env][1])


def meta_training(ax, curves, env, value="return", looks=AGENTS):
    """Fig. 4, 10 to 13: test performance against steps; {key of looks: [(steps, values) per seed]}."""
    lowest, highest = np.inf, -np.inf
    for i, (key, seeds) in enumerate(curves.items()):
        steps, mean, low, high = over_seeds(seeds)
        look = looks[key] | {"label": f"{looks[key]['label']} ({plural(len(seeds), 'seed')})"}
        every = max(1, len(steps) // 8)
        ax.plot(steps / 1e6, mean, linewidth=2, markersize=5, markevery=(i % every, every), **look)
        lowest, highest = min(lowest, mean[-1]), max(highest, high.max())
        if len(seeds) > 1:
            ax.fill_between(steps / 1e6, low, high, color=look["color"], alpha=0.2, linewidth=0)
    for_scale(ax, env)
    label_axes(ax, env, value, "environment steps (millions)", "first episode")
    ax.set_xlim(left=0)
    if env == "halfcheetah_vel" and np.isfinite(lowest):   # what matters is far above the first steps
        ax.set_ylim(bottom=max(ax.get_ylim()[0], min(lowest - 15, -185)))
    if value == "success" and np.isfinite(highest):
        ax.set_ylim(top=min(1.03, 1.1 * highest + 0.05))


def adaptation(ax, tests, env, value="return", looks=AGENTS, split="test"):
    """Fig. 5, 6: performance per episode, interval over the tasks; {agent: [(tasks, episodes) per seed]}."""
    for i, (key, seeds) in enumerate(tests.items()):
        tasks = np.mean(seeds, axis=0)                     # (tasks, episodes)
        mean, ends = tasks.mean(axis=0), np.array([trmrl.bootstrap(column) for column in tasks.T]).T
        episodes = np.arange(1, len(mean) + 1) + 0.08 * (i - (len(tests) - 1) / 2)
        look = looks[key] | {"label": f"{looks[key]['label']} ({plural(len(seeds), 'seed')})"}
        ax.errorbar(episodes, mean, yerr=np.abs(ends - mean), capsize=3, **look)
    if split == "test":
        for_scale(ax, env)
    who = f"2 tasks, {len(tasks) // 2} starts each" if env == "ant_dir" else f"{len(tasks)} tasks"
    label_axes(ax, env, value, f"episode ({who})", "mean and\n95 % interval over tasks")
    ax.set_xticks(np.arange(1, len(mean) + 1))
    ax.margins(y=0.25)


def label_axes(ax, env, value, xlabel, what):
    if value == "success":
        ax.set_ylim(-0.03, 1.03)
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    name = "success rate" if value == "success" else "return"
    trained_on = {"ant_dir": " (both tasks)", "ml45_train": " (training goals)"}.get(env, "")
    ax.set(xlabel=xlabel, ylabel=f"{name}, {what}", title=ENVS.get(env, env) + trained_on)
    ax.grid()
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)    # never over a curve


def panels(n):
    """A figure of n axes, at most 8 inches wide: legible at the width of a README."""
    columns, rows = min(n, 2), (n + 1) // 2
    figure, axes = plt.subplots(rows, columns, figsize=(6.4 if n == 1 else 8, 3.6 * rows), squeeze=False,
                                layout="constrained")
    for ax in axes.flat[n:]:
        ax.remove()
    return figure, list(axes.flat[:n])


def save(figure, path, used):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"{path}: from {', '.join(map(str, used))}")


def draw_tests(path, title, plot, read, runs, key=lambda config: config.agent, looks=AGENTS, least=1):
    """A panel per env, a curve per `key` of a config: `plot` what `read` finds in the runs, if any."""
    envs = {env: curves for env, curves in group(runs, key, path.stem).items() if len(curves) >= least}
    if envs:
        (figure, axes), paths = panels(len(envs)), []
        for ax, env in zip(axes, sorted(envs, key=[*ENVS, *envs].index)):
            curves = envs[env]
            used = [run for seeds in curves.values() for run in seeds]
            value, keys = measure_of(used), [k for k in looks if k in curves]
            plot(ax, {k: [read(run.rows, value) for run in curves[k]] for k in keys}, env, value, looks)
            paths += [run.path for run in used]
        figure.suptitle(title)
        save(figure, path, paths)
    return bool(envs)


def measure_of(runs):
    """What is shown of a family: success where it knows such a thing, else the return."""
    return "return" if all(np.isnan(r["success"]) for run in runs for r in run.rows) else "success"


def draw_meta_training(runs, out):
    ours = [run for run in runs if not run.ablation]
    title = "Meta-training: test tasks, mean of the seeds, 95 % interval (Fig. 4)"
    if not draw_tests(out / "meta_training.png", title, meta_training, learning_curve, ours):
        return "needs a run: python trmrl.py --env halfcheetah_vel"


def draw_adaptation(name, split, title, runs, out):
    read = partial(last_test, split=split)
    ours = [run for run in runs if not run.ablation and read(run.rows, measure_of([run])) is not None]
    if not draw_tests(out / f"{name}.png", title, partial(adaptation, split=split), read, ours):
        return ("needs a finished run, which ends with six episodes of each test task: "
                "python trmrl.py --env halfcheetah_vel")


ABLATIONS = {  # folder: figure, title, what tells curves apart, which are wanted, their names, their flags
    "tfixup": (10, "T-Fixup on and off", lambda c: (c.layers, not c.tfixup),
               [(2, False), (2, True), (12, False), (12, True)],
               lambda k: f"{'off' if k[1] else 'on'}, L = {k[0]}",
               lambda k: f"--layers {k[0]}{' --no-tfixup' * k[1]}"),
    "memory": (11, "length of the memory", lambda c: c.memory_length, [1, 5, 25], "N = {}".format,
               "--memory-length {}".format),
    "layers": (12, "transformer layers", lambda c: c.layers, [1, 4, 12], "L = {}".format,
               "--layers {}".format),
    "heads": (13, "attention heads", lambda c: c.heads, [1, 4, 16], lambda k: plural(k, "head"),
              "--heads {}".format),
}
BASES = {"halfcheetah_vel": "--total-steps 600000",        # of all ablations
         "ml1_reach": "--memory-length 5 --total-steps 480000 --eval-every 20"}


def draw_ablation(which, runs, out):
    number, title, key, wanted, name, flags = ABLATIONS[which]
    shared = {"tfixup": (), "layers": ("default", "tfixup")}.get(which, ("default",))   # of other ablations
    ours = [run for run in runs if run.ablation == which or run.ablation in shared and run.config.tfixup]
    keys, default = sorted({key(run.config) for run in ours}), key(trmrl.Config())
    look = dict(zip(sorted(keys, key=lambda k: k != default), itertools.cycle(VARIANTS)))  # default: the same
    looks = {k: dict(zip(("label", "color", "linestyle", "marker"), (name(k), *look[k]))) for k in keys}
    title = f"Ablation: {title}; mean of the seeds, 95 % interval (Fig. {number})"
    draw_tests(out / f"ablation_{which}.png", title, meta_training, learning_curve, ours, key, looks, least=2)
    have = {(run.config.env, key(run.config)) for run in ours if run.rows}
    missing = [(env, k) for env in BASES for k in wanted if (env, k) not in have]
    if missing:
        (env, k), names = missing[0], ", no ".join(f"{ENVS[env]} {name(k)}" for env, k in missing)
        return (f"there is no {names}; the first: python trmrl.py --env {env} {BASES[env]} {flags(k)} "
                f"--run-dir runs/ablations/{which}/a-seed1; README.md has a script of all")


# ---- Fig. 2, 3, 7, 8, 9: from a trained agent ------------------------------------------------------------

def pca(x, k):
    """Rows x (M, d) -> the first k principal components (k, d) and their shares of the variance (k,)."""
    _, s, vt = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    return vt[:k], s[:k] ** 2 / (s ** 2).sum()


def regression_error(x, y, x_test, y_test):
    """Mean squared error on new rows of a linear regression, with intercept, from x (M, d) to y (M, A)."""
    x, x_test = (np.pad(z, ((0, 0), (0, 1)), constant_values=1.0) for z in (x, x_test))
    return np.square(x_test @ np.linalg.lstsq(x, y, rcond=None)[0] - y_test).mean()


def density(values, grid):
    """Gaussian kernel density (Scott's rule) of values (n,) at the points of the grid."""
    width = max(values.std(), 1e-9) * len(values) ** -0.2
    return np.exp(-0.5 * ((grid[:, None] - values) / width) ** 2).mean(axis=1) / (width * np.sqrt(2 * np.pi))


def settled(velocity, target, tolerance=0.3, window=5):
    """Steps until the velocity (T,), as mean of the last `window` steps, stays that near; None: never."""
    total = np.concatenate([np.zeros(window), np.cumsum(velocity)])
    mean = (total[window:] - total[:-window]) / np.minimum(np.arange(len(velocity)) + 1, window)
    steps = int(np.flatnonzero(np.abs(mean - target) >= tolerance).max(initial=-1)) + 1
    return None if steps == len(velocity) else steps


@torch.no_grad()
def trace(agent, x):
    """Windows x (M, N, width) -> [e^0, ..., e^L], (M, N, d) each, and [alpha], (M, heads, N, N) each."""
    memories, weights = [agent.memory.phi(x) + agent.memory.positions], []
    for layer in agent.memory.transformer.layers:
        e, alpha = layer(memories[-1])
        memories.append(e)
        weights.append(alpha)
    return memories, weights


def look_inside(agent, trials, chunk=4000):
    """Memories of all steps after 0 to L layers (L + 1, B, T, d); the last layer's attention (B, T, N)."""
    (B, T, width), N = trials.memories.shape, agent.config.memory_length
    first = (trials.start + T * torch.arange(B, device=trials.start.device)[:, None]).flatten()
    memories, attention = [], []
    for index in torch.arange(B * T, device=first.device).split(chunk):
        x, current = trmrl.windows(trials.memories.view(-1, width), index, first[index], N,
                                   agent.state_size)
        layers, weights = trace(agent, x)
        rows = torch.arange(len(x), device=x.device)
        memories.append(torch.stack([e[rows, current] for e in layers]))
        slot = current[:, None] - torch.arange(N, device=x.device)        # of 0, 1, ... steps before
        alpha = weights[-1][rows, :, current].mean(dim=1).gather(1, slot.clamp(min=0))
        attention.append(torch.where(slot >= 0, alpha, torch.nan))        # NaN: before the episode
    return (torch.cat(memories, dim=1).view(len(layers), B, T, -1).cpu().numpy(),
            torch.cat(attention).view(B, T, N).cpu().numpy())


SHOWN = np.array([[0.5], [1.0], [1.5], [2.0], [2.5]])      # target velocities, m/s
LINES = ["-", (0, (5, 1)), "-.", (0, (2, 1)), (0, (7, 1, 1, 1, 1, 1))]    # theirs


def meet(agent, tasks=SHOWN, episodes=1):
    """Trials of the agent's mean actions on these tasks, from starts that are always the same."""
    envs = trmrl.make_tasks(agent.config.env, len(tasks))
    try:
        return trmrl.collect(agent, envs, episodes, sample=False, seed=trmrl.TEST_SEED, tasks=tasks)
    finally:
        envs.close()


def shade(target, targets):
    """Dark for slow, light for fast: in order also without colour."""
    return plt.cm.viridis(0.9 * (target - min(targets)) / max(max(targets) - min(targets), 1e-9))


def refinement_errors(agent, trials, train):
    """Per layer: 1 - cosine similarity to e^L; test error of a regression to the mean action."""
    memories, _ = look_inside(agent, trials)               # (L + 1, B, T, d)
    with torch.no_grad():
        action = agent.policy(torch.as_tensor(memories[-1]).to(agent.log_std.device)).cpu().numpy()
    unit = memories / np.linalg.norm(memories, axis=-1, keepdims=True)
    parts = ((e[:train], action[:train], e[train:], action[train:]) for e in memories)
    regression = [regression_error(*map(np.concatenate, part)) for part in parts]
    return 1 - (unit * unit[-1]).sum(axis=-1).mean(axis=(1, 2)), np.array(regression)


def refinement(axes, representation, regression):
    """Fig. 7: two errors per layer, (L + 1,) each."""
    layers = np.arange(len(representation))
    for ax, values, line, title, label in (
            (axes[0], representation, "o-", "representation error", "1 - cosine to the last layer"),
            (axes[1], regression, "s--", "linear regression of the action", "mean squared error")):
        ax.plot(layers, values, line, color=BLUE, linewidth=2)
        ax.set_xticks(layers, [r"$\phi$ (0)", *layers[1:]])
        ax.set(xlabel="memory after layer", ylabel=label, title=title)
        ax.set_ylim(bottom=0)
        ax.grid()


def draw_refinement(agent, out):
    velocities = np.random.default_rng(trmrl.TEST_SEED).uniform(0, 3, (30, 1))
    figure, axes = panels(2)
    refinement(axes, *refinement_errors(agent, meet(agent, velocities, episodes=3), train=20))
    return figure


def latent(ax, memories, targets):
    """Fig. 8: working memories (B, T, d) of B target velocities, their first three components, in 3-D."""
    rows = np.concatenate(memories)
    components, shares = pca(rows, 3)
    for target, points in zip(targets, (memories - rows.mean(axis=0)) @ components.T):
        ax.scatter(*points.T, s=9, color=shade(target, targets), label=f"{target:.1f} m/s", depthshade=False)
    for axis, share, i in zip((ax.xaxis, ax.yaxis, ax.zaxis), shares, (1, 2, 3)):
        axis.set_label_text(f"component {i} ({share:.0%})", fontsize=9)
    ax.tick_params(labelsize=8, pad=0)


def draw_latent(agent, out):
    memories = agent.memory.phi(meet(agent).memories[:, 20:]).cpu().numpy()    # once it knows the task
    figure = plt.figure(figsize=(8, 4.2))
    for left, elev, azim in ((0.0, 25, -60), (0.48, 80, -90)):
        ax = figure.add_axes([left, 0.12, 0.48, 0.84], projection="3d", elev=elev, azim=azim)
        latent(ax, memories, SHOWN[:, 0])
        ax.set_box_aspect((1, 1, 0.9), zoom=0.92)
    ax.zaxis.set_label_text("")                            # seen from above
    ax.set_zticklabels([])
    figure.legend(*ax.get_legend_handles_labels(), ncols=5, loc="lower center", markerscale=2,
                  bbox_to_anchor=(0.5, 0.015), framealpha=0)
    return figure


def online_adaptation(axes, velocity, reward, targets):
    """Fig. 9: velocity and reward (B, T) against the step of the first episode, for B target velocities."""
    for v, r, target, line in zip(velocity, reward, targets, itertools.cycle(LINES)):
        colour, steps = shade(target, targets), settled(v, target, window=1)
        when = "never" if steps is None else f"after {plural(steps, 'step')}"
        axes[0].axhline(target, linestyle=":", color=colour, linewidth=1.2)
        axes[0].plot(v, color=colour, linestyle=line)
        axes[1].plot(r, color=colour, linestyle=line, label=f"{target:.1f} m/s: {when}")
    axes[0].set(ylabel="velocity (m/s)\ntargets dotted")
    axes[1].set(xlabel="time step of the first episode", ylabel="reward per step")
    axes[1].legend(title="velocity stays within\n0.3 m/s of its target", loc="lower right",
                   edgecolor="grey", fontsize=10)
    for ax in axes:
        ax.grid()


def draw_online_adaptation(agent, out):
    trials = meet(agent)
    figure, axes = plt.subplots(2, 1, figsize=(8, 5.8), sharex=True, layout="constrained")
    online_adaptation(axes, trials.info["x_velocity"], trials.reward, SHOWN[:, 0])
    axes[0].set_xlim(0, 100)
    return figure


def task_distributions(ax, values, targets, lines=LINES):
    """Fig. 2: B tasks as densities of their memories (B, T) along a line; returns neighbours' overlaps."""
    margin = 0.15 * np.ptp(values)
    grid = np.linspace(values.min() - margin, values.max() + margin, 400)
    densities = [density(row, grid) for row in values]
    for target, y, line in zip(targets, densities, itertools.cycle(lines)):
        ax.fill_between(grid, y, color=shade(target, targets), alpha=0.35, linewidth=0)
        ax.plot(grid, y, color=shade(target, targets), linestyle=line, label=f"{target:.1f} m/s")
    shared = [np.minimum(a, b) for a, b in zip(densities, densities[1:])]
    for y, hatch in zip(shared, 2 * ["///", "\\\\\\", "xxx", "..."]):
        ax.fill_between(grid, y, facecolor="none", edgecolor="black", hatch=hatch, linewidth=0.5)
    overlap = [np.trapezoid(y, grid) for y in shared]
    apart, low, high = targets[1] - targets[0], min(overlap), max(overlap)
    ax.set(title=f"{apart:g} m/s apart: {low:.0%} to {high:.0%} shared (hatched)", ylabel="density",
           yticks=[], ylim=(0, 1.08 * np.max(densities)))
    return overlap


def draw_task_distributions(agent, out):
    memories = agent.memory.phi(meet(agent).memories).cpu().numpy()       # (B, T, d)
    figure, axes = panels(2)
    for ax, rows, every, name in ((axes[0], memories.mean(axis=1), 1, "the tasks' mean memories"),
                                  (axes[1], np.concatenate(memories), 2, "all memories (the gait)")):
        along = (memories - rows.mean(axis=0)) @ pca(rows, 1)[0][0]       # (B, T)
        task_distributions(ax, along[::every], SHOWN[::every, 0], LINES[::every])
        ax.set_xlabel(f"along the first principal component of\n{name}")
        ax.legend(title="target", loc="upper right")
    return figure


def attention(axes, weights, velocity, targets, shown):
    """Fig. 3: weights (B, T, N) to the memory 0, 1, ... steps before; one task, then all before and after."""
    (top, image, bars), (_, T, N) = axes, weights.shape
    steps, full = min(T, max(60, 2 * N)), min(T, N) - 1                   # from here on the memory is full
    knows = [settled(v, target) for v, target in zip(velocity, targets)]
    top.plot(np.arange(steps), velocity[shown, :steps], color=BLUE)
    top.axhline(targets[shown], color="black", linestyle="--", linewidth=1)
    top.set(ylabel="velocity\n(m/s)", title=f"one task: {targets[shown]:.4g} m/s")
    picture = image.imshow(weights[shown, :steps].T, aspect="auto", origin="lower", cmap="Greys", vmin=0,
                           vmax=np.nanmax(weights[shown, full:steps]), interpolation="nearest")
    image.set(xlabel="time step of the first episode", ylabel="age of the memory\nthat it looks at (steps)",
              facecolor="#f3dcc8")
    top.figure.colorbar(picture, ax=image, orientation="horizontal", fraction=0.08, aspect=40, extend="max",
                        label="attention weight, mean of the heads (tan: no memory yet)")
    if knows[shown] is not None:
        for ax in (top, image):
            ax.axvline(knows[shown] - 0.5, color=RED, linewidth=1.5)
        top.text(knows[shown] + 0.5, 0.06, "at its target", color=RED, fontsize=9,
                 transform=top.get_xaxis_transform())
    pairs = [(w[full:k], w[k:]) for w, k in zip(weights, knows) if k is not None and k > full]
    bars.set(title=f"{len(pairs)} of {len(weights)} tasks: before\nand after the target",
             xlabel="mean attention weight", ylabel="age of the memory (steps)", ylim=(-0.5, N - 0.5))
    if pairs:
        for i, (label, colour, hatch) in enumerate((("before", "white", "///"), ("after", BLUE, ""))):
            mean = np.concatenate([pair[i] for pair in pairs]).mean(axis=0)
            bars.barh(np.arange(N) + 0.2 - 0.4 * i, mean, height=0.4, label=label, facecolor=colour,
                      hatch=hatch, edgecolor="black")
        bars.legend()
    else:
        early = any(k is not None for k in knows)
        said = "who arrived did so before\nthe memory was full" if early else "no task reached\nits target"
        bars.set(xticks=[])
        bars.text(0.5, 0.5, said, ha="center", fontsize=9, transform=bars.transAxes)
    for ax in (image, bars):
        ax.set_yticks(np.arange(0, N, max(1, N // 10)))


def draw_attention(agent, out):
    targets = (np.arange(20) + 0.5) * 3 / 20               # those of the test tasks
    trials = meet(agent, targets[:, None])
    figure = plt.figure(figsize=(8, 4.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=[2.2, 1], height_ratios=[1, 2])
    top = figure.add_subplot(grid[0, 0])
    attention((top, figure.add_subplot(grid[1, 0], sharex=top), figure.add_subplot(grid[:, 1])),
              look_inside(agent, trials)[1], trials.info["x_velocity"], targets, shown=13)
    return figure


# ---- film: one agent meets one task ----------------------------------------------------------------------

def render(folder):
    """Frames of folder/qpos.npy; in a process of its own, since MuJoCo picks its OpenGL when imported."""
    model = mujoco.MjModel.from_binary_path(f"{folder}/body.mjb")
    data, frames = mujoco.MjData(model), []
    with mujoco.Renderer(model, height=300, width=480) as renderer:
        for qpos in np.load(f"{folder}/qpos.npy"):
            data.qpos = qpos
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera="track")
            frames.append(renderer.render()[90:])          # less sky
    np.save(f"{folder}/frames.npy", np.array(frames))


def photograph(model, qpos):
    """Positions (T, nq) of a body -> frames (T, height, width, 3), or what was tried where nothing works."""
    choice, tried = ["egl", "osmesa"] if sys.platform == "linux" else [""], []
    for backend in [os.environ["MUJOCO_GL"]] if "MUJOCO_GL" in os.environ else choice:
        with tempfile.TemporaryDirectory() as folder:
            np.save(f"{folder}/qpos.npy", qpos)
            mujoco.mj_saveModel(model, f"{folder}/body.mjb")
            child = subprocess.run([sys.executable, "-c", f"import plots; plots.render({folder!r})"],
                                   cwd=Path(__file__).parent, env=os.environ | {"MUJOCO_GL": backend},
                                   capture_output=True)
            if child.returncode == 0:
                return np.load(f"{folder}/frames.npy")
            error = (child.stderr.decode(errors="replace").strip() or "no word").splitlines()[-1]
            tried.append(f"MUJOCO_GL={backend} ({error[:100]})")
    return ", ".join(tried)


def film(axes, frames, captions):
    """A strip: a frame and its caption per axis, evenly spread over those given."""
    for ax, i in zip(axes, np.linspace(0, len(frames) - 1, len(axes)).astype(int)):
        ax.imshow(frames[i])
        ax.set_title(captions[i], fontsize=10)
        ax.axis("off")


def write_gif(path, frames, captions, seconds):
    """An animation; `seconds` from a frame to the next."""
    from PIL import Image, ImageDraw, ImageFont            # Matplotlib brings it along
    images, font = [Image.fromarray(frame) for frame in frames], ImageFont.load_default(size=20)
    for image, caption in zip(images, captions):
        ImageDraw.Draw(image).text((10, 8), caption, "white", font, stroke_width=2, stroke_fill="black")
    images = [image.quantize(64, dither=Image.Dither.NONE) for image in images]
    images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 * seconds), loop=0)


def draw_film(agent, out):
    env = agent.config.env
    task, goal, steps = {"halfcheetah_vel": (2.0, "2.0 m/s", 45), "ant_dir": (-1.0, "backward", 100)}[env]
    body, trials = trmrl.make_tasks(env, 1), meet(agent, [[task]])
    # The observation has all of the position but where on the ground: the velocities tell, sideways nearly.
    seen, velocity = body.model.nq - body.skipped_qpos, trials.info["x_velocity"][0]
    along_xy = np.stack([velocity, trials.obs[0, :, seen + 1]], axis=1)[:, :body.skipped_qpos]
    ground = body.dt * along_xy.cumsum(axis=0)
    qpos = np.concatenate([ground[:-1], trials.obs[0, 1:, :seen]], axis=1)[:3 * steps]
    frames = photograph(body.model, qpos)                  # (T, height, width, 3)
    if isinstance(frames, str):
        return f"needs off-screen OpenGL: install libegl1 or libosmesa6 (Debian's names); tried: {frames}"
    captions = [f"{body.dt * (t + 1):.2f} s: {round(v, 1) + 0.0:.1f} m/s" for t, v in enumerate(velocity)]
    out.mkdir(parents=True, exist_ok=True)
    print(out / "film.gif")
    write_gif(out / "film.gif", frames[::2], [f"target: {goal}   {c}" for c in captions[::2]], 2 * body.dt)
    figure, axes = plt.subplots(2, 4, figsize=(8, 2.8), layout="constrained")
    film(axes.flat, frames[:steps], captions)
    figure.suptitle(f"{ENVS[env]}, target: {goal}")
    return figure


def draw_from_agent(name, draw, title, runs, out, env="halfcheetah_vel"):
    """With the first agent that serves, runs without a tag first, then finished ones; others are named."""
    several = name == "refinement"                         # layers
    runs = [run for run in runs if (run.config.env, run.config.agent) == (env, "trmrl")
            and (run.config.layers > 1 if several else not run.ablation)]
    for run in sorted(runs, key=lambda run: (
            bool(run.config.tag) and not several, not run.finished, several and run.config.layers != 4,
            not run.config.tfixup, run.ablation, run.config.tag)):
        try:
            agent = trmrl.load_agent(run.path)
            if not all(torch.isfinite(x).all() for x in agent.state_dict().values()):
                raise trmrl.UserError("weights that are not finite")
            if not agent.trained_steps:
                raise trmrl.UserError("an untrained agent")
        except trmrl.UserError as error:
            print(f"{name}: skipped {run.path}: {str(error)[:200]}", file=sys.stderr)
            continue
        figure = draw(agent, out)
        if isinstance(figure, str):                        # what is missing
            return figure
        steps = f"{agent.trained_steps / 1e6:.3g} of {run.config.total_steps / 1e6:.3g} M steps"
        figure.supxlabel(f"{run.path.name}, {steps}", x=0.995, ha="right", fontsize=8, color="grey")
        if title:
            figure.suptitle(title)
        return save(figure, out / f"{name}.png", [f"{run.path}{'' if run.finished else f' after {steps}'}"])
    return (f"needs a trained agent{several * ' of several layers'}: python trmrl.py --env {env}"
            + several * " --layers 4 --tag 4layers")


# ---- how fast --------------------------------------------------------------------------------------------

def rates(works, seconds=0.5, rounds=12, deadline=95.0):
    """{name: (work, steps)} -> {name: environment steps per second}, the best round; late: fewer rounds.

    All in turn, round by round: whoever else uses the machine now and then slows some rounds of each."""
    speeds, began = dict.fromkeys(works, 0.0), time.perf_counter()
    for work, _ in works.values():
        work()                                             # to warm up, and to compile
    warm = time.perf_counter()
    for done in range(1, rounds + 1):
        for name, (work, steps) in works.items():
            calls, start = 0, time.perf_counter()
            while (now := time.perf_counter()) - start < seconds:
                work()
                calls += 1
            speeds[name] = max(speeds[name], calls * steps / (now - start))
        if (now := time.perf_counter()) - began + (now - warm) / done > deadline:
            break                                          # another round would come too late
    return speeds


def raw_physics(envs, calls=200):
    """MuJoCo alone: the same batch and threads, random actions, one native call per environment step."""
    envs.reset(seed=0)
    rng, start = np.random.default_rng(0), envs.state.copy()
    path = np.empty((len(start), envs.frame_skip, start.shape[1]))

    def work():
        state = start.copy()
        for _ in range(calls):
            controls = np.repeat(rng.uniform(-1, 1, (len(state), 1, envs.model.nu)), envs.frame_skip, axis=1)
            envs.pool.rollout(envs.models, envs.datas, state, controls, nstep=envs.frame_skip,
                              skip_checks=True, state=path, chunk_size=envs.chunk)
            state[:] = path[:, -1]

    return work, calls * len(start)


def stepping(envs, calls=200):
    """A VectorEnv under random actions; whoever is done starts anew."""
    rng, shape = np.random.default_rng(0), envs.action_space.shape
    by_hand = envs.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.DISABLED

    def work():
        envs.reset(seed=0)
        for _ in range(calls):
            _, _, terminated, truncated, _ = envs.step(rng.uniform(-1, 1, shape).astype(np.float32))
            if by_hand and (done := terminated | truncated).any():
                envs.reset(options={"reset_mask": done})

    return work, calls * shape[0]


def bare_network(agent, config):
    """Forward and backward of the minibatches that a batch brings, on random data: the learner's limit."""
    device, M, N = agent.log_std.device, config.minibatch, config.memory_length
    x = torch.randn(M, N, agent.memory.width, device=device)
    current = torch.full((M,), N - 1, device=device)

    def work():
        for _ in range(10):
            agent.zero_grad()
            e = agent.memory.remember(x, current)
            (agent.policy(e).mean() + agent.values(e, x[:, -1, :agent.state_size]).mean()).backward()
        agent.policy[0].weight.grad.sum().item()           # whatever the device, it is done by now

    return work, 10 * M / config.epochs


def first_iteration(config):
    """Seconds from typing the command to the end of its first iteration, peak MB, seconds of the import."""
    import resource                                        # not on Windows
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run([sys.executable, trmrl.__file__, "--env", config.env, "--device", config.device,
                        "--threads", str(config.threads), "--total-steps", "1", "--final-episodes", "1",
                        "--run-dir", f"{folder}/run"], check=True, capture_output=True)
        whole = time.perf_counter() - began
    kilo = 2**20 if sys.platform == "darwin" else 1024     # macOS counts memory in bytes, Linux in KB
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / kilo
    libraries = "import gymnasium, mujoco.rollout, time, torch"
    code = f"{libraries}; t = time.time(); import trmrl; print(time.time() - t)"
    imported = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                              cwd=Path(trmrl.__file__).parent).stdout
    return whole, peak, float(imported)


def preset(env, device, **changes):
    """(config, tasks, new agent) of the default preset, but for the changes."""
    config = replace(trmrl.Config(env=env, device=str(trmrl.pick_device(device))),
                     **{**trmrl.PRESETS[env]["default"], **changes})
    trmrl.check(config)
    trmrl.set_threads(config.threads)
    envs = trmrl.make_tasks(env, config.num_tasks * config.episodes_per_trial, 0)    # all side by side
    state_size, space = envs.single_observation_space.shape[0], envs.single_action_space
    return config, envs, trmrl.Agent(config, state_size, space.low, space.high).to(config.device)


def collect(agent, envs):
    """The trials of an iteration, as training collects them."""
    config = agent.config
    return trmrl.collect(agent, envs, config.episodes_per_trial, True, 0, envs.tasks[:config.num_tasks])


def measure(env, device, threads=None):
    """[(what, value, unit)] of the default preset."""
    all_cores = preset(env, device, threads=0)[1]          # the same tasks, by all cores
    count = torch.get_num_threads()
    config, envs, agent = preset(env, device, **({} if threads is None else {"threads": threads}))
    whole, peak, imported = first_iteration(config)        # before a compiler is a child, too
    body = {"halfcheetah_vel": "HalfCheetah-v5", "ant_dir": "Ant-v5"}[env]
    sync = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(body)] * envs.num_envs)
    batch, generator = envs.num_envs * envs.episode_length, torch.Generator(config.device)
    learners = [copy.deepcopy(agent) for _ in range(4)]
    optimizers = [trmrl.make_optimizer(learner, config) for learner in learners]

    def update(i, trials, threads=config.threads, compile=False):
        trmrl.set_threads(threads)
        settings = replace(config, compile=compile)
        trmrl.ppo_update(learners[i], optimizers[i], trials, settings, generator)
        trmrl.set_threads(config.threads)

    works = {"raw physics": raw_physics(envs), "SyncVectorEnv": stepping(sync), "our tasks": stepping(envs)}
    suffixes = [""]
    if count > torch.get_num_threads():
        suffixes = [f", {count} threads", ""]
        works |= {f"raw physics{suffixes[0]}": raw_physics(all_cores),
                  f"our tasks{suffixes[0]}": stepping(all_cores)}
    works |= {"collecting": (lambda: collect(agent, envs), batch),
              "bare network": bare_network(agent, config),
              "our update": (partial(update, 0, collect(agent, envs)), batch),
              "end to end": (lambda: update(1, collect(learners[1], envs)), batch)}
    if suffixes[0]:
        works[f"end to end{suffixes[0]}"] = lambda: update(2, collect(learners[2], all_cores), count), batch
    try:
        trmrl.check_compiler(config.device)
        works["end to end, compiled"] = lambda: update(3, collect(learners[3], envs), compile=True), batch
    except trmrl.UserError as error:
        print(f"benchmark: end to end, compiled, is not measured: {error}")
    speeds, ratios = rates(works), {}
    for suffix in suffixes:
        ours = speeds[f"our tasks{suffix}"]
        ratios[f"our tasks / raw physics{suffix}"] = ours / speeds[f"raw physics{suffix}"]
        ratios[f"our tasks / SyncVectorEnv{suffix}"] = ours / speeds["SyncVectorEnv"]
    series = 1 / (1 / speeds["raw physics"] + 1 / speeds["bare network"])
    for name in [name for name in ("end to end", "end to end, compiled") if name in speeds]:
        ratios[f"{name} / (raw physics and bare network in series)"] = speeds[name] / series
    ratios["end to end / 1,235 steps/s of an MLP PPO"] = speeds["end to end"] / 1235
    return [*((what, value, "steps/s") for what, value in speeds.items()),
            *((what, value, "") for what, value in ratios.items()),
            ("peak memory", peak, "MB"),
            ("import trmrl, beyond its libraries", imported, "s"),
            ("first iteration, with start and meta-test", whole, "s")]


def benchmark(ax, rows, env):
    """Bars of the speeds, limits in grey."""
    speeds = [(what, value) for what, value, unit in rows if unit == "steps/s"]
    limits = {"raw physics", "SyncVectorEnv", "bare network"}
    colours = ["#bbbbbb" if what.split(",")[0] in limits else BLUE for what, _ in speeds]
    bars = ax.barh([what for what, _ in speeds], [value for _, value in speeds], color=colours)
    ax.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(right=1.15 * max(value for _, value in speeds))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    threads = plural(torch.get_num_threads(), "CPU thread")
    ax.set(xlabel="environment steps per second",
           title=f"{ENVS.get(env, env)}, {threads} unless said; grey: limits, others")


def draw_benchmark(env, device, out, threads=None):
    rows = measure(env, device, threads)
    threads = plural(torch.get_num_threads(), "thread")
    print(f"\n{env}, default preset, {threads}, device {trmrl.pick_device(device)}")
    for what, value, unit in rows:
        print(f"  {what:<55} {value:>10,.{0 if value >= 100 else 2}f} {unit}")
    name = "benchmark" if env == "halfcheetah_vel" else f"benchmark_{env}"
    out.mkdir(parents=True, exist_ok=True)
    lines = [f'"{what}",{value:.4g},{unit}\n' for what, value, unit in rows]
    (out / f"{name}.csv").write_text("".join(["what,value,unit\n", *lines]))
    figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
    benchmark(ax, rows, env)
    save(figure, out / f"{name}.png", ["this machine"])


SIZES = {"memory_length": (1, 5, 10, 25, 50), "layers": (1, 2, 4, 8, 12), "d_model": (32, 64, 128, 256),
         "num_tasks": (5, 10, 20, 40, 80)}                 # what `scaling` changes, one at a time


def iteration_seconds(config, envs, agent):
    """(seconds to collect the trials of an iteration, seconds of its update)."""
    optimizer, generator = trmrl.make_optimizer(agent, config), torch.Generator(config.device)
    timed = 1                                              # epoch, of equal work; the rest is 2 % of them
    for _ in range(2):                                     # the first: to warm up
        began = time.perf_counter()
        trials = collect(agent, envs)
        collected = time.perf_counter()
        trmrl.ppo_update(agent, optimizer, trials, replace(config, epochs=timed), generator)
        updating = config.epochs / timed * (time.perf_counter() - collected)
    return collected - began, updating


def scaling(device, sizes=SIZES, rounds=3):
    """End-to-end speed of HalfCheetahVel's preset on one thread, one of its sizes changed at a time."""
    seconds = defaultdict(list)                            # of each config: (collecting, updating)
    settings = [(name, value) for name, values in sizes.items() for value in values]
    made = [preset("halfcheetah_vel", device, threads=1, **{name: value},
                   **({"d_ff": 4 * value} if name == "d_model" else {})) for name, value in settings]
    for _ in range(rounds):                                # the best: others may use the machine now and then
        for config, envs, agent in {str(config): each for each in made for config in each[:1]}.values():
            seconds[str(config)].append(iteration_seconds(config, envs, agent))
    rows = []
    for (name, value), (config, envs, _) in zip(settings, made):
        collecting, updating = np.min(seconds[str(config)], axis=0)
        steps = config.num_tasks * config.episodes_per_trial * envs.episode_length
        rows.append({"setting": name, "value": value, "collect_seconds": round(collecting, 3),
                     "update_seconds": round(updating, 3),
                     "steps_per_second": round(steps / (collecting + updating))})
        line = "  {:<13} {:>4}   collect {:>7.2f} s   update {:>7.2f} s {:>8,} steps/s"
        print(line.format(*rows[-1].values()), flush=True)
        envs.close()
    return rows


def draw_scaling(device, out):
    rows = scaling(device)
    out.mkdir(parents=True, exist_ok=True)
    (out / "scaling.csv").write_text(trmrl.csv_text(rows, header=True))
    print(f"{out / 'scaling.csv'}: from this machine")


# ---- command line ----------------------------------------------------------------------------------------

FIGURES = {
    "meta_training": draw_meta_training,
    "fast_adaptation": partial(draw_adaptation, "fast_adaptation", "test",
                               "Fast adaptation: six episodes in a row on test tasks (Fig. 5)"),
    "ood": partial(draw_adaptation, "ood", "ood",
                   "Out of distribution: target velocities in [3, 4] m/s (Fig. 6)"),
    **{name: partial(draw_from_agent, name, draw, title) for name, draw, title in (
        ("refinement", draw_refinement, "Memories, layer by layer: 30 tasks, 3 episodes each (Fig. 7)"),
        ("latent", draw_latent, "Working memories at five target velocities, from two sides (Fig. 8)"),
        ("online_adaptation", draw_online_adaptation, "The first steps on five new tasks (Fig. 9)"),
        ("task_distributions", draw_task_distributions,
         r"Tasks as distributions of working memories $\phi(s, a, r, \eta)$ (Fig. 2)"),
        ("attention", draw_attention, "Which memories the last layer looks at (Fig. 3)"))},
    **{f"ablation_{which}": partial(draw_ablation, which) for which in ABLATIONS},
}
OTHERS = ("film", "benchmark", "scaling")                  # only when asked for


def main(argv=None):
    """Exit status: 0, or 1 a figure failed, 2 a mistake of the user's."""
    parser = trmrl.Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    there = ", ".join([*FIGURES, *OTHERS])
    parser.add_argument("figures", nargs="*", metavar="FIGURE",
                        help=f"{there} (default: all but the last three)")
    parser.add_argument("--runs", help="look for runs here (default: results and runs)")
    parser.add_argument("--out", default="figures", help="where the pictures go (default: figures)")
    parser.add_argument("--env", default="halfcheetah_vel", choices=list(trmrl.FAMILIES),
                        help="of film and benchmark (default: halfcheetah_vel)")
    parser.add_argument("--device", default="auto", help="of benchmark and scaling (default: auto)")
    parser.add_argument("--threads", type=int, help="of the benchmark (default: those of the preset)")
    plt.switch_backend("Agg")
    plt.rcParams.update(STYLE)
    status = 0
    try:
        args = parser.parse_args(argv)
        out, unknown = Path(args.out), set(args.figures) - {*FIGURES, *OTHERS}
        if unknown:
            raise trmrl.UserError(f"unknown figure {min(unknown)!r}; there are: {there}")
        if args.runs and not Path(args.runs).is_dir():
            raise trmrl.UserError(f"there is no folder {args.runs}; name another with --runs")
        calls = {**FIGURES, "film": partial(draw_from_agent, "film", draw_film, "", env=args.env),
                 "benchmark": lambda runs, out: draw_benchmark(args.env, args.device, out, args.threads),
                 "scaling": lambda runs, out: draw_scaling(args.device, out)}
        wanted = args.figures or list(FIGURES)
        runs = find_runs([args.runs] if args.runs else ["results", "runs"])
        trmrl.set_threads(1)
        for name in wanted:
            try:
                missing = calls[name](runs, out)
                if missing:
                    print(f"{name}: {missing}")
            except (trmrl.UserError, OSError):             # the same would meet the other figures
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
