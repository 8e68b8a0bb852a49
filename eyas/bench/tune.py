"""`eyas tune moe|gemm|int4`: the fastest tiles of a model's products on this GPU, kept as a table.

`search` compares tiles. An engine reads the table of its kind of GPU when it starts
(`eyas.engine.kernels.launch.tile_table`).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError
from eyas.common.machine import gpus
from eyas.flags import positive

SECONDS = 600


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of either command."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a folder with a config.json; weights are not read")
    add("--tensor-parallel-size", "--tp", type=positive, default=1, metavar="N", help="ranks (1)")
    add("--device", default="cuda", metavar="CUDA", help='the GPU (cuda); "cuda:1" is the second')
    add("--out", type=Path, metavar="FILE", help="the table (that of this kind of GPU, in the package)")
    add("--seconds", type=positive, default=SECONDS, metavar="S", help=f"the search's time ({SECONDS})")


def run(args: argparse.Namespace) -> int:
    """Searches, and tells of every product as it is found. Raises ConfigError without a GPU, or products."""
    gpu, began = gpus.model(args.device), time.monotonic()
    if not gpu:
        raise ConfigError(f"--device: {args.device!r} is no GPU here", param="device")
    from eyas.bench import packed_search, tile_search
    from eyas.engine.kernels.experts.grouped_tiles import TILES
    from eyas.engine.kernels.products.skinny_tiles import PACKED_TILES

    tried: Any = packed_search if args.products == "int4" else tile_search
    table: Any = PACKED_TILES if args.products == "int4" else TILES
    jobs = tried.jobs_of(args.model, args.tensor_parallel_size, args.products)
    if not jobs:
        message = f"--model: {args.model} has no products that `eyas tune {args.products}` is about"
        raise ConfigError(message, param="model")
    path = args.out or table.in_package(gpu)
    tiles, times = table.read(path) if path.exists() else ({}, {})
    import torch

    torch.cuda.set_device(gpus.number_of(args.device))
    for key, best in tried.search(jobs, args.device, began + args.seconds):
        tiles[key], times[key] = best.tile, best.us
        print(f"{key}: {best.us:.1f} us (by the rule {best.ruled_us:.1f}), {best.tile}", flush=True)
        table.write(path, gpu, tiles, times)
    print(f"{path}: {len(tiles)} tiles", file=sys.stderr)
    return 0
