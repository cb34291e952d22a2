# SPDX-License-Identifier: MIT
# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==3.3.0",
#     "metaworld==3.1.1", "numpy==2.4.6"]
# ///
"""TrMRL in one file: "Transformers are Meta-Reinforcement Learners" (Melo, ICML 2022).

The agent meets a new task and adapts to it within about twenty time steps, with frozen weights. A
causal transformer attends over the last N working memories phi(s, a, r, eta), and a Gaussian policy
acts on the refined memory of the current step. PPO trains the agent on many tasks; T-Fixup
initialisation lets it train without layer normalisation or warm-up.

    python trmrl.py --env halfcheetah_vel                      # meta-train
    python trmrl.py --eval runs/halfcheetah_vel/trmrl-seed1    # meta-test on test tasks
    python trmrl.py --resume runs/halfcheetah_vel/trmrl-seed1  # continue after a crash or Ctrl-C
    torchrun --nproc-per-node 4 trmrl.py --env ant_dir         # several processes or GPUs
    python trmrl.py --help                                     # every environment and setting

Read it from top to bottom, beside the paper:

     1. Configuration       every setting, and a preset for each environment
     2. Tasks               App. B: half-cheetah, ant and robot arm
     3. Working memory      Sec. 4.1, "Memory Write Logic" of Sec. 5.1: what a step sees
     4. Transformer         Sec. 3.2, 3.3, 4.2, 4.3: self-attention, T-Fixup
     5. Agent               Fig. 1: from working memories to an action
     6. Collecting trials   Algorithm 1
     7. PPO                 "Meta-Training" of Sec. 5.1
     8. Meta-testing        "Meta-Testing" of Sec. 5.1, Sec. 5.2
     9. Run folder          files that survive a crash
    10. Meta-training       the outer loop, in one process or several
    11. Command line

Shapes: R rows of T steps, M sampled steps, N memory slots; a state, an action, a task and a memory
have S, A, k and d numbers. Where this file differs from the paper is said in place, and listed in
docs/differences.md.
"""

import argparse
import atexit
import contextlib
import difflib
import functools
import io
import json
import math
import os
import pickle
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar

import gymnasium
import mujoco.rollout
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import distributed as dist
from torch import nn

VERSION = 2  # of the file format
TEST_SEED = 2022  # seeds the initial states of every meta-test
FINAL_EPISODES = 6  # per task, one after the other, in the last meta-test of a run


class UserError(ValueError):
    """An error the user can fix: printed as one line, exit status 2."""


class RunError(Exception):
    """The run cannot continue, but what it saved is safe: printed as one line, exit status 1."""


# ---- 1. Configuration ----------------------------------------------------------------------------
#
# Every field of Config is also a flag: memory_length is --memory-length. A field whose default is
# None takes its value from the preset of the environment, so Config(env="ant_dir", lr=1e-3) is the
# ant's preset with a different learning rate.


def setting(group, default, help, low=0, high=10**12):
    """A field of Config: its group in --help, its default, its meaning and its bounds."""
    return field(default=default, metadata=dict(group=group, help=help, low=low, high=high))


LOCOMOTION = dict(num_tasks=20, episodes_per_trial=2, eval_every=10, eval_tasks=20, memory_length=5)
CHEETAH = dict(total_steps=1_500_000, init_std=0.2, gamma=0.95, gae_lambda=0.9, lr=3e-4)
ANT = dict(total_steps=5_000_000, init_std=0.5, gamma=0.97, gae_lambda=0.9, lr=5e-4)
ARM = dict(init_std=0.7, gamma=0.98, gae_lambda=0.95, lr=3e-4, episodes_per_trial=1)
ML1 = dict(total_steps=2_000_000, num_tasks=20, eval_every=40, eval_tasks=50, memory_length=40)
ML45 = dict(total_steps=4_000_000, num_tasks=45, eval_every=20, eval_tasks=45, memory_length=40)
PRESETS = {"halfcheetah_vel": LOCOMOTION | CHEETAH, "ant_dir": LOCOMOTION | ANT}
PRESETS |= {"ml1": ARM | ML1, "ml45": ARM | ML45}


@dataclass
class Config:
    presets: ClassVar = PRESETS  # a baseline has its own
    unused: ClassVar = ()  # fields that have no meaning for a baseline

    env: str = setting("run", "halfcheetah_vel", "task family")
    seed: int = setting("run", 1, "seed of everything random", high=2**31 - 1)
    device: str = setting("run", "auto", "auto, cpu, cuda, cuda:1, mps")
    threads: int = setting("run", 1, "CPU threads of physics and network; 0: all", high=1024)
    run_dir: str = setting("run", "", "run folder; default: runs/<env>/<agent>-seed<seed>")

    total_steps: int = setting("trials", None, "environment steps of the whole training", low=1)
    num_tasks: int = setting("trials", None, "tasks per iteration, across all processes", low=1)
    episodes_per_trial: int = setting("trials", None, "E, episodes of each task", low=1)
    eval_every: int = setting("trials", None, "iterations between meta-tests", low=1)
    eval_tasks: int = setting("trials", None, "tasks per meta-test", low=1)

    memory_length: int = setting("agent", None, "N, working memories in the context", low=1)
    layers: int = setting("agent", 1, "L, transformer layers", low=1)
    heads: int = setting("agent", 4, "attention heads per layer", low=1)
    d_model: int = setting("agent", 64, "d, size of a memory", low=2)
    tfixup: bool = setting("agent", True, "T-Fixup, or layer norm with plain Xavier")
    keep_memory: bool = setting("agent", False, "keep memories across the episodes of a trial")
    init_std: float = setting("agent", None, "initial standard deviation of actions", low=1e-3)

    gamma: float = setting("PPO", None, "discount factor, below 1", high=0.9999)
    gae_lambda: float = setting("PPO", None, "lambda of GAE", high=1)
    clip: float = setting("PPO", 0.2, "clipping of the probability ratio", low=1e-6)
    epochs: int = setting("PPO", 5, "passes over a batch", low=1)
    minibatch: int = setting("PPO", 200, "environment steps per gradient step", low=2)
    lr: float = setting("PPO", None, "learning rate of Adam", high=1)
    value_lr: float = setting("PPO", 1e-3, "learning rate of the value head", high=1)
    final_lr: float = setting("PPO", 0.05, "both rates fall linearly to this fraction", high=1)
    max_grad_norm: float = setting("PPO", 0.5, "gradients are clipped to this norm", low=1e-9)

    @property
    def rows_per_task(self):
        """Episodes of a task run side by side, unless the memory lasts for the whole trial."""
        return 1 if self.keep_memory else self.episodes_per_trial

    def __post_init__(self):
        benchmark = str(self.env).split("_")[0]  # ml1_reach and ml1_push share a preset
        default = self.presets["halfcheetah_vel"]  # also for a family of your own
        preset = self.presets.get(self.env) or self.presets.get(benchmark, default)
        for name, value in preset.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


def flag(name):
    return "--" + name.replace("_", "-")


def check(config):
    """Refuse settings that cannot work, before anything starts."""
    for f in fields(config):
        value, low, high = getattr(config, f.name), f.metadata["low"], f.metadata["high"]
        if type(value) not in ((int, float) if f.type is float else (f.type,)):
            raise UserError(f"{flag(f.name)} takes a {f.type.__name__}, not {value!r}")
        if f.type in (int, float) and not low <= value <= high:
            raise UserError(f"{flag(f.name)} must be between {low:g} and {high:g}, not {value}")
    if any(character in config.env for character in "/\\\0"):
        raise UserError(f"--env names a folder: no slashes in {config.env!r}")
    if "heads" not in config.unused and (config.d_model % config.heads or config.d_model % 2):
        raise UserError(f"--d-model must be even and a multiple of --heads {config.heads}")


