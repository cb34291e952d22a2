"""The figures of the paper, from runs. Each is one function: data in, axes out.

    python plots.py [FIGURE ...] [--runs DIR] [--out DIR]     # every figure that the runs at hand allow
    python plots.py benchmark [--env E] [--device D]          # how fast, against the limits of this machine
"""
from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import gymnasium
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

import trmrl

COLOURS = {"trmrl": "#0b6e99", "rl2": "#d9730d", "oracle": "#555555"}  # an agent keeps its colour everywhere
LINES = {"trmrl": "-", "rl2": "--", "oracle": ":"}                        # and its line, for print
NAMES = {"trmrl": "TrMRL", "rl2": "RL$^2$", "oracle": "oracle (told the task)",
         "halfcheetah_vel": "HalfCheetahVel", "ant_dir": "AntDir"}


# ---- runs ------------------------------------------------------------------------------------------------

def find_runs(folders):
    """All runs below these folders: (path, config, rows of eval.csv); damaged ones are named and skipped."""
    runs = []
    for path in sorted(p.parent for folder in folders for p in Path(folder).rglob("config.json")):
        try:
            config = json.loads((path / "config.json").read_text())
            with open(path / "eval.csv") as f:
                rows = [{"step": int(r["step"]), "split": r["split"], "task": int(r["task"]),
                         "episode": int(r["episode"]), "return": float(r["return"]), "success": r["success"]}
                        for r in csv.DictReader(f)]
            runs.append((path, {k: config[k] for k in ("env", "agent", "seed", "tag")}, rows))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"skipped {path}: damaged ({error!r})", file=sys.stderr)
    return runs


def learning_curve(rows, split="test", episode=1):
    """(steps, mean return over the tasks)."""
    at = defaultdict(list)
    for r in rows:
        if r["split"] == split and r["episode"] == episode:
            at[r["step"]].append(r["return"])
    return np.array(sorted(at)), np.array([np.mean(at[step]) for step in sorted(at)])


def over_seeds(curves):
    """Curves of several seeds -> (steps that all have, mean, low and high end of its bootstrap interval)."""
    steps = sorted(set.intersection(*(set(x.tolist()) for x, _ in curves)))
    values = np.array([[dict(zip(x.tolist(), y))[step] for step in steps] for x, y in curves])
    low, high = np.array([trmrl.bootstrap(column) for column in values.T]).T.reshape(2, -1)
    return np.array(steps), values.mean(axis=0), low, high


# ---- figures ---------------------------------------------------------------------------------------------

def meta_training(ax, curves, env):
    """Fig. 4: test return of the first episode against environment steps; {agent: [(x, y) per seed]}."""
    for agent, seeds in curves.items():
        steps, mean, low, high = over_seeds(seeds)
        label = f"{NAMES.get(agent, agent)} ({len(seeds)} seeds)"
        ax.plot(steps / 1e6, mean, LINES.get(agent, "-"), color=COLOURS.get(agent), label=label, linewidth=2)
        ax.fill_between(steps / 1e6, low, high, color=COLOURS.get(agent), alpha=0.2, linewidth=0)
    if env == "halfcheetah_vel":
        ax.axhline(-150, color="black", linewidth=1, linestyle=(0, (1, 3)))
        ax.text(
            0.99,
            -150,
            "does not adapt",
            transform=ax.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=9,
        )
    ax.set_xlabel("environment steps (millions)")
    ax.set_ylabel("return of the first episode\non the test tasks")
    ax.set_title(f"Meta-training on {NAMES.get(env, env)} (Fig. 4)", fontsize=12)
    ax.set_xlim(left=0)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, loc="lower right")


def draw_meta_training(runs, out):
    curves, used = defaultdict(dict), []
    for path, config, rows in runs:
        seeds = curves[config["env"]].setdefault(config["agent"], {})
        why = {
            "it has no meta-test yet": not rows,
            "it has a tag": config["tag"] or "ablations" in path.parts,
            "its seed is there already": config["seed"] in seeds,
        }
        if any(why.values()):
            print(f"meta_training: left out {path}: {next(k for k, v in why.items() if v)}")
            continue
        seeds[config["seed"]] = learning_curve(rows)
        used.append(path)
    if not used:
        return "needs a run: python trmrl.py --env halfcheetah_vel"
    figure, axes = plt.subplots(1, len(curves), figsize=(6.4 * len(curves), 4), squeeze=False)
    for ax, (env, agents) in zip(axes[0], sorted(curves.items())):
        meta_training(ax, {agent: list(seeds.values()) for agent, seeds in agents.items() if seeds}, env)
    save(figure, out / "meta_training.png", used)


