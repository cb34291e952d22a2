# SPDX-License-Identifier: MIT
"""Run a program with two slow functions of MetaWorld and SciPy replaced by faster ones.

The results are identical, to the last bit (a test compares them). A step of Push takes about half
the time, one of ML45-Train two thirds. results/make.py trains the robot arms this way; so can you:

    python results/fast_metaworld.py trmrl.py --env ml1_push
    python results/fast_metaworld.py -m baselines.rl2 --env ml1_push
"""

import functools
import runpy
import sys
from pathlib import Path

from metaworld.sawyer_xyz_env import SawyerXYZEnv
from scipy.spatial.transform import Rotation


def touching_object(arm, object_geom_id):
    """Do both finger pads press on the object? MetaWorld loops over all contacts in Python."""
    contact = arm.data.contact
    on_object = (contact.geom == object_geom_id).any(axis=1)  # geom: (contacts, 2)

    def force(pad):
        on_pad = (contact.geom == arm.data.geom(pad).id).any(axis=1)
        return arm.data.efc_force[contact.efc_address[on_object & on_pad]].sum()

    return 0 < force("leftpad_geom") and 0 < force("rightpad_geom")


def replace_slow_functions():
    SawyerXYZEnv.touching_object = touching_object
    # SciPy checks that a matrix is a rotation. Those of MuJoCo are.
    Rotation.from_matrix = staticmethod(functools.partial(Rotation.from_matrix, assume_valid=True))


if __name__ == "__main__":
    replace_slow_functions()
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    del sys.argv[0]  # sys.argv is now that of the program
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
