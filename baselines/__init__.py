# SPDX-License-Identifier: MIT
"""The agents that TrMRL is compared with. In the folder of trmrl.py, type for example

    python -m baselines.rl2 --env halfcheetah_vel

    rl2      remembers in the hidden state of a GRU (PPO)
    varibad  a GRU infers a belief about the task, and the policy acts on it (PPO and a VAE)
    pearl    infers the task before each episode, from the earlier ones (SAC, off-policy)
    maml     adapts its weights by one policy gradient step (the outer step is TRPO's)
    oracle   is told the task (PPO); not in the TrMRL paper

An agent's score is the return of its first test episode. But pearl and maml adapt only between
episodes, so a later one is scored: pearl's third, and maml's E-th, the first after its inner step
(E is 3 by default). By then, they have seen more of the task than the others. The numbers of steps
differ, too: pearl trains for fewer on locomotion, maml for more on the half-cheetah.

All are subclasses of trmrl.Agent and use the letters of trmrl.py. varibad.py, pearl.py and maml.py
list further ones, valid only there. Read oracle.py first, the smallest; then rl2.py; then
varibad.py, which builds on rl2.py. pearl.py and maml.py need only trmrl.py.
"""

# Settings that are not flags of any baseline: those that only a transformer has, and keep_memory,
# which the method decides. It is false for the oracle; for all others it is true, so a row of a
# Buffer holds all episodes of a trial (for pearl and maml it does nothing else).
NOT_FLAGS = ("memory_length", "layers", "heads", "tfixup", "keep_memory")
