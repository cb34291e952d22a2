# SPDX-License-Identifier: MIT
"""RL^2: "Fast Reinforcement Learning via Slow Reinforcement Learning" (Duan et al. 2016).

A recurrent network reads the current state and the previous action, reward and end-of-episode
flag. Its hidden state h is the memory:

    x_t = (s_t, a_{t-1}, r_{t-1}, eta_{t-1}),   h_{t+1} = GRU(h_t, x_t),   a_t ~ pi(. | h_{t+1})

The hidden state is carried across the episodes of a trial and cleared when the task changes. The
weights learn slowly, by PPO on many tasks (Duan et al. use TRPO); the hidden state adapts fast,
within a task. The network thus learns a reinforcement learning algorithm of its own, hence the
name. The policy and the value function read the same h.

    python -m baselines.rl2 --env halfcheetah_vel

The return that PPO maximises spans the episodes of a trial, so that exploring in one episode could
pay off in the next. But with the presets' gamma of 0.95 to 0.98, it reaches only about 20 to 50
steps ahead, and PPO cuts it where an episode terminates (the ant falls), although the memory lives
on. So, unlike in the original, there is little to gain from exploring for a later episode.

The main difference from Duan et al.: the gradient flows back not through the whole trial, but
through segments of about 50 steps. Each starts from the hidden state that was stored when the agent
acted (from an iteration's second gradient step on, the weights that computed it are a little old).
This is faster than running the GRU through the whole trial again, and a minibatch can mix more
tasks.

In training, a trial has two episodes, while a final meta-test has six: from the third on, the
memory is older than it ever was in training (on MetaWorld, where test episodes are longer, from the
second on).
"""

import sys
from dataclasses import dataclass

import torch
from torch import nn

import trmrl
from baselines import NOT_FLAGS
from trmrl import setting

SEGMENT = 50  # a gradient flows back through so many steps or, if T is no multiple, a few more

# A GRU tolerates a higher learning rate than the transformer. On MetaWorld a trial has two episodes
# (TrMRL: one), so that the agent learns to carry its memory from one to the next. An iteration then
# takes twice as many steps, so meta-tests are further apart.
PRESETS = {env: preset | dict(lr=1e-3) for env, preset in trmrl.PRESETS.items()}
PRESETS["ml1"] |= dict(episodes_per_trial=2)
PRESETS["ml45"] |= dict(episodes_per_trial=2)


@dataclass
class Config(trmrl.Config):
    presets = PRESETS
    not_flags = NOT_FLAGS

    d_model: int = setting("agent", 64, "d, size of the hidden state", low=1)
    keep_memory: bool = setting("agent", True, "the hidden state lasts for the whole trial")
    # More than TrMRL's, because the steps of a segment are alike: 800 are only 16 segments.
    minibatch: int = setting("learning", 800, "steps per gradient step, in whole segments", low=2)


def gru_inputs(buffer, row, t):
    """x_t = (s_t, a_{t-1}, r_{t-1}, eta_{t-1}); at t = 0, the last three are zero.

    s is normalised, a clipped, r as it came. row and t broadcast together, to any shape (...);
    returns (..., S + A + 2).
    """
    S = buffer.state.shape[-1]
    previous = buffer.token[row, (t - 1).clamp(min=0), S:]  # a token is (s, a, r, eta)
    previous = previous * (t > 0).unsqueeze(-1)
    return torch.cat([buffer.state[row, t], previous], dim=-1)


def segment_length(T):
    """The smallest divisor of T from SEGMENT on: 50 for a row of 400 steps, 67 for one of 201."""
    return next(n for n in range(min(SEGMENT, T), T + 1) if T % n == 0)


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
        """stored["hidden"][:, t] is h_t: step t reads this column and writes the next one.

        A row is a trial, so the zeros of a new buffer are the cleared memory. There are two more
        columns than steps, because `act` is also called after the last step (at t = T).
        """
        buffer = super().new_buffer(rows, steps, generator)
        d = self.config.d_model
        buffer.stored["hidden"] = torch.zeros(rows, steps + 2, d, device=self.device)
        return buffer

    def act(self, buffer, t, sample):
        """Store h_{t+1} for step t + 1, then act on it."""
        row = torch.arange(len(buffer.token), device=self.device)
        buffer.stored["hidden"][:, t + 1] = self.recall(buffer, row, torch.full_like(row, t))
        # Agent.act calls `recall` again, which computes the same h_{t+1} from h_t, for little time.
        return super().act(buffer, t, sample)

    def recall(self, buffer, row, t):
        """h_{t+1}, the output of the GRU at the steps t.

        row and t are segments of consecutive steps, (segments, length), as `minibatches` yields
        them, or single steps (R,), when the agent acts. Returns (segments, length, d) or (R, d).
        """
        shape = t.shape
        row, t = row.view(len(row), -1), t.view(len(t), -1)  # a single step: a segment of length 1
        # Each segment starts from its stored hidden state. [None] because nn.GRU wants hidden
        # states as (layers, segments, d).
        start = buffer.stored["hidden"][row[:, 0], t[:, 0]][None]
        output, _ = self.gru(gru_inputs(buffer, row, t), start)
        return output.view(*shape, -1)

    def minibatches(self, buffer, generator):
        """Segments of all rows in random order; an incomplete last minibatch is dropped.

        row and t are (segments, length), where Agent.minibatches yields (M,).
        """
        R, T = buffer.reward.shape
        length = segment_length(T)
        segments_per_row = T // length
        order = torch.randperm(R * segments_per_row, generator=generator, device=self.device)
        # How many segments make a minibatch: at least one, and at most all there are.
        size = self.config.minibatch // trmrl.WORLD_SIZE // length
        size = min(max(1, size), len(order))
        offset = torch.arange(length, device=self.device)
        for segments in order[: len(order) // size * size].split(size):
            row = (segments // segments_per_row)[:, None].expand(-1, length)
            t = (segments % segments_per_row)[:, None] * length + offset
            yield row, t


if __name__ == "__main__":
    sys.exit(trmrl.main(agent_class=RL2))
