"""The claims of the paper and of the README, each against something independent. Run: pytest"""
import collections
import contextlib
import csv
import importlib
import io
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plots
import trmrl

HERE = Path(__file__).parent
SMALL = dict(
    threads=1,
    device="cpu",
    layers=2,
    d_model=16,
    heads=2,
    d_ff=32,
    eval_tasks=2,
    eval_episodes=1,
    final_episodes=1,
)


class PointMass(VectorEnv):
    """Find a hidden goal on the unit circle: r = -distance. Who does not adapt best stays put: -1 a step."""
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    episode_length = 20

    def __init__(self, num_tasks, seed=0, split="train"):
        self.num_envs = num_tasks
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.x, self.elapsed = np.zeros((num_tasks, 2)), np.zeros(num_tasks, dtype=int)
        if split not in ("train", "test"):
            raise ValueError(split)
        angles = 2 * np.pi * np.arange(num_tasks)[:, None] / num_tasks
        self.tasks = angles if split == "test" else self.sample_tasks(np.random.default_rng(seed))

    def sample_tasks(self, rng):
        return rng.uniform(0, 2 * np.pi, (self.num_envs, 1))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        options = options or {}
        self.tasks = options.get("tasks", self.tasks)
        mask = options.get("reset_mask", np.ones(self.num_envs, dtype=bool))
        self.x[mask], self.elapsed[mask] = 0.0, 0
        return self.x.astype(np.float32), {}

    def step(self, actions):
        self.x = self.x + 0.25 * np.clip(actions, -1, 1)
        self.elapsed += 1
        goal = np.concatenate([np.cos(self.tasks), np.sin(self.tasks)], axis=1)
        reward = -np.linalg.norm(self.x - goal, axis=1)
        return self.x.astype(np.float32), reward, np.zeros(self.num_envs, bool), self.elapsed >= 20, {}


def make_points(env, num_tasks, seed=0, split="train"):
    return PointMass(num_tasks, seed, split)


def make_agent(state_size=3, actions=2, **settings):
    torch.manual_seed(0)
    config = trmrl.Config(**{**SMALL, **settings})
    return trmrl.Agent(config, state_size, -np.ones(actions), np.ones(actions))


def awake(agent):
    """Random instead of near-zero output layers, so that differences show in the actions."""
    nn.init.normal_(agent.policy[-1].weight)
    return agent


def csv_rows(path, without=("seconds", "steps_per_second")):
    with open(path) as f:
        return [{k: v for k, v in row.items() if k not in without} for row in csv.DictReader(f)]


