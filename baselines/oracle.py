# SPDX-License-Identifier: MIT
"""The oracle: an agent that is told the task.

It needs no memory, because it has nothing to infer: its policy is an MLP on the state and the task.
What TrMRL falls short of it is the price of having to infer the task; what it itself falls short of
the best possible is due to the body or to PPO.

    python -m baselines.oracle --env halfcheetah_vel
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch

import trmrl

# An MLP learns faster at a higher rate than the transformer's.
CHEETAH = trmrl.PRESETS["halfcheetah_vel"] | dict(lr=1e-3)


@dataclass
class Config(trmrl.Config):
    presets: ClassVar = trmrl.PRESETS | {"halfcheetah_vel": CHEETAH}
    unused: ClassVar = ("memory_length", "layers", "heads", "d_model", "tfixup", "keep_memory")


class Oracle(trmrl.Agent):
    """An agent whose memory is the state and the task. (A Player must set `trials.task` for it.)"""

    name = "oracle"
    command = "python -m baselines.oracle"
    Config = Config

    def __init__(self, config, sizes):
        S, _, k = sizes
        super().__init__(config, sizes, memory_size=S + k)
        self.task_normalizer = trmrl.RunningStats(k)

    def recall(self, trials, row, t):
        """The state and the task, both normalised, (M, S + k)."""
        return torch.cat([trials.state[row, t], self.task_normalizer(trials.task)[row]], dim=-1)

    def update(self, trials, optimizer, generator):
        metrics = super().update(trials, optimizer, generator)
        self.task_normalizer.update(trials.task)
        return metrics


if __name__ == "__main__":
    sys.exit(trmrl.main(agent_class=Oracle))
