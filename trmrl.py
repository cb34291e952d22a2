"""TrMRL in one file: "Transformers are Meta-Reinforcement Learners" (Melo, ICML 2022).

An agent meets a task it has never seen and adapts within a few time steps, with frozen weights: a causal
transformer attends over its last N working memories phi(s, a, r, eta) and hands the refined memory of the
current step to a Gaussian policy. PPO trains it over trials of several episodes; T-Fixup lets it do without
layer normalisation and warm-up. The sections follow the paper and name the parts that they implement."""
import argparse
import atexit
import contextlib
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

import gymnasium
import mujoco.rollout
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import distributed as dist, nn

VERSION = 1                                       # of the files we write; others are refused by their number

class UserError(ValueError):
    """Something the user can mend: shown as one line, exit status 2."""

class RunError(Exception):
    """The run cannot go on; what was saved is kept. Shown as one line, exit status 1."""

# 1. Configuration: every field is a flag of the same name (memory_length: --memory-length) ----------------

def flag(default, help, low=None, high=None):
    return field(default=default, metadata={"help": help, "low": low, "high": high})

@dataclass
class Config:
    env: str = flag("halfcheetah_vel", "task family")
    agent: str = flag("trmrl", "trmrl, rl2, or oracle: told the task, no memory")
    seed: int = flag(1, "seed of everything random", 0, 2**31 - 1)
    device: str = flag("auto", "auto, cpu, cuda, cuda:1, mps: where network, memories and updates live")
    threads: int = flag(1, "CPU threads for physics and network; 0: all cores", 0, 1024)
    run_dir: str = flag("", "the run folder itself; default runs/<env>/<agent>-seed<k>[-<tag>]")
    tag: str = flag("", "ending of the default run folder's name")

    total_steps: int = flag(1_500_000, "environment steps of the whole training", 1, 10**12)
    num_tasks: int = flag(20, "tasks per iteration, over all processes", 1, 100_000)
    episodes_per_trial: int = flag(2, "E, episodes of a trial", 1, 1000)
    eval_every: int = flag(10, "iterations between two meta-tests; the last has one in any case", 1, 10**9)
    eval_tasks: int = flag(20, "tasks of a meta-test", 1, 100_000)
    eval_episodes: int = flag(1, "episodes per task of a meta-test", 1, 1000)
    final_episodes: int = flag(6, "the same for the last one", 1, 1000)
    checkpoint_every: int = flag(0, "iterations between two checkpoints; 0: half a minute or more", 0, 10**9)

    memory_length: int = flag(5, "N, working memories the transformer sees", 1, 10_000)
    layers: int = flag(1, "L, transformer layers", 1, 100)
    heads: int = flag(4, "attention heads per layer", 1, 1024)
    d_model: int = flag(64, "d, size of a memory", 2, 8192)
    d_ff: int = flag(256, "hidden units of the position-wise feed-forward network", 1, 65536)
    tfixup: bool = flag(True, "T-Fixup and no layer norm, or (--no-tfixup) post-LN and plain Xavier")
    keep_memory: bool = flag(False, "keep the memory across the episodes of a trial")
    separate_value: bool = flag(False, "value head on the current state instead of the shared memory")
    init_std: float = flag(0.2, "initial standard deviation of the policy", 1e-3, 10)

    gamma: float = flag(0.9, "discount", 0, 1)
    gae_lambda: float = flag(0.8, "lambda of GAE", 0, 1)
    endless: bool = flag(False, "learn as if the clock ended no episode: where rewards are positive")
    clip: float = flag(0.2, "PPO clipping of the probability ratio", 1e-6, 10)
    epochs: int = flag(5, "passes over a batch", 1, 1000)
    minibatch: int = flag(200, "environment steps per gradient step", 2, 10**9)
    lr: float = flag(3e-4, "Adam's learning rate", 0, 1)
    value_lr: float = flag(1e-3, "learning rate of the value head", 0, 1)
    final_lr: float = flag(0.05, "the rates fall linearly to this fraction", 0, 1)
    max_grad_norm: float = flag(0.5, "gradients are clipped to this norm", 1e-9, 1e9)
    value_coef: float = flag(0.5, "weight of the value loss", 0, 1e6)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", 0, 1e6)
    blur: float = flag(0.0, "MetaWorld: in training the object is seen off by this (std, m)", 0, 10)
    reward_scale: float = flag(0.1, "rewards times this, for learning only; 0: learned", 0, 1e9)
    compile: bool = flag(False, "compile the loss: half a minute at the start, then faster updates")

# 2. Tasks (App. B) ----------------------------------------------------------------------------------------

class Tasks(VectorEnv):
    """A family: a VectorEnv whose sub-environments are tasks, a row of `tasks` each.

    One of your own adds sample_tasks, fixed_tasks, begin (an episode), advance (a step) and observation."""
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    splits, episode_length = ("train", "test"), 200

    def __init__(self, num_tasks, seed, split, state_size, actions):
        if split not in self.splits:
            raise UserError(f"this family has no split {split!r}; it has: {', '.join(self.splits)}")
        self.num_envs, self.elapsed = num_tasks, np.zeros(num_tasks, dtype=int)
        box, batch = gymnasium.spaces.Box, gymnasium.vector.utils.batch_space
        self.single_observation_space = box(-np.inf, np.inf, (state_size,), np.float32)
        self.single_action_space = box(-1.0, 1.0, (actions,), np.float32)
        self.observation_space = batch(self.single_observation_space, num_tasks)
        self.action_space = batch(self.single_action_space, num_tasks)
        rng = np.random.default_rng(seed)
        self.tasks = self.sample_tasks(rng) if split == "train" else self.fixed_tasks(split)

    def reset(self, *, seed=None, options=None):
        """New episodes of the same tasks; options: `tasks` sets them, `reset_mask` says who starts anew."""
        super().reset(seed=seed)
        options = options or {}
        if "tasks" in options:
            self.tasks = np.array(options["tasks"], dtype=np.float64).reshape(self.tasks.shape)
        mask = options.get("reset_mask", np.ones(self.num_envs, dtype=bool))
        self.begin(mask)
        self.elapsed[mask] = 0
        return self.observation().astype(np.float32), {}

    def step(self, actions):
        actions = np.fmax(np.fmin(np.asarray(actions, dtype=np.float64), 1.0), -1.0)   # NaN, too
        reward, terminated, info = self.advance(actions)
        self.elapsed = self.elapsed + 1
        return (self.observation().astype(np.float32), reward.astype(np.float32), terminated,
                self.elapsed >= self.episode_length, info)