def cli(*args):
    """The command line, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = trmrl.main([str(x) for x in args])
        except SystemExit as stop:                                        # --help
            status = stop.code
    return types.SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())


# ---- tasks (App. B) --------------------------------------------------------------------------------------

def test_batched_half_cheetah_equals_gym_make():
    envs, one = trmrl.make_tasks("halfcheetah_vel", 50, 3), gymnasium.make("HalfCheetah-v5").unwrapped
    rng = np.random.default_rng(0)
    obs, _ = envs.reset(seed=1)
    one.reset(seed=0)
    for _ in range(20):
        states, actions = envs.state.copy(), rng.uniform(-1.5, 1.5, (50, 6))
        obs, reward, terminated, truncated, info = envs.step(actions)
        assert obs.dtype == np.float32 and not terminated.any()
        for i in range(50):
            one.set_state(states[i, 1:10], states[i, 10:])
            one.data.qacc_warmstart[:] = 0
            expected, _, _, _, theirs = one.step(np.clip(actions[i], -1, 1))
            np.testing.assert_allclose(obs[i], expected, rtol=1e-6, atol=1e-6)
            assert info["x_velocity"][i] == pytest.approx(theirs["x_velocity"], abs=1e-8)
            cost = 0.05 * np.sum(np.clip(actions[i], -1, 1) ** 2)
            assert reward[i] == pytest.approx(-abs(theirs["x_velocity"] - envs.tasks[i, 0]) - cost, abs=1e-5)


def test_batched_ant_equals_gym_make():
    envs, one = trmrl.make_tasks("ant_dir", 20, 3), gymnasium.make("Ant-v5").unwrapped
    rng, falls = np.random.default_rng(0), 0
    envs.reset(seed=1)
    one.reset(seed=0)
    for _ in range(60):
        states, actions = envs.state.copy(), rng.uniform(-1.5, 1.5, (20, 8))
        obs, reward, terminated, _, info = envs.step(actions)
        for i in range(20):
            one.set_state(states[i, 1:16], states[i, 16:])
            one.data.qacc_warmstart[:] = 0
            expected, _, fell, _, theirs = one.step(np.clip(actions[i], -1, 1))
            np.testing.assert_allclose(obs[i], expected[:27], rtol=1e-5, atol=1e-5)
            assert terminated[i] == fell
            velocity = (one.data.qpos[0] - states[i, 1]) / 0.05
            assert info["x_velocity"][i] == pytest.approx(velocity, abs=1e-6)
            expected = envs.tasks[i, 0] * velocity + theirs["reward_ctrl"] + theirs["reward_survive"]
            assert reward[i] == pytest.approx(expected, abs=1e-4)
        falls += terminated.sum()
        if terminated.any():
            envs.reset(options={"reset_mask": terminated})
    assert falls and envs.tasks.min() == -1 and envs.tasks.max() == 1


@pytest.mark.parametrize(
    "env, body, nq", [("halfcheetah_vel", "HalfCheetah-v5", 9), ("ant_dir", "Ant-v5", 15)]
)
def test_start_states_are_those_of_gymnasium(env, body, nq):
    envs, one = trmrl.make_tasks(env, 4000), gymnasium.make(body).unwrapped
    envs.reset(seed=0)
    noise = envs.state[:, 1:] - np.concatenate([one.init_qpos, one.init_qvel])
    assert np.abs(noise[:, :nq]).max() <= 0.1 and noise[:, :nq].std() == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert noise[:, nq:].std() == pytest.approx(0.1, rel=0.02)


def test_an_ant_falls_where_gymnasium_says():
    envs, one = trmrl.make_tasks("ant_dir", 1), gymnasium.make("Ant-v5").unwrapped
    one.reset(seed=0)
    for height in (0.1, 0.19, 0.21, 0.29, 0.5, 0.99, 1.01, 2.0):
        one.data.qpos[2] = envs.state[0, 3] = height
        assert envs.fallen()[0] != one.is_healthy


def test_ant_tasks_are_forward_and_backward():
    assert trmrl.make_tasks("ant_dir", 4, 1, "test").tasks.ravel().tolist() == [1, -1, 1, -1]
    assert 350 < (trmrl.make_tasks("ant_dir", 1000, 1).tasks == 1).sum() < 650
    with pytest.raises(trmrl.UserError, match="train, test"):
        trmrl.make_tasks("ant_dir", 4, 1, "ood")


def test_test_tasks_are_fixed_and_ood_tasks_lie_outside():
    test = trmrl.make_tasks("halfcheetah_vel", 20, 1, "test").tasks
    np.testing.assert_allclose(test[:, 0], 0.075 + 0.15 * np.arange(20))
    np.testing.assert_array_equal(test, trmrl.make_tasks("halfcheetah_vel", 20, 2, "test").tasks)
    ood = trmrl.make_tasks("halfcheetah_vel", 20, 1, "ood").tasks
    train = [trmrl.make_tasks("halfcheetah_vel", 500, seed).tasks for seed in (1, 2)]
    assert ood.min() > 3 > train[0].max() and ood.max() < 4 and train[0].min() > 0
    assert np.ptp(train[0]) > 2.9 and not np.isin(train[0], train[1]).any()
    np.testing.assert_array_equal(train[0], trmrl.make_tasks("halfcheetah_vel", 500, 1).tasks)


def test_episodes_end_by_the_clock_and_resets_keep_to_their_mask():
    envs = trmrl.make_tasks("halfcheetah_vel", 3, 1)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED
    first, _ = envs.reset(seed=5)
    np.testing.assert_array_equal(first, envs.reset(seed=5)[0])
    ends = []
    for _ in range(200):
        obs, _, terminated, truncated, _ = envs.step(np.zeros((3, 6)))
        ends.append(truncated.tolist())
    assert ends == [[False] * 3] * 199 + [[True] * 3] and not terminated.any()
    tasks = envs.tasks.copy()
    again, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
    np.testing.assert_array_equal(again[[0, 2]], obs[[0, 2]])
    assert not np.array_equal(again[1], obs[1])
    assert envs.step(np.zeros((3, 6)))[3].tolist() == [True, False, True]
    np.testing.assert_array_equal(envs.tasks, tasks)
    envs.reset(options={"tasks": [[0.5], [1.0], [1.5]]})
    assert envs.tasks.ravel().tolist() == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("value", [np.nan, 1e300, 1e8, 1e4])
def test_a_simulation_that_blows_up_is_a_terminal_with_finite_numbers(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                                           # MuJoCo keeps a log where it runs
    envs = trmrl.make_tasks("halfcheetah_vel", 3, 1)
    envs.reset(seed=0)
    envs.step(np.zeros((3, 6)))
    calm = envs.state.copy()
    rollout = envs.pool

    class Broken:  # task 1 leaves the physics with such a state
        def rollout(self, models, datas, initial, controls, **kwargs):
            initial = initial.copy()
            initial[1, 12] = value
            rollout.rollout(models, datas, initial, controls, **kwargs)

    envs.pool = Broken()
    obs, reward, terminated, _, info = envs.step(np.zeros((3, 6)))
    assert terminated.tolist() == info["blown_up"].tolist() == [False, True, False]
    assert np.isfinite(obs).all() and np.isfinite(reward).all()
    np.testing.assert_array_equal(envs.state[1], calm[1])


def test_an_action_that_is_not_a_number_is_none():
    envs = trmrl.make_tasks("halfcheetah_vel", 2, 1)
    envs.reset(seed=0)
    obs, reward, terminated, _, _ = envs.step(np.full((2, 6), np.nan))
    assert np.isfinite(obs).all() and np.isfinite(reward).all() and not terminated.any()


# ---- working memory (Sec. 4.1, "Memory Write Logic", Algorithm 1) ----------------------------------------

@pytest.mark.parametrize("N", [1, 2, 5, 25])
def test_the_memory_is_a_queue_per_task(N):
    rng, B = np.random.default_rng(N), 4
    memory = trmrl.WorkingMemory(B, N, 3, 6, "cpu")
    queues = [collections.deque(maxlen=max(N - 1, 0)) for _ in range(B)]
    for t in range(60):
        state = torch.as_tensor(rng.normal(size=(B, 3)), dtype=torch.float32)
        memory.begin(state)
        for b in range(B):
            expected = [*queues[b], np.concatenate([state[b], np.zeros(3)])]
            assert memory.current[b] == len(expected) - 1
            np.testing.assert_array_equal(
                memory.slots[b, : len(expected)], np.stack(expected).astype(np.float32)
            )
        rest = torch.as_tensor(rng.normal(size=(B, 3)), dtype=torch.float32)
        memory.complete(rest)
        for b in range(B):
            queues[b].append(np.concatenate([state[b], rest[b]]))
        done = rng.random(B) < 0.05
        memory.forget(torch.as_tensor(done))
        for b in np.flatnonzero(done):
            queues[b].clear()


@pytest.mark.parametrize("keep_memory", [False, True])
@pytest.mark.parametrize("N", [1, 3, 12])
def test_gathered_windows_equal_the_queue_at_every_step(N, keep_memory):
    agent = make_agent(2, 2, memory_length=N, keep_memory=keep_memory)
    seen, remember = [], agent.remember

    def spy(x, current):
        seen.append((x.clone(), current.clone()))
        return remember(x, current)

    agent.remember = spy
    trials = trmrl.collect(agent, Falling(6), 2, True, 0)
    B, T = trials.logp.shape
    start = trials.start + T * torch.arange(B)[:, None]
    for t in range(T):
        index = torch.arange(B) * T + t
        x, current = trmrl.windows(trials.memories.flatten(0, 1), index, start.flatten()[index], N, 2)
        assert torch.equal(current, seen[t][1])
        visible = torch.arange(N) <= current[:, None]
        torch.testing.assert_close(x[visible], seen[t][0][visible], rtol=0, atol=0)


class Falling(PointMass):
    """A point mass that falls at random, by its own generator."""

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        return obs, reward, self.np_random.random(self.num_envs) < 0.1, truncated, info


def test_the_memory_holds_the_action_the_physics_saw():
    agent = make_agent(2, 2, memory_length=3)
    agent.reset(2)
    agent.act(np.zeros((2, 2)))
    agent.observe(np.array([[5.0, -0.5], [-7.0, 0.25]]), np.array([1.0, 2.0]), np.array([False, True]))
    agent.act(np.ones((2, 2)))
    assert agent.memory.slots[0, 0, 2:].tolist() == [1.0, -0.5, 1.0, 0.0]
    assert agent.memory.current.tolist() == [1, 0]  # the second task has ended: it starts anew
    assert agent.memory.slots[1, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


# ---- the transformer (Sec. 3.2, 4.2) ---------------------------------------------------------------------

@pytest.mark.parametrize("tfixup", [True, False])
@pytest.mark.parametrize("N", [1, 2, 5, 25])
def test_future_memories_do_not_change_the_present(N, tfixup):
    torch.manual_seed(N)
    net = trmrl.Transformer(3, 16, 4, 32, tfixup)
    e = torch.randn(2, N, 16)
    memories, _ = net.trace(e)
    for slot in range(N):
        other = e.clone()
        other[:, slot] += torch.randn(2, 16)
        for before, after in zip(memories[1:], net.trace(other)[0][1:]):
            assert torch.equal(before[:, :slot], after[:, :slot])         # the past does not change ...
            changed = (before[:, slot:] - after[:, slot:]).abs().amax(dim=-1)
            assert (changed > 1e-6).all()  # ... the present and what follows does
        for now in range(N):
            current = torch.tensor([now, now])
            same = torch.equal(net(e, current), net(other, current))
            assert same == (slot > now)  # empty slots lie behind the current one


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_the_last_layer_with_one_query_equals_the_plain_path(layers):
    torch.manual_seed(1)
    net = trmrl.Transformer(layers, 32, 4, 64, True)
    e, current = torch.randn(50, 7, 32), torch.randint(7, (50,))
    plain = net.trace(e)[0][-1][torch.arange(50), current]
    torch.testing.assert_close(net(e, current), plain, rtol=1e-5, atol=1e-5)


def test_the_post_ln_encoder_equals_pytorchs():
    torch.manual_seed(2)
    d, heads, L, N = 24, 4, 3, 6
    net = trmrl.Transformer(L, d, heads, 48, tfixup=False)
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, heads, 48, dropout=0.0, batch_first=True), L,
                                   enable_nested_tensor=False)
    for p in net.parameters():                                            # biases and norms too
        p.data += 0.1 * torch.randn_like(p)
    for a, b in zip(net.layers, theirs.layers):
        b.self_attn.in_proj_weight.data = torch.cat([a.q.weight, a.k.weight, a.v.weight]).data
        b.self_attn.in_proj_bias.data = torch.cat([a.q.bias, a.k.bias, a.v.bias]).data
        for ours, module in ((a.out, b.self_attn.out_proj), (a.ff1, b.linear1), (a.ff2, b.linear2),
                             (a.norm1, b.norm1), (a.norm2, b.norm2)):
            module.load_state_dict(ours.state_dict())
    e = torch.randn(5, N, d)
    mask = nn.Transformer.generate_square_subsequent_mask(N)
    torch.testing.assert_close(
        net.trace(e)[0][-1], theirs(e, mask=mask, is_causal=True), rtol=1e-4, atol=1e-5
    )


def test_without_layer_norm_it_equals_a_few_lines_of_einsum():
    torch.manual_seed(3)
    d, h, N = 12, 3, 5
    net = trmrl.Transformer(2, d, h, 20, tfixup=True)
    e = torch.randn(4, N, d)
    x, weights = e, []
    for layer in net.layers:
        q, k, v = (
            torch.einsum("bnd,hkd->bhnk", x, w.weight.view(h, d // h, d)) for w in (layer.q, layer.k, layer.v)
        )
        scores = torch.einsum("bhik,bhjk->bhij", q, k) / (d / h) ** 0.5
        exp = scores.exp() * torch.ones(N, N).tril()
        alpha = exp / exp.sum(-1, keepdim=True)
        mu = torch.einsum("bhij,bhjk->bihk", alpha, v).reshape(4, N, d)
        x = x + mu @ layer.out.weight.T
        x = x + torch.relu(x @ layer.ff1.weight.T) @ layer.ff2.weight.T
        weights.append(alpha)
    memories, alphas = net.trace(e)
    torch.testing.assert_close(memories[-1], x, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(alphas, weights):
        torch.testing.assert_close(ours, theirs)


def test_positions_are_the_sinusoids_of_the_transformer_paper():
    table = trmrl.sinusoids(7, 8)
    for position, i in itertools.product(range(7), range(4)):
        angle = position / 10_000 ** (2 * i / 8)
        assert table[position, 2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
        assert table[position, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


# ---- T-Fixup (Sec. 3.3) ----------------------------------------------------------------------------------

@pytest.mark.parametrize("tfixup", [True, False])
@pytest.mark.parametrize("L", [1, 4, 12])
def test_every_weight_has_the_size_that_t_fixup_says(L, tfixup):
    d, ff = 128, 512
    agent = make_agent(60, 20, d_model=d, d_ff=ff, heads=4, layers=L, tfixup=tfixup)
    scale = 0.67 * L ** -0.25 if tfixup else 1.0

    def xavier(a, b):
        return (2 / (a + b)) ** 0.5

    for layer in agent.transformer.layers:
        for name, a, b, factor in (("q", d, d, 1), ("k", d, d, 1), ("v", d, d, scale), ("out", d, d, scale),
                                   ("ff1", d, ff, scale), ("ff2", ff, d, scale)):
            weight = getattr(layer, name).weight
            assert weight.std().item() == pytest.approx(factor * xavier(a, b), rel=0.03), name
            assert getattr(layer, name).bias.abs().max() == 0
    expected = d ** -0.5 * (9 * L) ** -0.25 if tfixup else xavier(82, d)
    assert agent.phi.weight.std().item() == pytest.approx(expected, rel=0.03)
    assert any(isinstance(m, nn.LayerNorm) for m in agent.modules()) != tfixup


def depth_growth(scaled):
    """(output size, change of the output by one Adam step) of 12 layers without layer norm."""
    torch.manual_seed(0)
    net = trmrl.Transformer(12, 64, 4, 256, tfixup=True)
    if not scaled:  # plain Xavier, still without layer norm
        for layer in net.layers:
            for linear in (layer.v, layer.out, layer.ff1, layer.ff2):
                nn.init.xavier_uniform_(linear.weight)
    e, current = torch.randn(64, 5, 64) * 0.3, torch.full((64,), 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    before = net(e, current)
    before.mean().backward()
    optimizer.step()
    return before.norm(dim=-1).mean().item() / e[:, -1].norm(dim=-1).mean().item(), \
        (net(e, current) - before).norm(dim=-1).mean().item()


def test_t_fixup_bounds_twelve_layers_without_layer_norm():
    size, change = depth_growth(scaled=True)
    wild_size, wild_change = depth_growth(scaled=False)
    assert size < 4 < 20 < wild_size
    assert change < 15 and wild_change > 5 * change


# ---- Theorem 1 (Sec. 4.3, App. F) ------------------------------------------------------------------------

def test_theorem_1_holds_for_cosine_similarity_but_not_for_dot_products():
    torch.manual_seed(0)
    layer = trmrl.Layer(8, 1, 16, layer_norm=False)
    violated = 0
    for _ in range(200):
        e = torch.randn(1, 6, 8)
        _, alpha = layer(e, e, torch.ones(6, 6, dtype=torch.bool))
        alpha, v = alpha[0, 0, -1].detach(), layer.v(e)[0].detach()  # posterior and candidates in V space
        unit = v / v.norm(dim=-1, keepdim=True)
        consensus = alpha @ unit

        def cosine(x):  # minus the Bayes risk of answering x
            return (alpha * torch.cosine_similarity(unit, x[None], dim=-1)).sum()

        assert cosine(consensus) >= max(cosine(x) for x in unit) - 1e-6
        mean = alpha @ v

        def dot(x):
            return (alpha * (v @ x)).sum()

        violated += bool(dot(mean) < max(dot(x) for x in v))
    assert violated == 200  # never better than the best candidate


# ---- the agent -------------------------------------------------------------------------------------------

def test_log_probability_and_entropy_equal_torch_distributions():
    agent = make_agent()
    agent.log_std.data = torch.tensor([-0.7, 0.4])
    mean, action = torch.randn(9, 2), torch.randn(9, 2)
    normal = torch.distributions.Independent(torch.distributions.Normal(mean, agent.log_std.exp()), 1)
    torch.testing.assert_close(agent.log_prob(mean, action), normal.log_prob(action))
    torch.testing.assert_close(agent.entropy(), normal.entropy()[0])


@pytest.mark.parametrize("sizes", [[1000], [1, 2, 3, 994], [500, 1, 499], [100] * 10])
def test_the_normaliser_knows_all_data_whatever_the_batching(sizes):
    data = np.random.default_rng(0).normal([3.0, -50.0, 0.0], [0.1, 20.0, 1.0], (1000, 3)).astype(np.float32)
    normalizer = trmrl.Normalizer(3)
    for batch in np.split(data, np.cumsum(sizes)[:-1]):
        normalizer.update(torch.as_tensor(batch))
    np.testing.assert_allclose(normalizer.mean, data.mean(axis=0, dtype=np.float64), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(normalizer.var, data.var(axis=0, dtype=np.float64), rtol=1e-3)
    expected = (data[:5] - data.mean(axis=0)) / data.std(axis=0)
    np.testing.assert_allclose(normalizer(torch.as_tensor(data[:5])), expected, atol=2e-2)


def test_sampled_actions_have_the_policys_mean_and_std():
    agent = make_agent(init_std=0.5)
    agent.reset(20_000, torch.Generator().manual_seed(0))
    sample = agent.act(np.zeros((20_000, 3)), sample=True)
    agent.reset(1)
    np.testing.assert_allclose(sample.mean(axis=0), agent.act(np.zeros((1, 3)))[0], atol=0.02)
    np.testing.assert_allclose(sample.std(axis=0), 0.5, atol=0.02)


def test_each_task_of_a_batch_is_alone():
    agent, rng = awake(make_agent(memory_length=4)), np.random.default_rng(0)
    obs, reward = rng.normal(size=(10, 3, 3)), rng.normal(size=(10, 3))

    def run(chosen):
        agent.reset(len(chosen))
        actions = []
        for t in range(10):
            actions.append(agent.act(obs[t][chosen]))
            agent.observe(actions[-1], reward[t][chosen], np.full(len(chosen), t == 5))
        return np.stack(actions)

    np.testing.assert_allclose(run([1])[:, 0], run([0, 1, 2])[:, 1], atol=1e-6)


def test_the_separate_value_head_reads_the_current_state_alone():
    for separate in (True, False):
        agent = make_agent(separate_value=separate, memory_length=3)
        x, current = torch.randn(8, 3, agent.width), torch.full((8,), 2)
        other = x.clone()
        other[:, 0] += 1
        values = [agent.values(agent.remember(z, current), z[:, 2, :3]) for z in (x, other)]
        assert torch.equal(*values) == separate


# ---- trials and PPO (Sec. 5.1) ---------------------------------------------------------------------------

def test_gae_equals_a_brute_force_sum_over_the_trial():
    rng, (B, T), gamma, lam = np.random.default_rng(0), (5, 40), 0.93, 0.8
    reward, value = rng.normal(size=(2, B, T))
    terminated = rng.random((B, T)) < 0.08  # episodes also end by the clock at step 20
    ours = trmrl.gae(
        *(torch.as_tensor(x, dtype=torch.float64) for x in (reward, value, terminated)), gamma, lam
    )
    for b, t in itertools.product(range(B), range(T)):
        end = next((s for s in range(t, T) if terminated[b, s]), T - 1)   # the last step whose reward counts
        estimates = []                                                    # n-step returns, n = 1, 2, ...
        for n in range(1, end - t + 2):
            value_after = value[b, t + n] if t + n <= end else 0.0
            discounted = sum(gamma ** i * reward[b, t + i] for i in range(n))
            estimates.append(discounted + gamma ** n * value_after - value[b, t])
        weights = [(1 - lam) * lam ** n for n in range(len(estimates) - 1)] + [lam ** (len(estimates) - 1)]
        assert ours[b, t].item() == pytest.approx(np.dot(weights, estimates), abs=1e-9)


def test_rewards_flow_over_the_border_of_episodes_but_not_over_falls_or_trials():
    agent = make_agent(2, 2)
    trials = trmrl.collect(agent, PointMass(3), 2, True, 0)
    assert trials.episode[0].tolist() == [0] * 20 + [1] * 20 and not trials.terminated.any()
    reward = torch.zeros(1, 40)
    reward[0, 20] = 1.0  # the first reward of the second episode
    assert trmrl.gae(reward, torch.zeros(1, 40), torch.zeros(1, 40), 0.9, 1.0)[0, 19] == pytest.approx(0.9)
    fall = torch.zeros(1, 40)
    fall[0, 19] = 1.0
    assert trmrl.gae(reward, torch.zeros(1, 40), fall, 0.9, 1.0)[0, 19] == 0
    value = torch.full((1, 40), 7.0)
    assert trmrl.gae(reward, value, fall, 0.9, 1.0)[0, -1] == -7          # nothing after the trial


def test_a_fall_ends_the_episode_of_its_task_only():
    trials = trmrl.collect(make_agent(2, 2), Falling(50), 2, True, 0)
    assert trials.terminated.sum() > 100
    for b in range(50):
        begun, episode = 0, 0
        for t in range(40):
            assert trials.episode[b, t] == episode and trials.start[b, t] == begun
            if t == begun:
                assert (trials.obs[b, t] == 0).all()                      # back at the start
            if trials.terminated[b, t] or t - begun == 19:
                begun, episode = t + 1, episode + 1
    returns, _ = trials.returns(2)
    assert returns[7, 1] == pytest.approx(trials.reward[7][trials.episode[7] == 1].sum(), abs=1e-4)


@pytest.mark.parametrize("keep_memory", [False, True])
def test_the_ratio_is_one_before_the_first_gradient_step(keep_memory, monkeypatch):
    agent = awake(make_agent(2, 2, memory_length=5, minibatch=40, keep_memory=keep_memory))
    agent.normalizer.update(torch.randn(100, 2) * 3)
    trials = trmrl.collect(agent, Falling(8), 2, True, 0)
    ratios, loss = [], trmrl.ppo_loss

    def spy(agent, x, current, action, logp_old, *rest):
        ratios.append((agent.log_prob(agent.policy(agent.remember(x, current)), action) - logp_old).exp())
        return loss(agent, x, current, action, logp_old, *rest)

    monkeypatch.setattr(trmrl, "ppo_loss", spy)
    optimizer = trmrl.make_optimizer(agent, agent.config)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())
    assert len(torch.cat(ratios)) == 5 * 320 and (torch.cat(ratios) - 1).abs().max() < 1e-5


def test_the_ppo_loss_is_the_clipped_objective():
    agent = make_agent(3, 2, memory_length=2, clip=0.1, value_coef=0.7, entropy_coef=0.3)
    x, current = torch.randn(6, 2, agent.width), torch.ones(6, dtype=torch.long)
    action, advantage, target = torch.randn(6, 2) * 0.2, torch.randn(6), torch.randn(6)
    e = agent.remember(x, current)
    mean, value = agent.policy(e), agent.value(e)[:, 0]
    logp_old = agent.log_prob(mean, action) + torch.tensor([0.3, 0.05, -0.05, -0.3, 0.3, -0.3])
    loss, _ = trmrl.ppo_loss(agent, x, current, action, logp_old, advantage, target, agent.config)
    a = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    expected = 0.0
    for i, r in enumerate((agent.log_prob(mean, action) - logp_old).exp().tolist()):
        bound = min(max(r, 0.9), 1.1)
        expected += (
            -min(r * a[i].item(), bound * a[i].item()) / 6 + 0.7 * (value[i] - target[i]).item() ** 2 / 6
        )
    assert loss.item() == pytest.approx(expected - 0.3 * agent.entropy().item(), rel=1e-4)


def test_observation_statistics_are_frozen_until_the_end_of_an_update():
    agent = make_agent(2, 2, minibatch=50)
    trials = trmrl.collect(agent, PointMass(5), 2, True, 0)
    assert agent.normalizer.count == 0
    trmrl.ppo_update(
        agent, trmrl.make_optimizer(agent, agent.config), trials, agent.config, torch.Generator()
    )
    assert agent.normalizer.count == 200
    np.testing.assert_allclose(agent.normalizer.mean, trials.obs.reshape(-1, 2).mean(axis=0), atol=1e-5)


def test_it_learns_to_learn(tmp_path):
    """Well above -20, the best for who does not adapt (E|x - goal| is smallest at the centre)."""
    config = trmrl.Config(
        env="points",
        run_dir=str(tmp_path / "run"),
        device="cpu",
        threads=1,
        layers=2,
        d_model=32,
        heads=2,
        d_ff=64,
        memory_length=4,
        num_tasks=40,
        total_steps=100_000,
        minibatch=160,
        init_std=0.4,
        lr=1e-3,
        gamma=0.9,
        reward_scale=0.3,
        eval_every=50,
    )
    agent = trmrl.train(config, make_points)
    returns, _ = trmrl.meta_test(agent, PointMass(20, split="test"), 1)
    assert returns.mean() > -13


# ---- GPU, by construction --------------------------------------------------------------------------------

class OneDevice(TorchDispatchMode):
    """Every operation sees tensors of one device only."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        places = {x.device.type for x in tensors}
        copying = func.overloadpacket is torch.ops.aten._to_copy          # what was asked for
        assert len(places) <= 1 or copying, f"{func} mixes {places}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"separate_value": True}, {"tfixup": False}, {"keep_memory": True},
                                      {"memory_length": 1}])
