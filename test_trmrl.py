"""The claims of the paper and of the README, each against something independent. Run: pytest"""
import ast
import collections
import contextlib
import copy
import csv
import importlib
import inspect
import io
import itertools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import asdict, replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plots
import trmrl

torch.set_num_threads(1)                                                  # all is small here
HERE = Path(__file__).parent
SMALL = dict(threads=1, device="cpu", layers=2, d_model=16, heads=2, d_ff=32,
             eval_tasks=2, eval_episodes=1, final_episodes=1)


class PointMass(trmrl.Tasks):
    """Find a hidden goal on the unit circle: r = -distance. Without adapting, stay put: -1 a step."""
    episode_length = 20

    def __init__(self, num_tasks, seed=0, split="train"):
        self.x = np.zeros((num_tasks, 2))
        super().__init__(num_tasks, seed, split, state_size=2, actions=2)

    def sample_tasks(self, rng):
        return rng.uniform(0, 2 * np.pi, (self.num_envs, 1))

    def fixed_tasks(self, split):
        return 2 * np.pi * np.arange(self.num_envs)[:, None] / self.num_envs

    def begin(self, mask):
        self.x[mask] = 0.0

    def advance(self, actions):
        self.x = self.x + 0.25 * actions
        goal = np.concatenate([np.cos(self.tasks), np.sin(self.tasks)], axis=1)
        return -np.linalg.norm(self.x - goal, axis=1), np.zeros(self.num_envs, dtype=bool), {}

    def observation(self):
        return self.x


def make_points(env, num_tasks, seed=0, split="train"):
    return PointMass(num_tasks, seed, split)


class Falling(PointMass):
    """A point mass that falls at random, by its own generator."""

    def advance(self, actions):
        reward, _, info = super().advance(actions)
        return reward, self.np_random.random(self.num_envs) < 0.1, {**info, "success": reward > -1}


def make_agent(state_size=3, actions=2, **settings):
    torch.manual_seed(0)
    config = trmrl.Config(**{**SMALL, **settings})
    return trmrl.Agent(config, state_size, -np.ones(actions), np.ones(actions))


def awake(agent):
    """Random instead of near-zero output layers, so that differences show in the actions."""
    nn.init.normal_(agent.policy[-1].weight)
    return agent


def spied(agent):
    """A list that grows by what the memory is asked to remember: (slots, current), call by call."""
    seen, remember = [], agent.memory.remember
    agent.memory.remember = lambda x, current: seen.append((x.clone(), current)) or remember(x, current)
    return seen


def refinements(net, e):
    """e^0, ..., e^L and the weights alpha of each layer, by the plain path."""
    memories, alphas = [e], []
    for layer in net.layers:
        e, alpha = layer(e)
        memories.append(e)
        alphas.append(alpha)
    return memories, alphas


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


@pytest.fixture(autouse=True)
def signals_and_threads_of_pytest():
    """trmrl.main takes SIGINT and SIGTERM over, which here end the tests, and it sets the threads."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


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


@pytest.mark.parametrize("env, body, nq", [
    ("halfcheetah_vel", "HalfCheetah-v5", 9), ("ant_dir", "Ant-v5", 15)])
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
        def rollout(models, datas, before, controls, state, height=height, **_):
            state[:] = before[:, None] + [envs.dt, *[0.0] * 29]           # nothing moves, but for:
            state[..., 3] = one.data.qpos[2] = height

        envs.pool = types.SimpleNamespace(rollout=rollout)
        _, reward, terminated, _, info = envs.step(np.zeros((1, 8)))
        assert terminated[0] != one.is_healthy and reward[0] == one.is_healthy and not info["blown_up"]


def test_ant_tasks_are_forward_and_backward():
    assert trmrl.make_tasks("ant_dir", 4, 1, "test").tasks.ravel().tolist() == [1, -1, 1, -1]
    assert 350 < (trmrl.make_tasks("ant_dir", 1000, 1).tasks == 1).sum() < 650
    with pytest.raises(trmrl.UserError, match="train, test"):
        trmrl.make_tasks("ant_dir", 4, 1, "ood")


def test_who_does_not_adapt_gets_minus_150():
    """The best that one speed for all can do: E |v - v*| for v* ~ U[0, 3] is least, 0.75, at v = 1.5."""
    envs, still = trmrl.make_tasks("halfcheetah_vel", 20, 0, "test"), np.zeros((20, 6))

    def episode(speed):  # the mean return, if the cheetah could run at that speed from the first step on
        reward = envs.reward(np.full(20, speed), still, np.zeros(20, dtype=bool))
        return 200 * reward.mean()

    assert episode(0.0) == pytest.approx(-300) and episode(1.5) == pytest.approx(-150)
    assert max(episode(speed) for speed in np.arange(0, 3.01, 0.05)) == pytest.approx(-150)
    tired = envs.reward(envs.tasks[:, 0], np.full((20, 6), 0.5), np.zeros(20, dtype=bool))
    np.testing.assert_allclose(tired, -0.05 * 6 * 0.5 ** 2)               # at its speed: effort alone


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


def test_an_action_that_is_not_a_number_does_no_harm():
    envs = trmrl.make_tasks("halfcheetah_vel", 2, 1)
    envs.reset(seed=0)
    obs, reward, terminated, _, _ = envs.step(np.full((2, 6), np.nan))
    assert np.isfinite(obs).all() and np.isfinite(reward).all() and not terminated.any()


# ---- MetaWorld (App. B) ----------------------------------------------------------------------------------

@pytest.fixture(scope="session")
def ml1():
    """MetaWorld's own benchmark, with the goals it draws by seed 0."""
    return importlib.import_module("metaworld").ML1("reach-v3", seed=0)


def rand_vecs(tasks):
    return np.array([pickle.loads(task.data)["rand_vec"] for task in tasks])


def test_ml1_trains_and_tests_on_metaworlds_own_goals(ml1):
    ours = {split: trmrl.make_tasks("ml1_reach", 50, 0, split).tasks[:, 1:] for split in ("train", "test")}
    train, test = rand_vecs(ml1.train_tasks), rand_vecs(ml1.test_tasks)
    assert train.shape == test.shape == (50, 6) and not (train[:, None] == test).all(axis=2).any()
    np.testing.assert_array_equal(ours["test"], test)                     # in order
    np.testing.assert_array_equal(np.unique(ours["train"], axis=0), np.unique(train, axis=0))
    for seed in (1, 2):                                                   # always of the same
        np.testing.assert_array_equal(trmrl.make_tasks("ml1_reach", 50, seed, "test").tasks[:, 1:], test)
        drawn = trmrl.make_tasks("ml1_reach", 7, seed).tasks[:, 1:]
        assert (drawn[:, None] == train).all(axis=2).any(axis=1).all()
        assert not np.array_equal(drawn, ours["train"][:7])
    with pytest.raises(trmrl.UserError, match="train, test"):
        trmrl.make_tasks("ml1_reach", 1, 0, "ood")


