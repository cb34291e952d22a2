"""TrMRL in one file: "Transformers are Meta-Reinforcement Learners" (Melo, ICML 2022).

An agent meets a task it has never seen and adapts within a few time steps, with frozen weights: a causal
transformer attends over its last N working memories phi(s, a, r, eta) and hands the refined memory of the
current step to a Gaussian policy. PPO trains it over trials of several episodes; T-Fixup lets it do without
layer normalisation and warm-up. The file follows the paper: tasks (App. B), working memory (Sec. 4.1),
transformer and T-Fixup (Sec. 3.2, 3.3, 4.2, 4.3), agent, trials and PPO (Sec. 5.1), meta-testing (Sec. 5.2).

    python trmrl.py --env halfcheetah_vel             # meta-train
    python trmrl.py --eval runs/halfcheetah_vel/...   # meta-test on tasks it never saw
"""
from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import gymnasium
import mujoco
import mujoco.rollout
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import nn

VERSION = 1                                       # of the files we write; others are refused by their number


class UserError(ValueError):
    """Something the user can mend: shown as one line, exit status 2."""


# 1. Configuration: every field is a flag of the same name (memory_length: --memory-length) ----------------

def flag(default, help, low=None, high=None):
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass
class Config:
    env: str = flag("halfcheetah_vel", "task family")
    agent: str = flag("trmrl", "trmrl")
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
    clip: float = flag(0.2, "PPO clipping of the probability ratio", 1e-6, 10)
    epochs: int = flag(5, "passes over a batch", 1, 1000)
    minibatch: int = flag(200, "environment steps per gradient step", 2, 10**9)
    lr: float = flag(5e-4, "Adam's learning rate", 0, 1)
    value_lr: float = flag(1e-3, "learning rate of the value head", 0, 1)
    final_lr: float = flag(0.05, "the rates fall linearly to this fraction", 0, 1)
    max_grad_norm: float = flag(0.5, "gradients are clipped to this norm", 1e-9, 1e9)
    value_coef: float = flag(0.5, "weight of the value loss", 0, 1e6)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", 0, 1e6)
    reward_scale: float = flag(0.1, "rewards times this, for learning only", 1e-9, 1e9)


# 2. Tasks (App. B) ----------------------------------------------------------------------------------------
# A family is a VectorEnv whose sub-environments are tasks, plus `tasks` (a row each), `episode_length`, and
# `sample_tasks(rng)`, which draws as many new rows from the training distribution.

class MujocoTasks(VectorEnv):
    """Tasks on one MuJoCo body, all stepped by one native call, in threads: no Python per task."""
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    xml, frame_skip, skipped_qpos, episode_length = "", 5, 1, 200
    splits = ("train", "test")

    def __init__(self, num_tasks, seed=0, split="train"):
        if split not in self.splits:
            raise UserError(f"this family has no split {split!r}; it has: {', '.join(self.splits)}")
        self.num_envs, threads = num_tasks, torch.get_num_threads()
        self.model = mujoco.MjModel.from_xml_path(
            str(Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / self.xml))
        self.models = [self.model] * num_tasks
        self.datas = [mujoco.MjData(self.model) for _ in range(threads)]
        self.pool = mujoco.rollout.Rollout(nthread=threads if threads > 1 else 0)
        self.dt = self.model.opt.timestep * self.frame_skip
        nq, nv = self.model.nq, self.model.nv
        self.state = np.zeros((num_tasks, 1 + nq + nv))                   # time, qpos, qvel
        self.path = np.empty((num_tasks, self.frame_skip, 1 + nq + nv))   # the physics steps of one env step
        self.elapsed = np.zeros(num_tasks, dtype=int)
        box = gymnasium.spaces.Box
        self.single_observation_space = box(-np.inf, np.inf, (nq - self.skipped_qpos + nv,), np.float32)
        self.single_action_space = box(-1.0, 1.0, (self.model.nu,), np.float32)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_tasks)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_tasks)
        rng = np.random.default_rng(seed)
        self.tasks = self.sample_tasks(rng) if split == "train" else self.fixed_tasks(split)

    def reset(self, *, seed=None, options=None):
        """New episodes of the same tasks; options: `tasks` sets them, `reset_mask` says who starts anew."""
        super().reset(seed=seed)
        options = options or {}
        if "tasks" in options:
            self.tasks = np.array(options["tasks"], dtype=np.float64).reshape(self.tasks.shape)
        mask = options.get("reset_mask", np.ones(self.num_envs, dtype=bool))
        n, nq, nv = int(mask.sum()), self.model.nq, self.model.nv
        self.state[mask] = np.concatenate([                               # Gymnasium's own noise
            np.zeros((n, 1)), self.model.qpos0 + self.np_random.uniform(-0.1, 0.1, (n, nq)),
            0.1 * self.np_random.standard_normal((n, nv))], axis=1)
        self.elapsed[mask] = 0
        return self.observation(), {}

    def step(self, actions):
        actions = np.nan_to_num(np.clip(np.asarray(actions, dtype=np.float64), -1.0, 1.0))
        controls = np.repeat(actions[:, None], self.frame_skip, axis=1)   # (num_envs, frame_skip, nu)
        before = self.state
        self.pool.rollout(self.models, self.datas, before, controls, nstep=self.frame_skip, skip_checks=True,
                          state=self.path)
        after = self.path[:, -1].copy()
        # A simulation that diverges is put back to its start by MuJoCo, clock included: that is how we know.
        # Its episode ends, as a terminal, in the last sound state.
        blown = ~(np.abs(after).max(axis=1) < 1e3) | (np.abs(after[:, 0] - before[:, 0] - self.dt) > 1e-6)
        after[blown] = before[blown]
        self.state, self.elapsed = after, self.elapsed + 1
        velocity = (after[:, 1] - before[:, 1]) / self.dt                 # of the body along x, m/s
        fallen = self.fallen()
        reward = self.reward(velocity, actions, fallen).astype(np.float32)
        return (self.observation(), reward, fallen | blown, self.elapsed >= self.episode_length,
                {"x_velocity": velocity, "blown_up": blown})

    def observation(self):
        return self.state[:, 1 + self.skipped_qpos:].astype(np.float32)

    def fallen(self):
        return np.zeros(self.num_envs, dtype=bool)

    def close_extras(self):
        self.pool.close()


