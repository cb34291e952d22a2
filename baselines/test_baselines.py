# SPDX-License-Identifier: MIT
"""The baselines, each against something independent: RL^2, the oracle, VariBAD, PEARL, MAML."""

import contextlib
import copy
import csv
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal, TransformedDistribution, kl_divergence
from torch.distributions import kl_divergence as torch_kl
from torch.distributions.transforms import TanhTransform

import trmrl
from baselines import maml, pearl, varibad
from baselines.oracle import Oracle
from baselines.rl2 import RL2, gru_inputs
from baselines.varibad import VariBAD

torch.set_num_threads(1)  # everything here is small

ROOT = Path(__file__).parent.parent
AGENTS = [Oracle, RL2, VariBAD]
SMALL = dict(env="points", device="cpu", d_model=16, num_tasks=8, eval_tasks=4, init_std=0.4)


def by_name(agent_class):
    return agent_class.name


each_agent = pytest.mark.parametrize("agent_class", AGENTS, ids=by_name)


class PointMass(trmrl.Tasks):
    """Find a hidden goal on the unit circle. Without adapting, standing still is best: -20."""

    episode_length = 20

    def __init__(self, num_tasks, seed=0, split="train"):
        self.x = np.zeros((num_tasks, 2))
        super().__init__(num_tasks, seed, split, state_size=2, action_size=2)

    def sample_tasks(self, rng, n):
        return rng.uniform(0, 2 * np.pi, (n, 1))

    def fixed_tasks(self, split, n):
        return 2 * np.pi * np.arange(n)[:, None] / n

    def begin(self, mask):
        self.x[mask] = 0.0

    def advance(self, actions):
        self.x = self.x + 0.25 * actions
        goal = np.concatenate([np.cos(self.tasks), np.sin(self.tasks)], axis=1)
        return -np.linalg.norm(self.x - goal, axis=1), np.zeros(self.num_envs, dtype=bool), {}

    def observation(self):
        return self.x


class Falling(PointMass):
    """A point mass that falls at random."""

    def advance(self, actions):
        reward, _, info = super().advance(actions)
        return reward, self.np_random.random(self.num_envs) < 0.1, info


def make_points(env, num_tasks, seed=0, split="train"):
    return PointMass(num_tasks, seed, split)


def make_agent(agent_class, **settings):
    """A small agent whose normalisers have seen something and whose actions differ visibly."""
    torch.manual_seed(0)
    settings = {name: value for name, value in SMALL.items() if name not in settings} | settings
    agent = agent_class(agent_class.Config(**settings), (2, 2, 1))
    agent.normalizer.update(3 * torch.randn(100, 2))
    agent.reward_stats.update(torch.randn(100, 1) - 2)
    for parameter in agent.policy.parameters():
        nn.init.normal_(parameter, std=0.3)
    return agent


def collect(agent, envs, steps, seed=0, sample=True):
    return trmrl.collect(agent, envs, envs.tasks, steps, sample, seed)


def all_steps(trials):
    """Row and step number of all steps, (R, T) each."""
    R, T = trials.value.shape
    return torch.arange(R)[:, None].expand(R, T), torch.arange(T).expand(R, T)


def with_gradient(trials):
    """A copy of the trials through which a gradient flows back to the working memories."""
    twin = copy.copy(trials)
    twin.token = trials.token.clone().requires_grad_()
    twin.state = twin.token[:, :, : trials.state.shape[-1]]
    return twin


def memories_by_hand(trials, row, t):
    """(s, a, r, eta) of the steps 0 to t of a row, one step after the other: (1, t + 1, 6)."""
    rows = []
    for i in range(t + 1):
        past = torch.zeros(4)
        if i > 0:
            action, reward = trials.clipped_action[row, i - 1], trials.reward[row, i - 1]
            past = torch.stack([*action, reward, trials.eta[row, i - 1]])
        rows.append(torch.cat([trials.state[row, i], past]))
    return torch.stack(rows)[None]


# ---- all three -----------------------------------------------------------------------------------


@each_agent
def test_learning_sees_what_acting_saw(agent_class):
    """Before the first gradient step the ratio of PPO is 1, through falls and ends of episodes."""
    agent = make_agent(agent_class)
    trials = collect(agent, Falling(6), 60)
    assert trials.terminated.sum() > 10
    with torch.no_grad():
        log_prob, value = agent.evaluate(trials, *all_steps(trials))
    torch.testing.assert_close(log_prob, trials.log_prob, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(value, trials.value, atol=1e-5, rtol=1e-5)


@each_agent
def test_acting_twice_gives_the_same_answer_twice(agent_class):
    agent = make_agent(agent_class)
    trials = collect(agent, PointMass(5), 30)
    with torch.no_grad():
        first = agent.act(trials, 17, True)
        second = agent.act(trials, 17, True)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first[0], trials.action[:, 17])


@each_agent
def test_the_agent_of_a_loop_of_ones_own_is_the_agent_of_the_collector(agent_class):
    agent, envs = make_agent(agent_class), PointMass(5)
    trials = collect(agent, envs, 40, sample=False)
    player = trmrl.Player(agent, 5, max_steps=50)
    player.trials.task = trials.task
    for t in range(40):
        action = player.act(trials.observation[:, t])
        np.testing.assert_allclose(action, trials.action[:, t], atol=1e-5)
        player.observe(action, trials.reward[:, t], trials.eta[:, t])


@pytest.mark.parametrize("agent_class", [RL2, VariBAD], ids=by_name)
def test_memory_lasts_for_the_trial_and_knows_its_own_row_only(agent_class):
    agent, envs = make_agent(agent_class), PointMass(3)
    trials = collect(agent, envs, 40)
    hidden = trials.stored["hidden"]
    assert agent.config.keep_memory and hidden[:, 21].abs().min() > 0  # of the second episode

    # What the first row got at step 5 changes what it does in its second episode, and no other row.
    changed = copy.deepcopy(trials)
    changed.token[0, 5, -2] -= 1.0
    for t in range(6, 40):
        agent.act(changed, t, True)
    change = (changed.stored["hidden"] - hidden).abs().amax(dim=2)
    assert (change[0, 7:41] > 0).all() and change[0, :7].max() == 0 and change[1:, :41].max() < 1e-6


@pytest.mark.parametrize(
    "agent_class, at_least, settings",
    [
        (Oracle, -10, dict(total_steps=32_000, lr=3e-3)),
        (RL2, -17, dict(total_steps=40_000, lr=4e-3, value_lr=3e-3, epochs=8, minibatch=200)),
        (
            VariBAD,
            -17,
            dict(total_steps=32_000, lr=5e-3, value_lr=3e-3, epochs=4, vae_lr=5e-3, vae_updates=6),
        ),
    ],
    ids=["oracle", "rl2", "varibad"],
)
def test_it_learns_to_adapt(agent_class, at_least, settings, tmp_path):
    """Above -20, the best that an agent gets that does not adapt."""
    settings = dict(num_tasks=40, episodes_per_trial=1, gamma=0.8, eval_every=1000) | settings
    config = agent_class.Config(**SMALL | settings, run_dir=str(tmp_path / "run"))
    agent = trmrl.train(config, make_points, agent_class)
    returns, _ = trmrl.meta_test(agent, PointMass(20, split="test"), episodes=1)
    assert returns.mean() > at_least


# ---- the oracle ----------------------------------------------------------------------------------


def test_the_oracle_sees_the_state_and_the_task_and_nothing_else():
    agent = make_agent(Oracle)
    trials = collect(agent, PointMass(5), 40)
    row, t = all_steps(trials)

    def values(change):
        changed = copy.deepcopy(trials)
        change(changed)
        return agent.evaluate(changed, row, t)[1]

    def replace_the_past(changed):
        now = changed.state[:, 30].clone()
        changed.token[:] = torch.randn_like(changed.token)
        changed.state[:, 30] = now

    before = values(lambda changed: None)
    after = values(replace_the_past)
    assert torch.equal(after[:, 30], before[:, 30]) and (after != before)[:, :30].all()
    after = values(lambda changed: changed.task[2].add_(1.0))
    assert (after != before).any(dim=1).tolist() == [False, False, True, False, False]


