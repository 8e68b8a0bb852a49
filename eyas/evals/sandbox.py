"""Runs a program that a model wrote, held back from most accidents, and tells whether it ended well.

The program gets a process of its own, which may compute and read (`eyas.evals.guarded`). This is no wall
against a program that means harm: where you expect one, run the whole command in a container.
"""

from __future__ import annotations

import subprocess
import sys

from eyas.evals import guarded

WALL_S = 20.0  # more than the processor's time, so that a busy machine changes no verdict


def succeeds(program: str) -> bool:
    """Whether the program reaches its end, within its limits and without an error."""
    command = [sys.executable, "-I", "-B", guarded.__file__]
    try:
        done = subprocess.run(
            command,
            input=program.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            timeout=WALL_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == guarded.SUCCESS
