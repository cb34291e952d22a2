# SPDX-License-Identifier: MIT
"""RL^2: "Fast Reinforcement Learning via Slow Reinforcement Learning" (Duan et al. 2016).

A recurrent network reads the current state and the previous action, reward and end-of-episode
flag. Its hidden state h is the memory:

    x_t = (s_t, a_{t-1}, r_{t-1}, eta_{t-1}),   h_{t+1} = GRU(h_t, x_t),   a_t ~ pi(. | h_{t+1})

It is carried across the episodes of a trial and cleared when the task changes. The weights learn
slowly, by PPO on many tasks (in the paper by TRPO); the hidden state adapts fast, within a task.
The network thus learns a reinforcement learning algorithm of its own, hence the name.

    python -m baselines.rl2 --env halfcheetah_vel

Differences from the paper, and some details:

- The gradient flows back not through the whole trial, but through segments of at most 50 steps.
  Each starts from the hidden state that was stored when the agent acted, with slightly older
  weights. This is faster, and a minibatch can mix many tasks.
- The return that PPO maximises spans the episodes of a trial, as in the paper, but it ends where an
  episode terminates (the ant falls), although the memory lives on.
- Returns are discounted by the preset's gamma, 0.95 to 0.98, and so look 20 to 50 steps ahead:
  there is hardly any credit for exploring now to do better in the next episode.
- Policy and value share one GRU of 64 units.
- The memory is carried through all six episodes of a final meta-test, although a trial of training
  has only two. (On MetaWorld test episodes are also longer than those of training.)
"""

import math
import sys
from dataclasses import dataclass

import torch
from torch import nn

import trmrl
from baselines import NOT_FLAGS
from trmrl import setting

MAX_SEGMENT = 50  # the most steps through which a gradient flows back

# A GRU tolerates a higher learning rate than the transformer. On MetaWorld a trial has two
# episodes, so that the agent learns to carry its memory from one to the next.
PRESETS = {env: preset | dict(lr=1e-3) for env, preset in trmrl.PRESETS.items()}
PRESETS["ml1"] |= dict(episodes_per_trial=2)
PRESETS["ml45"] |= dict(episodes_per_trial=2)


@dataclass
class Config(trmrl.Config):
    presets = PRESETS
    not_flags = NOT_FLAGS

    d_model: int = setting("agent", 64, "d, size of the hidden state", low=1)
    keep_memory: bool = setting("agent", True, "the hidden state lasts for the whole trial")
    minibatch: int = setting("learning", 800, "steps per gradient step, in whole segments", low=2)


def gru_inputs(buffer, row, t):
    """(s_t, a_{t-1}, r_{t-1}, eta_{t-1}) of the steps t; the last three are zero at t = 0.

    row and t have, or broadcast to, any shape (...); returns (..., S + A + 2).
    """
    S = buffer.state.shape[-1]
    previous = buffer.token[row, (t - 1).clamp(min=0), S:]  # a token is (s, a, r, eta)
    previous = previous * (t > 0).unsqueeze(-1)
    return torch.cat([buffer.state[row, t], previous], dim=-1)


def segment_sizes(T):
    """How many segments a row of T steps has, and their length.

    400: 8 of 50; 70: 2 of 35; 201: 5 of 40, and the last step is left out.
    """
    per_row = math.ceil(T / MAX_SEGMENT)
    return per_row, T // per_row


class RL2(trmrl.Agent):
    """An agent whose memory is the hidden state of a GRU."""

    name = "rl2"
    command = "python -m baselines.rl2"
    Config = Config

    def __init__(self, config, sizes):
        super().__init__(config, sizes, e_size=config.d_model)
        S, A, _ = sizes
        self.gru = nn.GRU(S + A + 2, config.d_model, batch_first=True)

    def new_buffer(self, rows, steps, generator):
        """hidden[:, t] is the hidden state before step t.

        A row is a trial, so the zeros of a new buffer are the cleared memory. There are T + 2
        columns, because `act` is also called at t = T and then writes column T + 1.
        """
        buffer = super().new_buffer(rows, steps, generator)
        d = self.config.d_model
        buffer.stored["hidden"] = torch.zeros(rows, steps + 2, d, device=self.device)
        return buffer

    def recall(self, buffer, row, t):
        """h_{t+1}, the output of the GRU at the steps t; when acting, it is also stored.

        PPO passes row and t as `minibatches` yields them, (segments, length): each segment is
        consecutive steps of one row. Agent.act passes (R,), which we treat as segments of one step.
        """
        hidden = buffer.stored["hidden"]
        acting = t.dim() == 1
        if acting:
            row, t = row[:, None], t[:, None]  # (R, 1)

        first_row, first_t = row[:, 0], t[:, 0]
        start = hidden[first_row, first_t]  # each segment starts from its stored hidden state
        # [None] because nn.GRU wants hidden states as (layers, segments, d).
        output, _ = self.gru(gru_inputs(buffer, row, t), start[None])

        if acting:
            output = output[:, 0]
            hidden[first_row, first_t + 1] = output
        return output

    def minibatches(self, buffer, generator):
        """Segments of all rows in random order; an incomplete last minibatch is dropped.

        row and t are (segments, length); PPO treats every step alike, whatever the shape.
        """
        R, T = buffer.value.shape
        per_row, length = segment_sizes(T)
        order = torch.randperm(R * per_row, generator=generator, device=self.device)
        size = self.config.minibatch // trmrl.WORLD_SIZE // length  # segments at a time
        # At least one segment, and at most all: without the remainders of rows there may be fewer
        # steps than --minibatch.
        size = min(max(1, size), len(order))
        offset = torch.arange(length, device=self.device)
        for segment in order[: len(order) // size * size].split(size):
            row = (segment // per_row)[:, None].expand(-1, length)
            t = (segment % per_row)[:, None] * length + offset
            yield row, t


if __name__ == "__main__":
    sys.exit(trmrl.main(agent_class=RL2))
