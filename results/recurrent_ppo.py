# SPDX-License-Identifier: MIT
"""A peer from a library: RecurrentPPO of Stable-Baselines3 as RL^2, on our HalfCheetahVel.

This is what a user might pick instead of this project. It needs a package that is not in
requirements.txt, and it writes a run folder that plots.py reads:

    pip install sb3-contrib==2.9.2
    python results/recurrent_ppo.py 1    # the seed

As in baselines/rl2.py, the network reads the state and the previous action, reward and
end-of-episode flag, and a trial is two episodes of one task. The library is shown a trial as one
long episode, so it clears the LSTM's state when the task changes.
"""

import json
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

RESULTS = Path(__file__).parent.resolve()
sys.path.insert(0, str(RESULTS.parent))

import trmrl  # noqa: E402

ENV = "halfcheetah_vel"
TOTAL_STEPS = 1_500_000  # as TrMRL
EPISODES_PER_TRIAL = 2
NUM_ENVS = 16
EVAL_EVERY = 80_000  # environment steps between meta-tests
SETTINGS = dict(n_steps=100, batch_size=400, gamma=0.95)  # others: the library's defaults
LSTM_UNITS = 64


def network_input(state, action, reward, done):
    """(s_t, a_{t-1}, r_{t-1}, eta_{t-1}) of all rows."""
    return np.column_stack([state, action, reward, done]).astype(np.float32)


class Trials(gymnasium.Env):
    """One trial after the other, each of a random training task."""

    def __init__(self, seed):
        self.envs = trmrl.make_tasks(ENV, 1, seed)
        self.rng = np.random.default_rng(seed)
        S, A, _ = self.envs.sizes
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (S + A + 2,), np.float32)
        self.action_space = self.envs.single_action_space

    def reset(self, *, seed=None, options=None):
        options = {"tasks": self.envs.sample_tasks(self.rng, 1)}
        state, _ = self.envs.reset(seed=int(self.rng.integers(2**31)), options=options)
        self.episode = 0
        zero = np.zeros(1)
        return network_input(state, np.zeros((1, *self.action_space.shape)), zero, zero)[0], {}

    def step(self, action):
        state, reward, _, truncated, _ = self.envs.step(action[None])
        if truncated[0]:
            self.episode += 1
        trial_ends = self.episode == EPISODES_PER_TRIAL
        if truncated[0] and not trial_ends:
            state, _ = self.envs.reset()
        observation = network_input(state, action[None], reward, truncated)[0]
        return observation, float(reward[0]), False, trial_ends, {}


def meta_test(model, normalizer, split, episodes):
    """Returns (tasks, episodes) with mean actions, like trmrl.meta_test."""
    envs = trmrl.make_tasks(ENV, 20, trmrl.TEST_SEED, split)
    R = envs.num_envs
    returns = np.zeros((R, episodes))
    action = np.zeros(envs.action_space.shape)
    reward = done = np.zeros(R)
    lstm_state = None
    trial_starts = np.ones(R, dtype=bool)
    state, _ = envs.reset(seed=trmrl.TEST_SEED)
    for episode in range(episodes):
        for _ in range(envs.episode_length):
            x = normalizer.normalize_obs(network_input(state, action, reward, done))
            action, lstm_state = model.predict(x, lstm_state, trial_starts, deterministic=True)
            trial_starts = np.zeros(R, dtype=bool)
            state, reward, _, done, _ = envs.step(action)
            returns[:, episode] += reward
        state, _ = envs.reset()
    return returns


class Recorder(BaseCallback):
    """Writes progress.csv and eval.csv as trmrl.py does."""

    def __init__(self, folder, normalizer):
        super().__init__()
        self.folder = folder
        self.normalizer = normalizer
        self.csv = {"progress.csv": "", "eval.csv": ""}
        self.began, self.cpu_began = time.monotonic(), time.process_time()
        self.next_test = EVAL_EVERY

    def _on_step(self):
        return True

    def _on_rollout_start(self):
        if self.num_timesteps >= self.next_test:
            self.record(episodes=1)
            self.next_test += EVAL_EVERY

    def record(self, episodes):
        rows = []
        for split in ("test", "ood"):
            returns = meta_test(self.model, self.normalizer, split, episodes)
            for (task, episode), value in np.ndenumerate(returns):
                row = dict(step=self.num_timesteps, split=split, task=task, episode=episode + 1)
                rows.append(row | {"return": value, "success": np.nan, "actions": "mean"})
            print(f"{self.num_timesteps:,} steps, {split}: {returns[:, 0].mean():.1f}", flush=True)
        progress = {
            "step": self.num_timesteps,
            "seconds": time.monotonic() - self.began,
            "cpu_seconds": time.process_time() - self.cpu_began,
        }
        for name, new in {"progress.csv": [progress], "eval.csv": rows}.items():
            self.csv[name] += trmrl.csv_text(new, header=not self.csv[name])
            (self.folder / name).write_text(self.csv[name])


def main(seed, folder):
    torch.set_num_threads(1)
    envs = DummyVecEnv([lambda i=i: Trials(1000 * seed + i) for i in range(NUM_ENVS)])
    envs = VecNormalize(envs, gamma=SETTINGS["gamma"])
    network = dict(lstm_hidden_size=LSTM_UNITS)
    model = RecurrentPPO("MlpLstmPolicy", envs, seed=seed, policy_kwargs=network, **SETTINGS)

    folder.mkdir(parents=True)
    settings = {"agent": "SB3 RecurrentPPO", "env": ENV, "seed": seed, "total_steps": TOTAL_STEPS}
    (folder / "config.json").write_text(json.dumps(settings | SETTINGS, indent=2))
    recorder = Recorder(folder, envs)
    model.learn(TOTAL_STEPS, callback=recorder)
    recorder.record(episodes=trmrl.FINAL_EPISODES)


if __name__ == "__main__":
    seed = int(sys.argv[1])
    main(seed, RESULTS / ENV / f"recurrent_ppo-seed{seed}")
