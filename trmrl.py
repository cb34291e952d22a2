# SPDX-License-Identifier: MIT
# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==3.3.0",
#     "metaworld==3.1.1", "numpy==2.4.6"]
# ///
"""TrMRL in one file: "Transformers are Meta-Reinforcement Learners" (Melo, ICML 2022).

At test time the agent adapts to a new task within an episode, its weights frozen. It encodes each
step as a working memory phi(s, a, r, eta): state, action, reward and an end-of-episode flag. A
causal transformer refines the last N of them, layer by layer, into the episodic memory of the
current step, and a Gaussian policy acts on it. PPO trains the agent on many tasks; T-Fixup
initialisation lets it train without layer normalisation or warm-up. The presets have one or two
layers, to train on one CPU core; `--layers 4` is closer to the paper.

    python trmrl.py --env halfcheetah_vel                      # meta-train
    python trmrl.py --eval runs/halfcheetah_vel/trmrl-seed1    # meta-test on test tasks
    python trmrl.py --resume runs/halfcheetah_vel/trmrl-seed1  # continue after a crash or Ctrl-C
    torchrun --nproc-per-node 4 trmrl.py --env ant_dir         # several processes or GPUs
    python trmrl.py --help                                     # every environment and setting

Sections 2 to 9 follow the paper; 10 to 12 are machinery, which you can skip at first.

     1. Configuration       every setting, and a preset for each environment
     2. Tasks               App. B: half-cheetah, ant and robot arm
     3. Working memory      Sec. 4.1, "Memory Write Logic" of Sec. 5.1: what the agent sees
     4. Transformer         Sec. 3.2, 3.3, 4.2, 4.3: self-attention, T-Fixup
     5. Agent               Fig. 1: from working memories to an action
     6. Collecting trials   Algorithm 1 (App. G)
     7. PPO                 "Meta-Training" of Sec. 5.1
     8. Meta-testing        "Meta-Testing" of Sec. 5.1, Sec. 5.2
     9. Meta-training       the outer loop; starting and resuming it
    10. Runs                their state, files and reports
    11. Processes           devices, and several processes with torchrun
    12. Command line        flags, and errors that fit on one line

Differences from the paper are noted where they occur; docs/differences.md lists them all.

A trial is E episodes of one task. In the paper they are one trajectory; here, by default, every
episode begins with an empty memory and nothing joins them (section 3; --keep-memory joins them).

Letters: the agent sees its last N steps; the transformer has L layers. In shapes: R rows of a
buffer (one per environment), T steps of a row, M steps in a forward pass (the m-th is step t[m] of
row row[m]); S, A, k and d are the sizes of a state, an action, a task and a memory vector.
"""

import argparse
import atexit
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
from datetime import timedelta
from pathlib import Path

import gymnasium
import mujoco.rollout
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import distributed as dist
from torch import nn

RANK = int(os.environ.get("RANK", 0))  # torchrun sets both; without it, process 0 of 1
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


class UserError(Exception):
    """An error the user can fix; the command line prints it as one line."""


def did_you_mean(name, names):
    """' (did you mean ...?)', or nothing if no name is close."""
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


# ---- 1. Configuration ----------------------------------------------------------------------------
#
# Every field of Config is also a flag: memory_length is --memory-length. A field whose default is
# None takes its value from the preset of the environment, so Config(env="ant_dir", lr=1e-3) is the
# ant's preset with a different learning rate.
#
# The presets are tuned for one CPU core: few layers (two on HalfCheetahVel, one elsewhere), and on
# MetaWorld N = 40 and E = 1. The paper has E = 2; its ablations (App. E) favour 4 to 8 layers and
# N = 5 on HalfCheetahVel, more layers and N = 50 on ML1-Reach. One layer applies Eq. 6 only once,
# so it refines nothing recursively.

LOCOMOTION = dict(num_tasks=20, episodes_per_trial=2, eval_every=10, eval_tasks=20, memory_length=5)
CHEETAH = dict(total_steps=1_500_000, layers=2, init_std=0.2, gamma=0.95, gae_lambda=0.9, lr=3e-4)
ANT = dict(total_steps=5_000_000, layers=1, init_std=0.5, gamma=0.97, gae_lambda=0.9, lr=5e-4)
ARM = dict(episodes_per_trial=1, memory_length=40, layers=1, gamma=0.98, gae_lambda=0.95, lr=3e-4)
ML1 = dict(total_steps=2_000_000, num_tasks=20, init_std=0.7, eval_every=40, eval_tasks=50)
ML45 = dict(total_steps=4_000_000, num_tasks=45, init_std=0.7, eval_every=20, eval_tasks=45)
PRESETS = {
    "halfcheetah_vel": LOCOMOTION | CHEETAH,
    "ant_dir": LOCOMOTION | ANT,
    "ml1": ARM | ML1,  # for ml1_reach and every other ml1_<task>
    "ml45": ARM | ML45,  # for ml45_train
}


def setting(group, default, help, low=0, high=10**9):
    """A field of Config: its group in --help, default, meaning, and bounds (see check_config)."""
    return field(default=default, metadata=dict(group=group, help=help, low=low, high=high))


@dataclass
class Config:
    # Class attributes (no annotation, so no fields), which a baseline may override. not_flags:
    # settings that it does not offer as flags, because it ignores or fixes them. one_process:
    # whether it refuses torchrun.
    presets = PRESETS
    not_flags = ()
    one_process = False

    env: str = setting("run", "halfcheetah_vel", "task family")
    seed: int = setting("run", 1, "seed of training", high=2**31 - 1)
    device: str = setting("run", "auto", "auto, cpu, cuda, cuda:1, mps")
    threads: int = setting("run", 1, "CPU threads of a process; 0: all", high=1024)
    run_dir: str = setting("run", "", "run folder; default: runs/<env>/<agent>-seed<seed>")

    total_steps: int = setting("training", None, "environment steps", low=1, high=10**12)
    num_tasks: int = setting("training", None, "tasks per iteration, across all processes", low=1)
    episodes_per_trial: int = setting("training", None, "E, episodes per trial", low=1)
    eval_every: int = setting("training", None, "iterations between meta-tests", low=1)
    eval_tasks: int = setting("training", None, "tasks per meta-test", low=1)

    memory_length: int = setting("agent", None, "N, working memories in the context", low=1)
    layers: int = setting("agent", None, "L, transformer layers", low=1, high=1000)
    heads: int = setting("agent", 4, "attention heads per layer", low=1)
    d_model: int = setting("agent", 64, "d, size of a memory", low=2)
    tfixup: bool = setting("agent", True, "T-Fixup; without it, layer norm and plain Xavier")
    keep_memory: bool = setting("agent", False, "keep memories across the episodes of a trial")
    init_std: float = setting("agent", None, "initial standard deviation of actions", low=1e-3)

    gamma: float = setting("learning", None, "discount factor, below 1", high=0.9999)
    gae_lambda: float = setting("learning", None, "lambda of GAE", high=1)
    clip: float = setting("learning", 0.2, "clipping of the probability ratio", low=1e-6)
    epochs: int = setting("learning", 5, "passes over a batch", low=1)
    minibatch: int = setting("learning", 200, "environment steps per gradient step", low=2)
    lr: float = setting("learning", None, "learning rate of all but the value head", high=1)
    value_lr: float = setting("learning", 1e-3, "learning rate of the value head", high=1)
    final_lr: float = setting("learning", 0.05, "learning rates fall towards this fraction", high=1)
    max_grad_norm: float = setting("learning", 0.5, "gradients are clipped to this norm", low=1e-9)

    def __post_init__(self):
        # ml1_push takes the preset of ml1; an env of your own takes the half-cheetah's.
        key = self.env if self.env in self.presets else self.env.split("_")[0]
        preset = self.presets.get(key, self.presets["halfcheetah_vel"])
        for name, value in preset.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    @property
    def rows_per_task(self):
        """Rows of a buffer per task: one per episode, or one for all E (section 3 says why)."""
        return 1 if self.keep_memory else self.episodes_per_trial


# ---- 2. Tasks (App. B) ---------------------------------------------------------------------------
#
# The tasks of a family share a robot and differ in a hidden goal, which the agent must infer from
# its rewards. On MetaWorld they also differ in the objects and their places, which the agent sees.
# A batch of tasks is one Gymnasium VectorEnv. The paper gives no formulas: the rewards and episode
# lengths of half-cheetah and ant are those of the author's release, except that the ant has no
# contact cost (it is tiny) and no reward for surviving a step in which it falls. Observations are
# Gymnasium's, which leave out the position on the ground; we leave out contact forces, too.