class MujocoTasks(Tasks):
    """Tasks on one MuJoCo body, all stepped by one native call, in threads: no Python per task."""
    xml, frame_skip, skipped_qpos, healthy_height = "", 5, 1, (-np.inf, np.inf)

    def __init__(self, num_tasks, seed=0, split="train"):
        threads = torch.get_num_threads()
        self.model = mujoco.MjModel.from_xml_path(
            str(Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / self.xml))
        self.models = [self.model] * num_tasks
        self.datas = [mujoco.MjData(self.model) for _ in range(threads)]
        self.pool = mujoco.rollout.Rollout(nthread=threads if threads > 1 else 0)
        self.chunk = math.ceil(num_tasks / threads)                       # a share for each: 1.1 x faster
        self.dt = self.model.opt.timestep * self.frame_skip
        nq, nv = self.model.nq, self.model.nv
        self.state = np.zeros((num_tasks, 1 + nq + nv))                   # time, qpos, qvel
        self.path = np.empty((num_tasks, self.frame_skip, 1 + nq + nv))   # the physics steps of one env step
        super().__init__(num_tasks, seed, split, nq - self.skipped_qpos + nv, self.model.nu)

    def begin(self, mask):
        n, nq, nv = int(mask.sum()), self.model.nq, self.model.nv
        self.state[mask] = np.concatenate([                               # Gymnasium's own noise
            np.zeros((n, 1)), self.model.qpos0 + self.np_random.uniform(-0.1, 0.1, (n, nq)),
            0.1 * self.np_random.standard_normal((n, nv))], axis=1)

    def advance(self, actions):
        controls = np.repeat(actions[:, None], self.frame_skip, axis=1)   # (num_envs, frame_skip, nu)
        before = self.state
        self.pool.rollout(self.models, self.datas, before, controls, nstep=self.frame_skip, skip_checks=True,
                          state=self.path, chunk_size=self.chunk)
        after = self.path[:, -1].copy()
        # MuJoCo resets what diverges, clock included. Its episode ends, a terminal, in the last sound state.
        blown = ~(np.abs(after).max(axis=1) < 1e3) | (np.abs(after[:, 0] - before[:, 0] - self.dt) > 1e-6)
        after[blown] = before[blown]
        self.state = after
        velocity = (after[:, 1] - before[:, 1]) / self.dt                 # of the body along x, m/s
        fallen = after[:, 3] != after[:, 3].clip(*self.healthy_height)    # time, x, y, height: of the ant
        info = {"x_velocity": velocity, "blown_up": blown}
        return self.reward(velocity, actions, fallen), fallen | blown, info

    def observation(self):
        return self.state[:, 1 + self.skipped_qpos:]

class HalfCheetahVel(MujocoTasks):
    """Run at a hidden velocity v*, U[0, 3], out of distribution [3, 4]: r = -|v - v*| - 0.05 sum of a^2."""
    xml, splits = "half_cheetah.xml", ("train", "test", "ood")

    def sample_tasks(self, rng):
        return rng.uniform(0.0, 3.0, (self.num_envs, 1))

    def fixed_tasks(self, split):
        low, high = {"test": (0.0, 3.0), "ood": (3.0, 4.0)}[split]
        return low + (high - low) * ((np.arange(self.num_envs)[:, None] + 0.5) / self.num_envs)  # bin centres

    def reward(self, velocity, actions, fallen):
        return -np.abs(velocity - self.tasks[:, 0]) - 0.05 * np.square(actions).sum(axis=1)

class AntDir(MujocoTasks):
    """Go forward (+1) or backward (-1); a torso that leaves a height of [0.2, 1.0] m has fallen."""
    xml, skipped_qpos, healthy_height = "ant.xml", 2, (0.2, 1.0)

    def sample_tasks(self, rng):
        return rng.choice([-1.0, 1.0], (self.num_envs, 1))

    def fixed_tasks(self, split):
        return np.resize([1.0, -1.0], (self.num_envs, 1))

    def reward(self, velocity, actions, fallen):
        return self.tasks[:, 0] * velocity - 0.5 * np.square(actions).sum(axis=1) + ~fallen   # 1: upright

@functools.cache
def metaworld_goals(env):
    """MetaWorld's own benchmark, the same for all: classes, goals to train on and to test on, 50 of each."""
    import metaworld                                                      # takes a second
    names = [name.removesuffix("-v3") for name in metaworld.ALL_V3_ENVIRONMENTS]
    name = env.removeprefix("ml1_").replace("_", "-")
    if env != "ml45_train" and name not in names:
        raise UserError(f"unknown task {name!r}; ml1_<task> takes: {', '.join(names)}")
    arm = metaworld.SawyerXYZEnv
    slow, arm._reset_hand = arm._reset_hand, lambda self, steps=0: slow(self, 1)   # 4 x faster; same goals
    try:
        benchmark = metaworld.ML45(seed=0) if env == "ml45_train" else metaworld.ML1(name + "-v3", seed=0)
    finally:
        arm._reset_hand = slow
    classes = list(benchmark.train_classes)
    def rows(tasks):  # of 7: class, where the object starts and where it should go (3 or 6 numbers)
        goals = [[classes.index(x.env_name), *pickle.loads(x.data)["rand_vec"]] for x in tasks]
        return np.array([goal + [0.0] * (7 - len(goal)) for goal in goals]).reshape(len(classes), 50, 7)
    train = rows(benchmark.train_tasks)
    return classes, train, train if env == "ml45_train" else rows(benchmark.test_tasks)

class MetaWorldTasks(Tasks):
    """A robot arm with a hidden goal: ML1 (one class), or ML45-Train (task i is of class i modulo 45)."""
    # Each of the 50 training tasks has its object elsewhere, and agents learn by heart what that gives away.
    blur, in_a_row = 0.0, True  # --blur: in training it is seen elsewhere (std, m); side by side: more memory

    def __init__(self, env, num_tasks, seed=0, split="train"):
        self.classes, self.goals, self.held_out = metaworld_goals(env)    # (classes, 50, 7) each
        if num_tasks % len(self.classes):
            raise UserError(f"{env} has {len(self.classes)} classes: the number of tasks (of each process) "
                            f"must be a multiple of that, not {num_tasks}")
        self.episode_length = 300 if split == "train" else 500            # MetaWorld's 500; fewer: more tasks
        self.arms, self.obs, self.shift = [None] * num_tasks, *np.zeros((2, num_tasks, 39))
        super().__init__(num_tasks, seed, split, 39, 4)

    def sample_tasks(self, rng):
        return self.pick(self.goals, rng.permuted(np.tile(np.arange(50), (len(self.classes), 1)), axis=1))

    def fixed_tasks(self, split):
        return self.pick(self.held_out, np.tile(np.arange(50), (len(self.classes), 1)))

    def pick(self, goals, order):
        """Rows (num_tasks, 7): the classes in turn, of each the next goal in its order (classes, 50)."""
        turn, kind = divmod(np.arange(self.num_envs), len(self.classes))
        return goals[kind, order[kind, turn % 50]]

    def begin(self, mask):
        import metaworld
        for i in np.flatnonzero(mask):
            name = self.classes[int(self.tasks[i, 0])]
            make = metaworld.ALL_V3_ENVIRONMENTS[name]
            self.arms[i] = arm = self.arms[i] if type(self.arms[i]) is make else make()
            goal = self.tasks[i, 1:1 + len(arm._random_reset_space.low)]
            task = {"rand_vec": goal, "env_cls": make, "partially_observable": True}
            arm.set_task(metaworld.Task(name, pickle.dumps(task)))
            self.obs[i] = arm.reset()[0]
            self.shift[i, 4:7] = self.shift[i, 22:25] = self.np_random.normal(0.0, self.blur, 3)

    def advance(self, actions):
        clock = np.array([arm.data.time for arm in self.arms])
        # One Python environment after the other: several processes (torchrun) make it faster.
        results = [arm.step(action) for arm, action in zip(self.arms, actions.astype(np.float32))]
        obs, reward, _, _, info = (np.array(x) for x in zip(*results))
        went = np.array([arm.data.time for arm in self.arms]) > clock
        blown = ~(np.isfinite(obs).all(axis=1) & np.isfinite(reward) & went)
        self.obs = np.where(blown[:, None], self.obs, obs)
        info = {"success": np.array([one["success"] for one in info]), "blown_up": blown}
        return np.where(blown, 0.0, reward), blown, info

    def observation(self):
        return self.obs + self.shift

FAMILIES = {"halfcheetah_vel": HalfCheetahVel, "ant_dir": AntDir}

def make_tasks(env, num_tasks, seed=0, split="train") -> VectorEnv:
    """`num_tasks` tasks of a family: drawn with `seed` (train), or fixed whatever the seed (test, ood)."""
    if env in FAMILIES:
        return FAMILIES[env](num_tasks, seed, split)
    if env == "ml45_train" or env.startswith("ml1_"):
        return MetaWorldTasks(env, num_tasks, seed, split)
    raise UserError(f"unknown env {env!r}; there are: {', '.join(FAMILIES)}, ml1_reach, ml1_..., ml45_train")