def did_you_mean(typed, names):
    """' (did you mean ...?)', or nothing if no name is close."""
    near = difflib.get_close_matches(typed, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


# ---- 2. Tasks (App. B) ---------------------------------------------------------------------------
#
# The tasks of a family share a robot and differ in a hidden goal, which the agent must infer from
# its rewards. All tasks of a batch are stepped together, as one Gymnasium VectorEnv.


class Tasks(VectorEnv):
    """A task family: `num_envs` environments, and in `tasks` (num_envs, k) the task of each.

    To add a family, implement five methods. sample_tasks(rng, n) and fixed_tasks(split, n) return n
    rows of k numbers. begin(mask) starts an episode where the mask is true. advance(actions) takes
    a step and returns reward, terminated and info; actions arrive clipped to [-1, 1].
    observation() returns what the agent sees, (num_envs, state_size).
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    splits = ("train", "test")
    episode_length = 200
    sample_at_test = False  # meta-test with mean actions

    def __init__(self, num_tasks, seed, split, state_size, action_size):
        if split not in self.splits:
            raise UserError(f"this family has no split {split!r}, only {', '.join(self.splits)}")
        Box = gymnasium.spaces.Box
        self.num_envs = num_tasks
        self.single_observation_space = Box(-np.inf, np.inf, (state_size,), np.float32)
        self.single_action_space = Box(-1.0, 1.0, (action_size,), np.float32)
        self.observation_space = Box(-np.inf, np.inf, (num_tasks, state_size), np.float32)
        self.action_space = Box(-1.0, 1.0, (num_tasks, action_size), np.float32)
        self.elapsed = np.zeros(num_tasks, dtype=int)  # steps since the episode began
        self.last_observation = np.zeros((num_tasks, state_size))
        self.last_reward = np.zeros(num_tasks)
        if split == "train":
            self.tasks = self.sample_tasks(np.random.default_rng(seed), num_tasks)
        else:
            self.tasks = self.fixed_tasks(split, num_tasks)

    def reset(self, *, seed=None, options=None):
        """Begin episodes. Options: `tasks` sets the tasks, `reset_mask` says where to begin."""
        super().reset(seed=seed)
        options = options or {}
        if "tasks" in options:
            self.tasks = np.array(options["tasks"], dtype=np.float64).reshape(self.tasks.shape)
        mask = options.get("reset_mask", np.ones(self.num_envs, dtype=bool))
        self.begin(mask)
        self.elapsed[mask] = 0
        self.last_reward[mask] = 0.0
        self.last_observation = self.observation()
        return self.last_observation.astype(np.float32), {}

    def step(self, actions):
        actions = np.clip(np.nan_to_num(np.asarray(actions, dtype=np.float64)), -1.0, 1.0)
        reward, terminated, info = self.advance(actions)
        observation = self.observation()
        self.elapsed += 1

        # A simulation that blows up counts as a time-out in its last valid state: as a terminal it
        # would pay off where rewards are negative. The return that a meta-test reports is filled up
        # with the last valid reward.
        valid = np.isfinite(observation).all(axis=1) & np.isfinite(reward)
        blown_up = info.get("blown_up", False) | ~valid
        observation = np.where(blown_up[:, None], self.last_observation, observation)
        reward = np.where(blown_up, self.last_reward, reward)
        missing_reward = blown_up * (self.episode_length - self.elapsed) * reward
        terminated = terminated & ~blown_up
        truncated = (self.elapsed >= self.episode_length) | blown_up
        self.last_observation, self.last_reward = observation, reward
        info = {**info, "blown_up": blown_up, "missing_reward": missing_reward}
        observation, reward = observation.astype(np.float32), reward.astype(np.float32)
        return observation, reward, terminated, truncated, info


class MujocoTasks(Tasks):
    """Tasks of one MuJoCo body. One native call steps all of them, in threads."""

    xml = ""
    frame_skip = 5  # physics steps per environment step
    skipped_qpos = 1  # the agent does not see x (or x and y), the first numbers of qpos

    def __init__(self, num_tasks, seed=0, split="train"):
        assets = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
        self.model = mujoco.MjModel.from_xml_path(str(assets / self.xml))
        self.dt = self.model.opt.timestep * self.frame_skip

        # As many threads as PyTorch has; each steps an equal share of the tasks.
        threads = torch.get_num_threads()
        self.datas = [mujoco.MjData(self.model) for _ in range(threads)]
        self.pool = mujoco.rollout.Rollout(nthread=threads if threads > 1 else 0)
        self.chunk_size = math.ceil(num_tasks / threads)

        size = 1 + self.model.nq + self.model.nv  # time, qpos, qvel
        self.physics = np.zeros((num_tasks, size))
        self.substeps = np.empty((num_tasks, self.frame_skip, size))
        super().__init__(num_tasks, seed, split, size - 1 - self.skipped_qpos, self.model.nu)

    def begin(self, mask):
        """Start near the resting pose, with the noise of Gymnasium's own environments."""
        n, nq, nv = int(mask.sum()), self.model.nq, self.model.nv
        qpos = self.model.qpos0 + self.np_random.uniform(-0.1, 0.1, (n, nq))
        qvel = 0.1 * self.np_random.standard_normal((n, nv))
        self.physics[mask] = np.concatenate([np.zeros((n, 1)), qpos, qvel], axis=1)

    def advance(self, actions):
        before = self.physics
        models = [self.model] * self.num_envs
        controls = np.repeat(actions[:, None], self.frame_skip, axis=1)  # (num_envs, frame_skip, A)
        options = dict(nstep=self.frame_skip, chunk_size=self.chunk_size, skip_checks=True)
        self.pool.rollout(models, self.datas, before, controls, state=self.substeps, **options)
        after = self.substeps[:, -1].copy()

        # MuJoCo resets a simulation that diverges, its clock included.
        clock_reset = np.abs(after[:, 0] - before[:, 0] - self.dt) > 1e-6
        blown_up = clock_reset | ~(np.abs(after).max(axis=1) < 1e3)  # ~(<): NaN counts, too
        after[blown_up] = before[blown_up]
        self.physics = after

        x_velocity = (after[:, 1] - before[:, 1]) / self.dt  # m/s
        info = {"x_velocity": x_velocity, "blown_up": blown_up}
        return self.reward(x_velocity, actions), ~self.healthy(), info

    def observation(self):
        return self.physics[:, 1 + self.skipped_qpos :]

    def healthy(self):
        return np.ones(self.num_envs, dtype=bool)


class HalfCheetahVel(MujocoTasks):
    """Run at a hidden velocity v*, drawn from [0, 3] m/s; out of distribution: [3, 4]."""

    xml = "half_cheetah.xml"
    splits = ("train", "test", "ood")

    def sample_tasks(self, rng, n):
        return rng.uniform(0.0, 3.0, (n, 1))

    def fixed_tasks(self, split, n):
        low, high = {"test": (0.0, 3.0), "ood": (3.0, 4.0)}[split]
        fraction = (np.arange(n) + 0.5) / n  # n = 3: 1/6, 3/6, 5/6
        return low + (high - low) * fraction[:, None]

    def reward(self, x_velocity, actions):
        return -np.abs(x_velocity - self.tasks[:, 0]) - 0.05 * np.square(actions).sum(axis=1)


class AntDir(MujocoTasks):
    """Run forward (+1) or backward (-1) without falling."""

    xml = "ant.xml"
    skipped_qpos = 2

    def sample_tasks(self, rng, n):
        return rng.choice([-1.0, 1.0], (n, 1))

    def fixed_tasks(self, split, n):
        return np.resize([1.0, -1.0], (n, 1))

    def healthy(self):
        height = self.physics[:, 3]  # after time, x and y
        return (height >= 0.2) & (height <= 1.0)

    def reward(self, x_velocity, actions):
        effort = 0.5 * np.square(actions).sum(axis=1)
        return self.tasks[:, 0] * x_velocity - effort + self.healthy()


@functools.cache
def metaworld_goals(env):
    """MetaWorld's own goals: class names, training goals and test goals, (classes, 50, 7) each.

    The numbers of a goal: its class, where the object starts, where it should go.
    """
    import metaworld  # takes a second

    ml45 = env == "ml45_train"
    name = env.removeprefix("ml1_").replace("_", "-")
    names = [name.removesuffix("-v3") for name in metaworld.ALL_V3_ENVIRONMENTS]
    if not ml45 and name not in names:
        hint = did_you_mean(name, names) or f"; ml1_<task> takes: {', '.join(names)}"
        raise UserError(f"unknown task {name!r}{hint}")

    benchmark = metaworld.ML45(seed=0) if ml45 else metaworld.ML1(name + "-v3", seed=0)
    # ML45-Train is meta-tested on its training goals, as in the paper.
    test_tasks = benchmark.train_tasks if ml45 else benchmark.test_tasks
    classes = list(benchmark.train_classes)
    goals = np.zeros((2, len(classes) * 50, 7))
    for rows, tasks in zip(goals, (benchmark.train_tasks, test_tasks)):
        for row, task in zip(rows, tasks):
            positions = pickle.loads(task.data)["rand_vec"]  # 3 or 6 numbers
            row[0] = classes.index(task.env_name)
            row[1 : 1 + len(positions)] = positions
    return classes, *goals.reshape(2, len(classes), 50, 7)


class MetaWorldTasks(Tasks):
    """A robot arm with a hidden goal: ML1 (one class of tasks) or ML45-Train (45 in turn)."""

    sample_at_test = True

    def __init__(self, env, num_tasks, seed=0, split="train"):
        self.classes, self.train_goals, self.test_goals = metaworld_goals(env)
        # MetaWorld's episodes have 500 steps. Training on 300 leaves time for more tasks.
        self.episode_length = 300 if split == "train" else 500
        # Reach shows an object without a purpose whose place gives away which of the 50 training
        # goals is meant. Agents would memorise it, so training shows it elsewhere (std in m).
        self.object_noise = 0.1 if env == "ml1_reach" and split == "train" else 0.0
        self.arms = [None] * num_tasks
        self.raw_observation = np.zeros((num_tasks, 39))
        self.object_offset = np.zeros((num_tasks, 39))
        super().__init__(num_tasks, seed, split, state_size=39, action_size=4)

    def sample_tasks(self, rng, n):
        return self.pick(rng.permutation(self.train_goals, axis=1), n)

    def fixed_tasks(self, split, n):
        return self.pick(self.test_goals, n)

    def pick(self, goals, n):
        """The first goal of each class in turn, then the second, until there are n."""
        if n % len(self.classes):
            raise UserError(f"the number of tasks must be a multiple of {len(self.classes)}: {n}")
        turn, kind = divmod(np.arange(n), len(self.classes))  # 3 classes: turn 000111, kind 012012
        return goals[kind, turn % 50]

    def begin(self, mask):
        import metaworld

        for i in np.flatnonzero(mask):
            name = self.classes[int(self.tasks[i, 0])]
            make = metaworld.ALL_V3_ENVIRONMENTS[name]
            if type(self.arms[i]) is not make:
                self.arms[i] = make()
            goal = self.tasks[i, 1 : 1 + len(self.arms[i]._random_reset_space.low)]
            task = {"rand_vec": goal, "env_cls": make, "partially_observable": True}
            self.arms[i].set_task(metaworld.Task(name, pickle.dumps(task)))
            self.raw_observation[i], _ = self.arms[i].reset()
            # The object's position is at 4:7, and that of the previous frame at 22:25.
            offset = self.np_random.normal(0.0, self.object_noise, 3)
            self.object_offset[i, 4:7] = self.object_offset[i, 22:25] = offset

    def advance(self, actions):
        """Step one Python environment after the other; torchrun does it in several processes."""
        before = np.array([arm.data.time for arm in self.arms])
        results = [arm.step(action) for arm, action in zip(self.arms, actions.astype(np.float32))]
        after = np.array([arm.data.time for arm in self.arms])
        observations, rewards, _, _, infos = zip(*results)
        self.raw_observation = np.array(observations)
        success = np.array([info["success"] for info in infos])
        info = {"success": success, "blown_up": after <= before}  # MuJoCo reset its clock
        return np.array(rewards), np.zeros(self.num_envs, dtype=bool), info

    def observation(self):
        return self.raw_observation + self.object_offset


FAMILIES = {"halfcheetah_vel": HalfCheetahVel, "ant_dir": AntDir}
ENVS = (*FAMILIES, "ml1_reach", "ml1_push", "ml1_<task>", "ml45_train")


def make_tasks(env, num_tasks, seed=0, split="train"):
    """`num_tasks` tasks of a family: drawn by `seed` (train), or fixed (test, ood)."""
    if env in FAMILIES:
        return FAMILIES[env](num_tasks, seed, split)
    if env == "ml45_train" or env.startswith("ml1_"):
        return MetaWorldTasks(env, num_tasks, seed, split)
    raise UserError(f"unknown env {env!r}{did_you_mean(env, ENVS)}; there are: {', '.join(ENVS)}")


# ---- 3. Working memory (Sec. 4.1; "Memory Write Logic" of Sec. 5.1) ------------------------------
#
# A step sees itself and the N - 1 steps before it, each as a token (s, a, r, eta). The action, the
# reward and eta of the current step are not known yet: they are PAD, which is zero. eta is 1 at the
# last step of an episode, so a step meets it only with --keep-memory. Trials stores every step
# once, and `window` finds what a step sees. Acting and learning both call it, so the agent learns
# from exactly what it saw.


class Trials:
    """R rows of T steps of experience, filled step by step, on the device of the agent.

    A row is a stream of experience of one task. The memory is empty at the beginning of an episode,
    so the E episodes of a task share nothing, and each is a row of its own. With --keep-memory a
    row is the paper's trial: E episodes, one after the other. After a fall the next episode begins
    immediately, in the same row.
    """

    def __init__(self, rows, steps, sizes, generator):
        R, T, (S, A, _) = rows, steps, sizes
        zeros = functools.partial(torch.zeros, device=generator.device)

        # What the agent may remember. Column T is for the state after the last step.
        self.token = zeros(R, T + 1, S + A + 2)
        self.state = self.token[:, :, :S]  # normalised; these four are views of the token
        self.clipped_action = self.token[:, :, S : S + A]  # as the physics saw it
        self.reward = self.token[:, :T, -2]
        self.eta = self.token[:, :T, -1]
        self.first = zeros(R, T + 1, dtype=torch.long)  # the first step that a step may see
        self.observation = zeros(R, T + 1, S)  # the state before it is normalised
        self.stored = {}  # memories of the baselines, (R, steps, ...)

        # Actions and predictions.
        self.noise = torch.randn(R, T + 1, A, generator=generator, device=generator.device)
        self.action = zeros(R, T, A)  # before it is clipped
        self.log_prob = zeros(R, T)
        self.value = zeros(R, T)

        # Where a trajectory ends: by a fall, or cut off by the time limit or the end of the row.
        self.terminated = zeros(R, T, dtype=torch.bool)
        self.cut = zeros(R, T, dtype=torch.bool)
        self.final_value = zeros(R, T)  # of the state after a cut

        self.task = None  # (R, k), for the oracle
        self.info = {}  # arrays (R, T): success, x_velocity, blown_up, missing_reward

    def observe(self, t, observation, normalizer):
        """Write the observations (R, S) of step t."""
        self.observation[:, t] = torch.as_tensor(observation).to(self.observation.device)
        self.state[:, t] = normalizer(self.observation[:, t])

    def record(self, t, action, reward, eta):
        """Complete the tokens of step t."""
        self.clipped_action[:, t] = action.clamp(-1.0, 1.0)
        self.reward[:, t] = torch.as_tensor(reward).to(action.device)
        self.eta[:, t] = torch.as_tensor(eta).to(action.device)

    def forget(self, t, done):
        """After step t, clear the memory of the rows whose episode is done."""
        rows = torch.as_tensor(np.flatnonzero(done)).to(self.first.device)
        self.first[rows, t + 1 :] = t + 1

    def episode_returns(self, episodes):
        """Return and success (NaN if the family has none) of the first episodes, (R, episodes)."""
        reward = self.reward.cpu().numpy() + self.info["missing_reward"]
        success = self.info.get("success", np.full(reward.shape, np.nan))
        done = self.eta.cpu().numpy() > 0
        episode = np.cumsum(done, axis=1) - done  # done 0 1 0 1: episode 0 0 1 1
        row, step = np.nonzero(episode < episodes)

        returns, successes = np.zeros((2, len(reward), episodes))
        np.add.at(returns, (row, episode[row, step]), reward[row, step])
        np.maximum.at(successes, (row, episode[row, step]), success[row, step])
        return returns, successes


def window(trials, row, t, N):
    """What step t of each row sees: slots (M, N, width), oldest first, and the current slot (M,).

    Algorithm 1 pads on the left; we fill the first slots first, as "Memory Write Logic" says. With
    N = 3, an episode that began at step 7, and - for a slot that is empty and masked:

        t = 7:  7 - -    current slot 0
        t = 8:  7 8 -    current slot 1
        t = 9:  7 8 9    current slot 2
        t = 10: 8 9 10   current slot 2
    """
    oldest = torch.maximum(trials.first[row, t], t - (N - 1))
    current = t - oldest
    slot = torch.arange(N, device=t.device)
    step = torch.minimum(oldest[:, None] + slot, t[:, None])  # an empty slot repeats step t
    slots = trials.token[row[:, None], step]

    # Only past steps have an action, a reward and eta. Those of the others are PAD.
    not_past = slot >= current[:, None]
    slots[..., trials.state.shape[-1] :].masked_fill_(not_past[..., None], 0.0)
    return slots, current


# ---- 4. Transformer (Sec. 3.2, 4.2, 4.3) and T-Fixup (Sec. 3.3) ----------------------------------
#
# e^0 are the working memories, and each layer refines them (Eq. 6). alpha says how relevant each
# memory is to the query (Eq. 4); mu, their weighted sum, represents the task (Eq. 3 and 5) and is
# the consensus of Theorem 1.


def sinusoids(N, d):
    """The positional encoding of "Attention is all you need", (N, d)."""
    angle = torch.arange(N)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class Layer(nn.Module):
    """One refinement e^{l-1} -> e^l (Eq. 6): self-attention, then a position-wise network."""

    def __init__(self, d, heads, layer_norm):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d, d)
        self.key = nn.Linear(d, d, bias=False)  # a bias shared by all keys cancels in the softmax
        self.value = nn.Linear(d, d)
        self.out = nn.Linear(d, d)  # W_o of Eq. 1
        self.ff1 = nn.Linear(d, 4 * d)
        self.ff2 = nn.Linear(4 * d, d)
        self.norm1 = nn.LayerNorm(d) if layer_norm else nn.Identity()
        self.norm2 = nn.LayerNorm(d) if layer_norm else nn.Identity()

    def forward(self, query_memories, e, visible):
        """Refine query_memories (M, Q, d) by those of e (M, N, d) that are visible to them."""
        q, k, v = self.query(query_memories), self.key(e), self.value(e)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))

        # alpha = softmax(q k^T / sqrt(d / heads)) over the visible memories; mu = alpha v. (Eq. 4
        # as printed has 1 / sqrt(d) outside and i <= j; Eq. 1 and causality want this.) One call
        # computes both, several times faster than two lines.
        mu = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)  # (M, heads, Q, d / heads)
        mu = mu.transpose(1, 2).flatten(2)  # heads side by side, Eq. 1
        e = self.norm1(query_memories + self.out(mu))
        return self.norm2(e + self.ff2(F.relu(self.ff1(e))))