class HalfCheetahVel(MujocoTasks):
    """Run at a hidden velocity, U[0, 3] in training, [3, 4] out of distribution; only r tells of it."""
    xml, splits = "half_cheetah.xml", ("train", "test", "ood")

    def sample_tasks(self, rng):
        return rng.uniform(0.0, 3.0, (self.num_envs, 1))

    def fixed_tasks(self, split):
        low, high = {"test": (0.0, 3.0), "ood": (3.0, 4.0)}[split]
        centres = (np.arange(self.num_envs)[:, None] + 0.5) / self.num_envs   # of equal bins
        return low + (high - low) * centres

    def reward(self, velocity, actions, fallen):
        return -np.abs(velocity - self.tasks[:, 0]) - 0.05 * np.square(actions).sum(axis=1)


class AntDir(MujocoTasks):
    """Go forward (+1) or backward (-1); a torso that leaves a height of [0.2, 1.0] m has fallen."""
    xml, skipped_qpos = "ant.xml", 2

    def sample_tasks(self, rng):
        return rng.choice([-1.0, 1.0], (self.num_envs, 1))

    def fixed_tasks(self, split):
        return np.resize([1.0, -1.0], (self.num_envs, 1))

    def reward(self, velocity, actions, fallen):
        return self.tasks[:, 0] * velocity - 0.5 * np.square(actions).sum(axis=1) + ~fallen

    def fallen(self):
        height = self.state[:, 3]
        return (height < 0.2) | (height > 1.0)


FAMILIES = {"halfcheetah_vel": HalfCheetahVel, "ant_dir": AntDir}


def make_tasks(env, num_tasks, seed=0, split="train") -> VectorEnv:
    """`num_tasks` tasks of a family: drawn with `seed` (train), or fixed whatever the seed (test, ood)."""
    if env not in FAMILIES:
        raise UserError(f"unknown env {env!r}; there are: {', '.join(FAMILIES)}")
    return FAMILIES[env](num_tasks, seed, split)


# 3. Working memory (Sec. 4.1; Sec. 5.1, "Memory Write Logic"; Algorithm 1) --------------------------------

class WorkingMemory:
    """Per task N slots, oldest first: past (s, a, r, eta), then the current (s, PAD, PAD, PAD), then empty.

    PAD is zero. What lies in the empty slots is hidden by the causal mask, because they come last.
    """

    def __init__(self, num_tasks, N, state_size, width, device):
        self.N, self.state_size = N, state_size
        self.slots = torch.zeros(num_tasks, N, width, device=device)
        self.current = torch.zeros(num_tasks, dtype=torch.long, device=device)   # slot of the current step
        self.rows = torch.arange(num_tasks, device=device)

    def begin(self, state):
        """D <- D u (s_next, a_PAD, r_PAD, eta_PAD)."""
        self.slots[self.rows, self.current] = F.pad(state, (0, self.slots.shape[-1] - self.state_size))

    def complete(self, action_reward_eta):
        """B <- B u (s_t, a_t, r_t, eta_t); a full queue drops its oldest memory."""
        self.slots[self.rows, self.current, self.state_size:] = action_reward_eta
        full = self.current == self.N - 1
        self.slots = torch.where(full[:, None, None], self.slots.roll(-1, dims=1), self.slots)
        self.current = self.current + ~full

    def forget(self, mask):
        """The queues of these tasks are empty again."""
        self.current = torch.where(mask, 0, self.current)