# 3. Working memory (Sec. 4.1; Sec. 5.1, "Memory Write Logic"; Algorithm 1) --------------------------------

def windows(memories, index, start, N, state_size):
    """What an agent remembers at some steps: N slots each, and which of them is the current one.

    Oldest first: the last memories (s, a, r, eta) of the episode, then the current (s, PAD, PAD, PAD), then
    empty ones, which the causal mask hides. PAD is zero. Each transition is stored once: memories (steps,
    width), index (M,), start (M,): the first that each remembers -> slots (M, N, width), current (M,)."""
    current = (index - start).clamp(max=N - 1)
    slot = torch.arange(N, device=index.device)
    source = torch.minimum(index[:, None] - current[:, None] + slot, index[:, None])  # empty: any row will do
    x = memories[source]
    x[..., state_size:].mul_((slot < current[:, None])[..., None])                     # PAD: not known yet
    return x, current

# 4. The transformer (Sec. 3.2, 4.2, 4.3) and T-Fixup (Sec. 3.3) -------------------------------------------

def sinusoids(N, d):
    """Positional encoding of "Attention is all you need": (N, d)."""
    angle = torch.arange(N)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)

class Layer(nn.Module):
    """One refinement e^{l-1} -> e^l (Eq. 6): self-attention and a position-wise network, both residual."""
    def __init__(self, d, heads, d_ff, layer_norm):
        super().__init__()
        self.heads = heads
        self.q, self.v, self.out = (nn.Linear(d, d) for _ in range(3))
        self.k = nn.Linear(d, d, bias=False)              # a bias of all keys would cancel in the softmax
        self.ff1, self.ff2 = nn.Linear(d, d_ff), nn.Linear(d_ff, d)
        self.norm1, self.norm2 = (nn.LayerNorm(d) if layer_norm else nn.Identity() for _ in range(2))

    def forward(self, e):
        """Memories e (M, N, d) -> refined by those before them (M, N, d), and alpha (M, heads, N, N)."""
        M, N, d = e.shape
        q, k, v = (x.view(M, N, self.heads, -1).transpose(1, 2) for x in (self.q(e), self.k(e), self.v(e)))
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)     # (M, heads, N, N)
        slot = torch.arange(N, device=e.device)
        alpha = scores.masked_fill(slot[:, None] < slot, -torch.inf).softmax(dim=-1)   # Eq. 4: i sees j <= i
        mu = (alpha @ v).transpose(1, 2).reshape(M, N, d)                 # Eq. 5; heads side by side, Eq. 1
        return self.refine(e, mu), alpha

    def one(self, e, current):
        """The same for one slot of each, current (M,) -> (M, d), and no key, no value: for the last layer."""
        M, N, d = e.shape
        now = e[torch.arange(M, device=e.device), current]
        q = self.q(now).view(M, self.heads, -1)
        w_k, w_v = (x.weight.view(self.heads, -1, d) for x in (self.k, self.v))   # (heads, d / heads, d)
        asked = (q.transpose(0, 1) @ w_k).transpose(0, 1)                 # q . (W_k e_n) = (W_k^T q) . e_n
        scores = asked @ e.transpose(1, 2) / math.sqrt(d // self.heads)   # (M, heads, N)
        hidden = torch.arange(N, device=e.device) > current[:, None, None]
        alpha = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        mu = (alpha @ e).transpose(0, 1) @ w_v.transpose(1, 2)            # (heads, M, d / heads)
        return self.refine(now, mu.transpose(0, 1).reshape(M, d) + self.v.bias)

    def refine(self, e, mu):
        e = self.norm1(e + self.out(mu))                                  # out: W_o of Eq. 1
        return self.norm2(e + self.ff2(F.relu(self.ff1(e))))

class Transformer(nn.Module):
    """e^0 = phi_1 .. phi_N -> e^L: the episodic memory, refined layer by layer."""
    def __init__(self, layers, d, heads, d_ff, tfixup):
        super().__init__()
        self.layers = nn.ModuleList(Layer(d, heads, d_ff, layer_norm=not tfixup) for _ in range(layers))
        for layer in self.layers:
            for linear in (layer.q, layer.k, layer.v, layer.out, layer.ff1, layer.ff2):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            if tfixup:  # Sec. 3.3; its N is the layers, our L
                for linear in (layer.v, layer.out, layer.ff1, layer.ff2):
                    linear.weight.data *= 0.67 * layers ** -0.25

    def forward(self, e, current):
        """e (M, N, d), current (M,) -> the refined memory of the current step, all that is needed: (M, d)."""
        for layer in self.layers[:-1]:
            e, _ = layer(e)
        return self.layers[-1].one(e, current)

# 5. The agent: normaliser, memory, policy and value heads. The memory is all that tells RL^2 from TrMRL. ----

class Normalizer(nn.Module):
    """Running mean and variance of all that was seen, merged batch by batch (Chan et al.)."""
    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10.0, 10.0)

    def update(self, x):                                                  # (M, size)
        n, total, delta = len(x), self.count + len(x), x.mean(dim=0) - self.mean
        between = delta ** 2 * self.count * n / total
        spread = self.var * self.count + x.var(dim=0, unbiased=False) * n + between
        self.mean += delta * n / total
        self.var.copy_(spread / total)
        self.count.copy_(total)

def mlp(sizes, output_scale):
    """Linear and tanh in turn, Xavier; the last layer is linear and scaled."""
    modules = []
    for a, b in zip(sizes, sizes[1:]):
        modules += [nn.Linear(a, b), nn.Tanh()]
        nn.init.xavier_uniform_(modules[-2].weight)
        nn.init.zeros_(modules[-2].bias)
    modules[-2].weight.data *= output_scale
    return nn.Sequential(*modules[:-1])

class EpisodicMemory(nn.Module):
    """TrMRL's memory: a queue of working memories, embedded by phi, refined by the transformer."""
    def __init__(self, config, state_size, width):
        super().__init__()
        self.config, self.state_size, self.width, d = config, state_size, width, config.d_model
        self.phi = nn.Linear(width, d, bias=False)
        nn.init.xavier_uniform_(self.phi.weight)
        if config.tfixup:  # Sec. 3.3 and T-Fixup's rule for embeddings
            nn.init.normal_(self.phi.weight, std=d ** -0.5 * (9 * config.layers) ** -0.25)
        self.register_buffer("positions", sinusoids(config.memory_length, d))
        self.transformer = Transformer(config.layers, d, config.heads, config.d_ff, config.tfixup)

    def remember(self, x, current):
        """x (M, N, width), current (M,) -> the episodic memory e^L of the current step (M, d)."""
        return self.transformer(self.phi(x) + self.positions, current)

    def reset(self, num_tasks):
        """Empty queues: the last N steps of each task, the current one last, and how many are before it."""
        device = self.positions.device
        self.last = torch.zeros(num_tasks, self.config.memory_length, self.width, device=device)
        self.before = torch.zeros(num_tasks, dtype=torch.long, device=device)

    def read(self, state):
        """D <- D u (s_next, a_PAD, r_PAD, eta_PAD); then attend."""
        B, N, width = self.last.shape
        self.last = torch.cat([self.last[:, 1:], F.pad(state, (0, width - self.state_size))[:, None]], dim=1)
        index = N * torch.arange(B, device=state.device) + N - 1
        x, current = windows(self.last.view(-1, width), index, index - self.before, N, self.state_size)
        return self.remember(x, current)

    def write(self, action_reward_eta):
        """B <- B u (s_t, a_t, r_t, eta_t); who ends its episode forgets."""
        self.last[:, -1, self.state_size:] = action_reward_eta
        self.before = (self.before + 1).clamp(max=self.config.memory_length - 1)
        if not self.config.keep_memory:
            self.before = torch.where(action_reward_eta[:, -1] > 0, 0, self.before)

    def recall(self, memories, start, index):
        """For learning: what `read` gave at these steps of a batch; memories (B, T, width), start (B, T)."""
        _, T, width = memories.shape
        first = start.flatten()[index] + index // T * T                   # counted within all B * T steps
        return self.remember(*windows(memories.view(-1, width), index, first, self.config.memory_length,
                                      self.state_size))

