# SPDX-License-Identifier: MIT
"""The claims of the paper and of this project, each against something independent. Run: pytest

1. The paper's claims   the transformer, T-Fixup, the memory, Theorem 1, PPO, and that it learns
2. Tasks                half-cheetah and ant against Gymnasium, the robot arm against MetaWorld
3. Runs and faults      files, resume, signals, full disks, hostile files, several processes
4. The command line     flags, mistakes, help, progress, --eval
5. Figures              what plots.py draws

The tests of the baselines, the documents and the homework are in baselines/ and docs/.
"""

import atexit
import collections
import contextlib
import copy
import csv
import importlib
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import tracemalloc
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plots
import trmrl

torch.set_num_threads(1)  # everything here is small
HERE = Path(__file__).parent

SMALL = dict(device="cpu", layers=2, d_model=16, heads=2, memory_length=5, init_std=0.5)
SMALL |= dict(gamma=0.93, gae_lambda=0.8, minibatch=64, epochs=3, lr=1e-3, value_lr=3e-3)


class PointMass(trmrl.TaskFamily):
    """Find a hidden goal on the unit circle. The reward is minus the distance to the goal.

    Without adapting, the best place is the centre of the circle: -1 per step, -20 in all.
    """

    episode_length = 20

    def __init__(self, num_tasks, seed=0, split="train"):
        self.x = np.zeros((num_tasks, 2))
        super().__init__(num_tasks, seed, split, state_size=2, action_size=2)

    def sample_tasks(self, rng, n):
        return rng.uniform(0.0, 2 * np.pi, (n, 1))

    def fixed_tasks(self, split, n):
        return 2 * np.pi * np.arange(n)[:, None] / n

    def begin(self, mask):
        self.x[mask] = 0.0

    def advance(self, actions):
        self.x = self.x + 0.25 * actions
        angle = self.tasks[:, -1]
        goal = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        reward = -np.linalg.norm(self.x - goal, axis=1)
        return reward, np.zeros(self.num_envs, dtype=bool), {}

    def observation(self):
        return self.x


def make_points(env, num_tasks, seed=0, split="train"):
    return PointMass(num_tasks, seed, split)


class RoughPointMass(PointMass):
    """It falls at random. Its diary says what happened at each step."""

    def __init__(self, num_tasks):
        self.diary = collections.defaultdict(list)
        super().__init__(num_tasks)

    def advance(self, actions):
        reward, _, _ = super().advance(actions)
        falls = self.np_random.random(self.num_envs) > 0.96
        return reward, falls, {"success": reward > -0.8}

    def step(self, actions):
        event = dict(state=self.x, action=np.clip(actions, -1.0, 1.0))
        result = super().step(actions)
        event |= dict(zip(("next_state", "reward", "terminated", "truncated"), result)) | result[-1]
        for name, value in event.items():
            self.diary[name].append(np.array(value))
        return result


def play(agent, rows=8):
    """Buffer of 60 steps of a rough point mass, and its diary: arrays (rows, 60, ...)."""
    envs = RoughPointMass(rows)
    buffer = trmrl.collect(agent, envs, envs.tasks, 60, sample=True, seed=0)
    diary = {name: np.stack(values, axis=1) for name, values in envs.diary.items()}
    diary["done"] = diary["terminated"] | diary["truncated"]
    assert diary["terminated"].any() and diary["truncated"].any()
    return buffer, diary


def make_agent(sizes=(2, 2, 1), **settings):
    """A small agent. Its policy is random and not near zero, so that differences show."""
    torch.manual_seed(0)
    agent = trmrl.TrMRL(trmrl.Config(**SMALL | settings), sizes)
    nn.init.normal_(agent.policy_head[-1].weight, std=0.3)
    agent.normalizer.update(0.3 + 0.7 * torch.randn(100, sizes[0]))
    return agent


def assert_same(ours, expected, claim, tolerance=1e-5):
    """Equal up to rounding; otherwise the claim says in words what is wrong."""
    ours, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, expected))
    limits = dict(rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours, expected, **limits, msg=lambda why: f"{claim}\n{why}")


# ---- 1. The paper's claims -----------------------------------------------------------------------
#
# The transformer (Sec. 3.2, 4.2, 4.3).


def as_trained(module):
    """Biases and norms are no longer 0 and 1 after some training."""
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def refine_all(transformer, e):
    """e^L of every slot, (M, N, d): each slot in turn is the current one."""
    M, N, d = e.shape
    current = torch.arange(N).repeat(M)
    return transformer(e.repeat_interleave(N, dim=0), current).view(M, N, d)


@pytest.mark.parametrize("tfixup", [True, False])
@pytest.mark.parametrize("layers, N", [(1, 5), (3, 1), (3, 2), (2, 25)])
def test_future_memories_do_not_change_the_present(layers, N, tfixup):
    torch.manual_seed(N)
    transformer = as_trained(trmrl.Transformer(layers, 16, 4, tfixup))
    e = torch.randn(2, N, 16)
    before = refine_all(transformer, e)
    for j in range(N):
        changed = e.clone()
        changed[:, j] += torch.randn(2, 16)
        difference = (refine_all(transformer, changed) - before).abs().amax(dim=(0, 2))
        for i in range(N):
            if j > i:
                assert difference[i] == 0, f"slot {i} sees slot {j}: the future leaks"
            else:
                assert difference[i] > 1e-6, f"slot {i} does not see slot {j}: the past is lost"


def test_with_layer_norm_it_is_the_encoder_of_pytorch():
    torch.manual_seed(2)
    d, heads, layers, N = 24, 4, 3, 6
    ours = as_trained(trmrl.Transformer(layers, d, heads, tfixup=False))
    layer = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.0, batch_first=True)
    theirs = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    for a, b in zip(ours.layers, theirs.layers):
        weights = [a.query.weight, a.key.weight, a.value.weight]
        biases = [a.query.bias, torch.randn(d), a.value.bias]  # any bias of the keys cancels
        b.self_attn.in_proj_weight.data = torch.cat(weights).data
        b.self_attn.in_proj_bias.data = torch.cat(biases).data
        targets = (b.self_attn.out_proj, b.linear1, b.linear2, b.norm1, b.norm2)
        for source, target in zip((a.out, a.ff1, a.ff2, a.norm1, a.norm2), targets):
            target.load_state_dict(source.state_dict())

    e = torch.randn(5, N, d)
    mask = nn.Transformer.generate_square_subsequent_mask(N)
    expected = theirs(e, mask=mask, is_causal=True)
    assert_same(refine_all(ours, e), expected, "not PyTorch's post-LN encoder", 1e-4)


@pytest.mark.parametrize("layers, heads, N", [(1, 4, 7), (2, 1, 1), (3, 8, 2), (2, 2, 25)])
def test_with_t_fixup_it_is_equations_1_4_and_5(layers, heads, N):
    """Here every slot is a query in every layer. In trmrl.py the last layer has one query only."""
    torch.manual_seed(1)
    d = 32
    transformer = as_trained(trmrl.Transformer(layers, d, heads, tfixup=True))
    e = torch.randn(6, N, d)
    x = e
    for layer in transformer.layers:
        q, k, v = (f(x).view(6, N, heads, -1) for f in (layer.query, layer.key, layer.value))
        similarity = torch.einsum("mihk,mjhk->mhij", q, k) / math.sqrt(d / heads)
        weight = similarity.exp() * torch.ones(N, N).tril()
        alpha = weight / weight.sum(dim=-1, keepdim=True)  # Eq. 4
        mu = torch.einsum("mhij,mjhk->mihk", alpha, v)  # Eq. 5
        x = x + layer.out(mu.reshape(6, N, d))  # Eq. 1: heads side by side, then W_o
        x = x + layer.ff2(layer.ff1(x).clamp(min=0.0))

    ours = refine_all(transformer, e)
    assert_same(ours, x, "the refined memories are not those of Eq. 1, 4 and 5")
    parameters = list(transformer.parameters())
    slopes = [torch.autograd.grad(y.square().mean(), parameters) for y in (ours, x)]
    for a, b in zip(*slopes):
        assert_same(a, b, "the gradients are not those of Eq. 1, 4 and 5")


def test_positions_are_sinusoids_and_tell_old_memories_from_new_ones():
    positions = trmrl.sinusoids(7, 8)
    for n, i in np.ndindex(7, 4):
        angle = n / 10_000 ** (2 * i / 8)
        expected = [math.sin(angle), math.cos(angle)]
        assert_same(positions[n, 2 * i : 2 * i + 2], expected, f"numbers of slot {n}")

    agent = make_agent(layers=1)
    buffer = agent.new_buffer(1, 4, torch.Generator())
    buffer.token.normal_()
    swapped = copy.deepcopy(buffer)
    swapped.token[:, [0, 1]] = buffer.token[:, [1, 0]]
    for positions in (agent.positions.clone(), 0.0):
        agent.positions[:] = positions
        a, b = (agent.act(x, 3, sample=False)[0] for x in (buffer, swapped))
        differ = (a - b).abs().max() > 1e-3
        assert differ == torch.is_tensor(positions), "positions alone must tell which is older"


# T-Fixup (Sec. 3.3).


@pytest.mark.parametrize("tfixup", [True, False])
@pytest.mark.parametrize("L", [1, 4, 12])
def test_every_weight_has_the_size_that_section_3_3_says(L, tfixup):
    d = 128
    agent = make_agent((60, 20, 1), layers=L, d_model=d, heads=4, tfixup=tfixup)
    scale = 0.67 * L**-0.25 if tfixup else 1.0

    def xavier(inputs, outputs):
        return math.sqrt(2 / (inputs + outputs))

    expected = {"query": xavier(d, d), "key": xavier(d, d)}
    expected |= {"value": scale * xavier(d, d), "out": scale * xavier(d, d)}
    expected |= {"ff1": scale * xavier(d, 4 * d), "ff2": scale * xavier(4 * d, d)}
    for layer in agent.transformer.layers:
        for name, std in expected.items():
            linear = getattr(layer, name)
            assert linear.weight.std().item() == pytest.approx(std, rel=0.03), f"size of {name}"
            assert linear.bias is None or not linear.bias.any(), f"bias of {name} is not 0"
    std = d**-0.5 * (9 * L) ** -0.25 if tfixup else xavier(60 + 20 + 2, d)
    assert agent.phi.weight.std().item() == pytest.approx(std, rel=0.03), "size of phi"
    has_norm = any(isinstance(module, nn.LayerNorm) for module in agent.modules())
    assert has_norm != tfixup, "T-Fixup replaces layer normalisation"


def depth_growth(scaled):
    """Twelve layers without layer norm: the size of e^12, and its change by one step of Adam."""
    torch.manual_seed(0)
    transformer = trmrl.Transformer(12, 64, 4, tfixup=True)
    for layer in () if scaled else transformer.layers:
        for linear in (layer.value, layer.out, layer.ff1, layer.ff2):
            nn.init.xavier_uniform_(linear.weight)
    e, current = 0.3 * torch.randn(64, 5, 64), torch.full((64,), 4)
    optimizer = torch.optim.Adam(transformer.parameters(), lr=1e-3)
    before = transformer(e, current)
    before.mean().backward()
    optimizer.step()
    size = before.norm(dim=-1).mean() / e[:, -1].norm(dim=-1).mean()
    return size.item(), (transformer(e, current) - before).norm(dim=-1).mean().item()


def test_t_fixup_bounds_twelve_layers_without_layer_norm():
    size, change = depth_growth(scaled=True)
    plain_size, plain_change = depth_growth(scaled=False)
    assert size < 4, "with T-Fixup, memories still grow from layer to layer"
    assert change < 15, "with T-Fixup, one step of Adam still changes everything"
    assert plain_size > 20 and plain_change > 5 * change, "plain Xavier would do as well"


# Working memory (Sec. 4.1, "Memory Write Logic" of Sec. 5.1, Algorithm 1).


def algorithm_1(agent, diary, row):
    """Brute force: what each step of a row sees, a list of tensors (n <= N, S + A + 2).

    The second list is what the next state would see if the episode went on.
    """
    buffer = collections.deque(maxlen=agent.config.memory_length - 1)
    seen, next_seen = [], []

    def with_pad(state):
        return torch.cat([agent.normalizer(torch.tensor(state).float()), torch.zeros(4)])

    event = {name: values[row] for name, values in diary.items()}
    for t, done in enumerate(event["done"]):
        seen.append(torch.stack([*buffer, with_pad(event["state"][t])]))
        s, a, r = seen[-1][-1, :2], event["action"][t], event["reward"][t]
        transition = torch.cat([s, torch.tensor([*a, r, 0.0])])
        buffer.append(transition)
        next_seen.append(torch.stack([*buffer, with_pad(event["next_state"][t])]))
        transition[-1] = float(done)
        if done and not agent.config.keep_memory:
            buffer.clear()
    return seen, next_seen


def value_of(agent, memories):
    """The value of one step that sees these memories (n, S + A + 2), without empty slots."""
    e = agent.phi(memories) + agent.positions[: len(memories)]
    e = agent.transformer(e[None], torch.tensor([len(memories) - 1]))
    return agent.value_head(e).item()


@pytest.mark.parametrize("keep_memory", [False, True])
@pytest.mark.parametrize("N", [1, 2, 5, 50])
def test_the_memory_is_the_queue_of_algorithm_1(N, keep_memory):
    """Nothing else is remembered: neither other rows nor empty slots change a value."""
    agent = make_agent(memory_length=N, keep_memory=keep_memory)
    buffer, diary = play(agent)
    assert (buffer.action.abs() > 1).any(), "only the memory clips actions, as the physics does"
    for row in range(8):
        seen, _ = algorithm_1(agent, diary, row)
        slots, current = trmrl.window(buffer, torch.full((60,), row), torch.arange(60), N)
        for t, memories in enumerate(seen):
            same = torch.equal(slots[t, : current[t] + 1], memories)
            where = f"step {t} of row {row}"
            assert same, f"{where}: Algorithm 1 has\n{memories}, but the memory has\n{slots[t]}"
        values = [value_of(agent, memories) for memories in seen]
        assert_same(buffer.value[row], values, f"row {row} acts on more than its own memories")


