"""Attention side by side has room for a second program and keeps the matrix unit busy: what ptxas says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from eyas.engine.kernels.attention.side_by_side import attend_side_by_side
from eyas.engine.kernels.launch.warm import KernelWarmup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REGISTERS = 128
"""Of a thread: 65,536 of a multiprocessor for two programs of 256 threads."""


def empty(*sizes: int) -> torch.Tensor:
    return torch.empty(*sizes, dtype=torch.bfloat16, device="meta")


def rows() -> None:
    queries, (keys, values) = empty(4096, 48, 128)[:, :32], empty(2, 4112, 8, 128)
    attend_side_by_side(queries, keys, values, 0.1, empty(4096, 32, 128))


def test_two_programs_fit_and_no_instruction_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the warm-up sets is undone
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    KernelWarmup("tests.unit.test_side_by_side_code:rows", (), 90, processes=1).wait()
    [code] = tmp_path.rglob("*.ptx")
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(code), "-o", str(tmp_path / "x")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    [registers] = re.findall(r"Used (\d+) registers", said)
    assert int(registers) <= REGISTERS and " 0 bytes spill stores" in said
    assert "serialized" not in said, said