class Transformer(nn.Module):
    """The working memories e^0 -> e^L, the episodic memory of the current step."""

    def __init__(self, layers, d, heads, tfixup):
        super().__init__()
        self.layers = nn.ModuleList(Layer(d, heads, not tfixup) for _ in range(layers))
        for layer in self.layers:
            for linear in (layer.query, layer.key, layer.value, layer.out, layer.ff1, layer.ff2):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            # T-Fixup scales these by 0.67 N^(-1/4). Its N is the number of layers, our L.
            if tfixup:
                for linear in (layer.value, layer.out, layer.ff1, layer.ff2):
                    linear.weight.data *= 0.67 * layers**-0.25

    def forward(self, e, current):
        """e (M, N, d), current (M,) -> (M, d)."""
        M, N, _ = e.shape
        slot = torch.arange(N, device=e.device)
        causal = slot[:, None] >= slot  # (N, N): slot i sees the slots j <= i
        for layer in self.layers[:-1]:
            e = layer(e, e, causal)

        # The policy reads the current slot only: in the last layer it is the only query.
        query = e[torch.arange(M, device=e.device), current][:, None]  # (M, 1, d)
        visible = causal[current][:, None, None]  # (M, 1, 1, N)
        return self.layers[-1](query, e, visible)[:, 0]