def test_acting_and_updating_stay_on_one_device(settings, monkeypatch):
    """`meta` tensors stand in for those of a GPU. What would cross over to the CPU unasked fails here."""
    agent = make_agent(3, 2, minibatch=10, epochs=1, **settings).to("meta")
    draws, randn, randperm = [], torch.randn, torch.randperm  # meta has no generators: look at the device
    monkeypatch.setattr(
        torch, "randn", lambda *a, generator, device, **k: draws.append(device) or randn(*a, device=device)
    )
    monkeypatch.setattr(
        torch, "randperm", lambda *a, generator, device: draws.append(device) or randperm(*a, device=device)
    )
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: [0.0] * len(self))
    module = importlib.import_module("torch.optim.optimizer")  # fused Adam can do meta, its list just
    fused = module._get_fused_kernels_supported_devices                   # does not say so
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: [*fused(), "meta"])
    optimizer = trmrl.make_optimizer(agent, agent.config)
    with OneDevice():
        agent.reset(4)
        for _ in range(3):
            action, mean, e, state = agent.step(np.zeros((4, 3)), sample=True)
            agent.observe(np.zeros((4, 2)), np.zeros(4), np.zeros(4, bool))
        assert {
            x.device.type for x in (action, mean, e, state, agent.memory.slots, agent.memory.current)
        } == {"meta"}

        def on(*shape, dtype=torch.float32):
            return torch.zeros(*shape, dtype=dtype, device="meta")

        trials = trmrl.Trials(
            on(4, 5, agent.width),
            on(4, 5, 2),
            on(4, 5),
            on(4, 5),
            on(4, 5, dtype=torch.long),
            np.zeros((4, 5, 3), np.float32),
            np.zeros((4, 5)),
            np.zeros((4, 5)),
            None,
            {},
        )
        trmrl.ppo_update(agent, optimizer, trials, agent.config, None)
    assert all(p.grad is not None and p.grad.device.type == "meta" for n, p in agent.named_parameters())
    assert {s["exp_avg"].device.type for s in optimizer.state.values()} == {"meta"}
    assert [torch.device(d).type for d in draws] == ["meta"] * 4