def test_pad_is_zero_whatever_the_buffer_holds():
    buffer = make_agent().new_buffer(2, 8, torch.Generator())
    buffer.token.fill_(math.inf)
    buffer.state.fill_(1.0)
    buffer.memory_start[0, 3:] = 3  # in row 0 an episode ends with step 2
    row, t = torch.arange(16) // 8, torch.arange(16) % 8
    slots, current = trmrl.window(buffer, row, t, N=4)
    expected = [0, 1, 2, 0, 1, 2, 3, 3, 0, 1, 2, 3, 3, 3, 3, 3]
    assert current.tolist() == expected, "the current step is in another slot"
    for memories, now in zip(slots[..., 2:], current):
        assert (memories[now:] == 0).all(), "PAD is not zero: an infinite reward shines through"
        assert memories[:now].isinf().all(), "a past memory was overwritten by PAD"


# Theorem 1 (Sec. 4.3, App. F). The paper calls alpha the posterior over the candidates v.


@torch.no_grad()
def test_theorem_1_holds_for_cosine_similarity_but_not_for_dot_products():
    """The Bayes risk of an answer is minus its expected similarity to the right candidate."""
    torch.manual_seed(0)
    layer = trmrl.Layer(8, 1, layer_norm=False)
    for _ in range(200):
        e = torch.randn(6, 8)
        v = layer.value(e)
        alpha = torch.softmax(layer.key(e) @ layer.query(e[-1]) / math.sqrt(8), dim=0)
        unit = v / v.norm(dim=-1, keepdim=True)
        consensus = alpha @ unit
        risk = -alpha @ torch.cosine_similarity(unit, consensus[None])
        assert risk <= (-alpha @ (unit @ unit.T)).min() + 1e-6, "Theorem 1 fails for unit vectors"
        assert_same(risk, -consensus.norm(), "the risk of the consensus is minus its length")
        risk = -alpha @ (v @ (alpha @ v))
        assert risk > (-alpha @ (v @ v.T)).min(), "Theorem 1 holds for dot products after all"


# Advantages and returns ("Meta-Training" of Sec. 5.1).


def brute_force_gae(reward, value, end_value, ends, gamma=0.93, lam=0.8):
    """By definition: the mean of all n-step estimates up to the end, with weights lambda^n."""
    advantage = np.zeros(reward.shape)
    for row, t in np.ndindex(reward.shape):
        end = t
        while not ends[row, end]:
            end += 1
        estimates = []
        for n in range(1, end - t + 2):
            rewards = sum(gamma**i * reward[row, t + i] for i in range(n))
            next_value = value[row, t + n] if t + n <= end else end_value[row, end]
            estimates.append(rewards + gamma**n * next_value - value[row, t])
        weights = (1 - lam) * lam ** np.arange(len(estimates))
        weights[-1] /= 1 - lam
        advantage[row, t] = weights @ estimates
    return advantage


def test_gae_is_the_weighted_mean_of_all_n_step_estimates():
    rng = np.random.default_rng(0)
    reward, value, end_value = rng.normal(size=(3, 5, 40))
    ends = rng.random((5, 40)) < 0.1
    ends[:, -1] = True
    next_value = np.where(ends, end_value, np.roll(value, -1, axis=1))
    inputs = [torch.tensor(x) for x in (reward, value, next_value, ends)]
    expected = brute_force_gae(reward, value, end_value, ends)
    assert_same(trmrl.gae(*inputs, 0.93, 0.8), expected, "not GAE by its definition")


@pytest.mark.parametrize("keep_memory", [False, True])
def test_a_time_limit_bootstraps_and_a_fall_is_worth_nothing(keep_memory):
    """With --keep-memory, values also flow from an episode to the next one of the trial."""
    agent = make_agent(keep_memory=keep_memory)
    buffer, diary = play(agent)
    ends = diary["terminated"] | (diary["truncated"] & (not keep_memory))
    ends[:, -1] = True
    end_value = np.zeros(ends.shape)
    for row, t in np.argwhere(ends & ~diary["terminated"]):
        end_value[row, t] = value_of(agent, algorithm_1(agent, diary, row)[1][t])

    reward = diary["reward"].astype(np.float64)
    reward *= (1 - 0.93) / np.sqrt(np.mean(reward**2))
    value = buffer.value.double().numpy()
    expected = brute_force_gae(reward, value, end_value, ends)
    advantage, returns = trmrl.advantages_and_targets(agent, buffer)
    assert_same(returns, expected + value, "wrong returns: look where a trajectory ends")
    standardised = (expected - expected.mean()) / expected.std()
    assert_same(advantage, standardised, "advantages must have mean 0 and deviation 1", 1e-4)


def test_rewards_of_any_unit_give_the_same_advantages():
    """Rewards are scaled by 1 - gamma over the root mean square of all rewards so far."""
    buffer, _ = play(make_agent())
    rewards = [np.random.default_rng(i).exponential(1.0 + i, size=(8, 60)) for i in range(3)]
    results = []
    for unit in (1.0, 1e-2, 1e3):
        agent = make_agent()
        for reward in rewards:
            buffer.reward[:] = torch.tensor(unit * reward)
            advantage, returns = trmrl.advantages_and_targets(agent, buffer)
        results.append(torch.cat([advantage, returns]))
        assert_same(results[-1], results[0], f"rewards in units of {unit} give others", 1e-3)

    inputs = [buffer.value, buffer.end_value, buffer.trajectory_ends]
    scaled = (1 - 0.93) / np.sqrt(np.mean(np.square(rewards))) * rewards[-1]
    expected = brute_force_gae(scaled, *(x.numpy() for x in inputs)) + buffer.value.numpy()
    assert_same(results[0][8:], expected, "not scaled by all rewards so far", 1e-4)


# PPO ("Meta-Training" of Sec. 5.1).


def test_the_loss_is_the_clipped_objective_of_ppo():
    old_log_prob = torch.tensor([-1.0, -2.0, 0.5, 0.1, -0.3, 0.0])
    log_prob = old_log_prob + torch.tensor([0.3, 0.3, -0.3, -0.3, 0.05, -0.05])
    advantage = torch.tensor([1.0, -1.5, 2.0, -0.5, 0.7, -0.2])
    value = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 0.3])
    returns = torch.tensor([0.5, 1.0, 0.0, -2.0, 0.4, 0.9])
    steps = []
    for old, new, A, V, R in torch.stack([old_log_prob, log_prob, advantage, value, returns], 1):
        ratio = math.exp(new - old)
        objective = min(ratio * A, min(max(ratio, 0.9), 1.1) * A)
        steps.append([0.5 * (V - R) ** 2 - objective, ratio - 1 - (new - old)])
    expected = np.mean(steps, axis=0)
    loss, metrics = trmrl.ppo_loss(log_prob, value, old_log_prob, advantage, returns, clip=0.1)
    assert_same(loss, expected[0], "not the clipped objective and half the squared value error")
    assert_same(metrics["approx_kl"], expected[1], "not the mean of ratio - 1 - log(ratio)")
    assert_same(metrics["clip_fraction"], 4 / 6, "four of these six ratios are clipped")


def test_the_policy_is_a_gaussian():
    agent = make_agent().requires_grad_(False)
    agent.log_std.data = torch.tensor([-0.7, 0.4])
    buffer = agent.new_buffer(20_000, 1, torch.Generator().manual_seed(0))
    buffer.token.normal_()
    mean, _, _ = agent.act(buffer, 0, sample=False)
    action, log_prob, _ = agent.act(buffer, 0, sample=True)
    noise = action - mean
    assert_same(noise.mean(dim=0), [0.0, 0.0], "samples are not around the mean", 0.03)
    assert_same(noise.std(dim=0).log(), agent.log_std, "samples have another deviation", 0.03)
    expected = torch.distributions.Normal(mean, agent.log_std.exp()).log_prob(action).sum(dim=-1)
    assert_same(log_prob, expected, "not the log_prob of a Gaussian", 1e-4)


