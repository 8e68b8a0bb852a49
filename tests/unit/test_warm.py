"""Kernels compiled ahead are found by the launches: by their arguments, without a GPU on either side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.engine.kernels.launch.warm import CompileReport, KernelWarmup

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

RECIPE = "tests.unit.warm_kernels:recipe"

LAUNCHES = """
import json, sys, torch, triton
from eyas.engine.kernels.launch import compile_ahead, warm
from tests.unit import warm_kernels

warm.use_cache(90)
triton.runtime.driver.set_active(compile_ahead.NoDevice(90))
hits = []
triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
warm_kernels.scale(torch.empty(64, device="meta"), 3, block=32, compile_only=True)
warm_kernels.scale(torch.empty(65, device="meta")[1:], 3, block=32, compile_only=True)
warm_kernels.scale(torch.empty(64, device="meta", dtype=torch.float16), 3, block=32, compile_only=True)
warm_kernels.scale(torch.empty(64, device="meta"), 3, block=64, compile_only=True)
print(json.dumps(hits))
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what `use_cache` sets is undone
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_launches_find_what_was_compiled() -> None:
    """The first and third launch are those of the recipe; the others differ in alignment or a constant."""
    compiled = KernelWarmup(RECIPE, (5,), 90, processes=2).wait()
    assert compiled.kernels == 2 and compiled.seconds > 0
    assert len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))) == 2
    done = subprocess.run([sys.executable, "-c", LAUNCHES], check=True, capture_output=True)
    assert json.loads(done.stdout) == [True, False, True, False]
    assert KernelWarmup(RECIPE, (5,), 90, processes=2).wait() == CompileReport(2, 0.0)


def test_a_recipe_imports_the_tracer_only_if_it_needs_more_than_its_name() -> None:
    assert KernelWarmup("tests.unit.warm_kernels:tracing_recipe", (), 90, processes=2).wait().kernels == 1


def test_a_kernel_that_does_not_compile_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no_such_function"):
        KernelWarmup("tests.unit.warm_kernels:broken_recipe", (), 90, processes=1).wait()


def test_waiting_needs_no_torch() -> None:
    code = (
        "import sys, eyas.engine.kernels.launch.warm; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