def test_an_arm_equals_metaworlds_own(ml1):
    """Observation, reward and success of two episodes; the first task reaches its goal, the others flail."""
    chosen = [ml1.train_tasks[3], ml1.train_tasks[11], ml1.test_tasks[5]]
    goals, rng, successes = rand_vecs(chosen), np.random.default_rng(0), 0
    envs = trmrl.make_tasks("ml1_reach", 3, 0)
    ours, _ = envs.reset(options={"tasks": np.concatenate([np.zeros((3, 1)), goals], axis=1)})
    theirs = [ml1.train_classes["reach-v3"]() for _ in chosen]
    for env, task in zip(theirs, chosen):
        env.set_task(task)
    for t in range(160):
        if t % 80 == 0:
            ours, _ = envs.reset()
            np.testing.assert_allclose(ours, [env.reset()[0] for env in theirs], rtol=1e-6, atol=1e-7)
        actions = rng.uniform(-1.5, 1.5, (3, 4))
        actions[0, :3] = 10 * (goals[0, 3:] - ours[0, :3])
        ours, reward, terminated, truncated, info = envs.step(actions)
        expected = [env.step(np.clip(a, -1, 1).astype(np.float32)) for env, a in zip(theirs, actions)]
        np.testing.assert_allclose(ours, [x[0] for x in expected], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(reward, [x[1] for x in expected], rtol=1e-6)
        assert info["success"].tolist() == [x[4]["success"] for x in expected] and not terminated.any()
        successes += info["success"]
    assert successes[0] > 20 and not successes[1:].any()


def test_goals_are_hidden():
    envs = trmrl.make_tasks("ml1_reach", 3, 0)
    tasks = np.repeat(envs.tasks[:1], 3, axis=0)
    tasks[1, 4:] += [0.05, -0.05, 0.1]                                    # another goal
    tasks[2, 1:3] += [0.05, 0.02]                                         # another place of the object
    obs, _ = envs.reset(options={"tasks": tasks})
    np.testing.assert_array_equal(obs[0], obs[1])
    assert np.flatnonzero(obs[0] != obs[2]).tolist() == [4, 5, 22, 23]    # now and one step before
    for _ in range(30):
        obs, reward, _, _, _ = envs.step(np.full((3, 4), 0.3))
        assert obs.shape == (3, 39) and obs.dtype == np.float32 and not obs[:, -3:].any()
        np.testing.assert_array_equal(obs[0], obs[1])                     # only r tells
        assert reward[0] != reward[1]


def test_arms_start_alike_whatever_the_seed_and_whatever_came_before():
    envs, rng = trmrl.make_tasks("ml1_reach", 2, 0), np.random.default_rng(0)
    actions, paths = rng.uniform(-1, 1, (20, 2, 4)), []
    for seed in (1, 2, None):
        obs, _ = envs.reset(seed=seed)
        paths.append([obs, *(envs.step(a)[0] for a in actions)])
    np.testing.assert_array_equal(paths[0], paths[1])
    np.testing.assert_array_equal(paths[0], paths[2])
    again, _ = envs.reset(options={"reset_mask": np.array([False, True])})
    np.testing.assert_array_equal(again, [paths[0][-1][0], paths[0][0][1]])


def test_blur_hides_where_the_object_is_and_changes_nothing_else():
    clear, blurred = (trmrl.make_tasks("ml1_reach", 4, 0) for _ in range(2))
    blurred.blur, shifts, rng = 0.1, [], np.random.default_rng(0)
    for seed in (5, 6, 5):
        actions = rng.uniform(-1, 1, (20, 4, 4))
        pairs = [[envs.reset(seed=seed)[0] for envs in (clear, blurred)]]
        for a in actions:
            (x, *rest), (y, *same) = clear.step(a), blurred.step(a)
            assert all(np.array_equal(*z) for z in zip(rest[:-1], same)) and np.array_equal(
                rest[-1]["success"], same[-1]["success"])
            pairs.append([x, y])
        shift = np.array([y - x for x, y in pairs])                       # (21, 4, 39)
        assert np.flatnonzero(np.abs(shift).max(axis=(0, 1)) > 1e-6).tolist() == [4, 5, 6, 22, 23, 24]
        np.testing.assert_allclose(shift[..., 4:7], shift[..., 22:25], atol=1e-6)
        np.testing.assert_allclose(shift, np.broadcast_to(shift[0], shift.shape), atol=1e-6)
        shifts.append(shift[0, :, 4:7])
    np.testing.assert_allclose(shifts[0], shifts[2], atol=1e-6)           # the seed decides
    assert len(np.unique(np.round([shifts[0], shifts[1]], 6))) == 24      # each episode, task and axis anew
    again, _ = blurred.reset(options={"reset_mask": np.arange(4) == 2})   # that one alone is seen elsewhere
    assert ((again[:, 4:7] == y[:, 4:7]).sum(axis=1) == [3, 3, 0, 3]).all()
    assert 0.05 < np.std(shifts) < 0.2


def test_only_training_is_blurred(tmp_path, monkeypatch):
    stepped = []

    def iterate(run, sample_tasks, envs, tests, last, batch):
        stepped.extend([envs, tests["test"]])
        sys.exit()

    monkeypatch.setattr(trmrl, "iterate", iterate)
    config = trmrl.Config(**SMALL, env="ml1_reach", num_tasks=1, blur=0.1, run_dir=str(tmp_path / "run"))
    with pytest.raises(SystemExit):
        trmrl.train(config)
    assert [envs.blur for envs in stepped] == [0.1, 0.0]
    assert trmrl.parse(["--env", "ml1_reach"])[1].blur > 0 == trmrl.parse(["--env", "ml1_push"])[1].blur


def test_arms_train_for_300_steps_and_are_tested_for_500():
    for split, length in (("train", 300), ("test", 500)):
        envs = trmrl.make_tasks("ml1_reach", 1, 0, split)
        for _ in range(2):
            envs.reset()
            ends = [envs.step(np.zeros((1, 4)))[3].item() for _ in range(length)]
            assert ends == [False] * (length - 1) + [True] and envs.episode_length == length


def test_success_at_any_step_of_an_episode_counts():
    success = np.zeros((3, 8))
    success[0, 2] = success[1, 5] = success[2, 6] = 1.0
    episode = np.array([[0, 0, 0, 0, 1, 1, 1, 1]] * 2 + [[0, 0, 1, 1, 1, 1, 2, 2]])
    trials = trmrl.Trials(*[None] * 6, np.ones((3, 8)), None, episode, {"success": success})
    returns, succeeded = trials.returns(2)
    assert succeeded.tolist() == [[1, 0], [0, 1], [0, 0]] and returns.tolist() == [[4, 4], [4, 4], [2, 4]]
    assert trmrl.score(returns, succeeded) == "3.7 (33%)"
    trials.info.clear()
    assert np.isnan(trials.returns(2)[1]).all() and trmrl.score(*trials.returns(2)) == "3.7"


@pytest.mark.parametrize("value", [np.nan, 1e300, 1e8, 1e4])
def test_an_arm_whose_simulation_blows_up_is_a_terminal_with_finite_numbers(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                                           # MuJoCo keeps a log where it runs
    envs = trmrl.make_tasks("ml1_reach", 3, 0)
    first, _ = envs.reset()
    calm = envs.step(np.zeros((3, 4)))[0]
    envs.arms[1].data.qvel[:] = value
    obs, reward, terminated, _, info = envs.step(np.zeros((3, 4)))
    assert terminated.tolist() == info["blown_up"].tolist() == [False, True, False]
    assert np.isfinite(reward).all() and not info["success"].any()
    np.testing.assert_array_equal(obs[1], calm[1])
    np.testing.assert_array_equal(envs.reset()[0], first)


@pytest.mark.parametrize("broken", ["observation", "reward"])
def test_an_arm_that_is_not_a_number_is_a_terminal_with_finite_numbers(broken):
    envs = trmrl.make_tasks("ml1_reach", 2, 0)
    calm, _ = envs.reset()
    step = envs.arms[1].step

    def spoilt(action):
        obs, reward, *rest = step(action)
        return (obs * np.nan, reward, *rest) if broken == "observation" else (obs, np.nan, *rest)

    envs.arms[1].step = spoilt
    obs, reward, terminated, _, info = envs.step(np.zeros((2, 4)))
    assert terminated.tolist() == info["blown_up"].tolist() == [False, True]
    assert np.isfinite(reward).all() and np.array_equal(obs[1], calm[1])


def test_every_task_of_metaworld_has_a_name_here(monkeypatch, capsys):
    metaworld, asked = importlib.import_module("metaworld"), []
    empty = types.SimpleNamespace(train_classes=[], train_tasks=[], test_tasks=[])
    monkeypatch.setattr(metaworld, "ML1", lambda name, seed: asked.append((name, seed)) or empty)
    for name in metaworld.ALL_V3_ENVIRONMENTS:
        trmrl.metaworld_goals.__wrapped__("ml1_" + name.removesuffix("-v3").replace("-", "_"))
    assert asked == [(name, 0) for name in metaworld.ALL_V3_ENVIRONMENTS] and len(asked) == 50
    assert trmrl.main(["--env", "ml1_juggle"]) == 2
    err = capsys.readouterr().err
    assert "juggle" in err and all(name.removesuffix("-v3") in err for name in metaworld.ALL_V3_ENVIRONMENTS)


def test_ml45_has_45_classes_in_turn():
    classes, goals, held_out = trmrl.metaworld_goals("ml45_train")        # it takes its time
    assert len(set(classes)) == 45 and goals.shape == (45, 50, 7) and goals is held_out
    for seed in (0, 1):
        envs = trmrl.make_tasks("ml45_train", 90, seed)
        assert envs.tasks[:, 0].tolist() == [*range(45)] * 2
        assert all((goals[i % 45] == row).all(axis=1).any() for i, row in enumerate(envs.tasks))
        assert not (envs.tasks[:45] == envs.tasks[45:]).all(axis=1).any()
    np.testing.assert_array_equal(trmrl.make_tasks("ml45_train", 90, 0, "test").tasks[45:], goals[:, 1])


def test_an_arm_of_ml45_is_of_its_class_and_meets_its_goal(monkeypatch):
    metaworld = importlib.import_module("metaworld")
    names = ["reach-v3", "drawer-open-v3", "faucet-open-v3"]             # goals of 6 and of 3 numbers
    rows = [[k, *getattr(metaworld.ALL_V3_ENVIRONMENTS[name]()._random_reset_space, "low")]
            for k, name in enumerate(names)]
    goals = np.array([[row + [0.0] * (7 - len(row))] * 50 for row in rows])
    goals[:, 1::2, 1] += 0.01
    monkeypatch.setattr(trmrl, "metaworld_goals", lambda env: (names, goals, goals))
    envs = trmrl.make_tasks("ml45_train", 6, 0, "test")
    obs, _ = envs.reset()
    assert [type(arm) for arm in envs.arms] == [metaworld.ALL_V3_ENVIRONMENTS[name] for name in names] * 2
    assert [arm._last_rand_vec.tolist() for arm in envs.arms] == [
        goals[i % 3, i // 3, 1:len(rows[i % 3])].tolist() for i in range(6)]
    assert not obs[:, -3:].any() and len(np.unique(obs, axis=0)) == 6
    arms = list(envs.arms)
    envs.reset(options={"tasks": np.roll(envs.tasks, 3, axis=0)})         # the same classes: the same arms
    assert all(a is b for a, b in zip(arms, envs.arms))
    envs.reset(options={"tasks": np.roll(envs.tasks, 1, axis=0)})
    assert [type(arm) for arm in envs.arms] == [type(arm) for arm in arms[2:] + arms[:2]]
    with pytest.raises(trmrl.UserError, match="multiple"):
        trmrl.make_tasks("ml45_train", 7)


def test_several_classes_are_trained_tested_and_evaluated_like_any_family(tmp_path, monkeypatch, capsys):
    names, goals = ["reach-v3", "push-v3"], np.zeros((2, 50, 7))
    goals[:, :, 1:] = [0.0, 0.65, 0.02, 0.05, 0.85, 0.1]
    goals[:, :, 0], goals[:, :, 1] = [[0], [1]], np.linspace(-0.1, 0.1, 50)
    monkeypatch.setattr(trmrl, "metaworld_goals", lambda env: (names, goals, goals))
    monkeypatch.setattr(trmrl.MetaWorldTasks, "episode_length", 15, raising=False)
    monkeypatch.setattr(trmrl.MetaWorldTasks, "__setattr__", lambda self, name, value:
                        name == "episode_length" or object.__setattr__(self, name, value))
    small = "--num-tasks 2 --minibatch 15 --epochs 1 --eval-tasks 4 --d-model 16 --d-ff 16 --total-steps 60"
    assert trmrl.main(["--env", "ml45_train", *small.split(), "--run-dir", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert {row["task"] for row in csv_rows(tmp_path / "run" / "eval.csv")} == set("0123")
    assert trmrl.main(["--eval", str(tmp_path / "run"), "--episodes", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "on 4 test tasks, episodes of 15 steps" in lines[0] and len(lines) == 5
    returns = [float(row["return"]) for row in csv_rows(tmp_path / "run" / "eval.csv")
               if (row["step"], row["episode"]) == ("60", "1")]           # classes in turn
    for line, name, mine in zip(lines[3:], names, (returns[0::2], returns[1::2])):
        assert line.split()[0] == name and float(line.split()[1]) == pytest.approx(np.mean(mine), abs=0.06)


def test_the_table_has_a_line_per_class():
    returns, tasks = np.array([[1.0, 5.0], [20.0, 30.0], [3.0, 5.0], [40.0, 50.0]]), np.zeros((4, 7))
    tasks[:, 0] = [0, 1, 0, 1]
    success = np.array([[0, 1], [1, 1], [0, 1], [0, 1.0]])
    text = trmrl.table(returns, success, tasks, ["reach-v3", "push-v3"])
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines] == ["episode", "1", "2", "reach-v3", "push-v3"]
    assert lines[1][1] == "16.0" and [line[-1] for line in lines] == ["success", "25%", "100%", "0%", "50%"]
    assert lines[3:] == [["reach-v3", "2.0", "0%"], ["push-v3", "30.0", "50%"]]
    assert len(trmrl.table(returns, success, tasks, ["reach-v3"]).splitlines()) == 3


def test_a_run_on_metaworld_tells_its_success(tmp_path):
    folder = tmp_path / "run"
    result = cli(*TINY, "--env", "ml1_reach", "--total-steps", 1200, "--eval-every", 2, "--run-dir", folder)
    assert result.returncode == 0, result.stderr
    assert re.search(r"train \d+\.\d \(\d+%\)   test \d+\.\d \(\d+%\)$", result.stdout.strip())
    tests, progress = csv_rows(folder / "eval.csv"), csv_rows(folder / "progress.csv")
    assert [(r["step"], r["split"], r["task"]) for r in tests] == [("1200", "test", k) for k in "01"]
    assert {r["success"] for r in tests} <= {"0", "1"} and len(progress) == 2
    assert all(0 <= float(r["train_success"]) <= 1 and r["blown_up"] == "0" for r in progress)
    lines = check_eval(folder, tmp_path / "rows.csv", episodes=1)
    assert lines[1].split()[-1] == "success" and all(line.endswith("%") for line in lines[2:])
    result = cli("--eval", folder, "--split", "ood")
    assert result.returncode == 2 and "train, test" in result.stderr


# ---- working memory (Sec. 4.1, "Memory Write Logic", Algorithm 1) ----------------------------------------

@pytest.mark.parametrize("keep_memory", [False, True])
@pytest.mark.parametrize("N", [1, 2, 5, 25])
def test_the_memory_is_a_queue_per_task(N, keep_memory):
    agent, rng, B = make_agent(memory_length=N, keep_memory=keep_memory), np.random.default_rng(N), 4
    seen, queues = spied(agent), [collections.deque(maxlen=N - 1) for _ in range(B)]
    agent.memory.reset(B)
    for t in range(60):
        state, rest = (torch.as_tensor(rng.normal(size=(B, n)), dtype=torch.float32) for n in (3, 4))
        rest[:, -1] = torch.as_tensor(rng.random(B) < 0.05)               # eta: the episode is over
        agent.memory.read(state)
        agent.memory.write(rest)
        slots, current = seen[-1]
        for b in range(B):
            expected = [*queues[b], torch.cat([state[b], torch.zeros(4)])]
            assert current[b] == len(expected) - 1
            assert torch.equal(slots[b, :len(expected)], torch.stack(expected))
            queues[b].append(torch.cat([state[b], rest[b]]))
            if rest[b, -1] and not keep_memory:
                queues[b].clear()


@pytest.mark.parametrize("keep_memory", [False, True])
@pytest.mark.parametrize("N", [1, 3, 12])
def test_what_is_recalled_for_learning_equals_the_queue_at_every_step(N, keep_memory):
    agent = make_agent(2, 2, memory_length=N, keep_memory=keep_memory)
    seen = spied(agent)
    trials = trmrl.collect(agent, Falling(6), 2, True, 0)
    B, T = trials.logp.shape
    order = torch.randperm(B * T)                                         # task after task, T steps each
    agent.memory.recall(trials.memories, trials.start, order)
    x, current = seen.pop()
    for row, index in enumerate(order.tolist()):
        task, t = divmod(index, T)
        assert current[row] == seen[t][1][task]
        assert torch.equal(x[row, :current[row] + 1], seen[t][0][task, :current[row] + 1])


def test_the_memory_holds_the_action_the_physics_saw():
    agent = make_agent(2, 2, memory_length=3)
    seen = spied(agent)
    agent.reset(2)
    agent.act(np.zeros((2, 2)))
    agent.observe(np.array([[5.0, -0.5], [-7.0, 0.25]]), np.array([1.0, 2.0]), np.array([False, True]))
    agent.act(np.ones((2, 2)))
    slots, current = seen[-1]
    assert slots[0, 0, 2:].tolist() == [1.0, -0.5, 1.0, 0.0]
    assert current.tolist() == [1, 0]                                     # the second task starts anew
    assert slots[1, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


# ---- the transformer (Sec. 3.2, 4.2) ---------------------------------------------------------------------

@pytest.mark.parametrize("tfixup", [True, False])
@pytest.mark.parametrize("N", [1, 2, 5, 25])
def test_future_memories_do_not_change_the_present(N, tfixup):
    torch.manual_seed(N)
    net = trmrl.Transformer(3, 16, 4, 32, tfixup)
    e = torch.randn(2, N, 16)
    memories, _ = refinements(net, e)
    for slot in range(N):
        other = e.clone()
        other[:, slot] += torch.randn(2, 16)
        for before, after in zip(memories[1:], refinements(net, other)[0][1:]):
            assert torch.equal(before[:, :slot], after[:, :slot])         # the past does not change ...
            changed = (before[:, slot:] - after[:, slot:]).abs().amax(dim=-1)
            assert (changed > 1e-6).all()  # ... the present and what follows does
        for now in {max(0, slot - 1), slot, N - 1}:
            current = torch.tensor([now, now])
            same = torch.equal(net(e, current), net(other, current))
            assert same == (slot > now)  # empty slots lie behind the current one


@pytest.mark.parametrize("tfixup", [True, False])
@pytest.mark.parametrize("layers, heads, N", [(1, 4, 7), (2, 1, 1), (2, 8, 2), (4, 2, 25), (1, 32, 40)])
def test_one_query_without_keys_and_values_equals_the_plain_path(layers, heads, N, tfixup):
    torch.manual_seed(1)
    net = trmrl.Transformer(layers, 32, heads, 64, tfixup)
    for name, p in net.named_parameters():                                # as after some training
        p.data += (0.3 if name.endswith("bias") else 0.05) * torch.randn_like(p)
    e, current = torch.randn(50, N, 32), torch.randint(N, (50,))
    plain = refinements(net, e)[0][-1][torch.arange(50), current]
    slopes = torch.autograd.grad(plain.square().mean(), list(net.parameters()))
    net.layers[-1].k.forward = net.layers[-1].v.forward = None            # neither is asked for
    fast = net(e, current)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(fast.square().mean(), list(net.parameters())), slopes):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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
        b.self_attn.in_proj_bias.data = torch.cat([a.q.bias, torch.randn(d), a.v.bias]).data   # any bias of k
        for ours, module in ((a.out, b.self_attn.out_proj), (a.ff1, b.linear1), (a.ff2, b.linear2),
                             (a.norm1, b.norm1), (a.norm2, b.norm2)):
            module.load_state_dict(ours.state_dict())
    e = torch.randn(5, N, d)
    mask = nn.Transformer.generate_square_subsequent_mask(N)
    ours = refinements(net, e)[0][-1]
    torch.testing.assert_close(ours, theirs(e, mask=mask, is_causal=True), rtol=1e-4, atol=1e-5)


def test_without_layer_norm_it_equals_a_few_lines_of_einsum():
    torch.manual_seed(3)
    d, h, N = 12, 3, 5
    net = trmrl.Transformer(2, d, h, 20, tfixup=True)
    e = torch.randn(4, N, d)
    x, weights = e, []
    for layer in net.layers:
        q, k, v = (torch.einsum("bnd,hkd->bhnk", x, w.weight.view(h, d // h, d))
                   for w in (layer.q, layer.k, layer.v))
        scores = torch.einsum("bhik,bhjk->bhij", q, k) / (d / h) ** 0.5
        exp = scores.exp() * torch.ones(N, N).tril()
        alpha = exp / exp.sum(-1, keepdim=True)
        mu = torch.einsum("bhij,bhjk->bihk", alpha, v).reshape(4, N, d)
        x = x + mu @ layer.out.weight.T
        x = x + torch.relu(x @ layer.ff1.weight.T) @ layer.ff2.weight.T
        weights.append(alpha)
    memories, alphas = refinements(net, e)
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

    for layer in agent.memory.transformer.layers:
        for name, a, b, factor in (("q", d, d, 1), ("k", d, d, 1), ("v", d, d, scale), ("out", d, d, scale),
                                   ("ff1", d, ff, scale), ("ff2", ff, d, scale)):
            weight = getattr(layer, name).weight
            assert weight.std().item() == pytest.approx(factor * xavier(a, b), rel=0.03), name
            assert name == "k" or getattr(layer, name).bias.abs().max() == 0
    expected = d ** -0.5 * (9 * L) ** -0.25 if tfixup else xavier(82, d)
    assert agent.memory.phi.weight.std().item() == pytest.approx(expected, rel=0.03)
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

def bayes_risk(answer, candidates, posterior, similarity):
    """Of an answer (d,), if candidate n (N, d) is the right one with probability posterior_n (N,)."""
    return -(posterior * similarity(candidates, answer)).sum()


def cosine(candidates, answer):
    return torch.cosine_similarity(candidates, answer[None], dim=-1)


def dot_product(candidates, answer):
    return candidates @ answer


def test_theorem_1_holds_for_cosine_similarity_but_not_for_dot_products():
    torch.manual_seed(0)
    layer = trmrl.Layer(8, 1, 16, layer_norm=False)
    for _ in range(200):
        e = torch.randn(1, 6, 8)
        alpha = layer(e)[1][0, 0, -1].detach()                            # the posterior, says the paper
        v = layer.v(e)[0].detach()                                        # the candidates, in V space
        unit = v / v.norm(dim=-1, keepdim=True)
        consensus = alpha @ unit
        risks = [bayes_risk(x, unit, alpha, cosine) for x in unit]
        assert bayes_risk(consensus, unit, alpha, cosine) <= min(risks) + 1e-6
        assert bayes_risk(consensus, unit, alpha, cosine) == pytest.approx(-consensus.norm().item(), abs=1e-5)
        risks = [bayes_risk(x, v, alpha, dot_product) for x in v]
        assert bayes_risk(alpha @ v, v, alpha, dot_product) > min(risks)


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


@pytest.mark.parametrize("kind", ["trmrl", "rl2"])
def test_each_task_of_a_batch_is_alone(kind):
    agent, rng = awake(make_agent(agent=kind, memory_length=4)), np.random.default_rng(0)
    obs, reward = rng.normal(size=(10, 3, 3)), rng.normal(size=(10, 3))

    def run(chosen):
        agent.reset(len(chosen))
        actions = []
        for t in range(10):
            actions.append(agent.act(obs[t][chosen]))
            agent.observe(actions[-1], reward[t][chosen], np.full(len(chosen), t == 5))
        return np.stack(actions)

    np.testing.assert_allclose(run([1])[:, 0], run([0, 1, 2])[:, 1], atol=1e-5)
    assert np.abs(run([0])[:, 0] - run([1])[:, 0]).max() > 1e-3


def test_the_separate_value_head_reads_the_current_state_alone():
    for separate in (True, False):
        agent = make_agent(separate_value=separate, memory_length=3)
        x, current = torch.randn(8, 3, 7), torch.full((8,), 2)
        other = x.clone()
        other[:, 0] += 1
        values = [agent.values(agent.memory.remember(z, current), z[:, 2, :3]) for z in (x, other)]
        assert torch.equal(*values) == separate


# ---- the baselines: RL^2 and the oracle ------------------------------------------------------------------

def test_rl2_is_a_gru_that_lives_through_the_trial():
    """Acting step by step, learning from whole trials and the equations of a GRU: the same memories."""
    agent, seen = make_agent(2, 2, agent="rl2"), []
    agent.normalizer.update(torch.randn(100, 2) * 3)
    read = agent.memory.read
    agent.memory.read = lambda state: seen.append(read(state)) or seen[-1]
    trials = trmrl.collect(agent, Falling(6), 3, True, 0)
    B, T = trials.logp.shape
    assert T == 60 and trials.terminated.sum() > 10                       # not even falls empty the memory
    gru, h, acted = agent.memory.gru, torch.zeros(B, 16), torch.stack(seen, dim=1)
    recalled = agent.memory.recall(trials.memories, trials.start, torch.arange(B * T)).view(B, T, 16)
    torch.testing.assert_close(recalled, acted, rtol=1e-5, atol=1e-5)
    for t in range(T):
        before = trials.memories[:, t - 1, 2:] if t else torch.zeros(B, 4)   # a, r, eta of the step before
        x = torch.cat([trials.memories[:, t, :2], before], dim=1)
        to_r, to_z, to_n = (x @ gru.weight_ih_l0.T + gru.bias_ih_l0).chunk(3, dim=1)
        from_r, from_z, from_n = (h @ gru.weight_hh_l0.T + gru.bias_hh_l0).chunk(3, dim=1)
        r, z = torch.sigmoid(to_r + from_r), torch.sigmoid(to_z + from_z)
        h = (1 - z) * torch.tanh(to_n + r * from_n) + z * h
        torch.testing.assert_close(acted[:, t], h, rtol=1e-5, atol=1e-5)


def test_rl2_learns_through_the_whole_trial_and_from_no_other():
    agent, memories = make_agent(2, 2, agent="rl2"), torch.randn(3, 40, 6, requires_grad=True)
    e = agent.memory.recall(memories, None, torch.arange(120)).view(3, 40, 16)
    e[1, -1].sum().backward()
    assert (memories.grad[1, 0] != 0).all()                               # s, a, r, eta of the first step
    assert not memories.grad[[0, 2]].any()
    assert not memories.grad[1, -1, 2:].any()                             # not known yet at the last


def test_minibatches_of_rl2_are_whole_trials(monkeypatch):
    agent = make_agent(2, 2, agent="rl2", minibatch=90, epochs=3)
    trials = trmrl.collect(agent, PointMass(8), 2, True, 0)
    used, recall = [], agent.memory.recall
    agent.memory.recall = lambda m, start, index: used.append(index) or recall(m, start, index)
    optimizer = trmrl.make_optimizer(agent, agent.config)
    metrics = trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())
    steps = torch.stack(used).view(3, 4, 2, 40)                           # epochs, minibatches, trials, time
    assert metrics["updates"] == 12 and torch.equal(steps % 40, torch.arange(40).expand(3, 4, 2, 40))
    assert [sorted(epoch) for epoch in (steps[..., 0] // 40).flatten(1).tolist()] == [[*range(8)]] * 3


def test_the_oracle_is_told_the_task():
    envs = PointMass(5)
    agent = awake(make_agent(3, 2, agent="oracle", memory_length=1))
    assert trmrl.state_size(agent.config, envs) == 3 and trmrl.state_size(trmrl.Config(), envs) == 2
    tasks = envs.sample_tasks(np.random.default_rng(7))
    trials = trmrl.collect(agent, envs, 2, False, 0, tasks=tasks)
    np.testing.assert_array_equal(trials.obs[..., 2], np.repeat(tasks, 40, axis=1).astype(np.float32))
    assert np.ptp(trials.action[:, 0].numpy(), axis=0).max() > 1e-3       # it acts on it from the first step
    other = trmrl.collect(agent, envs, 2, False, 0, tasks=tasks[::-1])
    np.testing.assert_allclose(other.action.numpy(), trials.action.numpy()[::-1], atol=1e-5)


# ---- trials and PPO (Sec. 5.1) ---------------------------------------------------------------------------

def test_gae_equals_a_brute_force_sum_over_the_trial():
    rng, (B, T), gamma, lam = np.random.default_rng(0), (5, 40), 0.93, 0.8
    reward, value = rng.normal(size=(2, B, T))
    terminated = rng.random((B, T)) < 0.08  # episodes also end by the clock at step 20
    tensors = (torch.as_tensor(x, dtype=torch.float64) for x in (reward, value, terminated))
    ours = trmrl.gae(*tensors, gamma, lam)
    for b, t in itertools.product(range(B), range(T)):
        end = next((s for s in range(t, T) if terminated[b, s]), T - 1)   # the last step whose reward counts
        estimates = []                                                    # n-step returns, n = 1, 2, ...
        for n in range(1, end - t + 2):
            value_after = value[b, t + n] if t + n <= end else 0.0
            discounted = sum(gamma ** i * reward[b, t + i] for i in range(n))
            estimates.append(discounted + gamma ** n * value_after - value[b, t])
        weights = [(1 - lam) * lam ** n for n in range(len(estimates) - 1)] + [lam ** (len(estimates) - 1)]
        assert ours[b, t].item() == pytest.approx(np.dot(weights, estimates), abs=1e-6)


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


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("settings", [{}, {"keep_memory": True}, {"agent": "rl2"}], ids=str)
def test_an_endless_memory_ends_by_falls_only(settings, endless, monkeypatch):
    gamma, lam, scale = 0.93, 0.8, 0.5
    agent = awake(make_agent(2, 2, minibatch=320, epochs=1, gamma=gamma, gae_lambda=lam, reward_scale=scale,
                             endless=endless, **settings))
    trials, seen, loss = trmrl.collect(agent, Falling(8), 2, True, 0), [], trmrl.ppo_loss

    def spy(agent, e, state, action, logp_old, advantage, target, config):
        seen.extend(zip(logp_old.tolist(), target.tolist()))
        return loss(agent, e, state, action, logp_old, advantage, target, config)

    monkeypatch.setattr(trmrl, "ppo_loss", spy)
    optimizer = trmrl.make_optimizer(agent, agent.config)
    trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())
    seen, reward, value = dict(seen), scale * trials.reward, trials.value.numpy()
    ends = {"fall": 0, "clock": 0, "trial": 0}
    for b, t in itertools.product(range(8), reversed(range(40))):
        last = "trial" if t == 39 else "clock" if trials.episode[b, t + 1] > trials.episode[b, t] else ""
        last = "fall" if trials.terminated[b, t] else last
        if last == "fall" or last == "trial" and not endless:
            follows = 0.0
        elif endless and (last == "trial" or last and not settings):      # or the memory lives on
            follows = value[b, t]                                         # as if it stayed where it is
        else:
            follows = (1 - lam) * value[b, t + 1] + lam * target          # the lambda-return, backwards
        target = reward[b, t] + gamma * follows
        assert seen[trials.logp[b, t].item()] == pytest.approx(target, abs=1e-4)
        ends[last or "fall"] += bool(last)
    assert min(ends.values()) > 0


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_learned_reward_scale_makes_rewards_of_any_size_the_same(size, monkeypatch):
    """Those of an iteration are divided by the root of the mean square of all so far, times 1 - gamma."""
    agent, given, seen, rng = make_agent(2, 2, reward_scale=0.0, gamma=0.97), [], [], np.random.default_rng(0)
    optimizer, gae = trmrl.make_optimizer(agent, agent.config), trmrl.gae
    monkeypatch.setattr(trmrl, "gae", lambda reward, *rest: seen.append(reward) or gae(reward, *rest))
    for i in range(3):
        trials = trmrl.collect(agent, PointMass(6), 2, True, i)
        reward = size * rng.exponential(1 + i, trials.reward.shape)
        trials.memories[..., -2] = torch.as_tensor(reward)
        given.append(reward)
        trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())
        expected = (1 - 0.97) * reward / np.sqrt(np.mean(np.square(given)))
        np.testing.assert_allclose(seen[-1], expected, rtol=5e-3)             # 1e-8 below the root
    assert agent.rewards.count == 3 * 6 * 40 and "rewards.mean" in agent.state_dict()   # a resume needs it
    assert make_agent(2, 2, reward_scale=0.1).rewards is None


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


@pytest.mark.parametrize("E", [1, 2, 3])
def test_episodes_side_by_side_are_those_in_a_row(E):
    """Points start alike and mean actions have no noise, so both ways must give the same trials."""
    agent, tasks = awake(make_agent(2, 2)), PointMass(4, seed=3).tasks
    in_a_row = trmrl.collect(agent, PointMass(4), E, False, 0, tasks)
    side_by_side = trmrl.collect(agent, PointMass(4 * E), E, False, 0, tasks)
    assert in_a_row.reward.shape == (4, 20 * E) and np.ptp(in_a_row.reward[:, -1]) > 0.1
    for name in vars(in_a_row).keys() - {"info"}:
        np.testing.assert_allclose(getattr(side_by_side, name), getattr(in_a_row, name), atol=1e-5)


def test_side_by_side_every_step_belongs_to_its_task_and_remembers_its_own_episode():
    agent, tasks = awake(make_agent(2, 2)), PointMass(5, seed=3).tasks
    trials = trmrl.collect(agent, Falling(10), 2, True, 0, tasks)
    goal = np.concatenate([np.cos(tasks), np.sin(tasks)], axis=1)[:, None]
    x = trials.obs + 0.25 * trials.action.clamp(-1, 1).numpy()
    np.testing.assert_allclose(trials.reward, -np.linalg.norm(x - goal, axis=-1), atol=1e-5)
    np.testing.assert_array_equal(trials.info["success"], trials.reward > -1)
    assert trials.terminated.any() and not np.array_equal(trials.action[:, :20], trials.action[:, 20:])
    returns, success = trials.returns(2)
    for b, lane in itertools.product(range(5), range(2)):
        begun, episode, total = 20 * lane, lane, 0.0
        for t in range(20 * lane, 20 * lane + 20):
            assert trials.start[b, t] == begun and trials.episode[b, t] == episode
            total += trials.reward[b, t] * (episode == lane)              # of its first episode, a whole one
            if t == begun:
                assert (trials.obs[b, t] == 0).all()                      # back at the start
            if trials.terminated[b, t]:
                begun, episode = t + 1, episode + 2
        assert returns[b, lane] == pytest.approx(total, abs=1e-4) and success[b, lane] in (0, 1)
    e = agent.memory.recall(trials.memories, trials.start, torch.arange(200))
    logp = agent.log_prob(agent.policy(e), trials.action.flatten(0, 1))
    torch.testing.assert_close(logp, trials.logp.flatten(), atol=1e-4, rtol=0)


class Spread(PointMass):
    """Its tasks are spread over the circle: only all of them together are a fair sample."""

    def sample_tasks(self, rng):
        n = self.num_envs
        return 2 * np.pi * (np.arange(n)[:, None] + rng.random((n, 1))) / n


@pytest.mark.parametrize("settings, envs", [
    ({}, 18), ({"agent": "oracle"}, 18), ({"keep_memory": True}, 6), ({"agent": "rl2"}, 6),
    ({"env": "heavy"}, 6)], ids=str)
def test_episodes_run_side_by_side_where_memories_end_with_them(settings, envs, tmp_path, monkeypatch):
    shapes, update = [], trmrl.ppo_update
    monkeypatch.setattr(trmrl, "ppo_update", lambda agent, optimizer, trials, *rest: shapes.append(
        trials.reward.shape) or update(agent, optimizer, trials, *rest))
    made = {}

    def make(env, num_tasks, seed=0, split="train"):
        made[split] = Spread(num_tasks, seed, split)
        made[split].in_a_row = env == "heavy" and trmrl.MetaWorldTasks.in_a_row
        return made[split]

    config = trmrl.Config(**{**SMALL, "env": "points", **settings}, num_tasks=6, episodes_per_trial=3,
                          total_steps=1, minibatch=60, epochs=1, run_dir=str(tmp_path / "run"))
    trmrl.train(config, make)
    assert made["train"].num_envs == envs and made["test"].num_envs == 2 and shapes == [(6, 60)]
    tasks = made["train"].tasks.reshape(6, envs // 6)
    assert (tasks == tasks[:, :1]).all()
    assert (tasks[:, 0] // (np.pi / 3)).tolist() == [*range(6)]           # the whole circle


@pytest.mark.parametrize("settings", [
    {}, {"keep_memory": True}, {"agent": "rl2"}, {"agent": "oracle"}], ids=str)
def test_the_ratio_is_one_before_the_first_gradient_step(settings, monkeypatch):
    envs = Falling(8)
    agent = make_agent(2 + (settings.get("agent") == "oracle"), 2, memory_length=5, minibatch=40, **settings)
    awake(agent).normalizer.update(torch.randn(100, agent.state_size) * 3)
    trials = trmrl.collect(agent, envs, 2, True, 0)
    ratios, advantages, logs, loss = [], [], [], trmrl.ppo_loss

    def spy(agent, e, state, action, logp_old, advantage, *rest):
        ratios.append((agent.log_prob(agent.policy(e), action) - logp_old).exp())
        advantages.append(advantage)
        value, log = loss(agent, e, state, action, logp_old, advantage, *rest)
        logs.append(dict(zip(trmrl.METRICS, log)))
        return value, log

    monkeypatch.setattr(trmrl, "ppo_loss", spy)
    optimizer = trmrl.make_optimizer(agent, agent.config)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())
    assert len(torch.cat(ratios)) == 5 * 320 and (torch.cat(ratios) - 1).abs().max() < 1e-5
    assert all(log["approx_kl"].abs() < 1e-6 and log["clip_fraction"] == 0 for log in logs)
    for minibatch in advantages:                                          # each normalised by itself
        assert minibatch.mean().abs() < 1e-5 and minibatch.std() == pytest.approx(1, abs=1e-3)


def test_the_ppo_loss_is_the_clipped_objective():
    agent = make_agent(3, 2, clip=0.1, value_coef=0.7, entropy_coef=0.3)
    e, state, advantage, target = torch.randn(6, 16), torch.randn(6, 3), torch.randn(6), torch.randn(6)
    action, mean, value = torch.randn(6, 2) * 0.2, agent.policy(e), agent.value(e)[:, 0]
    logp_old = agent.log_prob(mean, action) + torch.tensor([0.3, 0.05, -0.05, -0.3, 0.3, -0.3])
    loss, log = trmrl.ppo_loss(agent, e, state, action, logp_old, advantage, target, agent.config)
    expected = 0.0
    for a, r, v, goal in zip(*(x.tolist() for x in (
            advantage, (agent.log_prob(mean, action) - logp_old).exp(), value, target))):
        expected += -min(r * a, min(max(r, 0.9), 1.1) * a) / 6 + 0.7 * (v - goal) ** 2 / 6
    assert loss.item() == pytest.approx(expected - 0.3 * agent.entropy().item(), rel=1e-4)
    assert log[-1].item() == pytest.approx(4 / 6)                         # clipped: all but two


def captured_update(agent, trials, monkeypatch):
    """ppo_update, and what ppo_loss was asked in each minibatch: (steps, its further arguments)."""
    asked, indices, loss, recall = [], [], trmrl.ppo_loss, agent.memory.recall
    optimizer = trmrl.make_optimizer(agent, agent.config)
    for group in optimizer.param_groups:
        group["lr"] = group["rate"]
    with monkeypatch.context() as patch:
        patch.setattr(agent.memory, "recall", lambda *args: indices.append(args[2]) or recall(*args))
        patch.setattr(trmrl, "ppo_loss", lambda *args: asked.append(args[2:]) or loss(*args))
        metrics = trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator().manual_seed(0))
    return metrics, list(zip(indices, asked))


@pytest.mark.parametrize("settings", [{}, {"separate_value": True, "tfixup": False}, {"agent": "rl2"}],
                         ids=str)
def test_adam_on_one_vector_is_pytorchs_on_each_parameter(settings, monkeypatch):
    agent = awake(make_agent(2, 2, minibatch=80, epochs=3, lr=1e-3, value_lr=3e-3, max_grad_norm=0.3,
                             **settings))
    trials, twin = trmrl.collect(agent, PointMass(8), 2, True, 0), copy.deepcopy(agent)
    metrics, minibatches = captured_update(agent, trials, monkeypatch)
    value = list(twin.value.parameters())
    rest = [p for p in twin.parameters() if all(p is not v for v in value)]
    adam = torch.optim.Adam([{"params": rest}, {"params": value, "lr": 3e-3}], lr=1e-3, eps=1e-5)
    norms = []
    for index, args in minibatches:
        e = twin.memory.recall(trials.memories, trials.start, index)
        adam.zero_grad()
        trmrl.ppo_loss(twin, e, *args)[0].backward()
        norms.append(nn.utils.clip_grad_norm_(twin.parameters(), 0.3).item())
        adam.step()
    assert max(norms) > 0.3 and metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-3)
    for (name, a), b in zip(agent.named_parameters(), twin.parameters()):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4, msg=name)


def test_a_compiled_update_is_the_same_and_compiled_once(monkeypatch):
    """By the compiler's front end alone: its back end takes half a minute. No break, no second graph."""
    counters, compile = torch._dynamo.utils.counters, torch.compile
    counters.clear()
    backend = "inductor" if os.environ.get("TRMRL_LONG_TESTS") else "aot_eager"
    monkeypatch.setattr(torch, "compile", lambda f: compile(f, backend=backend, fullgraph=True))
    weights = []
    for compiled in (False, True):
        agent = awake(make_agent(2, 2, minibatch=80, epochs=2, compile=compiled))
        optimizer, generator = trmrl.make_optimizer(agent, agent.config), torch.Generator().manual_seed(0)
        for seed in (0, 1):                                               # two iterations
            trials = trmrl.collect(agent, PointMass(8), 2, True, seed)
            trmrl.ppo_update(agent, optimizer, trials, agent.config, generator)
        weights.append(torch.cat([group["params"][0] for group in optimizer.param_groups]))
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


def test_where_nothing_compiles_it_is_said_in_one_line(tmp_path, monkeypatch):
    def nothing(f):
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", nothing)
    result = cli(*TINY, "--compile", "--run-dir", tmp_path / "run")
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and not (tmp_path / "run").exists()
    assert "no compiler" in result.stderr and "leave it out" in result.stderr
    monkeypatch.setattr(torch, "compile", lambda f: f)
    assert cli(*TINY, "--compile", "--total-steps", 1, "--run-dir", tmp_path / "run").returncode == 0
    monkeypatch.setattr(torch, "compile", nothing)                        # the run moves to another machine
    assert cli("--resume", tmp_path / "run").returncode == 2
    assert cli("--resume", tmp_path / "run", "--no-compile").returncode == 0


def test_observation_statistics_are_frozen_until_the_end_of_an_update():
    agent = make_agent(2, 2, minibatch=50)
    trials = trmrl.collect(agent, PointMass(5), 2, True, 0)
    assert agent.normalizer.count == 0
    optimizer = trmrl.make_optimizer(agent, agent.config)
    trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())
    assert agent.normalizer.count == 200
    np.testing.assert_allclose(agent.normalizer.mean, trials.obs.reshape(-1, 2).mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("kind, steps, at_least, settings", [
    ("trmrl", 48_000, -17, dict(layers=2, minibatch=200, lr=2e-3)),
    ("rl2", 40_000, -17, dict(episodes_per_trial=1, minibatch=200, epochs=8, lr=4e-3, value_lr=3e-3,
                              gamma=0.8)),
    ("oracle", 16_000, -12, dict(memory_length=1, lr=3e-3))])
def test_it_learns_to_learn(kind, steps, at_least, settings, tmp_path):
    """Well above -20, the best for who does not adapt (E|x - goal| is smallest at the centre)."""
    config = trmrl.Config(env="points", agent=kind, device="cpu", threads=1, run_dir=str(tmp_path / "run"),
                          total_steps=steps, num_tasks=40, layers=1, d_model=32, heads=2, d_ff=64,
                          memory_length=4, minibatch=160, init_std=0.4, lr=1e-3, gamma=0.9, reward_scale=0.3,
                          eval_every=50)
    agent = trmrl.train(replace(config, **settings), make_points)
    returns, _ = trmrl.meta_test(agent, PointMass(20, split="test"), 1)
    assert returns.mean() > at_least


def test_a_batch_takes_memory_by_tasks_and_steps_but_not_by_the_memory_length():
    def size(tasks, episodes, N):
        trials = trmrl.collect(make_agent(2, 2, memory_length=N), PointMass(tasks), episodes, True, 0)
        kept = [x for x in vars(trials).values() if not isinstance(x, dict)]
        assert [x.shape[:2] for x in kept] == [(tasks, 20 * episodes)] * len(kept)
        return sum(x.untyped_storage().nbytes() if torch.is_tensor(x) else x.nbytes for x in kept)

    one = size(4, 2, 1)
    assert size(4, 2, 50) == one and size(8, 2, 5) == size(4, 4, 5) == 2 * one


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
                                      {"memory_length": 1}, {"agent": "rl2"}, {"reward_scale": 0.0},
                                      {"endless": True}],
                         ids=str)
def test_acting_and_updating_stay_on_one_device(settings, monkeypatch):
    """`meta` tensors stand in for those of a GPU. What would cross over to the CPU unasked fails here."""
    agent = make_agent(3, 2, minibatch=10, epochs=1, **settings).to("meta")
    draws, randn, randperm = [], torch.randn, torch.randperm  # meta has no generators: look at the device
    monkeypatch.setattr(torch, "randn", lambda *a, generator, device, **k: draws.append(device) or
                        randn(*a, device=device))
    monkeypatch.setattr(torch, "randperm", lambda *a, generator, device: draws.append(device) or
                        randperm(*a, device=device))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: [0.0] * len(self))
    module = importlib.import_module("torch.optim.optimizer")  # fused Adam can do meta, its list just
    fused = module._get_fused_kernels_supported_devices                   # does not say so
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: [*fused(), "meta"])
    optimizer = trmrl.make_optimizer(agent, agent.config)
    with OneDevice():
        agent.reset(4)
        for _ in range(3):
            found = agent.step(np.zeros((4, 3)), sample=True)             # action, mean, e, state
            agent.observe(np.zeros((4, 2)), np.zeros(4), np.zeros(4, bool))
        kept = [x for x in vars(agent.memory).values() if torch.is_tensor(x)]
        assert len(kept) == 2 and {x.device.type for x in (*found, *kept)} == {"meta"}

        def on(*shape, dtype=torch.float32):
            return torch.zeros(*shape, dtype=dtype, device="meta")

        trials = trmrl.Trials(on(4, 5, 7), on(4, 5, 2), on(4, 5), on(4, 5), on(4, 5, dtype=torch.long),
                              np.zeros((4, 5, 3), np.float32), np.zeros((4, 5)), np.zeros((4, 5)), None, {})
        trmrl.ppo_update(agent, optimizer, trials, agent.config, None)
    assert optimizer.gradient.device.type == "meta"
    assert {s["exp_avg"].device.type for s in optimizer.state.values()} == {"meta"}
    assert [torch.device(d).type for d in draws] == ["meta"] * 4


@pytest.mark.parametrize("kind, updates", [("trmrl", 30), ("rl2", 15)])
def test_nothing_is_read_from_the_device_inside_the_minibatch_loop(kind, updates, monkeypatch, capsys):
    agent = make_agent(2, 2, agent=kind, minibatch=20, epochs=3, reward_scale=0.0)
    trials = trmrl.collect(agent, PointMass(5), 2, True, 0)
    optimizer, loss, reads, calls = trmrl.make_optimizer(agent, agent.config), trmrl.ppo_loss, [], []
    for name in ("item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, _o=getattr(torch.Tensor, name), _n=name, **k:
                            reads.append(_n) or _o(self, *a, **k))
    monkeypatch.setattr(trmrl, "ppo_loss", lambda *a: calls.append(len(reads)) or loss(*a))
    trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())
    assert len(calls) == updates and calls[-1] == calls[0] and reads[calls[-1]:] == ["tolist"]
    assert capsys.readouterr() == ("", "")                                # nor is anything printed


# ---- the command line ------------------------------------------------------------------------------------

TINY_RL2 = ("--num-tasks 2 --episodes-per-trial 1 --minibatch 100 --epochs 2 --d-model 16 --threads 1 "
            "--device cpu --eval-tasks 2 --final-episodes 1").split()
TINY = [*TINY_RL2, *"--layers 1 --heads 2 --d-ff 32".split()]
FILES = {"config.json", "progress.csv", "eval.csv", "agent.pt", "checkpoint.pt"}


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    """A finished run of 6 iterations, left alone."""
    folder = tmp_path_factory.mktemp("short") / "run"
    process = start_run(folder)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return folder


def test_a_run_writes_its_folder(short_run):
    assert set(os.listdir(short_run)) == FILES
    config = json.loads((short_run / "config.json").read_text())
    assert config["env"] == "halfcheetah_vel" and config["minibatch"] == 100 and "torch" in config["versions"]
    progress = csv_rows(short_run / "progress.csv", without=())
    assert [int(row["step"]) for row in progress] == [400, 800, 1200, 1600, 2000, 2400]
    columns = {"seconds", "steps_per_second", "train_return", "policy_loss", "skipped", "blown_up"}
    assert columns <= progress[0].keys()
    tests = csv_rows(short_run / "eval.csv")
    assert list(tests[0]) == ["step", "split", "task", "episode", "return", "success"]
    assert [(r["step"], r["split"], r["task"], r["episode"], r["success"]) for r in tests] == [
        (str(step), split, str(task), "1", "")
        for step in (800, 1600, 2400) for split in ("test", "ood") for task in (0, 1)]
    rates = [trmrl.Config.lr * (1 - 0.95 * i / 6) for i in range(6)]
    assert [float(row["lr"]) for row in progress] == pytest.approx(rates, rel=1e-4)


def check_eval(folder, csv, *flags, split="test", tasks=2, episodes=3):
    """--eval: the table agrees with its rows, the first episodes with the run's own last meta-test."""
    common = ["--split", split, "--episodes", episodes, "--csv", csv, "--threads", 1]
    result = cli("--eval", folder, *common, *flags)
    assert result.returncode == 0, result.stderr
    rows, final = csv_rows(csv), csv_rows(folder / "eval.csv")
    final = [float(r["return"]) for r in final if (r["step"], r["split"]) == (final[-1]["step"], split)]
    first = [float(r["return"]) for r in rows if r["episode"] == "1"]
    assert len(first) == tasks and (tasks != len(final) or first == pytest.approx(final, abs=0.01))
    lines = result.stdout.splitlines()
    assert f"on {tasks} {split} tasks" in lines[0] and lines[1].split()[:2] == ["episode", "return"]
    for k, line in enumerate(lines[2:], start=1):
        mean = np.mean([float(r["return"]) for r in rows if r["episode"] == str(k)])
        assert line.split()[0] == str(k) and float(line.split()[1]) == pytest.approx(mean, abs=0.06)
    assert len(lines) == 2 + episodes and set(os.listdir(folder)) == FILES
    return lines


def test_eval_prints_a_table_that_agrees_with_the_run(short_run, tmp_path):
    check_eval(short_run, tmp_path / "rows.csv")                          # as many tasks as the run's own
    check_eval(short_run, tmp_path / "rows.csv", split="ood")
    check_eval(short_run, tmp_path / "rows.csv", "--eval-tasks", 3, tasks=3)


def test_eval_can_sample_actions_as_algorithm_1_does(short_run, tmp_path):
    result = cli("--eval", short_run, "--episodes", 2, "--sample", "--csv", tmp_path / "rows.csv")
    assert result.returncode == 0 and "200 steps, sampled actions:" in result.stdout.splitlines()[0]
    returns = [float(row["return"]) for row in csv_rows(tmp_path / "rows.csv")]
    envs = trmrl.make_tasks("halfcheetah_vel", 2, 0, "test")
    trials = trmrl.collect(trmrl.load_agent(short_run), envs, 2, True, trmrl.TEST_SEED)
    assert returns == pytest.approx(trials.reward.reshape(4, 200).sum(axis=1), abs=0.01)
    mean = trmrl.collect(trmrl.load_agent(short_run), envs, 2, False, trmrl.TEST_SEED)
    assert np.abs(returns - mean.reward.reshape(4, 200).sum(axis=1)).min() > 0.1


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
    assert np.array_equal(trmrl.load_agent(short_run / "agent.pt").log_std, agent.log_std)


def test_two_threads_give_the_same_result_twice():
    weights = []
    for _ in range(2):
        torch.set_num_threads(2)                                          # the tasks ask for this number
        agent, envs = make_agent(17, 6, d_model=64, minibatch=200), trmrl.make_tasks("halfcheetah_vel", 4)
        assert len(envs.datas) == 2
        torch.set_num_threads(1)                                          # many small steps: slow on two
        trials = trmrl.collect(agent, envs, 1, True, 0)
        torch.set_num_threads(2)
        trmrl.ppo_update(agent, trmrl.make_optimizer(agent, agent.config), trials,
                         replace(agent.config, epochs=1), torch.Generator().manual_seed(0))
        weights.append(torch.cat([p.flatten() for p in agent.parameters()]))
    assert torch.equal(*weights)


def test_threads_serve_the_physics_and_the_update_and_leave_the_policy_one(tmp_path, monkeypatch):
    counts = {}
    for owner, name in ((trmrl.Agent, "step"), (trmrl, "ppo_update"), (trmrl, "meta_test")):
        def counted(*args, name=name, whole=getattr(owner, name), **options):
            counts.setdefault(name, set()).add(torch.get_num_threads())
            return whole(*args, **options)
        monkeypatch.setattr(owner, name, counted)
    folder = str(tmp_path / "run")
    assert trmrl.main([*TINY, "--threads", "2", "--total-steps", "1", "--run-dir", folder]) == 0
    assert counts == {"step": {1}, "ppo_update": {2}, "meta_test": {2}}   # which steps in one again
    assert len(trmrl.make_tasks("halfcheetah_vel", 4).datas) == 2


def test_tasks_in_threads_take_the_same_steps():
    paths = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        envs, rng = trmrl.make_tasks("halfcheetah_vel", 7, seed=1), np.random.default_rng(0)
        assert len(envs.datas) == threads and envs.chunk == (7, 4, 3)[threads - 1]
        envs.reset(seed=2)
        paths.append([envs.step(rng.uniform(-1, 1, (7, 6)))[0] for _ in range(20)])
        envs.close()
    assert np.array_equal(paths[0], paths[1]) and np.array_equal(paths[0], paths[2])


def test_a_run_from_python_is_the_one_from_the_shell(short_run, tmp_path):
    settings = [*TINY, "--total-steps", 2400, "--eval-every", 2, "--run-dir", tmp_path / "run"]
    assert cli(*settings).returncode == 0
    for name in ("progress.csv", "eval.csv"):
        assert csv_rows(tmp_path / "run" / name) == csv_rows(short_run / name)


@pytest.mark.parametrize("kind", trmrl.AGENTS)
def test_the_same_seed_is_the_same_run_and_another_is_not(kind, tmp_path, monkeypatch):
    config = trmrl.Config(**SMALL, env="points", agent=kind, num_tasks=4, total_steps=480, minibatch=80)
    met, collect = [], trmrl.collect
    monkeypatch.setattr(trmrl, "collect", lambda *a, tasks=None, **k: met.append(tasks) or
                        collect(*a, tasks=tasks, **k))
    for name, seed in (("one", 1), ("again", 1), ("another", 2)):
        torch.manual_seed(len(name))                                      # global generators have no say
        np.random.seed(len(name))
        trmrl.train(replace(config, seed=seed, run_dir=str(tmp_path / name)), make_points)
    for name in ("progress.csv", "eval.csv"):
        one, again, another = (csv_rows(tmp_path / x / name) for x in ("one", "again", "another"))
        assert one and one == again and one != another
    tasks = np.array([x for x in met if x is not None]).reshape(3, 12)    # of three iterations
    assert np.array_equal(tasks[0], tasks[1]) and len(np.unique(tasks)) == 24


@pytest.mark.parametrize("kind", ["rl2", "oracle"])
def test_the_baselines_are_trained_stopped_resumed_and_evaluated_alike(kind, tmp_path, monkeypatch):
    command = [*(TINY_RL2 if kind == "rl2" else TINY), "--agent", kind, "--total-steps", 1200,
               "--reward-scale", 0, "--run-dir"]
    assert cli(*command, tmp_path / "whole").returncode == 0
    with monkeypatch.context() as patch:                                  # stopped in the second iteration
        iterate = trmrl.iterate
        patch.setattr(trmrl, "iterate", lambda run, *a: sys.exit(130) if run.iteration else iterate(run, *a))
        assert cli(*command, tmp_path / "run").returncode == 130
    assert len(csv_rows(tmp_path / "run" / "progress.csv")) == 1
    result = cli("--resume", tmp_path / "run")
    assert result.returncode == 0 and kind in result.stdout and "iterations 1 to 3" in result.stdout
    for name in ("progress.csv", "eval.csv"):
        assert csv_rows(tmp_path / "run" / name) == csv_rows(tmp_path / "whole" / name)
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    lines = check_eval(tmp_path / "run", tmp_path / "rows.csv", split="ood", episodes=2)
    assert lines[0].startswith(kind)


BAD = [line.split() for line in """
    --env walker
    --env ml1_juggle
    --agent maml
    --nonsense 1
    --device cuda:99
    --device abacus
    --device meta
    --heads 3
    --memory-length 0
    --minibatch 999999
    --lr -1
    --gamma 1.5
    --gamma nan
    --total-steps 0
    --num-tasks 1000000000000000000000
    --seed -1
    --lr fast
    --layers 2.5
    --preset huge
    --tag a/b
    --split ood
    --eval /nowhere/agent.pt
    --d-model 10 --heads 4
    --d-model 15 --heads 3
    --resume /nowhere
    --sample
    --memory 3
    --init-std inf
    --eval /nowhere --seed 3
    --eval /nowhere --episodes 0
    --resume /nowhere --lr 0.1
    --agent oracle --minibatch 999999
    --agent rl2 --layers 2
    --env walker --preset paper
""".strip().splitlines()]


@pytest.mark.parametrize("args", BAD, ids=" ".join)
def test_bad_settings_are_refused_in_one_line(args, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trmrl, "iterate", lambda *args: sys.exit("it runs"))
    threads = torch.get_num_threads()
    assert trmrl.main(args) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("trmrl.py: ") and err.count("\n") == 1 and len(err) > 25
    assert not list(tmp_path.iterdir())
    torch.set_num_threads(threads)


@pytest.mark.parametrize("typed, words", [
    ("--endless --gamma 1", ["--gamma below 1"]),
    ("--reward-scale 0 --gamma 1", ["--gamma below 1"]),
    ("--blur 0.1", ["--blur has no meaning with --env halfcheetah_vel"]),
    ("--env walker", ["walker", "halfcheetah_vel", "ant_dir", "ml1_reach", "ml45_train"]),
    ("--agent maml", ["maml", "trmrl", "rl2", "oracle"]),
    ("--heads 3", ["--heads 3", "--d-model 64"]),
    ("--device abacus", ["abacus", "cpu"]),
    ("--minibatch 999999", ["8000"]),
    ("--split ood", ["--split has no meaning without --eval"]),
    ("--agent rl2 --keep-memory", ["--keep-memory", "rl2"]),
    ("--eval /nowhere --seed 3", ["--seed has no meaning with --eval"]),
    ("--resume /nowhere --lr 0.1", ["--lr has no meaning with --resume"])])
def test_messages_say_what_to_type_instead(typed, words, capsys, monkeypatch):
    monkeypatch.setattr(trmrl, "iterate", lambda *args: sys.exit("it runs"))
    assert trmrl.main(typed.split()) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_an_existing_run_is_never_overwritten(short_run):
    before = {p.name: p.read_bytes() for p in short_run.iterdir()}
    result = cli(*TINY, "--total-steps", 400, "--run-dir", short_run)
    assert result.returncode == 2 and "--resume" in result.stderr and result.stderr.count("\n") == 1
    assert before == {p.name: p.read_bytes() for p in short_run.iterdir()}


@pytest.mark.parametrize("typed, words", [
    ("", "transformer layers (default: 1)"), ("--preset paper", "transformer layers (default: 4)"),
    ("--agent rl2", "per gradient step (default: 800)"), ("--env ant_dir", "discount (default: 0.97)"),
    ("--env ml1_door_open", "tasks of a meta-test (default: 50)"), ("", "--tfixup, --no-tfixup"),
    ("--env ml45_train", "over all processes (default: 45)")])
def test_help_shows_the_values_that_apply(typed, words):
    assert words in " ".join(cli("--help", *typed.split()).stdout.split())


def test_every_preset_can_be_started():
    for env, preset, kind in itertools.product(["ml1_push", *trmrl.PRESETS.keys() - {"ml1"}],
                                               ["default", "paper"], trmrl.AGENTS):
        _, config = trmrl.parse(["--env", env, "--preset", preset, "--agent", kind])
        trmrl.check(config)
        trial = config.episodes_per_trial * (300 if env.startswith("ml") else 200)
        assert config.minibatch <= config.num_tasks * trial


def test_import_does_nothing(tmp_path):
    code = """if True:
        import os, random, signal, sys, time, gymnasium, mujoco, numpy, torch
        def world():
            return str((torch.get_num_threads(), torch.get_rng_state().tolist(), numpy.random.get_state(),
                        random.getstate(), torch.get_default_dtype(), numpy.geterr(), dict(os.environ),
                        [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], os.listdir()))
        before, began = world(), time.time()
        import trmrl
        assert time.time() - began < 1 and world() == before
        assert "metaworld" not in sys.modules
    """
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                            env={**os.environ, "PYTHONPATH": str(HERE)})
    assert result.returncode == 0 and not result.stdout and not result.stderr, result.stderr