def test_the_oracle_acts_on_the_task_from_the_first_step():
    agent, envs = make_agent(Oracle), PointMass(5)
    tasks = envs.tasks
    forward = trmrl.collect(agent, envs, tasks, 20, False, 0).action
    backward = trmrl.collect(agent, envs, tasks[::-1].copy(), 20, False, 0).action
    torch.testing.assert_close(backward, forward.flip(0))
    assert forward[:, 0].std(dim=0).min() > 1e-3


def test_the_oracle_normalises_tasks_by_all_that_it_saw(tmp_path):
    seen = []

    def make(env, num_tasks, seed=0, split="train"):
        envs = PointMass(num_tasks, seed, split)
        sample_tasks = envs.sample_tasks
        envs.sample_tasks = lambda rng, n: seen.append(sample_tasks(rng, n)) or seen[-1]
        return envs

    settings = dict(total_steps=900, episodes_per_trial=2, run_dir=str(tmp_path / "run"))
    agent = trmrl.train(Oracle.Config(**SMALL | settings), make, Oracle)
    tasks = np.concatenate(seen)
    assert len(seen) == 3 and agent.tasks.count == 2 * tasks.size
    np.testing.assert_allclose(agent.tasks.mean, tasks.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(agent.tasks.var, tasks.var(axis=0), rtol=1e-4)


# ---- RL^2 ----------------------------------------------------------------------------------------


def test_the_hidden_state_of_rl2_is_a_gru_over_the_whole_trial():
    agent = make_agent(RL2)
    trials = collect(agent, Falling(4), 60)  # three episodes and falls: nothing clears the memory
    gru = nn.GRU(6, 16, batch_first=True)
    gru.load_state_dict(agent.gru.state_dict())
    assert trials.stored["hidden"][:, 0].abs().max() == 0
    for row in range(4):
        expected, _ = gru(memories_by_hand(trials, row, 59))
        torch.testing.assert_close(trials.stored["hidden"][row, 1:61], expected[0])


def test_rl2_learns_through_the_whole_trial_and_from_no_other():
    agent = make_agent(RL2)
    trials = with_gradient(collect(agent, PointMass(3), 40))
    row, t = all_steps(trials)
    _, value = agent.evaluate(trials, row, t)
    value[1, -1].backward()
    gradient = trials.token.grad
    assert (gradient[1, :39] != 0).all()  # s, a, r, eta of every step before
    assert (gradient[1, 39, :2] != 0).all() and (gradient[1, 39, 2:] == 0).all()  # not known yet
    assert (gradient[[0, 2]] == 0).all() and (gradient[:, 40] == 0).all()


def test_a_minibatch_of_rl2_is_made_of_whole_trials(monkeypatch):
    agent = make_agent(RL2, minibatch=90, epochs=3)
    trials = collect(agent, PointMass(8), 40)
    used = []
    evaluate = agent.evaluate
    spy = lambda trials, row, t: used.append((row, t)) or evaluate(trials, row, t)  # noqa: E731
    monkeypatch.setattr(agent, "evaluate", spy)
    optimizer = torch.optim.Adam(agent.parameter_groups(), fused=True)
    metrics = agent.update(trials, optimizer, torch.Generator())
    rows = torch.stack([row for row, _ in used]).view(3, 4, 2, 40)  # epochs, minibatches, rows, T
    assert metrics["updates"] == 12
    assert all(torch.equal(t, torch.arange(40).expand(2, 40)) for _, t in used)
    assert (rows == rows[..., :1]).all()
    assert [sorted(epoch) for epoch in rows[..., 0].flatten(1).tolist()] == [[*range(8)]] * 3


# ---- VariBAD -------------------------------------------------------------------------------------


def test_a_belief_never_sees_the_future():
    agent = make_agent(VariBAD)
    trials = with_gradient(collect(agent, PointMass(3), 40))
    row, t = all_steps(trials)
    belief, _ = agent.vae.encode(gru_inputs(trials, row, t))
    belief[1, 25].sum().backward()
    gradient = trials.token.grad
    assert (gradient[1, :25] != 0).all() and (gradient[1, 25, :2] != 0).all()
    assert (gradient[1, 25, 2:] == 0).all()  # of its own action, reward and eta
    assert (gradient[1, 26:] == 0).all() and (gradient[[0, 2]] == 0).all()


def test_the_stored_belief_is_the_encoder_on_what_happened_so_far():
    agent = make_agent(VariBAD)
    trials = collect(agent, Falling(3), 60)
    gru = nn.GRU(6, 16, batch_first=True)
    gru.load_state_dict(agent.vae.gru.state_dict())
    for row in range(3):
        for t in (0, 1, 19, 20, 59):
            _, h = gru(memories_by_hand(trials, row, t))
            belief = agent.vae.to_belief(h[0, 0])
            torch.testing.assert_close(trials.stored["belief"][row, t], belief)

    # It is detached, even where somebody acts with gradients.
    agent.act(trials, 59, True)
    assert not any(x.requires_grad for x in trials.stored.values())


def test_the_kl_divergence_is_that_of_pytorch():
    torch.manual_seed(0)
    mean, log_var, prior_mean, prior_log_var = torch.randn(4, 7, 3)
    ours = varibad.kl_divergence(mean, log_var, prior_mean, prior_log_var)
    q = Normal(mean, log_var.exp().sqrt())
    p = Normal(prior_mean, prior_log_var.exp().sqrt())
    torch.testing.assert_close(ours, torch_kl(q, p).sum(dim=1))


def elbo_by_brute_force(agent, trials, noise):
    """The sum over rows, beliefs and rewards, one after the other."""
    R, T = trials.reward.shape
    n = agent.config.latent_size
    rewards, kls = 0.0, 0.0
    for row in range(R):
        prior = Normal(torch.zeros(n), torch.ones(n))
        for t in range(T):
            belief, _ = agent.vae.encode(memories_by_hand(trials, row, t))
            mean, log_var = belief[0, -1].split(n)
            q = Normal(mean, log_var.exp().sqrt())
            kls += torch_kl(q, prior).sum()
            prior = q
            z = q.loc + noise[row, t] * q.scale
            for i in range(T):
                if trials.eta[row, i]:
                    continue
                s, a, s_next = trials.state[row, i], trials.action[row, i], trials.state[row, i + 1]
                predicted = agent.vae.decoder(torch.cat([z, s, a.clamp(-1, 1), s_next]))
                reward = trials.reward[row, i] - agent.reward_stats.mean
                reward = reward / agent.reward_stats.var.sqrt()
                constant = Normal(0.0, 1.0).log_prob(torch.tensor(0.0))
                rewards += (Normal(predicted, 1.0).log_prob(reward) - constant).sum()
    return rewards, kls


def test_the_elbo_equals_a_brute_force_sum():
    R, T = 2, 22
    agent = make_agent(VariBAD, latent_size=3)
    trials = collect(agent, Falling(R), T)
    assert 0 < trials.eta[:, :-1].sum() < R * T
    noise = torch.randn(R, T, 3)
    rewards, kls = elbo_by_brute_force(agent, trials, noise)
    error, kl = agent.negative_elbo(trials, torch.arange(T), torch.arange(T), noise)
    torch.testing.assert_close(-error * R * T * T, rewards, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kl * R * T * T, kls, rtol=1e-4, atol=1e-4)

    # The gradients of both are the same, too.
    ours = torch.autograd.grad(error + kl, agent.vae.parameters())
    brute_force = torch.autograd.grad((kls - rewards) / (R * T * T), agent.vae.parameters())
    torch.testing.assert_close(ours, brute_force, rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_a_sample_of_the_elbo_is_right_on_average():
    R, T = 2, 12
    agent = make_agent(VariBAD, latent_size=3)
    trials = collect(agent, PointMass(R), T)
    every, noise = torch.arange(T), torch.randn(R, T, 3)
    samples = []
    for t in range(T):
        for i in range(T):
            terms = agent.negative_elbo(trials, every[[t]], every[[i]], noise[:, [t]])
            samples.append(torch.stack(terms))
    whole = torch.stack(agent.negative_elbo(trials, every, every, noise))
    torch.testing.assert_close(torch.stack(samples).mean(dim=0), whole)
    assert torch.stack(samples)[:, 0].std() > 1e-3


def test_the_decoder_of_a_belief_is_asked_for_past_and_future_rewards(monkeypatch):
    agent = make_agent(VariBAD, vae_updates=30)
    trials = collect(agent, PointMass(8), 40)
    asked = []
    negative_elbo = agent.negative_elbo
    monkeypatch.setattr(
        agent,
        "negative_elbo",
        lambda trials, times, steps, noise: (
            asked.append((times, steps, noise)) or negative_elbo(trials, times, steps, noise)
        ),
    )
    optimizer = torch.optim.Adam(agent.parameter_groups(), fused=True)
    agent.update(trials, optimizer, torch.Generator().manual_seed(0))
    times, steps, noise = (torch.stack(x) for x in zip(*asked))
    assert len(asked) == 30 and set(times.flatten().tolist()) == set(range(40))
    assert set(steps.flatten().tolist()) == set(range(40))
    assert (steps[:, None] > times[:, :, None]).float().mean() == pytest.approx(0.5, abs=0.05)
    assert noise.mean().abs() < 0.05 and noise.std() == pytest.approx(1, abs=0.05)


def test_no_gradient_of_the_policy_reaches_the_encoder_and_none_of_the_elbo_the_policy():
    agent = make_agent(VariBAD)
    trials = collect(agent, PointMass(8), 40)
    log_prob, value = agent.evaluate(trials, *all_steps(trials))
    (log_prob + value).sum().backward()
    assert all(p.grad is None for p in agent.vae.parameters())
    assert all(p.grad.abs().max() > 0 for p in agent.policy.parameters())

    agent.zero_grad()
    steps = torch.arange(40)
    sum(agent.negative_elbo(trials, steps, steps, torch.randn(8, 40, 5))).backward()
    for name, p in agent.named_parameters():
        assert (p.grad is not None) == name.startswith("vae."), name


def test_each_part_of_varibad_learns_at_its_own_rate():
    agent = make_agent(VariBAD, lr=1e-4, value_lr=0.0, vae_lr=1e-2, epochs=1, vae_updates=1)
    groups = agent.parameter_groups()
    numbers = [id(p) for group in groups for p in group["params"]]
    assert sorted(numbers) == sorted(map(id, agent.parameters()))
    before = {name: p.clone() for name, p in agent.named_parameters()}
    trials = collect(agent, PointMass(8), 40)
    optimizer = torch.optim.Adam(groups, fused=True)
    metrics = agent.update(trials, optimizer, torch.Generator().manual_seed(0))
    assert metrics["updates"] == 2 and metrics["skipped"] == 0
    for name, p in agent.named_parameters():
        rate = dict(policy=1e-4, log_std=1e-4, value=0.0, vae=1e-2)[name.split(".")[0]]
        step = (p - before[name]).abs().max().item()  # Adam's first step has the size of its rate
        assert step == pytest.approx(rate, rel=0.02), name


# ---- runs and the command line -------------------------------------------------------------------

TINY = "--num-tasks 4 --episodes-per-trial 2 --eval-tasks 2 --total-steps 640".split()
TINY += "--minibatch 80 --device cpu".split()


def run(agent_class, *argv):
    return trmrl.main([*map(str, argv)], make_points, agent_class)


@each_agent
def test_a_flag_without_a_meaning_is_refused(agent_class, capsys):
    assert {"memory_length", "layers", "heads", "tfixup", "keep_memory"} <= set(
        agent_class.Config.unused
    )
    for name in agent_class.Config.unused:
        assert run(agent_class, trmrl.flag(name), 1) == 2
        message = f"{trmrl.flag(name)} does not apply to {agent_class.name}"
        assert message in capsys.readouterr().err
    parser = trmrl.make_parser(agent_class, "halfcheetah_vel")
    flags = parser.format_help()
    for f in fields(agent_class.Config):
        assert (f"{trmrl.flag(f.name)} " in flags) != (f.name in agent_class.Config.unused)


@each_agent
def test_every_environment_has_a_preset_that_works(agent_class):
    for env in ("halfcheetah_vel", "ant_dir", "ml1_reach", "ml45_train"):
        trmrl.check(agent_class.Config(env=env))


@each_agent
def test_a_resumed_run_ends_as_one_that_was_never_stopped(agent_class, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(agent_class, *TINY, "--run-dir", whole) == 0

    def iterate_twice(run, iterate=trmrl.iterate):
        if run.iteration == 2:
            raise KeyboardInterrupt
        iterate(run)

    with monkeypatch.context() as patch:
        patch.setattr(trmrl, "iterate", iterate_twice)
        assert run(agent_class, *TINY, "--run-dir", stopped) == 130
    assert run(agent_class, "--resume", stopped) == 0
    saved = [torch.load(folder / "checkpoint.pt") for folder in (whole, stopped)]
    assert saved[0]["iteration"] == 4
    for key in ("weights", "optimizer", "iteration", "step"):
        torch.testing.assert_close(saved[1][key], saved[0][key], rtol=0, atol=0)
    assert saved[0]["csv"]["eval.csv"] == saved[1]["csv"]["eval.csv"]


@each_agent
def test_a_run_is_meta_tested_by_its_own_module(agent_class, tmp_path, capsys):
    folder = tmp_path / "run"
    assert run(agent_class, *TINY, "--run-dir", folder) == 0
    assert json.loads((folder / "config.json").read_text())["agent"] == agent_class.name
    capsys.readouterr()
    assert run(agent_class, "--eval", folder, "--episodes", 3) == 0
    assert f"{agent_class.name}, 640 steps of halfcheetah_vel" in capsys.readouterr().out

    loaded = trmrl.load_agent(folder, agent_class=agent_class)
    envs = PointMass(2, split="test")
    returns, _ = trmrl.meta_test(loaded, envs, episodes=3)
    lines = (folder / "eval.csv").read_text().splitlines()[-12:]  # 2 tasks, 6 episodes
    written = np.array([float(line.split(",")[4]) for line in lines]).reshape(2, 6)
    np.testing.assert_allclose(returns, written[:, :3], rtol=1e-4)

    assert run(trmrl.TrMRL, "--eval", folder) == 2
    assert f"python -m baselines.{agent_class.name} --eval" in capsys.readouterr().err


def test_the_modules_are_commands(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for agent_class in AGENTS:
        command = [sys.executable, *agent_class.command.split()[1:], "--layers", "2"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        expected = f"baselines.{agent_class.name}: --layers does not apply to {agent_class.name}\n"
        assert (done.returncode, done.stderr) == (2, expected)


TWO_PROCESSES = """
import sys, torch, trmrl
from baselines import test_baselines as tests
for agent_class in tests.AGENTS:
    config = agent_class.Config(**tests.SMALL, total_steps=640, minibatch=80)
    config.run_dir = f"{sys.argv[1]}/{agent_class.name}"
    agent = trmrl.train(config, tests.make_points, agent_class)
    torch.save(agent.state_dict(), f"{sys.argv[1]}/{agent_class.name}-{trmrl.rank()}.pt")
"""


def test_two_processes_keep_the_same_weights(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--standalone", str(script), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for agent_class in AGENTS:
        first, second = (torch.load(tmp_path / f"{agent_class.name}-{i}.pt") for i in (0, 1))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        assert first["normalizer.count"] == 640


HERE = Path(__file__).parent


# The subprocess that is killed below has the same settings.
SMALL_PEARL = dict(env="points", device="cpu", num_tasks=3, episodes_per_trial=2, eval_every=1000)
SMALL_PEARL |= dict(
    eval_tasks=2, latent_size=3, hidden_size=8, updates=4, meta_batch=2, minibatch=8
)
SMALL_PEARL |= dict(
    context_size=5, replay_size=360, total_steps=6 * 120
)  # 6 iterations; 3 in the replay


def make_pearl(**settings):
    torch.manual_seed(0)
    agent = pearl.Pearl(pearl.Config(**{**SMALL_PEARL, **settings}), (2, 2, 1))
    # Statistics as after some training.
    agent.normalizer.update(torch.randn(50, 2) + 0.3)
    agent.reward_stats.update(torch.randn(50, 1) - 2.0)
    return agent


def collect_points(agent, envs, seed=0):
    steps = agent.config.episodes_per_trial * envs.episode_length
    return trmrl.collect(agent, envs, envs.tasks, steps, True, seed)


def scale_of(agent):
    """By what rewards are divided."""
    return math.sqrt(agent.reward_stats.mean.item() ** 2 + agent.reward_stats.var.item())


# ---- The posterior of z --------------------------------------------------------------------------


def context_of(M, C):
    return torch.randn(M, C, 2), torch.rand(M, C, 2), torch.randn(M, C)


def factors_of(agent, state, action, reward):
    """Mean and variance of each factor, (M, C, Z)."""
    x = torch.cat([state, action, reward[..., None] / scale_of(agent)], dim=-1)
    mean, width = agent.encoder(x).split(agent.config.latent_size, dim=-1)
    return mean, torch.log1p(width.exp())


def test_pearl_posterior_is_the_normalised_product_of_its_factors():
    agent = make_pearl()
    context = context_of(4, 6)
    mean, var = agent.posterior(*context)
    factor_mean, factor_var = factors_of(agent, *context)

    # Multiply the densities on a grid, and normalise.
    grid = torch.linspace(-8, 8, 40_001, dtype=torch.float64)
    for m in range(4):
        for i in range(agent.config.latent_size):
            factors = Normal(factor_mean[m, :, i, None].double(), factor_var[m, :, i, None].sqrt())
            density = factors.log_prob(grid).sum(dim=0).exp()
            density = density / density.sum()
            expected_mean = (density * grid).sum()
            expected_var = (density * (grid - expected_mean) ** 2).sum()
            assert mean[m, i].item() == pytest.approx(expected_mean.item(), abs=1e-4)
            assert var[m, i].item() == pytest.approx(expected_var.item(), rel=1e-3)


def test_pearl_posterior_does_not_depend_on_the_order_of_the_context():
    agent = make_pearl()
    context = context_of(3, 10)
    order = torch.randperm(10)
    shuffled = [x[:, order] for x in context]
    for x, y in zip(agent.posterior(*context), agent.posterior(*shuffled)):
        torch.testing.assert_close(x, y)
    # But it depends on the context.
    others = [x.roll(1, dims=0) for x in context]
    assert not torch.allclose(agent.posterior(*context)[0], agent.posterior(*others)[0])


@pytest.mark.parametrize("family", [PointMass, Falling])
def test_pearl_draws_z_from_the_prior_and_then_from_the_posterior_of_all_earlier_episodes(family):
    agent = make_pearl(episodes_per_trial=4)
    trials = collect_points(agent, family(5))
    z, noise = trials.stored["z"], trials.stored["z_noise"]
    begins = torch.cat([torch.ones(5, 1), trials.eta], dim=1)[:, :-1] > 0
    assert begins.sum() > 5 * 3

    for r in range(5):
        for t in range(80):
            if t == 0:
                expected = noise[r, 0]  # N(0, I)
            elif begins[r, t]:
                past = trials.state[r, :t], trials.clipped_action[r, :t], trials.reward[r, :t]
                mean, var = factors_of(agent, *past)
                precision = (1 / var).sum(dim=0)
                expected = (mean / var).sum(dim=0) / precision + noise[r, t] / precision.sqrt()
            else:
                expected = z[r, t - 1]
            torch.testing.assert_close(z[r, t], expected, rtol=1e-4, atol=1e-5)
    starts = z[:, :80][begins]
    assert len(starts.unique(dim=0)) == len(starts)


def test_pearl_acts_by_its_z_and_asking_twice_changes_nothing():
    agent = make_pearl()
    trials = collect_points(agent, Falling(4))
    z = trials.stored["z"].clone()
    for t in range(40):
        for sample in (True, False):
            first, second = agent.act(trials, t, sample), agent.act(trials, t, sample)
            assert all(torch.equal(x, y) for x, y in zip(first, second))
        assert torch.equal(agent.act(trials, t, True)[0], trials.action[:, t])
    assert torch.equal(trials.stored["z"], z)

    before, _, _ = agent.act(trials, 5, False)
    trials.stored["z"][:, :6] += 1.0
    trials.eta[:, 4] = 0.0
    assert not torch.allclose(before, agent.act(trials, 5, False)[0])


def test_pearl_has_the_same_z_noise_only_for_the_same_seed():
    agent = make_pearl()
    first, same, other = (collect_points(agent, PointMass(3), seed) for seed in (0, 0, 1))
    assert torch.equal(first.stored["z"], same.stored["z"])
    assert not torch.equal(first.stored["z"], other.stored["z"])


# ---- Soft actor-critic ---------------------------------------------------------------------------


def test_pearl_log_prob_is_that_of_a_tanh_gaussian():
    agent = make_pearl()
    state, z, noise = torch.randn(7, 2), torch.randn(7, 3), torch.randn(7, 2)
    action, log_prob = agent.pi(state, z, noise)
    mean, log_std = agent.policy(torch.cat([state, z], dim=-1)).split(2, dim=-1)
    gaussian = Normal(mean, log_std.exp())
    expected = TransformedDistribution(gaussian, TanhTransform())
    torch.testing.assert_close(action, torch.tanh(mean + log_std.exp() * noise))
    torch.testing.assert_close(log_prob, expected.log_prob(action).sum(-1), rtol=1e-3, atol=1e-4)


def test_pearl_log_prob_is_finite_for_actions_at_the_limit():
    agent = make_pearl()
    torch.nn.init.constant_(agent.policy[-1].bias, 50.0)
    action, log_prob = agent.pi(torch.randn(4, 2), torch.randn(4, 3), torch.randn(4, 2))
    assert (action == 1.0).all() and log_prob.isfinite().all()


def random_batch(M=3, B=4, C=5):
    """Steps of the replay: observation, action, reward, terminated, timed_out."""
    step = torch.cat([torch.randn(M, B, 2), torch.rand(M, B, 2), torch.randn(M, B, 3)], dim=-1)
    step[..., -2:] = 0.0
    step[0, 0, -2] = step[1, 2, -2] = 1.0  # terminated
    step[0, 1, -1] = step[2, 3, -1] = 1.0  # timed out
    context = torch.randn(M, C, 7)
    return context, step, torch.randn(M, B, 7)


def unpacked(agent, step):
    mean, std = agent.normalizer.mean, (agent.normalizer.var + 1e-8).sqrt()
    return (step[:2] - mean) / std, step[2:4], step[4]


def loss_by_hand(agent, context, step, next_step, generator):
    """SAC's and PEARL's losses, one transition at a time."""
    config = agent.config
    M, B, _ = step.shape
    Z, A = config.latent_size, 2
    z_noise = torch.randn(M, Z, generator=generator)
    next_noise = torch.randn(M, B, A, generator=generator)
    new_noise = torch.randn(M, B, A, generator=generator)

    def act(state, z, noise):
        mean, log_std = agent.policy(torch.cat([state, z])).split(A)
        policy = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
        action = torch.tanh(mean + log_std.exp() * noise)
        return action, config.entropy_weight * policy.log_prob(action).sum()

    critic_loss, policy_loss, kl = 0.0, 0.0, 0.0
    for m in range(M):
        past = zip(*(unpacked(agent, x) for x in context[m]))
        mean, var = factors_of(agent, *(torch.stack(x)[None] for x in past))
        precision = (1 / var[0]).sum(dim=0)
        posterior = Normal((mean[0] / var[0]).sum(dim=0) / precision, precision.rsqrt())
        z = posterior.mean + posterior.stddev * z_noise[m]
        prior = Normal(torch.zeros(Z), torch.ones(Z))
        kl = kl + torch.distributions.kl_divergence(posterior, prior).sum() / M

        for b in range(B):
            state, action, reward = unpacked(agent, step[m, b])
            next_state, _, _ = unpacked(agent, next_step[m, b])
            terminated, timed_out = step[m, b, 5:].tolist()
            # All of Q and y is scaled by 1 - gamma.
            next_action, cost = act(next_state, z, next_noise[m, b])
            next_qs = [q(torch.cat([next_state, next_action, z])) for q in agent.targets]
            y = (1 - config.gamma) * reward / scale_of(agent)
            if not terminated:
                y = y + config.gamma * (min(next_qs) - (1 - config.gamma) * cost)
            for q in agent.critics:
                error = q(torch.cat([state, action, z])) - y.detach()
                critic_loss = critic_loss + (0 if timed_out else 1) * error**2 / (M * B)

            new_action, cost = act(state, z.detach(), new_noise[m, b])
            qs = [q(torch.cat([state, new_action, z.detach()])) for q in agent.critics]
            policy_loss = policy_loss + ((1 - config.gamma) * cost - min(qs)) / (M * B)
    return critic_loss, policy_loss, kl


def disagreeing(agent):
    """Critics and targets that differ, as they do after some training."""
    for x in agent.targets.parameters():
        x.add_(0.3 * torch.randn_like(x))
    return agent


def test_pearl_losses_are_those_by_hand():
    agent = disagreeing(make_pearl(gamma=0.8, entropy_weight=0.7, kl_weight=0.3))
    batch = random_batch()
    loss, metrics = agent.losses(*batch, torch.Generator().manual_seed(5))
    by_hand = loss_by_hand(agent, *batch, torch.Generator().manual_seed(5))
    critic_loss, policy_loss, kl = by_hand
    torch.testing.assert_close(metrics["critic_loss"], critic_loss.squeeze())
    torch.testing.assert_close(metrics["kl"], kl)
    torch.testing.assert_close(loss, (critic_loss + policy_loss + 0.3 * kl).squeeze())


def test_pearl_gradients_are_those_of_each_network_by_its_own_loss():
    """Critics: their error. Encoder: the critics' error and the KL. Policy: its own loss alone."""
    agent = disagreeing(make_pearl(gamma=0.8, entropy_weight=0.7, kl_weight=0.3))
    batch = random_batch()
    loss, _ = agent.losses(*batch, torch.Generator().manual_seed(5))
    loss.backward()
    by_hand = loss_by_hand(agent, *batch, torch.Generator().manual_seed(5))
    critic_loss, policy_loss, kl = by_hand
    for module, own_loss in [
        (agent.critics, critic_loss),
        (agent.encoder, critic_loss + 0.3 * kl),
        (agent.policy, policy_loss),
    ]:
        gradients = torch.autograd.grad(own_loss, list(module.parameters()), retain_graph=True)
        for x, gradient in zip(module.parameters(), gradients):
            assert gradient.abs().max() > 0
            torch.testing.assert_close(x.grad, gradient, rtol=1e-3, atol=1e-6)
    assert all(x.grad is None for x in agent.targets.parameters())


def test_pearl_policy_teaches_neither_the_encoder_nor_the_critics():
    agent = make_pearl(kl_weight=0.0)
    context, step, next_step = random_batch()
    step[..., -1] = 1.0  # all timed out: the critics have no target
    loss, _ = agent.losses(context, step, next_step, torch.Generator())
    loss.backward()
    assert all(x.grad.abs().max() > 0 for x in agent.policy.parameters())
    for x in [*agent.encoder.parameters(), *agent.critics.parameters()]:
        assert x.grad is None or not x.grad.any()


def test_pearl_targets_follow_the_critics_slowly():
    agent = make_pearl(updates=1, target_rate=0.25)
    optimizer = torch.optim.Adam(agent.parameter_groups(), lr=0.1, fused=True)
    old = [x.clone() for x in agent.targets.parameters()]
    agent.update(collect_points(agent, PointMass(3)), optimizer, torch.Generator())
    new, critics = list(agent.targets.parameters()), list(agent.critics.parameters())
    for before, after, critic in zip(old, new, critics):
        assert not torch.equal(critic, before)
        torch.testing.assert_close(after, before + 0.25 * (critic - before))


def test_pearl_skips_a_gradient_that_is_not_finite_and_counts_it():
    agent = make_pearl()
    optimizer = torch.optim.Adam(agent.parameter_groups(), lr=0.1, fused=True)
    trials = collect_points(agent, PointMass(3))
    trials.reward[:] = torch.nan
    before = {name: x.clone() for name, x in agent.named_parameters()}
    metrics = agent.update(trials, optimizer, torch.Generator())
    assert metrics["updates"] == metrics["skipped"] == 4
    assert all(torch.equal(x, before[name]) for name, x in agent.named_parameters())


# ---- Replay --------------------------------------------------------------------------------------


def numbered_replay(iterations, capacity=4, R=3, T=12):
    """A replay whose steps say where they are from: iteration, row, t."""
    replay = pearl.Replay(None, (R, T + 1, 3), capacity, 0, "cpu")
    for i in range(iterations):
        row, t = torch.meshgrid(torch.arange(R), torch.arange(T + 1), indexing="ij")
        replay.append(torch.stack([torch.full_like(row, i), row, t], dim=-1).float())
    return replay


def test_pearl_context_and_transitions_are_of_the_same_trial():
    replay, generator = numbered_replay(7), torch.Generator().manual_seed(0)
    config = pearl.Config(**SMALL_PEARL | dict(meta_batch=50, minibatch=400, context_size=30))
    context, step, next_step = replay.sample(config, generator)
    assert context.shape == (50, 30, 3) and step.shape == next_step.shape == (50, 8, 3)
    for m in range(50):
        of_trial = torch.cat([context[m], step[m], next_step[m]])[:, :2]
        assert len(of_trial.unique(dim=0)) == 1
    assert torch.equal(next_step[..., 2], step[..., 2] + 1)
    # Only the last four of seven iterations are left, and all of them are drawn.
    assert context[..., 0].unique().tolist() == [3, 4, 5, 6]
    assert context[..., 1].unique().tolist() == [0, 1, 2]
    assert step[..., 2].unique().tolist() == list(range(12))


def test_pearl_context_is_from_one_or_more_first_episodes():
    replay, generator = numbered_replay(2), torch.Generator().manual_seed(0)
    settings = dict(meta_batch=200, minibatch=200, context_size=100, episodes_per_trial=3)
    context, _, _ = replay.sample(pearl.Config(**SMALL_PEARL | settings), generator)
    lasts = context[..., 2].amax(dim=1)
    assert (context[..., 2].amin(dim=1) == 0).float().mean() > 0.9
    assert lasts.unique().tolist() == [3, 7, 11]  # episodes of 4 steps
    assert all(30 < (lasts == last).sum() < 110 for last in (3, 7, 11))


def test_pearl_prefers_recent_trials():
    replay, generator = numbered_replay(40, capacity=40), torch.Generator().manual_seed(0)
    config = pearl.Config(**SMALL_PEARL | dict(meta_batch=4000, minibatch=4000))
    iteration = replay.sample(config, generator)[0][:, 0, 0]
    assert (iteration >= 30).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert (iteration < 10).float().mean().item() == pytest.approx(1 - 0.75**0.5, abs=0.05)


def test_pearl_remembers_trials_as_they_were():
    agent = make_pearl()
    trials = collect_points(agent, Falling(3))
    agent.remember(trials)
    state, action, reward, terminated, timed_out = agent.unpack(agent.replay.trials[0])
    torch.testing.assert_close(state, trials.state)  # normalised
    assert torch.equal(action, trials.clipped_action)
    assert torch.equal(reward[:, :-1], trials.reward)
    assert torch.equal(terminated[:, :-1] > 0, trials.terminated)
    ends_by_fall = trials.terminated.sum()
    ends_by_clock = (trials.eta > 0).sum() - ends_by_fall
    assert ends_by_fall > 0 and timed_out.sum() == ends_by_clock


def final_state(folder):
    """Weights and optimiser at the end of a run, and its progress without times."""
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    with open(folder / "progress.csv") as f:
        rows = [{k: v for k, v in x.items() if "second" not in k} for x in csv.DictReader(f)]
    moments = saved["optimizer"]["state"].values()
    tensors = [*saved["weights"].values(), *(x for state in moments for x in state.values())]
    return tensors, rows


KILLED = """
import os, signal, sys
import trmrl
from baselines import {module} as test, pearl

append = pearl.Replay.append

def append_and_die(replay, trials):
    append(replay, trials)
    if replay.iterations == 5:
        os.truncate(replay.path, replay.path.stat().st_size - 100)  # half written
        os.kill(os.getpid(), signal.SIGKILL)

pearl.Replay.append = append_and_die
trmrl.train(pearl.Config(**test.SMALL_PEARL, run_dir=sys.argv[1]), test.make_points, pearl.Pearl)
"""


def test_pearl_resumes_exactly_after_a_kill_while_it_writes_the_replay(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    trmrl.train(pearl.Config(**SMALL_PEARL, run_dir=str(whole)), make_points, pearl.Pearl)
    code = KILLED.format(module=Path(__file__).stem)
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    process = subprocess.run([sys.executable, "-c", code, killed], env=environ)
    assert process.returncode == -signal.SIGKILL
    iteration_bytes = 3 * 41 * (2 + 2 + 3) * 4
    assert (killed / "replay.bin").stat().st_size == 5 * iteration_bytes - 100

    agent = trmrl.resume(killed, make_points, pearl.Pearl)
    assert agent.replay_iterations == 6
    assert (killed / "replay.bin").read_bytes() == (whole / "replay.bin").read_bytes()
    (tensors, rows), (expected_tensors, expected_rows) = final_state(killed), final_state(whole)
    assert rows == expected_rows and len(rows) == 6
    assert all(torch.equal(x, y) for x, y in zip(tensors, expected_tensors, strict=True))


def stopped_run(folder, monkeypatch):
    """A run that was stopped after three iterations."""
    iterate = trmrl.iterate

    def stopping(run):
        if run.iteration == 3:
            raise KeyboardInterrupt
        iterate(run)

    with monkeypatch.context() as patch:
        patch.setattr(trmrl, "iterate", stopping)
        with pytest.raises(KeyboardInterrupt):
            trmrl.train(pearl.Config(**SMALL_PEARL, run_dir=str(folder)), make_points, pearl.Pearl)
    return folder


def pearl_cli(*argv):
    return trmrl.main([str(x) for x in argv], make_tasks=make_points, agent_class=pearl.Pearl)


def test_pearl_needs_its_replay_to_resume_but_not_to_be_evaluated(tmp_path, monkeypatch, capsys):
    folder = stopped_run(tmp_path / "run", monkeypatch)
    replay = folder / "replay.bin"
    shortened = replay.read_bytes()[:-1]
    for damage in (lambda: replay.write_bytes(shortened), replay.unlink):
        damage()
        capsys.readouterr()
        assert pearl_cli("--resume", folder) == 1
        error = capsys.readouterr().err
        assert "has lost trials" in error and error.count("\n") == 1
    assert pearl_cli("--eval", folder, "--episodes", 3) == 0
    assert "episode 3" in capsys.readouterr().out


# ---- Command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "typed, message",
    [
        ("--layers 2", "--layers does not apply to pearl"),
        ("--clip 0.1", "--clip does not apply to pearl"),
        ("--no-keep-memory", "--no-keep-memory"),
        ("--latent-size 0", "--latent-size must be between 1"),
        ("--gamma 1", "--gamma must be between 0"),
        ("--target-rate 2", "--target-rate must be between 1e-06"),
        ("--minibatch 100", "--minibatch must be a multiple of --meta-batch"),
        ("--updates x", "--updates: invalid integer value"),
    ],
)
def test_pearl_refuses_bad_flags_in_one_line(typed, message, capsys, tmp_path):
    assert pearl_cli("--run-dir", tmp_path / "run", *typed.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_pearl_refuses_torchrun_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert pearl_cli("--run-dir", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert "without torchrun" in error and error.count("\n") == 1


def test_pearl_has_a_preset_for_each_environment():
    for env in ("halfcheetah_vel", "ant_dir", "ml1_reach", "ml45_train", "points"):
        trmrl.check(pearl.Config(env=env))
    assert pearl.Config(env="ml45_train").num_tasks % 45 == 0


# ---- Learning ------------------------------------------------------------------------------------


def test_pearl_learns_to_adapt_from_episode_to_episode(tmp_path):
    settings = dict(num_tasks=40, episodes_per_trial=3, total_steps=10 * 2400, updates=50)
    settings |= dict(meta_batch=16, minibatch=128, context_size=60, hidden_size=64, lr=3e-3)
    settings |= dict(gamma=0.9, entropy_weight=0.5, kl_weight=1e-4, target_rate=0.02, final_lr=1.0)
    config = pearl.Config(**SMALL_PEARL | settings | dict(run_dir=str(tmp_path / "run")))
    agent = trmrl.train(config, make_points, pearl.Pearl)
    returns, _ = trmrl.meta_test(agent, PointMass(20, split="test"))
    returns = returns.mean(axis=0)
    assert returns[2:].mean() > -17.5  # without adapting: -20
    assert returns[2:].mean() > returns[0] + 2


EXPLORING, ADAPTED = 0, 1


def points_config(**settings):
    usual = dict(env="points", device="cpu", num_tasks=5, init_std=0.5, gamma=0.9, gae_lambda=0.95)
    return maml.Config(**{**usual, "eval_every": 1000, "eval_tasks": 2, **settings})


def make_maml(hidden=5, **settings):
    """A small policy whose output is not near zero, and a baseline that is not zero."""
    torch.manual_seed(0)
    agent = maml.Maml(points_config(**settings), (2, 2, 1))
    agent.policy = trmrl.mlp([2, hidden, 2])
    agent.betas.normal_(std=0.1)
    return agent


def in_double(agent, trials):
    """Both in double precision, for finite differences."""
    for name, x in vars(trials).items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            setattr(trials, name, x.double())
    return agent.double(), trials


# ---- The same by hand: one row, one step, one PyTorch module at a time ---------------------------


def episodes_of(trials, r):
    """The episodes of row r, each a list of steps; the last may be cut off."""
    episodes = [[]]
    for t in range(trials.eta.shape[1]):
        episodes[-1].append(t)
        if trials.eta[r, t] > 0:
            episodes.append([])
    return [steps for steps in episodes if steps]


def kinds_by_hand(agent, trials, r):
    """The exploring and the adapted episodes of row r."""
    explorations = agent.config.episodes_per_trial - 1
    episodes = episodes_of(trials, r)
    return episodes[:explorations], episodes[explorations:]


def advantages_by_hand(agent, trials, r, episodes, kind):
    """Standardised GAE of the steps of these episodes, from its definition as a sum."""
    gamma, lam, beta = agent.config.gamma, agent.config.gae_lambda, agent.betas[kind].double()
    reward = trials.reward[r].double()
    mean = torch.stack([reward[t] for steps in episodes for t in steps]).mean()
    result = []
    for steps in episodes:
        value = []
        for i, t in enumerate(steps):
            s, time = trials.state[r, t].double(), i / 100
            clock = torch.tensor([time, time**2, time**3, 1.0], dtype=torch.double)
            value.append(mean / (1 - gamma) + torch.cat([s, s * s, clock]) @ beta)
        after = 0.0 if trials.terminated[r, steps[-1]] else value[-1]
        following = value[1:] + [after]
        delta = [reward[t] + gamma * following[i] - value[i] for i, t in enumerate(steps)]
        for i in range(len(steps)):
            result.append(sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(steps))))
    result = torch.stack(result)
    return (result - result.mean()) / (result.std(correction=0) + 1e-8)  # of one step: 0


def gaussian(net, log_std, state):
    return Independent(Normal(net(state), log_std.exp()), 1)


def objective_by_hand(agent, trials, r, episodes, kind, net, log_std):
    """J of one row, by PyTorch's own distributions."""
    t = torch.tensor([t for steps in episodes for t in steps])
    advantage = advantages_by_hand(agent, trials, r, episodes, kind).to(log_std)
    log_prob = gaussian(net, log_std, trials.state[r, t]).log_prob(trials.action[r, t])
    return ((log_prob - trials.log_prob[r, t]).exp() * advantage).mean()


def adapted_by_hand(agent, trials, r):
    """The policy of row r after its inner step: a module and a log_std."""
    net, log_std = copy.deepcopy(agent.policy), agent.log_std.detach().clone().requires_grad_()
    explored, _ = kinds_by_hand(agent, trials, r)
    J = objective_by_hand(agent, trials, r, explored, EXPLORING, net, log_std)
    weights = [log_std, *net.parameters()]
    with torch.no_grad():
        for w, gradient in zip(weights, torch.autograd.grad(J, weights)):
            w += agent.config.inner_lr * gradient
    return net, log_std


def flat(net, log_std):
    return torch.cat([log_std.flatten(), *(p.flatten() for p in net.parameters())]).detach()


def outer_problem(agent, trials, monkeypatch):
    """What `update` asks of TRPO: objective, kl and theta."""
    asked = []

    def spy(objective, kl, theta, max_kl):
        asked.extend([objective, kl, theta])
        return theta, {}

    with monkeypatch.context() as patch:
        patch.setattr(maml, "trpo_step", spy)
        agent.update(trials, None, None)
    return asked


# ---- Inner step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("E", [2, 3])
@pytest.mark.parametrize("family", [PointMass, Falling])
def test_maml_adapts_all_tasks_at_once_as_a_loop_over_tasks_does(family, E):
    agent = make_maml(episodes_per_trial=E, inner_lr=0.5)
    trials = collect_points(agent, family(6))
    for r in range(6):
        expected = flat(*adapted_by_hand(agent, trials, r))
        torch.testing.assert_close(trials.stored["weights"][r], expected, rtol=1e-3, atol=1e-4)
    moved = (trials.stored["weights"] - agent.theta).norm(dim=1)
    assert (moved > 0.05).sum() >= 4  # an episode of one step has no advantage


def test_maml_explores_with_the_initial_weights_and_then_acts_with_the_adapted_ones():
    agent = make_maml(inner_lr=0.5)
    trials = collect_points(agent, Falling(6))
    for r in range(6):
        explored, adapted = kinds_by_hand(agent, trials, r)
        policies = (agent.policy, agent.log_std), adapted_by_hand(agent, trials, r)
        for episodes, policy in zip((explored, adapted), policies):
            t = torch.tensor([t for steps in episodes for t in steps])
            pi = gaussian(*policy, trials.state[r, t])
            expected = pi.mean + pi.stddev * trials.noise[r, t]
            torch.testing.assert_close(trials.action[r, t], expected, rtol=1e-3, atol=1e-3)
            log_prob = pi.log_prob(trials.action[r, t])
            torch.testing.assert_close(trials.log_prob[r, t], log_prob, rtol=1e-3, atol=1e-3)


def test_maml_acts_the_same_when_it_is_asked_twice(monkeypatch):
    agent = make_maml(inner_lr=0.5)
    once = collect_points(agent, Falling(6))
    act = maml.Maml.act
    monkeypatch.setattr(maml.Maml, "act", lambda *args: act(*args) and act(*args))
    twice = collect_points(agent, Falling(6))
    assert torch.equal(once.action, twice.action)
    assert torch.equal(once.stored["weights"], twice.stored["weights"])


def test_maml_samples_while_it_explores_even_in_a_meta_test():
    agent = make_maml()
    envs = PointMass(3)
    trials = trmrl.collect(agent, envs, envs.tasks, 60, False, 0)
    mean = agent.policy(trials.state[:, :20])
    noise = trials.noise[:, :20] * agent.log_std.exp()
    torch.testing.assert_close(trials.action[:, :20], mean + noise)
    for r in range(3):
        net, _ = adapted_by_hand(agent, trials, r)
        expected = net(trials.state[r, 20:60])
        torch.testing.assert_close(trials.action[r, 20:], expected, rtol=1e-3, atol=1e-4)


def test_a_row_adapts_from_its_own_experience_only():
    agent = make_maml(inner_lr=0.5)
    tasks = PointMass(6).tasks
    swapped = tasks.copy()
    swapped[3:] = swapped[3:] + 1.0
    trials, others = (
        trmrl.collect(agent, PointMass(6), rows, 40, True, 0) for rows in (tasks, swapped)
    )
    assert torch.equal(trials.action[:3], others.action[:3])
    assert torch.equal(trials.action[3:, :20], others.action[3:, :20])
    assert not torch.isclose(trials.action[3:, 20:], others.action[3:, 20:]).any()


# ---- Baseline ------------------------------------------------------------------------------------


def test_the_linear_baseline_is_the_ridge_regression_of_the_returns():
    agent = make_maml()
    trials = collect_points(agent, Falling(6))
    agent.update(trials, None, None)
    for kind in (EXPLORING, ADAPTED):
        X, y = [], []
        for r in range(6):
            episodes = kinds_by_hand(agent, trials, r)[kind]
            reward = trials.reward[r].double().numpy()
            level = np.mean([reward[t] for steps in episodes for t in steps]) / (1 - 0.9)
            for steps in episodes:
                rest = 0.0 if trials.terminated[r, steps[-1]] else level
                for i in range(len(steps)):
                    s = trials.state[r, steps[i]].double().numpy()
                    time = i / 100
                    rewards = reward[steps[i:]]
                    discounts = 0.9 ** np.arange(len(rewards) + 1)
                    X.append([*s, *(s * s), time, time**2, time**3, 1.0])
                    y.append(discounts @ [*rewards, rest] - level)

        # Ridge regression is least squares with one more sample for each feature.
        root = math.sqrt(maml.RIDGE * len(X))
        X, y = np.vstack([X, root * np.eye(8)]), np.append(y, np.zeros(8))
        expected = np.linalg.lstsq(X, y, rcond=None)[0]
        np.testing.assert_allclose(agent.betas[kind], expected, rtol=1e-2, atol=1e-2)


# ---- Outer gradient ------------------------------------------------------------------------------


def test_the_meta_gradient_passes_through_the_inner_step(monkeypatch):
    """Against finite differences of plain PyTorch modules, adapted row by row."""
    agent = make_maml(hidden=3, inner_lr=0.5, episodes_per_trial=2)
    agent, trials = in_double(agent, collect_points(agent, Falling(4)))
    betas = agent.betas.clone()
    objective, _, theta = outer_problem(agent, trials, monkeypatch)
    agent.betas.copy_(betas)
    gradient = torch.func.grad(objective)(theta)

    def by_hand(theta):
        other = copy.deepcopy(agent)
        torch.nn.utils.vector_to_parameters(theta, other.parameters())
        total = 0.0
        for r in range(4):
            policy = adapted_by_hand(other, trials, r)
            _, episodes = kinds_by_hand(agent, trials, r)
            total += objective_by_hand(agent, trials, r, episodes, ADAPTED, *policy).item() / 4
        return total

    step = 1e-4
    for i in range(0, len(theta), 3):
        e = torch.zeros_like(theta)
        e[i] = step
        slope = (by_hand(theta + e) - by_hand(theta - e)) / (2 * step)
        assert gradient[i].item() == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_the_kl_divergence_is_that_of_the_adapted_policies(monkeypatch):
    agent = make_maml(inner_lr=0.5)
    trials = collect_points(agent, Falling(4))
    betas = agent.betas.clone()
    _, kl, theta = outer_problem(agent, trials, monkeypatch)
    agent.betas.copy_(betas)
    moved = copy.deepcopy(agent)
    torch.nn.utils.vector_to_parameters(theta + 0.1 * torch.randn(len(theta)), moved.parameters())

    expected = 0.0
    for r in range(4):
        _, episodes = kinds_by_hand(agent, trials, r)
        state = trials.state[r, torch.tensor([t for steps in episodes for t in steps])]
        old, new = (gaussian(*adapted_by_hand(a, trials, r), state) for a in (agent, moved))
        expected += kl_divergence(old, new).mean().item() / 4
    assert kl(moved.theta).item() == pytest.approx(expected, rel=1e-3)
    assert kl(theta).item() == pytest.approx(0.0, abs=1e-6)


def test_hessian_products_are_those_of_the_explicit_hessian(monkeypatch):
    agent = make_maml(hidden=3, inner_lr=0.5)
    agent, trials = in_double(agent, collect_points(agent, PointMass(4)))
    objective, kl, theta = outer_problem(agent, trials, monkeypatch)

    # The Hessian by finite differences of the gradient, one column for each weight.
    columns = []
    for e in 1e-5 * torch.eye(len(theta)):
        after, before = (torch.func.grad(kl)(theta + sign * e) for sign in (1, -1))
        columns.append((after - before) / 2e-5)
    hessian = torch.stack(columns, dim=1) + maml.DAMPING * torch.eye(len(theta))

    products = []
    real = maml.conjugate_gradients
    patched = lambda product, b: products.append(product) or real(product, b)  # noqa: E731
    monkeypatch.setattr(maml, "conjugate_gradients", patched)
    maml.trpo_step(objective, kl, theta, 0.01)
    v = torch.randn(len(theta), dtype=torch.double)
    torch.testing.assert_close(products[0](v), hessian @ v, rtol=1e-4, atol=1e-6)


# ---- TRPO ----------------------------------------------------------------------------------------


def test_conjugate_gradients_solve_a_linear_system():
    torch.manual_seed(0)
    A = torch.randn(6, 6, dtype=torch.double)
    H, b = A @ A.T + torch.eye(6), torch.randn(6, dtype=torch.double)
    x = maml.conjugate_gradients(lambda v: H @ v, b)
    torch.testing.assert_close(x, torch.linalg.solve(H, b), rtol=1e-4, atol=1e-5)


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

    def linear(x):
        return g @ x

    def square(x):
        return 0.5 * x @ x

    # The divergence grows faster than its second derivative says.
    moved, metrics = maml.trpo_step(linear, lambda x: square(x) + 100 * square(x) ** 2, theta, 0.5)
    assert 0 < metrics["kl"] <= 0.5 and 0 < metrics["step_fraction"] < 1
    # The step before, longer by one, breaks the bound.
    longer = moved / 0.8
    assert square(longer) + 100 * square(longer) ** 2 > 0.5

    # The objective falls soon after theta.
    moved, metrics = maml.trpo_step(lambda x: g @ x - 10 * square(x), square, theta, 0.5)
    assert metrics["gain"] > 0 and 0 < metrics["step_fraction"] < 1
    assert (g @ moved - 10 * square(moved)).item() == pytest.approx(metrics["gain"], rel=1e-4)

    # The objective falls everywhere: theta stays.
    moved, metrics = maml.trpo_step(lambda x: g @ x - 1e9 * square(x), square, theta, 0.5)
    assert torch.equal(moved, theta) and metrics["gain"] == metrics["step_fraction"] == 0.0


def test_an_update_improves_the_objective_within_the_bound(monkeypatch):
    for seed in range(3):
        agent = make_maml(max_kl=0.01)
        agent.normalizer.update(torch.randn(100, 2))
        trials = collect_points(agent, Falling(10), seed)
        betas = agent.betas.clone()
        objective, kl, theta = outer_problem(agent, trials, monkeypatch)
        agent.betas.copy_(betas)
        metrics = agent.update(trials, None, None)
        assert 0.003 < kl(agent.theta).item() <= 0.01
        assert objective(agent.theta) > objective(theta) + 0.005
        assert metrics["kl"] == pytest.approx(kl(agent.theta).item(), rel=1e-3)
        assert metrics["updates"] == 1 and metrics["skipped"] == 0


def test_an_update_ends_with_the_statistics_of_all_observations():
    agent = make_maml()
    trials = [collect_points(agent, PointMass(4), seed) for seed in (0, 1)]
    for batch in trials:
        agent.update(batch, None, None)
    seen = np.concatenate([batch.observation[:, :40].reshape(-1, 2).numpy() for batch in trials])
    np.testing.assert_allclose(agent.normalizer.mean, seen.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(agent.normalizer.var, seen.var(axis=0), rtol=1e-4)


def test_a_gradient_that_is_not_finite_ends_the_run_with_a_clear_line():
    agent = make_maml()
    trials = collect_points(agent, PointMass(4))
    trials.log_prob[0, 30] = -torch.inf
    with pytest.raises(trmrl.RunError, match="lower --inner-lr"):
        agent.update(trials, None, None)


# ---- Runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "typed, message",
    [
        ("--layers 2", "--layers does not apply to maml"),
        ("--minibatch 100", "--minibatch does not apply to maml"),
        ("--lr 0.1", "--lr does not apply to maml"),
        ("--keep-memory", "--keep-memory does not apply to maml"),
        ("--episodes-per-trial 1", "--episodes-per-trial must be between 2"),
        ("--inner-lr -1", "--inner-lr must be between 0"),
        ("--max-kl 0", "--max-kl must be between 1e-06"),
        ("--max-kl x", "--max-kl: invalid float value"),
    ],
)
def test_maml_refuses_flags_without_a_meaning_in_one_line(typed, message, capsys, tmp_path):
    argv = ["--run-dir", str(tmp_path / "run"), *typed.split()]
    assert trmrl.main(argv, make_tasks=make_points, agent_class=maml.Maml) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_maml_refuses_torchrun_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = ["--run-dir", str(tmp_path / "run")]
    assert trmrl.main(argv, make_tasks=make_points, agent_class=maml.Maml) == 2
    error = capsys.readouterr().err
    assert "without torchrun" in error and error.count("\n") == 1


def columns_without_time(folder):
    with open(folder / "progress.csv") as f:
        rows = list(csv.DictReader(f))
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def test_maml_resumes_exactly(monkeypatch, tmp_path):
    iterate = trmrl.iterate

    def stopped(run):
        if run.iteration == 2:
            raise KeyboardInterrupt
        iterate(run)

    config = points_config(total_steps=4 * 5 * 40)
    whole = trmrl.train(replace(config, run_dir=str(tmp_path / "whole")), make_points, maml.Maml)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(trmrl, "iterate", stopped)
        trmrl.train(replace(config, run_dir=str(tmp_path / "half")), make_points, maml.Maml)
    resumed = trmrl.resume(tmp_path / "half", make_points, maml.Maml)

    for name, x in whole.state_dict().items():
        assert torch.equal(x, resumed.state_dict()[name]), name
    assert columns_without_time(tmp_path / "whole") == columns_without_time(tmp_path / "half")
    assert len(columns_without_time(tmp_path / "half")) == 4


def test_maml_learns_to_learn_the_point_mass(tmp_path, capsys):
    folder = tmp_path / "run"
    config = points_config(total_steps=12 * 50 * 40, num_tasks=50, max_kl=0.03, run_dir=str(folder))
    agent = trmrl.train(config, make_points, maml.Maml)
    returns, _ = trmrl.meta_test(agent, PointMass(50, split="test"), 3)
    before, after, later = returns.mean(axis=0)
    assert before == pytest.approx(-20, abs=1.5)
    assert after > -14 and after > before + 6
    assert later == pytest.approx(after, abs=0.5)

    # The same from the command line.
    capsys.readouterr()
    argv = ["--eval", str(folder), "--eval-tasks", "50", "--episodes", "3"]
    assert trmrl.main(argv, make_tasks=make_points, agent_class=maml.Maml) == 0
    assert f"{after:.1f}" in capsys.readouterr().out