class RecurrentMemory(nn.Module):
    """RL^2 (Duan et al. 2016): a GRU over (s_t, a_{t-1}, r_{t-1}, eta_{t-1}) that lives through the trial."""
    def __init__(self, config, state_size, width):
        super().__init__()
        self.state_size, self.rest = state_size, width - state_size
        self.gru = nn.GRU(width, config.d_model, batch_first=True)

    def reset(self, num_tasks):
        self.h, self.last = None, torch.zeros(num_tasks, self.rest, device=self.gru.weight_hh_l0.device)

    def write(self, action_reward_eta):
        self.last = action_reward_eta

    def read(self, state):
        e, self.h = self.gru(torch.cat([state, self.last], dim=1)[:, None], self.h)
        return e[:, 0]

    def recall(self, memories, start, index):
        """The same for learning: index (M,), all steps of some trials in order -> (M, d), in one graph."""
        state, rest = memories.flatten(0, 1)[index].view(-1, memories.shape[1], memories.shape[2]).split(
            [self.state_size, self.rest], dim=2)
        before = F.pad(rest[:, :-1], (0, 0, 1, 0))                        # a, r, eta of the step before
        return self.gru(torch.cat([state, before], dim=2))[0].flatten(0, 1)

def state_size(config, envs):
    """Of what the agent sees: the observation and, for the oracle, the task."""
    return envs.single_observation_space.shape[0] + (config.agent == "oracle") * envs.tasks.shape[1]

class Agent(nn.Module):
    """To use one: `reset`, then `act` and `observe` in turn (Algorithm 1), NumPy in and out."""
    def __init__(self, config: Config, state_size, action_low, action_high):
        super().__init__()
        self.config, self.state_size, self.trained_steps = config, state_size, 0
        A, d = len(action_low), config.d_model
        self.register_buffer("action_low", torch.as_tensor(action_low, dtype=torch.float32))
        self.register_buffer("action_high", torch.as_tensor(action_high, dtype=torch.float32))
        self.normalizer = Normalizer(state_size)
        self.rewards = None if config.reward_scale else Normalizer(1)     # to learn their scale from
        kind = RecurrentMemory if config.agent == "rl2" else EpisodicMemory
        self.memory = kind(config, state_size, width=state_size + A + 2)  # of (s, a, r, eta)
        self.policy = mlp([d, 64, 64, A], output_scale=0.01)
        self.log_std = nn.Parameter(torch.full((A,), math.log(config.init_std)))
        self.value = mlp([state_size if config.separate_value else d, 64, 64, 1], output_scale=1.0)

    def values(self, e, state):
        """Memories (..., d) and normalised states (..., state_size) -> values (...)."""
        return self.value(state if self.config.separate_value else e).squeeze(-1)

    def log_prob(self, mean, action):
        """Of a diagonal Gaussian: (M, A), (M, A) -> (M,)."""
        z = (action - mean) * (-self.log_std).exp()
        return -0.5 * z.square().sum(dim=-1) - (self.log_std + 0.5 * math.log(2 * math.pi)).sum()

    def entropy(self):
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()

    def reset(self, num_tasks, generator=None):
        """Empty memories for so many tasks; `generator` draws the noise of sampled actions."""
        self.memory.reset(num_tasks)
        self.generator, self.pending = generator, None

    def act(self, obs, sample=False):
        """Observations (B, state_size) -> the policy's mean action (B, A), or a sample of it."""
        return self.step(obs, sample)[0].cpu().numpy()

    def observe(self, action, reward, terminated):
        """Completes the working memory of this step; who is `terminated`, also by the clock, starts anew."""
        row = (np.asarray(x, dtype=np.float32).reshape(len(action), -1) for x in (action, reward, terminated))
        self.pending = np.concatenate(list(row), axis=1)    # the next `act` takes it along: one transfer

    @torch.no_grad()
    def step(self, obs, sample):
        """As `act`, but all that it finds, on the device: action, its mean, memory e^L, normalised state."""
        obs, A = np.asarray(obs, dtype=np.float32), len(self.log_std)
        if self.pending is None:
            state = torch.as_tensor(obs).to(self.log_std.device)
        else:
            new = torch.as_tensor(np.concatenate([obs, self.pending], axis=1)).to(self.log_std.device)
            state, action, reward_eta = new.split([self.state_size, A, 2], dim=1)
            action = action.clamp(self.action_low, self.action_high)      # as the physics saw it
            self.memory.write(torch.cat([action, reward_eta], dim=1))
            self.pending = None
        state = self.normalizer(state)
        e = self.memory.read(state)
        mean = self.policy(e)
        noise = torch.randn(mean.shape, generator=self.generator, device=mean.device) if sample else 0.0
        return mean + self.log_std.exp() * noise, mean, e, state

# 6. Trials: E episodes of each task in a row. One collector for meta-training and meta-testing. -----------

@dataclass
class Trials:
    """B tasks times T steps; tensors on the agent's device, arrays on the CPU."""
    memories: torch.Tensor           # (B, T, width): normalised s, clipped a, r, eta
    action: torch.Tensor             # (B, T, A) as sampled
    logp: torch.Tensor               # (B, T)
    value: torch.Tensor              # (B, T)
    start: torch.Tensor              # (B, T): the first step that this one remembers
    obs: np.ndarray                  # (B, T, state_size) as given
    reward: np.ndarray               # (B, T)
    terminated: np.ndarray           # (B, T): falls; an end by the clock is none
    episode: np.ndarray              # (B, T): 0, 1, ...
    info: dict                       # (B, T) each: success, x_velocity, blown_up, where a family has them

    def returns(self, episodes):
        """Return and success (NaN where a family has none) of the first episodes, (B, episodes) each."""
        which = self.episode[:, :, None] == np.arange(episodes)           # (B, T, episodes)
        success = np.asarray(self.info.get("success", np.full(self.reward.shape, np.nan)), dtype=float)
        return ((self.reward[:, :, None] * which).sum(axis=1),
                np.where(which, success[:, :, None], -np.inf).max(axis=1))