def windows(memories, index, start, N, state_size):
    """The queues as they were at some steps of a batch, gathered from its transitions, each stored only once.

    memories (steps, width), task after task; index (M,) the steps; start (M,) the first step that each of
    these remembers -> slots (M, N, width), current (M,).
    """
    current = (index - start).clamp(max=N - 1)
    slot = torch.arange(N, device=index.device)
    source = torch.minimum(index[:, None] - current[:, None] + slot, index[:, None])  # empty: any row will do
    x = memories[source]
    x[..., state_size:] *= (slot < current[:, None])[..., None]                        # PAD: not known yet
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
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.ff1, self.ff2 = nn.Linear(d, d_ff), nn.Linear(d_ff, d)
        self.norm1, self.norm2 = (nn.LayerNorm(d) if layer_norm else nn.Identity() for _ in range(2))

    def forward(self, query, e, visible):
        """Refine query (M, Q, d) by the memories e (M, N, d) that it may see: visible (..., Q, N)."""
        M, Q, d = query.shape

        def split(x):  # (M, n, d) -> (M, heads, n, d / heads)
            return x.view(M, -1, self.heads, d // self.heads).transpose(1, 2)

        q, k, v = split(self.q(query)), split(self.k(e)), split(self.v(e))
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)     # (M, heads, Q, N)
        alpha = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)  # Eq. 4
        mu = (alpha @ v).transpose(1, 2).reshape(M, Q, d)                 # Eq. 5; heads side by side, Eq. 1
        e = self.norm1(query + self.out(mu))
        return self.norm2(e + self.ff2(F.relu(self.ff1(e)))), alpha


