"""The host tier beside a pool on a GPU: pages leave, come back, and have the same bits; what that takes.

The time of a load stands beside that of computing the same tokens: run with `-s` to see both.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.host_memory import HostMemory
from eyas.engine.kv.host_tier import HostTier
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.loop.engine import Engine
from tests.unit.loopback import Loopback, Result, wait_all

PAGE, PAGES = 16, 1024  # of 2 MiB: an 8B model's, in bf16
TOKENS = 8192
COMPUTED_PER_S = 30_000  # prompt tokens of an 8B model on an H200
WAIT_S = 60.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]


def until(poll: Callable[[], object], done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.0002)
        poll()


def test_pages_come_back_with_the_same_bits_faster_than_they_are_computed() -> None:
    shape = PoolShape(
        KvFormat(32, 8, 128), pages=PAGES, page_size=PAGE, dtype=torch.bfloat16, device="cuda:0"
    )
    pool, pages = KvPool(shape), PagePool(PAGES)
    cache = PrefixCache(pages, PAGE, lookahead=0)
    began = time.monotonic()
    memory = HostMemory([pool], PAGES)
    tier = HostTier(pages, cache, memory)
    print(f"\nthe start takes {1e3 * (time.monotonic() - began):.1f} ms")
    until(tier.poll, lambda: memory.ready == PAGES)
    print(f"{PAGES * shape.page_bytes / 2**30:.1f} GiB are locked after {time.monotonic() - began:.2f} s")
    pool.tensor.copy_(torch.randn(pool.tensor.shape, device="cuda:0"))
    tokens = tuple(random.Random(1).randrange(10_000) for _ in range(TOKENS)) + (0,)
    count = TOKENS // PAGE
    left = random.Random(2).sample(pages.take(PAGES), PAGES)  # pages of a busy pool do not lie in a row
    truth = pool.tensor[left[:count]].clone()
    torch.cuda.synchronize()
    cache.insert(tokens, left[:count], TOKENS)
    pages.drop(left)
    began = time.monotonic()
    pages.take(PAGES - count)
    until(tier.poll, lambda: tier.cached_pages == count)
    print(f"{TOKENS} tokens leave in {1e3 * (time.monotonic() - began):.1f} ms")
    cache.evict(count)
    pool.tensor.zero_()
    torch.cuda.synchronize()
    names, errors = tier.find(cache.names_after(tokens, ())), []
    back = random.Random(3).sample(pages.take(count, settled=True), count)
    began = time.monotonic()
    tier.load(names, back, errors.append)
    until(tier.poll, lambda: bool(errors))
    seconds = time.monotonic() - began
    assert errors == [None] and torch.equal(pool.tensor[back], truth)
    rate = count * shape.page_bytes / seconds / 1e9
    print(f"{TOKENS} tokens come back in {1e3 * seconds:.1f} ms ({rate:.1f} GB/s)")
    assert seconds < TOKENS / COMPUTED_PER_S / 2
    assert memory.close(time.monotonic() + 5.0)
    pool.close()


def engine(**changes: Any) -> EngineConfig:
    """The embedded model's shape has small pages: bits and hits are the matter here, not times."""
    sizes = {"mem_fraction_static": 0.3, "num_pages": 200, "max_running": 8, "cuda_graph_max_bs": 8}
    return resolve_engine("cuda", **(sizes | {"draft": None, "worker": "alone"} | changes))


def ask(cluster: Loopback, id: str, prompt: tuple[int, ...]) -> tuple[Result, float]:
    """One answer of one token, and the seconds that it took."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    began = time.monotonic()
    result = cluster.submit(GenerationRequest(id, prompt, params), split=False)
    wait_all([result], WAIT_S)
    return result, time.monotonic() - began


def test_an_engine_gets_long_prompts_back() -> None:
    """Twelve prompts of 1000 tokens go round in a pool for three: from the second round on they come back."""
    rng = random.Random(4)
    prompts = [tuple(rng.randrange(9, 4000) for _ in range(1000)) for _ in range(12)]
    cluster = Loopback(engine(host_cache_gb=2.0))
    try:
        worker = cluster.workers["alone"].engine
        assert isinstance(worker, Engine) and worker._scheduler.host is not None
        worker._scheduler.host._rate = 1.0  # so small a model computes prompts as fast as they are copied
        rounds = [[ask(cluster, f"{n}.{i}", prompt) for i, prompt in enumerate(prompts)] for n in range(3)]
    finally:
        cluster.close()
    scheduler = worker._scheduler
    assert scheduler.pool.used == 0
    print("\nms per prompt:", [f"{1e3 * sum(s for _, s in one) / len(one):.1f}" for one in rounds])
    print(scheduler.host.counts)
    assert scheduler.host.counts.tokens > 12 * 900