# ---- nothing is lost -------------------------------------------------------------------------------------

def same_weights(a, b):
    a, b = (torch.load(f / "agent.pt", weights_only=True)["weights"] for f in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def start(*command, **env):
    """A Python; several of them find each other even where the machine's own name leads nowhere."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", **env}
    return subprocess.Popen([sys.executable, *map(str, command)], env=env, cwd=HERE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def start_run(folder, *extra):
    return start("trmrl.py", *TINY, "--total-steps", 2400, "--eval-every", 2, "--run-dir", folder, *extra)


def wait_for_rows(process, folder, rows=1):
    """Until a run's progress.csv has so many."""
    began = time.monotonic()
    while not (folder / "progress.csv").exists() or len(csv_rows(folder / "progress.csv")) < rows:
        assert process.poll() is None and time.monotonic() - began < 120
        time.sleep(0.01)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(short_run, tmp_path):
    """Killed twice, at random moments of an iteration; TRMRL_LONG_TESTS=1 kills ten times."""
    rng, folder = np.random.default_rng(), tmp_path / "run"
    process, rows = start_run(folder, "--checkpoint-every", "1"), 0
    for _ in range(10 if os.environ.get("TRMRL_LONG_TESTS") else 2):
        wait_for_rows(process, folder, min(rows, 4) + 1)
        time.sleep(rng.uniform(0.0, 0.5))
        process.kill()
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)                 # 0: it was faster
        rows = len(csv_rows(folder / "progress.csv"))
        process = start("trmrl.py", "--resume", folder)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    for name in ("progress.csv", "eval.csv"):
        assert csv_rows(folder / name) == csv_rows(short_run / name)
    assert same_weights(folder, short_run)
    result = cli("--resume", folder)
    assert result.returncode == 0 and "iterations 6 to 6" in result.stdout


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

    def spy(run, only=""):
        saves.extend([] if only else [run.iteration])
        save(run, only)

    monkeypatch.setattr(trmrl.Run, "save", spy)
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
    wait_for_rows(process, folder)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode in (-signal.SIGINT, 130)
    assert trmrl.load(folder / "checkpoint.pt", "checkpoint")[0]["iteration"] >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_within_seconds_and_loses_no_finished_iteration(number, short_run, tmp_path):
    folder = tmp_path / "run"
    process = start_run(folder, "--epochs", 80, "--checkpoint-every", 1000)   # it does not come to that
    wait_for_rows(process, folder)
    process.send_signal(number)
    began = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 5 and process.returncode == 128 + number
    assert f"--resume {folder}" in err and "Traceback" not in err
    content, _ = trmrl.load(folder / "checkpoint.pt", "checkpoint")
    assert content["iteration"] == len(csv_rows(folder / "progress.csv")) < 6


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_does_not_silence_a_process_that_lost_the_others(when, tmp_path, monkeypatch):
    """torchrun sends it while the last state is saved, or just then."""
    iterate, save, folder, lost = trmrl.iterate, trmrl.Run.save, tmp_path / "run", []

    def lose(run, *args):
        if run.iteration:
            lost.append("the others")
            raise RuntimeError("Connection closed by peer")
        iterate(run, *args)

    def interrupted(run, only=""):
        if lost and when == "before":
            os.kill(os.getpid(), signal.SIGTERM)
        save(run, only)
        if lost and when == "after":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(trmrl, "iterate", lose)
    monkeypatch.setattr(trmrl.Run, "save", interrupted)
    monkeypatch.setattr(trmrl, "processes", lambda device=None: (0, 2))
    result = cli(*TINY, "--total-steps", 1600, "--checkpoint-every", 9, "--run-dir", folder)
    assert lost and result.returncode == 1 and result.stderr.count("\n") == 1
    assert "Connection closed" in result.stderr and f"--resume {folder}" in result.stderr
    assert trmrl.load(folder / "checkpoint.pt", "checkpoint")[0]["iteration"] == 1


