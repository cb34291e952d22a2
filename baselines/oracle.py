# SPDX-License-Identifier: MIT
"""The oracle: an agent that is told the task.

It needs no memory, because it has nothing to infer: its policy is an MLP on the state and the task.
Its return shows how much of what TrMRL misses is due to adapting, and how much to the body or PPO.

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
    """Oracle: meta-train or meta-test an agent that is told the task."""

    name = "oracle"
    command = "python -m baselines.oracle"
    Config = Config

    def __init__(self, config, sizes):
        S, _, k = sizes
        super().__init__(config, sizes, memory_size=S + k)
        self.tasks = trmrl.Normalizer(k)

    def recall(self, trials, row, t):
        """The state and the task, both normalised, (M, S + k)."""
        return torch.cat([trials.state[row, t], self.tasks(trials.task)[row]], dim=-1)

    def update(self, trials, optimizer, generator):
        metrics = super().update(trials, optimizer, generator)
        self.tasks.update(trials.task)
        return metrics


if __name__ == "__main__":
    sys.exit(trmrl.main(agent_class=Oracle))
