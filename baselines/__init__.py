# SPDX-License-Identifier: MIT
"""The agents that TrMRL is compared with, each in one file: `python -m baselines.rl2`.

    rl2      remembers in the hidden state of a GRU (PPO)
    varibad  a GRU infers a belief about the task, and the policy acts on it (PPO and a VAE)
    pearl    infers the task before each episode, from the earlier ones (SAC, off-policy)
    maml     adapts its weights by one policy gradient step (the outer step is TRPO's)
    oracle   is told the task (PPO); not in the paper

The score of an agent is the return of its first test episode, but pearl and maml, which adapt only
between episodes, are scored on a later one: pearl on its third, maml on its E-th, where its E is 3
by default. All are subclasses of trmrl.Agent and use its letters; each file explains new ones.

Read oracle.py first, the smallest; then rl2.py; then varibad.py, which builds on rl2.py. pearl.py
and maml.py can be read on their own.
"""

# Settings that are not flags of any baseline: those that only a transformer has, and keep_memory,
# which each method fixes (true: one row of a Buffer holds all episodes of a trial).
NOT_FLAGS = ("memory_length", "layers", "heads", "tfixup", "keep_memory")
