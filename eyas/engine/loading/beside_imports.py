"""Preparations of a GPU's engine that run while it is imported: importing takes the interpreter, and leaves
the GPU and other processors idle.

This module loads without torch.
"""

from __future__ import annotations

import contextlib
from threading import Thread

from eyas.common.machine.gpus import number_of
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.gpu.driver import DriverError


def prepare(device: str) -> list[Thread]:
    """Begins to make the GPU's context, and Triton's name of itself, which is a hash of all its files and a
    part of the name of each kernel in its cache. None for a CPU.

    Threads end with the process. A failure is raised where the result is needed.
    """
    if device == "cpu":
        return []
    threads = [
        Thread(target=_make_context, args=(number_of(device),), name="context", daemon=True),
        Thread(target=_name_triton, name="triton", daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def _make_context(number: int) -> None:
    with contextlib.suppress(DriverError):
        CudaDriver(number)


def _name_triton() -> None:
    with contextlib.suppress(ImportError, OSError):
        import torch  # noqa: F401  first, and once: this waits for another thread's import
        from triton.runtime.cache import triton_key

        triton_key()