class TaskFamily(VectorEnv):
    """Environments of one family, stepped together: one for each of `tasks` (num_envs, k).

    To add a family, subclass it and define the following. super().__init__ calls sample_tasks or
    fixed_tasks, so set what they need before it. Then pass a function like make_tasks to train.

        sample_tasks(rng, n)   n random training tasks, (n, k)
        fixed_tasks(split, n)  n tasks of another split, (n, k)
        begin(mask)            start an episode where the mask is true; draw from self.np_random
        advance(actions)       one step, actions in [-1, 1]; returns reward and terminated,
                               (num_envs,), and info, a dictionary of such arrays; "success",
                               if it is one of them, is reported
        observation()          what the agent sees, (num_envs, state_size)
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # `collect` resets
    splits = ("train", "test")  # then any others. A run is meta-tested on all but "train"
    classes = ()  # names, if tasks come in classes; tasks[:, 0] is then the index of the class
    episode_length = 200
    sample_at_test = False  # true: a meta-test samples actions; false: it takes their means

    def __init__(self, num_envs, seed, split, state_size, action_size):
        if split not in self.splits:
            raise UserError(f"this family has no split {split!r}, only {', '.join(self.splits)}")
        self.num_envs = num_envs
        self.single_observation_space = Box(-np.inf, np.inf, (state_size,), np.float32)
        self.single_action_space = Box(-1.0, 1.0, (action_size,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.elapsed = np.zeros(num_envs, dtype=int)  # steps since the episode began
        if split == "train":  # for --eval --split train; meta-training sets new ones, by `reset`
            self.tasks = self.sample_tasks(np.random.default_rng(seed), num_envs)
        else:
            self.tasks = self.fixed_tasks(split, num_envs)
        self.sizes = (state_size, action_size, self.tasks.shape[1])  # S, A, k

    def reset(self, *, seed=None, options=None):
        """Begin episodes. Options: `tasks` sets the tasks, `reset_mask` says where to begin."""
        super().reset(seed=seed)
        options = options or {}
        if "tasks" in options:
            self.tasks = np.array(options["tasks"], dtype=np.float64).reshape(self.tasks.shape)
        mask = options.get("reset_mask", np.ones(self.num_envs, dtype=bool))
        self.begin(mask)
        self.elapsed[mask] = 0
        return self.observation().astype(np.float32), {}

    def step(self, actions):
        """One step of every environment. Nothing is reset: where an episode ends, call reset."""
        actions = np.nan_to_num(np.asarray(actions, dtype=np.float64))  # NaN breaks the physics
        reward, terminated, info = self.advance(actions.clip(-1.0, 1.0))
        self.elapsed += 1
        truncated = self.elapsed >= self.episode_length
        observation = self.observation().astype(np.float32)
        return observation, reward.astype(np.float32), terminated, truncated, info


class MujocoFamily(TaskFamily):
    """Tasks of one MuJoCo body. One native call steps all of them, in threads.

    A subclass defines reward(x_velocity, actions) and, if the body can fall, healthy(); both are
    called when self.physics is already the new state.
    """

    xml = ""
    frame_skip = 5  # physics steps per environment step
    hidden_qpos = 1  # leading entries of qpos that the agent does not see: x, or x and y

    def __init__(self, num_envs, seed=0, split="train"):
        assets = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
        self.model = mujoco.MjModel.from_xml_path(str(assets / self.xml))
        self.dt = self.model.opt.timestep * self.frame_skip
        threads = torch.get_num_threads()  # those of PyTorch, which a run sets to --threads
        self.thread_data = [mujoco.MjData(self.model) for _ in range(threads)]
        self.pool = mujoco.rollout.Rollout(nthread=threads if threads > 1 else 0)  # 0: no pool
        size = 1 + self.model.nq + self.model.nv
        self.physics = np.zeros((num_envs, size))  # columns: time, qpos (x first), qvel
        super().__init__(num_envs, seed, split, size - 1 - self.hidden_qpos, self.model.nu)

    def begin(self, mask):
        """Start near the resting pose, with the noise of Gymnasium's own environments."""
        n = int(mask.sum())
        qpos = self.model.qpos0 + self.np_random.uniform(-0.1, 0.1, (n, self.model.nq))
        qvel = 0.1 * self.np_random.standard_normal((n, self.model.nv))
        self.physics[mask] = np.concatenate([np.zeros((n, 1)), qpos, qvel], axis=1)

    def advance(self, actions):
        before = self.physics
        controls = np.repeat(actions[:, None], self.frame_skip, axis=1)  # (num_envs, frame_skip, A)
        states, _ = self.pool.rollout(self.model, self.thread_data, before, controls)
        after = states[:, -1]

        # A simulation may diverge; MuJoCo then resets it, its clock included. Such a step is
        # undone: the body stays where it was and gets the reward of zero velocity.
        clock_reset = np.abs(after[:, 0] - before[:, 0] - self.dt) > 1e-6
        bounded = np.abs(after).max(axis=1) < 1e3  # also false for NaN
        diverged = clock_reset | ~bounded
        after[diverged] = before[diverged]
        self.physics = after

        x_velocity = (after[:, 1] - before[:, 1]) / self.dt  # m/s
        info = {"x_velocity": x_velocity, "diverged": diverged}
        return self.reward(x_velocity, actions), ~self.healthy(), info

    def observation(self):
        return self.physics[:, 1 + self.hidden_qpos :]

    def healthy(self):
        return np.ones(self.num_envs, dtype=bool)


class HalfCheetahVel(MujocoFamily):
    """Run at a hidden velocity from [0, 3] m/s; out of distribution ("ood"): [3, 4].

    Test tasks are an even grid: less noisy than the random ones of the paper.
    """

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


class AntDir(MujocoFamily):
    """Run forward (+1) or backward (-1) without falling. A meta-test repeats these two tasks."""

    xml = "ant.xml"
    hidden_qpos = 2

    def sample_tasks(self, rng, n):
        return rng.choice([-1.0, 1.0], (n, 1))

    def fixed_tasks(self, split, n):
        return np.resize([1.0, -1.0], (n, 1))  # repeated: 1, -1, 1, -1, ...

    def healthy(self):
        height = self.physics[:, 3]  # after time, x and y
        return (height >= 0.2) & (height <= 1.0)

    def reward(self, x_velocity, actions):
        effort = 0.5 * np.square(actions).sum(axis=1)
        survival = self.healthy().astype(float)
        return self.tasks[:, 0] * x_velocity - effort + survival


@functools.cache
def metaworld_tasks(env):
    """Class names, training tasks and test tasks of a MetaWorld benchmark (v3; the paper used v2).

    Tasks are (classes, 50, 7): the index of the class, then MetaWorld's rand_vec (3 or 6 numbers:
    positions of the goal and often of the object), padded with zeros.
    """
    import metaworld  # takes a second

    if env == "ml45_train":
        benchmark = metaworld.ML45(seed=0)  # the seed fixes the tasks
        task_lists = benchmark.train_tasks, benchmark.train_tasks  # App. B tests on training tasks
    else:
        name = env.removeprefix("ml1_").replace("_", "-")
        benchmark = metaworld.ML1(f"{name}-v3", seed=0)
        task_lists = benchmark.train_tasks, benchmark.test_tasks
    classes = list(benchmark.train_classes)
    tasks = np.zeros((2, len(classes), 50, 7))
    for split_id, split_tasks in enumerate(task_lists):
        for i, task in enumerate(split_tasks):  # sorted by class, 50 of each
            class_id = classes.index(task.env_name)
            rand_vec = pickle.loads(task.data)["rand_vec"]
            tasks[split_id, class_id, i % 50, : 1 + len(rand_vec)] = [class_id, *rand_vec]
    return classes, tasks[0], tasks[1]