def test_an_update_is_plain_adam_over_shuffled_minibatches():
    config = trmrl.Config(**SMALL, max_grad_norm=0.3)
    run = trmrl.Run("unused", config, make_points, trmrl.TrMRL)
    agent = run.agent
    buffer, diary = play(agent)  # 480 steps: 7 minibatches of 64, and 32 steps are left over
    twin = copy.deepcopy(agent)
    minibatches, counts = [], set()
    agent.register_forward_pre_hook(lambda _, inputs: minibatches.append(inputs[1:]))
    agent.register_forward_pre_hook(lambda *_: counts.add(agent.normalizer.count.item()))
    metrics = agent.update(buffer, run.optimizer, torch.Generator().manual_seed(0))
    assert metrics["updates"] == len(minibatches) == 3 * 7, "7 whole minibatches in each epoch"
    for epoch in range(3):
        chosen = [60 * row + t for row, t in minibatches[7 * epoch : 7 * epoch + 7]]
        assert len(torch.cat(chosen).unique()) == 7 * 64, "an epoch uses a step twice"
        assert all(len((x // 60).unique()) == 8 for x in chosen), "minibatches must mix the tasks"

    advantage, returns = trmrl.advantages_and_targets(twin, buffer)
    value_head = list(twin.value_head.parameters())
    others = [p for name, p in twin.named_parameters() if not name.startswith("value_head.")]
    groups = [dict(params=others, lr=1e-3), dict(params=value_head, lr=3e-3)]
    adam = torch.optim.Adam(groups, eps=1e-5, foreach=False)
    norms, kls = [], []
    for row, t in minibatches:
        old = buffer.log_prob[row, t], advantage[row, t], returns[row, t]
        mean, value = twin(buffer, row, t)
        log_prob = trmrl.gaussian_log_prob(mean, twin.log_std, buffer.action[row, t])
        loss, expected = trmrl.ppo_loss(log_prob, value, *old, clip=0.2)
        kls.append(expected["approx_kl"].item())
        adam.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(twin.parameters(), 0.3).item())
        adam.step()
    assert abs(kls[0]) < 1e-6 < kls[1], "a step is learned from other memories than it was acted on"
    assert max(norms) > 0.3
    assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-3)
    for (name, ours), expected in zip(agent.named_parameters(), twin.parameters()):
        assert_same(ours, expected, f"{name} is not what plain Adam makes of it", 1e-4)
    explained = 1 - ((returns - buffer.value).var() / returns.var()).item()
    assert metrics["explained_variance"] == pytest.approx(explained, abs=1e-5)

    assert counts == {0}, "observation statistics change while PPO still needs the old ones"
    states = diary["state"].reshape(-1, 2)
    assert_same(agent.normalizer.mean, states.mean(axis=0), "mean of all observations")
    assert_same(agent.normalizer.var, states.var(axis=0), "variance of all observations")


def test_the_normaliser_knows_all_data_whatever_the_batching():
    data = np.random.default_rng(0).normal([3.0, -50.0, 0.0], [0.1, 20.0, 1.0], (1000, 3))
    for sizes in ([1000], [1, 2, 3, 994], [500, 1, 499], [100] * 10):
        normalizer = trmrl.RunningStats(3)
        for batch in np.split(data.astype(np.float32), np.cumsum(sizes)[:-1]):
            normalizer.update(torch.tensor(batch))
        assert_same(normalizer.mean, data.mean(axis=0), f"the mean of batches of {sizes}", 1e-4)
        assert_same(normalizer.var, data.var(axis=0), f"the variance of batches of {sizes}", 1e-3)
    ours = normalizer(torch.tensor([3.1, -70.0, 1e9]))
    assert_same(ours, [1.0, -1.0, 10.0], "states must be standardised, and outliers clipped", 0.1)


class Operations(TorchDispatchMode):
    """Counts operations, views not included. Each must see tensors of one device only."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs or {}))
        devices = {x.device.type for x in leaves if isinstance(x, torch.Tensor)}
        copies = func.overloadpacket is torch.ops.aten._to_copy  # an explicit .to(device)
        assert copies or len(devices) <= 1, f"{func} mixes tensors of {devices}"
        aliases = [x.alias_info for x in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        view = view or func.namespace != "aten" or "_unsafe_view" in func.name()
        self.count += not view
        return func(*args, **(kwargs or {}))


def test_a_step_launches_few_operations():
    """On a GPU, their number decides the speed of small networks."""
    agent = make_agent(layers=1, epochs=1)
    buffer, _ = play(agent)
    optimizer = torch.optim.Adam(agent.parameter_groups(), fused=True)
    counts = []
    agent.register_forward_pre_hook(lambda *_: counts.append(operations.count))
    with Operations() as operations:
        agent.update(buffer, optimizer, torch.Generator())
        counts.append(operations.count)
        with torch.no_grad():
            agent.act(buffer, 30, sample=True)
    gradient_step, acting_step = counts[2] - counts[1], operations.count - counts[-1]
    print(f"{gradient_step} operations per gradient step, {acting_step} per acting step")
    assert gradient_step <= 234 and acting_step <= 60, "GPUs become slower"


@pytest.mark.parametrize("settings", [{}, {"tfixup": False}, {"keep_memory": True}], ids=str)
def test_tensors_stay_on_one_device_and_an_update_reads_none_of_them(settings, monkeypatch):
    """The meta device stands in for a GPU. It has no numbers: whatever reads one fails here."""
    agent = make_agent(**settings).to("meta")
    module = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    optimizer = torch.optim.Adam(agent.parameter_groups(), fused=True)
    events = []
    answers = dict(cpu=lambda x: torch.zeros(x.shape), tolist=lambda x: [0.0] * len(x))
    for name, answer in (answers | dict(item=lambda x: 0.0)).items():
        noted = lambda x, name=name, answer=answer: events.append(name) or answer(x)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, noted)

    # The meta device has no generators of random numbers either.
    generator = Mock(device="meta")
    generator.manual_seed.return_value = generator
    monkeypatch.setattr(torch, "Generator", lambda device: generator)
    for draw in (torch.randn, torch.randperm):
        plain = lambda *n, generator, device, draw=draw: draw(*n, device=device)  # noqa: E731
        monkeypatch.setattr(torch, draw.__name__, plain)
    with Operations():
        buffer, _ = play(agent)
        agent.register_forward_pre_hook(lambda *_: events.append("minibatch"))
        agent.update(buffer, optimizer, generator)
    assert events[:60] == ["cpu"] * 60, "acting reads more from the device than its actions"
    assert events[60:81] == ["minibatch"] * 21, "PPO reads from the device between minibatches"
    assert len(events) <= 81 + 3, "an update reads from the device more often than needed"
    tensors = [x for x in vars(buffer).values() if torch.is_tensor(x)]
    tensors += [state["exp_avg"] for state in optimizer.state.values()]
    assert {x.device.type for x in tensors} == {"meta"}


# Meta-testing (Sec. 5.1, 5.2).


def test_episode_returns_are_those_of_a_plain_loop():
    agent = make_agent()
    buffer, diary = play(agent, rows=30)
    returns, success = trmrl.episode_results(buffer, 3)
    for row in range(30):
        borders = np.flatnonzero(diary["done"][row]) + 1
        for i, steps in enumerate(np.split(np.arange(60), borders)[:3]):
            total = diary["reward"][row, steps].sum()
            assert_same(returns[row, i], total, f"return of episode {i + 1} of row {row}", 1e-4)
            succeeded = diary["success"][row, steps].any()
            assert success[row, i] == succeeded, "success at any step of an episode counts"
    assert 0 < success.mean() < 1
    _, success = trmrl.meta_test(agent, PointMass(2), episodes=1)
    assert np.isnan(success).all(), "a family without successes has no success rate"


def test_many_episodes_take_memory_in_proportion():
    """A thousand episodes of two steps: all pairs of episode and step would take 16 MB."""
    buffer = trmrl.Buffer(1, 2_000, (2, 2, 1), torch.Generator())
    buffer.eta[:, 1::2] = 1.0
    tracemalloc.start()
    returns, _ = trmrl.episode_results(buffer, 1_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert returns.shape == (1, 1_000) and peak < 2e6


def test_it_learns_to_learn(tmp_path):
    settings = dict(layers=1, d_model=32, heads=2, memory_length=4, num_tasks=20, minibatch=160)
    settings |= dict(init_std=0.6, lr=6e-3, value_lr=6e-3, gamma=0.8, gae_lambda=0.8, device="cpu")
    settings |= dict(total_steps=40_000, eval_every=100, eval_tasks=20, run_dir=str(tmp_path / "r"))
    agent = trmrl.train(trmrl.Config(env="points", **settings), make_points)
    envs = PointMass(20, split="test")
    returns, _ = trmrl.meta_test(agent, envs, episodes=1)
    agent.phi.weight.data[:, -2] = 0.0  # the column of r in (s, a, r, eta)
    blind, _ = trmrl.meta_test(agent, envs, episodes=1)
    print(f"TrMRL {returns.mean():.1f}, without rewards in its memory {blind.mean():.1f}")
    assert returns.mean() > -12, "TrMRL does not find the goals"
    assert blind.mean() < -18, "goals are found without rewards: something gives them away"


# ---- 2. Tasks (App. B) ---------------------------------------------------------------------------
#
# Half-cheetah and ant against gym.make.

BODIES = [("halfcheetah_vel", "HalfCheetah-v5"), ("ant_dir", "Ant-v5")]


@pytest.mark.parametrize("env, body", BODIES)
def test_batched_bodies_equal_gym_make_step_for_step(env, body):
    """In one thread or in several. Some ants begin near the heights at which Gymnasium ends."""
    torch.set_num_threads(3)
    in_threads = trmrl.make_tasks(env, 20, seed=3)
    assert len(in_threads.thread_data) == 3, "tasks take as many threads as PyTorch has"
    torch.set_num_threads(1)
    envs = trmrl.make_tasks(env, 20, seed=3)
    theirs = gymnasium.make(body).unwrapped
    theirs.reset(seed=0)
    nq, (S, A, _) = theirs.model.nq, envs.sizes
    rng = np.random.default_rng(0)
    for each in (envs, in_threads):
        each.reset(seed=1)
        each.physics[:8, 3] = [0.1, 0.199, 0.201, 0.3, 0.5, 0.999, 1.001, 2.0]

    falls = 0
    for _ in range(40):
        before, healthy = envs.physics.copy(), envs.healthy()
        actions = rng.uniform(-1.5, 1.5, (20, A))
        actions[0] = np.nan  # counts as 0
        ours = dict(zip(("observation", "reward", "terminated", "_", "info"), envs.step(actions)))
        same = np.array_equal(in_threads.step(actions)[0], ours["observation"])
        assert same, "threads change what happens"
        for i in range(20):
            theirs.set_state(before[i, 1 : 1 + nq], before[i, 1 + nq :])
            theirs.data.qacc_warmstart[:] = 0.0
            assert healthy[i] == getattr(theirs, "is_healthy", True), f"height {before[i, 3]} m"
            action = np.clip(np.nan_to_num(actions[i]), -1.0, 1.0)
            observation, _, terminated, _, info = theirs.step(action)
            assert_same(ours["observation"][i], observation[:S], "observation")
            assert ours["terminated"][i] == terminated, f"fallen or not at {before[i, 3]} m"
            velocity = (theirs.data.qpos[0] - before[i, 1]) / theirs.dt
            assert_same(ours["info"]["x_velocity"][i], velocity, "velocity")
            if env == "halfcheetah_vel":
                reward = -abs(velocity - envs.tasks[i, 0]) - 0.05 * np.square(action).sum()
            else:
                reward = envs.tasks[i, 0] * velocity + info["reward_ctrl"] + info["reward_survive"]
            assert_same(ours["reward"][i], reward, "reward")
        falls += ours["terminated"].sum()
        for each in (envs, in_threads):
            each.reset(options={"reset_mask": ours["terminated"]})
    assert (falls > 0) == (env == "ant_dir")


@pytest.mark.parametrize("env, body", BODIES)
def test_starting_states_are_those_of_gymnasium(env, body):
    envs = trmrl.make_tasks(env, 4000)
    theirs = gymnasium.make(body).unwrapped
    envs.reset(seed=0)
    noise = envs.physics[:, 1:] - np.concatenate([theirs.init_qpos, theirs.init_qvel])
    qpos, qvel = np.split(noise, [theirs.model.nq], axis=1)
    assert 0.099 < np.abs(qpos).max() <= 0.1
    assert_same(qpos.std(axis=0), np.full(qpos.shape[1], 0.1 / 3**0.5), "positions", 0.003)
    assert_same(qvel.std(axis=0), np.full(qvel.shape[1], 0.1), "velocities", 0.005)


def test_tasks_have_the_ranges_of_appendix_b():
    def tasks(env, n, split="train"):
        return trmrl.make_tasks(env, n, 1, split).tasks[:, 0]

    velocities, directions = tasks("halfcheetah_vel", 500), tasks("ant_dir", 1000)
    assert 0 < velocities.min() < 0.1 and 2.9 < velocities.max() < 3
    assert set(directions) == {-1, 1} and abs(directions.mean()) < 0.2
    evenly = 0.075 + 0.15 * np.arange(20)
    assert_same(tasks("halfcheetah_vel", 20, "test"), evenly, "test velocities")
    assert_same(tasks("halfcheetah_vel", 5, "ood"), np.arange(3.1, 4, 0.2), "OOD velocities")
    assert tasks("ant_dir", 4, "test").tolist() == [1, -1, 1, -1]
    with pytest.raises(trmrl.UserError, match="train, test"):
        tasks("ant_dir", 4, "ood")
    assert {trmrl.make_tasks(env, 1).episode_length for env, _ in BODIES} == {200}


@pytest.mark.parametrize("value, where", [(np.nan, 12), (1e300, 12), (1e8, 12), (1e4, 1)])
def test_a_step_that_diverges_is_undone(value, where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log where it runs
    envs, twin = (trmrl.make_tasks("halfcheetah_vel", 3, 1) for _ in range(2))
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 3, 6))
    for each in (envs, twin):
        each.reset(seed=0)
        before, *_ = each.step(actions[0])

    def diverge(model, datas, state, controls):
        """Task 1 has a velocity or a position that no body can have."""
        broken = state.copy()
        broken[1, where] = value
        return twin.pool.rollout(model, datas, broken, controls)

    envs.pool = SimpleNamespace(rollout=diverge)
    observation, reward, terminated, truncated, info = envs.step(actions[1])
    sound, sound_reward, *_ = twin.step(actions[1])
    assert info["diverged"].tolist() == [False, True, False]
    assert not terminated.any() and not truncated.any(), "a step that diverges ends no episode"
    sound[1] = before[1]
    assert_same(observation, sound, "task 1 must stay where it was, the others must move")
    sound_reward[1] = -twin.tasks[1, 0] - 0.05 * np.square(actions[1, 1]).sum()
    assert_same(reward, sound_reward, "task 1 must get the reward of standing still")

    envs.pool, twin.physics = twin.pool, envs.physics.copy()
    after = [each.step(actions[2])[:2] for each in (envs, twin)]
    assert all(map(np.array_equal, *after)), "the next step is not from where it was"


def test_one_velocity_for_all_tasks_gets_minus_150_at_best():
    """E |v - v*| for v* from U[0, 3] is least at v = 1.5, where it is 0.75."""
    envs = trmrl.make_tasks("halfcheetah_vel", 20, split="test")

    def mean_return(velocity):
        """Of a body that has this velocity from the first step on."""
        return 200 * envs.reward(np.full(20, velocity), np.zeros((20, 6))).mean()

    at_target = envs.reward(envs.tasks[:, 0], np.full((20, 6), 0.5))
    assert at_target == pytest.approx(-0.05 * 6 * 0.25), "at the target only the actions cost"
    assert mean_return(0.0) == pytest.approx(-300), "standing still must cost 1.5 per step"
    assert mean_return(1.5) == pytest.approx(-150), "at 1.5 m/s a step must cost 0.75 on average"
    best = max(map(mean_return, np.arange(0, 3.01, 0.05)))
    assert best == pytest.approx(-150), "another velocity than 1.5 m/s is best for all tasks"


# What holds for every family, also for the one that a student writes (docs/assignments.md).


def families():
    """The family of a student, if there is one, or ours."""
    path = HERE / "family.py"
    return [runpy.run_path(path)["Family"]] if path.exists() else list(trmrl.FAMILIES.values())


def play_family(envs, tasks):
    """Observations and rewards of an episode of the same random actions in all tasks."""
    rng = np.random.default_rng(0)
    observations, rewards = [envs.reset(seed=0, options={"tasks": tasks})[0]], []
    for t in range(envs.episode_length):
        action = rng.uniform(-1, 1, envs.single_action_space.shape)
        observation, reward, _, truncated, _ = envs.step(np.tile(action, (len(tasks), 1)))
        finite = np.isfinite(observation).all() and np.isfinite(reward).all()
        assert finite, "an observation or a reward is not finite"
        assert observation.dtype == reward.dtype == np.float32, "numbers must be of type float32"
        last = t == envs.episode_length - 1
        assert (truncated == last).all(), "the clock must end an episode after its last step only"
        observations.append(observation.copy())
        rewards.append(reward)
    return np.array(observations), np.array(rewards)


@pytest.mark.parametrize("family", families())
def test_a_family_hides_its_tasks_in_the_rewards(family):
    tasks = [family(16, seed).tasks for seed in (1, 1, 2)]
    assert tasks[0].ndim == 2 and len(tasks[0]) == 16, "tasks must be n rows of k numbers"
    assert np.array_equal(tasks[0], tasks[1]), "the same seed draws other tasks"
    assert not np.array_equal(tasks[0], tasks[2]), "another seed draws the same tasks"
    tasks = [family(4, seed, "test").tasks for seed in (1, 2)]
    assert np.array_equal(*tasks), "the test tasks depend on the seed"
    assert len(np.unique(tasks[0], axis=0)) > 1, "all test tasks are the same"

    envs = family(4)
    envs.episode_length = 20
    assert envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED, "it resets by itself"
    observations, rewards = play_family(envs, tasks[0])
    assert np.array_equal(envs.tasks, tasks[0]), "a reset does not set the tasks"
    again = play_family(envs, tasks[0])
    assert np.array_equal(observations, again[0]), "the same seed gives other observations"
    assert np.array_equal(rewards, again[1]), "the same seed gives other rewards"
    others = play_family(envs, np.roll(tasks[0], 1, axis=0))
    assert np.array_equal(observations[0], others[0][0]), "the first observation tells the task"
    assert not np.array_equal(rewards, others[1]), "the rewards do not depend on the task"

    after, _ = envs.reset(options={"reset_mask": np.arange(4) == 0})
    assert np.array_equal(after[1:], others[0][-1, 1:]), "a reset changes tasks that go on"
    assert not np.array_equal(after[0], others[0][-1, 0]), "a reset does not begin an episode"
    truncated = envs.step(np.zeros(envs.action_space.shape))[3]
    assert truncated.tolist() == [False, True, True, True], "a reset turns back other clocks, too"


# MetaWorld.


@pytest.fixture(scope="session")
def ml1():
    """MetaWorld's own benchmark, with the goals of seed 0."""
    return importlib.import_module("metaworld").ML1("reach-v3", seed=0)


def load_script(name, here=HERE):
    """A program of results/ as a module."""
    spec = importlib.util.spec_from_file_location(name, here / f"results/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def positions_of(tasks):
    return np.array([pickle.loads(task.data)["rand_vec"] for task in tasks])


def test_ml1_trains_and_tests_on_metaworlds_own_goals(ml1):
    train, test = positions_of(ml1.train_tasks), positions_of(ml1.test_tasks)
    assert train.shape == test.shape == (50, 6) and not (train[:, None] == test).all(axis=2).any()
    draws = []
    for seed in (1, 2):
        envs = trmrl.make_tasks("ml1_reach", 50, seed, "test")
        np.testing.assert_array_equal(envs.tasks[:, 1:], test)
        drawn = trmrl.make_tasks("ml1_reach", 50, seed).tasks[:, 1:]
        np.testing.assert_array_equal(np.unique(drawn, axis=0), np.unique(train, axis=0))
        draws.append(drawn)
        lengths = [trmrl.make_tasks("ml1_reach", 1, seed, x).episode_length for x in envs.splits]
        assert lengths == [300, 500], "arms train for 300 steps and are tested for 500"
    assert not np.array_equal(*draws)
    assert envs.sample_tasks(np.random.default_rng(0), 7).shape == (7, 7)


def test_an_arm_equals_metaworlds_own_and_does_not_see_its_goal(ml1):
    """Two episodes of three tasks. The first arm reaches its goal, the others move at random."""
    chosen = [ml1.train_tasks[3], ml1.train_tasks[11], ml1.test_tasks[5]]
    goals = positions_of(chosen)
    envs = trmrl.make_tasks("ml1_reach", 3, 0, "test")
    tasks = np.concatenate([np.zeros((3, 1)), goals], axis=1)
    theirs = [ml1.train_classes["reach-v3"]() for _ in chosen]
    for arm, task in zip(theirs, chosen):
        arm.set_task(task)

    rng = np.random.default_rng(0)
    successes = np.zeros(3)
    for t in range(120):
        if t % 60 == 0:
            ours, _ = envs.reset(options={"tasks": tasks})
            assert_same(ours, np.array([arm.reset()[0] for arm in theirs]), "first observation")
        actions = rng.uniform(-1.5, 1.5, (3, 4))
        actions[0, :3] = 10 * (goals[0, 3:] - ours[0, :3])
        ours, reward, terminated, _, info = envs.step(actions)
        clipped = np.clip(actions, -1.0, 1.0).astype(np.float32)
        expected = [arm.step(action) for arm, action in zip(theirs, clipped)]
        assert_same(ours, np.array([x[0] for x in expected]), "observation")
        assert_same(reward, [x[1] for x in expected], "reward")
        assert_same(info["success"], [x[4]["success"] for x in expected], "success")
        assert not terminated.any() and not ours[:, -3:].any(), "the goal is not hidden"
        successes += info["success"]
    assert successes[0] > 20 and not successes[1:].any()


def test_the_training_of_reach_shows_the_object_elsewhere():
    test, train = (trmrl.make_tasks("ml1_reach", 4, 0, split) for split in ("test", "train"))
    options = {"tasks": test.tasks}
    shifts = []
    for seed in (5, 6, 5):
        seen, truth = (envs.reset(seed=seed, options=options)[0] for envs in (train, test))
        shifts.append((seen - truth)[:, 4:7])
        expected = np.zeros((4, 39))
        expected[:, 4:7] = expected[:, 22:25] = shifts[-1]  # now and one frame earlier
        for _ in range(3):
            assert_same(seen - truth, expected, "the shift of an episode is one and the same")
            results = [envs.step(np.full((4, 4), 0.3)) for envs in (train, test)]
            (seen, reward, *_), (truth, true_reward, *_) = results
            assert_same(reward, true_reward, "the noise changes the rewards")
    assert_same(shifts[0], shifts[2], "the seed decides")
    assert len(np.unique(np.round(shifts[:2], 5))) == 24 and 0.05 < np.std(shifts) < 0.2


def test_an_arm_that_diverges_goes_on_and_nan_is_the_worst_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    envs = trmrl.make_tasks("ml1_reach", 2, 0, "test")
    first, _ = envs.reset()
    envs.arms[1].data.qvel[:] = np.nan
    for _ in range(3):
        observation, reward, terminated, truncated, _ = envs.step(np.zeros((2, 4)))
        assert np.isfinite(observation).all() and (reward > 0).all()
        assert not terminated.any() and not truncated.any()
    broken = observation[1], np.nan, False, False, {"success": 0.0}
    monkeypatch.setattr(envs.arms[1], "step", lambda action: broken)
    _, reward, *_ = envs.step(np.zeros((2, 4)))
    monkeypatch.undo()
    assert reward[0] > 0 == reward[1], "the rewards of an arm are between 0 and 10"
    np.testing.assert_array_equal(envs.reset()[0], first)


def test_every_task_of_metaworld_has_a_name_and_ml45_has_45_classes_in_turn(monkeypatch):
    """MetaWorld takes a minute to draw the goals of ML45. Here they are made up."""
    metaworld = importlib.import_module("metaworld")
    rng = np.random.default_rng(0)

    def benchmark(name="", seed=None):
        classes = [name] if name else metaworld.env_dict.ML45_V3["train"]
        tasks = []
        for kind in classes:
            data = [pickle.dumps({"rand_vec": rng.random(3)}) for _ in range(50)]
            tasks += [metaworld.Task(kind, x) for x in data]
        assert seed == 0
        return SimpleNamespace(train_classes=classes, train_tasks=tasks, test_tasks=tasks)

    monkeypatch.setattr(metaworld, "ML1", benchmark)
    monkeypatch.setattr(metaworld, "ML45", benchmark)
    monkeypatch.setattr(trmrl, "metaworld_tasks", trmrl.metaworld_tasks.__wrapped__)
    for name in metaworld.ALL_V3_ENVIRONMENTS:
        classes, *_ = trmrl.metaworld_tasks("ml1_" + name.removesuffix("-v3").replace("-", "_"))
        assert classes == [name]

    envs = trmrl.make_tasks("ml45_train", 90, seed=1)
    goals = envs.train_tasks
    assert len(envs.classes) == len(set(envs.classes)) == 45 and goals.shape == (45, 50, 7)
    assert envs.tasks[:, 0].tolist() == [*range(45)] * 2
    assert not (envs.tasks[:45] == envs.tasks[45:]).all(axis=1).any()
    assert all((goals[i % 45] == task).all(axis=1).any() for i, task in enumerate(envs.tasks))
    np.testing.assert_array_equal(envs.fixed_tasks("test", 90)[45:], goals[:, 1])
    with pytest.raises(trmrl.UserError, match="multiples of the 45 classes"):
        trmrl.make_tasks("ml45_train", 7)


@pytest.mark.parametrize("env", ["ml1_push", "ml45_train"])
def test_an_arm_is_of_its_class_meets_its_goal_and_sees_its_object(env, monkeypatch):
    metaworld = importlib.import_module("metaworld")
    names = ["push-v3", "drawer-open-v3"]  # goals of six and of three numbers
    makers = [metaworld.ALL_V3_ENVIRONMENTS[name] for name in names]
    goals = np.zeros((2, 50, 7))
    for kind, make in enumerate(makers):
        low = make()._random_reset_space.low
        goals[kind, :, 0] = kind
        goals[kind, :, 1 : 1 + len(low)] = low + 0.0005 * np.arange(50)[:, None]
    monkeypatch.setattr(trmrl, "metaworld_tasks", lambda env: (names, goals, goals))
    envs = trmrl.make_tasks(env, 4)
    for shift in (0, 2, 1):  # the same arms, with other goals; then of the other class
        seen, _ = envs.reset(options={"tasks": np.roll(envs.tasks, shift, axis=0)})
        for arm, task, observation in zip(envs.arms, envs.tasks, seen):
            assert type(arm) is makers[int(task[0])]
            np.testing.assert_array_equal(arm._last_rand_vec, task[1 : 1 + len(arm._last_rand_vec)])
            assert_same(observation[4:7], arm._get_pos_objects()[:3], "the object is elsewhere")


def test_the_fast_functions_of_results_equal_those_of_metaworld_and_scipy(monkeypatch):
    """While the object touches one finger, and while MetaWorld's own policy carries it."""
    sawyer = importlib.import_module("metaworld.sawyer_xyz_env").SawyerXYZEnv
    policies = importlib.import_module("metaworld.policies")
    rotation = importlib.import_module("scipy.spatial.transform").Rotation
    fast = load_script("fast_metaworld")
    arm = importlib.import_module("metaworld").ML1("pick-place-v3", seed=0)
    task, arm = arm.train_tasks[0], arm.train_classes["pick-place-v3"]()
    arm.set_task(task)
    observation, _ = arm.reset()
    observation[-3:] = arm._target_pos  # which ML1 hides from agents, but the policy needs

    object_id, floor_id = arm._get_id_main_object(), 0
    pad_ids = [arm.data.geom(name).id for name in ("leftpad_geom", "rightpad_geom")]
    seen = set()

    def compare():
        pairs = [set(pair) for pair in arm.data.contact.geom.tolist()]
        touches = sawyer.touching_object(arm, object_id)
        assert fast.touching_object(arm, object_id) == touches
        assert not fast.touching_object(arm, floor_id)
        seen.add((*({pad, object_id} in pairs for pad in pad_ids), touches))

    # Put the object at many places across the open gripper, so that it touches either pad.
    left, right = (arm.data.geom(pad).xpos.copy() for pad in pad_ids)
    for fraction in np.linspace(-1.0, 2.0, 61):
        arm._set_obj_xyz(right + fraction * (left - right))
        compare()
    arm.reset()
    matrices, quaternions = [], []
    for _ in range(100):
        observation, *_ = arm.step(policies.SawyerPickPlaceV3Policy().get_action(observation))
        observation[-3:] = arm._target_pos
        compare()
        matrices.append(arm.data.geom("objGeom").xmat.reshape(3, 3).copy())
        quaternions.append(rotation.from_matrix(matrices[-1]).as_quat())
    assert seen >= {(True, False, False), (False, True, False), (True, True, True)}, seen
    assert np.ptp(quaternions, axis=0).max() > 0.01, "the object must turn"

    monkeypatch.setattr(sawyer, "touching_object", None)  # pytest puts them back afterwards
    monkeypatch.setattr(rotation, "from_matrix", rotation.from_matrix)
    fast.replace_slow_functions()
    assert sawyer.touching_object is fast.touching_object
    for matrix, quaternion in zip(matrices, quaternions):
        np.testing.assert_array_equal(rotation.from_matrix(matrix).as_quat(), quaternion)


def test_a_program_runs_with_the_fast_functions():
    script = HERE / "results/fast_metaworld.py"
    assert "usage: trmrl.py" in python(script, HERE / "trmrl.py", "--help").out
    assert "python -m baselines.rl2" in python(script, "-m", "baselines.rl2", "--help").out


# ---- 3. Runs and faults --------------------------------------------------------------------------

FILES = {"config.json", "progress.csv", "eval.csv", "agent.pt", "checkpoint.pt"}
SMALL_RUN = dict(env="points", device="cpu", total_steps=80, num_tasks=2, episodes_per_trial=1)
SMALL_RUN |= dict(minibatch=10, epochs=2, d_model=16, heads=2, eval_every=2, eval_tasks=2)
CHEETAH = SMALL_RUN | dict(env="halfcheetah_vel", total_steps=120)  # with episodes of 20 steps


class ShortPoints(PointMass):
    episode_length = 10


class ShortArms(ShortPoints):
    """Like MetaWorld: two classes of tasks, a success rate, sampled actions in a meta-test."""

    sample_at_test = True
    classes = ("left", "right")

    def fixed_tasks(self, split, n):
        return np.stack([np.arange(n) % 2, np.linspace(0.0, 6.0, n)], axis=1)

    def sample_tasks(self, rng, n):
        return self.fixed_tasks("train", n) + [0.0, rng.uniform(0.0, 6.0)]

    def advance(self, actions):
        reward, terminated, info = super().advance(actions)
        return reward, terminated, {**info, "success": reward > -0.9}


def make_any(env, num_tasks, seed=0, split="train"):
    """The families of trmrl.py, and ours, which are faster."""
    ours = {"points": ShortPoints, "arms": ShortArms}
    make = ours.get(env, lambda *args: trmrl.make_tasks(env, *args))
    return make(num_tasks, seed, split)


def train_small(folder, **settings):
    """Train on the point mass, for 4 iterations of 2 episodes."""
    return trmrl.train(trmrl.Config(**SMALL_RUN | dict(run_dir=str(folder)) | settings), make_any)


def flags(**settings):
    """The same settings as they are typed."""
    settings = SMALL_RUN | settings
    return [x for name, value in settings.items() for x in (trmrl.flag(name), str(value))]


def cli(*args):
    """The command line, in this process: status, out, err."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = trmrl.main([str(x) for x in args], make_tasks=make_any)
        except SystemExit as end:  # --help
            status = end.code
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue())


def one_line(result, status):
    """The only line that a command printed about an error."""
    assert result.status == status and result.err.startswith("trmrl.py: "), result.err
    assert result.err.count("\n") == 1 and len(result.err) < 1000, result.err
    return result.err


def python(*args):
    """Another Python: its status, out, err. gloo needs a network interface that exists."""
    env = os.environ | dict(PYTHONPATH=str(HERE), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    argv = [sys.executable, *map(str, args)]
    result = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    return SimpleNamespace(status=result.returncode, out=result.stdout, err=result.stderr)


def torchrun(*args):
    """Two processes, as python() runs one."""
    launcher = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2"
    return python(*launcher.split(), *args)


def start(log, job, *args):
    """Start job(*args) in a process that has everything loaded; it prints to LOG.out, LOG.err."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_trmrl", "torch._dynamo"])
    process = context.Process(target=run_job, args=(str(log), job, *args), daemon=True)
    process.start()
    return process


