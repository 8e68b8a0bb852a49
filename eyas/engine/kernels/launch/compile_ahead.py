"""Compiles the kernels that a recipe launches: in parallel, into Triton's cache on disk, without a GPU.

A recipe calls the launchers as the engine will, with tensors on the device "meta". Nothing runs. Each launch
is recorded as the variant that Triton would compile for its arguments, and the variants are compiled under
the keys by which the real launches look them up. Only recipes say which kernels there are, and with which
shapes they are called.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import pickle
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from eyas.engine.kernels.launch.warm import CompileReport

Variant = Callable[[], Any]


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


def main() -> None:
    """Reads a pickled (recipe, args, capability, processes) from stdin; writes `CompileReport` to argv[1]."""
    began = time.perf_counter()
    recipe, args, capability, processes = pickle.load(sys.stdin.buffer)
    module, _, function = recipe.partition(":")
    driver.set_active(NoDevice(capability))
    variants = record(partial(getattr(importlib.import_module(module), function), *args))
    compile_all(variants, min(processes, len(variants)))
    partly = Path(f"{sys.argv[1]}.{secrets.token_hex(8)}")
    partly.write_text(json.dumps(asdict(CompileReport(len(variants), time.perf_counter() - began))))
    partly.rename(sys.argv[1])


def record(recipe: Callable[[], None]) -> list[Variant]:
    """One function for each distinct kernel that `recipe` launches; it compiles it. Nothing is launched."""
    variants: dict[tuple[JITFunction[Any], str], Variant] = {}
    compile_now = JITFunction._do_compile

    def compile_later(function: JITFunction[Any], key: str, *variant: Any) -> None:
        variants.setdefault((function, key), partial(compile_now, function, key, *variant))

    with patch.object(JITFunction, "_do_compile", compile_later):  # a launch without a kernel ends there
        recipe()
    return list(variants.values())


def compile_all(variants: list[Variant], processes: int) -> None:
    """Compiles the variants in forked processes. This process has touched no GPU, so it may fork.

    Raises RuntimeError if one does not compile.
    """
    triton_key()  # hashes the whole compiler, so that the children need not
    if _has_cuda():
        nvidia.CudaUtils()  # compiles C code that every user of the driver loads
    context = multiprocessing.get_context("fork")
    taken = context.Value("i", 0)
    children = [context.Process(target=_compile_some, args=(variants, taken)) for _ in range(processes)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise RuntimeError("a kernel does not compile")


def _compile_some(variants: list[Variant], taken: Any) -> None:
    while True:
        with taken.get_lock():
            turn, taken.value = taken.value, taken.value + 1
        if turn >= len(variants):
            return
        kernel = variants[turn]()
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