class MetaWorldFamily(TaskFamily):
    """A robot arm with a hidden goal: ML1 (one class of tasks) or ML45-Train (45 classes)."""

    sample_at_test = True

    def __init__(self, env, num_envs, seed=0, split="train"):
        self.classes, self.train_tasks, self.test_tasks = metaworld_tasks(env)
        # MetaWorld's episodes have 500 steps. Ours have 300 in the training split, to see more
        # tasks, so returns of the two splits do not compare.
        self.episode_length = 300 if split == "train" else 500
        # In Reach the object is irrelevant, but its position reveals which of the 50 training goals
        # is active. To keep agents from memorising that, training shifts the observed object by a
        # Gaussian offset, drawn once per episode (std in m). The paper does not do this.
        self.object_noise = 0.1 if env == "ml1_reach" and split == "train" else 0.0
        self.object_offset = np.zeros((num_envs, 39))
        self.raw_observation = np.zeros((num_envs, 39))
        self.arms = [None] * num_envs
        super().__init__(num_envs, seed, split, state_size=39, action_size=4)

    def sample_tasks(self, rng, n):
        # One random order of the 50 tasks, the same for all classes.
        return self.tasks_in_turn(rng.permutation(self.train_tasks, axis=1), n)

    def fixed_tasks(self, split, n):
        return self.tasks_in_turn(self.test_tasks, n)

    def tasks_in_turn(self, tasks, n):
        """The first task of each class in turn, then the second, until there are n."""
        num_classes = len(self.classes)
        if n % num_classes:
            flags = "--num-tasks (per process) and --eval-tasks"
            raise UserError(f"{flags} must be multiples of the {num_classes} classes")
        turn, class_id = divmod(np.arange(n), num_classes)  # 3 classes: 000111 and 012012
        return tasks[class_id, turn % 50]

    def begin(self, mask):
        import metaworld

        for i in np.flatnonzero(mask):
            name = self.classes[int(self.tasks[i, 0])]
            arm_class = metaworld.ALL_V3_ENVIRONMENTS[name]
            if type(self.arms[i]) is not arm_class:  # building one is slow
                self.arms[i] = arm_class()
            size = len(self.arms[i]._random_reset_space.low)  # the rest of the task is padding
            rand_vec = self.tasks[i, 1 : 1 + size]
            # Partially observable: the goal is hidden from the agent.
            task = {"rand_vec": rand_vec, "env_cls": arm_class, "partially_observable": True}
            self.arms[i].set_task(metaworld.Task(name, pickle.dumps(task)))
            self.raw_observation[i], _ = self.arms[i].reset()
            # The object's position is at 4:7, and that of the previous frame at 22:25.
            offset = self.np_random.normal(0.0, self.object_noise, 3)
            self.object_offset[i, 4:7] = self.object_offset[i, 22:25] = offset

    def advance(self, actions):
        """MetaWorld has no batched step: loop over the environments."""
        results = [arm.step(action) for arm, action in zip(self.arms, actions.astype(np.float32))]
        observations, rewards, _, _, infos = zip(*results)
        self.raw_observation = np.array(observations)
        success = np.array([info["success"] for info in infos])
        # Rewards are between 0 and 10, so NaN and infinity count as the worst, 0.
        reward = np.nan_to_num(rewards, posinf=0.0, neginf=0.0)
        return reward, np.zeros(self.num_envs, dtype=bool), {"success": success}

    def observation(self):
        return self.raw_observation + self.object_offset


FAMILIES = {"halfcheetah_vel": HalfCheetahVel, "ant_dir": AntDir}
ENVS = (*FAMILIES, "ml1_reach", "ml1_push", "ml1_<task>", "ml45_train")


def make_tasks(env, num_tasks, seed=0, split="train"):
    """`num_tasks` environments, each with a task drawn by `seed` (train) or fixed (test, ood)."""
    if env in FAMILIES:
        return FAMILIES[env](num_tasks, seed, split)
    import metaworld

    classes = [name.removesuffix("-v3").replace("-", "_") for name in metaworld.ALL_V3_ENVIRONMENTS]
    names = [*FAMILIES, "ml45_train", *(f"ml1_{name}" for name in classes)]
    if env in names:
        return MetaWorldFamily(env, num_tasks, seed, split)
    hint = did_you_mean(env, names) or f"; there are {', '.join(names)}"
    raise UserError(f"unknown env {env!r}{hint}")


# ---- 3. Working memory (Sec. 4.1; "Memory Write Logic" of Sec. 5.1) ------------------------------
#
# A token is the tuple (s, a, r, eta) of a step: s normalised, a clipped, r not scaled. phi, in
# section 5, maps it to a working memory. At step t the agent sees the tokens of the last N steps, t
# included. The action, reward and eta of step t are not known yet: they are PAD, that is, zero.
#
# eta is 1 at the last step of an episode (in the paper at a terminal state, here also at the time
# limit). "Memory Write Logic" and Algorithm 1 begin an episode with an empty memory. So we clear it
# there by default, and eta is 0 in all that the agent sees; with --keep-memory it is informative.
#
# By default nothing passes from one episode of a trial to the next (E only multiplies the data), so
# training plays the E episodes side by side, as E rows of the buffer. A meta-test plays episodes
# one after the other in one row. So does training with --keep-memory; what is kept then matters in
# the first N - 1 steps of an episode. The length of a row is fixed: where an episode terminates
# early (the ant falls), another begins at once.


class Buffer:
    """B of Algorithm 1: R rows of T steps, filled step by step.

    Every step is stored once: `window` gathers the tokens that the agent sees. Tensors with T + 1
    columns also have room for the state after the last step. `generator` draws the noise of sampled
    actions, and its device is that of the buffer.
    """

    def __init__(self, R, T, sizes, generator):
        S, A, _ = sizes
        zeros = functools.partial(torch.zeros, device=generator.device)

        # What the agent may remember. The four tensors after `token` are views of it.
        self.token = zeros(R, T + 1, S + A + 2)
        self.state = self.token[:, :, :S]  # normalised
        self.clipped_action = self.token[:, :, S : S + A]  # as the environment sees it
        self.reward = self.token[:, :T, -2]
        self.eta = self.token[:, :T, -1]
        self.memory_start = zeros(R, T + 1, dtype=torch.long)  # the oldest step that step t may see

        # The states before they are normalised, for the statistics of the normalizer.
        self.raw_state = zeros(R, T + 1, S)

        # Actions and predictions. Noise is drawn in advance: calling Player.act twice gives the
        # same answer twice. (In column T no action is taken, but `act` may read it.)
        self.noise = torch.randn(R, T + 1, A, generator=generator, device=generator.device)
        self.action = zeros(R, T, A)  # before clipping; log_prob is its log-probability
        self.log_prob = zeros(R, T)
        self.value = zeros(R, T)

        # Where a PPO trajectory ends (the table of section 6).
        self.terminated = zeros(R, T, dtype=torch.bool)  # the episode ended by itself, by a fall
        self.trajectory_ends = zeros(R, T, dtype=torch.bool)
        self.end_value = zeros(R, T)  # at those steps: value of the next state, 0 if terminated

        # Whatever else the environment reports: arrays (R, T) such as success and x_velocity.
        self.info = {}

        # For baselines: the task (R, k), and what they remember, such as a hidden state.
        self.task = None
        self.stored = {}

    def to_device(self, x):
        """A NumPy array as a tensor on the device of the buffer."""
        return torch.as_tensor(x).to(self.token.device)

    def write_state(self, t, observation, normalizer):
        """Write the observations (R, S) of step t."""
        self.raw_state[:, t] = self.to_device(observation)
        self.state[:, t] = normalizer(self.raw_state[:, t])


def window(buffer, row, t, N):
    """The tokens that the agent sees at step t[m] of row row[m], for acting and for learning.

    row, t: (M,). Returns tokens (M, N, S + A + 2), oldest first, and the current step's slot (M,).
    Algorithm 1 pads on the left, has no mask for the padding, and reads the last slot. We fill the
    first slots first, as "Memory Write Logic" says, and read the current one. Empty slots come
    after it, so the causal mask hides them. For N = 3 and an episode that began at step 7, with -
    for an empty slot:

        t = 7:  7 - -    current slot 0
        t = 8:  7 8 -    current slot 1
        t = 9:  7 8 9    current slot 2
        t = 10: 8 9 10   current slot 2
    """
    oldest = torch.maximum(buffer.memory_start[row, t], t - (N - 1))
    current_slot = t - oldest
    slot = torch.arange(N, device=t.device)
    step = torch.minimum(oldest[:, None] + slot, t[:, None])  # an empty slot repeats step t
    tokens = buffer.token[row[:, None], step]

    # PAD: blank the action, reward and eta of the current step (and of empty slots). Indexing has
    # made a copy: the buffer keeps them.
    S = buffer.state.shape[-1]
    blank = slot >= current_slot[:, None]
    tokens[..., S:].masked_fill_(blank[..., None], 0.0)
    return tokens, current_slot


# ---- 4. Transformer (Sec. 3.2, 4.2, 4.3) and T-Fixup (Sec. 3.3) ----------------------------------
#
# e^0 are the working memories plus positional encodings (Sec. 3.2; not in Algorithm 1), and each
# layer refines them (Eq. 6). alpha says how relevant each memory is to the query (Eq. 4); mu, the
# values weighted by alpha, represents the task (Eq. 3 and 5; W is the value projection). mu is the
# consensus of Theorem 1, which assumes memories of unit norm; nothing here enforces that.
#
# This is standard causal attention: scores are divided by the root of the size of one head, and
# masked ones become minus infinity, before the softmax. (Eq. 1 multiplies them by the mask; Eq. 4
# and 5 divide after the softmax, and have i <= j for j <= i and slips in their indices.) App. E
# does not say what replaces T-Fixup when it is off; --no-tfixup uses the layer normalisation of
# Sec. 3.2, after each residual, without warm-up.


