# SPDX-License-Identifier: MIT
"""RL^2: "Fast Reinforcement Learning via Slow Reinforcement Learning" (Duan et al. 2016).

A recurrent network reads the state, and what it did and got at the step before. Its hidden state
is the memory: it is carried across the episodes of a trial and cleared when the task changes. The
weights learn slowly, by PPO (the paper: TRPO) on many tasks; the hidden state adapts fast, within a
task. The network thus learns a reinforcement learning algorithm of its own, hence the name. The
gradient flows back through time over the whole trial, so a minibatch is made of whole trials.

    python -m baselines.rl2 --env halfcheetah_vel
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import trmrl
from trmrl import setting


@dataclass
class Config(trmrl.Config):
    presets: ClassVar = {env: preset | dict(lr=5e-4) for env, preset in trmrl.PRESETS.items()}
    unused: ClassVar = ("memory_length", "layers", "heads", "tfixup", "keep_memory")

    d_model: int = setting("agent", 64, "d, size of the hidden state", low=1)
    keep_memory: bool = setting("agent", True, "the hidden state lasts for the whole trial")
    minibatch: int = setting("PPO", 800, "steps per gradient step, in whole trials", low=2)


def gru_inputs(trials, row, t):
    """(s_t, a_{t-1}, r_{t-1}, eta_{t-1}) of the steps t; the last three are PAD at step 0."""
    S = trials.state.shape[-1]
    previous = trials.token[row, (t - 1).clamp(min=0), S:]
    previous = previous * (t > 0).unsqueeze(-1)
    return torch.cat([trials.state[row, t], previous], dim=-1)


class RL2(trmrl.Agent):
    """An agent whose memory is the hidden state of a GRU."""

    name = "rl2"
    command = "python -m baselines.rl2"
    Config = Config

    def __init__(self, config, sizes):
        super().__init__(config, sizes, memory_size=config.d_model)
        S, A, _ = sizes
        self.gru = nn.GRU(S + A + 2, config.d_model, batch_first=True)

    def new_trials(self, rows, steps, generator):
        """hidden[t] is the hidden state before step t; it is zero before step 0.

        `act` may be asked about step T, too, and then writes hidden[T + 1].
        """
        trials = super().new_trials(rows, steps, generator)
        d = self.config.d_model
        trials.stored["hidden"] = torch.zeros(rows, steps + 2, d, device=self.device)
        return trials

    def recall(self, trials, row, t):
        """The output of the GRU at steps t: (R,) when it acts, (rows, T) when it learns."""
        x = gru_inputs(trials, row, t)
        if t.dim() == 2:  # learning: whole rows, so that the gradient flows back through them
            return self.gru(x)[0]

        # One step in every row, from hidden[t] to hidden[t + 1].
        hidden = trials.stored["hidden"]
        e, _ = self.gru(x[:, None], hidden[row, t][None])
        hidden[row, t + 1] = e[:, 0].detach()
        return e[:, 0]

    def minibatches(self, trials, generator):
        """Whole rows in random order; an incomplete last minibatch is dropped."""
        R, T = trials.value.shape
        size = max(1, self.config.minibatch // trmrl.WORLD_SIZE // T)
        order = torch.randperm(R, generator=generator, device=self.device)
        t = torch.arange(T, device=self.device).expand(size, T)
        for rows in order[: R // size * size].split(size):
            yield rows[:, None].expand(size, T), t


if __name__ == "__main__":
    sys.exit(trmrl.main(agent_class=RL2))