def run_job(log, job, *args):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have switched it off
    for number, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{ending}", os.O_WRONLY | os.O_CREAT), number)
    sys.exit(job(*args))


def csv_rows(path, without=("seconds", "cpu_seconds", "steps_per_second")):
    with open(path) as f:
        return [{k: v for k, v in row.items() if k not in without} for row in csv.DictReader(f)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def saved_iteration(folder):
    path = folder / "checkpoint.pt"
    return torch.load(path, weights_only=True)["iteration"] if path.exists() else 0


def assert_same_run(a, b):
    """The csv files agree to the digit, except for the time, and the weights to the bit."""
    for name in ("progress.csv", "eval.csv"):
        assert csv_rows(a / name) == csv_rows(b / name) != []
    for name in ("agent.pt", "checkpoint.pt"):
        ours, theirs = (torch.load(f / name, weights_only=True)["weights"] for f in (a, b))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert set(os.listdir(a)) == set(os.listdir(b)) == FILES


@pytest.fixture(autouse=True)
def signals_and_threads_of_pytest():
    """trmrl.main changes handlers of signals and the number of threads."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def shell_run(tmp_path_factory):
    """A finished run on the half-cheetah, typed in a shell."""
    folder = tmp_path_factory.mktemp("shell")
    whole, short = "episode_length = 200\n", "episode_length = 20\n"
    source = (HERE / "trmrl.py").read_text()
    assert source.count(whole) == 1
    (folder / "trmrl.py").write_text(source.replace(whole, short))
    settings = CHEETAH | dict(total_steps="1.2e2", run_dir=folder / "run")
    result = python(folder / "trmrl.py", *flags(**settings))
    assert result.status == 0 and not result.err, result.err
    return SimpleNamespace(folder=folder / "run", out=result.out)


@pytest.fixture(scope="session")
def points_run(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("points") / "run").folder


@pytest.fixture(scope="session")
def arms_run(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("arms") / "run", env="arms").folder


# Files.


def test_a_run_writes_its_folder(shell_run):
    folder = shell_run.folder
    assert set(os.listdir(folder)) == FILES
    config = json.loads((folder / "config.json").read_text())
    settings = CHEETAH | dict(run_dir=str(folder), threads=1)
    assert config == {"agent": "trmrl", **asdict(trmrl.Config(**settings))}

    progress = csv_rows(folder / "progress.csv", without=())
    columns = "iteration step seconds cpu_seconds steps_per_second train_return train_success "
    columns += "policy_loss value_loss approx_kl clip_fraction grad_norm updates "
    columns += "explained_variance std lr"
    assert list(progress[0]) == columns.split() and len(progress) == 3
    for i, row in enumerate(progress):
        assert (row["iteration"], row["step"]) == (str(i + 1), str(40 * (i + 1)))
        assert (row["updates"], row["train_success"]) == ("8", "")
        assert float(row["lr"]) == pytest.approx(3e-4 * (1 - 0.95 * i / 3), rel=1e-5)

    # A meta-test has one episode of each task; the last one has six.
    rows = csv_rows(folder / "eval.csv")
    assert list(rows[0]) == ["step", "split", "task", "episode", "return", "success", "actions"]
    expected = []
    for (step, episodes), split in itertools.product([(80, 1), (120, 6)], ["test", "ood"]):
        for task in range(2):
            expected += [(step, split, task, i + 1, "", "mean") for i in range(episodes)]
    found = [tuple(v for k, v in row.items() if k != "return") for row in rows]
    assert found == [tuple(map(str, cells)) for cells in expected]


def test_the_same_seed_is_the_same_run_and_another_is_not(points_run, tmp_path, monkeypatch):
    drawn, sample_tasks = [], PointMass.sample_tasks
    spy = lambda *args: drawn.append(sample_tasks(*args)) or drawn[-1]  # noqa: E731
    monkeypatch.setattr(PointMass, "sample_tasks", spy)
    for name, seed in (("again", 1), ("another", 2)):
        torch.manual_seed(len(name))  # global generators must not matter
        np.random.seed(len(name))
        train_small(tmp_path / name, seed=seed)
    assert_same_run(tmp_path / "again", points_run)
    for name in ("progress.csv", "eval.csv"):
        assert csv_rows(tmp_path / "another" / name) != csv_rows(points_run / name)
    assert len(np.unique(drawn)) == 2 * (1 + 4) * 2 + 2  # new tasks in each iteration; a first try


def test_a_run_from_python_is_the_one_from_the_shell(shell_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trmrl.TaskFamily, "episode_length", 20)
    agent = trmrl.train(trmrl.Config(**CHEETAH))
    assert agent.folder == Path("runs/halfcheetah_vel/trmrl-seed1") and agent.trained_steps == 120
    assert_same_run(agent.folder, shell_run.folder)


# Interruptions.


def run_or_resume(folder, settings, kind):
    """A run that takes its time in the middle of an iteration, or dies while it writes a file."""
    step, replace_file, count = trmrl.gradient_step, os.replace, itertools.count(1)

    def replace_or_die(source, target):
        if next(count) == int(kind.split()[-1]):
            os.truncate(source, 100)
            os.kill(os.getpid(), signal.SIGKILL)
        replace_file(source, target)

    if "slow" in kind:
        trmrl.gradient_step = lambda *args: time.sleep(5) or step(*args)
    if "file" in kind:
        os.replace = replace_or_die
    return trmrl.main(["--resume", folder] if saved_iteration(Path(folder)) else settings, make_any)


def test_a_run_survives_ctrl_c_sigterm_and_sigkill_at_any_moment(tmp_path):
    """In the middle of an iteration, at any time, and while each of the five files is written."""
    folder, kinds = tmp_path / "run", ["SIGINT", "SIGTERM", "SIGKILL"]
    kinds += [f"{kind} slow" for kind in kinds] + [f"SIGKILL in file {6 + i}" for i in range(5)]
    settings = flags(total_steps=100 * 20, epochs=1, eval_every=10, run_dir=folder)
    patience = 2 * (1 + os.getloadavg()[0] / os.cpu_count())  # two seconds, if nothing else runs
    rng = np.random.default_rng(0)
    for i, kind in enumerate(kinds):
        log, before = tmp_path / f"log {i}", saved_iteration(folder)
        out, err = (log.with_suffix(ending) for ending in (".out", ".err"))
        process = start(log, run_or_resume, str(folder), settings, kind)
        lines = 2 if "slow" in kind else 3
        while process.is_alive() and not (out.exists() and out.read_text().count("\n") >= lines):
            time.sleep(0.001)
        time.sleep(rng.uniform(0.1, 0.2) if "slow" in kind else rng.uniform(0.0, 0.05))
        began = time.monotonic()
        if "file" not in kind:
            os.kill(process.pid, getattr(signal, kind.split()[0]))
        process.join(60)
        seconds = time.monotonic() - began
        announced = before + out.read_text().count("M steps")
        assert saved_iteration(folder) >= announced, f"{kind}: what was printed is not saved"
        if kind.startswith("SIGKILL"):
            assert (process.exitcode, err.read_text()) == (-signal.SIGKILL, ""), kind
        else:
            words = f"stopped; continue with: python trmrl.py --resume {folder}"
            assert (process.exitcode, err.read_text().strip()) == (130, words), kind
            assert seconds < patience, f"{kind} was answered after {seconds:.1f} s"

    assert 0 < len(csv_rows(folder / "progress.csv")) < 100
    assert cli("--resume", folder).status == 0
    assert cli(*settings, "--run-dir", tmp_path / "undisturbed").status == 0
    assert_same_run(folder, tmp_path / "undisturbed")


def before_third_save(patch, fault, save=trmrl.Run.save):
    """Let something happen before a run saves its third iteration."""
    patch.setattr(trmrl.Run, "save", lambda run: (run.iteration == 3 and fault(), save(run)))


def test_make_trains_what_is_missing_and_continues_what_was_stopped(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    for name in ("trmrl.py", "results/make.py"):
        shutil.copy(HERE / name, tmp_path / name)
    make = load_script("make", tmp_path)
    flags = "--total-steps 1600 --num-tasks 2 --eval-tasks 2 --eval-every 1"  # two iterations
    whole, stopped, other = (make.Run(name, "trmrl", flags, 1) for name in ("a", "b", "a"))
    other.flags += " --lr 1e-4"
    assert whole.state() == "missing" and make.make([whole], jobs=1) == []
    assert whole.state() == "finished" and other.state() == "outdated"
    files = {path.name for path in whole.folder.iterdir()}
    assert files == {"agent.pt", "config.json", "eval.csv", "progress.csv"}

    def stop_after_one(*args, report=trmrl.save_and_report):
        report(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(trmrl, "save_and_report", stop_after_one)
        assert trmrl.main([*flags.split(), "--run-dir", str(stopped.folder)]) == 130
    assert stopped.state() == "begun" and make.make([whole, stopped], jobs=2) == []
    assert (stopped.folder / "eval.csv").read_text() == (whole.folder / "eval.csv").read_text()
    for run in make.all_runs():  # their flags are understood
        run.agent_class.Config(**trmrl.parse(run.flags.split(), run.agent_class))


def test_a_run_survives_a_full_disk_and_a_deleted_folder(points_run, tmp_path, monkeypatch):
    folder, limit = tmp_path / "run", resource.RLIMIT_FSIZE
    (soft, hard), space = resource.getrlimit(limit), (points_run / "agent.pt").stat().st_size - 1
    with monkeypatch.context() as patch:
        before_third_save(patch, lambda: resource.setrlimit(limit, (space, hard)))
        try:
            line = one_line(cli(*flags(run_dir=folder)), status=1)
        finally:
            resource.setrlimit(limit, (soft, hard))
    assert "File too large" in line
    assert f"continue with: python trmrl.py --resume {folder}" in line
    # No file is ahead of the checkpoint.
    assert saved_iteration(folder) == len(csv_rows(folder / "progress.csv")) == 2
    before_third_save(monkeypatch, lambda: shutil.rmtree(folder))
    assert cli("--resume", folder).status == 0
    assert_same_run(folder, points_run)  # the folder is back, with everything


def test_a_finished_run_is_neither_overwritten_nor_continued(points_run):
    before = contents(points_run)
    line = one_line(cli(*flags(seed=3, run_dir=points_run)), status=2)
    assert f"{points_run} already exists" in line and "--resume" in line
    assert contents(points_run) == before

    # The last save may have stopped after the checkpoint. Then --resume completes the files.
    (points_run / "eval.csv").write_text("")
    line = one_line(cli("--resume", points_run), status=2)
    assert f"{points_run} is finished" in line and f"--eval {points_run}" in line
    after = contents(points_run)
    assert all(after[name] == before[name] for name in before if name != "checkpoint.pt")


# Faults.


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


RAW = {  # the bytes of a good file, changed
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "damaged": lambda data: data[:100] + bytes(255 - x for x in data[100:400]) + data[400:],
    "plain bomb": lambda data: pickle.dumps(Bomb()),
}
CHANGED = {  # its content, changed; and what the answer says
    "bomb": (lambda c: c.update(weights=Bomb()), ""),
    "version 1": (lambda c: c.update(version=1), "commit 40cf2af"),
    "baseline": (lambda c: c["config"].update(agent="rl2"), "type: python -m baselines.rl2 --"),
    "no weights": (lambda c: c.pop("weights"), "weights"),
    "wrong shape": (lambda c: c["weights"].update({"phi.weight": torch.zeros(3, 3)}), "phi.weight"),
    "unknown setting": (lambda c: c["config"].update(sword="sharp"), "sword"),
    "setting of another type": (lambda c: c["config"].update(layers="two"), "--layers"),
    "impossible setting": (lambda c: c["config"].update(heads=5), "--heads"),
    "unknown env": (lambda c: c["config"].update(env="walker"), "walker"),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", [*RAW, *CHANGED])
def test_a_damaged_hostile_or_foreign_file_is_refused(kind, points_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(points_run, "run")
    change, words = CHANGED.get(kind, (None, ""))
    for path in (Path("run/checkpoint.pt"), Path("run/agent.pt")):
        if kind in RAW:
            path.write_bytes(RAW[kind](path.read_bytes()))
        else:
            content = torch.load(path, weights_only=True)
            change(content)
            torch.save(content, path)

    before = contents(Path("run"))
    for command, path in {"--resume": "run/checkpoint.pt", "--eval": "run/agent.pt"}.items():
        line = one_line(cli(command, "run"), status=2)
        assert words in line and (path in line or kind == "unknown env")
        assert "weights_only" not in line  # no advice to load it without protection
    assert contents(Path("run")) == before
    assert os.listdir() == ["run"]  # no bomb exploded


@pytest.mark.parametrize("source", ["ppo_loss", "advance", "observation"])
def test_a_nan_ends_a_run_with_advice_and_keeps_the_last_checkpoint(source, tmp_path, monkeypatch):
    """It may come from a gradient, or from a task family of one's own."""
    owner = trmrl if source == "ppo_loss" else ShortPoints
    original, factor = getattr(owner, source), [1.0]

    def poisoned(*args, **named):
        first, *rest = results = original(*args, **named)
        return (first * factor[0], *rest) if type(results) is tuple else results * factor[0]

    monkeypatch.setattr(owner, source, poisoned)
    before_third_save(monkeypatch, lambda: factor.append(factor.pop() * math.nan))
    line = one_line(cli(*flags(run_dir=tmp_path / "run")), status=2)
    assert "not finite" in line and "lower learning rate" in line
    assert saved_iteration(tmp_path / "run") == len(csv_rows(tmp_path / "run/progress.csv")) == 3
    weights = trmrl.load_agent(tmp_path / "run").state_dict().values()
    assert all(x.isfinite().all() for x in weights)


def test_too_little_memory_is_one_line_but_a_bug_has_a_traceback(tmp_path, monkeypatch):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    bug = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(trmrl, "train_iteration", Mock(side_effect=[full, bug]))
    assert "out of memory" in one_line(cli(*flags(run_dir=tmp_path / "full")), status=1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cli(*flags(run_dir=tmp_path / "bug"))


def test_import_does_nothing_and_is_cheap():
    code = """if True:
        import os, random, signal, sys, time, gymnasium, mujoco, numpy, torch
        torch.set_num_threads(2)

        def world():
            handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
            generators = torch.get_rng_state().tolist(), numpy.random.get_state(), random.getstate()
            settings = torch.get_num_threads(), torch.get_default_dtype(), numpy.geterr()
            return str((handlers, generators, settings, dict(os.environ), os.listdir()))

        before, began = world(), time.process_time()
        import trmrl
        assert time.process_time() - began < 1 and world() == before
        assert not {"metaworld", "matplotlib", "torch._dynamo"} & sys.modules.keys()
    """
    result = python("-W", "error::UserWarning", "-c", code)
    assert (result.status, result.out, result.err) == (0, "", "")


CHOICES = dict(memory_length=[1, 2, 7, 30, 0], layers=[1, 2, 5], heads=[1, 2, 4, 3], epochs=[1, 3])
CHOICES |= dict(d_model=[12, 16, 2, 12, 3], tfixup=[True, False], keep_memory=[False, True])
CHOICES |= dict(gamma=[0.9, 0.0, 0.9999, 1.0, math.nan], gae_lambda=[0.0, 1.0], clip=[0.05, 0.5])
CHOICES |= dict(num_tasks=[1, 3, 8], episodes_per_trial=[1, 2, 3], minibatch=[10, 7, 2, 1, 161])
CHOICES |= dict(lr=[0.0, 1e-3, 0.5], value_lr=[0.0, 1e-3], final_lr=[0.0, 1.0], eval_tasks=[1, 3])
CHOICES |= dict(init_std=[0.01, 3.0], max_grad_norm=[1e-3, 10.0], seed=[0, 5, 2**31 - 1, -1])


def test_any_config_trains_or_is_refused(tmp_path):
    rng, outcomes = np.random.default_rng(0), []
    for i in range(30):
        picks = {}
        for name, values in CHOICES.items():
            picks[name] = values[0] if rng.random() < 0.4 else rng.choice(values).item()
        batch = picks["num_tasks"] * picks["episodes_per_trial"] * 10
        possible = picks["memory_length"] > 0 and picks["gamma"] < 1 and picks["seed"] >= 0
        possible &= picks["d_model"] % picks["heads"] == 0 == picks["d_model"] % 2
        possible &= 2 <= picks["minibatch"] <= batch
        possible &= picks["episodes_per_trial"] > 1 or not picks["keep_memory"]
        try:
            train_small(tmp_path / str(i), total_steps=2 * batch, **picks)
            assert len(csv_rows(tmp_path / str(i) / "progress.csv")) == 2
            outcomes.append((possible, "trained"))
        except trmrl.UserError as error:
            assert "\n" not in str(error)
            if "not finite" in str(error):  # it diverged
                assert possible and picks["lr"] == 0.5
                continue
            assert not (tmp_path / str(i)).exists()
            outcomes.append((possible, "refused"))
    assert set(outcomes) == {(True, "trained"), (False, "refused")}
    assert 4 < sum(possible for possible, _ in outcomes) < 26


# Several processes (torchrun).


def die_in_the_third_iteration():
    """What torchrun starts here. Process 1 is killed."""
    train_iteration = trmrl.train_iteration

    def die(run):
        if run.iteration == 2 and trmrl.RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_iteration(run)

    def look():
        threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        print("threads of gloo at the end:", sum("gloo" in name for name in threads))

    trmrl.train_iteration = die
    atexit.register(look)  # it comes after everything that trmrl.py does at the end
    sys.exit(trmrl.main(make_tasks=make_any))


def one_of_two(rank, port, folder, settings):
    """One of two processes, as torchrun starts them. The name of the folder says what it does."""
    address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ |= address | dict(RANK=str(rank), WORLD_SIZE="2")
    trmrl.RANK, trmrl.WORLD_SIZE = rank, 2
    update = trmrl.ppo_update

    def spy(agent, buffer, optimizer, generator):
        trmrl.ppo_update = update  # only the first one
        seen = dict(before=copy.deepcopy(agent.state_dict()), generator=generator.get_state())
        seen |= dict(buffer=buffer, config=agent.config, sizes=agent.sizes)
        metrics = update(agent, buffer, optimizer, generator)
        torch.save(seen | dict(after=agent.state_dict(), metrics=metrics), f"{folder}-{rank}.pt")
        return metrics

    if folder.endswith("killed"):
        return trmrl.main(["--resume", folder], make_any)
    if folder.endswith("whole"):
        trmrl.ppo_update = spy
        if rank == 1:
            trmrl.Run.save = None  # it has no means to write
    elif rank == 0:
        trmrl.ppo_update = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    return trmrl.main([*settings, "--run-dir", folder], make_any)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Runs of two processes: `killed` and then resumed, `whole`, and `lost`."""
    folder, settings = tmp_path_factory.mktemp("pairs"), flags()
    code = "import test_trmrl; test_trmrl.die_in_the_third_iteration()"
    (folder / "dying.py").write_text(code)
    killed = torchrun(folder / "dying.py", *settings, "--run-dir", folder / "killed")
    result = SimpleNamespace(folder=folder, torchrun=killed, statuses={})
    result.done = saved_iteration(folder / "killed")
    for name in ("killed", "whole", "lost"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        processes = []
        for rank in (0, 1):
            args = (rank, port, str(folder / name), settings)
            processes.append(start(folder / f"{name}-{rank}", one_of_two, *args))
        for process in processes:
            process.join(100)
        result.statuses[name] = [process.exitcode for process in processes]
    result.text = {path.name: path.read_text() for path in folder.glob("*-?.[oe]*")}
    return result


def test_two_processes_make_the_update_of_one(pairs):
    """One process that has the trials of both makes the same gradient steps."""
    a, b = (torch.load(pairs.folder / f"whole-{rank}.pt", weights_only=False) for rank in (0, 1))
    assert all(torch.equal(a[when][k], b[when][k]) for when in ("before", "after") for k in a[when])
    ours, theirs = a["buffer"], b["buffer"]
    assert not set(ours.task.flatten().tolist()) & set(theirs.task.flatten().tolist())
    both = SimpleNamespace()
    for name, x in vars(ours).items():
        if torch.is_tensor(x):
            setattr(both, name, torch.cat([x, getattr(theirs, name)]))

    agent = trmrl.TrMRL(replace(a["config"], minibatch=a["config"].minibatch // 2), a["sizes"])
    agent.load_state_dict(a["before"])
    draw_half = agent.minibatches
    generators = [torch.Generator().set_state(process["generator"]) for process in (a, b)]

    def draw_both(buffer, generator):
        for (row, t), (their_row, their_t) in zip(*map(draw_half, (ours, theirs), generators)):
            yield torch.cat([row, their_row + len(ours.value)]), torch.cat([t, their_t])

    agent.minibatches = draw_both
    optimizer = torch.optim.Adam(agent.parameter_groups(), eps=1e-5)
    metrics = agent.update(both, optimizer, None)
    assert a["metrics"] == b["metrics"] == pytest.approx(metrics, abs=1e-5)
    assert metrics["updates"] == 4
    for name, x in agent.state_dict().items():
        torch.testing.assert_close(a["after"][name], x, rtol=1e-5, atol=1e-6)
        assert name == "positions" or not torch.equal(a["after"][name], a["before"][name])


def test_only_process_0_writes_and_prints(pairs):
    text, folder = pairs.text, pairs.folder / "whole"
    assert pairs.statuses["whole"] == [0, 0]
    assert "processes: 2" in text["whole-0.out"] and text["whole-0.out"].count("M steps") == 4
    assert not text["whole-1.out"] + text["whole-0.err"] + text["whole-1.err"]
    steps = [row["step"] for row in csv_rows(folder / "progress.csv")]
    assert steps == ["20", "40", "60", "80"]
    tests = [row["step"] for row in csv_rows(folder / "eval.csv")]
    assert tests == ["40"] * 2 + ["80"] * 12


def test_a_process_that_dies_ends_the_others_with_a_line_and_the_run_can_continue(pairs):
    """First without torchrun, which sends SIGTERM, then with it."""
    line = pairs.text["lost-1.err"]
    assert pairs.statuses["lost"] == [-signal.SIGKILL, 1]
    assert line.startswith("trmrl.py: process 1 ") and line.count("\n") == 1
    assert f"--resume {pairs.folder / 'lost'}" in line and not pairs.text["lost-0.err"]
    hint = f"continue with: torchrun --nproc-per-node 2 trmrl.py --resume {pairs.folder / 'killed'}"
    assert pairs.torchrun.status == 1 and pairs.torchrun.err.count(hint) == 1
    # A thread of gloo that frees a tensor while Python ends may crash it.
    assert "threads of gloo at the end: 0" in pairs.torchrun.out
    assert 0 < pairs.done < 4 and pairs.statuses["killed"] == [0, 0]
    assert_same_run(pairs.folder / "killed", pairs.folder / "whole")


@pytest.mark.parametrize("settings", [dict(num_tasks=3), dict(minibatch=11)], ids=str)
def test_work_that_two_processes_cannot_share_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(trmrl, "WORLD_SIZE", 2)
    monkeypatch.setattr(trmrl, "join_processes", lambda device: None)
    result = cli(*flags(**settings, run_dir=tmp_path / "run"))
    assert "multiple of the 2 processes" in one_line(result, status=2) and not os.listdir(tmp_path)


# ---- 4. The command line -------------------------------------------------------------------------

ANSWERS = {
    "--env walker": "halfcheetah_vel, ant_dir, ml45_train, ml1_assembly",
    "--env halfcheeta_vel": "did you mean halfcheetah_vel?",
    "--env ml1_pusj": "did you mean ml1_push?",
    "--env ml1_zzz": "ml1_assembly, ml1_basketball",
    "--memroy-length 3": "did you mean --memory-length?",
    "halfcheetah_vel": "see --help",
    "--minibatch 999999": "exceeds the 8000 steps of a batch",
    "--eval nowhere": "nowhere does not exist",
    "--eval /nowhere/agent.pt": "/nowhere/agent.pt does not exist",
    "--resume nowhere": "nowhere/checkpoint.pt does not exist",
    "--eval PARENT": "holds these runs: RUN",
}
# Here the answer names the last flag.
MISTAKES = """--env; --env a/b; --memory 3; --nonsense=1; --memory-length 0; --minibatch 1; --lr -1
    --lr fast; --gamma 1; --gamma nan; --init-std inf; --total-steps 0; --total-steps inf
    --num-tasks 1e21; --seed -1; --threads -1; --layers 2.5; --layers 1e400; --heads 3
    --d-model 15 --heads 3; --device cuda:99; --device abacus; --device meta; --split ood; --sample
    --mean; --csv x.csv; --episodes 3; --eval nowhere --seed 3; --eval nowhere --resume nowhere
    --eval nowhere --episodes 0; --resume nowhere --lr 0.1; --eval RUN --eval-tasks 0
    --eval RUN --threads -1; --eval RUN --mean --sample; --eval RUN --device abacus
    --eval RUN --split ood; --eval RUN --csv nowhere/x.csv"""
MISTAKES = [x.strip() for x in MISTAKES.replace("\n", ";").split(";")]


@pytest.mark.parametrize("typed", [*ANSWERS, *MISTAKES])
def test_a_mistake_is_answered_in_one_line(typed, points_run, tmp_path, monkeypatch):
    def in_full(text):
        return text.replace("RUN", str(points_run)).replace("PARENT", str(points_run.parent))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trmrl, "train_iteration", lambda run: sys.exit("it runs"))
    result = cli(*in_full(typed).split())
    words = ANSWERS.get(typed) or re.findall(r"--([a-z-]+)", typed)[-1]
    assert in_full(words) in one_line(result, status=2)
    assert not result.out and not os.listdir()


@pytest.mark.parametrize("env", ["halfcheetah_vel", "ant_dir", "ml1_door_open", "ml45_train"])
def test_an_environment_has_a_preset_and_help_shows_its_values(env):
    config, changed = trmrl.Config(env=env), trmrl.Config(env=env, lr=0.123)
    assert vars(changed) == vars(config) | {"lr": 0.123} and None not in vars(config).values()
    assert trmrl.Config(**trmrl.parse(["--env", env, "--lr", "0.123"])) == changed
    fitting = [name for name, x in trmrl.PRESETS.items() if x.items() <= vars(config).items()]
    assert fitting == [env if env in trmrl.PRESETS else env.split("_")[0]]

    result = cli("--env", env, "--help")
    assert result.status == 0 and max(map(len, result.out.splitlines())) <= 100
    assert all(name in result.out for name in trmrl.ENVS)
    assert "python trmrl.py --eval runs/" in result.out
    assert "Letters:" not in result.out  # the table of contents and what follows
    groups = {f.metadata["group"] for f in fields(trmrl.Config)}
    assert all(f"\n{group}:\n" in result.out for group in groups)
    text = " ".join(result.out.split("\nrun:\n")[1].split())
    for name, value in vars(config).items():
        default = rf"\(default: {value}\)" if value != "" else "default: runs/"
        assert re.search(rf"{trmrl.flag(name)}[ ,][^(]*{default}", text), name


@pytest.mark.parametrize("env, score", [("points", r"-\d+\.\d"), ("arms", r"-\d+ \(\d+%\)")])
def test_the_live_line_fits_80_columns_with_its_test_score(env, score, tmp_path, monkeypatch):
    """Even if it is as long as it gets: 5 M steps that take days. Rounding up is told, too."""
    monkeypatch.setattr(os, "get_terminal_size", lambda *args: os.terminal_size((80, 24)))
    monkeypatch.setattr(trmrl.time, "monotonic", iter(range(0, 10**9, 20_000)).__next__)

    def train_largely(run, train=trmrl.train_until_finished):
        run.steps_per_iteration, run.planned_steps = 1_250_000, 5_000_000
        return train(run)

    monkeypatch.setattr(trmrl, "train_until_finished", train_largely)
    screen = io.StringIO()
    screen.isatty = lambda: True
    with contextlib.redirect_stdout(screen):
        train_small(tmp_path / "run", env=env)
    header, *lines = screen.getvalue().split("\r\033[K")
    assert header.startswith(f"trmrl on {env}: 5,000,000 steps (80 rounded up) into {tmp_path}")
    assert header.count("\n") == 2 and len(lines) == 4
    lines[-1] = lines[-1].split("\n")[0]
    assert max(map(len, lines)) == 79 if env == "arms" else 79 >= max(map(len, lines)) > 70
    words = rf"\d\.\d\d\d/5\.000 M steps, \d+/s, \d+:\d\d left; return: test {score}, train"
    assert "test -, train" in lines[0] and all(re.match(words, line) for line in lines[1:])


def test_a_finished_run_prints_its_table_and_the_next_two_commands(shell_run, monkeypatch):
    lines, folder = shell_run.out.splitlines(), shell_run.folder
    assert lines[0] == f"trmrl on halfcheetah_vel: 120 steps into {folder}"
    assert lines[1] == "cpu, threads: 1, processes: 1"
    assert ["M steps" in line for line in lines[2:6]] == [True, True, True, False]
    assert f"python trmrl.py --eval {folder} --episodes 20" in lines[-2]
    assert f"python plots.py --runs {folder}" in lines[-1]
    monkeypatch.setattr(trmrl.TaskFamily, "episode_length", 20)
    evaluated = cli("--eval", folder)
    assert evaluated.status == 0
    assert evaluated.out.split("\n", 1)[1].strip("\n") in shell_run.out
    titles = [f"Meta-test: {split} tasks, mean actions" for split in ("test", "ood")]
    assert [line for line in lines if line.startswith("Meta-test")] == titles


EVALS = ["", "--episodes 3 --eval-tasks 4", "--mean", "--sample"]
EVALS += ["--split train --sample --episodes 2"]


@pytest.mark.parametrize("typed", EVALS)
@pytest.mark.parametrize("env", ["points", "arms"])
def test_eval_agrees_with_meta_test_and_with_the_run(env, typed, points_run, arms_run, tmp_path):
    folder = {"points": points_run, "arms": arms_run}[env]
    result = cli("--eval", folder, "--csv", tmp_path / "rows.csv", *typed.split())
    assert result.status == 0 and set(os.listdir(folder)) == FILES
    asked = dict(zip(typed.split(), [*typed.split()[1:], ""]))
    tasks, episodes = int(asked.get("--eval-tasks", 2)), int(asked.get("--episodes", 6))
    split = asked.get("--split", "test")
    sample = "--sample" in asked or (env == "arms" and "--mean" not in asked)
    actions = "sampled" if sample else "mean"
    envs = make_any(env, tasks, trmrl.TEST_SEED, split)
    returns, success = trmrl.meta_test(trmrl.load_agent(folder), envs, episodes, sample)
    rows = csv_rows(tmp_path / "rows.csv")
    assert [float(row["return"]) for row in rows] == pytest.approx(returns.flatten(), rel=1e-5)
    assert {(row["step"], row["split"], row["actions"]) for row in rows} == {("80", split, actions)}

    # A run ends with six episodes of mean actions; on arms with sampled ones, too.
    own = [row for row in csv_rows(folder / "eval.csv") if row["step"] == "80"]
    own = [row for row in own if row["actions"] == actions]
    assert len(own) == 12 * (not sample or env == "arms")
    assert rows == own or not own or (tasks, episodes) != (2, 6)

    header, _, *lines = result.out.splitlines()
    assert header == f"trmrl, 80 steps of {env}; {tasks} {split} tasks, {actions} actions:"
    parts = {f"episode {i + 1}": np.s_[:, i] for i in range(episodes)}
    if env == "arms":
        parts |= {"left": np.s_[::2], "right": np.s_[1::2]}
    assert len(lines) == len(parts)
    for line, (name, part) in zip(lines, parts.items()):
        values = returns[part]
        mean = f"{values.mean():.1f}"
        if env == "arms":
            mean = f"{values.mean():.0f} ({success[part].mean():.0%})"
        assert line.split() == f"{name} {mean} {values.std():.1f} {values.min():.1f}".split()


def test_the_script_block_pins_what_training_requires():
    lines = (HERE / "trmrl.py").read_text().split("# /// script\n")[1].split("# ///\n")[0]
    pinned = tomllib.loads(re.sub("^# ?", "", lines, flags=re.M))["dependencies"]
    required = (HERE / "requirements.txt").read_text().split()
    others = {x.split("==")[0] for x in required if x not in pinned}
    assert set(pinned) < set(required) and others == {"pytest", "matplotlib"}
    assert all("==" in x for x in required)


# ---- 5. Figures ----------------------------------------------------------------------------------

plots.plt.switch_backend("Agg")


@pytest.fixture(autouse=True)
def figures(monkeypatch):
    """Figures stay open until the test is over."""
    close = plots.plt.close
    monkeypatch.setattr(plots.plt, "close", lambda figure: None)
    yield
    close("all")


def two_episodes(agent, rows=3):
    """Buffer of two episodes of 20 steps, with mean actions."""
    envs = trmrl.make_tasks("halfcheetah_vel", rows)
    envs.episode_length = 20
    return trmrl.collect(agent, envs, envs.tasks, 40, False, seed=0)


def pretend(folder, rows, agent="trmrl", actions=True, **settings):
    """A run without an agent. A row: step, split, task, episode, return, success, actions."""
    folder.mkdir(parents=True)
    config = asdict(trmrl.Config(**{"total_steps": 200, **settings}))
    (folder / "config.json").write_text(json.dumps(config | {"agent": agent}))
    header = "step,split,task,episode,return,success" + (",actions" if actions else "")
    lines = [",".join(map(str, row[: None if actions else 6])) for row in rows]
    (folder / "eval.csv").write_text("\n".join([header, *lines, ""]))
    (folder / "progress.csv").write_text("seconds,steps_per_second\n60,1000\n180,3000\n")
    return folder


def meta_tests(value, steps=(100, 200), episodes=(1,), split="test", success=""):
    """Two tasks. The return is value + task + episode / 10 at step 100, and 10 more at 200."""
    rows = []
    for step, task, k in itertools.product(steps, range(2), episodes):
        base = value + 10 * (step > 100)
        rows.append((step, split, task, k, base + task + k / 10, success, "mean"))
    return rows


def draw(*args):
    return plots.main([str(arg) for arg in args])


# Learning curves.


def test_a_learning_curve_is_the_mean_over_the_test_tasks(tmp_path):
    rows = meta_tests(-50, episodes=(1, 3)) + meta_tests(-900, split="ood")
    run = plots.read_run(pretend(tmp_path / "a", rows))
    assert plots.learning_curve(run) == pytest.approx({100: -49.4, 200: -39.4})
    assert plots.episode_curve(run) == {}  # two episodes show no adaptation
    rows += meta_tests(-50, episodes=(2,))
    longer = plots.read_run(pretend(tmp_path / "longer", rows))
    assert plots.episode_curve(longer) == pytest.approx({1: -39.4, 2: -39.3, 3: -39.2})
    assert plots.episode_curve(longer, "ood") == {}
    pearl = plots.read_run(pretend(tmp_path / "b", rows, agent="pearl"))  # by its third episode
    assert plots.learning_curve(pearl) == pytest.approx({100: -49.2, 200: -39.2})


def test_arms_are_shown_by_success_with_sampled_actions(tmp_path):
    sampled = [(100, "test", i, 1, 900.0, i % 2, "sampled") for i in range(4)]
    mean = [(100, "test", i, 1, 900.0, 0, "mean") for i in range(4)]
    run = plots.read_run(pretend(tmp_path / "new", mean + sampled, env="ml1_reach"))
    assert plots.learning_curve(run) == {100: 0.5}
    assert plots.panel_note("ml1_reach", {"trmrl": [run]}) == "1 seed, sampled"
    old = plots.read_run(pretend(tmp_path / "old", sampled, env="ml1_reach", actions=False))
    assert plots.learning_curve(old) == {100: 0.5}  # the first edition had mean actions only
    both = {"trmrl": [old, old], "rl2": [old]}
    assert plots.panel_note("ml1_reach", both) == "2 seeds (thin lines: 1), mean"
    assert plots.panel_note("ant_dir", both) == "mean and range of 2 seeds (thin lines: 1)"
    most = {"trmrl": [run, run, run], "rl2": [run], "varibad": [run]}  # most agents have one
    assert plots.panel_note("ml1_reach", most) == "1 seed (TrMRL: 3), sampled"
    groups, looks = {(12,): [run, run], (4,): [run]}, plots.ablation_looks("layers", [(4,), (12,)])
    note = plots.panel_note("ant_dir", groups, looks)
    assert note == "mean and range of 2 seeds (thin lines: 1)"


def test_runs_that_do_not_fit_are_left_out_with_a_reason(tmp_path, capsys):
    pretend(tmp_path / "a", meta_tests(-50, steps=(100,)), seed=4)
    pretend(tmp_path / "b", meta_tests(-50), seed=1)
    pretend(tmp_path / "c", meta_tests(-50), seed=1)
    pretend(tmp_path / "d", meta_tests(-50), seed=2, threads=7, device="cuda", run_dir="x")
    pretend(tmp_path / "e", meta_tests(-50), seed=3, heads=2)
    pretend(tmp_path / "f", [], seed=5)
    pretend(tmp_path / "g", meta_tests(-50), seed=1, agent="oracle")
    (pretend(tmp_path / "h", []) / "config.json").write_text("{")
    first = pretend(tmp_path / "i", meta_tests(-50), seed=6, actions=False) / "config.json"
    config = json.loads(first.read_text())  # of the first edition: other fields
    del config["value_lr"], config["layers"]
    first.write_text(json.dumps(config | {"reward_scale": 0.1, "tag": ""}))
    sampled = [(*row[:6], "sampled") for row in meta_tests(-50)]
    pretend(tmp_path / "j", sampled, seed=7)

    loud = SimpleNamespace(verbose=True)
    groups = plots.group_runs(plots.find_runs([tmp_path]), lambda run: run.agent, loud)
    names = {k: [run.path.name for run in each] for k, each in groups["halfcheetah_vel"].items()}
    assert names == {"trmrl": ["b", "d", "i"], "oracle": ["g"]}
    said = capsys.readouterr()
    assert f"left out {tmp_path}/a: it is not finished\n" in said.out
    assert f"left out {tmp_path}/c: another run has its seed\n" in said.out
    assert f"left out {tmp_path}/e: its settings are not those of {tmp_path}/b\n" in said.out
    assert f"left out {tmp_path}/j: its actions are not mean ones\n" in said.out
    assert f"left out {tmp_path}/f: it has no meta-test yet\n" in said.out
    assert said.err.startswith(f"skipped {tmp_path}/h: ") and said.err.count("\n") == 1


def test_a_curve_shows_the_mean_of_the_seeds_and_their_range():
    ax = plots.plt.figure().add_subplot()
    seeds = [{100: -30.0, 200: -20.0 - k, 300 + k: 0.0} for k in range(3)]
    plots.draw_curve(ax, seeds, "TrMRL", "blue", "-", "o")
    assert ax.lines[0].get_xdata().tolist() == [100, 200]  # the steps that all seeds have
    assert ax.lines[0].get_ydata().tolist() == [-30.0, -21.0]
    edge = ax.collections[0].get_paths()[0].vertices
    assert set(edge[edge[:, 0] == 200, 1]) == {-22.0, -20.0}
    plots.draw_curve(ax, seeds[:1], "oracle", "grey", ":", "^")  # n = 1: thinner, without a range
    assert len(ax.collections) == 1
    assert ax.lines[1].get_linewidth() < ax.lines[0].get_linewidth()


@pytest.mark.parametrize("value, place", [(-60, "behind"), (-40, "on track"), (-20, "ahead")])
def test_a_run_is_compared_with_ours_at_the_same_step(tmp_path, capsys, value, place):
    for seed, base in ((1, -50), (2, -40)):
        pretend(tmp_path / "ours" / str(seed), meta_tests(base), seed=seed)
    yours = pretend(tmp_path / "ours" / "yours", [(150, "test", 0, 1, value, "", "mean")], seed=1)
    assert draw("--compare", yours, "--runs", tmp_path / "ours", "--out", tmp_path) == 0
    drawn, verdict = capsys.readouterr().out.splitlines()
    assert drawn.endswith("from 3 runs")
    assert verdict == f"after 0.00 M steps: return {value}, ours -44.4 to -34.4: {place}"


def test_panels_fill_their_rows_and_arms_are_below():
    names = ["ml1_reach", "halfcheetah_vel", "ml1_push", "ant_dir", "ml45_train"]
    figure, axes = plots.env_panels(names)
    assert list(axes) == ["halfcheetah_vel", "ant_dir", "ml1_reach", "ml1_push", "ml45_train"]
    assert [len(row.axes) for row in figure.subfigs] == [2, 3]
    assert [len(plots.env_panels(names[:n])[0].subfigs) for n in (1, 2, 3)] == [1, 1, 2]


def test_on_the_log_axis_equal_ratios_are_equally_far_apart_and_0_has_its_place():
    ax = plots.plt.figure().add_subplot()
    plots.log_axis(ax)
    height = {y: ax.transScale.transform((1, y))[1] for y in (-300, -200, -30, -20, 0, 50)}
    assert height[-200] - height[-300] == pytest.approx(height[-20] - height[-30])
    assert height[-20] < height[0] < height[50]
    assert height[0] - height[-20] < height[-20] - height[-200]  # a return of 0 squeezes no curve
    ax.set_ylim(-345, -18)
    assert [y for y in ax.get_yticks() if -345 < y < -18] == [-20, -30, -50, -70, -100, -200, -300]


@pytest.mark.parametrize(
    "values, low, high",
    [((-2000, -20), -345, -20), ((-480, -470), -480, -150), ((-300,), -345, -150), ((0,), -345, 0)],
)
def test_a_collapse_does_not_squeeze_the_curves_and_weak_agents_stay_in_view(values, low, high):
    figure, ax = plots.plt.subplots()
    plots.log_axis(ax)
    ax.plot(values, "o")
    plots.draw_references(ax, plots.REFERENCES["halfcheetah_vel"])
    figure.canvas.draw()
    bottom, top = ax.get_ylim()
    assert bottom == pytest.approx(low, abs=30) and top == pytest.approx(high, abs=30)
    assert bottom < max(values) < top


def test_an_agent_that_stands_still_is_within_the_panel():
    ax = plots.plt.figure().add_subplot()
    plots.log_axis(ax)
    ax.plot([-699, -701])
    plots.draw_references(ax, plots.REFERENCES["ood"])
    assert ax.get_ylim() == pytest.approx((-805, -350))


def test_settings_of_an_ablation_differ_in_lightness_and_tfixup_in_line_and_marker():
    looks = plots.ablation_looks("tfixup", [(2, False), (2, True), (12, False), (12, True)])
    lightness = {key: sum(look[1][:3]) for key, look in looks.items()}
    assert lightness[2, True] == lightness[2, False] < lightness[12, True]
    assert [look[2] for look in looks.values()] == ["--", "-", "--", "-"]
    ax = plots.plt.figure().add_subplot()
    plots.meta_training(ax, {key: [{100: -50}] for key in looks}, looks)
    hollow = [line.get_markerfacecolor() == "white" for line in ax.lines]
    assert hollow == [True, False, True, False]


def test_tfixup_is_compared_at_depths_that_were_also_trained_without_it(tmp_path):
    folder = tmp_path / "ablations" / "tfixup"
    for name, layers, tfixup in (("a", 1, True), ("b", 2, True), ("c", 2, False)):
        pretend(folder / name, meta_tests(-50), layers=layers, tfixup=tfixup)
    found = plots.ablation_runs("tfixup", plots.find_runs([tmp_path]))
    assert [run.path.name for run in found] == ["b", "c"]


def test_depths_are_compared_only_between_runs_that_differ_in_nothing_else(tmp_path):
    folder = tmp_path / "ablations"
    pretend(folder / "default" / "a", meta_tests(-50), layers=2)
    pretend(folder / "tfixup" / "b", meta_tests(-50), layers=12, seed=2)
    pretend(folder / "tfixup" / "c", meta_tests(-50), layers=12, gamma=0.9)
    pretend(folder / "tfixup" / "d", meta_tests(-50), layers=12, tfixup=False)
    found = plots.ablation_runs("layers", plots.find_runs([tmp_path]))
    assert [run.path.name for run in found] == ["a", "b"]


# Inside an agent.


@torch.no_grad()
def test_looking_inside_shows_what_the_agent_acted_on():
    agent = make_agent((17, 6, 1), memory_length=4, layers=1)
    buffer = two_episodes(agent)
    memories, weights = plots.look_inside(agent, buffer)
    assert memories.shape == (2, 3, 40, 16) and weights.shape == (3, 40, 4)
    assert_same(agent.policy_head(torch.as_tensor(memories[-1])), buffer.action, "other actions")
    empty = np.arange(4) > (np.arange(40) % 20)[:, None]  # no memory is older than its episode
    assert (np.isnan(weights) == empty).all()

    # By hand, at step 9: the memories of the steps 6 to 9, the last without action and reward.
    tokens = buffer.token[1, 6:10].clone()
    tokens[3, 17:] = 0.0
    e = agent.phi(tokens) + agent.positions
    assert_same(memories[0, 1, 9], e[3], "another working memory")
    layer = agent.transformer.layers[0]
    keys, query = layer.key(e).view(4, 2, 8), layer.query(e[3]).view(2, 8)  # two heads
    alpha = ((keys * query).sum(dim=-1) / math.sqrt(8)).softmax(dim=0).mean(dim=1)
    assert_same(weights[1, 9], alpha.flip(0), "not alpha of Eq. 4, the youngest first")


def test_the_last_layer_is_its_own_refinement():
    agent = make_agent((17, 6, 1), memory_length=4)
    agent.policy_head = torch.nn.Linear(16, 6)  # linear in e^L: only there is the regression exact
    buffer = two_episodes(agent, rows=6)
    representation, regression = plots.refinement_errors(agent, buffer, train=4)
    memories, _ = plots.look_inside(agent, buffer)
    first, last = (torch.as_tensor(memories[i]) for i in (0, -1))
    cosine = torch.cosine_similarity(first, last, dim=-1).mean()
    assert representation[[0, -1]] == pytest.approx([1 - float(cosine), 0.0], abs=1e-5)
    assert representation[0] > 1e-3 and regression[-1] < 1e-9 < 1e-6 < regression[0]


def test_online_adaptation_marks_where_the_velocity_stays_near_its_target():
    tasks = trmrl.make_tasks("halfcheetah_vel", 20, split="test").tasks
    assert np.allclose(plots.TEST_TARGETS, tasks[:, 0])
    _, axes = plots.plt.subplots(1, 4)
    velocity = np.zeros((4, 200))
    velocity[0, 7:] = 1.0
    velocity[1, 90:] = 1.0  # beyond the axis
    velocity[3, 7:150] = 1.0  # it leaves again, beyond the axis
    plots.online_adaptation(axes, velocity, [1.0] * 4)
    words = [ax.texts[0].get_text() for ax in axes]
    assert words == ["7 steps", "90 steps", "not settled", "not settled"]
    assert [ax.get_xlim() for ax in axes] == [(-2, 60)] * 4


def test_projections_are_principal_components_and_the_discriminant_of_fisher():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4)) @ np.diag([3.0, 2.0, 1.0, 0.5]) + 7.0
    components, shares = plots.pca(x, 3)
    values, vectors = np.linalg.eigh(np.cov(x.T))
    assert shares == pytest.approx(values[:0:-1] / values.sum())
    assert np.abs(components @ vectors[:, :0:-1]) == pytest.approx(np.eye(3), abs=1e-6)

    memories = rng.normal(size=(2, 500, 3)) @ rng.normal(size=(3, 3)) + rng.normal(size=(2, 1, 3))
    within = np.concatenate(memories - memories.mean(axis=1, keepdims=True))
    expected = np.linalg.solve(within.T @ within, np.subtract(*memories.mean(axis=1)))
    found = plots.discriminants(memories)[:, 0]
    cosine = found @ expected / np.linalg.norm(found) / np.linalg.norm(expected)
    assert abs(cosine) == pytest.approx(1.0)

    # The memories of an untrained agent may vary in a few directions only.
    flat = (memories @ rng.normal(size=(3, 64))).astype(np.float32)
    assert np.isfinite(plots.discriminants(flat)).all()


def test_densities_are_those_of_normal_distributions_and_so_is_their_overlap():
    rng, grid = np.random.default_rng(0), np.linspace(-6, 9, 1000)
    values = np.stack([rng.normal(size=4000), rng.normal(loc=2.0, size=4000)])
    estimate = plots.GaussianKDE(values[0])(grid)
    spread = 1 + 4000**-0.4  # the kernel widens the distribution
    exact = np.exp(-(grid**2) / (2 * spread)) / math.sqrt(2 * math.pi * spread)
    assert np.trapezoid(estimate, grid) == pytest.approx(1.0, abs=1e-6)
    assert np.abs(estimate - exact).max() < 0.02
    ax = plots.plt.figure().add_subplot()
    [overlap] = plots.task_distributions(ax, values, [1.0, 2.0])
    assert overlap == pytest.approx(math.erfc(1 / math.sqrt(2 * spread)), abs=0.02)


def save_run(folder, env="halfcheetah_vel", **settings):
    """A run folder with an agent that has learned nothing."""
    config = trmrl.Config(**SMALL | dict(env=env, memory_length=4, total_steps=200) | settings)
    run = trmrl.Run(folder, config, trmrl.make_tasks, trmrl.TrMRL)
    agent = run.agent
    for step, split in itertools.product((100, 200), ("test", "ood")):
        agent.trained_steps = step
        returns = np.full((2, 6 if step == 200 else 1), -280.0 - step)
        run.add_rows("eval.csv", trmrl.eval_rows(agent, split, False, returns, returns * np.nan))
    agent.trained_steps = 100
    run.save()


@pytest.fixture(scope="module")
def weak_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    save_run(folder / "halfcheetah_vel" / "trmrl-seed1", layers=1)
    save_run(folder / "ant_dir" / "trmrl-seed1", env="ant_dir")
    for which, (names, values) in plots.ABLATIONS.items():
        for i, value in enumerate(values):
            save_run(folder / "ablations" / which / str(i), **dict(zip(names, value)))
    return folder


def test_every_figure_is_drawn_with_weak_agents(weak_runs, tmp_path, capsys):
    assert draw("--runs", weak_runs, "--out", tmp_path, "--pdf") == 0
    said = capsys.readouterr()
    assert said.err == ""
    for name in plots.FIGURES:
        assert f"{tmp_path / name}.png: from " in said.out
        assert (tmp_path / f"{name}.pdf").read_bytes()[:4] == b"%PDF"
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.info["dpi"] == pytest.approx((200, 200), abs=0.1)
    figures = [plots.plt.figure(number) for number in plots.plt.get_fignums()]
    notes = [figure.get_supxlabel() for figure in figures]
    assert notes.count("half-trained: 0.0001 of 0.0002 M steps") == 5
    titles = " ".join(figure.get_suptitle() for figure in figures)
    assert "Target found in 2 of 20 test tasks" in titles  # standing still is near 0.075 and 0.225


def test_without_agents_or_runs_each_figure_says_what_to_type(tmp_path, capsys):
    bad = pretend(tmp_path / "bad" / "a", meta_tests(-50))
    (bad / "agent.pt").write_bytes(b"no agent")
    assert draw("latent", "--runs", tmp_path / "bad") == 0
    needed = "latent: needs a trained agent: python trmrl.py --env halfcheetah_vel (refused: "
    assert capsys.readouterr().out.startswith(needed)
    (tmp_path / "none").mkdir()
    names = [*plots.FIGURES, "film"]
    assert draw(*names, "--runs", tmp_path / "none", "--out", tmp_path / "out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == names
    for line in lines:
        trmrl.parse(line.split("python trmrl.py ")[1].split())
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_line_and_stop_no_other_figure(tmp_path, capsys, monkeypatch):
    for args, message in {
        ("meta_trainig",): "unknown figure 'meta_trainig' (did you mean meta_training?)",
        ("--runs", tmp_path / "no"): f"there is no folder {tmp_path}/no",
        ("--compare", tmp_path): f"--compare takes a run with a meta-test, not {tmp_path}",
        ("benchmark", "--env", "ml1_reach"): "benchmark takes --env halfcheetah_vel or ant_dir",
    }.items():
        assert draw(*args) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"plots.py: {message}") and said.count("\n") == 1
    pretend(tmp_path / "runs" / "a", meta_tests(-50))
    monkeypatch.setitem(plots.FIGURES, "latent", lambda runs, options: 1 / 0)
    where = "--runs", tmp_path / "runs", "--out", tmp_path
    assert draw("latent", "meta_training", *where) == 1
    assert "latent: not drawn (ZeroDivisionError" in capsys.readouterr().err
    assert (tmp_path / "meta_training.png").exists()


# Film, benchmark, tables.


def test_the_film_shows_the_bodies_where_they_were(weak_runs, tmp_path, monkeypatch):
    states, shown, advance = [], [], trmrl.MujocoFamily.advance

    def spy(self, actions):
        result = advance(self, actions)
        states.append(self.physics[:, 1 : 1 + self.model.nq].copy())
        return result

    def paint(models, positions, goals):
        shown.append(positions)
        return np.zeros((*positions.shape[:2], 30, 40, 3), dtype=np.uint8)

    monkeypatch.setattr(trmrl.MujocoFamily, "advance", spy)
    monkeypatch.setattr(plots, "photograph", paint)
    assert draw("film", "--runs", weak_runs / "ant_dir", "--out", tmp_path) == 0
    assert np.array_equal(shown[0], np.stack(states, axis=1)) and len(shown[0]) == 2
    assert (tmp_path / "film_ant_dir.gif").read_bytes()[:3] == b"GIF"


def test_the_benchmark_runs_and_draws_each_of_its_works(tmp_path, monkeypatch):
    tiny = dict(num_tasks=2, episodes_per_trial=1, eval_tasks=1)
    monkeypatch.setitem(trmrl.PRESETS, "halfcheetah_vel", trmrl.PRESETS["halfcheetah_vel"] | tiny)
    steps = {}

    def rates(works):
        for (_, name), (work, count) in works.items():
            work()
            steps[name] = count
        return {name: 100.0 * (i + 1) for i, name in enumerate(works)}

    monkeypatch.setattr(plots, "rates", rates)
    assert draw("benchmark", "--device", "cpu", "--out", tmp_path) == 0
    names = ["raw MuJoCo (limit)", "Gymnasium's SyncVectorEnv", "our environments"]
    names += ["forward and backward passes (limit)", "our update", "our iteration"]
    assert steps == dict.fromkeys(names, 400)  # 10 minibatches of 200 in 5 epochs: 400, too
    assert [row["what"] for row in plots.read_csv(tmp_path / "benchmark.csv")] == names
    axes = plots.plt.gcf().axes
    assert [ax.get_title(loc="left") for ax in axes] == ["physics", "PPO update", "whole iteration"]
    assert [bar.get_width() for ax in axes for bar in ax.patches] == [100, 200, 300, 400, 500, 600]
    hollow = [bar.get_facecolor() == (1, 1, 1, 1) for ax in axes for bar in ax.patches]
    assert hollow == [name.endswith("(limit)") for name in names]


def test_tables_are_written_between_their_markers(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "results"
    rows = meta_tests(-70, episodes=(1, 2, 3, 6)) + meta_tests(-200, steps=(200,), split="ood")
    for seed in (1, 2):
        moved = [(*row[:4], row[4] - 10 * seed, *row[5:]) for row in rows]
        pretend(results / "halfcheetah_vel" / f"trmrl-seed{seed}", moved, seed=seed)
    pretend(results / "halfcheetah_vel" / "maml-seed1", meta_tests(-70, episodes=(1, 3)), "maml")
    arm = [(200, "test", i, 1, 900.0, int(i > 0), "sampled") for i in range(4)]
    arm += [(200, "test", i, 1, 900.0, int(i > 1), "mean") for i in range(4)]
    pretend(results / "ml1_reach" / "trmrl-seed1", arm, env="ml1_reach")
    names = "summary halfcheetah_vel ml1_reach ml1_push".split()
    document = "".join(f"## {name}\n<!-- table {name} -->\nold\n<!-- end -->\n" for name in names)
    path = tmp_path / "docs" / "results.md"
    path.parent.mkdir()
    path.write_text(document + "The end.\n")

    for _ in range(2):  # a second time changes nothing
        assert draw("tables") == 0
        text = path.read_text()
        assert text.endswith("<!-- end -->\nThe end.\n") and "old" not in text
        tables = dict(zip(names, [part.split("\n\n")[1] for part in text.split("## ")[1:]]))
        assert "| HalfCheetahVel | -74.4 (n = 2) | -59.2 (n = 1) |" in tables["summary"]
        head, _, ours, maml = tables["halfcheetah_vel"].splitlines()
        cells = dict(zip(head.split(" | "), ours.split(" | ")))
        assert cells["episode 1"] == "-74.4 (-79.4 to -69.4)" and cells["episode 6"] == "-73.9"
        assert cells["episode 1, out of distribution"] == "-204 (-209 to -199)"
        assert (cells["minutes"], cells["M steps to -50"]) == ("3", "-")
        assert maml.startswith("| MAML | 1 | 0.0 | -59.4 | - | -59.2 | - |")
        assert "| 75% | - | - | - | 50% |" in tables["ml1_reach"]
        assert tables["ml1_push"] == "No runs yet."

    path.write_text("<!-- table sumary -->\n<!-- end -->")
    assert draw("tables") == 2
    assert "no table 'sumary'; there are: summary, classes, " in capsys.readouterr().err
