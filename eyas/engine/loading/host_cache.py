"""Builds the host tier of `--host-cache-gb`, where there can be one, and the stores behind it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from eyas.common.cluster.names import mooncake_master
from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.memory import memory
from eyas.common.types import KvKind
from eyas.engine.kv.cold_tier import ColdTier
from eyas.engine.kv.host_memory import HostMemory
from eyas.engine.kv.host_tier import HostTier
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.kv.stores.disk import DiskStore
from eyas.engine.kv.stores.mooncake import MooncakeStore
from eyas.engine.kv.stores.store import PageStore
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.scheduling.host_loads import HostLoads

FLAG = "host-cache-gb"
_log = logging.getLogger("eyas.engine")


def check_host_cache(config: EngineConfig) -> None:
    """Raises ConfigError if a tier is asked for and this engine, or the memory here, has none.

    A draft worker has no prefix cache: it passes over such flags, as over others that are for targets, so
    that one list of flags can serve all workers.
    """
    requested = config.host_cache_gb
    if not requested or config.only_drafts:
        return
    if config.tensor_parallel_size > 1:
        raise ConfigError(f"--{FLAG}: GPUs that share a model have no host tier", param=FLAG)
    there = memory()
    if requested > there.free_gib:
        has = f"the {there.holder} has {there.free_gib:.1f} GiB available: ask for less than that"
        raise ConfigError(f"--{FLAG}: {requested:g} GiB asked for, and {has}", param=FLAG)


def host_loads(
    loaded: EngineSpec, pools: Sequence[KvPool], pages: PagePool, cache: PrefixCache, slowest_step_s: float
) -> HostLoads | None:
    """The tier of pools with these page numbers; None if none is asked for.

    The slowest step of the start computed a whole chunk: that is how fast prompts are computed. ConfigError
    if the tier would have no room for a page.
    """
    config = loaded.config
    if not config.host_cache_gb:
        return None
    page_bytes = sum(pool.shape.page_bytes for pool in pools)
    slots = int(config.host_cache_gb * 2**30) // page_bytes
    if not slots:
        raise ConfigError(
            f"--{FLAG}: {config.host_cache_gb:g} GiB hold no page of {page_bytes} bytes", param=FLAG
        )
    _log.info("host cache: %d KV pages, %d tokens, which come by and by", slots, slots * config.page_size)
    memory = HostMemory(pools, slots)
    tier = HostTier(pages, cache, memory)
    rate = config.chunk_tokens / max(slowest_step_s, 1e-6)
    loads = HostLoads(tier, pages, cache, config.page_size, rate)
    if stores := _stores(loaded, cache):
        loads.cold = ColdTier(tier, memory.parts, stores, config.page_size / rate)
    return loads


def _stores(loaded: EngineSpec, cache: PrefixCache) -> list[PageStore]:
    """Behind the host's memory, the nearest first."""
    config, namespace = loaded.config, _namespace(loaded, cache)
    stores: list[PageStore] = []
    if config.disk_cache_dir is not None:
        stores.append(DiskStore(Path(config.disk_cache_dir), namespace, int(config.disk_cache_gb * 2**30)))
    if config.kv_store is not None:
        stores.append(_shared(config.kv_store, namespace, config.kv_store_ttl_s))
    for store in stores:
        _log.info("KV pages also go to the %s, as %s", store.name, namespace)
    return stores


def _shared(url: str, namespace: str, lives_s: int) -> PageStore:
    if (master := mooncake_master(url)) is not None:
        return MooncakeStore(master, namespace)
    from eyas.engine.kv.stores.shared import SharedStore  # brings redis, which takes a start 0.4 s

    return SharedStore(url, namespace, lives_s)


def _namespace(loaded: EngineSpec, cache: PrefixCache) -> str:
    """The name of all caches whose pages have the same names and the same bytes, 32 hexadecimal digits."""
    kinds = (KvKind.TARGET, KvKind.DRAFT)[: 1 + cache.lookahead]
    meanings = [loaded.layout_hash(kind) for kind in kinds]
    text = repr((meanings, cache.shape.size, cache.lookahead))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