def test_nothing_is_read_from_the_device_inside_the_minibatch_loop(monkeypatch):
    agent = make_agent(2, 2, minibatch=20, epochs=3)
    trials = trmrl.collect(agent, PointMass(5), 2, True, 0)
    reads = []
    for name in ("item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__", "__array__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, *a, _o=original, _n=name, **k: reads.append(_n) or _o(self, *a, **k),
        )
    loss = trmrl.ppo_loss
    calls = []
    monkeypatch.setattr(trmrl, "ppo_loss", lambda *a: calls.append(len(reads)) or loss(*a))
    trmrl.ppo_update(
        agent, trmrl.make_optimizer(agent, agent.config), trials, agent.config, torch.Generator()
    )
    assert len(calls) == 30 and calls[-1] == calls[0] and reads[calls[-1]:] == ["tolist"]


# ---- the command line ------------------------------------------------------------------------------------

TINY = (
    "--num-tasks",
    2,
    "--episodes-per-trial",
    1,
    "--minibatch",
    100,
    "--epochs",
    2,
    "--layers",
    1,
    "--d-model",
    16,
    "--heads",
    2,
    "--d-ff",
    32,
    "--threads",
    1,
    "--device",
    "cpu",
    "--eval-tasks",
    2,
    "--final-episodes",
    1,
)


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    """A finished run of 6 iterations, left alone."""
    folder = tmp_path_factory.mktemp("short") / "run"
    process = start_run(folder)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return folder