def test_too_little_memory_ends_in_one_line_and_a_mistake_of_ours_does_not(monkeypatch):
    monkeypatch.setattr(trmrl, "train", lambda config: torch.empty(10**15))
    result = cli(*TINY)
    assert result.returncode == 1 and "memory" in result.stderr and result.stderr.count("\n") == 1
    monkeypatch.setattr(trmrl, "train", lambda config: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        cli(*TINY)


def test_a_full_disk_ends_in_one_line_and_keeps_the_last_checkpoint(short_run, tmp_path):
    folder = tmp_path / "run"
    room = (short_run / "checkpoint.pt").stat().st_size + 10_000          # but not for 60 iterations
    command = [*TINY, "--total-steps", "24000", "--eval-every", "1", "--checkpoint-every", "1",
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
        command = [*TINY, "--run-dir", f"{folder}/run"]
        code = f"""if True:
            import os, sys, trmrl
            save = trmrl.Run.save
            trmrl.Run.save = lambda run, only="": (os.getuid() or os.setuid(65534), save(run, only))
            sys.exit(trmrl.main({command}))
        """
        result = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert result.returncode == 1 and "denied" in result.stderr and folder in result.stderr
    assert result.stderr.startswith("trmrl.py: ") and result.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    result = cli(*TINY, "--run-dir", tmp_path / "file" / "run")
    assert result.returncode == 1
    assert result.stderr.startswith("trmrl.py: ") and result.stderr.count("\n") == 1


def test_a_deleted_folder_comes_back_with_all_that_was_done(short_run, tmp_path, monkeypatch):
    folder, iterate = tmp_path / "run", trmrl.iterate

    def delete(run, *args):
        if run.iteration == 2:
            shutil.rmtree(folder)
        iterate(run, *args)

    monkeypatch.setattr(trmrl, "iterate", delete)
    result = cli(*TINY, "--total-steps", 2400, "--eval-every", 2, "--run-dir", folder)
    assert result.returncode == 0 and not result.stderr and set(os.listdir(folder)) == FILES
    for name in ("progress.csv", "eval.csv"):
        assert csv_rows(folder / name) == csv_rows(short_run / name)


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
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    with monkeypatch.context() as patch:
        patch.setattr(trmrl, "ppo_loss", poisoned(agent, 1))
        metrics = trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())
    assert metrics["skipped"] == metrics["updates"] == 1 and all(math.isfinite(v) for v in metrics.values())
    assert all(torch.equal(a, b) for a, b in zip(before, agent.parameters()))
    assert all(torch.equal(a, state["exp_avg"]) for a, state in zip(moments, optimizer.state.values()))
    assert len(moments) == 2 and all(moment.any() for moment in moments)
    assert trmrl.ppo_update(agent, optimizer, trials, agent.config, torch.Generator())["skipped"] == 0
    assert not any(torch.equal(a, b) for a, b in zip(before, agent.parameters()))


def test_a_run_whose_gradients_are_mostly_not_finite_stops_with_advice(tmp_path, monkeypatch):
    config = trmrl.Config(**SMALL, env="points", num_tasks=5, total_steps=1000, minibatch=50,
                          run_dir=str(tmp_path / "run"))
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
    "a missing tensor": lambda c: c["weights"].pop("memory.phi.weight"),
    "a wrong shape": lambda c: c["weights"].update({"memory.phi.weight": torch.zeros(3, 3)}),
    "a number for a tensor": lambda c: c["weights"].update({"log_std": 3}),
    "complex numbers": lambda c: c["weights"].update({"log_std": torch.zeros(6, dtype=torch.complex64)}),
    "a sparse tensor": lambda c: c["weights"].update({"log_std": torch.zeros(6).to_sparse()}),
    "action bounds of two sizes": lambda c: c["weights"].update({"action_high": torch.ones(3)}),
    "an unknown setting": lambda c: c["config"].update(sword="sharp"),
    "an absurd setting": lambda c: c["config"].update(layers=10**9),
    "an astronomic setting": lambda c: c["config"].update(layers=10**400),
    "a huge agent": lambda c: c["config"].update(d_model=8192, d_ff=65536, layers=100),
    "a setting of another type": lambda c: c["config"].update(layers="two"),
    "another env": lambda c: c["config"].update(env="walker"),
    "another env's agent": lambda c: c["config"].update(env="ant_dir"),
    "another body": lambda c: c["weights"].update(
        {"normalizer.mean": torch.zeros(9), "normalizer.var": torch.ones(9),
         "memory.phi.weight": torch.zeros(16, 17)}),
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
    assert ("walker" if kind == "another env" else "agent.pt") in err
    assert not (tmp_path / "exploded").exists()
    if kind == "another version":
        assert "version 99" in err


@pytest.mark.parametrize("change", [
    lambda c: c.pop("optimizer"),
    lambda c: c.update(optimizer=5),
    lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.zeros(1)),
    lambda c: c["optimizer"]["state"][1].update(
        exp_avg_sq=torch.zeros(1).expand_as(c["optimizer"]["state"][1]["exp_avg"])),   # of one number
    lambda c: c["optimizer"]["state"][0].update(step=torch.zeros(0)),
    lambda c: c["optimizer"]["state"].pop(0),
    lambda c: c.update(iteration=-1),
    lambda c: c.update(iteration="two"),
    lambda c: c.update(csv=None),
    lambda c: c["weights"].update({"log_std": torch.zeros(1)}),
    None])
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
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    result = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_any_config_trains_or_is_refused(tmp_path):
    rng, trained, refused = np.random.default_rng(0), 0, 0
    choices = dict(
        agent=[*trmrl.AGENTS], memory_length=[1, 2, 7, 30, 0], layers=[1, 2, 5], heads=[1, 2, 4, 3],
        d_model=[12, 16, 2, 12, 3], d_ff=[1, 9, 40], tfixup=[True, False], keep_memory=[True, False],
        separate_value=[True, False], init_std=[0.01, 0.5, 3.0], gamma=[0.9, 0.0, 0.5, 1.0, 1.1],
        endless=[True, False], gae_lambda=[0.0, 0.5, 1.0], clip=[0.05, 0.5], epochs=[1, 3],
        num_tasks=[1, 3, 8],
        minibatch=[40, 7, 20, 1, 161], lr=[0.0, 1e-3, 0.5], value_lr=[0.0, 1e-3], final_lr=[0.0, 1.0],
        max_grad_norm=[1e-3, 10.0], value_coef=[0.0, 0.5], entropy_coef=[0.0, 0.1], reward_scale=[1e-3, 0.0],
        episodes_per_trial=[1, 2, 3], eval_every=[1, 5], eval_tasks=[1, 3], eval_episodes=[1, 2],
        final_episodes=[1, 2], checkpoint_every=[0, 1], seed=[0, 5, 2**31 - 1, -1])
    for i in range(300 if os.environ.get("TRMRL_LONG_TESTS") else 80):
        picks = {k: v[0] if rng.random() < 0.1 else v[rng.integers(len(v))] for k, v in choices.items()}
        batch = picks["num_tasks"] * picks["episodes_per_trial"] * 20
        transformer = picks["agent"] != "rl2"
        bad = (picks["memory_length"] < 1 or transformer and picks["d_model"] % picks["heads"] or
               transformer and picks["d_model"] % 2 or
               picks["gamma"] > 1 - 0.01 * (picks["endless"] or picks["reward_scale"] == 0) or
               not 2 <= picks["minibatch"] <= batch or picks["seed"] < 0)
        config = trmrl.Config(env="points", device="cpu", threads=1, run_dir=str(tmp_path / str(i)),
                              total_steps=2 * batch, **picks)
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
    assert trained > 9 and refused > 9