def sinusoids(N, d):
    """The positional encoding of "Attention is all you need", (N, d)."""
    angle = torch.arange(N)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def xavier(module):
    """Xavier weights and zero biases for a linear layer."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


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

    def forward(self, queries, memories, visible):
        """Refine the queries (M, n, d) by what they find in the memories (M, N, d).

        The queries are all memories (n = N) or, in the last layer, the current one (n = 1).
        `visible`, broadcast to (M, heads, n, N), is true where a query may look.
        """
        q, k, v = self.query(queries), self.key(memories), self.value(memories)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        # Now q is (M, heads, n, d / heads); k and v are (M, heads, N, d / heads).

        # alpha = softmax(q k^T / sqrt(d / heads)) over the visible memories; mu = alpha v.
        mu = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)  # (M, heads, n, d / heads)
        mu = mu.transpose(1, 2).flatten(2)  # heads side by side, Eq. 1
        h = self.norm1(queries + self.out(mu))
        return self.norm2(h + self.ff2(F.relu(self.ff1(h))))


class Transformer(nn.Module):
    """Refines the working memories e^0; returns the episodic memory e^L of the current step.

    T-Fixup scales the layers here, and phi in TrMRL.
    """

    def __init__(self, L, d, heads, tfixup):
        super().__init__()
        self.layers = nn.ModuleList(Layer(d, heads, layer_norm=not tfixup) for _ in range(L))
        self.layers.apply(xavier)
        if tfixup:
            for layer in self.layers:
                # 0.67 L^(-1/4); the paper writes N for L. Sec. 3.3 says "the linear projection
                # matrices"; the T-Fixup paper excludes queries and keys.
                for linear in (layer.value, layer.out, layer.ff1, layer.ff2):
                    linear.weight.data *= 0.67 * L**-0.25

    def forward(self, e, current_slot):
        """e (M, N, d), current_slot (M,) -> (M, d)."""
        M, N, _ = e.shape
        slot = torch.arange(N, device=e.device)
        # Slot i sees the slots j <= i, so the current one never sees the empty ones after it.
        causal = slot[:, None] >= slot  # (N, N)
        for layer in self.layers[:-1]:
            e = layer(e, e, causal)  # e^1 ... e^(L-1)

        # The policy reads the current slot only, so the last layer refines no other slot. This is
        # e = layer(e, e, causal), then e[m, current_slot[m]], for less work.
        query = e[torch.arange(M, device=e.device), current_slot][:, None]  # (M, 1, d)
        visible = causal[current_slot][:, None, None]  # (M, 1, 1, N)
        return self.layers[-1](query, e, visible)[:, 0]


# ---- 5. Agent (Fig. 1) ---------------------------------------------------------------------------
#
# Agent is what TrMRL and the baselines share: a normalizer, and a policy head and a value head that
# read the same vector e. A subclass says how `recall` computes e from what the agent has seen.
# Because both heads share it, learning values also teaches `recall` to identify the task. The paper
# does not describe a value function, the heads or how states are normalised: these are ours.


def moments(x):
    """Mean and variance over the first axis of x (M, size), in all processes (section 11)."""
    n = len(x) * WORLD_SIZE
    mean = sum_over_processes(x.sum(dim=0)) / n
    var = sum_over_processes((x - mean).square().sum(dim=0)) / n
    return mean, var


class RunningStats(nn.Module):
    """A running mean and variance; calling it normalises with them."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10.0, 10.0)

    @property
    def root_mean_square(self):
        return (self.var + self.mean.square() + 1e-8).sqrt()

    def update(self, x):
        """Merge the mean and variance of x (M, size) into the running ones (Chan's formula)."""
        mean, var = moments(x)
        n = len(x) * WORLD_SIZE
        self.count += n
        weight = n / self.count
        delta = mean - self.mean
        self.mean += weight * delta
        self.var += weight * (var - self.var + (1 - weight) * delta.square())


def mlp(widths, output_scale=1.0):
    """Linear layers with tanh between them; Xavier initialisation, the last layer scaled."""
    modules = []
    for inputs, outputs in zip(widths, widths[1:]):
        linear = nn.Linear(inputs, outputs)
        xavier(linear)
        modules += [linear, nn.Tanh()]
    modules[-2].weight.data *= output_scale  # the last linear layer
    return nn.Sequential(*modules[:-1])  # no tanh after the last layer


def gaussian_log_prob(mean, log_std, action):
    """Log-density of actions (..., A) under independent Gaussians: (...)."""
    z = (action - mean) / log_std.exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)