def test_a_run_writes_its_folder(short_run):
    assert {p.name for p in short_run.iterdir()} == {
        "config.json",
        "progress.csv",
        "eval.csv",
        "agent.pt",
        "checkpoint.pt",
    }
    config = json.loads((short_run / "config.json").read_text())
    assert config["env"] == "halfcheetah_vel" and config["minibatch"] == 100 and "torch" in config["versions"]
    progress = csv_rows(short_run / "progress.csv", without=())
    assert [int(row["step"]) for row in progress] == [400, 800, 1200, 1600, 2000, 2400]
    assert {"seconds", "steps_per_second", "train_return", "policy_loss", "skipped", "blown_up"} <= progress[
        0
    ].keys()
    tests = csv_rows(short_run / "eval.csv")
    assert list(tests[0]) == ["step", "split", "task", "episode", "return", "success"]
    assert [(r["step"], r["split"], r["task"], r["episode"], r["success"]) for r in tests] == [
        (str(step), split, str(task), "1", "")
        for step in (800, 1600, 2400)
        for split in ("test", "ood")
        for task in (0, 1)
    ]
    rates = [trmrl.Config.lr * (1 - 0.95 * i / 6) for i in range(6)]
    assert [float(row["lr"]) for row in progress] == pytest.approx(rates, rel=1e-4)


def test_eval_prints_a_table_that_agrees_with_the_run(short_run, tmp_path):
    for split in ("test", "ood"):
        result = cli(
            "--eval",
            short_run,
            "--split",
            split,
            "--eval-tasks",
            2,
            "--episodes",
            3,
            "--csv",
            tmp_path / "rows.csv",
            "--threads",
            1,
        )
        assert result.returncode == 0, result.stderr
        rows = csv_rows(tmp_path / "rows.csv")
        final = [
            r["return"]
            for r in csv_rows(short_run / "eval.csv")
            if r["step"] == "2400" and r["split"] == split
        ]
        assert [float(r["return"]) for r in rows if r["episode"] == "1"] == pytest.approx(
            [float(x) for x in final], abs=0.01
        )
        lines = result.stdout.splitlines()
        assert len(lines) == 5 and lines[1].split()[:2] == ["episode", "return"]
        for k, line in enumerate(lines[2:], start=1):
            mean = np.mean([float(r["return"]) for r in rows if r["episode"] == str(k)])
            assert line.split()[0] == str(k) and float(line.split()[1]) == pytest.approx(mean, abs=0.06)
    assert set(os.listdir(short_run)) == {
        "config.json",
        "progress.csv",
        "eval.csv",
        "agent.pt",
        "checkpoint.pt",
    }


def test_the_table_shows_mean_interval_worst_and_best():
    returns = np.array([[-10.0, -1.0], [-30.0, -5.0], [-20.0, -3.0]])
    lines = trmrl.table(returns, np.full((3, 2), np.nan), np.array([[0.5], [1.5], [2.5]])).splitlines()
    assert len(lines) == 3 and "success" not in lines[0]
    first = " ".join(lines[1].split())
    assert first == "1 -20.0 -30.0 to -10.0 -30.0 (task 1: 1.5) -10.0 (task 0: 0.5)"
    with_success = trmrl.table(returns, np.array([[0, 1], [1, 1], [0, 1.0]]), np.array([[0.5], [1.5], [2.5]]))
    assert [line.split()[-1] for line in with_success.splitlines()] == ["success", "33%", "100%"]


def test_the_bootstrap_interval_is_that_of_the_central_limit_theorem():
    values = np.random.default_rng(0).exponential(3.0, 400)
    low, high = trmrl.bootstrap(values)
    error = 1.96 * values.std() / 400**0.5
    assert low == pytest.approx(values.mean() - error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + error, abs=0.1 * error)


def test_an_agent_in_four_lines(short_run):
    agent = trmrl.load_agent(short_run)
    envs = trmrl.make_tasks("halfcheetah_vel", 2, 0, "test")
    agent.reset(2)
    returns, expected = np.zeros((2, 2)), trmrl.meta_test(trmrl.load_agent(short_run), envs, 2)[0]
    obs, _ = envs.reset(seed=int(np.random.SeedSequence(trmrl.TEST_SEED).generate_state(2)[0]))
    for episode in range(2):
        for _ in range(200):
            action = agent.act(obs)
            obs, reward, terminated, truncated, _ = envs.step(action)
            agent.observe(action, reward, terminated | truncated)
            returns[:, episode] += reward
        obs, _ = envs.reset()
    np.testing.assert_allclose(returns, expected, atol=0.01)
    rows = csv_rows(short_run / "eval.csv")
    final = [float(r["return"]) for r in rows if r["step"] == "2400" and r["split"] == "test"]
    np.testing.assert_allclose(returns[:, 0], final, atol=0.01)
    assert np.array_equal(trmrl.load_agent(short_run / "agent.pt").phi.weight, agent.phi.weight)


