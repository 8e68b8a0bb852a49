"""Tables of tiles that were measured: files of JSON, a line for each tile with its key and its microseconds.

`eyas tune` writes those of this package; a first start leaves its own in the user's cache, for this version
and kind of GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from eyas import __version__
from eyas.common.config import ASSETS
from eyas.common.machine import gpus
from eyas.common.machine.folders import cache_home

VERSION = 1
"""Of the tiles in the cache: a change of kernels that makes others the fastest is a new one."""

KeyT = TypeVar("KeyT", bound=tuple[Any, ...])
TileT = TypeVar("TileT")


def caches() -> Path:
    """The folder of all files of the cache."""
    return cache_home() / "tiles"


@dataclass(frozen=True)
class TileTable(Generic[KeyT, TileT]):
    """The measured tiles of one kind of products, for each kind of GPU ("NVIDIA H200").

    `tile`: the class of a tile, a dataclass. `names`: of a key's parts. `products`: the kind, in the names of
    the cache's files; `suffix`: of the package's.
    """

    tile: Callable[..., TileT]
    names: tuple[str, ...]
    products: str
    suffix: str = ""

    def in_package(self, gpu: str) -> Path:
        """This package's file, which may not exist."""
        return ASSETS / "tiles" / f"{_spelt(gpu)}{self.suffix}.json"

    def in_cache(self, gpu: str) -> Path:
        """The file that first starts on this machine write."""
        parts = __version__, version("triton"), VERSION
        return caches() / f"{_spelt(gpu)}-{self.products}-{'-'.join(map(str, parts))}.json"

    def measured(self, device: str) -> dict[KeyT, TileT]:
        """The tiles of the GPU "cuda:1", if any were measured; for "meta" those of the first one. The
        package's come before those of the cache.
        """
        gpu = "" if device == "cpu" else gpus.model("cuda" if device == "meta" else device)
        if not gpu:
            return {}
        ours = self.in_package(gpu)
        return {**self._cached(gpu)[0], **(self.read(ours)[0] if ours.exists() else {})}

    def read(self, path: Path) -> tuple[dict[KeyT, TileT], dict[KeyT, float]]:
        """The tiles of a file, and the microseconds of each."""
        tiles: dict[KeyT, TileT] = {}
        times: dict[KeyT, float] = {}
        for line in json.loads(path.read_text())["tiles"]:
            key: Any = tuple(line.pop(name) for name in self.names)
            times[key] = line.pop("us")
            tiles[key] = self.tile(**line)
        return tiles, times

    def write(self, path: Path, gpu: str, tiles: Mapping[KeyT, TileT], times: Mapping[KeyT, float]) -> None:
        """Replaces a file; a line of it for each tile, in the order of their keys."""
        lines = []
        for key, tile in sorted(tiles.items(), key=lambda each: each[0]):
            made: Any = tile
            named = dict(zip(self.names, key, strict=True))
            lines.append(json.dumps(named | dataclasses.asdict(made) | {"us": round(times[key], 2)}))
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")  # readers find the file of before, or all of this
        whole.write_text(f'{{"gpu": {json.dumps(gpu)}, "tiles": [\n' + ",\n".join(lines) + "\n]}\n")
        whole.replace(path)

    def cache(self, gpu: str, tiles: Mapping[KeyT, TileT], times: Mapping[KeyT, float]) -> None:
        """Adds tiles to the cache's file."""
        own, own_times = self._cached(gpu)
        self.write(self.in_cache(gpu), gpu, {**own, **tiles}, {**own_times, **times})

    def _cached(self, gpu: str) -> tuple[dict[KeyT, TileT], dict[KeyT, float]]:
        """The cache's file as `read` gives it; a missing or damaged one has no tiles."""
        try:
            return self.read(self.in_cache(gpu))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}, {}


def _spelt(gpu: str) -> str:
    return gpu.replace(" ", "-")
