"""Tiles for a model that no table has: searched once on a kind of GPU, before its kernels are compiled.

The search is a process of its own, whose memory is free when weights are loaded, and which takes nothing with
it. Another worker of this machine waits for it instead of measuring beside it. Exact arithmetic takes from a
tile what changes no bit, and its start looks whether that is so.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from eyas.common.config import EngineConfig
from eyas.common.machine import gpus
from eyas.common.machine.processes import python_module
from eyas.engine.kernels.experts import grouped_tiles
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile
from eyas.engine.kernels.launch.tile_table import caches
from eyas.engine.kernels.products.skinny_tiles import PACKED_TILES, Key, ProductTile, tile_for
from eyas.engine.loading.product_shapes import SearchedProducts
from eyas.engine.loading.startup import StartPhases
from eyas.engine.models.table import read_model

BEYOND_S = 15.0
"""Seconds that a search may take beyond its time, to begin and to end its last product."""

Run = Callable[..., Any]
_log = logging.getLogger("eyas.engine")


def search_first(config: EngineConfig, phases: StartPhases, run: Run = subprocess.run) -> None:
    """Searches tiles for `config.tune_seconds`, if an engine of `config` would have rules alone for some
    products. What is not found, or fails, has the rule's from then on: no later start searches again.
    """
    if not _may_search(config) or not (gpu := gpus.model(config.device)):
        return
    try:
        with _alone():
            if len(products := _untuned(config)):
                _search(config, products, gpu, (phases, run))
    except OSError as error:
        _log.warning("tiles: none are searched, the cache cannot be written: %s", error)


def _search(config: EngineConfig, products: SearchedProducts, gpu: str, how: tuple[StartPhases, Run]) -> None:
    """`how`: the start's stopwatch, and what runs the process."""
    phases, run = how
    with phases("tiles"):
        why = _searched(config, run)
    rest = _untuned(config)
    dense = {each.key: tile_for(each.shape, 2, {}) for each in rest.dense}
    experts = {
        key: grouped_tiles.tile_for(shape, each.rows * each.per_row, {})
        for each in rest.experts
        for key, shape in zip(each.keys, each.shapes, strict=True)
    }
    keep_tiles(gpu, dense, experts, dict.fromkeys([*dense, *experts], 0.0))
    if why:
        _log.warning("tiles: the search for this model's products failed, rules have them: %s", why)
        return
    text = "tiles: %d products had a rule alone on %s: searched %d of them (--tune-seconds), kept in %s"
    _log.info(text, len(products), gpu, len(products) - len(rest), caches())


def _searched(config: EngineConfig, run: Run) -> str:
    """Runs the search; the reason for which it failed, or ""."""
    try:
        run(
            python_module("eyas.bench.first_start", *_words(config)),
            check=True,
            timeout=config.tune_seconds + BEYOND_S,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except subprocess.CalledProcessError as error:
        return str(error.stderr or b"", "utf-8", "replace")[-500:] or str(error)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def keep_tiles(
    gpu: str,
    dense: Mapping[Key, ProductTile],
    experts: Mapping[grouped_tiles.Key, GroupedTile],
    times: Mapping[Any, float],
) -> None:
    """Adds tiles, and their microseconds, to those that this machine keeps for a kind of GPU."""
    if dense:
        PACKED_TILES.cache(gpu, dense, times)
    if experts:
        grouped_tiles.TILES.cache(gpu, experts, times)


def _may_search(config: EngineConfig) -> bool:
    fast = config.attention_backend == "triton"
    whole = config.dtype != "float32" and config.dp_attention == 1 and not config.only_drafts
    return config.device != "cpu" and config.tune_seconds > 0 and fast and whole


def _untuned(config: EngineConfig) -> SearchedProducts:
    model = read_model(config.model, config.load_format, impl=config.model_impl)
    if model.foreign is not None:
        return SearchedProducts((), ())
    return SearchedProducts.of(model, config.tensor_parallel_size).untuned(config.device)


def _words(config: EngineConfig) -> list[str]:
    words = ["--model", config.model, "--tp", str(config.tensor_parallel_size), "--device", config.device]
    return [*words, "--seconds", str(config.tune_seconds)]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Waits until no other process of this machine searches."""
    caches().mkdir(parents=True, exist_ok=True)
    with (caches() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
