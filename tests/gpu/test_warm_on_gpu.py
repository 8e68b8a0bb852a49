"""Kernels compiled ahead, without touching the GPU, are what launches find: nothing is compiled twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eyas.engine.kernels.warm import Warmup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

LAUNCHES = """
import json, torch, triton
from eyas.engine.kernels.warm import use_cache
from tests.unit.warm_kernels import recipe, scale

major, minor = torch.cuda.get_device_capability()
cache, hits = use_cache(10 * major + minor), []
before = sorted(cache.rglob("*"))
triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
recipe(7, "cuda")
torch.cuda.synchronize()
new = [path.name for path in sorted(cache.rglob("*")) if path not in before]
x = torch.ones(64, device="cuda")
scale(x, 7, block=32)
print(json.dumps([hits, new, float(x.sum())]))
"""


def test_launches_compile_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what `use_cache` sets is undone
    major, minor = torch.cuda.get_device_capability()
    assert Warmup("tests.unit.warm_kernels:recipe", (5,), 10 * major + minor, processes=2).wait().kernels == 2
    done = subprocess.run([sys.executable, "-c", LAUNCHES], check=True, capture_output=True)
    assert json.loads(done.stdout) == [[True, True], [], 64.0 + 7.0]
