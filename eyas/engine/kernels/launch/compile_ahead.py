"""Compiles the kernels that a recipe launches: in parallel, into Triton's cache on disk, without a GPU.

A recipe calls the launchers as the engine will, with tensors on the device "meta". Nothing runs. Each launch
is recorded as the variant that Triton would compile for its arguments. A new variant is compiled while the
recipe goes on, under the key by which the real launches look it up. Only recipes say which kernels there are,
and with which shapes they are called.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import pickle
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from eyas.engine.kernels.launch.launching import TritonKernel
from eyas.engine.kernels.launch.warm import CompileReport

Variant = Callable[[], Any]
TRACER = "torch._dynamo"


class NoDevice:
    """Stands in for Triton's driver: a GPU of which only the compute capability is known."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """The GPU that kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0


class LazyTracer(ModuleType):
    """Stands in for torch's tracer, which takes a second to import and which operations on "meta" tell that
    they are not to be traced. For anything else the tracer itself is imported.
    """

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        """The function as it is: nothing is traced."""
        return function

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def main() -> None:
    """Reads a pickled (recipe, args, capability, processes) from stdin; writes `CompileReport` to argv[1]."""
    began = time.perf_counter()
    recipe, args, capability, processes = pickle.load(sys.stdin.buffer)
    module, _, function = recipe.partition(":")
    driver.set_active(NoDevice(capability))
    prepared = Thread(target=prepare)
    prepared.start()
    launches = partial(getattr(importlib.import_module(module), function), *args)
    sys.modules.setdefault(TRACER, LazyTracer(TRACER))
    prepared.join()
    compilers = Compilers(processes)
    kernels = len(record(launches, compilers.take))
    compilers.finish()
    partly = Path(f"{sys.argv[1]}.{secrets.token_hex(8)}")
    partly.write_text(json.dumps(asdict(CompileReport(kernels, time.perf_counter() - began))))
    partly.rename(sys.argv[1])


def prepare() -> None:
    """Makes what each compiler needs: the name of Triton, a hash of all its files, and the C code that every
    user of the driver loads.
    """
    triton_key()
    if _has_cuda():
        nvidia.CudaUtils()


def record(recipe: Callable[[], None], take: Callable[[Variant], None] = lambda _: None) -> list[Variant]:
    """One function for each distinct kernel that `recipe` launches; it compiles it. Nothing is launched.

    `take` is called with each of them as soon as it is known.
    """
    variants: dict[tuple[JITFunction[Any], str], Variant] = {}
    compile_now, launch = JITFunction._do_compile, TritonKernel.launch
    launched: set[tuple[Any, ...]] = set()

    def launch_once(kernel: TritonKernel, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        """Spares Triton's look at the arguments where the variant is known, which takes most of the time."""
        if (key := (kernel, *kernel.key(args, named))) not in launched:
            launched.add(key)
            launch(kernel, grid, *args, **named)

    def compile_later(function: JITFunction[Any], key: str, *variant: Any) -> None:
        if (function, key) not in variants:
            variants[function, key] = partial(compile_now, function, key, *variant)
            take(variants[function, key])

    with (
        patch.object(JITFunction, "_do_compile", compile_later),  # a launch without a kernel ends there
        patch.object(TritonKernel, "launch", launch_once),
    ):
        recipe()
    return list(variants.values())


class Compilers:
    """Forked processes, one per variant, of which `most` compile at a time. This one must have touched no
    GPU.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._context = multiprocessing.get_context("fork")
        self._waiting: deque[Variant] = deque()
        self._running: list[ForkProcess] = []
        self._failed = False

    def take(self, variant: Variant) -> None:
        """Compiles a variant as soon as fewer than `most` are being compiled."""
        self._waiting.append(variant)
        self._go_on()

    def finish(self) -> None:
        """Returns once all are compiled. Raises RuntimeError if one does not compile."""
        while self._running:
            connection.wait([child.sentinel for child in self._running])
            self._go_on()
        if self._failed:
            raise RuntimeError("a kernel does not compile")

    def _go_on(self) -> None:
        codes = [child.exitcode for child in self._running]
        self._failed |= any(codes)
        self._running = [child for child, code in zip(self._running, codes, strict=True) if code is None]
        while self._waiting and len(self._running) < self._most:
            child = self._context.Process(target=_compile, args=(self._waiting.popleft(),))
            child.start()
            self._running.append(child)


def _compile(variant: Variant) -> None:
    kernel = variant()
    if _has_cuda():
        nvidia.CudaLauncher(kernel.src, kernel.metadata)  # puts its C code into the cache as well


def _has_cuda() -> bool:
    """True if the GPU driver's library is there, against which launchers are linked."""
    try:
        return bool(nvidia.libcuda_dirs())
    except AssertionError:
        return False


if __name__ == "__main__":
    main()
