# SPDX-License-Identifier: MIT
"""The methods that the paper compares TrMRL with, each in one file: `python -m baselines.rl2`."""