# ---- 5. Agent (Fig. 1) ---------------------------------------------------------------------------
#
# Agent is what TrMRL and the baselines share: a normaliser, a policy head and a value head on top
# of a memory. TrMRL adds the memory. The value head reads the same memory as the policy, because
# predicting values teaches the memory which task it is in.


def rank():
    """The number of this process. torchrun starts several; process 0 writes files and prints."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_processes(x):
    if world_size() > 1:
        dist.all_reduce(x)
    return x


def moments(x):
    """Count, mean and variance of the rows of x (M, size), across all processes."""
    n = len(x) * world_size()
    mean = sum_over_processes(x.sum(dim=0)) / n
    var = sum_over_processes((x - mean).square().sum(dim=0)) / n
    return n, mean, var


class Normalizer(nn.Module):
    """Running mean and variance of everything seen so far."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10.0, 10.0)

    def update(self, x):
        """Merge the rows of x (M, size), by the rule of Chan et al."""
        n, mean, var = moments(x)
        total = self.count + n
        delta = mean - self.mean
        between = delta.square() * self.count * n / total
        self.var.copy_((self.var * self.count + var * n + between) / total)
        self.mean += delta * n / total
        self.count.copy_(total)


def mlp(sizes, output_scale=1.0):
    """Linear layers with tanh between them, Xavier initialisation, the last one scaled."""
    modules = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        linear = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        modules += [linear, nn.Tanh()]
    modules.pop()  # no tanh after the last layer
    modules[-1].weight.data *= output_scale
    return nn.Sequential(*modules)