def test_the_same_seed_is_the_same_run_and_another_is_not(short_run, tmp_path):
    for seed, same in ((1, True), (2, False)):
        folder = tmp_path / str(seed)
        assert (
            cli(
                *TINY, "--total-steps", 2400, "--eval-every", 2, "--run-dir", folder, "--seed", seed
            ).returncode
            == 0
        )
        for name in ("progress.csv", "eval.csv"):
            assert (csv_rows(folder / name) == csv_rows(short_run / name)) == same


BAD = [
    ("--env", "walker"),
    ("--agent", "maml"),
    ("--nonsense", "1"),
    ("--device", "cuda"),
    ("--device", "abacus"),
    ("--device", "meta"),
    ("--device", "meta"),
    ("--heads", "3"),
    ("--memory-length", "0"),
    ("--minibatch", "999999"),
    ("--lr", "-1"),
    ("--gamma", "1.5"),
    ("--gamma", "nan"),
    ("--total-steps", "0"),
    ("--num-tasks", "10" * 20),
    ("--seed", "-1"),
    ("--lr", "fast"),
    ("--layers", "2.5"),
    ("--preset", "huge"),
    ("--tag", "a/b"),
    ("--split", "ood"),
    ("--eval", "/nowhere/agent.pt"),
    ("--d-model", "10", "--heads", "4"),
    ("--resume", "/nowhere"),
    ("--memory", "3"),
    ("--init-std", "inf"),
]


@pytest.mark.parametrize("args", BAD, ids=" ".join)
def test_bad_settings_are_refused_in_one_line(args, tmp_path, capsys, monkeypatch):
    if args[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    assert trmrl.main(list(args)) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("trmrl.py: ") and err.count("\n") == 1 and len(err) > 25
    assert not list(tmp_path.iterdir())
    torch.set_num_threads(threads)


def test_messages_say_what_to_type_instead(capsys):
    for args, words in (
        (("--env", "walker"), ["walker", "halfcheetah_vel"]),
        (("--agent", "maml"), ["maml", "trmrl"]),
        (("--heads", "3"), ["--heads 3", "--d-model 64"]),
        (("--device", "abacus"), ["abacus", "cpu"]),
        (("--minibatch", "999999"), ["8000"]),
    ):
        assert trmrl.main(list(args)) == 2
        err = capsys.readouterr().err
        assert all(word in err for word in words), err


def test_an_existing_run_is_never_overwritten(short_run):
    before = {p.name: p.read_bytes() for p in short_run.iterdir()}
    result = cli(*TINY, "--total-steps", 400, "--run-dir", short_run)
    assert result.returncode == 2 and "--resume" in result.stderr and result.stderr.count("\n") == 1
    assert before == {p.name: p.read_bytes() for p in short_run.iterdir()}


def test_help_shows_the_values_that_apply():
    plain, paper = cli("--help").stdout, cli("--help", "--preset", "paper").stdout
    assert "--no-tfixup" in plain and "--memory-length" in plain
    for text, layers in ((plain, 1), (paper, 4)):
        assert f"transformer layers (default: {layers})" in " ".join(text.split())


def test_import_does_nothing():
    code = """if True:
        import sys, time, gymnasium, mujoco.rollout, numpy, torch
        began, threads = time.time(), torch.get_num_threads()
        import trmrl
        assert time.time() - began < 1 and torch.get_num_threads() == threads
        assert "metaworld" not in sys.modules
    """
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    result = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert result.returncode == 0 and not result.stdout and not result.stderr


# ---- nothing is lost -------------------------------------------------------------------------------------

def same_weights(a, b):
    a, b = (torch.load(f / "agent.pt", weights_only=True)["weights"] for f in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def start_run(folder, *extra):
    return subprocess.Popen(
        [
            sys.executable,
            str(HERE / "trmrl.py"),
            *map(str, TINY),
            "--total-steps",
            "2400",
            "--eval-every",
            "2",
            "--run-dir",
            str(folder),
            *extra,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_run_goes_on_as_if_nothing_had_happened(short_run, tmp_path):
    """Killed twice, at random moments of an iteration; TRMRL_LONG_TESTS=1 kills ten times."""
    rng, folder = np.random.default_rng(), tmp_path / "run"
    process, rows = start_run(folder, "--checkpoint-every", "1"), 0
    for _ in range(10 if os.environ.get("TRMRL_LONG_TESTS") else 2):
        while process.poll() is None and (not (folder / "progress.csv").exists() or
                                          len(csv_rows(folder / "progress.csv")) <= min(rows, 4)):
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.5))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        rows = len(csv_rows(folder / "progress.csv"))
        process = subprocess.Popen([sys.executable, str(HERE / "trmrl.py"), "--resume", str(folder)],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    for name in ("progress.csv", "eval.csv"):
        assert csv_rows(folder / name) == csv_rows(short_run / name)
    assert same_weights(folder, short_run)
    result = cli("--resume", folder)
    assert result.returncode == 0 and "is finished" in result.stdout


@pytest.mark.parametrize("nth", [11, 14])
def test_a_kill_while_a_file_is_written_leaves_the_old_one(nth, short_run, tmp_path):
    """Killed in the middle of the nth file: the third time that all five are written, the 1st or the 4th."""
    folder = tmp_path / "run"
    code = """if True:
        import os, signal, sys
        import trmrl
        calls = []
        def kill(fd):
            calls.append(fd)
            if len(calls) == int(sys.argv[1]):
                os.ftruncate(fd, 100)
                os.kill(os.getpid(), signal.SIGKILL)
        os.fsync = kill
        trmrl.main(sys.argv[2:])
    """
    settings = [*TINY, "--total-steps", 2400, "--eval-every", 2, "--checkpoint-every", 1, "--run-dir", folder]
    command = [sys.executable, "-c", code, str(nth), *map(str, settings)]
    assert subprocess.run(command, cwd=HERE, capture_output=True).returncode == -signal.SIGKILL
    assert list(folder.glob("*.part"))
    result = cli("--resume", folder)
    assert result.returncode == 0, result.stderr
    for name in ("progress.csv", "eval.csv"):
        assert csv_rows(folder / name) == csv_rows(short_run / name)
    assert same_weights(folder, short_run) and not list(folder.glob("*.part"))


def test_checkpoints_come_when_they_are_due(tmp_path, monkeypatch):
    saves, save, clock = [], trmrl.Run.save, itertools.count(0, 11)
    monkeypatch.setattr(trmrl.Run, "save", lambda run: saves.append(run.iteration) or save(run))
    config = trmrl.Config(**SMALL, env="points", num_tasks=2, total_steps=6 * 80, minibatch=40)
    for every, expected in ((0, [0, 6]), (2, [0, 2, 4, 6]), (4, [0, 4, 6])):
        saves.clear()
        trmrl.train(replace(config, run_dir=str(tmp_path / f"{every}"), checkpoint_every=every), make_points)
        assert saves == expected
    saves.clear()
    monkeypatch.setattr(trmrl.time, "monotonic", lambda: next(clock))     # every look takes 11 seconds
    trmrl.train(replace(config, run_dir=str(tmp_path / "slow")), make_points)
    assert saves == [0, 1, 2, 3, 4, 5, 6]


def test_a_second_ctrl_c_ends_at_once_and_loses_nothing(tmp_path):
    folder = tmp_path / "run"
    process = start_run(folder, "--epochs", "80", "--checkpoint-every", "1")
    while not (folder / "progress.csv").exists() or len(csv_rows(folder / "progress.csv")) < 1:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode in (-signal.SIGINT, 130)
    assert trmrl.load(folder / "checkpoint.pt", "checkpoint")[0]["iteration"] >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_within_seconds_and_loses_no_finished_iteration(number, short_run, tmp_path):
    folder = tmp_path / "run"
    process = start_run(
        folder, "--epochs", "80", "--checkpoint-every", "1000"
    )  # long iterations, no checkpoints
    while not (folder / "progress.csv").exists() or len(csv_rows(folder / "progress.csv")) < 1:
        time.sleep(0.05)
    process.send_signal(number)
    began = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 3 and process.returncode == 128 + number
    assert f"--resume {folder}" in err and "Traceback" not in err
    content, _ = trmrl.load(folder / "checkpoint.pt", "checkpoint")
    assert content["iteration"] == len(csv_rows(folder / "progress.csv")) == 1


def test_a_full_disk_ends_in_one_line_and_keeps_the_last_checkpoint(short_run, tmp_path):
    folder = tmp_path / "run"
    room = (short_run / "checkpoint.pt").stat().st_size + 10_000          # but not for 60 iterations
    command = [*map(str, TINY), "--total-steps", "24000", "--eval-every", "1", "--checkpoint-every", "1",
               "--eval-tasks", "50", "--run-dir", str(folder)]
    code = (f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room})); "
            f"sys.path.insert(0, {str(HERE)!r}); import trmrl; sys.exit(trmrl.main({command}))")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert f"--resume {folder}" in result.stderr
    content, _ = trmrl.load(folder / "checkpoint.pt", "checkpoint")
    assert content["iteration"] >= 1 and not list(folder.glob("*.part"))
    assert cli("--eval", folder, "--episodes", 1).returncode == 0