@torch.no_grad()
def collect(agent, envs, episodes, sample, seed, tasks=None) -> Trials:
    """Trials of `episodes` times the family's episode length, of the tasks of `envs` or of those given.

    Has `envs` room for `episodes` of each task, they run side by side and are then put in a row: faster, and
    the same where memories end with the episode. Whoever falls begins its next one at once: no task waits."""
    tasks, device = envs.tasks if tasks is None else tasks, agent.log_std.device
    side_by_side, T = envs.num_envs // len(tasks), episodes * envs.episode_length
    env_seed, torch_seed = (int(s) for s in np.random.SeedSequence(seed).generate_state(2))
    agent.reset(envs.num_envs, torch.Generator(device).manual_seed(torch_seed))
    obs, _ = envs.reset(seed=env_seed, options={"tasks": np.repeat(tasks, side_by_side, axis=0)})
    thoughts, events, infos, threads = [], [], [], torch.get_num_threads()
    torch.set_num_threads(1)                               # idle, PyTorch's others would hold up the physics
    while len(events) < T // side_by_side:
        if events and done.any():
            obs, _ = envs.reset(options={"reset_mask": done})
        if agent.config.agent == "oracle":
            obs = np.concatenate([obs, envs.tasks], axis=1, dtype=np.float32)
        action, mean, e, state = agent.step(obs, sample)
        sent = action.cpu().numpy()
        seen, (obs, reward, terminated, truncated, info) = obs, envs.step(sent)
        done = terminated | truncated
        agent.observe(sent, reward, done)
        thoughts.append((action, mean, e, state))
        events.append((seen, reward.astype(np.float32), terminated, done))
        infos.append(info)
    torch.set_num_threads(threads)
    done[:] = True                                         # here ends what ran side by side
    action, mean, e, state = (torch.stack(x, 1).reshape(-1, T, x[0].shape[1]) for x in zip(*thoughts))
    obs, reward, terminated, done = (np.stack(x, 1).reshape(-1, T, *x[0].shape[1:]) for x in zip(*events))
    forgets = done & (not agent.config.keep_memory and agent.config.agent != "rl2")
    start = np.maximum.accumulate(np.roll(forgets, 1, axis=1) * np.arange(T), axis=1)
    ends, lane = done.reshape(envs.num_envs, -1), np.arange(envs.num_envs)[:, None] % side_by_side
    episode = (ends.cumsum(axis=1) - ends) * side_by_side + lane          # the first are 0, 1, ..., E - 1
    reward_eta = torch.as_tensor(np.stack([reward, done], axis=-1).astype(np.float32)).to(device)
    memories = torch.cat([state, action.clamp(agent.action_low, agent.action_high), reward_eta], dim=-1)
    return Trials(memories, action, agent.log_prob(mean, action), agent.values(e, state),
                  torch.as_tensor(start).to(device), obs, reward, terminated, episode.reshape(-1, T),
                  {key: np.stack([info[key] for info in infos], 1).reshape(-1, T)
                   for key in ("success", "x_velocity", "blown_up") if key in infos[0]})

# Several processes (torchrun): each collects its share of the tasks, then all have all trials, each computes
# its share of every minibatch, and gradients are averaged: the update of one process, but for rounding.

def processes(device=None):
    """(number of this process, how many there are); a device: join the others of torchrun first."""
    if device and {"RANK", "MASTER_ADDR"} <= os.environ.keys() and not dist.is_initialized():
        torch.compiler.reset()               # loads the compiler: if loaded later, it would keep the group
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())  # or exit may crash
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def gather(trials):
    """The trials of all processes, for each of them."""
    if not dist.is_initialized():
        return trials
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [x.cpu() if torch.is_tensor(x) else x for x in vars(trials).values()])
    def join(parts):
        if isinstance(parts[0], dict):
            return {key: join([part[key] for part in parts]) for key in parts[0]}
        return torch.cat(parts).to(trials.logp.device) if torch.is_tensor(parts[0]) else np.concatenate(parts)
    return Trials(*map(join, zip(*everyone)))

def average(x):
    """In place, over all processes."""
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()

# 7. PPO over trials (Sec. 5.1, "Meta-Training") -----------------------------------------------------------

def gae(reward, value, terminated, gamma, lam):
    """Advantages over whole trials, (B, T) each: E episodes are one trajectory with one discounted return.

    - The end of an episode by the clock is none: its last step bootstraps from the first of the next episode.
    - A fall is an end: nothing flows back over it, or falling would be a way to leave a bad episode.
    - The trial is the horizon: nothing comes after it, so its last step has no bootstrap."""
    advantage, T = torch.zeros_like(reward), reward.shape[1]
    for t in reversed(range(T)):
        goes_on = 1.0 - terminated[:, t] if t + 1 < T else torch.zeros_like(reward[:, t])
        following = min(t + 1, T - 1)
        delta = reward[:, t] + gamma * goes_on * value[:, following] - value[:, t]
        advantage[:, t] = delta + gamma * lam * goes_on * advantage[:, following]
    return advantage

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")

def ppo_loss(agent, e, state, action, logp_old, advantage, target, config):
    """Loss of M steps, all terms means: memories e (M, d), normalised advantages; METRICS but the last."""
    value = agent.values(e, state)
    log_ratio = agent.log_prob(agent.policy(e), action) - logp_old
    ratio = log_ratio.exp()                                               # (M,)
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    value_loss, entropy = F.mse_loss(value, target), agent.entropy()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    with torch.no_grad():
        approx_kl, clip_fraction = (ratio - 1 - log_ratio).mean(), (ratio != clipped).float().mean()
    return loss, (policy_loss, value_loss, entropy, approx_kl, clip_fraction)

def make_optimizer(agent, config):
    """Adam on one long vector, whose views all parameters become: a few calls instead of hundreds."""
    parameters, tail = list(agent.parameters()), -sum(p.numel() for p in agent.value.parameters())
    vector = torch.cat([p.detach().flatten() for p in parameters])
    gradient, sizes = torch.zeros_like(vector), [p.numel() for p in parameters]
    for p, part, grad in zip(parameters, vector.split(sizes), gradient.split(sizes)):
        p.data, p.grad = part.view_as(p), grad.view_as(p)
    rest, value = vector[:tail], vector[tail:]             # its own rate for the value head, which is last
    rest.grad, value.grad = gradient[:tail], gradient[tail:]
    groups = [{"params": [rest], "rate": config.lr}, {"params": [value], "rate": config.value_lr}]
    optimizer = torch.optim.Adam(groups, config.lr, eps=1e-5, fused=True)
    optimizer.gradient = gradient                          # of all, to be zeroed and clipped at once
    return optimizer

