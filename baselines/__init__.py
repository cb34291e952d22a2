# SPDX-License-Identifier: MIT
"""The agents that TrMRL is compared with, each in one file: `python -m baselines.rl2`.

    rl2      remembers in the hidden state of a GRU (PPO)
    varibad  a GRU infers a belief about the task, and the policy acts on it (PPO and a VAE)
    pearl    infers the task before each episode, from the earlier ones (SAC, off-policy)
    maml     adapts its weights by one policy gradient step (the outer step is TRPO's)
    oracle   is told the task (PPO); not in the paper

The score of an agent is the return of its first test episode. pearl and maml adapt only between
episodes: pearl is scored on its third, maml on its E-th, by default also the third. All are
subclasses of trmrl.Agent, and the letters E, R, T, S, A, k and d are those of trmrl.py; each file
explains its own other letters. Read oracle.py first, the smallest; then rl2.py; then varibad.py,
which borrows two functions of rl2.py. pearl.py and maml.py stand alone.
"""

# Settings that are not flags of any baseline: those that only a transformer has, and keep_memory,
# which the method decides (true if the episodes of a trial depend on each other).
NOT_FLAGS = ("memory_length", "layers", "heads", "tfixup", "keep_memory")
