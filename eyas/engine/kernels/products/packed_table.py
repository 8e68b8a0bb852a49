"""Tiles of products with four-bit weights that `eyas tune int4` measured: a file for each kind of GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from eyas.common.config import ASSETS
from eyas.common.machine import gpus
from eyas.engine.kernels.launch import tile_file
from eyas.engine.kernels.products.skinny_tiles import ProductTile, Table

_KEY = ("kind", "rows", "n", "k")
Key = tuple[str, int, int, int]


def table_of(gpu: str) -> Path:
    """The file of the tiles of a kind of GPU, "NVIDIA H200"."""
    return ASSETS / "tiles" / f"{gpu.replace(' ', '-')}-int4.json"


def measured(device: str) -> dict[Key, ProductTile]:
    """The tiles of the GPU "cuda:1", if any were measured; for "meta" those of the first one. They are the
    package's, and what a first start on this machine found for what its table has not.
    """
    gpu = "" if device == "cpu" else gpus.model("cuda" if device == "meta" else device)
    if not gpu:
        return {}
    ours = read_table(table_of(gpu)) if table_of(gpu).exists() else {}
    return {**tile_file.of_cache(read_table, cache_of(gpu)), **ours}


def cache_of(gpu: str) -> Path:
    """The file that a first start on this machine writes."""
    return tile_file.cache_of(gpu, "products")


def read_table(path: Path) -> dict[Key, ProductTile]:
    """Reads a table that `write_table` wrote."""
    return {cast(Key, key): ProductTile(**tile) for key, tile, _ in tile_file.read(path, _KEY)}


def read_times(path: Path) -> dict[Key, float]:
    """Reads the time of each tile, in microseconds."""
    return {cast(Key, key): us for key, _, us in tile_file.read(path, _KEY)}


def write_table(path: Path, gpu: str, tiles: Table, times: Mapping[Key, float]) -> None:
    """Replaces the file."""
    tile_file.write(path, gpu, _KEY, tiles, times)
