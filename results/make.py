# SPDX-License-Identifier: MIT
"""Train every run that the README, docs/ and the figures use, into the folder of this file.

    python results/make.py --list        # every run: finished, begun or missing
    python results/make.py               # train what is missing, two runs at a time, one core each
    python results/make.py ant_dir rl2   # only runs whose name contains both words

Stop it with Ctrl-C and start it again: a finished run is skipped, a broken one is resumed, and one
with other settings than today's is replaced. A finished run loses its checkpoint.pt, which is only
needed to resume. On one core everything takes about two days; `minutes` is a rough guess.
"""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent.resolve()
sys.path.insert(0, str(RESULTS.parent))

import trmrl  # noqa: E402

MAIN_SEEDS = (1, 2, 3)


@dataclass
class Run:
    name: str  # of its folder below results/
    agent: str
    flags: str
    minutes: int

    @property
    def folder(self):
        return RESULTS / self.name

    @property
    def agent_class(self):
        if self.agent == "trmrl":
            return trmrl.TrMRL
        module = importlib.import_module(f"baselines.{self.agent}")
        return next(x for x in vars(module).values() if getattr(x, "name", "") == self.agent)

    def state(self):
        """'finished', 'begun' (it can be resumed), 'outdated' or 'missing'."""
        if not (self.folder / "config.json").exists():
            return "missing"
        saved = json.loads((self.folder / "config.json").read_text())
        Config = self.agent_class.Config
        wanted = asdict(Config(**trmrl.parse(self.flags.split(), self.agent_class)))
        ignored = {"device", "threads", "run_dir", *Config.not_flags}
        same = all(saved.get(name) == wanted[name] for name in wanted.keys() - ignored)
        if not same or saved.keys() != {"agent", *wanted}:
            return "outdated"
        lines = (self.folder / "progress.csv").read_text().splitlines()
        steps = int(lines[-1].split(",")[1]) if len(lines) > 1 else 0
        return "finished" if steps >= wanted["total_steps"] else "begun"

    def command(self):
        program = ["trmrl.py"] if self.agent == "trmrl" else ["-m", f"baselines.{self.agent}"]
        if "--env ml" in self.flags:
            program = ["results/fast_metaworld.py", *program]
        folder = str(self.folder.relative_to(RESULTS.parent))  # config.json names no home folder
        if self.state() == "begun":
            arguments = ["--resume", folder]
        else:
            arguments = [*self.flags.split(), "--run-dir", folder]
        return [sys.executable, *program, *arguments]


def comparison(env, minutes):
    """One run of each agent and seed on one env; `minutes`: {agent: (minutes, seeds)}."""
    for agent, (each, seeds) in minutes.items():
        for seed in seeds:
            flags = f"--env {env} --seed {seed}"
            yield Run(f"{env}/{agent}-seed{seed}", agent, flags, each)


def ablation(name, variants, flags, minutes, seeds=MAIN_SEEDS):
    """Runs of TrMRL in ablations/<name>; `variants`: {name of the run: flags}."""
    for variant, changes in variants.items():
        for seed in seeds:
            run = f"ablations/{name}/{variant}-seed{seed}"
            yield Run(run, "trmrl", f"{flags} {changes} --seed {seed}", minutes)


