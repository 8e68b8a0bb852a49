"""Kernels that are compiled before they are needed: the process that compiles them, and the cache it fills.

This module loads without torch, so that the compiling starts before anything else does.
`eyas.engine.kernels.launch.compile_ahead` says what a recipe is, and compiles its kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eyas.common.config import ASSETS
from eyas.common.machine.folders import cache_home
from eyas.common.machine.processes import python_module
from eyas.engine.kernels.launch.tile_table import caches


@dataclass(frozen=True)
class CompileReport:
    """The number of distinct kernels that a recipe launches, and the seconds of compiling: 0 if all were
    cached.
    """

    kernels: int
    seconds: float


class KernelWarmup:
    """The kernels of a recipe. Other processes compile them from the construction on."""

    def __init__(self, recipe: str, args: tuple[Any, ...], capability: int, processes: int) -> None:
        """`recipe`: "package.module:function", called with `args` (picklable) in another process.

        `capability`: compute capability, 90 for a Hopper GPU. `processes`: how many compile at a time.
        Construct it before this process compiles a kernel: see `use_cache`.
        """
        directory = use_cache(capability)
        task = pickle.dumps((recipe, args, capability, processes))
        self._done = directory / f"{_digest(_sources() + task)}.json"
        self._said = tempfile.TemporaryFile()
        self._process = None
        if not self._done.exists():
            command = python_module("eyas.engine.kernels.launch.compile_ahead", str(self._done))
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=self._said)
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                pipe.write(task)

    def wait(self) -> CompileReport:
        """Waits until every kernel is in the cache. Raises RuntimeError with the compiler's message."""
        if self._process is None:
            return CompileReport(json.loads(self._done.read_text())["kernels"], 0.0)
        if self._process.wait() != 0:
            self._said.seek(0)
            raise RuntimeError(f"kernels could not be compiled:\n{self._said.read().decode()[-4000:]}")
        return CompileReport(**json.loads(self._done.read_text()))


def use_cache(capability: int) -> Path:
    """Makes this process, and those that it starts, keep Triton's kernels in the directory that it returns.

    There is one directory per version and GPU. In it, Triton names every kernel by a hash of its source and
    arguments.
    """
    parts = (sys.version, version("torch"), version("triton"), capability)
    directory = cache_home() / "kernels" / _digest(repr(parts).encode())
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(directory)
    return directory


def _sources() -> bytes:
    """The engine's sources and measured tiles, which decide what a recipe launches."""
    tiles = [*(ASSETS / "tiles").glob("*.json"), *caches().glob("*.json")]
    paths = [*Path(__file__).parents[2].rglob("*.py"), *tiles]
    return b"".join(path.read_bytes() for path in sorted(paths))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
