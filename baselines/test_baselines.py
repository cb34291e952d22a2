# SPDX-License-Identifier: MIT
"""The baselines, each against something independent: oracle, RL^2, VariBAD, PEARL and MAML.

They play the point mass of test_trmrl.py: find a hidden goal on the unit circle.
"""

import copy
import functools
import json
import math
import os
import runpy
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import TanhTransform

import test_trmrl
import trmrl
from baselines import maml, rl2
from baselines.maml import MAML
from baselines.oracle import Oracle
from baselines.pearl import PEARL
from baselines.rl2 import RL2, gru_inputs
from baselines.varibad import VariBAD
from test_trmrl import PointMass, assert_same, make_points

torch.set_num_threads(1)  # everything here is small

AGENTS = [Oracle, RL2, VariBAD, PEARL, MAML]
ONE_PROCESS = [PEARL, MAML]  # they refuse torchrun


def for_each(*agent_classes):
    names = [agent_class.name for agent_class in agent_classes]
    return pytest.mark.parametrize("agent_class", agent_classes, ids=names)


class Falling(PointMass):
    """A point mass that falls at random."""

    def advance(self, actions):
        reward, _, info = super().advance(actions)
        return reward, self.np_random.random(self.num_envs) < 0.1, info


def small_config(agent_class, **settings):
    """160 steps per iteration; PEARL's replay has room for two iterations."""
    small = dict(env="points", device="cpu", num_tasks=4, episodes_per_trial=2, eval_tasks=2)
    small |= dict(d_model=16, init_std=0.4, gamma=0.9, eval_every=1000, minibatch=80)
    if agent_class is PEARL:
        small |= dict(latent_size=3, hidden_size=8, updates=4, meta_batch=2, batch_size=4)
        small |= dict(context_size=5, replay_size=320)
    return agent_class.Config(**small | settings)


def make_agent(agent_class, **settings):
    """A small agent whose normalisers have seen something and whose actions differ visibly."""
    torch.manual_seed(0)
    agent = agent_class(small_config(agent_class, **settings), (2, 2, 1))
    agent.normalizer.update(3 * torch.randn(100, 2) + 0.3)
    agent.reward_stats.update(torch.randn(100, 1) - 2)
    for parameter in agent.policy_head.parameters():
        nn.init.normal_(parameter, std=0.3)
    return agent


def adam(agent):
    return torch.optim.Adam(agent.parameter_groups(), fused=True)


def collect(agent, envs, steps=40, sample=True, seed=0):
    return trmrl.collect(agent, envs, envs.tasks, steps, sample, seed)


def all_steps(buffer):
    """Row and step number of all steps, (R, T) each."""
    R, T = buffer.value.shape
    return torch.arange(R)[:, None].expand(R, T), torch.arange(T).expand(R, T)


def predictions(agent, buffer):
    """log_prob of the stored actions and value of all steps, (R, T) each, as PPO sees them."""
    mean, value = agent(buffer, *all_steps(buffer))
    return trmrl.gaussian_log_prob(mean, agent.log_std, buffer.action), value


def memories_by_hand(buffer, row, t):
    """(s, a, r, eta) of the steps 0 to t of a row, one step after the other: (1, t + 1, 6)."""
    rows = []
    for i in range(t + 1):
        past = torch.zeros(4)
        if i > 0:
            action, reward = buffer.clipped_action[row, i - 1], buffer.reward[row, i - 1]
            past = torch.stack([*action, reward, buffer.eta[row, i - 1]])
        rows.append(torch.cat([buffer.state[row, i], past]))
    return torch.stack(rows)[None]


# ---- All baselines -------------------------------------------------------------------------------