class Transformer(nn.Module):
    """e^0 = phi_1 .. phi_N -> e^L: the episodic memory, refined layer by layer."""

    def __init__(self, layers, d, heads, d_ff, tfixup):
        super().__init__()
        self.layers = nn.ModuleList(Layer(d, heads, d_ff, layer_norm=not tfixup) for _ in range(layers))
        for layer in self.layers:
            for linear in (layer.q, layer.k, layer.v, layer.out, layer.ff1, layer.ff2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
            if tfixup:  # Sec. 3.3; its N is the layers, our L
                for linear in (layer.v, layer.out, layer.ff1, layer.ff2):
                    linear.weight.data *= 0.67 * layers ** -0.25

    def forward(self, e, current):
        """e (M, N, d), current (M,) -> the refined memory of the current step (M, d).

        Only that one feeds the heads, so the last layer has a single query. `trace` does without that.
        """
        M, N, _ = e.shape
        slot = torch.arange(N, device=e.device)
        causal = slot[:, None] >= slot                                    # (N, N): i sees j <= i
        for layer in self.layers[:-1]:
            e, _ = layer(e, e, causal)
        now = e[torch.arange(M, device=e.device), current][:, None]       # (M, 1, d)
        visible = (current[:, None] >= slot)[:, None, None]               # (M, 1, 1, N)
        return self.layers[-1](now, e, visible)[0][:, 0]

    def trace(self, e):
        """For figures: the memories of every layer, e^0 .. e^L (M, N, d), and its alpha (M, heads, N, N)."""
        slot = torch.arange(e.shape[1], device=e.device)
        memories, weights = [e], []
        for layer in self.layers:
            e, alpha = layer(e, e, slot[:, None] >= slot)
            memories.append(e)
            weights.append(alpha)
        return memories, weights


# 5. The agent: normaliser, phi, transformer, policy and value heads ---------------------------------------

class Normalizer(nn.Module):
    """Running mean and variance of all observations seen, merged batch by batch (Chan et al.)."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10.0, 10.0)

    def update(self, x):                                                  # (M, size)
        n, total = x.shape[0], self.count + x.shape[0]
        delta = x.mean(dim=0) - self.mean
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


class Agent(nn.Module):
    """TrMRL. To use one: `reset`, then `act` and `observe` in turn, NumPy in and out."""

    def __init__(self, config: Config, state_size, action_low, action_high):
        super().__init__()
        self.config, self.state_size, A, d = config, state_size, len(action_low), config.d_model
        self.trained_steps = 0
        self.register_buffer("action_low", torch.as_tensor(action_low, dtype=torch.float32))
        self.register_buffer("action_high", torch.as_tensor(action_high, dtype=torch.float32))
        self.normalizer = Normalizer(state_size)
        self.width = state_size + A + 2                                   # of (s, a, r, eta)
        self.phi = nn.Linear(self.width, d, bias=False)
        nn.init.xavier_uniform_(self.phi.weight)
        if config.tfixup:  # Sec. 3.3 and T-Fixup's rule for embeddings
            nn.init.normal_(self.phi.weight, std=d ** -0.5 * (9 * config.layers) ** -0.25)
        self.register_buffer("positions", sinusoids(config.memory_length, d))
        self.transformer = Transformer(config.layers, d, config.heads, config.d_ff, config.tfixup)
        self.policy = mlp([d, 64, 64, A], output_scale=0.01)
        self.log_std = nn.Parameter(torch.full((A,), math.log(config.init_std)))
        self.value = mlp([state_size if config.separate_value else d, 64, 64, 1], output_scale=1.0)

    def remember(self, x, current):
        """x (M, N, width), current (M,) -> the episodic memory e^L of the current step (M, d)."""
        return self.transformer(self.phi(x) + self.positions, current)

    def values(self, e, state):
        """Memories (..., d) and normalised states (..., state_size) -> values (...)."""
        return self.value(state if self.config.separate_value else e).squeeze(-1)

    def log_prob(self, mean, action):
        """Of a diagonal Gaussian: (M, A), (M, A) -> (M,)."""
        z = (action - mean) * (-self.log_std).exp()
        return -(0.5 * z ** 2 + self.log_std + 0.5 * math.log(2 * math.pi)).sum(dim=-1)

    def entropy(self):
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()

    # ---- acting: Algorithm 1 is `act` and `observe` in turn ----

    def reset(self, num_tasks, generator=None):
        """Empty memories for so many tasks; `generator` draws the noise of sampled actions."""
        device = self.log_std.device
        self.memory = WorkingMemory(num_tasks, self.config.memory_length, self.state_size, self.width, device)
        self.generator, self.pending = generator, None

    def act(self, obs, sample=False):
        """Observations (B, state_size) -> the policy's mean action (B, A), or a sample of it."""
        return self.step(obs, sample)[0].cpu().numpy()

    def observe(self, action, reward, terminated):
        """Completes the working memory of this step; whose episode is over, also by the clock, starts anew.

        Nothing goes to the device yet: the next `act` takes it along, so there is one transfer per step.
        """
        row = (np.asarray(x, dtype=np.float32).reshape(len(action), -1) for x in (action, reward, terminated))
        self.pending = np.concatenate(list(row), axis=1)

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
            self.memory.complete(torch.cat([action, reward_eta], dim=1))
            if not self.config.keep_memory:
                self.memory.forget(reward_eta[:, 1] > 0)
            self.pending = None
        state = self.normalizer(state)
        self.memory.begin(state)
        e = self.remember(self.memory.slots, self.memory.current)
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
    info: dict                       # what the family tells of each step, (B, T) each

    def returns(self, episodes):
        """Return and success (NaN where a family has none) of the first episodes, (B, episodes) each."""
        which = self.episode[:, :, None] == np.arange(episodes)           # (B, T, episodes)
        success = np.asarray(self.info.get("success", np.full(self.reward.shape, np.nan)), dtype=float)
        return ((self.reward[:, :, None] * which).sum(axis=1),
                np.where(which, success[:, :, None], -np.inf).max(axis=1))


@torch.no_grad()
def collect(agent, envs, episodes, sample, seed, tasks=None) -> Trials:
    """Trials of `episodes` times the family's episode length.

    Whoever falls begins its next episode at once, so a trial with falls has more and shorter episodes, and no
    task ever waits. Memory, GAE and statistics only ask where an episode began.
    """
    device, B, T = agent.log_std.device, envs.num_envs, episodes * envs.episode_length
    env_seed, torch_seed = (int(s) for s in np.random.SeedSequence(seed).generate_state(2))
    agent.reset(B, torch.Generator(device).manual_seed(torch_seed))
    obs, _ = envs.reset(seed=env_seed, options={} if tasks is None else {"tasks": tasks})
    episode = begun = np.zeros(B, dtype=int)
    thoughts, events, infos = [], [], []
    for t in range(T):
        action, mean, e, state = agent.step(obs, sample)
        sent = action.cpu().numpy()
        next_obs, reward, terminated, truncated, info = envs.step(sent)
        done = terminated | truncated
        agent.observe(sent, reward, done)
        thoughts.append((action, mean, e, state))
        events.append((obs, reward.astype(np.float32), terminated, done, episode, begun))
        infos.append(info)
        obs, episode = next_obs, episode + done
        if not agent.config.keep_memory:
            begun = np.where(done, t + 1, begun)
        if done.any() and t + 1 < T:
            obs, _ = envs.reset(options={"reset_mask": done})
    action, mean, e, state = (torch.stack(x, dim=1) for x in zip(*thoughts))
    obs, reward, terminated, done, episode, begun = (np.stack(x, axis=1) for x in zip(*events))
    reward_eta = torch.as_tensor(np.stack([reward, done], axis=-1).astype(np.float32)).to(device)
    memories = torch.cat([state, action.clamp(agent.action_low, agent.action_high), reward_eta], dim=-1)
    return Trials(memories, action, agent.log_prob(mean, action), agent.values(e, state),
                  torch.as_tensor(begun).to(device), obs, reward, terminated, episode,
                  {key: np.stack([info[key] for info in infos], axis=1)
                   for key in ("success", "x_velocity", "blown_up") if key in infos[0]})


# 7. PPO over trials (Sec. 5.1, "Meta-Training") -----------------------------------------------------------

def gae(reward, value, terminated, gamma, lam):
    """Advantages over whole trials, (B, T) each: E episodes are one trajectory with one discounted return.

    - The end of an episode by the clock is none: its last step bootstraps from the first of the next episode.
    - A fall is an end: nothing flows back over it, or falling would be a way to leave a bad episode.
    - The trial is the horizon: nothing comes after it, so its last step has no bootstrap.
    """
    advantage, T = torch.zeros_like(reward), reward.shape[1]
    for t in reversed(range(T)):
        goes_on = 1.0 - terminated[:, t] if t + 1 < T else torch.zeros_like(reward[:, t])
        following = min(t + 1, T - 1)
        delta = reward[:, t] + gamma * goes_on * value[:, following] - value[:, t]
        advantage[:, t] = delta + gamma * lam * goes_on * advantage[:, following]
    return advantage


METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


def ppo_loss(agent, x, current, action, logp_old, advantage, target, config):
    """Loss of a minibatch of M steps, and what to log of it."""
    e = agent.remember(x, current)
    value = agent.values(e, x[torch.arange(len(x), device=x.device), current, :agent.state_size])
    log_ratio = agent.log_prob(agent.policy(e), action) - logp_old
    ratio = log_ratio.exp()                                               # (M,)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    value_loss = (value - target).square().mean()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * agent.entropy()
    with torch.no_grad():
        approx_kl, clip_fraction = (ratio - 1 - log_ratio).mean(), (ratio != clipped).float().mean()
    return loss, (policy_loss, value_loss, agent.entropy(), approx_kl, clip_fraction)


def make_optimizer(agent, config):
    value = list(agent.value.parameters())
    rest = [p for name, p in agent.named_parameters() if not name.startswith("value.")]
    return torch.optim.Adam([{"params": rest, "rate": config.lr}, {"params": value, "rate": config.value_lr}],
                            lr=config.lr, eps=1e-5, fused=True)


def ppo_update(agent, optimizer, trials, config, generator):
    """Epochs of minibatches that mix tasks and time. Only METRICS leave the device, once, at the end."""
    device, N = trials.logp.device, config.memory_length
    B, T = trials.logp.shape
    reward = config.reward_scale * trials.memories[..., -2]
    terminated = torch.as_tensor(trials.terminated, dtype=torch.float32).to(device)
    advantage = gae(reward, trials.value, terminated, config.gamma, config.gae_lambda)
    target = (advantage + trials.value).flatten()
    start = (trials.start + T * torch.arange(B, device=device)[:, None]).flatten()
    memories, action = trials.memories.flatten(0, 1), trials.action.flatten(0, 1)
    logp, advantage = trials.logp.flatten(), advantage.flatten()
    parameters = list(agent.parameters())
    totals, count = torch.zeros(len(METRICS) + 1, device=device), 0
    for _ in range(config.epochs):
        order = torch.randperm(B * T, generator=generator, device=device)
        for index in order.split(config.minibatch):
            if len(index) < config.minibatch:  # an odd rest waits for the next epoch
                continue
            x, current = windows(memories, index, start[index], N, agent.state_size)
            loss, log = ppo_loss(agent, x, current, action[index], logp[index], advantage[index],
                                 target[index], config)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            skip = (~torch.isfinite(norm + loss.detach())).float()
            optimizer.found_inf = skip                                    # fused Adam then changes nothing,
            if device.type != "mps" or not skip:                          # but on mps it does not look at it
                optimizer.step()
            totals += torch.stack([*log, norm, skip]).detach().nan_to_num(0.0, 0.0, 0.0)
            count += 1
    agent.normalizer.update(torch.as_tensor(trials.obs, dtype=torch.float32).to(device).flatten(0, 1))
    *sums, skipped = totals.tolist()
    return dict(zip(METRICS, (x / count for x in sums)), updates=count, skipped=int(skipped))


# 8. Meta-testing (Sec. 5.1, 5.2): frozen weights, mean actions, tasks fixed for all agents and seeds ------

TEST_SEED = 2022                                           # of the starting states


def meta_test(agent, envs, episodes):
    """Return and success (NaN where a family has none) per task and episode, (num_tasks, episodes) each."""
    return collect(agent, envs, episodes, sample=False, seed=TEST_SEED).returns(episodes)


def bootstrap(values, resamples=2000):
    """95 % percentile bootstrap interval of the mean of `values` (n,)."""
    values = np.asarray(values, dtype=float)
    draws = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    return np.quantile(values[draws].mean(axis=1), [0.025, 0.975])


def eval_rows(step, split, returns, success):
    """Rows of eval.csv, one per task and episode."""
    return [{"step": step, "split": split, "task": i, "episode": k + 1, "return": f"{returns[i, k]:.4f}",
             "success": "" if np.isnan(success[i, k]) else int(success[i, k])}
            for i, k in np.ndindex(returns.shape)]


def table(returns, success, tasks):
    """What --eval prints: per episode the mean return over the tasks, its interval, worst and best task."""
    def extreme(r, i):
        return f"{r[i]:.1f} (task {i}: {', '.join(f'{x:.3g}' for x in np.atleast_1d(tasks[i]))})"

    rows = [["episode", "return", "95 % interval", "worst", "best", "success"]]
    for k, r in enumerate(returns.T):
        low, high = bootstrap(r)
        rows.append([str(k + 1), f"{r.mean():.1f}", f"{low:.1f} to {high:.1f}", extreme(r, r.argmin()),
                     extreme(r, r.argmax()), f"{success[:, k].mean():.0%}"])
    if np.isnan(success).any():                            # a family without success
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows)