# ---- several processes (torchrun) ------------------------------------------------------------------------

TWO = """if True:  # what each of two processes does
    import atexit, glob, os, signal, sys
    import torch
    import test_trmrl, trmrl
    folder, rank = sys.argv[1], os.environ["RANK"]
    def look():  # after all that trmrl.py does when Python ends
        threads = [open(name).read().strip() for name in glob.glob("/proc/self/task/*/comm")]
        torch.save((torch.distributed.is_initialized(), threads), f"{folder}/{rank}-at-the-end.pt")

    atexit.register(look)
    collect, gather, update = trmrl.collect, trmrl.gather, trmrl.ppo_update
    config = trmrl.Config(**test_trmrl.SMALL, env="points", num_tasks=8, minibatch=80, epochs=2,
                          reward_scale=0.0)
    seen = {}

    def spy_collect(*args, tasks=None, **named):
        if tasks is not None:
            seen.update(tasks=tasks)
        return collect(*args, tasks=tasks, **named)

    def spy_gather(trials):
        seen.update(ours=vars(trials))
        return gather(trials)

    def spy_update(agent, optimizer, trials, config, generator):
        seen.update(trials=vars(trials), generator=generator.get_state(), config=config)
        seen.update(before={k: v.clone() for k, v in agent.state_dict().items()})
        seen.update(metrics=update(agent, optimizer, trials, config, generator), after=agent.state_dict())
        torch.save(seen, f"{folder}/{config.agent}-{rank}.pt")
        return seen["metrics"]

    trmrl.collect, trmrl.gather, trmrl.ppo_update = spy_collect, spy_gather, spy_update
    for kind in trmrl.AGENTS:
        settings = dict(agent=kind, total_steps=320, run_dir=f"{folder}/points-{kind}")
        trmrl.train(trmrl.replace(config, **settings), test_trmrl.make_points)
    trmrl.collect, trmrl.gather, trmrl.ppo_update = collect, gather, update
    assert trmrl.main([*test_trmrl.TINY, "--total-steps", "1600", "--eval-every", "2", "--run-dir",
                       f"{folder}/whole"]) == 0
    if rank == "0":
        trmrl.ppo_update = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(trmrl.main([*test_trmrl.TINY, "--total-steps", "1600", "--run-dir", f"{folder}/lost"]))
"""


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    """Two processes, as torchrun starts them, have gone through TWO: their folder, status, output, errors."""
    folder = tmp_path_factory.mktemp("two")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    processes = [start("-c", TWO, folder, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_PORT=port,
                       MASTER_ADDR="127.0.0.1") for rank in "01"]
    out, err = zip(*(process.communicate(timeout=120) for process in processes))
    return types.SimpleNamespace(folder=folder, status=[p.returncode for p in processes], out=out, err=err)


