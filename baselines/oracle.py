# SPDX-License-Identifier: MIT
"""The oracle: an agent that is told the task.

It needs no memory, because it has nothing to infer: pi(. | s, task) and V(s, task) are MLPs.
TrMRL's gap to the oracle is roughly the price of inferring the task (roughly, because their
networks and, on the half-cheetah, their learning rates differ). The oracle's own gap to a perfect
score is due to the robot and to PPO. On ML45 it is weak: to keep this file small, it reads the
class as one number, 0 to 44, not one-hot.

    python -m baselines.oracle --env halfcheetah_vel
"""

import sys
from dataclasses import dataclass

import torch

import trmrl
from baselines import NOT_FLAGS

# On the half-cheetah an MLP tolerates a higher learning rate than the transformer.
PRESETS = {env: dict(preset) for env, preset in trmrl.PRESETS.items()}  # copies, to be changed
PRESETS["halfcheetah_vel"] |= dict(lr=1e-3)


@dataclass
class Config(trmrl.Config):
    presets = PRESETS
    not_flags = (*NOT_FLAGS, "d_model")  # it has no memory, so no d


class Oracle(trmrl.Agent):
    """An agent that acts on the state and the task.

    It reads buffer.task, a tensor (R, k), which `collect` sets. With a Player of your own, set
    player.buffer.task, a float tensor on the agent's device, before it acts.
    """

    name = "oracle"
    command = "python -m baselines.oracle"
    Config = Config

    def __init__(self, config, sizes):
        S, _, k = sizes
        super().__init__(config, sizes, e_size=S + k)
        self.task_normalizer = trmrl.RunningStats(k)

    def recall(self, buffer, row, t):
        """The state and the task, both normalised, (M, S + k)."""
        return torch.cat([buffer.state[row, t], self.task_normalizer(buffer.task[row])], dim=-1)

    def update(self, buffer, optimizer, generator):
        """PPO, then new statistics: PPO must see tasks normalised as when the agent acted."""
        metrics = super().update(buffer, optimizer, generator)
        self.task_normalizer.update(buffer.task)
        return metrics


if __name__ == "__main__":
    sys.exit(trmrl.main(agent_class=Oracle))
