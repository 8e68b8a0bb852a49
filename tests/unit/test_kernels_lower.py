"""The kernels of a start on a GPU pass the compiler's first stage, in real shapes (`tests.lower_kernels`).

Each case runs in a process of its own: in this one Triton's kernels are interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

QUICK = ("rank8", "qwen3.5-35b-a3b", "8b with adapters")
OTHERS = ("8b", "8b with EAGLE-3", "8b in four bits", "8b in FP8", "gpt-oss-20b", "gemma-4-31b")
LARGE = ("glm-4.5-air in FP8", "qwen3.5-27b")
EXACT = ("8b with adapters", "rank8", "qwen3.5-35b-a3b")
REFUSED = """
import triton, triton.language as tl
from triton.runtime import driver
from eyas.engine.kernels.launch.compile_ahead import NoDevice, record
from tests.lower_kernels import errors

@triton.jit
def grows(out):
    sums = tl.zeros([16], tl.float32)
    for _ in range(tl.load(out)):
        sums = tl.join(sums, sums).reshape([32])

@triton.jit
def stays(out):
    tl.store(out, 1)

import torch
driver.set_active(NoDevice(90))
out = torch.empty(1, dtype=torch.int32, device="meta")
print([error.split(":")[0] for error in errors(record(lambda: (grows[1,](out), stays[1,](out))))])
"""


def _output(*words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300
    )
    return done.stdout + done.stderr[-4000:] if done.returncode else done.stdout


def _refused(*words: str) -> list[str]:
    """The last words of each line."""
    return [line.rsplit(", ", 1)[-1] for line in _output("-m", "tests.lower_kernels", *words).splitlines()]


def test_the_compiler_takes_every_kernel_of_some_starts() -> None:
    assert _refused(*QUICK) == ["0 refused"] * len(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS + LARGE)
def test_the_compiler_takes_every_kernel_of_a_start(case: str) -> None:
    assert _refused(case) == ["0 refused"]


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACT)
def test_the_compiler_takes_every_kernel_of_an_exact_start(case: str) -> None:
    assert _refused("--exact", case) == ["0 refused"]


def test_a_kernel_that_the_compiler_refuses_is_named(tmp_path: Path) -> None:
    code = tmp_path / "refused.py"  # Triton reads a kernel's source from a file
    code.write_text(REFUSED)
    assert _output(str(code)) == "['grows']\n"