@pytest.mark.parametrize("kind", trmrl.AGENTS)
def test_two_processes_make_the_update_of_one(kind, two):
    a, b = (torch.load(two.folder / f"{kind}-{rank}.pt", weights_only=False) for rank in (0, 1))
    assert len(a["tasks"]) == len(b["tasks"]) == 4 and not np.isin(a["tasks"], b["tasks"]).any()
    assert not np.array_equal(a["ours"]["action"], b["ours"]["action"])
    both = {name: (torch.cat if torch.is_tensor(x) else np.concatenate)([x, b["ours"][name]])
            for name, x in a["ours"].items() if name != "info"}
    for name, x in both.items():                                          # each has all trials, in one order
        np.testing.assert_array_equal(a["trials"][name], x)
        np.testing.assert_array_equal(b["trials"][name], x)
    assert all(torch.equal(a[when][k], b[when][k]) for when in ("before", "after") for k in a["after"])
    config = a["config"]
    alone = trmrl.Agent(config, both["obs"].shape[2], -np.ones(2), np.ones(2))
    alone.load_state_dict(a["before"])
    generator = torch.Generator()
    generator.set_state(a["generator"])
    optimizer = trmrl.make_optimizer(alone, config)
    for group in optimizer.param_groups:
        group["lr"] = group["rate"]
    metrics = trmrl.ppo_update(alone, optimizer, trmrl.Trials(**both, info={}), config, generator)
    for name, x in alone.state_dict().items():
        torch.testing.assert_close(a["after"][name], x, rtol=0, atol=1e-6)
        changed = not torch.equal(x, a["before"][name])
        assert changed != (name.startswith("action_") or name == "memory.positions"), name
    assert metrics == pytest.approx(a["metrics"], rel=1e-3, abs=1e-6) and metrics["updates"] == 8
    seen = both["obs"].reshape(320, -1)
    np.testing.assert_allclose(a["after"]["normalizer.mean"], seen.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(a["after"]["normalizer.var"], seen.var(axis=0), atol=1e-5)


def test_of_two_processes_one_speaks_and_writes(two):
    assert not two.out[1] and sum("processes: 2, threads: 1" in line for line in two.out[0].splitlines()) == 5
    assert set(os.listdir(two.folder / "whole")) == FILES
    assert [int(r["step"]) for r in csv_rows(two.folder / "whole" / "progress.csv")] == [400, 800, 1200, 1600]
    tests = [(r["step"], r["split"]) for r in csv_rows(two.folder / "whole" / "eval.csv")]
    assert tests == [(s, x) for s in ("800", "1600") for x in ("test", "test", "ood", "ood")]
    assert cli("--eval", two.folder / "whole", "--episodes", 1).returncode == 0


def test_who_loses_the_other_process_ends_in_one_line(two):
    assert two.status == [-signal.SIGKILL, 1] and not two.err[0]
    assert two.err[1].startswith("trmrl.py: ") and two.err[1].count("\n") == 1
    assert f"--resume {two.folder / 'lost'}" in two.err[1]


def test_processes_part_before_python_ends(two):
    """A thread of gloo that lets go of a tensor while Python ends aborts it, once in forty times."""
    joined, threads = torch.load(two.folder / "1-at-the-end.pt")
    assert not joined and not [name for name in threads if "gloo" in name], threads


def test_who_leaves_the_others_himself_ends_without_a_word():
    code = "import trmrl; trmrl.processes('cpu'); trmrl.dist.destroy_process_group()"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = start("-c", code, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


def torchrun(*args):
    return start("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
                 "--nproc-per-node", 2, "trmrl.py", *args)


def test_a_run_of_torchrun_whose_process_is_killed_goes_on_as_if_nothing_had_happened(two, tmp_path):
    folder = tmp_path / "run"
    settings = [*TINY, "--total-steps", 1600, "--eval-every", 2, "--checkpoint-every", 1, "--run-dir", folder]
    process = torchrun(*settings)
    wait_for_rows(process, folder)
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
            os.kill(int(child), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    said = [line for line in err.splitlines() if f"--resume {folder}" in line]
    assert process.returncode == 1 and len(said) == 1, err
    done = len(csv_rows(folder / "progress.csv"))
    assert trmrl.load(folder / "checkpoint.pt", "checkpoint")[0]["iteration"] == done < 4
    process = torchrun("--resume", folder)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and len(out.splitlines()) == 1 + 4 - done, err
    for name in ("progress.csv", "eval.csv"):
        assert csv_rows(folder / name) == csv_rows(two.folder / "whole" / name)
    assert same_weights(folder, two.folder / "whole")


def test_every_process_tells_the_mistake_that_only_it_can_see(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    result = cli("--resume", tmp_path / "on-the-other-machine")
    assert result.returncode == 2 and "there is no" in result.stderr
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = cli("--device", "cuda", "--run-dir", tmp_path / "run")
    assert result.returncode == 2 and "'cuda:1' is not there" in result.stderr


@pytest.mark.parametrize("settings", [
    dict(num_tasks=3), dict(minibatch=41), dict(agent="rl2", minibatch=40), dict(agent="rl2", minibatch=120)],
    ids=str)
def test_work_that_two_processes_cannot_share_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(trmrl, "processes", lambda device=None: (0, 2))
    config = trmrl.Config(**SMALL, env="points", run_dir=str(tmp_path / "run"))
    config = replace(config, **{"num_tasks": 4, "minibatch": 40, "total_steps": 160, **settings})
    with pytest.raises(trmrl.UserError, match="multiples of 2") as error:
        trmrl.train(config, make_points)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


# ---- README.md -------------------------------------------------------------------------------------------

def measured(folder, goal):
    """What README.md says of a run, from its files; `goal`: a test return, reached after so many steps."""
    rows, progress = csv_rows(folder / "eval.csv"), csv_rows(folder / "progress.csv", without=())

    def returns(split, episode, step=progress[-1]["step"]):
        wanted = (split, str(episode), step)
        return [float(r["return"]) for r in rows if (r["split"], r["episode"], r["step"]) == wanted]

    minutes = {r["step"]: float(r["seconds"]) / 60 for r in progress}
    curve = {s: np.mean(returns("test", 1, s)) for s in minutes if returns("test", 1, s)}
    reached = next((s for s, mean in curve.items() if mean >= goal), None)
    first, second, *_, sixth = episodes = [returns("test", k) for k in range(1, 7)]
    return dict(first=np.mean(first), second=np.mean(second), sixth=np.mean(sixth), worst=np.min(episodes),
                ood=np.mean(returns("ood", 1) or [np.nan]), steps=int(reached) / 1e6 if reached else np.nan,
                minutes=minutes.get(reached, np.nan), whole=max(minutes.values()),
                speed=np.median([float(r["steps_per_second"]) for r in progress]),
                parameters=sum(p.numel() for p in trmrl.load_agent(folder).parameters()))


def run_row(env, goal, kind, name):
    """The row of README.md's table of an env, from the runs of one agent; a dash: a seed never got there."""
    runs = [measured(folder, goal) for folder in (HERE / "results" / env).glob(f"{kind}-seed*")]
    seeds, mean = [run["first"] for run in runs], {k: np.mean([run[k] for run in runs]) for k in runs[0]}
    return (f"| {name} | {len(runs)} | {mean['first']:.1f} ({min(seeds):.1f}, {max(seeds):.1f}) | "
            f"{mean['second']:.1f} | {mean['sixth']:.1f} | {min(run['worst'] for run in runs):.1f} | "
            + f"{mean['ood']:.1f} | " * (env == "halfcheetah_vel")
            + f"{mean['steps']:.2f} | {mean['minutes']:.1f} | {mean['whole']:.1f} | ".replace("nan", "-")
            + f"{mean['speed']:,.0f} | {mean['parameters']:,.0f} |")


@pytest.mark.parametrize("env, goal, kind, name", [
    ("halfcheetah_vel", -50, "trmrl", "TrMRL"), ("halfcheetah_vel", -50, "rl2", "RL^2"),
    ("halfcheetah_vel", -50, "oracle", "oracle"), ("ant_dir", 300, "trmrl", "TrMRL"),
    ("ant_dir", 300, "rl2", "RL^2"), ("ant_dir", 300, "oracle", "oracle")])
def test_the_readme_tells_what_the_runs_measured(env, goal, kind, name):
    assert (row := run_row(env, goal, kind, name)) in (HERE / "README.md").read_text(), row


def test_the_readme_compares_the_papers_claims_with_these_numbers():
    def mean(env, kind, goal):
        runs = [measured(folder, goal) for folder in (HERE / "results" / env).glob(f"{kind}-seed*")]
        return types.SimpleNamespace(**{k: np.mean([run[k] for run in runs]) for k in runs[0]})

    text = (HERE / "README.md").read_text()
    ours, theirs, told = (mean("halfcheetah_vel", kind, -50) for kind in ("trmrl", "rl2", "oracle"))
    ant = mean("ant_dir", "trmrl", 300)
    minutes = sorted(measured(folder, -50)["minutes"]
                     for folder in (HERE / "results" / "halfcheetah_vel").glob("trmrl-seed*"))
    assert len(minutes) == 3 and np.isfinite(minutes).all() and np.median(minutes) < 6.0
    first, median, last = (f"{x:.1f}" for x in minutes)
    closes = f"{100 * (ours.first + 150) / (told.first + 150):.0f} %"
    for claim in (f"HalfCheetahVel: {ours.first:.1f} and {ours.sixth:.1f} |",
                  f"return {ant.first:.0f}, standing", f"TrMRL closes {closes} of the distance",
                  f"-50 after {ours.steps:.2f} M steps, RL^2 after {theirs.steps:.2f} M",
                  f"in the end {ours.first:.1f}, RL^2 {theirs.first:.1f} |",
                  f"-50 after {first}, {median} and {last} minutes",
                  f"{ours.ood:.0f}, RL^2 {theirs.ood:.0f}, oracle {told.ood:.0f} |"):
        assert claim in text, claim


def arm_row(env, kind, name):
    """The row of README.md's table of MetaWorld, from the runs of one env and agent."""
    runs, settings = [], []
    for folder in (HERE / "results" / env).glob(f"{kind}-seed*"):
        config = trmrl.load_agent(folder).config
        settings.append(replace(config, seed=0))
        assert settings[0] == settings[-1]                                # or the mean means nothing
        rows, last = csv_rows(folder / "eval.csv"), csv_rows(folder / "progress.csv", without=())[-1]
        tests = [r for r in rows if (r["split"], r["step"]) == ("test", last["step"])]
        runs.append([np.mean([float(r[key]) for r in tests if r["episode"] == k]) for key, k in
                     (("success", "1"), ("success", "2"), ("return", "1"))] +
                    [float(last["train_success"]), int(last["step"]) / 1e6, float(last["seconds"]) / 60])
    first, second, returns, train, steps, minutes = np.mean(runs, axis=0)
    return (f"| {env} | {name} | {len(runs)} | {first:.0%} | {second:.0%} | {returns:,.0f} | {train:.0%} | "
            f"{steps:.1f} | {minutes:.0f} |")


@pytest.mark.parametrize("env", ["ml1_reach", "ml1_push", "ml45_train"])
def test_the_readme_tells_what_the_arms_reached(env):
    assert (row := arm_row(env, "trmrl", "TrMRL")) in (HERE / "README.md").read_text(), row


def test_the_readme_tells_what_sampled_actions_reach():
    files = [csv_rows(HERE / "results" / "ml1_reach" / f"sampled-seed{k}.csv") for k in (1, 2, 3)]
    success = [f"{100 * np.mean([float(row['success']) for row in rows]):.0f} %" for rows in files]
    points = np.mean([float(row["return"]) for rows in files for row in rows])
    assert [len(rows) for rows in files] == [50] * 3
    text = " ".join((HERE / "README.md").read_text().split())
    assert f"{success[0]}, {success[1]} and {success[2]}**, {points:,.0f} points" in text


def test_the_readme_tells_what_each_class_of_ml45_reached():
    rows, text = csv_rows(HERE / "results" / "ml45_train" / "classes.csv"), (HERE / "README.md").read_text()
    names, _, _ = trmrl.metaworld_goals("ml45_train")
    assert len(rows) == 5 * len(names) == 225
    for k, name in enumerate(names):
        mine = [row for row in rows if int(row["task"]) % 45 == k]
        success, points = (np.mean([float(row[key]) for row in mine]) for key in ("success", "return"))
        assert f"| {name.removesuffix('-v3')} | {success:.0%} | {points:,.0f} |" in text, name


ABLATIONS = {"L = 1, N = 5, 4 heads": "default/{}default", "N = 1": "memory/{}n1", "N = 25": "memory/{}n25",
             "L = 2": "tfixup/{}on-l2", "L = 4": "layers/{}l4", "L = 12": "tfixup/{}on-l12",
             "1 head": "heads/{}h1", "16 heads": "heads/{}h16", "L = 2, no T-Fixup": "tfixup/{}off-l2",
             "L = 12, no T-Fixup": "tfixup/{}off-l12"}


def ablation_row(name):
    """The row of README.md's table of ablations: the last tests of HalfCheetahVel's runs, and of Reach's."""
    def last(run, key):
        rows, config = csv_rows(run / "eval.csv"), json.loads((run / "config.json").read_text())
        assert int(rows[-1]["step"]) >= config["total_steps"], f"{run} is not finished"
        final = [r for r in rows if (r["split"], r["step"]) == ("test", rows[-1]["step"])]
        return np.mean([float(r[key]) for r in final])

    runs, arms = ([*(HERE / "results" / "ablations").glob(f"{ABLATIONS[name].format(prefix)}-seed*")]
                  for prefix in ("", "reach-"))
    seeds, success, points = ([last(run, key) for run in which] for which, key in (
        (runs, "return"), (arms, "success"), (arms, "return")))
    spread = f" ({min(seeds):.0f}, {max(seeds):.0f})" if len(seeds) > 1 else ""
    cheetah = f"{np.mean(seeds):.0f}{spread}" if seeds else "-"
    reach = f"{np.mean(success):.0%} | {np.mean(points):,.0f}" if arms else "- | -"
    return f"| {name} | {cheetah} | {len(seeds)} | {reach} |"


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_readme_tells_what_the_ablations_measured(name):
    assert (row := ablation_row(name)) in (HERE / "README.md").read_text(), row


def test_the_readmes_loop_makes_the_ablations_of_results():
    loops = re.findall(r"```bash\n(.*?)```", (HERE / "README.md").read_text(), flags=re.DOTALL)
    said = subprocess.run(["bash", "-uc", 'python() { echo "$@"; }\n' + loops[0]], capture_output=True,
                          text=True)
    assert len(loops) == 1 and said.returncode == 0 and not said.stderr, said.stderr
    made = {config.run_dir: config for config in (trmrl.parse(line.split()[1:])[1]
                                                  for line in said.stdout.splitlines())}
    there = sorted(path.parent for path in (HERE / "results" / "ablations").rglob("config.json"))
    assert len(made) == 40 and len(there) >= 17
    for run in there:
        again = str(run.relative_to(HERE)).replace("results", "runs", 1)
        assert again in made, run
        config, names = json.loads((run / "config.json").read_text()), asdict(trmrl.Config())
        wanted = asdict(made[again]) | dict(device="cpu", run_dir=config["run_dir"])
        assert {name: config.get(name, names[name]) for name in names} == wanted, run


def test_ctrl_c_ends_the_readmes_loop():
    [loop] = re.findall(r"```bash\n(.*?)```", (HERE / "README.md").read_text(), flags=re.DOTALL)
    for status, runs in ((130, 1), (2, 40)):                              # 2: this one is there already
        said = subprocess.run(["bash", "-c", f"python() {{ echo run; return {status}; }}\n{loop}"],
                              capture_output=True, text=True)
        assert said.stdout.count("run") == runs


def test_our_ants_go_both_ways_and_rarely_fall():
    falls, folders = 0, sorted((HERE / "results" / "ant_dir").glob("trmrl-seed*"))
    for folder in folders:
        envs = trmrl.make_tasks("ant_dir", 20, 0, "test")
        trials = trmrl.collect(trmrl.load_agent(folder), envs, 1, False, trmrl.TEST_SEED)
        first = trials.episode == 0
        late, along = first & (np.arange(200) >= 50), trials.info["x_velocity"] * envs.tasks
        for way in (1, -1):
            assert along[late & (envs.tasks == way)].mean() > 0.5         # m/s
        falls += (trials.terminated & first).sum()
    assert len(folders) == 3 and falls <= 14                             # 5 of 60 where they were trained


def test_the_readme_tells_what_the_benchmarks_measured():
    def shown(row):
        value = float(row["value"])
        return f"{value:,.0f} {row['unit']}".strip() if value >= 100 else f"{value:.2f} {row['unit']}".strip()

    text, results = (HERE / "README.md").read_text(), HERE / "results"
    cheetah, ant = (csv_rows(results / f"{name}.csv") for name in ("benchmark", "benchmark_ant_dir"))
    for row, other in zip(cheetah, ant, strict=True):
        assert row["what"] == other["what"] and f"| {row['what']} | {shown(row)} | {shown(other)} |" in text
    for row in csv_rows(results / "scaling.csv", without=()):
        assert f"{row['value']}: {int(row['steps_per_second']):,}" in text


def test_every_name_in_the_readme_exists():
    text = (HERE / "README.md").read_text()
    beside = text[text.index("## The paper beside the code"):text.index("## Where the paper")]
    places = {**vars(trmrl), **globals(), **plots.FIGURES, "Agent": make_agent(),
              "EpisodicMemory": make_agent().memory, "RecurrentMemory": make_agent(agent="rl2").memory}
    for line in beside.splitlines()[4:]:
        names = re.findall(r"`([^`]+)`", line.split(" | ")[-1])
        assert names or not line, line
        for name in names:
            owner, _, attribute = name.removeprefix("plots.py ").partition(".")
            assert owner in places and (not attribute or hasattr(places[owner], attribute)), name
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (HERE / path).exists(), path


def test_every_command_in_the_readme_is_understood():
    text = re.sub(r"\\\n\s+|(?<=\S)\n(?=\S)", " ", (HERE / "README.md").read_text())   # lines that go on
    typed = [shlex.split(line) for line in re.findall(r"\btrmrl\.py( --[^`#\n]*)", text) if "$" not in line]
    figures = re.findall(r"\bpython plots\.py ([a-z_]+)", text)
    assert len(typed) > 15 and {"film", "benchmark", "scaling"} <= {*figures}
    for args in typed:
        trmrl.check(trmrl.parse([x for x in args if x != "--help"])[1])
    assert {*figures} <= {*plots.FIGURES, *plots.OTHERS}


def test_the_readmes_family_of_ones_own_is_the_one_that_is_tested(tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```$", (HERE / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    block, = (x for x in blocks if "class PointMass" in x)
    for tested in (PointMass, make_points):
        assert inspect.getsource(tested) in block
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trmrl, "train", lambda config, make_tasks: calls.append((config, make_tasks)))
    exec(block, {"__name__": "readme"})                                   # with all its imports
    for config, make_tasks in calls:
        trmrl.check(config)
        assert make_tasks("points", 3, 0, "test").tasks.shape == (3, 1)


# ---- assignments: `python test_trmrl.py FOLDER FUNCTION ...` makes the student's copy --------------------

def blank(source, name):
    """The source with the body of one function (or Class.method) left for a student, its docstring kept."""
    place = ast.parse(source)
    for part in name.split("."):
        place, = (x for x in place.body if isinstance(x, (ast.FunctionDef, ast.ClassDef)) and x.name == part)
    if isinstance(place, ast.ClassDef):
        raise ValueError("a class")
    body = place.body[bool(ast.get_docstring(place)):]
    lines = source.splitlines(keepends=True)
    todo = f'{" " * body[0].col_offset}raise NotImplementedError("{name}: your turn")\n'
    return "".join(lines[:body[0].lineno - 1] + [todo] + lines[body[-1].end_lineno:])


def homework(folder, *names):
    """A folder with what the exercises need; the functions `names`, of trmrl.py or this file, left blank."""
    if Path(folder).exists():
        sys.exit(f"test_trmrl.py: {folder} is there already; name another folder")
    sources = {name: (HERE / name).read_text() for name in ("trmrl.py", "test_trmrl.py", "plots.py",
                                                             "requirements.txt", "README.md")}
    for name in names:
        for file in ("trmrl.py", "test_trmrl.py"):
            with contextlib.suppress(ValueError):                         # not in this file
                sources[file] = blank(sources[file], name)
                break
        else:
            sys.exit(f"test_trmrl.py: no function {name!r}; write it as in README.md: gae, Layer.forward")
    Path(folder).mkdir(parents=True)
    for name, text in sources.items():
        (Path(folder) / name).write_text(text)
    print(f"{folder}: {', '.join(names) or 'nothing'} left blank")


EXERCISES = re.findall(r'^\*\*\d+\. .*?Blank `([\w.]+)`.*?`pytest -k "([^"]+)"`',
                       (HERE / "README.md").read_text(), re.DOTALL | re.MULTILINE)


class Count:
    """A plugin of pytest that counts what became of the tests."""

    def __init__(self):
        self.failed, self.passed = 0, 0

    def pytest_runtest_logreport(self, report):
        self.failed += report.failed
        self.passed += report.passed and report.when == "call"


@pytest.mark.parametrize("name, tests", EXERCISES, ids=[name for name, _ in EXERCISES])
def test_the_tests_of_an_exercise_fail_where_its_function_is_blank(name, tests, monkeypatch):
    def your_turn(*args, **kwargs):
        raise NotImplementedError

    *owner, function = name.split(".")
    place = trmrl if hasattr(trmrl, name.split(".")[0]) else sys.modules[__name__]
    monkeypatch.setattr(getattr(place, owner[0]) if owner else place, function, your_turn)
    count = Count()
    pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "-k", tests, __file__], plugins=[count])
    assert count.failed and not count.passed