# 9. Files: run folder, checkpoint, agent. Loading never runs code that a file brings (weights_only). ------

class RunError(Exception):
    """The run cannot go on; what was saved is kept. Shown as one line, exit status 1."""


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
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def csv_text(rows, header):
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def load(path, kind):
    """(content, agent on the CPU) of an agent.pt or checkpoint.pt, or one line on what is wrong with it.

    The agent is built without memory of its own and takes the file's tensors: a forged size costs nothing.
    """
    if not path.is_file():
        raise UserError(f"there is no {path}; train first, or name another run")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:                                      # whatever a damaged or foreign file provokes
        raise UserError(f"{path} is damaged or was not written by trmrl.py; take another file") from None
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise UserError(f"{path} is no {kind} of trmrl.py; take another file")
    if content.get("version") != VERSION:
        raise UserError(f"{path} has version {content.get('version')}, this trmrl.py reads {VERSION}; use "
                        f"the trmrl.py that wrote it")
    try:
        weights = content["weights"]
        config = Config(**content["config"])
        check(config)
        if not all(x.is_floating_point() and x.layout == torch.strided for x in weights.values()):
            raise ValueError("weights that are no numbers")
        mean, low, high = (weights[k] for k in ("normalizer.mean", "action_low", "action_high"))
        if low.shape != high.shape:
            raise ValueError("action bounds of two sizes")
        with torch.device("meta"):
            agent = Agent(config, len(mean), low, high)
        agent.load_state_dict({name: x.float() for name, x in weights.items()}, assign=True)
        agent.trained_steps = int(content["step"])
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, OverflowError) as error:
        reason = (str(error).splitlines() or ["?"])[-1].strip()
        raise UserError(f"{path} holds no agent of this trmrl.py ({reason}); take another file") from None
    return content, agent