def ppo_update(agent, optimizer, trials, config, generator):
    """Epochs of minibatches that mix tasks and time. Only METRICS leave the device, once, at the end."""
    device, (B, T) = trials.logp.device, trials.logp.shape
    reward, scale = trials.memories[..., -2], config.reward_scale         # width: ..., r, eta
    if agent.rewards:                                      # learned: steady rewards have values of about 1
        agent.rewards.update(reward.reshape(-1, 1))
        scale = (1 - config.gamma) / (agent.rewards.var + agent.rewards.mean ** 2 + 1e-8).sqrt()
    reward = scale * reward
    terminated = torch.as_tensor(trials.terminated, dtype=torch.float32).to(device)
    if config.endless:  # the value of the last step before the memory empties stands for what was cut off
        clock = (trials.start.diff(append=trials.start[:, :1] - 1) != 0) * (1.0 - terminated)
        reward, terminated = reward + config.gamma * trials.value * clock, terminated + clock
    advantage = gae(reward, trials.value, terminated, config.gamma, config.gae_lambda)
    target = (advantage + trials.value).flatten()
    state, action = trials.memories[..., :agent.state_size].flatten(0, 1), trials.action.flatten(0, 1)
    logp, advantage = trials.logp.flatten(), advantage.flatten()
    unit = T if config.agent == "rl2" else 1                              # RL^2 learns from whole trials
    size, within = max(1, config.minibatch // unit), torch.arange(unit, device=device)
    gradient, (rank, world) = optimizer.gradient, processes()
    totals, count = torch.zeros(len(METRICS) + 1, device=device), 0
    def loss_of(index, mean, std):                                        # (M,) steps; of their advantages
        e = agent.memory.recall(trials.memories, trials.start, index)
        return ppo_loss(agent, e, state[index], action[index], logp[index],
                        (advantage[index] - mean) / (std + 1e-8), target[index], config)
    loss_of = torch.compile(loss_of) if config.compile else loss_of
    for _ in range(config.epochs):
        order = torch.randperm(B * T // unit, generator=generator, device=device)
        for chosen in order.split(size)[:len(order) // size]:             # less an odd rest
            steps = unit * chosen[:, None] + within                       # (size, unit)
            std, mean = torch.std_mean(advantage[steps])
            loss, log = loss_of(steps[rank::world].flatten(), mean, std)  # the share of this process
            gradient.zero_()
            loss.backward()
            average(gradient)
            norm = gradient.norm()
            gradient *= (config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            optimizer.found_inf = skip = (~torch.isfinite(norm)).float()  # fused Adam then changes nothing,
            if device.type != "mps" or not skip:                          # but on mps it does not look at it
                optimizer.step()
            totals += torch.stack([*log, norm, skip]).detach().nan_to_num(0.0, 0.0, 0.0)
            count += 1
    average(totals)
    agent.normalizer.update(torch.as_tensor(trials.obs, dtype=torch.float32).to(device).flatten(0, 1))
    *sums, skipped = totals.tolist()
    return dict(zip(METRICS, (x / count for x in sums)), updates=count, skipped=int(skipped))

# 8. Meta-testing (Sec. 5.1, 5.2): frozen weights, mean actions, tasks fixed for all agents and seeds ------

TEST_SEED = 2022                                           # of the starting states

def meta_test(agent, envs, episodes, sample=False):
    """Return and success (NaN where a family has none) per task and episode, (num_tasks, episodes) each."""
    return collect(agent, envs, episodes, sample, seed=TEST_SEED).returns(episodes)

def bootstrap(values, resamples=2000):
    """95 % percentile bootstrap interval of the mean of `values` (n,)."""
    draws = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    return np.quantile(np.asarray(values)[draws].mean(axis=1), [0.025, 0.975])

def score(returns, success):
    return f"{returns.mean():.1f}" + ("" if np.isnan(success).any() else f" ({success.mean():.0%})")

def eval_rows(step, split, returns, success):
    """Rows of eval.csv, one per task and episode."""
    return [{"step": step, "split": split, "task": i, "episode": k + 1, "return": f"{returns[i, k]:.4f}",
             "success": "" if np.isnan(success[i, k]) else int(success[i, k])}
            for i, k in np.ndindex(returns.shape)]

def table(returns, success, tasks, classes=()):
    """What --eval prints: a line per episode, over all tasks; for several classes, then one per class."""
    def extreme(r, i):
        return f"{r[i]:.1f} (task {i}: {', '.join(f'{x:.3g}' for x in np.atleast_1d(tasks[i]))})"
    rows = [["episode", "return", "95 % interval", "worst", "best", "success"]]
    for k, r in enumerate(returns.T):
        rows.append([str(k + 1), f"{r.mean():.1f}", "{:.1f} to {:.1f}".format(*bootstrap(r)),
                     extreme(r, r.argmin()), extreme(r, r.argmax()), f"{success[:, k].mean():.0%}"])
    for c, name in enumerate(classes if len(classes) > 1 else ()):        # first episode
        mine = tasks[:, 0] == c
        rows.append([name, f"{returns[mine, 0].mean():.1f}", "", "", "", f"{success[mine, 0].mean():.0%}"])
    if np.isnan(success).any():                            # a family without success
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows)

# 9. Files: run folder, checkpoint, agent. Loading never runs code that a file brings (weights_only). ------

def write_atomically(path, data: bytes):
    """The old file stays whole until the new one is on the disk."""
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)

def packed(**content) -> bytes:
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()

def csv_text(rows, header):
    lines = [rows[0].keys()] * header + [row.values() for row in rows]
    return "".join(",".join(map(str, line)) + "\n" for line in lines)

def load(path, kind):
    """(content, agent on the CPU) of an agent.pt or checkpoint.pt, or one line on what is wrong with it."""
    if not path.is_file():
        raise UserError(f"there is no {path}; name another run{', not of results/' * (kind == 'checkpoint')}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["kind"] != kind or content["version"] != VERSION:
            raise ValueError(f"{content['kind']} of version {content['version']}, not {kind} of {VERSION}")
        weights, config = content["weights"], Config(**content["config"])
        check(config)
        if not all(x.is_floating_point() and x.layout == torch.strided for x in weights.values()):
            raise ValueError("weights that are no numbers")
        mean, low = weights["normalizer.mean"], weights["action_low"]
        with torch.device("meta"):                         # no memory of its own: a forged size costs nothing
            agent = Agent(config, len(mean), low, low)     # of these sizes must be all that it now gets
        agent.load_state_dict({name: x.float() for name, x in weights.items()}, assign=True)
        agent.trained_steps = int(content["step"])
    except Exception as error:                             # whatever a damaged or foreign file provokes
        reason = (str(error).splitlines() or ["it ends too early"])[-1].strip()[:100]
        raise UserError(f"{path} is damaged or no {kind} of this trmrl.py ({reason}); take another") from None
    return content, agent

def load_agent(path, device="cpu") -> Agent:
    """A trained agent from a run folder or an agent.pt."""
    path = Path(path) / "agent.pt" if Path(path).is_dir() else Path(path)
    return load(path, "agent")[1].to(pick_device(device)).requires_grad_(False)

class Run:
    """All that changes in the course of a run, and its folder; of several processes only the first writes."""
    def __init__(self, folder, agent, content=None):
        self.folder, self.agent, self.config = Path(folder), agent, agent.config
        self.optimizer, self.writes = make_optimizer(agent, agent.config), processes()[0] == 0
        self.iteration, self.seconds, self.last_test = 0, 0.0, "test ?"
        self.csv = {"progress.csv": "", "eval.csv": ""}
        if content:
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": content["optimizer"]["state"], "param_groups": groups})
            self.iteration, self.seconds = int(content["iteration"]), float(content["seconds"])
            self.csv = {name: str(content["csv"][name]) for name in self.csv}
            if self.iteration < 0:
                raise ValueError("a negative iteration")
            for group in self.optimizer.param_groups if self.iteration else ():
                (x,), state = group["params"], self.optimizer.state[group["params"][0]]
                if any(state[k].shape != x.shape or not state[k].is_contiguous()  # fused Adam does not look
                       for k in ("exp_avg", "exp_avg_sq")) or float(state["step"]) < 0:
                    raise ValueError("an optimizer of another size")
        self.snapshot()

    def add_rows(self, name, rows):
        self.csv[name] += csv_text(rows, header=not self.csv[name])

    def snapshot(self):
        """The files as they would be now; what the next iteration changes does not touch them."""
        common = {"version": VERSION, "config": asdict(self.config), "weights": self.agent.state_dict(),
                  "step": self.agent.trained_steps}
        versions = {x.__name__: x.__version__ for x in (torch, np, gymnasium, mujoco)}
        versions["python"] = sys.version.split()[0]
        self.files = {
            "checkpoint.pt": packed(kind="checkpoint", **common, optimizer=self.optimizer.state_dict(),
                                    iteration=self.iteration, seconds=self.seconds, csv=self.csv),
            "agent.pt": packed(kind="agent", **common),
            "config.json": json.dumps({**asdict(self.config), "versions": versions}, indent=2).encode(),
            **{name: text.encode() for name, text in self.csv.items()}}

    def save(self, only=""):
        """The last snapshot, to the disk, or of it the files that end so; a deleted folder comes back."""
        if self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, data in self.files.items():
                if name.endswith(only):
                    write_atomically(self.folder / name, data)
        self.saved_at = self.saved_at if only else time.monotonic()

# 10. Meta-training (Sec. 5.1) -----------------------------------------------------------------------------

def pick_device(name):
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    there = [*["cuda"] * bool(gpus), "cpu", *["mps"] * torch.backends.mps.is_available(), *gpus]
    name = there[0] if name == "auto" else name
    if name.startswith("cuda") and "LOCAL_RANK" in os.environ:            # torchrun: a GPU for each process
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    if name not in there:
        raise UserError(f"device {name!r} is not there; this PyTorch has: {', '.join(there)}")
    return torch.device(name)

def set_threads(threads):
    """Of the network and, since the tasks ask PyTorch for the number, of the physics; 0: all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(threads or cores)

def check_compiler(device):
    try:
        torch.compile(torch.sin)(torch.ones(2, device=device))
    except Exception as error:                             # whatever this machine lacks for it
        raise UserError(f"--compile does not work here ({str(error)[:100]!r}); leave it out") from None

def check(config):
    """Refuse what cannot work, before anything starts."""
    for f in fields(Config):
        name, value = "--" + f.name.replace("_", "-"), getattr(config, f.name)
        low, high = f.metadata["low"], f.metadata["high"]
        if type(value) not in (type(f.default), int if type(f.default) is float else type(f.default)):
            raise UserError(f"{name} takes a {type(f.default).__name__}, not {value!r}")
        if low is not None and not low <= value <= high:
            raise UserError(f"{name} must be between {low:g} and {high:g}, not {value}")
    if config.agent not in AGENTS:
        raise UserError(f"unknown agent {config.agent!r}; there are: {', '.join(AGENTS)}")
    if (config.endless or config.reward_scale == 0) and config.gamma == 1:
        raise UserError("--endless and --reward-scale 0 need --gamma below 1")
    if config.blur and not config.env.startswith("ml"):
        raise UserError(f"--blur has no meaning with --env {config.env}")
    if config.agent != "rl2" and (config.d_model % config.heads or config.d_model % 2):
        fit = [h for h in range(1, 33) if config.d_model % h == 0]
        raise UserError(f"--d-model {config.d_model} must be even (for sine and cosine) and a multiple of "
                        f"--heads {config.heads}, as it is of {fit}")
    if any(c in config.tag + config.env for c in "/\\\0"):
        raise UserError("--tag and --env name a folder: no slashes there")

def open_run(config, envs, resume):
    """A new run, or the one in folder `resume` as its checkpoint has it; the agent on its device."""
    if resume is not None:
        path = Path(resume) / "checkpoint.pt"
        content, agent = load(path, "checkpoint")
        agent.config = config
        try:
            return Run(resume, agent.to(config.device), content)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise UserError(f"{path} is damaged ({error}); start the run anew") from None
    name = f"{config.agent}-seed{config.seed}{'-' * bool(config.tag)}{config.tag}"
    folder = Path(config.run_dir or Path("runs") / config.env / name)
    if processes()[0] == 0 and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: --resume it, or take another --seed, --tag or --run-dir")
    with torch.random.fork_rng(devices=[]):                # the same first weights on every device
        torch.manual_seed(config.seed)
        actions = envs.single_action_space
        agent = Agent(config, state_size(config, envs), actions.low, actions.high)
    return Run(folder, agent.to(config.device))

def train(config: Config, make_tasks=make_tasks, resume=None) -> Agent:
    """Meta-train on the tasks of `make_tasks`; `resume`: a run folder to go on with (`config` is its own)."""
    check(config)
    set_threads(config.threads)
    config = replace(config, device=str(pick_device(config.device)), threads=torch.get_num_threads())
    rank, world = processes(config.device)
    if config.compile:
        check_compiler(config.device)
    sampler = make_tasks(config.env, max(1, config.num_tasks // world), config.seed, "train")  # only draws
    in_a_row = config.keep_memory or config.agent == "rl2" or getattr(sampler.unwrapped, "in_a_row", False)
    room = sampler.num_envs * (1 if in_a_row else config.episodes_per_trial)
    envs = make_tasks(config.env, room, config.seed, "train")
    if config.blur:                                        # the tests have none
        envs.unwrapped.blur = config.blur
    tests = {"test": make_tasks(config.env, config.eval_tasks, config.seed, "test")}
    with contextlib.suppress(ValueError):                  # a split that not every family has
        tests["ood"] = make_tasks(config.env, config.eval_tasks, config.seed, "ood")
    trial = config.episodes_per_trial * envs.episode_length
    batch, unit = config.num_tasks * trial, trial if config.agent == "rl2" else 1
    if config.minibatch > batch:
        raise UserError(f"--minibatch {config.minibatch} is more than a batch: {config.num_tasks} tasks x "
                        f"{config.episodes_per_trial} episodes x {envs.episode_length} steps = {batch}")
    if config.num_tasks % world or max(unit, config.minibatch) // unit % world:
        raise UserError(f"{world} processes cannot share --num-tasks {config.num_tasks} or --minibatch "
                        f"{config.minibatch} (rl2: in trials of {trial} steps): take multiples of {world}")
    run = open_run(config, envs, resume)
    run.save()
    last = math.ceil(config.total_steps / batch)
    if run.writes:
        print(f"{config.env}, {config.agent}: iterations {run.iteration} to {last}, {batch:,} steps each; "
              f"{config.device}, processes: {world}, threads: {config.threads}; {run.folder}", flush=True)
    try:
        while run.iteration < last:
            iterate(run, sampler.sample_tasks, envs, tests, last, batch)
            every, waited = config.checkpoint_every, time.monotonic() - run.saved_at > 30
            due = run.iteration % every == 0 if every else waited
            run.save("" if due or run.iteration == last else ".csv")
    except BaseException as error:                         # keep the last finished iteration, whatever it was
        try:
            run.save()
        except OSError as trouble:
            raise RunError(f"cannot write {run.folder} ({trouble.strerror}); its last checkpoint is whole: "
                           f"--resume {run.folder}") from None
        if world > 1 and isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise RunError(f"process {rank} failed or lost the others: {' '.join(str(error).split())[:200]}; "
                           f"go on with --resume {run.folder}") from None
        if run.writes and not isinstance(error, RunError):
            print(f"\nstopped; go on with: python trmrl.py --resume {run.folder}", file=sys.stderr)
        raise
    finally:
        for each in (sampler, envs, *tests.values()):
            each.close()
    return run.agent

def iterate(run, sample_tasks, envs, tests, last, batch):
    """One iteration: new tasks, a trial of each, a PPO update; now and then a meta-test."""
    config, agent, began = run.config, run.agent, time.monotonic()
    for group in run.optimizer.param_groups:
        group["lr"] = group["rate"] * (1 - (1 - config.final_lr) * run.iteration / last)
    ours, shared = (np.random.SeedSequence([config.seed, run.iteration, rank]).generate_state(3).tolist()
                 for rank in (processes()[0], 0))          # of this process, and common to all
    tasks = sample_tasks(np.random.default_rng(ours[0]))
    trials = collect(agent, envs, config.episodes_per_trial, sample=True, seed=ours[1], tasks=tasks)
    trials, generator = gather(trials), torch.Generator(agent.log_std.device).manual_seed(shared[2])
    metrics = ppo_update(agent, run.optimizer, trials, config, generator)
    if 2 * metrics["skipped"] > metrics["updates"]:
        raise RunError(f"{metrics['skipped']} of {metrics['updates']} gradient steps of iteration "
                       f"{run.iteration + 1} were not finite; start anew with a lower --lr")
    speed = batch / (time.monotonic() - began)
    run.iteration += 1
    agent.trained_steps = run.iteration * batch
    if run.iteration % config.eval_every == 0 or run.iteration == last:
        for split, test_envs in tests.items() if run.writes else ():
            episodes = config.final_episodes if run.iteration == last else config.eval_episodes
            returns, success = meta_test(agent, test_envs, episodes)
            run.add_rows("eval.csv", eval_rows(agent.trained_steps, split, returns, success))
            if split == "test":
                run.last_test = "test " + score(returns[:, 0], success[:, 0])
    run.seconds += time.monotonic() - began
    returns, success = trials.returns(config.episodes_per_trial)
    row = {"iteration": run.iteration, "step": agent.trained_steps, "seconds": run.seconds,
           "steps_per_second": speed, "train_return": returns.mean().item(),
           "train_success": success.mean().item(), **metrics, "std": agent.log_std.exp().mean().item(),
           "lr": run.optimizer.param_groups[0]["lr"], "blown_up": int(np.sum(trials.info.get("blown_up", 0)))}
    run.add_rows("progress.csv", [{k: v if type(v) is int else "" if math.isnan(v) else f"{v:.6g}"
                                   for k, v in row.items()}])
    run.snapshot()
    left = int((last - run.iteration) * run.seconds / run.iteration)
    line = (f"{agent.trained_steps / 1e6:.3f} of {last * batch / 1e6:.3f} M steps   {speed:,.0f} steps/s   "
            f"{left // 60}:{left % 60:02d} left   train {score(returns, success)}   {run.last_test}")
    if sys.stdout.isatty():                                # one live line; plain lines in a pipe
        line = "\r\033[K" + line[:os.get_terminal_size().columns - 1]
    if run.writes:
        print(line, end="" if sys.stdout.isatty() and run.iteration < last else "\n", flush=True)

# 11. Command line -----------------------------------------------------------------------------------------

AGENTS = {"trmrl": {}, "rl2": dict(minibatch=800, lr=5e-4), "oracle": dict(memory_length=1)}   # over presets
TRANSFORMER = {"memory_length", "layers", "heads", "d_ff", "tfixup", "keep_memory"}            # not for rl2
RELEASE = dict(layers=4, d_model=128, heads=16, d_ff=512, total_steps=20_000_000, epochs=10, minibatch=256,
               lr=3e-5, value_lr=3e-5, final_lr=0.1, reward_scale=1.0)    # of the paper's authors
ML1 = dict(total_steps=2_000_000, memory_length=40, init_std=0.7, gamma=0.98, gae_lambda=0.95, endless=True,
           episodes_per_trial=1, reward_scale=0.0, eval_tasks=50, final_episodes=2, eval_every=40)
ML_RELEASE = RELEASE | dict(d_model=32, heads=4, d_ff=128, num_tasks=25, episodes_per_trial=10, minibatch=32,
                            lr=5e-5, value_lr=5e-5, gae_lambda=0.95, init_std=1.0, eval_tasks=50)
PRESETS = {                                                # per env what differs from Config's defaults
    "halfcheetah_vel": {"default": {},
                        "paper": RELEASE | dict(clip=0.1, value_lr=2.5e-4, separate_value=True)},
    "ant_dir": {"default": dict(gamma=0.97, gae_lambda=0.9, reward_scale=0.03, init_std=0.5, lr=5e-4,
                                total_steps=2_500_000), "paper": RELEASE | dict(gamma=0.92, init_std=0.5)},
    "ml1_reach": {"default": ML1 | dict(blur=0.1), "paper": ML_RELEASE},
    "ml1": {"default": ML1, "paper": ML_RELEASE},          # any other of its tasks
    "ml45_train": {"default": ML1 | dict(num_tasks=45, eval_tasks=45, eval_every=20),
                   "paper": ML_RELEASE | dict(num_tasks=45, eval_tasks=45)}}

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see --help")

def parse(argv):
    """(what was typed, the Config that it makes)."""
    early = Parser(add_help=False, allow_abbrev=False)
    for name, default in (("env", Config.env), ("agent", Config.agent), ("preset", "default")):
        early.add_argument("--" + name, default=default)
    chosen, _ = early.parse_known_args(argv)
    presets = PRESETS.get(chosen.env, PRESETS.get(chosen.env.split("_")[0], {"default": {}, "paper": {}}))
    if chosen.preset not in presets:
        raise UserError(f"unknown preset {chosen.preset!r}; there are: {', '.join(presets)}")
    preset = {**presets[chosen.preset], **AGENTS.get(chosen.agent, {})}
    parser = Parser(description="TrMRL: meta-train, or meta-test, an agent that adapts to new tasks.",
                    allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--eval", metavar="RUN_OR_AGENT", help="meta-test a trained agent")
    parser.add_argument("--split", help="with --eval: test, ood or train tasks (default: test)")
    parser.add_argument("--episodes", type=int, help="with --eval: episodes per task (default: 6)")
    parser.add_argument("--sample", action="store_true", help="with --eval: sampled actions, not their mean")
    parser.add_argument("--csv", metavar="FILE", help="with --eval: write the rows to this file")
    parser.add_argument("--resume", metavar="RUN_FOLDER", help="go on with a run")
    parser.add_argument("--preset", help="default, or paper: sizes and schedule of the paper's release")
    for f in fields(Config):
        kind = {"action": argparse.BooleanOptionalAction} if type(f.default) is bool else \
            {"type": type(f.default), "metavar": type(f.default).__name__.upper()}
        help = f"{f.metadata['help']} (default: {preset.get(f.name, f.default)})"
        parser.add_argument("--" + f.name.replace("_", "-"), help=help.replace("%", "%%"), **kind)
    typed = vars(parser.parse_args(argv))
    return typed, Config(**preset | {k: v for k, v in typed.items() if hasattr(Config, k)})

def evaluate(path, device="auto", threads=1, split="test", episodes=6, eval_tasks=0, sample=False, csv=None):
    """--eval: meta-test an agent and print the table."""
    if not 1 <= episodes <= 1000:
        raise UserError(f"--episodes must be between 1 and 1000, not {episodes}")
    set_threads(threads)
    config = (agent := load_agent(path, device)).config
    envs = make_tasks(config.env, eval_tasks or config.eval_tasks, TEST_SEED, split)
    if (state_size(config, envs), *envs.single_action_space.shape) != (agent.state_size, len(agent.log_std)):
        raise UserError(f"{path} was trained on another body than {config.env} has")
    returns, success = meta_test(agent, envs, episodes, sample)
    print(f"{config.agent}, {agent.trained_steps:,} steps of {config.env}, on {len(returns)} {split} tasks, "
          f"episodes of {envs.episode_length} steps{', sampled actions' * sample}:")
    print(table(returns, success, envs.tasks, getattr(envs, "classes", ())))
    if csv:
        Path(csv).write_text(csv_text(eval_rows(agent.trained_steps, split, returns, success), header=True))

def main(argv=None):
    """Exit status: 0, or 1 the run broke, 2 a mistake of the user's, 130 or 143 stopped by a signal."""
    def stop(number, frame):
        signal.signal(signal.SIGINT, signal.SIG_DFL)       # a second Ctrl-C ends at once
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not isinstance(sys.exc_info()[1], (RunError, RuntimeError)):    # who lost the others ends anyway
            raise SystemExit(128 + number)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        typed, config = parse(sys.argv[1:] if argv is None else argv)
        mode = "eval" if "eval" in typed else "resume" if "resume" in typed else "env"
        meant = {"eval": ("eval", "split", "episodes", "sample", "csv", "device", "threads", "eval_tasks"),
                 "resume": ("resume", "device", "threads", "compile"), "env": ("preset", *vars(config))}[mode]
        useless = TRANSFORMER if config.agent == "rl2" else set()
        for name in typed.keys() - (set(meant) - useless):  # a flag without a meaning here is a mistake
            here = "with rl2" if name in useless else {"env": "without --eval"}.get(mode, f"with --{mode}")
            raise UserError(f"--{name.replace('_', '-')} has no meaning {here}")
        check(config)
        if mode == "eval":
            evaluate(typed.pop("eval"), **typed)
        elif mode == "resume":
            folder = Path(typed.pop("resume"))
            train(replace(load(folder / "checkpoint.pt", "checkpoint")[1].config, **typed), resume=folder)
        else:
            train(config)
    except (UserError, RunError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # PyTorch has no MemoryError
            raise
        print(f"trmrl.py: {str(error) or 'out of memory'}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0

if __name__ == "__main__":
    sys.exit(main())