@pytest.mark.parametrize("names", [[name for name, _ in EXERCISES], []], ids=["homework", "solution"])
def test_exercises_are_graded_in_the_students_copy(names, tmp_path):
    assert 8 <= len(EXERCISES) <= 10
    homework(tmp_path / "copy", *names)
    typed = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-k", " or ".join(k for _, k in EXERCISES)]
    done = subprocess.run(typed, cwd=tmp_path / "copy", capture_output=True, text=True, timeout=200)
    failed, passed = (f" {word}" in done.stdout.splitlines()[-1] for word in ("failed", "passed"))
    assert (failed, passed) == (bool(names), not names), done.stdout


def test_a_students_copy_differs_in_the_chosen_functions_only(tmp_path):
    typed = [sys.executable, HERE / "test_trmrl.py", tmp_path / "copy", "gae", "Layer.one"]
    assert subprocess.run(typed, cwd=tmp_path, timeout=60).returncode == 0
    blanked, whole = ((folder / "trmrl.py").read_text() for folder in (tmp_path / "copy", HERE))
    assert blanked.count("your turn") == 2 and "delta = reward" not in blanked
    assert "The trial is the horizon" in blanked                          # what is asked for stays
    pairs = [*zip(ast.parse(whole).body, ast.parse(blanked).body, strict=True)]
    layer, = ((old, new) for old, new in pairs if getattr(old, "name", "") == "Layer")
    pairs += zip(layer[0].body, layer[1].body, strict=True)
    changed = [old.name for old, new in pairs if ast.dump(old) != ast.dump(new)]
    assert changed == ["Layer", "gae", "one"]
    for wrong in (("copy", "gae"), ("other", "gea"), ("other", "Layer"), ("other", "Layer.two")):
        with pytest.raises(SystemExit, match=f"{wrong[0]} is there already|'{wrong[1]}'"):
            homework(tmp_path / wrong[0], wrong[1])
    assert not (tmp_path / "other").exists()


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


def test_principal_components_are_the_eigenvectors_of_the_covariance():
    x = np.random.default_rng(0).normal(size=(200, 4)) @ np.diag([3.0, 2.0, 1.0, 0.5]) + 7.0
    components, shares = plots.pca(x, 3)
    values, vectors = np.linalg.eigh(np.cov(x.T))
    assert shares == pytest.approx(values[:0:-1] / values.sum())
    assert np.abs(components @ vectors[:, :0:-1]) == pytest.approx(np.eye(3), abs=1e-6)    # up to their signs


def test_the_regression_error_is_that_of_the_normal_equations():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(60, 3)), rng.normal(size=(3, 2))
    y = x @ w + 5.0
    assert plots.regression_error(x[:40], y[:40], x[40:], y[40:]) == pytest.approx(0.0, abs=1e-20)
    y = y + rng.normal(size=y.shape)
    ones = np.column_stack([x, np.ones(60)])
    solution = np.linalg.inv(ones[:40].T @ ones[:40]) @ ones[:40].T @ y[:40]
    expected = ((ones[40:] @ solution - y[40:]) ** 2).mean()
    assert plots.regression_error(x[:40], y[:40], x[40:], y[40:]) == pytest.approx(expected)


def test_densities_integrate_to_one_and_overlap_as_normal_distributions_do():
    rng, grid = np.random.default_rng(0), np.linspace(-6, 9, 1000)
    values = np.stack([rng.normal(size=4000), rng.normal(loc=2.0, size=4000)])
    estimate = plots.density(values[0], grid)
    assert np.trapezoid(estimate, grid) == pytest.approx(1.0, abs=1e-6)
    spread = 1 + 4000 ** -0.4                              # the kernel widens the normal distribution
    exact = np.exp(-grid ** 2 / (2 * spread)) / math.sqrt(2 * math.pi * spread)
    assert np.abs(estimate - exact).max() < 0.02
    figure, ax = plots.plt.subplots()
    overlap, = plots.task_distributions(ax, values, [1.0, 2.0])
    assert overlap == pytest.approx(math.erfc(1 / math.sqrt(2 * spread)), abs=0.02)     # 2 Phi(-distance / 2)
    plots.plt.close(figure)


def test_agents_of_ours_find_their_velocity_as_the_readme_says():
    targets = trmrl.make_tasks("halfcheetah_vel", 20, split="test").tasks
    steps = []
    for seed in (1, 2, 3):
        agent = trmrl.load_agent(HERE / "results" / "halfcheetah_vel" / f"trmrl-seed{seed}", device="cpu")
        velocity = plots.meet(agent, targets).info["x_velocity"]
        steps += [plots.settled(v, target, window=1) for v, target in zip(velocity, targets[:, 0])]
    assert len(steps) == 60 and None not in steps
    text = re.search(r"(\d+) of 60 \(20 test tasks, three seeds\), after (\d+) in the median",
                     (HERE / "README.md").read_text())
    assert abs(sum(k <= 20 for k in steps) - int(text[1])) <= 3           # on another kind of CPU
    assert abs(np.median(steps) - int(text[2])) <= 1


def test_steps_to_the_target_count_until_the_velocity_stays_there():
    reached = np.array([0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    assert plots.settled(reached, 1.0, window=1) == 2
    assert plots.settled(np.ones(6), 1.0) == 0
    assert plots.settled(np.append(reached, 0.0), 1.0, window=1) is None                 # and leaves it again
    # means of up to three steps: 0, 0, 1/3, 2/3, 1, 1
    assert plots.settled(reached, 1.0, window=3) == 4
    gait = 1.0 + 0.4 * np.resize([1.0, -1.0], 40)          # a swing about the target is none away from it
    assert plots.settled(gait, 1.0, window=1) is None and plots.settled(gait, 1.0) == 1


@pytest.mark.parametrize("layers", [1, 3])
def test_looking_inside_shows_what_the_agent_acted_on(layers):
    agent = awake(make_agent(2, 2, layers=layers, memory_length=4))
    trials = trmrl.collect(agent, make_points("points", 3), 2, sample=False, seed=0)       # 2 episodes of 20
    memories, weights = plots.look_inside(agent, trials, chunk=50)
    assert memories.shape == (layers + 1, 3, 40, 16) and weights.shape == (3, 40, 4)
    with torch.no_grad():
        assert np.allclose(agent.policy(torch.as_tensor(memories[-1])), trials.action, atol=1e-5)
    empty = np.arange(4) > np.arange(20)[:, None]          # at step t: memories of 0 to t steps before
    assert (np.isnan(weights) == np.concatenate([empty, empty])).all()
    assert np.nansum(weights, axis=2) == pytest.approx(1.0, abs=1e-5)
    # By hand, at the last step of the first task: its four memories, the last without action and reward.
    x = trials.memories[0, 36:40].clone()
    x[-1, agent.state_size:] = 0
    layer = agent.memory.transformer.layers[0]
    with torch.no_grad():
        e = agent.memory.phi(x) + agent.memory.positions
        assert np.allclose(memories[0, 0, 39], e[-1], atol=1e-5)
        q, k = layer.q(e)[-1].view(2, 8), layer.k(e).view(4, 2, 8)
        alpha = torch.einsum("hi,nhi->hn", q, k).div(math.sqrt(8)).softmax(dim=1).mean(dim=0)
    if layers == 1:
        assert np.allclose(weights[0, 39], alpha.flip(0), atol=1e-5)


@pytest.mark.parametrize("arrives, N, said", [
    (30, 4, []), (80, 4, ["no task reached\nits target"]),
    (10, 25, ["who arrived did so before\nthe memory was full"])])
def test_the_attention_of_who_never_arrives_or_too_early_to_compare_says_so(arrives, N, said):
    figure, axes = plots.plt.subplots(1, 3)
    velocity = np.tile(np.where(np.arange(80) < arrives, 0.0, 2.0), (3, 1))
    plots.attention(axes, np.full((3, 80, N), 1 / N), velocity, np.full(3, 2.0), shown=0)
    assert [text.get_text() for text in axes[2].texts] == said
    plots.plt.close(figure)


def test_the_last_layer_is_its_own_refinement():
    agent = make_agent(2, 2, layers=2)
    agent.policy = torch.nn.Linear(16, 2)                  # linear in e^L: only there is a regression exact
    trials = trmrl.collect(agent, make_points("points", 6), 2, sample=True, seed=0)
    representation, regression = plots.refinement_errors(agent, trials, train=4)
    assert representation[-1] == pytest.approx(0.0, abs=1e-5) and representation[0] > 1e-3
    assert regression[-1] < 1e-9 and regression[0] > 1e-6
    memories, _ = plots.look_inside(agent, trials)
    a, b = memories[0].reshape(-1, 16), memories[2].reshape(-1, 16)
    cosine = (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    assert representation[0] == pytest.approx(1 - cosine.mean(), abs=1e-5)


def test_one_seed_has_no_band_and_three_have_one():
    steps = np.array([100, 200])
    figure, ax = plots.plt.subplots()
    seeds = [(steps, np.array([-30.0, -20.0]) - k) for k in range(3)]
    plots.meta_training(ax, {"trmrl": seeds, "oracle": seeds[:1]}, "points")
    assert len(ax.collections) == 1
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["TrMRL (3 seeds)", "oracle (1 seed)"]
    assert ax.lines[0].get_ydata().tolist() == [-31.0, -21.0]
    assert (ax.lines[0].get_linestyle(), ax.lines[1].get_linestyle()) == ("-", ":")
    plots.plt.close(figure)


def test_adaptation_shows_the_mean_over_tasks_and_its_interval():
    tests = np.random.default_rng(0).normal(size=(3, 20, 6))               # seeds, tasks, episodes
    figure, ax = plots.plt.subplots()
    plots.adaptation(ax, {"trmrl": list(tests)}, "halfcheetah_vel")
    line, = [x for x in ax.lines if len(x.get_xdata()) == 6 and x.get_linestyle() == "-"]
    assert line.get_ydata() == pytest.approx(tests.mean(axis=(0, 1)))
    low, high = ax.collections[0].get_segments()[2][:, 1]                  # the bar of the third episode
    assert (low, high) == pytest.approx(tuple(trmrl.bootstrap(tests.mean(axis=0)[:, 2])))
    plots.plt.close(figure)


def test_no_two_curves_of_an_ablation_look_alike_in_grey():
    assert len({str(line) for _, line, _ in plots.VARIANTS}) == len(plots.VARIANTS) >= 4
    assert len({marker for _, _, marker in plots.VARIANTS}) == len(plots.VARIANTS)
    assert len({look["linestyle"] for look in plots.AGENTS.values()}) == 3


def pretend_run(folder, rows, **settings):
    """A run folder without an agent: config.json and eval.csv."""
    folder.mkdir(parents=True)
    config = trmrl.Config(**{"total_steps": 200, **settings})
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    lines = [",".join(map(str, row)) for row in rows]
    (folder / "eval.csv").write_text("\n".join(["step,split,task,episode,return,success", *lines, ""]))


def test_seeds_of_other_settings_and_unfinished_ones_are_left_out(tmp_path, capsys):
    done = [(100, "test", 0, 1, -9.0, ""), (200, "test", 0, 1, -5.0, "")]
    pretend_run(tmp_path / "a", done[:1], seed=4)
    pretend_run(tmp_path / "b", done, seed=1)
    pretend_run(tmp_path / "c", done, seed=1)
    pretend_run(tmp_path / "d", done, seed=2, threads=7, device="cuda", compile=True, checkpoint_every=3)
    pretend_run(tmp_path / "e", done, seed=3, heads=2)
    pretend_run(tmp_path / "f", done, seed=3, tag="mine")
    pretend_run(tmp_path / "g", [], seed=5)
    pretend_run(tmp_path / "h", done, seed=1, agent="oracle")
    envs = plots.group(plots.find_runs([tmp_path]), lambda config: config.agent, "figure")
    names = {agent: [run.path.name for run in seeds] for agent, seeds in envs["halfcheetah_vel"].items()}
    assert names == {"trmrl": ["b", "d"], "oracle": ["h"]}
    said = capsys.readouterr().out
    whys = {"a": "not finished", "c": "seed", "e": "settings", "f": "tag", "g": "no meta-test"}
    for name, why in whys.items():
        assert re.search(f"left out {tmp_path / name}: .*{why}", said), (name, said)


def test_success_is_shown_where_a_family_has_one(tmp_path):
    pretend_run(tmp_path / "a", [(200, "test", k, 1, 70.0, k % 2) for k in range(4)], env="ml1_reach")
    run, = plots.find_runs([tmp_path])
    assert plots.measure_of([run]) == "success"
    assert plots.learning_curve(run.rows, "success")[1].tolist() == [0.5]
    assert plots.last_test(run.rows, "success") is None                    # one episode, not six
    assert plots.last_test(run.rows, "success", episodes=1).tolist() == [[0.0], [1.0], [0.0], [1.0]]


def test_the_last_test_is_that_of_the_last_step():
    rows = [{"step": step, "split": split, "task": task, "episode": k, "return": step + 10 * task + k}
            for step in (100, 200) for split in ("test", "ood") for task in (0, 1) for k in range(1, 7)]
    assert plots.last_test(rows, "return").tolist() == [[201, 202, 203, 204, 205, 206],
                                                        [211, 212, 213, 214, 215, 216]]
    assert plots.last_test(rows[:-1], "return", "ood") is None             # an episode is missing


@pytest.fixture(scope="module")
def tiny_runs(tmp_path_factory):
    """A run of two layers, and copies of it that pass for the runs of all ablations."""
    root = tmp_path_factory.mktemp("plots")
    run = root / "halfcheetah_vel" / "trmrl-seed1"
    config = trmrl.Config(device="cpu", layers=2, d_model=16, heads=2, d_ff=32, num_tasks=1, total_steps=1,
                          eval_tasks=2, run_dir=str(run))
    trmrl.train(config)
    for which, change in {"default": {}, "memory": {"memory_length": 2}, "layers": {"layers": 3},
                          "heads": {"heads": 4}, "tfixup": {"tfixup": False}}.items():
        common = {"layers": 5} if which == "tfixup" else {}
        for name, settings in {"a": common, "b": common | change}.items():
            folder = root / "ablations" / which / name
            shutil.copytree(run, folder)
            content = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**content, **settings}))
    return root


def width(path):
    return int.from_bytes(path.read_bytes()[16:20], "big")                 # of a PNG