def test_a_read_only_folder_is_one_line():
    """For a user without rights there; root becomes one when the first file is due."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        command = [*map(str, TINY), "--run-dir", f"{folder}/run"]
        code = f"""if True:
            import os, sys, trmrl
            save = trmrl.Run.save
            trmrl.Run.save = lambda run: (os.getuid() or os.setuid(65534), save(run))
            sys.exit(trmrl.main({command}))
        """
        result = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert result.returncode == 1 and "denied" in result.stderr and folder in result.stderr
    assert result.stderr.startswith("trmrl.py: ") and result.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    result = cli(*TINY, "--run-dir", tmp_path / "file" / "run")
    assert (
        result.returncode == 1 and result.stderr.startswith("trmrl.py: ") and result.stderr.count("\n") == 1
    )


def test_a_deleted_folder_comes_back_with_all_that_was_done(tmp_path):
    folder = tmp_path / "run"
    process = start_run(folder)
    while not (folder / "progress.csv").exists() or len(csv_rows(folder / "progress.csv")) < 2:
        time.sleep(0.05)
    shutil.rmtree(folder)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err and f"--resume {folder}" in err
    result = cli("--resume", folder)
    assert result.returncode == 0, result.stderr
    assert [r["iteration"] for r in csv_rows(folder / "progress.csv")] == ["1", "2", "3", "4", "5", "6"]


def poisoned(agent, share):
    """ppo_loss, but NaN in every so-manieth minibatch."""
    loss, calls = trmrl.ppo_loss, itertools.count()

    def broken(*args):
        value, log = loss(*args)
        return (value * math.nan if next(calls) % share == 0 else value), log

    return broken


def test_a_gradient_step_that_is_not_finite_is_skipped_and_counted(monkeypatch):
    agent = make_agent(2, 2, minibatch=200, epochs=1)
    trials = trmrl.collect(agent, PointMass(5), 2, True, 0)
    optimizer = trmrl.make_optimizer(agent, agent.config)
    trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())
    before = [p.clone() for p in agent.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in agent.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(trmrl, "ppo_loss", poisoned(agent, 1))
        metrics = trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())
    assert metrics["skipped"] == metrics["updates"] == 1 and all(math.isfinite(v) for v in metrics.values())
    assert all(torch.equal(a, b) for a, b in zip(before, agent.parameters()))
    assert all(torch.equal(a, optimizer.state[p]["exp_avg"]) for a, p in zip(moments, agent.parameters()))
    assert trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())["skipped"] == 0
    assert not any(torch.equal(a, b) for a, b in zip(before, agent.parameters()))


def test_a_run_whose_gradients_are_mostly_not_finite_stops_with_advice(tmp_path, monkeypatch):
    config = trmrl.Config(
        **SMALL, env="points", num_tasks=5, total_steps=1000, minibatch=50, run_dir=str(tmp_path / "run")
    )
    monkeypatch.setattr(trmrl, "ppo_loss", poisoned(None, 3))
    trmrl.train(replace(config, run_dir=str(tmp_path / "third")), make_points)
    assert {r["skipped"] for r in csv_rows(tmp_path / "third" / "progress.csv")} <= {"6", "7"}
    monkeypatch.setattr(trmrl, "ppo_loss", poisoned(None, 1))
    with pytest.raises(trmrl.RunError, match="--lr"):
        trmrl.train(config, make_points)
    assert trmrl.load(tmp_path / "run" / "checkpoint.pt", "checkpoint")[0]["iteration"] == 0


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


RAW = {  # files made of a good one's bytes
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"Dear agent, ...",
    "flipped": lambda data: data[:100] + bytes(255 - x for x in data[100:400]) + data[400:],
    "a crafted plain pickle": lambda data: pickle.dumps(Bomb()),
}
CHANGED = {  # a good one's content, changed
    "a crafted pickle": lambda c: c.update(weights=Bomb()),
    "another kind": lambda c: c.update(kind="checkpoint"),
    "another version": lambda c: c.update(version=99),
    "no weights": lambda c: c.pop("weights"),
    "a missing tensor": lambda c: c["weights"].pop("phi.weight"),
    "a wrong shape": lambda c: c["weights"].update({"phi.weight": torch.zeros(3, 3)}),
    "a number for a tensor": lambda c: c["weights"].update({"log_std": 3}),
    "complex numbers": lambda c: c["weights"].update({"log_std": torch.zeros(6, dtype=torch.complex64)}),
    "a sparse tensor": lambda c: c["weights"].update({"phi.weight": c["weights"]["phi.weight"].to_sparse()}),
    "action bounds of two sizes": lambda c: c["weights"].update({"action_high": torch.ones(3)}),
    "an unknown setting": lambda c: c["config"].update(sword="sharp"),
    "an absurd setting": lambda c: c["config"].update(layers=10**9),
    "an astronomic setting": lambda c: c["config"].update(layers=10**400),
    "a huge agent": lambda c: c["config"].update(d_model=8192, d_ff=65536, layers=100),
    "a setting of another type": lambda c: c["config"].update(layers="two"),
    "another env": lambda c: c["config"].update(env="walker"),
    "another env's agent": lambda c: c["config"].update(env="ant_dir"),
    "another body": lambda c: c["weights"].update(
        {
            "normalizer.mean": torch.zeros(9),
            "normalizer.var": torch.ones(9),
            "phi.weight": torch.zeros(16, 17),
        }
    ),
}


def spoil(kind, good, path):
    if kind == "an empty folder":
        path.mkdir()
    elif kind in RAW:
        path.write_bytes(RAW[kind](good.read_bytes()))
    else:
        content = torch.load(good, weights_only=True)
        CHANGED[kind](content)
        torch.save(content, path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", [*RAW, *CHANGED, "an empty folder"])
def test_a_hostile_or_foreign_file_is_refused_in_one_line(kind, short_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoil(kind, short_run / "agent.pt", tmp_path / "agent.pt")
    assert trmrl.main(["--eval", str(tmp_path / "agent.pt"), "--threads", "1"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("trmrl.py: ")
    assert "agent.pt" in err
    assert not (tmp_path / "exploded").exists()
    if kind == "another version":
        assert "version 99" in err


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("optimizer"),
        lambda c: c.update(optimizer=5),
        lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.zeros(1)),
        lambda c: c["optimizer"]["state"].pop(0),
        lambda c: c.update(iteration=-1),
        lambda c: c.update(iteration="two"),
        lambda c: c.update(csv=None),
        lambda c: c["weights"].update({"log_std": torch.zeros(1)}),
        None,
    ],
)
def test_a_damaged_checkpoint_is_refused_and_kept(change, short_run, tmp_path, capsys):
    shutil.copytree(short_run, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    if change:
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)
    else:
        path.write_bytes(path.read_bytes()[:5000])
    before = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    assert trmrl.main(["--resume", str(path.parent)]) == 2
    out, err = capsys.readouterr()
    assert str(path) in err and err.count("\n") == 1
    assert before == {p.name: p.read_bytes() for p in path.parent.iterdir()}


def test_memory_stays_flat_over_300_iterations(tmp_path):
    code = """if True:
        import resource, sys
        import test_trmrl, trmrl
        pages, iterate = [], trmrl.iterate
        def spy(*args):
            iterate(*args)
            pages.append(int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20)
        trmrl.iterate = spy
        config = trmrl.Config(**test_trmrl.SMALL, env="points", num_tasks=2, episodes_per_trial=1,
                              total_steps=300 * 40, minibatch=40, epochs=1, eval_every=10,
                              run_dir=sys.argv[1])
        trmrl.train(config, test_trmrl.make_points)
        assert len(pages) == 300 and pages[-1] - pages[30] < 50, (pages[30], pages[-1])
    """
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], cwd=HERE, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_any_config_trains_or_is_refused(tmp_path):
    rng, trained, refused = np.random.default_rng(0), 0, 0
    choices = dict(
        memory_length=[0, 1, 2, 7, 30],
        layers=[1, 2, 5],
        heads=[1, 2, 3, 4],
        d_model=[2, 3, 12, 16],
        d_ff=[1, 9, 40],
        tfixup=[True, False],
        keep_memory=[True, False],
        separate_value=[True, False],
        init_std=[0.01, 0.5, 3.0],
        gamma=[0.0, 0.9, 1.0, 1.1],
        gae_lambda=[0.0, 0.5, 1.0],
        clip=[0.05, 0.5],
        epochs=[1, 3],
        num_tasks=[1, 3, 8],
        minibatch=[1, 7, 40, 160, 161],
        lr=[0.0, 1e-3, 0.5],
        value_lr=[0.0, 1e-3],
        final_lr=[0.0, 1.0],
        max_grad_norm=[1e-3, 10.0],
        value_coef=[0.0, 0.5],
        entropy_coef=[0.0, 0.1],
        reward_scale=[1e-3, 100.0],
        episodes_per_trial=[1, 2, 3],
        eval_every=[1, 5],
        eval_tasks=[1, 3],
        eval_episodes=[1, 2],
        final_episodes=[1, 2],
        checkpoint_every=[0, 1],
        seed=[0, 5, -1],
    )
    for i in range(300 if os.environ.get("TRMRL_LONG_TESTS") else 40):
        picks = {k: v[0] if rng.random() < 0.1 else v[rng.integers(len(v))] for k, v in choices.items()}
        picks = {k: (v.item() if isinstance(v, np.generic) else v) for k, v in picks.items()}
        batch = picks["num_tasks"] * picks["episodes_per_trial"] * 20
        picks["total_steps"] = 2 * batch
        bad = (
            picks["memory_length"] < 1
            or picks["d_model"] % picks["heads"]
            or picks["d_model"] % 2
            or picks["gamma"] > 1
            or not 2 <= picks["minibatch"] <= batch
            or picks["seed"] < 0
        )
        config = trmrl.Config(env="points", device="cpu", threads=1, run_dir=str(tmp_path / str(i)), **picks)
        if bad:
            with pytest.raises(trmrl.UserError) as error:
                trmrl.train(config, make_points)
            assert "\n" not in str(error.value) and not (tmp_path / str(i)).exists()
            refused += 1
        else:
            try:
                trmrl.train(config, make_points)
                assert len(csv_rows(tmp_path / str(i) / "progress.csv")) == 2
            except trmrl.RunError:  # lr 0.5 may diverge: then it stops with advice
                assert picks["lr"] == 0.5
            trained += 1
    assert trained > 3 and refused > 3


# ---- README.md -------------------------------------------------------------------------------------------

def test_the_readme_tells_what_the_runs_measured():
    table = [line.strip("| \n").replace("*", "").split(" | ") for line in (HERE / "README.md").open()]
    measured = []
    for seed in (1, 2, 3):
        folder = HERE / "results" / "halfcheetah_vel" / f"trmrl-seed{seed}"
        rows, progress = csv_rows(folder / "eval.csv"), csv_rows(folder / "progress.csv", without=())

        def returns(split, episode, step=progress[-1]["step"]):
            wanted = (split, str(episode), step)
            return [float(r["return"]) for r in rows if (r["split"], r["episode"], r["step"]) == wanted]

        minutes = {r["step"]: float(r["seconds"]) / 60 for r in progress}
        reached = next(s for s in minutes if returns("test", 1, s) and np.mean(returns("test", 1, s)) >= -50)
        worst = min(min(returns("test", k)) for k in range(1, 7))
        first, sixth, ood = (np.mean(returns(*x)) for x in (("test", 1), ("test", 6), ("ood", 1)))
        measured.append([first, sixth, worst, ood, max(minutes.values()), minutes[reached]])
        low, high = trmrl.bootstrap(returns("test", 1))
        cells = [f"{x:.1f}" for x in measured[-1]]
        assert [str(seed), f"{cells[0]} ({low:.1f} to {high:.1f})", *cells[1:]] in table
    assert ["mean", *(f"{x:.1f}" for x in np.mean(measured, axis=0))] in table


def test_every_name_in_the_readme_exists():
    text = (HERE / "README.md").read_text()
    beside = text[text.index("## The paper beside the code") : text.index("## Where the paper")]
    places = {"trmrl": trmrl, "Agent": make_agent(), **globals(), **plots.FIGURES}
    for line in beside.splitlines()[4:]:
        names = re.findall(r"`([^`]+)`", line.split(" | ")[-1])
        assert names or not line, line
        for name in names:
            owner, _, attribute = name.removeprefix("plots.py ").partition(".")
            place = places.get(owner, getattr(trmrl, owner, None))
            assert place is not None and (not attribute or hasattr(place, attribute)), name
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (HERE / path).exists(), path


# ---- plots.py --------------------------------------------------------------------------------------------

def test_the_learning_curve_is_the_mean_over_tasks_and_seeds(tmp_path, capsys):
    for seed, base in ((1, -10.0), (2, -20.0)):
        folder = tmp_path / "runs" / f"seed{seed}"
        folder.mkdir(parents=True)
        config = {"env": "points", "agent": "trmrl", "seed": seed, "tag": ""}
        (folder / "config.json").write_text(json.dumps(config))
        rows = [f"{step},{split},{task},1,{base + task + step / 100},"
                for step in (100, 200) for split in ("test", "ood") for task in (0, 1)]
        (folder / "eval.csv").write_text("\n".join(["step,split,task,episode,return,success", *rows]))
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "config.json").write_text("{")
    runs = plots.find_runs([tmp_path / "runs"])
    assert len(runs) == 2 and "broken" in capsys.readouterr().err
    steps, mean, low, high = plots.over_seeds([plots.learning_curve(rows) for _, _, rows in runs])
    assert steps.tolist() == [100, 200] and mean.tolist() == [-13.5, -12.5]
    assert low.tolist() == [-18.5, -17.5] and high.tolist() == [-8.5, -7.5]
    assert plots.main(["meta_training", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "meta_training.png").stat().st_size > 10_000
    assert plots.main(["portrait"]) == 2
    assert "meta_training" in capsys.readouterr().err


def test_the_benchmark_draws_a_bar_per_speed():
    rows = [("raw physics", 2e3, "steps/s"), ("our tasks", 1.8e3, "steps/s"), ("peak memory", 400.0, "MB")]
    figure, ax = plots.plt.subplots()
    plots.benchmark(ax, rows, "ant_dir")
    assert [bar.get_width() for bar in ax.patches] == [2000.0, 1800.0]
    plots.plt.close(figure)