def all_runs():
    one, three = (1,), MAIN_SEEDS
    quick = {"trmrl": (12, three), "rl2": (10, three), "oracle": (7, three)}
    slow = {"varibad": (18, three), "pearl": (50, three), "maml": (45, three)}
    yield from comparison("halfcheetah_vel", quick | slow)
    quick = {"trmrl": (50, three), "rl2": (45, three), "oracle": (40, three)}
    slow = {"varibad": (50, three), "pearl": (50, three), "maml": (50, three)}
    yield from comparison("ant_dir", quick | slow)
    others = {"rl2": (45, one), "varibad": (45, one), "oracle": (45, one)}
    both = {"pearl": (60, one), "maml": (60, one)}
    yield from comparison("ml1_reach", {"trmrl": (50, three)} | others | both)
    yield from comparison("ml1_push", {"trmrl": (50, three)} | others)
    arms = {"trmrl": (120, (1, 2)), "rl2": (90, one), "varibad": (90, one)}
    yield from comparison("ml45_train", arms)

    cheetah = "--env halfcheetah_vel --total-steps 6e5"
    reach = "--env ml1_reach --total-steps 4.8e5"  # N = 40: with N = 5 it hardly adapts
    yield from ablation("default", {"default": ""}, cheetah, 7)
    memory = {"n1": "--memory-length 1", "n25": "--memory-length 25"}
    yield from ablation("memory", memory, cheetah, 12)
    layers = {"l1": "--layers 1", "l4": "--layers 4"}
    yield from ablation("layers", layers, cheetah, 8)
    yield from ablation("heads", {"h1": "--heads 1", "h16": "--heads 16"}, cheetah, 7)
    off = "--no-tfixup"
    yield from ablation("tfixup", {"off-l2": f"--layers 2 {off}"}, cheetah, 8)
    deep = {"on-l12": "--layers 12", "off-l12": f"--layers 12 {off}"}
    yield from ablation("tfixup", deep, cheetah, 40, seeds=one)
    yield from ablation("default", {"reach-default": ""}, reach, 20, seeds=one)
    lengths = {f"reach-n{n}": f"--memory-length {n}" for n in (1, 5, 25, 50)}
    yield from ablation("memory", lengths, reach, 20, seeds=one)
    yield from ablation("layers", {"reach-l4": "--layers 4"}, reach, 50, seeds=one)
    shallow = {"reach-on-l2": "--layers 2", "reach-off-l2": f"--layers 2 {off}"}
    yield from ablation("tfixup", shallow, reach, 30, seeds=one)
    yield from ablation("refinement", {"l4": "--layers 4"}, "--env halfcheetah_vel", 25)


def print_list(runs):
    states = {run.name: run.state() for run in runs}
    for run in runs:
        print(f"{states[run.name]:9} {run.minutes:4} min   {run.name}")
    left = sum(run.minutes for run in runs if states[run.name] != "finished")
    unfinished = sum(state != "finished" for state in states.values())
    print(f"{unfinished} of {len(runs)} runs are not finished: about {left} minutes of one core")


def start(run):
    """Begin or resume a run; what it prints goes to <run>.log."""
    state = run.state()
    print(f"{state:9} {run.name}", flush=True)
    if state == "outdated":
        shutil.rmtree(run.folder)
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = open(run.folder.parent / f"{run.folder.name}.log", "a")
    return subprocess.Popen(run.command(), cwd=RESULTS.parent, stdout=log, stderr=log)


def make(runs, jobs):
    """Train the unfinished runs, `jobs` at a time. Returns the names of those that failed."""
    waiting = [run for run in runs if run.state() != "finished"]
    running, failed = {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            run = waiting.pop(0)
            running[run.name] = run, start(run)
        time.sleep(1.0)
        for name, (run, process) in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            if process.returncode == 0:
                for file in ("checkpoint.pt", "replay.bin"):  # only needed to resume
                    (run.folder / file).unlink(missing_ok=True)
                (run.folder.parent / f"{run.folder.name}.log").unlink()
                print(f"finished  {name}", flush=True)
            else:
                failed.append(name)
                print(f"failed    {name}: see {name}.log", file=sys.stderr)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only runs whose names contain all of these")
    parser.add_argument("--list", action="store_true", help="say what is missing, train nothing")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    options = parser.parse_args()
    runs = [run for run in all_runs() if all(word in run.name for word in options.words)]
    if not runs:
        print(f"no run has {' and '.join(options.words)} in its name", file=sys.stderr)
        return 2
    if options.list:
        print_list(runs)
        return 0
    try:
        return 1 if make(runs, options.jobs) else 0
    except KeyboardInterrupt:  # the runs get it, too, and save themselves
        print("stopped; start it again to continue", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