def save(figure, path, used):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"{path}: from {', '.join(map(str, used))}")


# ---- how fast --------------------------------------------------------------------------------------------

def rate(work, steps, seconds=4.0):
    """Environment steps per second of `work()`, which does so many of them; one call to warm up."""
    work()
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        work()
        calls += 1
    return calls * steps / (time.perf_counter() - began)


def raw_physics(envs, calls=50):
    """MuJoCo alone: the same batch and threads, random actions, one native call per environment step."""
    rng, state = np.random.default_rng(0), envs.state.copy()
    path = np.empty((len(state), envs.frame_skip, state.shape[1]))

    def work():
        for _ in range(calls):
            controls = np.repeat(rng.uniform(-1, 1, (len(state), 1, envs.model.nu)), envs.frame_skip, axis=1)
            envs.pool.rollout(
                envs.models, envs.datas, state, controls, nstep=envs.frame_skip, skip_checks=True, state=path
            )
            state[:] = path[:, -1]

    return rate(work, calls * len(state))


def stepping(envs, calls=50):
    """A VectorEnv under random actions."""
    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    shape = envs.action_space.shape

    def work():
        for _ in range(calls):
            envs.step(rng.uniform(-1, 1, shape).astype(np.float32))

    return rate(work, calls * shape[0])


def bare_network(agent, config, batch):
    """Forward and backward of the minibatches that a batch brings, on random data: the learner's limit."""
    device, M, N = agent.log_std.device, config.minibatch, config.memory_length
    x = torch.randn(M, N, agent.width, device=device)
    current = torch.full((M,), N - 1, device=device)

    def work():
        for _ in range(10):
            agent.zero_grad()
            e = agent.remember(x, current)
            (agent.policy(e).mean() + agent.values(e, x[:, -1, :agent.state_size]).mean()).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return rate(work, 10 * M / config.epochs)


