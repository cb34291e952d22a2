# SPDX-License-Identifier: MIT
"""What TrMRL is compared with, each in one file: `python -m baselines.rl2`.

Read rl2.py first, then varibad.py, which borrows two of its functions. Letters such as E, R and T
are those of trmrl.py.
"""

# Settings that are not flags of a baseline: those of the transformer, which it does not have, and
# keep_memory, which follows from the method: true if the episodes of a trial depend on each other.
NOT_FLAGS = ("memory_length", "layers", "heads", "tfixup", "keep_memory")