def test_bare_plots_draws_every_figure(tiny_runs, tmp_path, capsys):
    assert plots.main(["--runs", str(tiny_runs), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "needs" not in said.out and not said.err, said
    assert {path.stem for path in tmp_path.iterdir()} == set(plots.FIGURES)
    for path in tmp_path.iterdir():
        assert path.stat().st_size > 10_000 and 600 < width(path) <= 1100, path            # for a README
        assert re.search(rf"{path}: from .*trmrl-seed1|{path}: from .*ablations/", said.out), path
    assert f"refinement.png: from {tiny_runs}/halfcheetah_vel/trmrl-seed1\n" in said.out
    used = {line.split(":")[0].split("/")[-1]: line for line in said.out.splitlines()}
    for which, also in {"tfixup": [], "layers": ["default", "tfixup"], "heads": ["default"]}.items():
        line = used[f"ablation_{which}.png"]
        assert set(re.findall("ablations/([a-z]+)", line)) == {which, *also}
        assert ("tfixup/b" in line) == (which == "tfixup")                 # without T-Fixup


def test_what_is_missing_comes_with_a_command_that_works(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    assert plots.main([*plots.FIGURES, "film", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [*plots.FIGURES, "film"]
    for line in lines:
        command = line[line.index("python trmrl.py") :].split(";")[0]
        _, config = trmrl.parse(shlex.split(command)[2:])
        trmrl.check(config)
    assert trmrl.parse(shlex.split(lines[3][lines[3].index("python") :])[2:])[1].layers == 4     # refinement
    pretend_run(tmp_path / "runs" / "ablations" / "tfixup" / "a", [(200, "test", 0, 1, -9.0, "")], layers=2)
    assert plots.main(["ablation_tfixup", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "no HalfCheetahVel off, L = 2, no HalfCheetahVel on, L = 12" in said and "off, L = 12;" in said
    assert "python trmrl.py --env halfcheetah_vel --total-steps 600000 --layers 2 --no-tfixup --run" in said
    assert plots.main(["--runs", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_damaged_runs_are_named_and_the_next_is_taken(tiny_runs, tmp_path, capsys):
    good = tiny_runs / "halfcheetah_vel" / "trmrl-seed1"
    for name in ("a-cut", "b-nan", "c-good", "d-half", "e-short", "f-none"):
        shutil.copytree(good, tmp_path / name)
    agent = (good / "agent.pt").read_bytes()
    (tmp_path / "a-cut" / "agent.pt").write_bytes(agent[:len(agent) // 2])
    content = torch.load(good / "agent.pt", weights_only=True)
    content["weights"]["log_std"][0] = torch.nan
    torch.save(content, tmp_path / "b-nan" / "agent.pt")
    text = (good / "eval.csv").read_text()
    (tmp_path / "d-half" / "eval.csv").write_text(text[:-3])               # a line that is not whole
    (tmp_path / "e-short" / "eval.csv").write_text("".join(text.splitlines(keepends=True)[:-1]))
    (tmp_path / "f-none" / "eval.csv").unlink()
    assert plots.main(["attention", "meta_training", "--runs", str(tmp_path), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert f"attention.png: from {tmp_path}/c-good\n" in said.out
    assert (tmp_path / "meta_training.png").exists()
    assert all(f"attention: skipped {tmp_path}/{name}" in said.err for name in ("a-cut", "b-nan"))
    assert f"skipped {tmp_path}/d-half: damaged (ValueError('eval.csv ends within a line'))" in said.err
    assert "Traceback" not in said.err
    assert f"skipped {tmp_path}/e-short: damaged (ValueError('eval.csv lacks rows'))" in said.err
    assert f"skipped {tmp_path}/f-none: it has no eval.csv" in said.err


def test_a_meta_test_is_whole_with_the_same_tasks_and_all_their_episodes():
    def rows(step, tasks, episodes, split="test"):
        return [{"step": step, "split": split, "task": i, "episode": k + 1}
                for i in range(tasks) for k in range(episodes)]

    good = [*rows(100, 4, 1), *rows(100, 4, 1, "ood"), *rows(200, 4, 6), *rows(200, 4, 6, "ood")]
    assert plots.whole(good) and plots.whole([])
    assert not plots.whole(good[:-1]) and not plots.whole(good[:-6])      # an episode, a task,
    assert not plots.whole(good[:-24])                                    # a split
    assert not plots.whole(good[1:])


def test_figures_are_of_a_finished_run_without_a_tag_or_say_so(tmp_path, capsys, monkeypatch):
    config, agent = trmrl.Config(total_steps=2_000_000), make_agent()
    young, old, tagged = (
        plots.Found(tmp_path / name, replace(config, tag=tag), [{"step": step}])
        for name, tag, step in (("young", "", 500_000), ("old", "", 2_000_000), ("tagged", "me", 2_000_000)))
    monkeypatch.setattr(trmrl, "load_agent", lambda path: agent)
    for runs, said in (([tagged, young, old], f"{old.path}\n"), ([tagged], f"{tagged.path}\n"),
                       ([tagged, young], f"{young.path} after 0.5 of 2 M steps\n")):
        agent.trained_steps = 500_000
        figure = plots.plt.figure()
        plots.draw_from_agent("latent", lambda agent, out: figure, "", runs, tmp_path)
        assert capsys.readouterr().out.endswith(f"from {said}")
        name = said.split()[0].split("/")[-1]
        assert [text.get_text() for text in figure.texts] == [f"{name}, 0.5 of 2 M steps"]
        agent.trained_steps = 0                            # stopped before the first iteration was over
        assert "needs a trained agent" in plots.draw_from_agent("latent", None, "", runs, tmp_path)
        assert "untrained" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["test", "ood"])
def test_what_not_adapting_gets_is_marked_where_it_is_known(split):
    figure, ax = plots.plt.subplots()
    plots.adaptation(ax, {"trmrl": [np.full((4, 6), -30.0)]}, "halfcheetah_vel", split=split)
    marked = [line.get_label() for line in ax.lines if list(line.get_ydata()) == [-150, -150]]
    assert marked == (["without adapting"] if split == "test" else [])
    plots.plt.close(figure)


def test_the_default_looks_the_same_in_all_ablations(tiny_runs, tmp_path, monkeypatch):
    looks = {}
    monkeypatch.setattr(plots, "draw_tests", lambda *args, **named: looks.update(args[6]))
    for which, default in (("memory", 5), ("heads", 4), ("layers", 1)):
        looks.clear()
        runs = plots.find_runs([tiny_runs])
        runs = [run._replace(config=replace(run.config, layers=1 if run.ablation == "default" else 3))
                for run in runs]
        plots.draw_ablation(which, runs, tmp_path)
        assert list(looks) == sorted(looks) and len(looks) > 1
        assert (looks[default]["color"], looks[default]["marker"]) == (plots.VARIANTS[0][0], "o")
        assert len({look["color"] for look in looks.values()}) == len(looks)


def test_a_figure_that_fails_leaves_the_others_alone(tiny_runs, tmp_path, capsys, monkeypatch):
    def broken(runs, out):
        raise ZeroDivisionError("broken")

    monkeypatch.setitem(plots.FIGURES, "latent", broken)
    names = ["latent", "meta_training"]
    assert plots.main([*names, "--runs", str(tiny_runs), "--out", str(tmp_path)]) == 1
    assert (tmp_path / "meta_training.png").exists() and "latent: not drawn" in capsys.readouterr().err


@pytest.mark.parametrize("env", ["halfcheetah_vel", "ant_dir"])
def test_the_film_shows_the_body_where_it_was(env, tmp_path, monkeypatch):
    from PIL import Image
    family = trmrl.FAMILIES[env]
    spaces = trmrl.make_tasks(env, 1)
    agent = make_agent(*spaces.single_observation_space.shape, *spaces.single_action_space.shape, env=env)
    states, shown, advance = [], [], family.advance

    def spy(self, actions):
        result = advance(self, actions)
        states.append(self.state[0].copy())
        return result

    def paint(model, qpos):
        shown.append(qpos)
        return np.random.default_rng(0).integers(0, 255, (len(qpos), 27, 48, 3), dtype=np.uint8)

    monkeypatch.setattr(family, "advance", spy)
    monkeypatch.setattr(plots, "photograph", paint)
    figure = plots.draw_film(agent, tmp_path)
    plots.plt.close(figure)
    qpos, skipped = shown[0], family.skipped_qpos
    true = np.array(states)[:len(qpos), 1 : 1 + qpos.shape[1]]
    assert np.allclose(qpos[:, skipped:], true[:, skipped:], atol=1e-5)
    assert np.allclose(np.diff(qpos[:, 0]), np.diff(true[:, 0]), atol=1e-5) and np.ptp(true[:, 0]) > 1e-2
    if skipped == 2:                                       # sideways: all but for jolts within a step
        assert np.median(np.abs(np.diff(qpos[:20, 1] - true[:20, 1]))) < 2e-3 < np.ptp(true[:, 1])
    with Image.open(tmp_path / "film.gif") as gif:
        assert gif.n_frames == math.ceil(len(shown[0]) / 2) and gif.info["duration"] == 100
    assert "m/s" in figure.axes[3].get_title() and figure.get_suptitle().endswith(("2.0 m/s", "backward"))


def test_where_nothing_can_render_the_film_says_so_in_one_line(tiny_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "paint")
    assert plots.main(["film", "--runs", str(tiny_runs), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 1 and "film: needs off-screen OpenGL" in said.out and not said.err
    assert re.search(r"tried: MUJOCO_GL=paint \(.*paint", said.out)       # and what MuJoCo said to that
    assert not list(tmp_path.iterdir())


def test_rendered_frames_show_the_body():
    model = trmrl.make_tasks("halfcheetah_vel", 1).model
    qpos = np.zeros((2, model.nq))
    qpos[1, 2] = 1.0                                       # head up
    frames = plots.photograph(model, qpos)
    if isinstance(frames, str):
        pytest.skip("no off-screen OpenGL here")
    assert frames.shape == (2, 210, 480, 3) and (frames[0] != frames[1]).any(axis=2).mean() > 0.005


def test_scaling_changes_one_size_at_a_time(tmp_path, monkeypatch):
    seen = []

    def stopwatch(config, envs, agent):
        seen.append((config, len(agent.memory.transformer.layers), envs.num_envs))
        return (1.0, 5.0) if len(seen) < 5 else (2.0, 3.0)                # the best of two rounds: 1, 3

    monkeypatch.setattr(plots, "iteration_seconds", stopwatch)
    rows = plots.scaling("cpu", {"layers": (1, 3), "d_model": (64, 32), "num_tasks": (20, 2)}, rounds=2)
    assert [(r["setting"], r["value"]) for r in rows] == [
        ("layers", 1), ("layers", 3), ("d_model", 64), ("d_model", 32), ("num_tasks", 20), ("num_tasks", 2)]
    assert [r["steps_per_second"] for r in rows] == [2000] * 5 + [200]      # 20 tasks x 2 x 200 steps in 4 s
    assert [(c.d_model, c.d_ff, layers, tasks) for c, layers, tasks in seen] == [
        (64, 256, 1, 40), (64, 256, 3, 40), (32, 128, 1, 40), (64, 256, 1, 4)] * 2         # the preset once
    monkeypatch.setattr(plots, "scaling", lambda device: rows)
    assert plots.main(["scaling", "--out", str(tmp_path)]) == 0
    written = csv_rows(tmp_path / "scaling.csv", without=())
    assert [int(r["steps_per_second"]) for r in written] == [2000] * 5 + [200]


def test_one_epoch_is_timed_and_stands_for_all(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 20.0, 23.0, 25.0])                       # began, collected, updated; twice
    monkeypatch.setattr(plots.time, "perf_counter", lambda: next(clock))
    epochs, update = [], trmrl.ppo_update
    monkeypatch.setattr(trmrl, "ppo_update", lambda *args: epochs.append(args[3].epochs) or update(*args))
    agent = make_agent(2, 2, env="points", epochs=8, minibatch=20, num_tasks=2)
    shapes, collect = [], trmrl.collect
    monkeypatch.setattr(trmrl, "collect", lambda *args: shapes.append(args[1].num_envs) or collect(*args))
    assert plots.iteration_seconds(agent.config, make_points("points", 4), agent) == (3.0, 16.0)
    assert epochs == [1, 1] and shapes == [4, 4]                          # two episodes side by side
    assert plots.collect(agent, make_points("points", 4)).reward.shape == (2, 40)


def test_speeds_are_the_best_of_rounds_in_turn_until_it_is_late(monkeypatch):
    calls, works = [], {"a": (lambda: calls.append("a"), 12), "b": (lambda: calls.append("b"), 24)}
    for deadline, rounds in ((99.0, 3), (8.5, 2), (4.0, 1)):              # a round takes some 3.6 s
        clock = itertools.count()
        monkeypatch.setattr(plots.time, "perf_counter", lambda: 0.4 * next(clock))
        calls.clear()
        found = plots.rates(works, seconds=1.0, rounds=3, deadline=deadline)
        assert calls == ["a", "b"] + rounds * ["a", "a", "b", "b"]        # the first two to warm up
        assert found == pytest.approx({"a": 2 * 12 / 1.2, "b": 2 * 24 / 1.2})
    times = iter([0.0, 0.0, *(0.0, 0.5, 2.0), 2.0, *(5.0, 5.5, 6.0), 6.0])   # a call in 2 s, then one in 1 s
    monkeypatch.setattr(plots.time, "perf_counter", lambda: next(times))
    assert plots.rates({"a": (lambda: None, 12)}, seconds=1.0, rounds=2) == {"a": 12.0}


def test_a_slow_start_leaves_time_for_rounds(monkeypatch):
    """Compiling comes before the first round, and counts once, not once a round."""
    now, calls = [0.0], []

    def work():
        now[0] += 1.0 if calls else 30.0
        calls.append(now[0])

    monkeypatch.setattr(plots.time, "perf_counter", lambda: now[0])
    assert plots.rates({"a": (work, 12)}, seconds=1.0, rounds=99, deadline=40.0) == {"a": 12.0}
    assert len(calls) == 1 + 10 and now[0] <= 40.0


def test_the_benchmark_divides_what_it_measured(monkeypatch):
    pytest.importorskip("resource")
    tiny, steps = dict(num_tasks=2, episodes_per_trial=1, minibatch=100, epochs=2), {}
    updates, update = [], trmrl.ppo_update
    monkeypatch.setattr(trmrl, "ppo_update", lambda *args: updates.append(
        "compiled" if args[3].compile else torch.get_num_threads()) or update(*args))
    monkeypatch.setattr(torch, "compile", lambda f: f)                    # which takes half a minute
    speeds = {"raw physics": 40.0, "SyncVectorEnv": 10.0, "our tasks": 36.0, "raw physics, 2 threads": 80.0,
              "our tasks, 2 threads": 40.0, "collecting": 1.0, "bare network": 40.0, "our update": 2.0,
              "end to end": 15.0, "end to end, 2 threads": 8.0, "end to end, compiled": 18.0}

    def rates(works):
        for name, (work, count) in works.items():
            updates.clear()
            work()                                                        # each of them runs
            steps[name] = count
            expected = {"our update": [1], "end to end": [1], "end to end, 2 threads": [2],
                        "end to end, compiled": ["compiled"]}
            assert updates == expected.get(name, [])
        return speeds

    monkeypatch.setattr(trmrl, "PRESETS", {"halfcheetah_vel": {"default": tiny}})
    monkeypatch.setattr(plots, "rates", rates)
    monkeypatch.setattr(plots, "first_iteration", lambda config: (6.0, 400.0, 0.1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    threads, stepping, raw_physics = [], plots.stepping, plots.raw_physics
    for name, make in (("stepping", stepping), ("raw_physics", raw_physics)):
        monkeypatch.setattr(plots, name, lambda envs, _make=make: threads.append(
            len(getattr(envs, "datas", ()))) or _make(envs))
    rows = plots.measure("halfcheetah_vel", "cpu")
    assert torch.get_num_threads() == 1 and threads == [1, 0, 1, 2, 2]    # 0: SyncVectorEnv
    assert steps == {**dict.fromkeys(speeds, 400), "bare network": 10 * 100 / 2}
    found = {what: value for what, value, _ in rows}
    assert all(found[name] == speed for name, speed in speeds.items())
    assert found["our tasks / raw physics"] == 0.9 and found["our tasks / SyncVectorEnv"] == 3.6
    assert found["our tasks / raw physics, 2 threads"] == 0.5
    assert found["our tasks / SyncVectorEnv, 2 threads"] == 4.0
    assert found["end to end / (raw physics and bare network in series)"] == pytest.approx(0.75)
    assert found["end to end, compiled / (raw physics and bare network in series)"] == pytest.approx(0.9)
    assert found["end to end / 1,235 steps/s of an MLP PPO"] == 15.0 / 1235
    assert found["peak memory"] == 400 and found["first iteration, with start and meta-test"] == 6
    committed = [row["what"] for row in csv_rows(HERE / "results" / "benchmark.csv")]
    assert list(found) == committed
    monkeypatch.setattr(plots, "rates", lambda works: dict.fromkeys(works, 1.0))
    monkeypatch.setattr(trmrl, "collect", lambda *args: None)
    for cores, asked in (({0}, None), ({0, 1}, 0), ({0, 1}, 2)):          # nothing to add about all cores
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores, raising=False)
        few = [what for what, _, _ in plots.measure("halfcheetah_vel", "cpu", asked)]
        assert few == [what for what in committed if "threads" not in what]
        assert torch.get_num_threads() == (asked or len(cores))
    monkeypatch.setattr(torch, "compile", None)                           # where it does not work
    few = [what for what, _, _ in plots.measure("halfcheetah_vel", "cpu")]
    assert few == [what for what in committed if "compiled" not in what]


def test_the_benchmark_measures_with_the_threads_asked_for(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(plots, "measure", lambda *args: asked.append(args) or [("our tasks", 1e3, "steps/s")])
    assert plots.main(["benchmark", "--threads", "2", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert asked == [("halfcheetah_vel", "cpu", 2)] and (tmp_path / "benchmark.png").exists()
    before = torch.get_num_threads()
    try:
        config, envs, agent = plots.preset("ant_dir", "cpu", threads=2)
        assert torch.get_num_threads() == config.threads == 2 and envs.num_envs == 2 * config.num_tasks
    finally:
        torch.set_num_threads(before)
    work, steps = plots.bare_network(agent, config)
    work()
    assert steps == 10 * config.minibatch / config.epochs
    assert agent.memory.phi.weight.grad.abs().sum() > 0
    assert plots.main(["benchmark", "--env", "ml1_reach"]) == 2


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("python test_trmrl.py NEW_FOLDER FUNCTION ...: a student's copy, these functions left blank")
    homework(*sys.argv[1:])
