# SPDX-License-Identifier: MIT
"""What TrMRL is compared with, each in one file: `python -m baselines.rl2`.

VariBAD borrows two functions from rl2.py.
"""

# Settings that are not flags of a baseline: those of the transformer, which it does not have, and
# keep_memory, which follows from the method: true if the episodes of a trial depend on each other.
NOT_FLAGS = ("memory_length", "layers", "heads", "tfixup", "keep_memory")
