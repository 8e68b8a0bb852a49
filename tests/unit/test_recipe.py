"""The engine's own recipe: the kernels of every kind of round are found, and compile, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.tiny import write_tiny_eagle3, write_tiny_llama

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

RECORD = """
import json, sys
from dataclasses import replace
from functools import partial
from triton.runtime import driver
from eyas.common.config import SpeculationConfig, resolve_engine
from eyas.engine.device.recipe import launches
from eyas.engine.kernels.compile_ahead import NoDevice, compile_all, record

model, head, compiled, asked = json.loads(sys.argv[1])
driver.set_active(NoDevice(90))
asked |= {"max_running": 24, "chunk_tokens": 300, "prefill_attention_backend": "triton"}
config = resolve_engine("cuda", model=model, draft=head, **asked)
found = record(partial(launches, replace(config, speculation=SpeculationConfig(*SPEC))))
names = [variant.args[0].__name__ for variant in found]
compile_all([variant for name, variant in zip(names, found) if name in compiled], 1)
print(json.dumps({name: names.count(name) for name in names}))
"""
PLAIN = {"_gather", "_prepare", "_attend", "_attend_chunks", "_peaks", "_settle", "_draw", "_verdict"}
PLAIN |= {"_norm", "_rope_write", "_silu_mul", "qkv_rope_kernel", "linear_kernel", "gated_kernel"}
DRAFTED = PLAIN | {"_join", "_gather_path"}
SPECULATION = {
    "plain": ((3, 1, 4), PLAIN),
    "chain": ((3, 1, 4), DRAFTED | {"_propose_rows"}),
    "tree": ((3, 2, 6), DRAFTED | {"_compact", "_grow", "_select"}),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty: of compiled kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path / "cache"


@pytest.mark.parametrize("rounds", SPECULATION)
def test_all_kernels_are_found_and_compile(tmp_path: Path, cache: Path, rounds: str) -> None:
    """Two of them are compiled: one of the plain step, one that only this kind of round has."""
    spec, kernels = SPECULATION[rounds]
    own = {"plain": "_verdict", "chain": "_propose_rows", "tree": "_select"}[rounds]
    compiled = ["_norm", own]
    found = _recorded(tmp_path, spec, compiled, drafted=rounds != "plain")
    assert set(found) == kernels
    assert len(list(cache.rglob("*.cubin"))) == sum(found[name] for name in compiled)


def test_a_batch_without_a_graph_has_its_kernels(tmp_path: Path, cache: Path) -> None:
    spec, kernels = SPECULATION["plain"]
    every = _recorded(tmp_path, spec)
    assert _recorded(tmp_path, spec, cuda_graph_bs=[1]) == every
    assert set(every) == kernels


def _recorded(
    folder: Path,
    spec: tuple[int, int, int],
    compiled: list[str] | None = None,
    *,
    drafted: bool = False,
    **asked: object,
) -> Mapping[str, int]:
    """How many variants of each kernel an engine with 256 tokens has; those `compiled` are compiled."""
    model = write_tiny_llama(folder / "model", tied=False)
    head = write_tiny_eagle3(folder / "head", model, draft_vocab=128) if drafted else None
    told = json.dumps([str(model), head and str(head), compiled or [], asked])
    code = RECORD.replace("SPEC", str(spec))
    done = subprocess.run([sys.executable, "-c", code, told], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]