def load_agent(path, device="cpu") -> Agent:
    """A trained agent from a run folder or an agent.pt."""
    path = Path(path) / "agent.pt" if Path(path).is_dir() else Path(path)
    return load(path, "agent")[1].to(pick_device(device)).requires_grad_(False)


class Run:
    """All that changes in the course of a run, and its folder.

    Random numbers are drawn from (seed, iteration), so the iteration is also the state of every generator.
    """

    def __init__(self, folder, agent, content=None):
        self.folder, self.agent, self.config = Path(folder), agent, agent.config
        self.optimizer = make_optimizer(agent, agent.config)
        self.iteration, self.seconds, self.last_test = 0, 0.0, "test ?"
        self.csv = {"progress.csv": "", "eval.csv": ""}
        if content:
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": content["optimizer"]["state"], "param_groups": groups})
            self.iteration, self.seconds = int(content["iteration"]), float(content["seconds"])
            self.csv = {name: str(content["csv"][name]) for name in self.csv}
            self.last_test = str(content["last_test"])
            if self.iteration < 0:
                raise ValueError("a negative iteration")
            for p in agent.parameters() if self.iteration else ():  # fused Adam writes without a look
                for moment in (self.optimizer.state[p]["exp_avg"], self.optimizer.state[p]["exp_avg_sq"]):
                    if moment.shape != p.shape or moment.layout != torch.strided:
                        raise ValueError("an optimizer of another size")
        self.snapshot()

    def add_rows(self, name, rows):
        self.csv[name] += csv_text(rows, header=not self.csv[name])

    def append_rows(self):
        """What is new in the csv files, to the disk: all that most iterations write."""
        for name, text in self.csv.items():
            with open(self.folder / name, "ab") as f:
                f.write(text[self.on_disk[name]:].encode())
            self.on_disk[name] = len(text)

    def snapshot(self):
        """The files as they would be now; what the next iteration changes does not touch them."""
        common = {"version": VERSION, "config": asdict(self.config), "weights": self.agent.state_dict(),
                  "step": self.agent.trained_steps}
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
                    "gymnasium": gymnasium.__version__, "mujoco": mujoco.__version__}
        self.files = {
            "checkpoint.pt": packed(kind="checkpoint", **common, optimizer=self.optimizer.state_dict(),
                                    iteration=self.iteration, seconds=self.seconds, csv=self.csv,
                                    last_test=self.last_test),
            "agent.pt": packed(kind="agent", **common),
            "config.json": json.dumps({**asdict(self.config), "versions": versions}, indent=2).encode(),
            **{name: text.encode() for name, text in self.csv.items()}}

    def save(self):
        """The last snapshot, to the disk; rows of an unfinished iteration go, a deleted folder comes back."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            write_atomically(self.folder / name, data)
        self.saved_at, self.on_disk = time.monotonic(), {name: len(text) for name, text in self.csv.items()}


# 10. Meta-training (Sec. 5.1) -----------------------------------------------------------------------------

def pick_device(name):
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    there = ["cpu"] + (["mps"] if torch.backends.mps.is_available() else [])
    if torch.cuda.is_available():
        there += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name not in there:
        raise UserError(f"device {name!r} is not there; this PyTorch has: {', '.join(there)}")
    return torch.device(name)


def set_threads(threads):
    """Of the network and, since the tasks ask PyTorch for the number, of the physics; 0: all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(threads or cores)


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
    if config.d_model % config.heads:
        fit = [h for h in range(1, 33) if config.d_model % h == 0]
        raise UserError(f"--heads {config.heads} does not divide --d-model {config.d_model}; these do: {fit}")
    if config.d_model % 2:
        raise UserError(f"--d-model must be even, for pairs of sine and cosine, not {config.d_model}")
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
    name = f"{config.agent}-seed{config.seed}" + (f"-{config.tag}" if config.tag else "")
    folder = Path(config.run_dir or Path("runs") / config.env / name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already; go on with --resume {folder}, or name another --tag")
    with torch.random.fork_rng(devices=[]):                # the same first weights on every device
        torch.manual_seed(config.seed)
        space = envs.single_action_space
        agent = Agent(config, envs.single_observation_space.shape[0], space.low, space.high)
    return Run(folder, agent.to(config.device))


def train(config: Config, make_tasks=make_tasks, resume=None) -> Agent:
    """Meta-train on the tasks of `make_tasks`; `resume`: a run folder to go on with (`config` is its own)."""
    check(config)
    set_threads(config.threads)
    config = replace(config, device=str(pick_device(config.device)), threads=torch.get_num_threads())
    envs = make_tasks(config.env, config.num_tasks, config.seed, "train")
    batch = config.num_tasks * config.episodes_per_trial * envs.episode_length
    if config.minibatch > batch:
        raise UserError(f"--minibatch {config.minibatch} is more than a batch: {config.num_tasks} tasks x "
                        f"{config.episodes_per_trial} episodes x {envs.episode_length} steps = {batch}")
    tests = {"test": make_tasks(config.env, config.eval_tasks, config.seed, "test")}
    try:
        tests["ood"] = make_tasks(config.env, config.eval_tasks, config.seed, "ood")
    except ValueError:                                     # a split that not every family has
        pass
    run = open_run(config, envs, resume)
    run.save()
    last = math.ceil(config.total_steps / batch)
    if run.iteration >= last:
        print(f"{run.folder} is finished, after {run.iteration * batch:,} steps")
        return run.agent
    print(f"{config.env}, {config.agent}, seed {config.seed}: {last} iterations of {batch:,} steps, "
          f"device {config.device}, {config.threads} threads, to {run.folder}", flush=True)
    try:
        while run.iteration < last:
            iterate(run, envs, tests, last, batch)
            every, waited = config.checkpoint_every, time.monotonic() - run.saved_at > 30
            due = run.iteration % every == 0 if every else waited
            run.save() if due or run.iteration == last else run.append_rows()
    except BaseException as error:                         # keep the last finished iteration, whatever it was
        try:
            run.save()
        except OSError as trouble:
            raise RunError(f"cannot write {run.folder} ({trouble.strerror}); its last checkpoint is whole: "
                           f"--resume {run.folder}") from None
        if not isinstance(error, RunError):
            print(f"\nstopped; go on with: python trmrl.py --resume {run.folder}", file=sys.stderr)
        raise
    finally:
        for each in (envs, *tests.values()):
            each.close()
    return run.agent


def iterate(run, envs, tests, last, batch):
    """One iteration: new tasks, a trial of each, a PPO update; now and then a meta-test."""
    config, agent, began = run.config, run.agent, time.monotonic()
    for group in run.optimizer.param_groups:
        group["lr"] = group["rate"] * (1 - (1 - config.final_lr) * run.iteration / last)
    seeds = [int(s) for s in np.random.SeedSequence([config.seed, run.iteration]).generate_state(3)]
    tasks = envs.sample_tasks(np.random.default_rng(seeds[0]))
    trials = collect(agent, envs, config.episodes_per_trial, sample=True, seed=seeds[1], tasks=tasks)
    generator = torch.Generator(agent.log_std.device).manual_seed(seeds[2])
    metrics = ppo_update(agent, run.optimizer, trials, config, generator)
    if 2 * metrics["skipped"] > metrics["updates"]:
        raise RunError(f"{metrics['skipped']} of {metrics['updates']} gradient steps of iteration "
                       f"{run.iteration + 1} were not finite; start anew with a lower --lr")
    speed = batch / (time.monotonic() - began)
    run.iteration += 1
    agent.trained_steps = run.iteration * batch
    if run.iteration % config.eval_every == 0 or run.iteration == last:
        for split, test_envs in tests.items():
            episodes = config.final_episodes if run.iteration == last else config.eval_episodes
            returns, success = meta_test(agent, test_envs, episodes)
            run.add_rows("eval.csv", eval_rows(agent.trained_steps, split, returns, success))
            if split == "test":
                run.last_test = f"test {returns[:, 0].mean():.1f}"
    run.seconds += time.monotonic() - began
    returns, success = trials.returns(config.episodes_per_trial)
    row = {"iteration": run.iteration, "step": agent.trained_steps, "seconds": run.seconds,
           "steps_per_second": speed, "train_return": returns.mean().item(),
           "train_success": success.mean().item(), **metrics, "std": agent.log_std.exp().mean().item(),
           "lr": run.optimizer.param_groups[0]["lr"], "blown_up": int(np.sum(trials.info.get("blown_up", 0)))}
    run.add_rows("progress.csv", [{k: v if type(v) is int else "" if math.isnan(v) else f"{v:.6g}"
                                   for k, v in row.items()}])
    run.snapshot()
    left = (last - run.iteration) * run.seconds / run.iteration
    line = (f"{agent.trained_steps / 1e6:.3f} of {last * batch / 1e6:.3f} M steps   {speed:,.0f} steps/s   "
            f"{int(left // 60)}:{int(left % 60):02d} left   train {returns.mean():.1f}   {run.last_test}")
    if sys.stdout.isatty():                                # one live line; plain lines in a pipe
        end = "\n" if run.iteration == last else ""
        print("\r\033[K" + line[:shutil.get_terminal_size().columns - 1], end=end, flush=True)
    else:
        print(line, flush=True)


# 11. Command line -----------------------------------------------------------------------------------------

AGENTS = ("trmrl",)
PRESETS = {                                                # per env what differs from Config's defaults
    "halfcheetah_vel": {
        "default": {},
        "paper": dict(layers=4, d_model=128, heads=16, d_ff=512, separate_value=True, total_steps=20_000_000,
                      clip=0.1, epochs=10, minibatch=256, lr=3e-5, value_lr=2.5e-4, final_lr=0.1,
                      reward_scale=1.0),
    },
    "ant_dir": {
        "default": dict(gamma=0.97, gae_lambda=0.9, reward_scale=0.03, init_std=0.5),
        "paper": dict(layers=4, d_model=128, heads=16, d_ff=512, total_steps=20_000_000, epochs=10,
                      minibatch=256, gamma=0.92, reward_scale=1.0, init_std=0.5, lr=3e-5, value_lr=3e-5,
                      final_lr=0.1),
    },
}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message)


