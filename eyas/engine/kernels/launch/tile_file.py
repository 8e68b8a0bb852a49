"""A file of tiles that `eyas tune` measured: JSON, a line for each, with its key and its microseconds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = tuple[tuple[Any, ...], dict[str, int], float]
"""A tile's key, its fields and its microseconds."""


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
    path.write_text(f'{{"gpu": {json.dumps(gpu)}, "tiles": [\n' + ",\n".join(lines) + "\n]}\n")
