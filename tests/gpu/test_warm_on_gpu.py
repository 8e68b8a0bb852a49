"""Kernels compiled ahead, without touching the GPU, are what launches find: nothing is compiled twice."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.bench.shapes import ModelShape, write_model
from eyas.common.config import SpeculationConfig, resolve_engine
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.loading.startup import EngineStart
from tests.gpu import draft_rounds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

LAUNCHES = """
import json, torch, triton
from eyas.engine.kernels.launch.warm import use_cache
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


LISTEN = """
import json, torch, triton
from eyas.engine.kernels.launch.warm import use_cache
major, minor = torch.cuda.get_device_capability()
use_cache(10 * major + minor)
missed = []
def listen(*, src, cache_hit, **_):
    if not cache_hit:
        missed.append(src.name)
triton.knobs.compilation.listener = listen
"""
"""What tells which kernels a process compiles."""
ENGINE = """
from eyas.bench.shapes import ModelShape, write_model
from eyas.common.config import SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.unit.loopback import Loopback, wait_all
cluster = Loopback(resolve_engine("cuda", **ASKED))
try:
    for batch, tokens, warm in ((1, 20, 0.0), (3, 700, 0.8), (40, 3000, 0.0)):
        params = SamplingParams(temperature=warm, max_tokens=20, ignore_eos=True)
        ids = tuple(range(tokens // batch))
        requests = [GenerationRequest(f"{batch}-{i}", ids, params) for i in range(batch)]
        wait_all([cluster.submit(request, split=False) for request in requests], 120)
finally:
    cluster.close()
print(json.dumps(missed))
"""
DRAFTS = """
from eyas.engine.loading.draft_build import draft_worker
from eyas.engine.loading.spec import EngineSpec
from tests.gpu import draft_rounds as short
spec = short.SPEC
worker = draft_worker(EngineSpec.of(short.settings(spec)))
short.Rounds(worker.runner).run(spec)
worker.runner.pool.close()
print(json.dumps(missed))
"""
ROUNDS = {
    "plain": {"draft": None},
    "chain": {"speculation": SpeculationConfig(3, 1, 4)},
    "tree": {"speculation": SpeculationConfig(4, 4, 16)},
    "exact": {"draft": None, "deterministic": True},
    "exact, chain": {"speculation": SpeculationConfig(3, 1, 4), "deterministic": True},
    "no graphs": {"cuda_graph_max_bs": 0},
    "two ranks": {"draft": None, "tensor_parallel_size": 2},
    "heads of 128": {"draft": None, "max_loras": 2, "mixed_tokens": 0, "cuda_graph_bs": (1, 8)},
}
SHARED = ModelShape(256, 512, 4, heads=4, kv_heads=2, head_dim=64, vocab=4096, context=4096)
"""Two GPUs can share it; the embedded model's MLP has no halves for their kernels."""
LARGE_HEADS = replace(SHARED, hidden=512, head_dim=128)
"""Few rows of prompts are attended to by a kernel of their own, as of most large models."""
WRITTEN = {"two ranks": SHARED, "heads of 128": LARGE_HEADS}


@pytest.mark.parametrize("rounds", ROUNDS)
def test_an_engine_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: str) -> None:
    """Neither when it starts, nor in steps of rounds, of prompts, and of both."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    asked = {"worker": "gpu", "num_pages": 2048, "max_running": 48, "prefill_attention_backend": "triton"}
    asked |= ROUNDS[rounds]
    if rounds in WRITTEN:
        write_model(WRITTEN[rounds], tmp_path / "model")
        asked |= {"model": str(tmp_path / "model"), "load_format": "dummy"}
    if asked.get("tensor_parallel_size", 1) > torch.cuda.device_count():
        pytest.skip("PyTorch sees one GPU here")
    start = EngineStart.of(resolve_engine("cuda", **asked))
    assert start.warmup is not None
    compiled = start.warmup.wait()
    print(f"\n{rounds}: {compiled.kernels} kernels in {compiled.seconds:.1f} s")
    code = LISTEN + ENGINE.replace("ASKED", repr(asked))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("spec", ["CHAIN", "TREE"])
def test_a_draft_worker_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    """Neither when it starts, nor for proposals, nor for runs ahead of their verdicts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    start = EngineStart.of(draft_rounds.settings(getattr(draft_rounds, spec)))
    assert start.warmup is not None
    compiled = start.warmup.wait()
    print(f"\n{spec}: {compiled.kernels} kernels in {compiled.seconds:.1f} s")
    code = LISTEN + DRAFTS.replace("SPEC", spec)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_launches_compile_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what `use_cache` sets is undone
    major, minor = torch.cuda.get_device_capability()
    assert (
        KernelWarmup("tests.unit.warm_kernels:recipe", (5,), 10 * major + minor, processes=2).wait().kernels
        == 2
    )
    done = subprocess.run([sys.executable, "-c", LAUNCHES], check=True, capture_output=True)
    assert json.loads(done.stdout) == [[True, True], [], 64.0 + 7.0]