def parse(argv):
    """(what was typed, the Config that it makes)."""
    early = Parser(add_help=False, allow_abbrev=False)
    early.add_argument("--env", default=Config.env)
    early.add_argument("--preset", default="default")
    chosen, _ = early.parse_known_args(argv)
    if chosen.env not in PRESETS:
        raise UserError(f"unknown env {chosen.env!r}; there are: {', '.join(PRESETS)}")
    if chosen.preset not in PRESETS[chosen.env]:
        raise UserError(f"unknown preset {chosen.preset!r}; there are: {', '.join(PRESETS[chosen.env])}")
    preset = PRESETS[chosen.env][chosen.preset]
    parser = Parser(description="TrMRL: meta-train, or meta-test, an agent that adapts to new tasks.",
                    allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--eval", metavar="RUN_OR_AGENT", help="meta-test a trained agent")
    parser.add_argument("--split", help="with --eval: test, ood or train tasks (default: test)")
    parser.add_argument("--episodes", type=int, help="with --eval: episodes per task (default: 6)")
    parser.add_argument("--csv", metavar="FILE", help="with --eval: write the rows to this file")
    parser.add_argument("--resume", metavar="RUN_FOLDER", help="go on with a run")
    parser.add_argument("--preset", help="default, or paper: sizes and schedule of the paper's release")
    for f in fields(Config):
        kind = {"action": argparse.BooleanOptionalAction} if type(f.default) is bool else \
            {"type": type(f.default), "metavar": type(f.default).__name__.upper()}
        help = f"{f.metadata['help']} (default: {preset.get(f.name, f.default)})"
        parser.add_argument("--" + f.name.replace("_", "-"), help=help.replace("%", "%%"), **kind)
    typed = vars(parser.parse_args(argv))
    names = {f.name for f in fields(Config)}
    return typed, Config(**{**preset, **{k: v for k, v in typed.items() if k in names}})


def refuse_others(typed, *allowed):
    """A flag without a meaning here is a mistake."""
    for name in typed.keys() - set(allowed):
        mode = f"with --{allowed[0]}" if allowed[0] in typed else "without --eval"
        raise UserError(f"--{name.replace('_', '-')} has no meaning {mode}")


def evaluate(typed, config):
    """--eval: meta-test an agent and print the table."""
    refuse_others(typed, "eval", "split", "episodes", "csv", "device", "threads", "eval_tasks")
    split, episodes = typed.get("split", "test"), typed.get("episodes", 6)
    if not 1 <= episodes <= 1000:
        raise UserError(f"--episodes must be between 1 and 1000, not {episodes}")
    check(config)
    set_threads(config.threads)
    agent = load_agent(typed["eval"], config.device)
    if agent.config.env not in FAMILIES:
        raise UserError(f"{typed['eval']} was trained on {agent.config.env!r}, which is not in this trmrl.py")
    envs = make_tasks(agent.config.env, config.eval_tasks, TEST_SEED, split)
    sizes = (*envs.single_observation_space.shape, *envs.single_action_space.shape)
    if sizes != (agent.state_size, len(agent.log_std)):
        raise UserError(f"{typed['eval']} was trained on another body than {agent.config.env} has")
    returns, success = meta_test(agent, envs, episodes)
    print(f"{agent.config.agent} after {agent.trained_steps:,} steps of {agent.config.env}, on "
          f"{config.eval_tasks} {split} tasks:")
    print(table(returns, success, envs.tasks))
    if "csv" in typed:
        rows = eval_rows(agent.trained_steps, split, returns, success)
        Path(typed["csv"]).write_text(csv_text(rows, header=True))


def main(argv=None):
    """Exit status: 0, or 1 the run broke, 2 a mistake of the user's, 130 or 143 stopped by a signal."""
    def stop(number, frame):
        signal.signal(signal.SIGINT, signal.SIG_DFL)       # a second Ctrl-C ends at once
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        typed, config = parse(sys.argv[1:] if argv is None else argv)
        if "eval" in typed:
            evaluate(typed, config)
        elif "resume" in typed:
            refuse_others(typed, "resume", "device", "threads")
            _, agent = load(Path(typed["resume"]) / "checkpoint.pt", "checkpoint")
            folder = typed.pop("resume")
            train(replace(agent.config, **typed), resume=folder)
        else:
            refuse_others(typed, "preset", *(f.name for f in fields(Config)))
            train(config)
    except (UserError, RunError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        print(f"trmrl.py: {str(error) or 'out of memory'}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
