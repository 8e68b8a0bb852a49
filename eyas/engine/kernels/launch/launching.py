"""Launches kernels with little work on the host, and without a gap between them.

A step that is no CUDA graph launches some twenty kernels for each layer. Triton binds and inspects every
argument of every launch, tens of microseconds; `TritonKernel` remembers what came of it. Programmatic
dependent launch closes the gaps on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter runs the kernels: it has no assembler, and no bfloat16."""

_ALIGNED = 16  # bytes, and what whole numbers are multiples of, where Triton knows it


@dataclass(frozen=True)
class _KernelVariant:
    """A kernel that Triton has compiled, and the values of the parameters behind those that a
    launch gives.
    """

    compiled: CompiledKernel
    rest: tuple[Any, ...]


class TritonKernel:
    """A Triton kernel, launched as any other: `kernel[grid](*args, **constants_and_options)`.

    A variant is found by the constants, the options, and what Triton may know of each argument: its type, and
    how it is aligned. Arguments that are no constants are given by position. Hooks on launches see the first
    one of each variant alone. `fn` and `warmup`: Triton's.
    """

    def __init__(self, function: JITFunction[Any]) -> None:
        self.fn, self.warmup = function.fn, function.warmup
        self._function = function
        self._constant = tuple(param.is_constexpr for param in function.params)
        self._variants: dict[Any, _KernelVariant] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        """Launches the variant of these arguments; the first launch of each goes through Triton."""
        device = driver.active.get_current_device()
        key = (device, *self.key(args, named))
        variant = self._variants.get(key)
        if variant is None:
            name_on_disk(self._function)
            rest = self._rest(len(args), named)
            compiled = self._function[grid](*args, **named)
            if compiled is not None:  # else it was recorded, to be compiled
                self._variants[key] = _KernelVariant(compiled, rest)
            return
        compiled, (x, y, z) = variant.compiled, (*grid, 1, 1)[:3]
        compiled.run(
            *(x, y, z, driver.active.get_current_stream(device)),
            *(compiled.function, compiled.packed_metadata, None, None, None),
            *(*args, *variant.rest),
        )

    def key(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The name of a launch's variant: launches with one key are of one variant."""
        known = [
            arg if constant else _known(arg) for constant, arg in zip(self._constant, args, strict=False)
        ]
        return (*known, *named.items())

    def _rest(self, given: int, named: dict[str, Any]) -> tuple[Any, ...]:
        params = self._function.params
        for param in params:
            if param.name in named and not param.is_constexpr:
                raise TypeError(f"{param.name} is no constant: give it by position")
        return tuple(named.get(param.name, param.default) for param in params[given:])


def name_on_disk(function: JITFunction[Any], callers: tuple[JITFunction[Any], ...] = ()) -> str:
    """The name of a function in Triton's cache on disk, by all constants that it reads, through others too.

    By itself Triton takes those of functions that were named before, and leaves the others' out. A name would
    depend on what else was launched before, and a start would compile what another process has compiled
    ahead. So the functions that this one calls are named first, but those of `callers`, which wait for it.
    """
    if function.hash is None:
        waiting = (*callers, function)
        for name in function.fn.__code__.co_names:
            called = function.fn.__globals__.get(name)
            if isinstance(called, JITFunction) and called not in waiting:
                name_on_disk(called, waiting)
    return str(function.cache_key)


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A decorator like `triton.jit`, for kernels that the host launches."""
    if function is None:
        return partial(kernel, **options)
    made = triton.jit(function, **options)
    return TritonKernel(made) if isinstance(made, JITFunction) else made  # else it is interpreted


def _known(arg: Any) -> Any:
    """The key of an argument that may decide about a variant: no less than what Triton specialises for."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % _ALIGNED == 0
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape
    if isinstance(arg, int):
        return type(arg), arg == 1, arg % _ALIGNED == 0, -(1 << 31) <= arg < 1 << 31, arg < 1 << 63
    if isinstance(arg, tuple):
        return tuple(map(_known, arg))
    if arg is None or isinstance(arg, float):
        return type(arg)
    raise TypeError(f"a kernel is given a {type(arg).__name__}: what decides about its variant is not known")


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Lets the next kernel be launched, and waits for the memory of the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def call_ahead(lines):
    """Calls lines of memory (pointers, one for each) into the L2 cache: a hint, before the kernel may read.

    Addresses must exist, whatever the kernels before have written or have not yet.
    """
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def call_ahead_where(lines, there):
    """The same of those that are `there`: others need not exist."""
    tl.inline_asm_elementwise(
        "{ .reg .pred %p; setp.ne.s32 %p, $2, 0; @%p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [lines, there.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def in_turn(numbers):
    """The same numbers, in registers up to here: else the compiler puts what the matrix unit multiplies into
    shared memory as soon as it is loaded, however late it is needed.
    """
    if not INTERPRETED:
        PACK: tl.constexpr = 32 // numbers.dtype.primitive_bitwidth
        numbers = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [numbers], dtype=numbers.dtype, is_pure=False, pack=PACK
        )
    return numbers


@triton.jit
def fence_acquired():
    """Behind a sign that memory is there: what is read from now on, by the tensor memory accelerator too, is
    what was written before the sign.
    """
    tl.inline_asm_elementwise(
        "{ fence.acq_rel.gpu; fence.proxy.async.global; mov.b32 $0, $1; }",
        "=r,r",
        [tl.arange(0, 128)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
