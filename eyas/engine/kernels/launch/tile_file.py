"""A file of tiles that were measured: JSON, a line for each, with its key and its microseconds.

`eyas tune` writes those of this package; a first start leaves its own in the user's cache, for this version
and kind of GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eyas import __version__
from eyas.common.machine.folders import cache_home

VERSION = 1
"""Of the tiles in the cache: a change of kernels that makes others the fastest is a new one."""

Line = tuple[tuple[Any, ...], dict[str, Any], float]
"""A tile's key, its fields and its microseconds."""


def cache_of(gpu: str, products: str) -> Path:
    """The file in the user's cache for a kind of GPU, "NVIDIA H200"."""
    parts = __version__, version("triton"), VERSION
    return caches() / f"{gpu.replace(' ', '-')}-{products}-{'-'.join(map(str, parts))}.json"


def caches() -> Path:
    """The folder of all such files."""
    return cache_home() / "tiles"


def of_cache(read: Callable[[Path], dict[Any, Any]], path: Path) -> dict[Any, Any]:
    """What `read` makes of a file in the cache; of one that is missing or damaged, nothing."""
    try:
        return read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def read(path: Path, names: Sequence[str]) -> Iterator[Line]:
    """The lines of a file; `names`: of a key's parts."""
    for line in json.loads(path.read_text())["tiles"]:
        key = tuple(line.pop(name) for name in names)
        us = line.pop("us")
        yield key, line, us


def write(
    path: Path, gpu: str, names: Sequence[str], tiles: Mapping[Any, Any], times: Mapping[Any, float]
) -> None:
    """Replaces the file; a line of it for each tile, a dataclass, in the order of their keys."""
    lines = [
        json.dumps(
            dict(zip(names, key, strict=True)) | dataclasses.asdict(tile) | {"us": round(times[key], 2)}
        )
        for key, tile in sorted(tiles.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")  # readers find the file of before, or all of this
    whole.write_text(f'{{"gpu": {json.dumps(gpu)}, "tiles": [\n' + ",\n".join(lines) + "\n]}\n")
    whole.replace(path)