def first_iteration(config):
    """Seconds from typing the command to the end of its first iteration, and of `import trmrl` itself."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(
            [
                sys.executable,
                trmrl.__file__,
                "--env",
                config.env,
                "--device",
                config.device,
                "--total-steps",
                "1",
                "--final-episodes",
                "1",
                "--run-dir",
                f"{folder}/run",
            ],
            check=True,
            capture_output=True,
        )
        whole = time.perf_counter() - began
    libraries = "import gymnasium, mujoco.rollout, time, torch"
    code = f"{libraries}; t = time.time(); import trmrl; print(time.time() - t)"
    imported = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                              cwd=Path(trmrl.__file__).parent).stdout
    return whole, float(imported)


def measure(env, device):
    """[(what, value, unit)] of the default preset on this machine."""
    import resource                                        # not on Windows
    config = replace(
        trmrl.Config(env=env, device=str(trmrl.pick_device(device))), **trmrl.PRESETS[env]["default"]
    )
    trmrl.set_threads(config.threads)
    envs = trmrl.make_tasks(env, config.num_tasks, 0)
    envs.reset(seed=0)
    body = {"halfcheetah_vel": "HalfCheetah-v5", "ant_dir": "Ant-v5"}[env]
    sync = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(body)] * config.num_tasks)
    physics, theirs, ours = raw_physics(envs), stepping(sync), stepping(envs)
    batch = config.num_tasks * config.episodes_per_trial * envs.episode_length
    space = envs.single_action_space
    agent = trmrl.Agent(config, envs.single_observation_space.shape[0], space.low, space.high).to(
        config.device
    )
    trials = trmrl.collect(agent, envs, config.episodes_per_trial, True, 0)
    collecting = rate(lambda: trmrl.collect(agent, envs, config.episodes_per_trial, True, 0), batch)
    network = bare_network(agent, config, batch)
    optimizer, generator = trmrl.make_optimizer(agent, config), torch.Generator(config.device)
    updating = rate(lambda: trmrl.ppo_update(agent, optimizer, trials, config, generator), batch)
    with tempfile.TemporaryDirectory() as folder:
        trmrl.train(
            replace(config, total_steps=5 * batch, eval_every=100, final_episodes=1, run_dir=f"{folder}/run")
        )
        with open(f"{folder}/run/progress.csv") as f:
            end_to_end = float(np.median([float(r["steps_per_second"]) for r in csv.DictReader(f)][1:]))
    whole, imported = first_iteration(config)
    series = 1 / (1 / physics + 1 / network)
    speed = "steps/s"
    return [
        ("raw physics", physics, speed),
        ("SyncVectorEnv", theirs, speed),
        ("our tasks", ours, speed),
        ("collecting", collecting, speed),
        ("bare network", network, speed),
        ("our update", updating, speed),
        ("end to end", end_to_end, speed),
        ("our tasks / raw physics", ours / physics, ""),
        ("our tasks / SyncVectorEnv", ours / theirs, ""),
        ("end to end / (raw physics and bare network in series)", end_to_end / series, ""),
        ("end to end / 1,235 steps/s of an MLP PPO", end_to_end / 1235, ""),
        ("peak memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MB"),
        ("import trmrl", imported, "s"),
        ("first iteration, with start and meta-test", whole, "s"),
    ]


def benchmark(ax, rows, env):
    """Bars of the speeds, limits in grey."""
    speeds = [(what, value) for what, value, unit in rows if unit == "steps/s"]
    limits = {"raw physics", "SyncVectorEnv", "bare network"}
    colours = ["#bbbbbb" if what in limits else COLOURS["trmrl"] for what, _ in speeds]
    bars = ax.barh([what for what, _ in speeds], [value for _, value in speeds], color=colours)
    ax.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(right=1.15 * max(value for _, value in speeds))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("environment steps per second")
    threads = f"{torch.get_num_threads()} CPU thread(s)"
    ax.set_title(f"{NAMES.get(env, env)}, {threads}; grey: limits and others", fontsize=11)


def draw_benchmark(env, device, out):
    rows = measure(env, device)
    print(f"\n{env}, default preset, {torch.get_num_threads()} threads, device {trmrl.pick_device(device)}")
    for what, value, unit in rows:
        print(f"  {what:<55} {value:>10,.{0 if value >= 100 else 2}f} {unit}")
    name = "benchmark" if env == "halfcheetah_vel" else f"benchmark_{env}"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.csv").write_text(
        "what,value,unit\n" + "".join(f'"{w}",{v:.4g},{u}\n' for w, v, u in rows)
    )
    figure, ax = plt.subplots(figsize=(7, 3.4))
    benchmark(ax, rows, env)
    save(figure, out / f"{name}.png", ["this machine"])


FIGURES = {"meta_training": draw_meta_training}


def main(argv=None):
    parser = trmrl.Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"{', '.join(FIGURES)}, benchmark")
    parser.add_argument("--runs", help="look for runs here (default: results and runs)")
    parser.add_argument("--out", default="figures", help="where the pictures go (default: figures)")
    parser.add_argument(
        "--env", default="halfcheetah_vel", help="of the benchmark (default: halfcheetah_vel)"
    )
    parser.add_argument("--device", default="auto", help="of the benchmark (default: auto)")
    try:
        args = parser.parse_args(argv)
        unknown = set(args.figures) - {*FIGURES, "benchmark"}
        if unknown:
            raise trmrl.UserError(
                f"unknown figure {min(unknown)!r}; there are: {', '.join(FIGURES)}, benchmark"
            )
        if args.env not in trmrl.PRESETS:
            raise trmrl.UserError(f"unknown env {args.env!r}; there are: {', '.join(trmrl.PRESETS)}")
        if "benchmark" in args.figures:
            draw_benchmark(args.env, args.device, Path(args.out))
        wanted = [f for f in args.figures if f != "benchmark"] or ([] if args.figures else list(FIGURES))
        runs = find_runs([args.runs] if args.runs else ["results", "runs"]) if wanted else []
        for name in wanted:
            missing = FIGURES[name](runs, Path(args.out))
            if missing:
                print(f"{name}: {missing}")
    except trmrl.UserError as error:
        print(f"plots.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