class Agent(nn.Module):
    """The interface that collect, train and meta_test use:

        new_trials(rows, steps, generator)    an empty buffer
        act(trials, t, sample)                action, log_prob and value of step t of all rows
        evaluate(trials, row, t)              log_prob and value of stored actions, for learning
        minibatches(trials, generator)        the steps (row, t) of each gradient step
        update(trials, optimizer, generator)  learn from a batch; returns metrics for progress.csv

    A subclass defines its memory: recall(trials, row, t) -> e (M, memory_size).
    """

    name = ""  # in the names of run folders
    command = ""  # that users type
    Config = Config
    test_episodes = 1  # of a periodic meta-test; the last of them is the agent's score

    def __init__(self, config, sizes, memory_size):
        super().__init__()
        self.config = config
        self.sizes = sizes  # of a state, an action and a task: (S, A, k)
        self.folder = None  # of its run
        self.trained_steps = 0
        S, A, _ = sizes
        self.normalizer = Normalizer(S)
        self.reward_stats = Normalizer(1)
        self.policy = mlp([memory_size, 64, 64, A], output_scale=0.01)
        self.log_std = nn.Parameter(torch.full((A,), math.log(config.init_std)))
        self.value = mlp([memory_size, 64, 64, 1])

    @property
    def device(self):
        return self.normalizer.mean.device

    def new_trials(self, rows, steps, generator):
        return Trials(rows, steps, self.sizes, generator)

    def act(self, trials, t, sample):
        """Action (R, A), its log_prob (R,) and the value (R,) of step t; the mean or a sample."""
        row = torch.arange(len(trials.token), device=self.device)
        e = self.recall(trials, row, torch.full_like(row, t))
        mean = self.policy(e)
        action = mean + self.log_std.exp() * trials.noise[:, t] if sample else mean
        return action, self.log_prob(mean, action), self.value(e).squeeze(-1)

    def evaluate(self, trials, row, t):
        """Log-probability of the stored actions and value, (M,) each, under the current weights."""
        e = self.recall(trials, row, t)
        log_prob = self.log_prob(self.policy(e), trials.action[row, t])
        return log_prob, self.value(e).squeeze(-1)

    def log_prob(self, mean, action):
        """Of a Gaussian with independent components: (M, A), (M, A) -> (M,)."""
        z = (action - mean) / self.log_std.exp()
        return (-0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)

    def minibatches(self, trials, generator):
        """All steps in random order, `minibatch` at a time; an incomplete last one is dropped."""
        R, T = trials.value.shape
        size = self.config.minibatch // world_size()
        order = torch.randperm(R * T, generator=generator, device=self.device)
        for index in order[: R * T // size * size].split(size):
            yield index // T, index % T  # numbered row by row; with T = 3, 7 is row 2, t 1

    def update(self, trials, optimizer, generator):
        return ppo_update(self, trials, optimizer, generator)

    def parameter_groups(self):
        """For Adam: the value head has a learning rate of its own."""
        value = list(self.value.parameters())
        others = [p for name, p in self.named_parameters() if not name.startswith("value.")]
        return [dict(params=others, lr=self.config.lr), dict(params=value, lr=self.config.value_lr)]


class TrMRL(Agent):
    """TrMRL: meta-train or meta-test a transformer that adapts to new tasks."""

    name = "trmrl"
    command = "python trmrl.py"

    def __init__(self, config, sizes):
        d, L = config.d_model, config.layers
        super().__init__(config, sizes, memory_size=d)
        S, A, _ = sizes
        self.phi = nn.Linear(S + A + 2, d, bias=False)
        if config.tfixup:  # Sec. 3.3, times (9 L)^(-1/4), which the paper on T-Fixup adds
            nn.init.normal_(self.phi.weight, std=d**-0.5 * (9 * L) ** -0.25)
        else:
            nn.init.xavier_uniform_(self.phi.weight)
        self.register_buffer("positions", sinusoids(config.memory_length, d))
        self.transformer = Transformer(L, d, config.heads, config.tfixup)

    def recall(self, trials, row, t):
        """The episodic memory e^L of step t of each row, (M, d)."""
        slots, current = window(trials, row, t, self.config.memory_length)
        working_memories = self.phi(slots) + self.positions  # (M, N, d)
        return self.transformer(working_memories, current)


# ---- 6. Collecting trials (Algorithm 1) ----------------------------------------------------------
#
# One collector for meta-training and meta-testing, for TrMRL and the baselines.


@contextlib.contextmanager
def one_thread():
    """The policy is too small for several threads; idle ones would only slow the physics down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
@torch.no_grad()
def collect(agent, envs, tasks, steps, sample, seed):
    """Algorithm 1 in all environments at once: Trials of `steps` steps of tasks (num_envs, k)."""
    env_seed, noise_seed = np.random.SeedSequence(seed).generate_state(2).tolist()
    generator = torch.Generator(agent.device).manual_seed(noise_seed)
    clears_memory = not agent.config.keep_memory
    infos = []

    # Initialise the buffer B; observe s_0.
    trials = agent.new_trials(envs.num_envs, steps, generator)
    trials.task = torch.as_tensor(tasks, dtype=torch.float32).to(agent.device)
    observation, _ = envs.reset(seed=env_seed, options={"tasks": tasks})
    trials.observe(0, observation, agent.normalizer)

    for t in range(steps):
        # `act`: D <- the N - 1 most recent transitions of B and (s_t, PAD, PAD, PAD); compute the
        # working memories; refine them to e^L; sample a_t from the policy on e^L of this step.
        action, log_prob, value = agent.act(trials, t, sample)
        trials.action[:, t] = action
        trials.log_prob[:, t] = log_prob
        trials.value[:, t] = value

        # Apply a_t to the MDP and collect s_{t+1}, r_t, eta_t; B <- B u (s_t, a_t, r_t, eta_t).
        observation, reward, terminated, truncated, info = envs.step(action.cpu().numpy())
        trials.record(t, action, reward, eta=terminated)
        trials.terminated[:, t] = torch.as_tensor(terminated).to(agent.device)
        trials.observe(t + 1, observation, agent.normalizer)
        infos.append(info)

        # Where the time limit ends an episode and its memory, or the row ends, PPO bootstraps from
        # the value of the final state, as if the episode went on: eta is still 0.
        row_ends = t == steps - 1
        cut = ~terminated & (truncated & clears_memory | row_ends)
        if cut.any():
            _, _, trials.final_value[:, t] = agent.act(trials, t + 1, sample)  # the value
            trials.cut[:, t] = torch.as_tensor(cut).to(agent.device)

        # Begin the next episode where one ended, with an empty memory.
        done = terminated | truncated
        if done.any():
            trials.eta[:, t] = torch.as_tensor(done).to(agent.device)
            if clears_memory:
                trials.forget(t, done)
            if not row_ends:
                observation, _ = envs.reset(options={"reset_mask": done})
                trials.observe(t + 1, observation, agent.normalizer)

    trials.info = {key: np.stack([info[key] for info in infos], axis=1) for key in infos[0]}
    return trials


class Player:
    """An agent for your own loop, NumPy in and out: act, step the environments, observe."""

    def __init__(self, agent, num_tasks, max_steps=10_000):
        self.agent = agent
        self.trials = agent.new_trials(num_tasks, max_steps, torch.Generator(agent.device))
        self.t = 0

    @torch.no_grad()
    def act(self, observation, sample=False):
        """Actions for observations (num_tasks, S). Asking twice gives the same answer twice."""
        self.trials.observe(self.t, observation, self.agent.normalizer)
        action, log_prob, _ = self.agent.act(self.trials, self.t, sample)
        self.trials.action[:, self.t] = action
        self.trials.log_prob[:, self.t] = log_prob
        return action.cpu().numpy()

    def observe(self, action, reward, done):
        """Complete the working memory of this step; where an episode is done, clear the memory."""
        self.trials.record(self.t, torch.as_tensor(action).to(self.agent.device), reward, done)
        if not self.agent.config.keep_memory:
            self.trials.forget(self.t, done)
        self.t += 1


# ---- 7. PPO ("Meta-Training" of Sec. 5.1) --------------------------------------------------------
#
# Minibatches mix tasks and time. The paper maximises the return of the E episodes of a trial as one
# trajectory. Here a trajectory ends where the memory is cleared, because later rewards then no
# longer depend on earlier actions. A fall is terminal, with value 0; at a time limit we bootstrap.


def gae(reward, value, next_value, continues, gamma, lam):
    """Generalised advantage estimation along the rows; all (R, T).

    `next_value` is the value of the next state; `continues` is false where the next step
    of the row belongs to another trajectory.
    """
    delta = reward + gamma * next_value - value
    advantage = torch.zeros_like(delta)
    next_advantage = torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        next_advantage = delta[:, t] + gamma * lam * continues[:, t] * next_advantage
        advantage[:, t] = next_advantage
    return advantage


def advantages_and_returns(agent, trials):
    """Advantages of zero mean and unit variance, and the targets of the value head, (R, T)."""
    config = agent.config

    # A constant reward r is worth r / (1 - gamma). Scale rewards so that this is about 1.
    agent.reward_stats.update(trials.reward.reshape(-1, 1))
    root_mean_square = (agent.reward_stats.var + agent.reward_stats.mean.square() + 1e-8).sqrt()
    reward = (1 - config.gamma) / root_mean_square * trials.reward

    next_value = trials.value.roll(-1, dims=1)  # 1 2 3 -> 2 3 1; the last step always ends
    next_value = torch.where(trials.cut, trials.final_value, next_value)
    next_value = next_value.masked_fill(trials.terminated, 0.0)
    continues = ~(trials.cut | trials.terminated)
    advantage = gae(reward, trials.value, next_value, continues, config.gamma, config.gae_lambda)
    returns = advantage + trials.value

    _, mean, var = moments(advantage.reshape(-1, 1))
    return (advantage - mean) / (var.sqrt() + 1e-8), returns


def ppo_loss(log_prob, value, old_log_prob, advantage, returns, clip):
    """The clipped objective over M steps, and metrics."""
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    value_loss = F.mse_loss(value, returns)
    metrics = {
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "approx_kl": (ratio - 1 - log_ratio).mean().detach(),
        "clip_fraction": (ratio != clipped).float().mean(),
    }
    return policy_loss + 0.5 * value_loss, metrics


def average_gradients(agent):
    """Replace each gradient by its mean across all processes, in one message."""
    if world_size() > 1:
        gradients = [p.grad for p in agent.parameters() if p.grad is not None]
        message = sum_over_processes(torch.cat([g.flatten() for g in gradients])) / world_size()
        for g, mean in zip(gradients, message.split([g.numel() for g in gradients])):
            g.copy_(mean.view_as(g))


def gradient_step(agent, optimizer, loss):
    """One step of Adam; returns the norm of the gradient, and 1 if the step was skipped."""
    optimizer.zero_grad()
    loss.backward()
    average_gradients(agent)
    norm = nn.utils.clip_grad_norm_(agent.parameters(), agent.config.max_grad_norm)
    # If found_inf is 1, fused Adam skips the step. This needs no synchronisation with the device.
    optimizer.found_inf = (~torch.isfinite(norm)).float()
    optimizer.step()
    return norm, optimizer.found_inf


def ppo_update(agent, trials, optimizer, generator):
    """Some epochs of PPO over a batch. Metrics stay on the device until the end."""
    advantage, returns = advantages_and_returns(agent, trials)
    totals, updates = 0.0, 0
    for _ in range(agent.config.epochs):
        for row, t in agent.minibatches(trials, generator):
            log_prob, value = agent.evaluate(trials, row, t)
            old = trials.log_prob[row, t], advantage[row, t], returns[row, t]
            loss, metrics = ppo_loss(log_prob, value, *old, agent.config.clip)
            metrics["grad_norm"], metrics["skipped"] = gradient_step(agent, optimizer, loss)
            totals = totals + torch.stack(list(metrics.values())).nan_to_num(0.0, 0.0, 0.0)
            updates += 1

    agent.normalizer.update(trials.observation[:, :-1].flatten(0, 1))
    _, _, return_var = moments(returns.reshape(-1, 1))
    _, _, error_var = moments((returns - trials.value).reshape(-1, 1))
    means = (sum_over_processes(totals) / world_size() / updates).tolist()
    report = dict(zip(metrics, means)) | {"updates": updates}
    report["skipped"] = round(report["skipped"] * updates)
    report["explained_variance"] = 1 - (error_var / (return_var + 1e-8)).item()
    report["std"] = agent.log_std.exp().mean().item()
    return report


# ---- 8. Meta-testing (Sec. 5.1, 5.2) -------------------------------------------------------------
#
# Frozen weights, and test tasks that are the same for every agent and seed. As in the authors'
# release, locomotion is tested with mean actions and MetaWorld with sampled ones.


def meta_test(agent, envs, episodes=FINAL_EPISODES, sample=None):
    """Run consecutive episodes of each task; returns and successes, (tasks, episodes) each."""
    sample = envs.sample_at_test if sample is None else sample
    steps = episodes * envs.episode_length
    return collect(agent, envs, envs.tasks, steps, sample, TEST_SEED).episode_returns(episodes)


def bootstrap_interval(values, resamples=2000):
    """95 % percentile bootstrap interval of the mean of `values`."""
    draws = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    return np.quantile(np.asarray(values)[draws].mean(axis=1), [0.025, 0.975])


def score(returns, success):
    """'-20.1', or with a success rate '4515 (97 %)'."""
    if np.isnan(success).any():
        return f"{returns.mean():.1f}"
    return f"{returns.mean():.0f} ({100 * success.mean():.0f} %)"


def eval_rows(step, split, sample, returns, success):
    """Rows of eval.csv: one per task and episode."""
    actions = "sampled" if sample else "mean"
    rows = []
    for (task, episode), value in np.ndenumerate(returns):
        row = {"step": step, "split": split, "task": task, "episode": episode + 1}
        rows.append(row | {"return": value, "success": success[task, episode], "actions": actions})
    return rows


def table(returns, success, envs):
    """The result of a meta-test: a line per episode, then one per class if there are several."""
    has_success = not np.isnan(success).any()
    lines = [f"{'':>28}{'return':>10}{'95 % interval':>19}{'worst':>22}"]
    lines[0] += f"{'success':>10}" if has_success else ""

    def add(name, tasks, episodes):
        values, rates = returns[tasks][:, episodes], success[tasks][:, episodes]
        low, high = bootstrap_interval(values.flatten())
        worst = f"{values.min():.1f} (task {tasks[values.min(axis=1).argmin()]})"
        line = f"{name:>28}{values.mean():>10.1f}{low:>9.1f} to {high:<6.1f}{worst:>22}"
        lines.append(line + (f"{rates.mean():>10.0%}" if has_success else ""))

    for i in range(returns.shape[1]):
        add(f"episode {i + 1}", np.arange(len(returns)), [i])
    classes = getattr(envs, "classes", [])
    for i, name in enumerate(classes if len(classes) > 1 else []):
        add(name, np.flatnonzero(envs.tasks[:, 0] == i), slice(None))
    return "\n".join(lines)


# ---- 9. Run folder -------------------------------------------------------------------------------
#
# config.json, progress.csv (a row per iteration), eval.csv (a row per task and episode), agent.pt
# and checkpoint.pt are written after every iteration. Each is replaced atomically: a crash leaves
# the old file or the new one. Loading a file never runs code that is in it (weights_only).


def write_atomically(path, data):
    """The old file stays whole until the new one is on the disk."""
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def csv_text(rows, header):
    """Lines of a csv file: numbers with six digits, nothing for NaN."""
    lines = [",".join(rows[0])] if header else []
    for row in rows:
        cells = [f"{x:.6g}" if isinstance(x, float) else str(x) for x in row.values()]
        lines.append(",".join(cells).replace("nan", ""))
    return "\n".join(lines) + "\n"


class Run:
    """Everything that changes during a run, and its files."""

    def __init__(self, folder, agent, envs):
        config = agent.config
        self.folder = agent.folder = Path(folder)
        self.agent = agent
        self.envs = envs  # split: VectorEnv
        self.batch = config.num_tasks * config.episodes_per_trial * envs["train"].episode_length
        self.iterations = math.ceil(config.total_steps / self.batch)
        self.optimizer = torch.optim.Adam(agent.parameter_groups(), eps=1e-5, fused=True)
        self.iteration = 0
        self.seconds = 0.0
        self.csv = {"progress.csv": "", "eval.csv": ""}
        self.test_score, self.test_table = "-", ""

    def add_rows(self, name, rows):
        self.csv[name] += csv_text(rows, header=not self.csv[name])

    def save(self):
        """Write all files."""
        config = {"agent": self.agent.name, **asdict(self.agent.config)}
        versions = {x.__name__: x.__version__ for x in (torch, np, gymnasium, mujoco)}
        agent = {"version": VERSION, "config": config, "sizes": self.agent.sizes}
        agent |= {"step": self.agent.trained_steps, "weights": self.agent.state_dict()}
        run = {"iteration": self.iteration, "seconds": self.seconds}
        run |= {"optimizer": self.optimizer.state_dict(), "csv": self.csv}  # rows of this moment

        # The checkpoint first, so that no other file is ever ahead of it.
        files = {}
        for name, content in {"checkpoint.pt": agent | run, "agent.pt": agent}.items():
            buffer = io.BytesIO()
            torch.save(content, buffer)
            files[name] = buffer.getvalue()
        files["config.json"] = json.dumps(config | {"versions": versions}, indent=2).encode()
        files |= {name: text.encode() for name, text in self.csv.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                write_atomically(self.folder / name, data)
        except OSError as error:
            raise RunError(
                f"cannot write {self.folder} ({error.strerror}); {self.hint()}"
            ) from None

    def hint(self):
        return f"continue with: {self.agent.command} --resume {self.folder}"

    def restore(self, saved):
        self.optimizer.load_state_dict(saved["optimizer"])
        self.iteration = int(saved["iteration"])
        self.seconds = float(saved["seconds"])
        self.csv = {name: str(saved["csv"][name]) for name in self.csv}


def load(path, agent_class):
    """The content of an agent.pt or checkpoint.pt, and its agent on the CPU."""
    if not path.is_file():
        runs = path.parent.glob("**/agent.pt") if path.name == "agent.pt" else ()
        names = ", ".join(sorted(str(agent.parent) for agent in runs))
        hint = f"; {path.parent} holds these runs: {names}" if names else ""
        raise UserError(f"{path} does not exist{hint}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved["version"] != VERSION:
            raise ValueError(f"version {saved['version']}; commit 40cf2af reads version 1")
        settings = dict(saved["config"])
        name = settings.pop("agent")
        if name != agent_class.name:
            module = "trmrl.py" if name == TrMRL.name else f"-m baselines.{name}"
            raise ValueError(f"an agent of {name}; type: python {module} --eval {path.parent}")
        config = agent_class.Config(**settings)
        check(config)
        agent = agent_class(config, saved["sizes"])
        agent.load_state_dict(saved["weights"])
        agent.trained_steps = int(saved["step"])
        agent.folder = path.parent
    except pickle.UnpicklingError:
        raise UserError(f"cannot load {path}: it is damaged or not a file of trmrl.py") from None
    except Exception as error:  # a damaged or foreign file may raise anything
        raise UserError(f"cannot load {path}: {one_line(error)}") from None
    return saved, agent


def one_line(error):
    return " ".join(str(error).split())[:200] or type(error).__name__


def load_agent(path, device="cpu", agent_class=TrMRL):
    """A trained agent, from a run folder or an agent.pt."""
    path = Path(path) / "agent.pt" if Path(path).is_dir() else Path(path)
    _, agent = load(path, agent_class)
    return agent.to(pick_device(device)).requires_grad_(False)


# ---- 10. Meta-training (Sec. 5.1) ----------------------------------------------------------------
#
# An iteration draws new tasks, collects a trial of each and learns from the batch. With torchrun
# each process has its share of the tasks and of every minibatch; gradients are averaged and
# statistics merged, so that all processes keep the same weights.


def join_processes(device):
    """Join the other processes, if torchrun started this one."""
    if {"RANK", "MASTER_ADDR"} <= os.environ.keys() and not dist.is_initialized():
        # Load the compiler before Adam does: loaded after the group, it could crash Python's exit.
        torch.compiler.reset()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def pick_device(name):
    """'auto' prefers a GPU; torchrun gives each process a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.zeros(1, device=name).tolist()
    except Exception:  # each kind of device fails in its own way
        raise UserError(f"device {name!r} is not available here; cpu always is") from None
    return torch.device(name)


def prepare(config, make_tasks):
    """Check a Config, resolve its device and threads, and make its environments."""
    check(config)
    torch.set_num_threads(config.threads or os.cpu_count())
    device = pick_device(config.device)
    join_processes(device)
    config = replace(config, device=str(device), threads=torch.get_num_threads())
    if config.num_tasks % world_size() or config.minibatch % world_size():
        raise UserError(
            f"--num-tasks and --minibatch must be multiples of {world_size()} processes"
        )

    rows = config.num_tasks // world_size() * config.rows_per_task
    envs = {"train": make_tasks(config.env, rows, config.seed, "train")}
    for split in envs["train"].splits[1:]:
        envs[split] = make_tasks(config.env, config.eval_tasks, config.seed, split)
    steps = config.num_tasks * config.episodes_per_trial * envs["train"].episode_length
    if "minibatch" not in config.unused and config.minibatch > steps:
        raise UserError(f"--minibatch {config.minibatch} is more than a batch of {steps} steps")
    return config, envs


def sizes_of(envs):
    """How many numbers a state, an action and a task have."""
    state, action = envs.single_observation_space, envs.single_action_space
    return state.shape[0], action.shape[0], envs.tasks.shape[1]


def train(config, make_tasks=make_tasks, agent_class=TrMRL):
    """Meta-train a new agent on the tasks of make_tasks; its files are in agent.folder."""
    config, envs = prepare(config, make_tasks)
    default = Path("runs") / config.env / f"{agent_class.name}-seed{config.seed}"
    folder = Path(config.run_dir or default)
    if rank() == 0 and (folder.is_file() or folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} already exists: --resume it, or choose a --seed or --run-dir")
    with torch.random.fork_rng(devices=[]):  # the same initial weights on every device
        torch.manual_seed(config.seed)
        agent = agent_class(config, sizes_of(envs["train"]))
    return run_iterations(Run(folder, agent.to(config.device), envs))


def resume(folder, make_tasks=make_tasks, agent_class=TrMRL, **changes):
    """Continue a run from its checkpoint; `changes`: another device or number of threads."""
    saved, agent = load(Path(folder) / "checkpoint.pt", agent_class)
    agent.config, envs = prepare(replace(agent.config, **changes), make_tasks)
    run = Run(folder, agent.to(agent.config.device), envs)
    try:
        run.restore(saved)
    except Exception as error:
        raise UserError(f"{folder}/checkpoint.pt is damaged: {one_line(error)}") from None
    if run.iteration >= run.iterations:
        raise UserError(f"{folder} is finished; {agent.command} --eval {folder} meta-tests it")
    return run_iterations(run)


def run_iterations(run):
    """Iterate until the end; returns the agent."""
    try:
        if rank() == 0:
            announce(run)
            run.save()
        while run.iteration < run.iterations:
            iterate(run)
    except KeyboardInterrupt:
        print(f"\nstopped; {run.hint()}", file=sys.stderr)
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = f"process {rank()} lost the others ({one_line(error)})"
        raise RunError(f"{reason}; {run.hint()}") from None
    finally:
        for envs in run.envs.values():
            envs.close()
    return run.agent


def announce(run):
    config, steps = run.agent.config, run.iterations * run.batch
    rounded = f" ({config.total_steps:,} rounded up)" if steps > config.total_steps else ""
    print(f"{run.agent.name} on {config.env}: {steps:,} steps{rounded} into {run.folder}")
    processes = f"processes: {world_size()}"
    print(f"{config.device}, threads: {config.threads}, {processes}", flush=True)


def iterate(run):
    """Draw tasks, collect a trial of each, learn; periodically, and at the end, meta-test."""
    agent, config, envs = run.agent, run.agent.config, run.envs["train"]
    began = time.monotonic()
    decay = 1 - (1 - config.final_lr) * run.iteration / run.iterations
    for group, initial in zip(run.optimizer.param_groups, agent.parameter_groups()):
        group["lr"] = decay * initial["lr"]

    # Every random number follows from the seed, the iteration and the process.
    seeds = np.random.SeedSequence([config.seed, run.iteration, rank()]).generate_state(3)
    task_seed, trial_seed, update_seed = seeds.tolist()
    rng = np.random.default_rng(task_seed)
    tasks = envs.sample_tasks(rng, envs.num_envs // config.rows_per_task)
    tasks = np.repeat(tasks, config.rows_per_task, axis=0)  # tasks 5 8, two rows each: 5 5 8 8
    episodes = config.episodes_per_trial // config.rows_per_task
    trials = collect(agent, envs, tasks, episodes * envs.episode_length, True, trial_seed)
    generator = torch.Generator(agent.device).manual_seed(update_seed)
    metrics = agent.update(trials, run.optimizer, generator)
    if 2 * metrics["skipped"] > metrics["updates"]:
        raise RunError("most gradients are not finite; start again with a lower --lr")
    speed = run.batch / (time.monotonic() - began)

    run.iteration += 1
    agent.trained_steps = run.iteration * run.batch
    if rank() > 0:
        return
    if run.iteration % config.eval_every == 0 or run.iteration == run.iterations:
        meta_test_splits(run)
    run.seconds += time.monotonic() - began
    returns, success = trials.episode_returns(episodes)
    row = {"iteration": run.iteration, "step": agent.trained_steps, "seconds": run.seconds}
    row |= {"steps_per_second": speed, "train_return": returns.mean()}
    row |= {"train_success": success.mean(), **metrics}
    row |= {"lr": decay * config.lr, "blown_up": int(trials.info["blown_up"].sum())}
    run.add_rows("progress.csv", [row])
    run.save()
    print_progress(run, speed, score(returns, success))


def meta_test_splits(run):
    """Meta-test every split; at the end six episodes, and mean actions for MetaWorld as well."""
    finished = run.iteration == run.iterations
    for split, envs in list(run.envs.items())[1:]:
        scored = run.agent.test_episodes
        episodes = FINAL_EPISODES if finished else scored
        returns, success = meta_test(run.agent, envs, episodes)
        rows = eval_rows(run.agent.trained_steps, split, envs.sample_at_test, returns, success)
        run.add_rows("eval.csv", rows)
        if split == "test":
            run.test_score = score(returns[:, scored - 1], success[:, scored - 1])
            run.test_table = table(returns, success, envs)
        if finished and envs.sample_at_test:
            result = meta_test(run.agent, envs, episodes, sample=False)
            run.add_rows("eval.csv", eval_rows(run.agent.trained_steps, split, False, *result))


def print_progress(run, speed, train_score):
    """A live line in a terminal, plain lines in a pipe; at the end the table of the meta-test."""
    terminal, finished = sys.stdout.isatty(), run.iteration == run.iterations
    steps, total = run.iteration * run.batch / 1e6, run.iterations * run.batch / 1e6
    minutes, seconds = divmod(int((total / steps - 1) * run.seconds), 60)
    line = f"{steps:.3f}/{total:.3f} M steps, {speed:,.0f}/s, {minutes}:{seconds:02d} left; "
    line += f"return: test {run.test_score}, train {train_score}"
    if terminal:
        line = "\r\033[K" + line[: os.get_terminal_size().columns - 1]
    print(line, end="" if terminal and not finished else "\n", flush=True)
    if finished:
        print(f"\nMeta-test:\n{run.test_table}\n\nNext:")
        print(f"    {run.agent.command} --eval {run.folder} --episodes 20")
        print(f"    python plots.py --runs {run.folder}", flush=True)


# ---- 11. Command line ----------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see --help")


def integer(text):
    """An integer; accepts 3e5."""
    if not float(text).is_integer():
        raise argparse.ArgumentTypeError(f"{text} is not an integer")
    return int(float(text))


def make_parser(agent_class, env):
    """A flag for every field of the Config; --help shows the defaults that apply to env."""
    parser = Parser(
        description=sys.modules[agent_class.__module__].__doc__,
        epilog=f"environments: {', '.join(ENVS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    group = parser.add_argument_group("meta-test an agent, or continue a run")
    group.add_argument("--eval", metavar="RUN", help="meta-test the agent of a run")
    group.add_argument("--split", help="with --eval: test (default), ood or train tasks")
    group.add_argument("--episodes", type=integer, help="with --eval: episodes per task (6)")
    group.add_argument("--mean", action="store_true", help="with --eval: mean actions")
    group.add_argument("--sample", action="store_true", help="with --eval: sampled actions")
    group.add_argument("--csv", metavar="FILE", help="with --eval: write the results to FILE")
    group.add_argument("--resume", metavar="RUN", help="continue a run")

    defaults = agent_class.Config(env=env)
    groups = {}
    for f in fields(defaults):
        if f.name in defaults.unused:
            continue
        title = f.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        options = {"type": integer if f.type is int else f.type, "metavar": f.type.__name__.upper()}
        if f.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        meaning = f"{f.metadata['help']} (default: {getattr(defaults, f.name)})"
        groups[title].add_argument(flag(f.name), help=meaning.replace("%", "%%"), **options)
    return parser


def parse(argv, agent_class=TrMRL):
    """What was typed, as a dictionary. Reject flags that do not apply."""
    early = Parser(add_help=False, allow_abbrev=False)
    early.add_argument("--env", default=Config.env)
    parser = make_parser(agent_class, early.parse_known_args(argv)[0].env)
    typed, unknown = parser.parse_known_args(argv)
    typed = vars(typed)
    if unknown:
        name = unknown[0].split("=")[0]
        if name in map(flag, agent_class.Config.unused):
            raise UserError(f"{name} does not apply to {agent_class.name}")
        hint = did_you_mean(name, parser._option_string_actions)
        raise UserError(f"unknown flag {name}{hint}; see --help")

    where, meaningful = "without --eval", {f.name for f in fields(agent_class.Config)}
    if "eval" in typed:
        where, meaningful = "with --eval", {"eval", "split", "episodes", "mean", "sample", "csv"}
        meaningful |= {"device", "threads", "eval_tasks"}
    elif "resume" in typed:
        where, meaningful = "with --resume", {"resume", "device", "threads"}
    for name in typed.keys() - meaningful:
        raise UserError(f"{flag(name)} cannot be used {where}")
    return typed


def run_meta_test(path, typed, make_tasks, agent_class):
    """--eval: meta-test an agent and print the table."""
    episodes, split = typed.get("episodes", FINAL_EPISODES), typed.get("split", "test")
    if not 1 <= episodes <= 1000:
        raise UserError(f"--episodes must be between 1 and 1000, not {episodes}")
    if "mean" in typed and "sample" in typed:
        raise UserError("--mean and --sample exclude each other")
    agent = load_agent(path, typed.get("device", "auto"), agent_class)
    num_tasks = typed.get("eval_tasks", agent.config.eval_tasks)
    config = replace(agent.config, eval_tasks=num_tasks, threads=typed.get("threads", 1))
    check(config)
    torch.set_num_threads(config.threads or os.cpu_count())
    envs = make_tasks(config.env, num_tasks, TEST_SEED, split)
    if sizes_of(envs) != tuple(agent.sizes):
        raise UserError(f"{path} was trained on a different environment than {config.env}")

    sample = "sample" in typed or envs.sample_at_test and "mean" not in typed
    result = meta_test(agent, envs, episodes, sample)
    rows = eval_rows(agent.trained_steps, split, sample, *result)
    print(f"{agent.name}, {agent.trained_steps:,} steps of {config.env};", end=" ")
    print(f"{num_tasks} {split} tasks, {rows[0]['actions']} actions:\n{table(*result, envs)}")
    if "csv" in typed:
        Path(typed["csv"]).write_text(csv_text(rows, header=True))


def out_of_memory(error):
    """PyTorch has an error of its own for GPUs, but none for the CPU."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def main(argv=None, make_tasks=make_tasks, agent_class=TrMRL):
    """Exit status: 0, 1 if the run broke, 2 for a user's mistake, 130 after Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        typed = parse(sys.argv[1:] if argv is None else argv, agent_class)
        if "eval" in typed:
            run_meta_test(typed.pop("eval"), typed, make_tasks, agent_class)
        elif "resume" in typed:
            resume(typed.pop("resume"), make_tasks, agent_class, **typed)
        else:
            train(agent_class.Config(**typed), make_tasks, agent_class)
    except KeyboardInterrupt:
        return 130
    except (UserError, RunError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not out_of_memory(error):
            raise
        message = "out of memory" if out_of_memory(error) else error
        print(f"{agent_class.command.split()[-1]}: {message}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # a second one ends Python at once
    return 0


if __name__ == "__main__":
    sys.exit(main())