class Agent(nn.Module):
    """The interface on which the rest of this file relies:

        new_buffer(rows, steps, generator)    an empty buffer
        act(buffer, t, sample)                action, log_prob and value of step t of all rows
        forward(buffer, row, t)               mean action and value of any steps, for PPO
        minibatches(buffer, generator)        the steps (row, t) of each gradient step
        update(buffer, optimizer, generator)  learn from a batch; returns metrics for progress.csv
        parameter_groups()                    parameters and initial learning rates, for Adam

    A subclass defines recall(buffer, row, t) -> e (M, e_size), or overrides act and update.
    `act` is also asked for the value of a state after the last step of an episode or row (then
    t = T), and after a reset it is called again for the same t.
    """

    name = ""  # in run folders and saved files
    command = ""  # what users type to start it
    Config = Config
    scored_episode = 1  # its return is the test score; pearl and maml have a later one

    def __init__(self, config, sizes, e_size):
        super().__init__()
        self.config = config
        self.sizes = sizes  # of a state, an action and a task: (S, A, k)
        self.folder = None  # run folder
        self.trained_steps = 0  # environment steps so far
        S, A, _ = sizes
        self.normalizer = RunningStats(S)
        self.reward_stats = RunningStats(1)
        self.policy_head = mlp([e_size, 64, 64, A], output_scale=0.01)
        self.log_std = nn.Parameter(torch.full((A,), math.log(config.init_std)))
        self.value_head = mlp([e_size, 64, 64, 1])

    @property
    def device(self):
        return self.normalizer.mean.device

    def new_buffer(self, rows, steps, generator):
        return Buffer(rows, steps, self.sizes, generator)

    def forward(self, buffer, row, t):
        """Mean action (M, A) and value (M,) of step t[m] of row row[m]."""
        e = self.recall(buffer, row, t)  # defined by the subclass
        return self.policy_head(e), self.value_head(e).squeeze(-1)

    def act(self, buffer, t, sample):
        """Actions (R, A) of all rows at step t, sampled or means; log_prob and value (R,)."""
        row = torch.arange(len(buffer.token), device=self.device)
        mean, value = self(buffer, row, torch.full_like(row, t))
        noise = buffer.noise[:, t] if sample else 0.0
        action = mean + self.log_std.exp() * noise
        return action, gaussian_log_prob(mean, self.log_std, action), value

    def minibatches(self, buffer, generator):
        """All steps in random order, `minibatch` at a time; an incomplete last one is dropped."""
        R, T = buffer.value.shape
        size = self.config.minibatch // WORLD_SIZE
        order = torch.randperm(R * T, generator=generator, device=self.device)
        for index in order[: R * T // size * size].split(size):
            yield index // T, index % T  # row and t; with T = 3, index 7 is row 2, t = 1

    def update(self, buffer, optimizer, generator):
        return ppo_update(self, buffer, optimizer, generator)

    def parameter_groups(self):
        """The value head has a learning rate of its own."""
        value_head = list(self.value_head.parameters())
        others = [p for name, p in self.named_parameters() if not name.startswith("value_head.")]
        return [
            dict(params=others, lr=self.config.lr),
            dict(params=value_head, lr=self.config.value_lr),
        ]


class TrMRL(Agent):
    """An agent whose memory is a transformer over its last N working memories."""

    name = "trmrl"
    command = "python trmrl.py"

    def __init__(self, config, sizes):
        d, L = config.d_model, config.layers
        super().__init__(config, sizes, e_size=d)
        S, A, _ = sizes
        self.phi = nn.Linear(S + A + 2, d, bias=False)  # the paper leaves the form of phi open
        if config.tfixup:
            # Sec. 3.3: N(0, d^(-1/2)), read as a std; (9 L)^(-1/4) comes from the T-Fixup paper.
            nn.init.normal_(self.phi.weight, std=d**-0.5 * (9 * L) ** -0.25)
        else:
            xavier(self.phi)
        self.register_buffer("positions", sinusoids(config.memory_length, d))
        self.transformer = Transformer(L, d, config.heads, config.tfixup)

    def recall(self, buffer, row, t):
        """The episodic memory e^L of step t[m] of row row[m], (M, d)."""
        tokens, current_slot = window(buffer, row, t, self.config.memory_length)
        e0 = self.phi(tokens) + self.positions  # (M, N, d): working memories and positions
        return self.transformer(e0, current_slot)


# ---- 6. Collecting trials (Algorithm 1, App. G) --------------------------------------------------
#
# One collector for meta-training and meta-testing, for TrMRL and the baselines. Comments follow
# Algorithm 1: B is the buffer, and D is what the agent sees of it.
#
# The collector also notes where the trajectories of PPO end. The paper maximises the return of E
# episodes as one trajectory. Ours end where the memory is cleared: later rewards do not depend on
# earlier actions. They also end, even with --keep-memory, where an episode terminates, or else a
# fall would cost little. V is the value that GAE uses after the last step of an episode:
#
#                   by default                 with --keep-memory
#     terminated    ends, V = 0                ends, V = 0
#     time limit    ends, V = value(s_{t+1})   continues, V = value(first state of the next episode)
#
# The end of a row always ends a trajectory: V = 0 if terminated, else value(s_{t+1}), which is
# predicted as if the episode went on, with its memory. V is Buffer.end_value.


class Player:
    """An agent that plays in R environments at once, NumPy in and out. An episode:

        player = Player(agent, envs.num_envs)
        observation, _ = envs.reset(seed=0)
        for _ in range(envs.episode_length):
            action = player.act(observation)
            observation, reward, terminated, truncated, _ = envs.step(action)
            player.observe(observation, reward, terminated, truncated)

    To play on after an episode (an ant may fall early), reset as `collect` does below; at most
    max_steps steps in all. The environment must clip actions to [-1, 1] and not reset itself.
    The example takes mean actions; on MetaWorld, meta-tests use act(observation, sample=True).
    """

    def __init__(self, agent, num_envs, max_steps=10_000, seed=0):
        self.agent = agent
        generator = torch.Generator(agent.device).manual_seed(seed)  # for sampled actions
        self.buffer = agent.new_buffer(num_envs, max_steps, generator)  # initialise B
        self.t = 0

    @torch.no_grad()
    def act(self, observation, sample=False):
        """Actions (R, A), not clipped, for the observations s_t (R, S)."""
        buffer, t = self.buffer, self.t
        buffer.write_state(t, observation, self.agent.normalizer)
        # D <- the N - 1 most recent transitions of B and (s_t, PAD, PAD, PAD); compute the working
        # memories; refine them to e^L; sample a_t from the policy on e^L of this step.
        action, log_prob, value = self.agent.act(buffer, t, sample)
        buffer.action[:, t] = action
        buffer.log_prob[:, t] = log_prob
        buffer.value[:, t] = value
        return action.cpu().numpy()

    @torch.no_grad()
    def observe(self, observation, reward, terminated, truncated):
        """Append (s_t, a_t, r_t, eta_t) to B. All arguments are arrays with R rows.

        `observation` is s_{t+1}, before any reset.
        """
        buffer, t = self.buffer, self.t
        clear_memory = not self.agent.config.keep_memory
        buffer.clipped_action[:, t] = buffer.action[:, t].clamp(-1.0, 1.0)
        buffer.reward[:, t] = buffer.to_device(reward)
        # After a reset, `act` replaces this state with the first one of the new episode.
        buffer.write_state(t + 1, observation, self.agent.normalizer)

        # Rows whose trajectory ends (the table of this section) need V: 0 if terminated, or else
        # what the agent predicts for s_{t+1} as if the episode went on. So we ask it, for all rows,
        # before eta_t is written and the memory cleared.
        row_ends = t == buffer.value.shape[1] - 1
        ends = terminated | (truncated & clear_memory) | row_ends
        buffer.terminated[:, t] = buffer.to_device(terminated)
        buffer.trajectory_ends[:, t] = buffer.to_device(ends)
        if (ends & ~terminated).any():
            _, _, value = self.agent.act(buffer, t + 1, sample=False)  # its action is not used
            buffer.end_value[:, t] = value.masked_fill(buffer.terminated[:, t], 0.0)

        # Write eta_t. If the memory is cleared, no later step sees this one.
        done = buffer.to_device(terminated | truncated)
        buffer.eta[:, t] = done
        if clear_memory:
            buffer.memory_start[done, t + 1 :] = t + 1
        self.t += 1


def collect(agent, envs, tasks, steps, sample, seed):
    """Play `steps` steps of each of the tasks (num_envs, k), all at once; returns the Buffer."""
    env_seed, noise_seed = np.random.SeedSequence(seed).generate_state(2).tolist()
    player = Player(agent, envs.num_envs, steps, noise_seed)
    player.buffer.task = player.buffer.to_device(np.asarray(tasks, dtype=np.float32))
    infos = []

    observation, _ = envs.reset(seed=env_seed, options={"tasks": tasks})
    for t in range(steps):
        action = player.act(observation, sample)
        observation, reward, terminated, truncated, info = envs.step(action)
        player.observe(observation, reward, terminated, truncated)
        infos.append(info)

        done = terminated | truncated
        if done.any() and t < steps - 1:  # nothing follows the last step
            observation, _ = envs.reset(options={"reset_mask": done})

    player.buffer.info = {key: np.stack([x[key] for x in infos], axis=1) for key in infos[0]}
    return player.buffer


# ---- 7. PPO ("Meta-Training" of Sec. 5.1) --------------------------------------------------------
#
# A minibatch mixes steps of all tasks and times. Section 6 says where trajectories end.
#
# The paper does not describe these: GAE, scaled rewards, standardised advantages, a value loss of
# weight 0.5, no entropy bonus, gradient clipping, linearly decaying learning rates, and a separate
# one for the value head.


def gae(reward, value, next_value, ends, gamma, lam):
    """Generalised advantage estimation along the rows; all (R, T).

    `next_value` is the value of the next state; `ends` is true at the last step of a trajectory.
    """
    advantage = reward + gamma * next_value - value  # TD errors
    for t in reversed(range(advantage.shape[1] - 1)):
        advantage[:, t] += gamma * lam * ~ends[:, t] * advantage[:, t + 1]
    return advantage


def advantages_and_targets(agent, buffer):
    """Standardised advantages and the targets of the value head, (R, T); updates reward_stats."""
    config = agent.config

    # Scale rewards so that values are of order 1: a constant reward r has value r / (1 - gamma).
    agent.reward_stats.update(buffer.reward.reshape(-1, 1))
    reward = (1 - config.gamma) / agent.reward_stats.root_mean_square * buffer.reward

    # The next value in the row or, where a trajectory ends, end_value. The last step always ends
    # one, so what `roll` wraps around (1 2 3 -> 2 3 1) is never used.
    ends = buffer.trajectory_ends
    next_value = torch.where(ends, buffer.end_value, buffer.value.roll(-1, dims=1))
    advantage = gae(reward, buffer.value, next_value, ends, config.gamma, config.gae_lambda)
    value_target = advantage + buffer.value

    mean, var = moments(advantage.reshape(-1, 1))
    return (advantage - mean) / (var.sqrt() + 1e-8), value_target


def ppo_loss(log_prob, value, old_log_prob, advantage, value_target, clip):
    """The loss of PPO over M steps (clipped objective and value error), and metrics."""
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    value_loss = F.mse_loss(value, value_target)
    metrics = {
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "approx_kl": (ratio - 1 - log_ratio).mean().detach(),  # an estimate of KL(old || new)
        "clip_fraction": (ratio != clipped).float().mean(),
    }
    return policy_loss + 0.5 * value_loss, metrics


def gradient_step(agent, optimizer, loss):
    """One step of Adam; returns the norm of the gradient before it is clipped."""
    optimizer.zero_grad()
    loss.backward()
    if WORLD_SIZE > 1:  # average the gradients over all processes, in one flat vector
        gradients = [p.grad for p in agent.parameters() if p.grad is not None]
        flat = sum_over_processes(nn.utils.parameters_to_vector(gradients))
        nn.utils.vector_to_parameters(flat / WORLD_SIZE, gradients)
    norm = nn.utils.clip_grad_norm_(agent.parameters(), agent.config.max_grad_norm)
    optimizer.step()
    return norm


def ppo_update(agent, buffer, optimizer, generator):
    """`epochs` passes of PPO over a batch; returns the means of the metrics."""
    advantage, value_target = advantages_and_targets(agent, buffer)
    history = []  # stays on the device: fetching each metric would wait for a GPU
    for _ in range(agent.config.epochs):
        for row, t in agent.minibatches(buffer, generator):
            mean, value = agent(buffer, row, t)
            log_prob = gaussian_log_prob(mean, agent.log_std, buffer.action[row, t])
            loss, metrics = ppo_loss(
                log_prob,
                value,
                buffer.log_prob[row, t],
                advantage[row, t],
                value_target[row, t],
                agent.config.clip,
            )
            metrics["grad_norm"] = gradient_step(agent, optimizer, loss)
            history.append(metrics)

    # Affects the next batch only: the buffer holds the states of this one already normalised (those
    # of the first batch are only clamped).
    agent.normalizer.update(buffer.raw_state[:, :-1].flatten(0, 1))
    _, target_var = moments(value_target.reshape(-1, 1))
    _, error_var = moments((value_target - buffer.value).reshape(-1, 1))
    table = torch.stack([torch.stack(list(m.values())) for m in history])
    means = sum_over_processes(table.mean(dim=0)) / WORLD_SIZE
    return dict(zip(history[0], means.tolist())) | {
        "updates": len(history),
        "explained_variance": 1 - (error_var / (target_var + 1e-8)).item(),
        "std": agent.log_std.exp().mean().item(),
    }


# ---- 8. Meta-testing (Sec. 5.1, 5.2) -------------------------------------------------------------
#
# Weights are frozen. Test tasks are the same for every agent and seed; they are new, except on
# AntDir, which has only two tasks, and on ML45-Train (App. B). Without --keep-memory the agent
# adapts anew in every episode; episodes differ only in initial states and sampled actions.
# Algorithm 1 samples actions. Here, as in the author's release, a meta-test samples them on
# MetaWorld only and takes their means elsewhere.

TEST_SEED = 2022  # seed of every meta-test
FINAL_EPISODES = 6  # per task, one after the other, in the last meta-test of a run (Sec. 5.2)


def episode_results(buffer, episodes):
    """Return and success of the first `episodes` episodes of each row, (R, episodes).

    A row must have at least episodes * episode_length steps. An episode succeeds if any of its
    steps does (the paper does not say); NaN if the family has no success.
    """
    reward = buffer.reward.cpu().numpy().astype(np.float64)
    success = buffer.info.get("success", np.full(reward.shape, np.nan))
    done = buffer.eta.cpu().numpy() > 0
    episode = np.cumsum(done, axis=1) - done  # done 0 1 0 1: episode 0 0 1 1
    returns = [np.where(episode == i, reward, 0.0).sum(axis=1) for i in range(episodes)]
    successes = [np.where(episode == i, success, 0.0).max(axis=1) for i in range(episodes)]
    return np.stack(returns, axis=1), np.stack(successes, axis=1)


def meta_test(agent, envs, episodes=FINAL_EPISODES, sample=None):
    """Play consecutive episodes of each task: returns and successes, (tasks, episodes) each."""
    sample = envs.sample_at_test if sample is None else sample
    steps = episodes * envs.episode_length
    return episode_results(collect(agent, envs, envs.tasks, steps, sample, TEST_SEED), episodes)


# ---- 9. Meta-training (Sec. 5.1) -----------------------------------------------------------------
#
# train and resume call train_until_finished, the outer loop, which calls train_iteration. A Run
# (section 10) holds the agent, its environments, its optimizer (Adam) and its files. Every random
# number of training follows from the seed, the iteration and the process. On a CPU, a run that is
# resumed with the same processes and threads therefore ends as if it had never been interrupted.


def train_iteration(run):
    """Draw tasks, collect a trial of each and learn from them; returns the buffer and metrics."""
    agent, config, envs = run.agent, run.agent.config, run.envs
    seeds = np.random.SeedSequence([config.seed, run.iteration, RANK]).generate_state(3)
    task_seed, trial_seed, update_seed = seeds.tolist()

    rng = np.random.default_rng(task_seed)
    tasks = envs.sample_tasks(rng, envs.num_envs // config.rows_per_task)
    tasks = np.repeat(tasks, config.rows_per_task, axis=0)  # tasks 5 8, two rows each: 5 5 8 8
    # A row holds one episode or, with --keep-memory, all E of them.
    steps = config.episodes_per_trial // config.rows_per_task * envs.episode_length
    buffer = collect(agent, envs, tasks, steps, sample=True, seed=trial_seed)

    # The learning rates follow from the iteration; parameter_groups has the initial ones.
    lr_factor = 1 - (1 - config.final_lr) * run.iteration / run.total_iterations
    for group, initial in zip(run.optimizer.param_groups, agent.parameter_groups()):
        group["lr"] = lr_factor * initial["lr"]
    generator = torch.Generator(agent.device).manual_seed(update_seed)
    metrics = agent.update(buffer, run.optimizer, generator)
    if not np.isfinite(list(metrics.values())).all():
        raise UserError("a loss or gradient is not finite; start again with a lower learning rate")
    run.iteration += 1
    agent.trained_steps = run.iteration * run.steps_per_iteration
    return buffer, metrics | {"lr": lr_factor * config.lr}


def train_until_finished(run):
    """The outer loop of a new or resumed run. If it is interrupted, say how to continue."""
    try:
        if RANK == 0:
            print_header(run)
            run.save()  # creates the folder, or brings all files back to the checkpoint
        while not run.finished:
            began, cpu_began = time.monotonic(), time.process_time()
            buffer, metrics = train_iteration(run)
            if RANK == 0:  # the other processes wait for this one in their next sum_over_processes
                speed = run.steps_per_iteration / (time.monotonic() - began)  # without meta-test
                if run.iteration % run.agent.config.eval_every == 0 or run.finished:
                    meta_test_splits(run)
                run.seconds += time.monotonic() - began
                run.cpu_seconds += time.process_time() - cpu_began  # of process 0
                save_and_report(run, buffer, metrics, speed)
    except KeyboardInterrupt:
        if RANK == 0:
            print(f"\nstopped; {run.resume_hint}", file=sys.stderr)
        raise
    except (OSError, torch.OutOfMemoryError) as error:  # OSError: a full disk, a lost process
        raise type(error)(f"{error}; {run.resume_hint}") from None
    return run.agent


def train(config, make_tasks=make_tasks, agent_class=TrMRL):
    """Meta-train a new agent on the tasks of make_tasks; its files are in agent.folder."""
    folder = Path(config.run_dir or f"runs/{config.env}/{agent_class.name}-seed{config.seed}")
    # Only process 0 checks: the others might see the folder that it has just created.
    if RANK == 0 and (folder.is_file() or (folder.is_dir() and any(folder.iterdir()))):
        raise UserError(f"{folder} already exists: --resume it, or choose a --seed or --run-dir")
    return train_until_finished(Run(folder, config, make_tasks, agent_class))


def resume(folder, make_tasks=make_tasks, agent_class=TrMRL, **changes):
    """Continue a run from its checkpoint; `changes` may set device and threads."""
    # This agent only carries the settings: Run builds one on the device.
    saved, agent = load_file(Path(folder) / "checkpoint.pt", agent_class)
    run = Run(folder, replace(agent.config, **changes), make_tasks, agent_class)
    run.restore(saved)
    if run.finished:
        if RANK == 0:
            run.save()  # the last one may have been interrupted after the checkpoint
        raise UserError(f"{folder} is finished; {agent.command} --eval {folder} meta-tests it")
    return train_until_finished(run)


# ---- 10. Runs ------------------------------------------------------------------------------------
#
# A run folder holds config.json, progress.csv (a row per iteration), eval.csv (a row per task and
# episode), agent.pt and checkpoint.pt, written at the start and after every iteration, each
# atomically: a crash of the program leaves the old file or the new one. Loading a file never runs
# code that is in it (weights_only).

VERSION = 2  # format of agent.pt and checkpoint.pt


class Run:
    """The state of a run, and its files. Creating one also joins the other processes, if any."""

    saved_fields = ("iteration", "seconds", "cpu_seconds", "test_score", "csv")

    def __init__(self, folder, config, make_tasks, agent_class):
        check_config(config)
        torch.set_num_threads(config.threads or os.cpu_count())  # also read by make_tasks
        device = pick_device(config.device)
        join_processes(device)
        # Save what is really used, not "auto" or 0.
        config = replace(config, device=str(device), threads=torch.get_num_threads())

        # The environments of this process, one per row: a task with E rows needs E of them.
        local_tasks = config.num_tasks // WORLD_SIZE
        self.envs = make_tasks(config.env, local_tasks * config.rows_per_task, config.seed, "train")
        # Fail before the folder exists: ML45 refuses numbers of tasks that are no multiple of 45.
        self.envs.sample_tasks(np.random.default_rng(0), local_tasks)
        self.test_envs = {}
        for split in self.envs.splits[1:]:  # all but "train"
            self.test_envs[split] = make_tasks(config.env, config.eval_tasks, TEST_SEED, split)
        trial_length = config.episodes_per_trial * self.envs.episode_length
        self.steps_per_iteration = config.num_tasks * trial_length
        if "minibatch" not in config.not_flags and config.minibatch > self.steps_per_iteration:
            raise UserError(f"--minibatch exceeds the {self.steps_per_iteration} steps of a batch")

        # The agent, built on the CPU: the same initial weights on every device.
        torch.manual_seed(config.seed)
        self.agent = agent_class(config, self.envs.sizes).to(device)
        self.optimizer = torch.optim.Adam(self.agent.parameter_groups(), eps=1e-5, fused=True)
        self.folder = self.agent.folder = Path(folder)
        self.iteration = 0
        self.total_iterations = math.ceil(config.total_steps / self.steps_per_iteration)
        self.planned_steps = self.total_iterations * self.steps_per_iteration  # rounded up
        self.seconds = self.cpu_seconds = 0.0
        self.csv = {"progress.csv": "", "eval.csv": ""}  # whole texts; also in the checkpoint
        self.test_score = "-"  # text for the progress line
        self.test_tables = ""

    @property
    def finished(self):
        return self.iteration >= self.total_iterations

    @property
    def resume_hint(self):
        if not (self.folder / "checkpoint.pt").exists():
            return "nothing was saved"
        command = self.agent.command
        if WORLD_SIZE > 1:
            command = command.replace("python", f"torchrun --nproc-per-node {WORLD_SIZE}")
        return f"continue with: {command} --resume {self.folder}"

    def add_rows(self, name, rows):
        self.csv[name] += csv_text(rows, header=not self.csv[name])

    def save(self):
        """Write all files; the checkpoint first, so that no other file is ever ahead of it."""
        settings = {"agent": self.agent.name, **asdict(self.agent.config)}
        agent_file = {
            "version": VERSION,
            "config": settings,
            "sizes": self.agent.sizes,
            "step": self.agent.trained_steps,
            "weights": self.agent.state_dict(),
        }
        checkpoint = agent_file | {name: getattr(self, name) for name in self.saved_fields}
        checkpoint["optimizer"] = self.optimizer.state_dict()
        files = {"checkpoint.pt": checkpoint, "agent.pt": agent_file}
        files |= {"config.json": json.dumps(settings, indent=2), **self.csv}
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            file = io.BytesIO()  # on a full disk write_bytes raises an OSError, torch.save does not
            if isinstance(content, str):
                file.write(content.encode())
            else:
                torch.save(content, file)
            temporary = self.folder / f"{name}.part"
            temporary.write_bytes(file.getvalue())
            os.replace(temporary, self.folder / name)

    def restore(self, saved):
        """Continue from the content of a checkpoint.pt."""
        self.agent.load_state_dict(saved["weights"])
        self.agent.trained_steps = saved["step"]
        self.optimizer.load_state_dict(saved["optimizer"])
        for name in self.saved_fields:
            setattr(self, name, saved[name])


def load_file(path, agent_class):
    """The content of an agent.pt or checkpoint.pt, and its agent on the CPU."""
    if not path.is_file():
        parent = next(folder for folder in path.parents if folder.is_dir())
        files = [*parent.glob("*/agent.pt"), *parent.glob("*/*/agent.pt")]
        names = ", ".join(sorted(str(file.parent) for file in files))
        hint = f"; {parent} holds these runs: {names}" if names else ""
        raise UserError(f"{path} does not exist{hint}")
    try:  # whatever is raised in here becomes one line, "cannot load ..."
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved.get("version") != VERSION:
            raise ValueError("its format is not that of this version (format 1: commit 40cf2af)")
        settings = dict(saved["config"])
        name = settings.pop("agent")
        if name != agent_class.name:
            module = "trmrl.py" if name == TrMRL.name else f"-m baselines.{name}"
            action = "--resume" if path.name == "checkpoint.pt" else "--eval"
            raise ValueError(
                f"it is an agent of {name}; type: python {module} {action} {path.parent}"
            )
        config = agent_class.Config(**settings)
        check_config(config)
        agent = agent_class(config, saved["sizes"])
        agent.load_state_dict(saved["weights"])
        agent.trained_steps = int(saved["step"])
        agent.folder = path.parent
    except pickle.UnpicklingError:  # PyTorch's own message advises weights_only=False
        raise UserError(f"cannot load {path}: it is damaged or not a file of trmrl.py") from None
    except Exception as error:  # a damaged or foreign file may raise anything
        raise UserError(f"cannot load {path}: {str(error)[:200]}") from None
    return saved, agent


def load_agent(path, device="cpu", agent_class=TrMRL):
    """A trained agent, its weights frozen, from a run folder or an agent.pt."""
    path = Path(path) / "agent.pt" if Path(path).is_dir() else Path(path)
    _, agent = load_file(path, agent_class)
    return agent.to(pick_device(device)).requires_grad_(False)


def score_text(returns, success):
    """The mean return, and the success rate if there is one: '-20.1', '4515 (97%)'."""
    if np.isnan(success).any():
        return f"{returns.mean():.1f}"
    return f"{returns.mean():.0f} ({success.mean():.0%})"


def results_table(returns, success, envs):
    """A line per episode, then one per class (over all episodes) if there are several."""
    # Indices into (tasks, episodes): a column (one episode) or rows (one class).
    selections = {f"episode {i + 1}": np.s_[:, i] for i in range(returns.shape[1])}
    if len(envs.classes) > 1:
        class_id = envs.tasks[:, 0].astype(int)
        selections |= {envs.classes[i]: class_id == i for i in np.unique(class_id)}
    lines = [f"{'':>28}{'return':>18}{'std':>10}{'worst':>10}"]
    for name, chosen in selections.items():
        values, score = returns[chosen], score_text(returns[chosen], success[chosen])
        lines.append(f"{name:>28}{score:>18}{values.std():>10.1f}{values.min():>10.1f}")
    return "\n".join(lines)


def eval_rows(agent, split, sample, returns, success):
    """Rows of eval.csv: one per task and episode."""
    actions = "sampled" if sample else "mean"
    rows = []
    for (task, episode), value in np.ndenumerate(returns):
        row = {"step": agent.trained_steps, "split": split, "task": task, "episode": episode + 1}
        rows.append(row | {"return": value, "success": success[task, episode], "actions": actions})
    return rows


def csv_text(rows, header):
    """Lines of a csv file: floats with six significant digits, nothing for NaN."""
    lines = [",".join(rows[0])] if header else []
    for row in rows:
        cells = [f"{x:.6g}" if isinstance(x, float) else str(x) for x in row.values()]
        lines.append(",".join("" if cell == "nan" else cell for cell in cells))
    return "\n".join(lines) + "\n"


def meta_test_splits(run):
    """Meta-test every split; at the end more episodes, and MetaWorld with mean actions as well."""
    agent, scored = run.agent, run.agent.scored_episode
    episodes = max(FINAL_EPISODES, scored) if run.finished else scored
    for split, envs in run.test_envs.items():
        default = envs.sample_at_test
        modes = [True, False] if default and run.finished else [default]
        for sample in modes:
            returns, success = meta_test(agent, envs, episodes, sample)
            run.add_rows("eval.csv", eval_rows(agent, split, sample, returns, success))
            if split == "test" and sample == default:
                run.test_score = score_text(returns[:, scored - 1], success[:, scored - 1])
            if run.finished:
                actions = "sampled" if sample else "mean"
                table = results_table(returns, success, envs)
                run.test_tables += f"\nMeta-test: {split} tasks, {actions} actions\n{table}\n"


def print_header(run):
    """What runs, where, and into which folder."""
    agent, config = run.agent, run.agent.config
    asked, total = config.total_steps, run.planned_steps
    rounded = f" ({asked:,} rounded up)" if total > asked else ""
    print(f"{agent.name} on {config.env}: {total:,} steps{rounded} into {run.folder}")
    print(f"{config.device}, threads: {config.threads}, processes: {WORLD_SIZE}", flush=True)


def save_and_report(run, buffer, metrics, speed):
    """Save the run with a new row of progress.csv; print a line and, at the end, the meta-test."""
    step = run.agent.trained_steps
    episodes = buffer.value.shape[1] // run.envs.episode_length  # per row
    returns, success = episode_results(buffer, episodes)  # of process 0
    progress = {
        "iteration": run.iteration,
        "step": step,
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "steps_per_second": speed,
        "train_return": returns.mean(),
        "train_success": success.mean(),
    }
    run.add_rows("progress.csv", [progress | metrics])
    run.save()

    minutes, seconds = divmod(int((run.planned_steps / step - 1) * run.seconds), 60)
    line = f"{step / 1e6:.3f}/{run.planned_steps / 1e6:.3f} M steps, {speed:,.0f}/s, "
    line += f"{minutes}:{seconds:02d} left; return: test {run.test_score}, "
    line += f"train {score_text(returns, success)}"
    live = sys.stdout.isatty()  # in a terminal one live line, in a pipe a line per iteration
    if live:
        line = "\r\033[K" + line[: os.get_terminal_size().columns - 1]
    print(line, end="" if live and not run.finished else "\n", flush=True)
    if run.finished:
        print(f"{run.test_tables}\nNext:")
        print(f"    {run.agent.command} --eval {run.folder} --episodes 20")
        print(f"    python plots.py --runs {run.folder}", flush=True)


# ---- 11. Processes -------------------------------------------------------------------------------
#
# With torchrun each process takes its share of the tasks and of every minibatch. Gradients are
# averaged and statistics merged, so that all processes keep the same weights. Without torchrun,
# sum_over_processes(x) is x.


def pick_device(name):
    """'auto' is CUDA or else the CPU; torchrun gives each process a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.zeros(1, device=name).tolist()
    except Exception:  # each kind of device fails in its own way
        raise UserError(f"device {name!r} is not available here; cpu always is") from None
    return torch.device(name)


def join_processes(device):
    """Join the other processes, if torchrun started this one."""
    if WORLD_SIZE > 1 and not dist.is_initialized():
        # A workaround for torch 2.13: this imports the compiler. If Adam did so after the processes
        # have joined, Python might crash on exit.
        torch.compiler.reset()
        # The others wait while process 0 meta-tests, which can take longer than NCCL's default.
        patience = timedelta(hours=2)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def sum_over_processes(x):
    """Replace x with its sum over all processes."""
    if WORLD_SIZE > 1:
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise ConnectionError(f"process {RANK} lost the others ({error})") from None
    return x


# ---- 12. Command line ----------------------------------------------------------------------------
#
# Flags come from the fields of Config. An error the user can fix is one line, without a traceback.


def flag(name):
    """memory_length -> --memory-length"""
    return "--" + name.replace("_", "-")


def check_config(config):
    """Refuse settings that cannot work, before anything starts."""
    if config.one_process and WORLD_SIZE > 1:
        raise UserError("this agent runs in one process; start it without torchrun")
    for f in fields(config):
        value, low, high = getattr(config, f.name), f.metadata["low"], f.metadata["high"]
        accepted = (int, float) if f.type is float else (f.type,)
        if type(value) not in accepted:  # not isinstance: True is an int
            raise UserError(f"{flag(f.name)} must be of type {f.type.__name__}, not {value!r}")
        if f.type in (int, float) and not low <= value <= high:
            raise UserError(f"{flag(f.name)} must be between {low:,} and {high:,}, not {value}")
    for name in ("num_tasks", "minibatch"):
        if name not in config.not_flags and getattr(config, name) % WORLD_SIZE:
            raise UserError(f"{flag(name)} must be a multiple of the {WORLD_SIZE} processes")
    one_episode = config.episodes_per_trial == 1
    if config.keep_memory and one_episode and "keep_memory" not in config.not_flags:
        raise UserError("--keep-memory needs --episodes-per-trial 2 or more")
    if "heads" not in config.not_flags and (config.d_model % config.heads or config.d_model % 2):
        raise UserError(f"--d-model must be even and a multiple of --heads {config.heads}")


class Parser(argparse.ArgumentParser):
    """Its errors become one line, without the usage."""

    def error(self, message):
        raise UserError(f"{message}; see --help")


def integer(text):
    """An integer; accepts 3e5."""
    if not float(text).is_integer():
        raise argparse.ArgumentTypeError(f"{text} is not an integer")
    return int(float(text))


def make_parser(agent_class, env):
    """A flag for every field of the Config; --help shows the defaults that apply to env."""
    text = sys.modules[agent_class.__module__].__doc__ or ""
    parser = Parser(
        description=text.split("\nSections")[0],  # up to the table of contents
        epilog=f"environments: {', '.join(ENVS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    group = parser.add_argument_group("meta-test an agent, or continue a run")
    group.add_argument("--eval", metavar="RUN", help="meta-test the agent of a run")
    group.add_argument("--split", help="with --eval: test (default), train, or ood if there is one")
    group.add_argument("--episodes", type=integer, help="with --eval: episodes per task")
    actions = group.add_mutually_exclusive_group()
    actions.add_argument("--mean", action="store_true", help="with --eval: mean actions")
    actions.add_argument("--sample", action="store_true", help="with --eval: sampled actions")
    group.add_argument("--csv", metavar="FILE", help="with --eval: write the results to FILE")
    group.add_argument("--resume", metavar="RUN", help="continue a run")

    defaults = agent_class.Config(env=env)
    groups = {}
    for f in fields(defaults):
        if f.name in defaults.not_flags:
            continue
        title = f.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if f.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        else:
            kind = integer if f.type is int else f.type
            options = {"type": kind, "metavar": f.type.__name__.upper()}
        default = getattr(defaults, f.name)
        meaning = f.metadata["help"] + (f" (default: {default})" if default != "" else "")
        groups[title].add_argument(flag(f.name), help=meaning, **options)
    return parser


def parse(argv, agent_class=TrMRL):
    """The flags that were typed, as a dictionary. Reject those that do not apply."""
    # --help shows the defaults of an env, so look for --env first.
    env_parser = Parser(add_help=False, allow_abbrev=False)
    env_parser.add_argument("--env", default=agent_class.Config.env)
    parser = make_parser(agent_class, env_parser.parse_known_args(argv)[0].env)
    args, unknown = parser.parse_known_args(argv)
    args = vars(args)
    if unknown:
        name = unknown[0].split("=")[0]
        if name.replace("--no-", "--") in map(flag, agent_class.Config.not_flags):
            raise UserError(f"{name} does not apply to {agent_class.name}")
        hint = did_you_mean(name, parser._option_string_actions)
        raise UserError(f"unknown argument {name}{hint}; see --help")

    where, allowed = "without --eval", {f.name for f in fields(agent_class.Config)}
    if "eval" in args:
        where, allowed = "with --eval", {"eval", "split", "episodes", "mean", "sample", "csv"}
        allowed |= {"device", "threads", "eval_tasks"}
    elif "resume" in args:
        where, allowed = "with --resume", {"resume", "device", "threads"}
    if refused := sorted(args.keys() - allowed):
        raise UserError(f"{flag(refused[0])} cannot be used {where}")
    return args


def eval_command(args, make_tasks, agent_class):
    """--eval: meta-test an agent and print the table."""
    if WORLD_SIZE > 1:
        raise UserError("--eval takes one process: start it without torchrun")
    episodes = args.get("episodes", FINAL_EPISODES)
    split = args.get("split", "test")
    if not 1 <= episodes <= 1000:
        raise UserError(f"--episodes must be between 1 and 1000, not {episodes}")
    if "csv" in args and not Path(args["csv"]).absolute().parent.is_dir():
        raise UserError(f"--csv: the folder of {args['csv']} does not exist")
    agent = load_agent(args["eval"], args.get("device", "auto"), agent_class)
    num_tasks = args.get("eval_tasks", agent.config.eval_tasks)
    config = replace(agent.config, eval_tasks=num_tasks, threads=args.get("threads", 1))
    check_config(config)
    torch.set_num_threads(config.threads or os.cpu_count())
    envs = make_tasks(config.env, num_tasks, TEST_SEED, split)
    sample = "sample" in args or (envs.sample_at_test and "mean" not in args)
    returns, success = meta_test(agent, envs, episodes, sample)
    title = f"{agent.name}, {agent.trained_steps:,} steps of {config.env}"
    actions = "sampled" if sample else "mean"
    print(f"{title}; {num_tasks} {split} tasks, {actions} actions:")
    print(results_table(returns, success, envs))
    if "csv" in args:
        rows = eval_rows(agent, split, sample, returns, success)
        Path(args["csv"]).write_text(csv_text(rows, header=True))


def main(argv=None, make_tasks=make_tasks, agent_class=TrMRL):
    """The command line. Returns 0, 2 (an error the user can fix), 1 (another), 130 (stopped)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as on Ctrl-C
    try:
        args = parse(argv, agent_class)
        if "eval" in args:
            eval_command(args, make_tasks, agent_class)
        elif "resume" in args:
            resume(args.pop("resume"), make_tasks, agent_class, **args)
        else:
            train(agent_class.Config(**args), make_tasks, agent_class)
    except KeyboardInterrupt:
        return 130
    except (UserError, OSError, torch.OutOfMemoryError) as error:
        program = agent_class.command.split()[-1]
        message = " ".join(str(error).split())
        erase = "\r\033[K" if sys.stderr.isatty() else ""  # the live line
        print(f"{erase}{program}: {message}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
