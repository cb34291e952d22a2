# SPDX-License-Identifier: MIT
"""The methods that the paper compares TrMRL with, each in one file: `python -m baselines.rl2`."""

# Settings of trmrl.Config that a baseline with another memory than the transformer does not use.
MEMORY_FIELDS = ("memory_length", "layers", "heads", "tfixup", "keep_memory")