@for_each(Oracle, RL2, VariBAD)
def test_learning_sees_what_acting_saw(agent_class):
    """Before the first gradient step the ratio of PPO is 1, through falls and ends of episodes."""
    agent = make_agent(agent_class)
    buffer = collect(agent, Falling(6), steps=60)
    assert buffer.terminated.sum() > 10
    with torch.no_grad():
        log_prob, value = predictions(agent, buffer)
    torch.testing.assert_close(log_prob, buffer.log_prob, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(value, buffer.value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sample", [False, True])
@for_each(trmrl.TrMRL, *AGENTS)
def test_a_player_acts_as_collect_does_even_if_asked_twice(agent_class, sample):
    agent = make_agent(agent_class)
    buffer = collect(agent, Falling(5), sample=sample)
    player = trmrl.Player(agent, 5, max_steps=40)
    player.buffer.task, player.buffer.noise = buffer.task, buffer.noise
    if agent_class is PEARL:
        player.buffer.stored["z_noise"] = buffer.stored["z_noise"]
    for t in range(40):
        asked = (sample, not sample, sample)
        first, other, second = (player.act(buffer.raw_state[:, t], x) for x in asked)
        assert np.array_equal(first, second), "asking changes the answer"
        differ = not np.array_equal(first, other)
        assert differ or agent_class is MAML, "a sample is the mean"  # MAML always explores
        np.testing.assert_allclose(first, buffer.action[:, t], atol=1e-5)
        terminated, done = buffer.terminated[:, t], buffer.eta[:, t] > 0
        following = buffer.raw_state[:, t + 1]
        player.observe(following, buffer.reward[:, t], terminated, done & ~terminated)


@for_each(*AGENTS)
def test_the_normalisers_know_all_that_was_seen(agent_class):
    agent = make_agent(agent_class)
    agent.normalizer = trmrl.RunningStats(2)
    batches = []
    for seed in (0, 1):
        batches.append(collect(agent, PointMass(4, seed), seed=seed))
        agent.update(batches[-1], adam(agent), torch.Generator())
    seen = [(agent.normalizer, torch.cat([x.raw_state[:, :-1].reshape(-1, 2) for x in batches]))]
    if agent_class is Oracle:
        seen.append((agent.task_normalizer, torch.cat([x.task for x in batches])))
    for normalizer, rows in seen:
        torch.testing.assert_close(normalizer.mean, rows.mean(dim=0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(normalizer.var, rows.var(dim=0, correction=0))


PPO = dict(episodes_per_trial=1, gamma=0.8, minibatch=200)
LESSONS = {
    Oracle: PPO | dict(total_steps=32_000, lr=3e-3),
    RL2: PPO | dict(total_steps=40_000, lr=4e-3, value_lr=3e-3, epochs=8),
    VariBAD: PPO | dict(total_steps=32_000, lr=5e-3, value_lr=3e-3, epochs=4, vae_lr=5e-3),
    PEARL: dict(total_steps=24_000, lr=3e-3, final_lr=1.0, episodes_per_trial=3, updates=50),
    MAML: dict(total_steps=24_000, num_tasks=50, init_std=0.5, gae_lambda=0.95),
}
LESSONS[VariBAD] |= dict(vae_updates=6)
LESSONS[PEARL] |= dict(meta_batch=16, batch_size=8, context_size=60, replay_size=24_000)
LESSONS[PEARL] |= dict(hidden_size=64, entropy_weight=0.5, target_rate=0.02)


@pytest.mark.parametrize(
    "agent_class, episode, at_least",
    [(Oracle, 1, -10), (RL2, 1, -17), (VariBAD, 1, -17), (PEARL, 3, -17.5), (MAML, 2, -14)],
    ids=[agent_class.name for agent_class in AGENTS],
)
def test_it_learns_to_adapt(agent_class, episode, at_least, tmp_path):
    """It gets more than -20, the best without adapting; PEARL and MAML in a later episode."""
    settings = dict(num_tasks=40) | LESSONS[agent_class] | dict(run_dir=str(tmp_path / "run"))
    agent = trmrl.train(small_config(agent_class, **settings), make_points, agent_class)
    returns, _ = trmrl.meta_test(agent, PointMass(50, split="test"), episode)
    returns = returns.mean(axis=0)
    assert returns[-1] > at_least
    if episode > 1:
        assert returns[0] < min(-18.5, returns[-1] - 2)


# ---- Oracle and RL^2 -----------------------------------------------------------------------------


def test_the_oracle_sees_the_state_and_the_task_and_nothing_else():
    agent = make_agent(Oracle)
    buffer = collect(agent, PointMass(5))
    with_other_past, with_other_task = copy.deepcopy(buffer), copy.deepcopy(buffer)
    with_other_past.token[:] = torch.randn_like(buffer.token)
    with_other_past.state[:, 30] = buffer.state[:, 30]
    with_other_task.task[2] += 1.0

    before, other_past, other_task = (
        predictions(agent, x)[1] for x in (buffer, with_other_past, with_other_task)
    )
    changed = other_past != before  # by the states of the other steps
    assert changed[:, :30].all() and not changed[:, 30].any() and changed[:, 31:].all()
    assert (other_task != before).all(dim=1).tolist() == [False, False, True, False, False]
    assert torch.equal(other_task[:2], before[:2]) and torch.equal(other_task[3:], before[3:])


@for_each(RL2, VariBAD)
def test_the_memory_is_a_gru_over_all_that_happened_in_the_trial(agent_class):
    agent = make_agent(agent_class)
    buffer = collect(agent, Falling(4), steps=60)  # three episodes and falls: nothing clears it
    gru = nn.GRU(6, 16, batch_first=True)
    gru.load_state_dict((agent.gru if agent_class is RL2 else agent.vae.gru).state_dict())
    assert not buffer.stored["hidden"][:, 0].any(), "a trial must begin with a hidden state of 0"
    for row in range(4):
        hidden = gru(memories_by_hand(buffer, row, 59))[0][0]
        claim = f"row {row} does not hold the hidden states of a GRU over the whole trial"
        assert_same(buffer.stored["hidden"][row, 1:61], hidden, claim)
        if agent_class is VariBAD:
            belief = agent.vae.to_belief(hidden)
            assert_same(buffer.stored["belief"][row, :60], belief, "not the beliefs of the GRU")


@for_each(RL2, VariBAD)
def test_a_memory_or_belief_knows_the_past_but_neither_the_future_nor_another_trial(agent_class):
    agent = make_agent(agent_class)
    buffer = collect(agent, PointMass(3))
    buffer.token = buffer.token.clone().requires_grad_()
    buffer.state = buffer.token[:, :, :2]
    row, t = all_steps(buffer)
    if agent_class is RL2:
        memory = agent.recall(buffer, row, t)
    else:
        memory, _ = agent.vae.encode(gru_inputs(buffer, row, t), None)  # the beliefs
    memory[1, 25].sum().backward()
    gradient = buffer.token.grad
    assert (gradient[1, :25] != 0).all(), "s, a, r or eta of an earlier step is lost"
    assert (gradient[1, 25, :2] != 0).all(), "the current state is not seen"
    assert (gradient[1, 25, 2:] == 0).all(), "a, r or eta of the current step is not known yet"
    assert (gradient[1, 26:] == 0).all(), "the future leaks"
    assert (gradient[[0, 2]] == 0).all(), "another trial leaks"


def test_a_minibatch_of_rl2_is_made_of_segments_and_its_memory_is_that_of_whole_trials():
    agent = make_agent(RL2, minibatch=170)
    buffer = collect(agent, PointMass(4), steps=150)  # three segments of 50 in each row
    batches = list(agent.minibatches(buffer, torch.Generator()))
    assert [row.shape for row, _ in batches] == [(3, 50)] * 4
    row, t = (torch.cat(x) for x in zip(*batches))
    assert (row == row[:, :1]).all() and (t == t[:, :1] + torch.arange(50)).all()
    assert len((150 * row + t).unique()) == 4 * 150  # every step once

    with torch.no_grad():
        whole = agent.gru(gru_inputs(buffer, *all_steps(buffer)))[0]
        claim = "a segment does not continue from the hidden state that was stored before it"
        assert_same(agent.recall(buffer, row, t), whole[row, t], claim)
    assert len(list(make_agent(RL2, minibatch=250).minibatches(buffer, torch.Generator()))) == 2

    # 201 steps are 3 segments of 67; a minibatch as large as the batch takes all 12 of them.
    agent = make_agent(RL2, minibatch=4 * 201)
    odd = collect(agent, PointMass(4), steps=201)
    assert [row.shape for row, _ in agent.minibatches(odd, torch.Generator())] == [(12, 67)]


# ---- VariBAD -------------------------------------------------------------------------------------


def elbo_by_brute_force(agent, buffer, noise):
    """The sum over rows, beliefs and rewards, one after the other."""
    R, T = buffer.reward.shape
    n = agent.config.latent_size
    rewards, kls = 0.0, 0.0
    for row in range(R):
        prior = Normal(torch.zeros(n), torch.ones(n))
        for t in range(T):
            belief, _ = agent.vae.encode(memories_by_hand(buffer, row, t), None)
            mean, log_var = belief[0, -1].split(n)
            q = Normal(mean, log_var.exp().sqrt())
            kls += kl_divergence(q, prior).sum()
            prior = q
            z = q.loc + noise[row, t] * q.scale
            for i in range(T):
                if buffer.eta[row, i]:
                    continue
                s, a, s_next = buffer.state[row, i], buffer.action[row, i], buffer.state[row, i + 1]
                predicted = agent.vae.decoder(torch.cat([z, s, a.clamp(-1, 1), s_next]))
                reward = buffer.reward[row, i] - agent.reward_stats.mean
                reward = reward / agent.reward_stats.var.sqrt()
                constant = Normal(0.0, 1.0).log_prob(torch.tensor(0.0))
                rewards += (Normal(predicted, 1.0).log_prob(reward) - constant).sum()
    return rewards, kls


def test_the_elbo_equals_a_brute_force_sum(monkeypatch):
    R, T = 2, 22
    agent = make_agent(VariBAD, latent_size=3)
    buffer = collect(agent, Falling(R), T)
    assert 0 < buffer.eta[:, :-1].sum() < R * T
    every, noise = torch.arange(T), torch.randn(R, T, 3)
    rewards, kls = elbo_by_brute_force(agent, buffer, noise)
    error, kl = agent.elbo_losses(buffer, every, every, noise)
    torch.testing.assert_close(-error * R * T * T, rewards, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kl * R * T * T, kls, rtol=1e-4, atol=1e-4)

    # The gradients of both are the same, too.
    ours = torch.autograd.grad(error + kl, agent.vae.parameters())
    brute_force = torch.autograd.grad((kls - rewards) / (R * T * T), agent.vae.parameters())
    torch.testing.assert_close(ours, brute_force, rtol=1e-3, atol=1e-6)

    # In segments, too: only gradients end where a segment begins.
    monkeypatch.setattr(rl2, "SEGMENT", 11)
    torch.testing.assert_close(agent.elbo_losses(buffer, every, every, noise), (error, kl))

    # One belief and one reward at a time, it is the same on average.
    samples = []
    for t in range(T):
        for i in range(T):
            terms = agent.elbo_losses(buffer, every[[t]], every[[i]], noise[:, [t]])
            samples.append(torch.stack(terms).detach())
    torch.testing.assert_close(torch.stack(samples).mean(dim=0), torch.stack([error, kl]))


def test_an_update_draws_past_and_future_rewards_alike(monkeypatch):
    agent = make_agent(VariBAD, vae_updates=30)
    buffer = collect(agent, PointMass(8))
    drawn = []

    def spy(buffer, *args, elbo_losses=agent.elbo_losses):
        drawn.append(args)
        return elbo_losses(buffer, *args)

    monkeypatch.setattr(agent, "elbo_losses", spy)
    agent.update(buffer, adam(agent), torch.Generator().manual_seed(0))
    times, steps, noise = (torch.stack(x) for x in zip(*drawn))
    assert times.unique().tolist() == steps.unique().tolist() == list(range(40))
    assert (steps[:, None] > times[:, :, None]).float().mean() == pytest.approx(0.5, abs=0.05)
    assert noise.mean().abs() < 0.05 and noise.std() == pytest.approx(1, abs=0.05)


def test_no_gradient_of_the_policy_reaches_the_encoder_and_none_of_the_elbo_the_policy():
    agent = make_agent(VariBAD)
    buffer = collect(agent, PointMass(8))
    agent.act(buffer, 39, True)  # with gradients, unlike in collect
    log_prob, value = predictions(agent, buffer)
    (log_prob + value).sum().backward()
    assert all(p.grad is None for p in agent.vae.parameters())
    assert all(p.grad.abs().max() > 0 for p in agent.policy_head.parameters())

    agent.zero_grad()
    steps = torch.arange(40)
    sum(agent.elbo_losses(buffer, steps, steps, torch.randn(8, 40, 5))).backward()
    for name, p in agent.named_parameters():
        assert (p.grad is not None) == name.startswith("vae."), name


def test_each_part_of_varibad_learns_at_its_own_rate():
    rates = dict(lr=1e-4, value_lr=0.0, vae_lr=1e-2)
    agent = make_agent(VariBAD, **rates, epochs=1, minibatch=320, vae_updates=1)
    before = {name: p.clone() for name, p in agent.named_parameters()}
    buffer = collect(agent, PointMass(8))
    metrics = agent.update(buffer, adam(agent), torch.Generator().manual_seed(0))
    assert metrics["updates"] == 2
    for name, p in agent.named_parameters():
        rate = dict(policy_head=1e-4, log_std=1e-4, value_head=0.0, vae=1e-2)[name.split(".")[0]]
        step = (p - before[name]).abs().max().item()  # Adam's first step has the size of its rate
        assert step == pytest.approx(rate, rel=0.02), name


# ---- PEARL: the posterior of z -------------------------------------------------------------------


def scale_of(agent):
    """By what rewards are divided."""
    return math.sqrt(agent.reward_stats.mean.item() ** 2 + agent.reward_stats.var.item())


def factors_of(agent, state, action, reward):
    """Mean and variance of the factor of each transition, (..., Z)."""
    x = torch.cat([state, action, reward[..., None] / scale_of(agent)], dim=-1)
    mean, width = agent.encoder(x).split(agent.config.latent_size, dim=-1)
    return mean, torch.log1p(width.exp())


def posterior_by_hand(agent, state, action, reward):
    """The product of Gaussians in closed form, of one task."""
    mean, var = factors_of(agent, state, action, reward)
    precision = (1 / var).sum(dim=0)
    return Normal((mean / var).sum(dim=0) / precision, precision.rsqrt())


def test_the_posterior_is_the_product_of_its_factors_in_any_order():
    agent = make_agent(PEARL)
    context = torch.randn(4, 6, 2), torch.rand(4, 6, 2), torch.randn(4, 6)
    mean, var = agent.posterior(*context)
    order = torch.randperm(6)
    shuffled = agent.posterior(*(x[:, order] for x in context))
    torch.testing.assert_close((mean, var), shuffled)

    # The closed form, and the closed form against densities that are multiplied on a grid.
    grid = torch.linspace(-8, 8, 40_001, dtype=torch.float64)
    for m in range(4):
        expected = posterior_by_hand(agent, *(x[m] for x in context))
        torch.testing.assert_close((mean[m], var[m]), (expected.mean, expected.variance))
        factor_mean, factor_var = factors_of(agent, *(x[m] for x in context))
        factors = Normal(factor_mean[..., None].double(), factor_var[..., None].sqrt().double())
        density = factors.log_prob(grid).sum(dim=0).exp()  # (Z, grid)
        density = density / density.sum(dim=1, keepdim=True)
        grid_mean = density @ grid
        grid_var = (density * (grid - grid_mean[:, None]) ** 2).sum(dim=1)
        torch.testing.assert_close(expected.mean, grid_mean.float(), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(expected.variance, grid_var.float(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", [PointMass, Falling])
def test_z_is_drawn_from_the_prior_and_then_from_the_posterior_of_all_earlier_episodes(family):
    agent = make_agent(PEARL)
    buffer = collect(agent, family(5), steps=80)
    z, noise = buffer.stored["z"], buffer.stored["z_noise"]
    past = buffer.state, buffer.clipped_action, buffer.reward
    for r in range(5):
        torch.testing.assert_close(z[r, 0], noise[r, 0])  # N(0, I)
        for t in range(1, 80):
            expected = z[r, t - 1]  # constant within an episode
            if buffer.eta[r, t - 1]:
                q = posterior_by_hand(agent, *(x[r, :t] for x in past))
                expected = q.mean + q.stddev * noise[r, t]
                assert not torch.allclose(expected, z[r, t - 1], atol=1e-3)
            torch.testing.assert_close(z[r, t], expected, rtol=1e-4, atol=1e-5)
    assert abs(noise.mean()) < 0.05 and noise.std() == pytest.approx(1, abs=0.05)


# ---- PEARL: soft actor-critic --------------------------------------------------------------------


def random_batch(M=3, B=4, C=5):
    """Steps of the replay: observation, action, reward, terminated, timed_out."""
    step = torch.cat([torch.randn(M, B, 2), torch.rand(M, B, 2), torch.randn(M, B, 3)], dim=-1)
    step[..., -2:] = 0.0
    step[0, 0, -2] = step[1, 2, -2] = 1.0  # terminated
    step[0, 1, -1] = step[2, 3, -1] = 1.0  # timed out
    return torch.randn(M, C, 7), step, torch.randn(M, B, 7)


def losses_by_hand(agent, context, step, next_step, generator):
    """SAC's and PEARL's losses, one transition at a time."""
    config = agent.config
    M, B, _ = step.shape
    Z, A = config.latent_size, 2
    z_noise = torch.randn(M, Z, generator=generator)
    next_noise = torch.randn(M, B, A, generator=generator)
    new_noise = torch.randn(M, B, A, generator=generator)
    alpha = (1 - config.gamma) * config.entropy_weight  # all of Q is scaled by 1 - gamma

    def unpack(step):
        mean, std = agent.normalizer.mean, (agent.normalizer.var + 1e-8).sqrt()
        return (step[..., :2] - mean) / std, step[..., 2:4], step[..., 4]

    def act(state, z, noise):
        """An action, and its log_prob times alpha."""
        mean, log_std = agent.policy_head(torch.cat([state, z])).split(A)
        policy = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
        action = torch.tanh(mean + log_std.exp() * noise)
        return action, alpha * policy.log_prob(action).sum()

    critic_loss, policy_loss, kl = 0.0, 0.0, 0.0
    for m in range(M):
        posterior = posterior_by_hand(agent, *unpack(context[m]))
        z = posterior.mean + posterior.stddev * z_noise[m]
        prior = Normal(torch.zeros(Z), torch.ones(Z))
        kl = kl + kl_divergence(posterior, prior).sum() / M

        for b in range(B):
            state, action, reward = unpack(step[m, b])
            next_state, _, _ = unpack(next_step[m, b])
            terminated, timed_out = step[m, b, 5:].tolist()
            next_action, cost = act(next_state, z, next_noise[m, b])
            next_qs = [q(torch.cat([next_state, next_action, z])) for q in agent.targets]
            y = (1 - config.gamma) * reward / scale_of(agent)
            if not terminated:
                y = y + config.gamma * (min(next_qs) - cost)
            for q in agent.critics:
                error = q(torch.cat([state, action, z])) - y.detach()
                critic_loss = critic_loss + (0 if timed_out else 1) * error**2 / (M * B)

            new_action, cost = act(state, z.detach(), new_noise[m, b])
            qs = [q(torch.cat([state, new_action, z.detach()])) for q in agent.critics]
            policy_loss = policy_loss + (cost - min(qs)) / (M * B)
    return critic_loss.squeeze(), policy_loss.squeeze(), kl


def test_losses_and_gradients_are_those_by_hand():
    """Critics: their error. Encoder: the critics' error and the KL. Policy: its own loss alone."""
    agent = make_agent(PEARL, gamma=0.8, entropy_weight=0.7, kl_weight=0.3)
    for x in agent.targets.parameters():
        x.add_(0.3 * torch.randn_like(x))  # as after some training
    batch = random_batch()
    loss, metrics = agent.loss(*map(agent.unpack, batch), torch.Generator().manual_seed(5))
    loss.backward()
    by_hand = losses_by_hand(agent, *batch, torch.Generator().manual_seed(5))
    critic_loss, policy_loss, kl = by_hand
    torch.testing.assert_close((metrics["critic_loss"], metrics["kl"]), (critic_loss, kl))
    torch.testing.assert_close(loss, critic_loss + policy_loss + 0.3 * kl)

    for module, own_loss in [
        (agent.critics, critic_loss),
        (agent.encoder, critic_loss + 0.3 * kl),
        (agent.policy_head, policy_loss),
    ]:
        gradients = torch.autograd.grad(own_loss, list(module.parameters()), retain_graph=True)
        for x, gradient in zip(module.parameters(), gradients):
            assert gradient.abs().max() > 0
            torch.testing.assert_close(x.grad, gradient, rtol=1e-3, atol=1e-6)
    assert all(x.grad is None for x in agent.targets.parameters())


def test_log_prob_is_finite_for_actions_at_the_limit():
    agent = make_agent(PEARL)
    nn.init.constant_(agent.policy_head[-1].bias, 50.0)
    action, log_prob = agent.sample_action(torch.randn(4, 2), torch.randn(4, 3), torch.randn(4, 2))
    assert (action == 1.0).all() and log_prob.isfinite().all()


def test_targets_follow_the_critics_slowly():
    agent = make_agent(PEARL, updates=1, target_rate=0.25)
    old = [x.clone() for x in agent.targets.parameters()]
    agent.update(collect(agent, PointMass(3)), adam(agent), torch.Generator())
    for before, after, critic in zip(old, agent.targets.parameters(), agent.critics.parameters()):
        assert not torch.equal(critic, before)
        torch.testing.assert_close(after, before + 0.25 * (critic - before))


# ---- PEARL: replay -------------------------------------------------------------------------------


def sample_numbered(iterations, capacity, **settings):
    """Samples of a replay whose steps say where they are from: iteration, row, t < 12."""
    agent = make_agent(PEARL, **settings)
    slot, row, t = torch.meshgrid(*map(torch.arange, (capacity, 3, 13)), indexing="ij")
    # Slot s of a ring holds the last iteration i with i % capacity == s.
    iteration = iterations - 1 - (iterations - 1 - slot) % capacity
    agent.replay = torch.stack([iteration, row, t], dim=-1).float()
    return agent.sample_replay(iterations, torch.Generator().manual_seed(0))


def test_a_sample_is_of_one_trial_and_its_context_of_the_first_episodes():
    settings = dict(meta_batch=200, batch_size=8, context_size=100, episodes_per_trial=3)
    context, step, next_step = sample_numbered(7, capacity=4, **settings)
    assert context.shape == (200, 100, 3) and step.shape == next_step.shape == (200, 8, 3)
    together = torch.cat([context, step, next_step], dim=1)[..., :2]
    assert (together == together[:, :1]).all()
    assert torch.equal(next_step[..., 2], step[..., 2] + 1)
    # Only the last four of seven iterations are left, and all of them are drawn.
    assert step[..., 0].unique().tolist() == [3, 4, 5, 6]
    assert step[..., 1].unique().tolist() == [0, 1, 2]
    assert step[..., 2].unique().tolist() == list(range(12))

    last = context[..., 2].amax(dim=1)
    assert last.unique().tolist() == [3, 7]  # one or two of the three episodes of 4 steps
    assert 70 < (last == 3).sum() < 130


def test_recent_trials_are_drawn_more_often():
    _, step, _ = sample_numbered(40, capacity=40, meta_batch=4000, batch_size=1)
    iteration = step[:, 0, 0]
    assert (iteration >= 30).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert (iteration < 10).float().mean().item() == pytest.approx(1 - 0.75**0.5, abs=0.05)


def test_the_replay_keeps_the_last_iterations():
    agent = make_agent(PEARL, replay_size=320)  # two iterations of 4 rows and 40 steps
    buffers = [trmrl.Buffer(4, 40, (2, 2, 1), torch.Generator()) for _ in range(3)]
    for i, buffer in enumerate(buffers):
        buffer.reward[:] = i
        agent.remember(buffer)
    assert agent.replay.shape == (2, 4, 41, 7) and agent.replay_iterations == 3
    assert agent.replay[:, 0, 0, 4].tolist() == [2.0, 1.0]


def test_the_replay_holds_trials_as_they_were():
    agent = make_agent(PEARL)
    buffer = collect(agent, Falling(3))
    agent.remember(buffer)
    state, action, reward, terminated, timed_out = agent.unpack(agent.replay[0])
    torch.testing.assert_close(state, buffer.state)  # normalised
    assert torch.equal(action, buffer.clipped_action)
    assert torch.equal(reward[:, :-1], buffer.reward)
    assert torch.equal(terminated[:, :-1] > 0, buffer.terminated)
    by_clock = (buffer.eta > 0) & ~buffer.terminated
    assert buffer.terminated.any() and by_clock.any()
    assert torch.equal(timed_out[:, :-1] > 0, by_clock)


# ---- MAML by hand: one row, one step, one PyTorch module at a time -------------------------------

EXPLORING, ADAPTED = 0, 1


def make_maml(hidden=5, **settings):
    """A small policy, and a baseline that is not zero."""
    agent = make_agent(MAML, **dict(inner_lr=0.5, gae_lambda=0.95) | settings)
    agent.policy_head = trmrl.mlp([2, hidden, 2])
    agent.betas.normal_(std=0.1)
    return agent


def episodes_by_hand(agent, buffer, r):
    """The exploring and the adapted episodes of row r, lists of steps; the last may be cut off."""
    episodes = [[]]
    for t in range(buffer.eta.shape[1]):
        episodes[-1].append(t)
        if buffer.eta[r, t] > 0:
            episodes.append([])
    episodes = [steps for steps in episodes if steps]
    explorations = agent.config.episodes_per_trial - 1
    return episodes[:explorations], episodes[explorations:]


def features_by_hand(buffer, r, t, time, mean_reward):
    s = buffer.state[r, t].double()
    time = torch.tensor([time, time**2, time**3, 1.0], dtype=torch.double)
    return torch.cat([s, s * s, mean_reward * s, time])


def advantages_by_hand(agent, buffer, r, kind):
    """Standardised GAE of the steps of the episodes of a kind, from its definition as a sum."""
    gamma, lam, beta = agent.config.gamma, agent.config.gae_lambda, agent.betas[kind].double()
    episodes = episodes_by_hand(agent, buffer, r)[kind]
    reward = buffer.reward[r].double()
    mean = reward[sum(episodes, [])].mean()
    result = []
    for steps in episodes:
        value = [
            mean / (1 - gamma) + features_by_hand(buffer, r, t, i / 100, mean) @ beta
            for i, t in enumerate(steps)
        ]
        after = 0.0 if buffer.terminated[r, steps[-1]] else value[-1]
        following = value[1:] + [after]
        delta = [reward[t] + gamma * following[i] - value[i] for i, t in enumerate(steps)]
        for i in range(len(steps)):
            result.append(sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(steps))))
    result = torch.stack(result)
    return (result - result.mean()) / (result.std(correction=0) + 1e-8)  # of one step: 0


def gaussian(net, log_std, state):
    return Independent(Normal(net(state), log_std.exp()), 1)


def objective_by_hand(agent, buffer, r, kind, net, log_std):
    """J of one row, by PyTorch's own distributions."""
    t = sum(episodes_by_hand(agent, buffer, r)[kind], [])
    advantage = advantages_by_hand(agent, buffer, r, kind).to(log_std)
    log_prob = gaussian(net, log_std, buffer.state[r, t]).log_prob(buffer.action[r, t])
    return ((log_prob - buffer.log_prob[r, t]).exp() * advantage).mean()


def adapted_by_hand(agent, buffer, r):
    """The policy of row r after its inner step: a module and a log_std."""
    net, log_std = copy.deepcopy(agent.policy_head), agent.log_std.detach().clone().requires_grad_()
    J = objective_by_hand(agent, buffer, r, EXPLORING, net, log_std)
    weights = [log_std, *net.parameters()]
    with torch.no_grad():
        for w, gradient in zip(weights, torch.autograd.grad(J, weights)):
            w += agent.config.inner_lr * gradient
    return net, log_std


# ---- MAML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("E", [2, 3])
@pytest.mark.parametrize("family", [PointMass, Falling])
def test_all_tasks_adapt_at_once_as_in_a_loop_over_tasks(family, E):
    agent = make_maml(episodes_per_trial=E)
    buffer = collect(agent, family(6), steps=20 * E)
    for r in range(6):
        net, log_std = adapted_by_hand(agent, buffer, r)
        expected = nn.utils.parameters_to_vector([log_std, *net.parameters()]).detach()
        torch.testing.assert_close(buffer.stored["weights"][r], expected, rtol=1e-3, atol=1e-4)
    moved = (buffer.stored["weights"] - agent.theta).norm(dim=1)
    assert (moved > 0.05).sum() >= 4  # an episode of one step has no advantage


@pytest.mark.parametrize("sample", [True, False])
def test_it_explores_with_the_initial_weights_and_then_acts_with_the_adapted_ones(sample):
    """It samples while it explores, even where mean actions are asked for."""
    agent = make_maml()
    buffer = collect(agent, Falling(6), sample=sample)
    for r in range(6):
        policies = (agent.policy_head, agent.log_std), adapted_by_hand(agent, buffer, r)
        for kind in (EXPLORING, ADAPTED):
            t = sum(episodes_by_hand(agent, buffer, r)[kind], [])
            pi = gaussian(*policies[kind], buffer.state[r, t])
            noise = buffer.noise[r, t] if sample or kind == EXPLORING else 0.0
            expected = pi.mean + pi.stddev * noise
            torch.testing.assert_close(buffer.action[r, t], expected, rtol=1e-3, atol=1e-3)
            log_prob = pi.log_prob(buffer.action[r, t])
            torch.testing.assert_close(buffer.log_prob[r, t], log_prob, rtol=1e-3, atol=1e-3)


def test_the_linear_baseline_is_the_ridge_regression_of_the_returns():
    agent = make_maml()
    buffer = collect(agent, Falling(6))
    agent.update(buffer, None, None)
    for kind in (EXPLORING, ADAPTED):
        X, y = [], []
        for r in range(6):
            episodes = episodes_by_hand(agent, buffer, r)[kind]
            reward = buffer.reward[r].double().numpy()
            mean = reward[sum(episodes, [])].mean()
            level = mean / (1 - 0.9)
            for steps in episodes:
                rest = 0.0 if buffer.terminated[r, steps[-1]] else level
                for i, t in enumerate(steps):
                    rewards = [*reward[steps[i:]], rest]
                    X.append(features_by_hand(buffer, r, t, i / 100, mean).numpy())
                    y.append(0.9 ** np.arange(len(rewards)) @ rewards - level)

        # Ridge regression is least squares with one more sample for each feature.
        root = math.sqrt(maml.RIDGE * len(X))
        X, y = np.vstack([X, root * np.eye(10)]), np.append(y, np.zeros(10))
        expected = np.linalg.lstsq(X, y, rcond=None)[0]
        np.testing.assert_allclose(agent.betas[kind], expected, rtol=1e-2, atol=1e-2)


def outer_problem(agent, buffer, monkeypatch):
    """What `update` asks of TRPO: objective, kl and theta."""
    asked = []

    def spy(objective, kl, theta, max_kl):
        asked.extend([objective, kl, theta])
        return theta, {}

    with monkeypatch.context() as patch:
        patch.setattr(maml, "trpo_step", spy)
        copy.deepcopy(agent).update(buffer, None, None)
    return asked


def with_weights(agent, theta):
    other = copy.deepcopy(agent)
    nn.utils.vector_to_parameters(theta, other.parameters())
    return other


def test_the_meta_gradient_passes_through_the_inner_step(monkeypatch):
    """Against finite differences of plain PyTorch modules, adapted row by row."""
    agent = make_maml(hidden=3)
    buffer = collect(agent, Falling(4))
    for name, x in vars(buffer).items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            setattr(buffer, name, x.double())
    objective, _, theta = outer_problem(agent.double(), buffer, monkeypatch)
    gradient = torch.func.grad(objective)(theta)

    def by_hand(theta):
        other = with_weights(agent, theta)
        adapted = [adapted_by_hand(other, buffer, r) for r in range(4)]
        J = [objective_by_hand(agent, buffer, r, ADAPTED, *adapted[r]) for r in range(4)]
        return sum(J).item() / 4

    step = 1e-4
    for i in range(0, len(theta), 3):
        e = torch.zeros_like(theta)
        e[i] = step
        slope = (by_hand(theta + e) - by_hand(theta - e)) / (2 * step)
        assert gradient[i].item() == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_the_kl_divergence_is_that_of_the_adapted_policies(monkeypatch):
    agent = make_maml()
    buffer = collect(agent, Falling(4))
    _, kl, theta = outer_problem(agent, buffer, monkeypatch)
    moved = with_weights(agent, theta + 0.1 * torch.randn(len(theta)))

    expected = 0.0
    for r in range(4):
        state = buffer.state[r, sum(episodes_by_hand(agent, buffer, r)[ADAPTED], [])]
        old, new = (gaussian(*adapted_by_hand(a, buffer, r), state) for a in (agent, moved))
        expected += kl_divergence(old, new).mean().item() / 4
    assert kl(moved.theta).item() == pytest.approx(expected, rel=1e-3)
    assert kl(theta).item() == pytest.approx(0.0, abs=1e-6)


def test_trpo_steps_to_the_best_point_within_the_bound():
    """Linear objective, quadratic divergence: the closed form of the natural gradient."""
    torch.manual_seed(0)
    A = torch.randn(5, 5, dtype=torch.double)
    H, g = A @ A.T + torch.eye(5), torch.randn(5, dtype=torch.double)
    theta = torch.randn(5, dtype=torch.double)
    damped = H + maml.DAMPING * torch.eye(5)
    x = torch.linalg.solve(damped, g)
    x = x * (2 * 0.03 / (x @ damped @ x)).sqrt()

    def kl(point):
        return 0.5 * (point - theta) @ H @ (point - theta)

    moved, metrics = maml.trpo_step(lambda point: g @ point, kl, theta, 0.03)
    torch.testing.assert_close(moved - theta, x, rtol=1e-4, atol=1e-6)
    assert metrics["step_fraction"] == 1.0
    assert metrics["kl"] == pytest.approx((0.5 * x @ H @ x).item()) and metrics["kl"] <= 0.03
    assert metrics["gain"] == pytest.approx((g @ x).item())


def test_the_line_search_shortens_a_step_that_breaks_the_bound_or_does_not_improve():
    theta, g = torch.zeros(3), torch.tensor([1.0, 2.0, 2.0])

    def square(x):
        return 0.5 * x @ x

    def steep(x):
        """A divergence that grows faster than its second derivative says."""
        return square(x) + 100 * square(x) ** 2

    moved, metrics = maml.trpo_step(lambda x: g @ x, steep, theta, 0.5)
    assert 0 < metrics["kl"] <= 0.5 and 0 < metrics["step_fraction"] < 1
    assert steep(moved / 0.8) > 0.5  # the fraction that was tried before

    # The objective falls soon after theta.
    moved, metrics = maml.trpo_step(lambda x: g @ x - 10 * square(x), square, theta, 0.5)
    assert metrics["gain"] > 0 and 0 < metrics["step_fraction"] < 1
    assert (g @ moved - 10 * square(moved)).item() == pytest.approx(metrics["gain"], rel=1e-4)

    # The objective falls everywhere: theta stays.
    moved, metrics = maml.trpo_step(lambda x: g @ x - 1e9 * square(x), square, theta, 0.5)
    assert torch.equal(moved, theta) and metrics["gain"] == metrics["step_fraction"] == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_an_update_improves_the_objective_within_the_bound(seed, monkeypatch):
    agent = make_maml(inner_lr=0.1, max_kl=0.01)
    buffer = collect(agent, Falling(10), seed=seed)
    objective, kl, theta = outer_problem(agent, buffer, monkeypatch)
    metrics = agent.update(buffer, None, None)
    assert 0.003 < kl(agent.theta).item() <= 0.01
    assert objective(agent.theta) > objective(theta) + 0.005
    assert metrics["kl"] == pytest.approx(kl(agent.theta).item(), rel=1e-3)


# ---- Runs ----------------------------------------------------------------------------------------


def train(agent_class, folder):
    """A run of four iterations."""
    config = small_config(agent_class, total_steps=640, run_dir=str(folder))
    return trmrl.train(config, make_points, agent_class)


def main(agent_class, *argv):
    return trmrl.main([*map(str, argv)], make_points, agent_class)


def stopped_run(agent_class, folder, monkeypatch):
    """A run that ended within its third iteration, after the update."""

    def update_and_stop(agent, *args, update=agent_class.update):
        metrics = update(agent, *args)
        if agent.trained_steps == 320:
            raise KeyboardInterrupt
        return metrics

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(agent_class, "update", update_and_stop)
        train(agent_class, folder)
    return folder


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A function: the folder of a finished run of an agent."""

    @functools.cache
    def folder_of(agent_class):
        folder = tmp_path_factory.mktemp("runs") / agent_class.name
        train(agent_class, folder)
        return folder

    return folder_of


def outcome(folder):
    """The checkpoint of a run, and its progress without times."""
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    tensors = {key: saved[key] for key in ("weights", "optimizer", "iteration", "step")}
    return tensors, test_trmrl.csv_rows(folder / "progress.csv"), saved["csv"]["eval.csv"]


@for_each(*AGENTS)
def test_a_resumed_run_ends_as_one_that_was_never_stopped(
    agent_class, finished_run, tmp_path, monkeypatch
):
    whole, stopped = finished_run(agent_class), stopped_run(agent_class, tmp_path, monkeypatch)
    if agent_class is PEARL:  # as if it had been stopped while it wrote the replay
        size = (stopped / "replay.bin").stat().st_size
        os.truncate(stopped / "replay.bin", size - 100)
    trmrl.resume(stopped, make_points, agent_class)
    tensors, *tables = outcome(stopped)
    expected_tensors, *expected_tables = outcome(whole)
    torch.testing.assert_close(tensors, expected_tensors, rtol=0, atol=0)
    assert tables == expected_tables and len(tables[0]) == 4
    if agent_class is PEARL:
        assert (stopped / "replay.bin").read_bytes() == (whole / "replay.bin").read_bytes()


def test_pearl_needs_its_replay_to_resume_but_not_to_be_tested(tmp_path, monkeypatch, capsys):
    folder = stopped_run(PEARL, tmp_path, monkeypatch)
    replay = folder / "replay.bin"
    two_iterations = replay.stat().st_size * 2 // 3
    for damage in (lambda: os.truncate(replay, two_iterations - 1), replay.unlink):
        damage()
        capsys.readouterr()
        assert main(PEARL, "--resume", folder) == 2
        error = capsys.readouterr().err
        assert "has lost trials" in error and error.count("\n") == 1
    assert main(PEARL, "--eval", folder, "--episodes", 3) == 0
    assert "episode 3" in capsys.readouterr().out


@for_each(*AGENTS)
def test_a_number_that_is_not_finite_ends_the_run_and_is_not_saved(
    agent_class, tmp_path, monkeypatch
):
    def poisoned_update(agent, buffer, *args, update=agent_class.update):
        if agent.trained_steps == 320:
            buffer.reward[0, 3] = torch.nan
        return update(agent, buffer, *args)

    monkeypatch.setattr(agent_class, "update", poisoned_update)
    remedy = "--inner-lr" if agent_class is MAML else "learning rate"
    with pytest.raises(trmrl.UserError, match=f"not finite; start again with a lower {remedy}"):
        train(agent_class, tmp_path / "run")
    saved, rows, _ = outcome(tmp_path / "run")
    assert saved["iteration"] == len(rows) == 2
    assert all(x.isfinite().all() for x in saved["weights"].values())


@for_each(*AGENTS)
def test_a_run_is_meta_tested_by_its_own_module(agent_class, finished_run, capsys):
    folder = finished_run(agent_class)
    assert json.loads((folder / "config.json").read_text())["agent"] == agent_class.name
    assert main(agent_class, "--eval", folder) == 0
    assert f"{agent_class.name}, 640 steps of points" in capsys.readouterr().out

    loaded = trmrl.load_agent(folder, agent_class=agent_class)
    returns, _ = trmrl.meta_test(loaded, PointMass(2, split="test"))
    lines = (folder / "eval.csv").read_text().splitlines()[-12:]  # 2 tasks, 6 episodes
    written = np.array([float(line.split(",")[4]) for line in lines]).reshape(2, 6)
    np.testing.assert_allclose(returns, written, rtol=1e-4)

    assert main(trmrl.TrMRL, "--eval", folder) == 2
    assert f"python -m baselines.{agent_class.name} --eval" in capsys.readouterr().err


TWO_PROCESSES = """
import sys, torch, trmrl
from baselines import test_baselines as tests
for agent_class in tests.AGENTS:
    folder = f"{sys.argv[1]}/{agent_class.name}"
    if agent_class in tests.ONE_PROCESS:
        argv = ["--run-dir", folder, "--device", "cpu", "--total-steps", 1]
        assert tests.main(agent_class, *argv) == 2
    else:
        agent = tests.train(agent_class, folder)
        torch.save(agent.state_dict(), f"{folder}-{trmrl.RANK}.pt")
"""


def test_two_processes_keep_the_same_weights_or_are_refused(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    done = test_trmrl.torchrun(script, tmp_path)
    assert done.status == 0, done.err
    for agent_class in AGENTS:
        name = agent_class.name
        if agent_class in ONE_PROCESS:
            line = f"{name}: this agent runs in one process; start it without torchrun\n"
            assert done.err.count(line) == 2 and not (tmp_path / name).exists()
        else:
            first, second = (torch.load(tmp_path / f"{name}-{i}.pt") for i in (0, 1))
            torch.testing.assert_close(first, second, rtol=0, atol=0)
            assert first["normalizer.count"] == 640


# ---- Command line --------------------------------------------------------------------------------


@for_each(*AGENTS)
def test_a_flag_without_a_meaning_is_refused(agent_class, capsys):
    unused = agent_class.Config.not_flags
    assert {"memory_length", "layers", "heads", "tfixup", "keep_memory"} <= set(unused)
    for name in unused:
        assert main(agent_class, trmrl.flag(name), 1) == 2
        message = f"{trmrl.flag(name)} does not apply to {agent_class.name}"
        assert message in capsys.readouterr().err
    flags = trmrl.make_parser(agent_class, "halfcheetah_vel").format_help()
    for f in fields(agent_class.Config):
        assert (f"{trmrl.flag(f.name)} " in flags) != (f.name in unused)


@pytest.mark.parametrize(
    "agent_class, typed, message",
    [
        (RL2, "--d-model 0", "--d-model must be between 1"),
        (VariBAD, "--vae-lr 2", "--vae-lr must be between 0"),
        (VariBAD, "--latent-size 0", "--latent-size must be between 1"),
        (PEARL, "--no-keep-memory", "--no-keep-memory"),
        (PEARL, "--gamma 1", "--gamma must be between 0"),
        (PEARL, "--target-rate 2", "--target-rate must be between 1e-06"),
        (PEARL, "--batch-size 0", "--batch-size must be between 1"),
        (PEARL, "--updates x", "--updates: invalid integer value"),
        (MAML, "--episodes-per-trial 1", "--episodes-per-trial must be between 2"),
        (MAML, "--inner-lr -1", "--inner-lr must be between 0"),
        (MAML, "--max-kl x", "--max-kl: invalid float value"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(agent_class, typed, message, capsys, tmp_path):
    argv = ["--run-dir", tmp_path / "run", "--total-steps", 1, *typed.split()]
    assert main(agent_class, *argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@for_each(*AGENTS)
def test_every_environment_has_a_preset_that_works(agent_class):
    for env in ("halfcheetah_vel", "ant_dir", "ml1_reach", "ml45_train", "points"):
        config = agent_class.Config(env=env)
        trmrl.check_config(config)
        agent_class(config, (2, 2, 1))
    assert agent_class.Config(env="ml45_train").num_tasks % 45 == 0


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@for_each(*AGENTS)
def test_the_module_is_a_command(agent_class, monkeypatch, capsys):
    module = agent_class.command.removeprefix("python -m ")
    monkeypatch.setattr(sys, "argv", [module, "--layers", "2"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module(module, run_name="__main__")
    expected = f"{module}: --layers does not apply to {agent_class.name}\n"
    assert capsys.readouterr().err == expected
