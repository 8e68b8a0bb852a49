"""Kernels are launched as Triton would, in less time; see `launched_kernels`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_launches_take_the_variants_that_triton_takes() -> None:
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.launched_kernels"]
    said = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=True).stdout
    counts, times, *refusals = said.strip().splitlines()
    launches, wrong, unaligned, numbers = map(int, counts.split())
    assert launches > 2000 and wrong == 0
    assert min(unaligned, numbers) > 20  # what knows less is noticed
    triton, ours = map(float, times.split())
    assert ours < 0.9 * triton  # 0.8 on one kind of machine; what Triton asks for more depends on it
    assert refusals[0] == "described is no constant: give it by position"
    assert refusals[1].startswith("a kernel is given a str")
