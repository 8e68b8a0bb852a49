"""Two small kernels and recipes for the tests of `eyas.engine.kernels.launch.warm`; compiling at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.compile_ahead import Compilers, Variant


@triton.jit
def _scale(x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < count) * 2, at < count)


@triton.jit
def _broken(x):
    tl.no_such_function(x)


def scale(x: torch.Tensor, count: int, block: int, compile_only: bool = False) -> None:
    """x *= 2 on its first `count` entries."""
    if compile_only:
        _scale.warmup(x, count, block, grid=(1,))
    else:
        _scale[1,](x, count, block)


def recipe(count: int, device: str = "meta") -> None:
    """Two distinct kernels, one of them twice."""
    for dtype in (torch.float32, torch.float16, torch.float32):
        scale(torch.ones(64, device=device, dtype=dtype), count, block=32)


def tracing_recipe() -> None:
    """A kernel behind an operation that needs one name of torch's tracer, and then all of it."""
    both = torch.cat([torch.empty(32, device="meta")] * 2) + 1
    assert "torch._dynamo.eval_frame" not in sys.modules, "it takes a second to import"
    config = importlib.import_module("torch._dynamo.config")
    assert config is torch._dynamo.config and torch._dynamo.is_compiling is not None
    scale(both, 3, block=32)


def broken_recipe() -> None:
    _broken[1,](torch.empty(64, device="meta"))


def compile_all(variants: Iterable[Variant]) -> None:
    """Compiles them in another process, one at a time. Raises RuntimeError if one does not compile."""
    compilers = Compilers(1)
    for variant in variants:
        compilers.take(variant)
    compilers.finish()
