"""What a GPU engine takes of the device: the fraction it was given, and no more after 10,000 requests."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from eyas.common.config import resolve_engine
from eyas.engine.models.table import read_model
from tests.unit.campaign import Campaign, Traffic
from tests.unit.loopback import Loopback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

WARM_UP, REQUESTS = 1_000, 10_000
SECONDS = 90.0
MIB = 1 << 20
GROWTH, RESERVE = (
    1 * MIB,
    512 * MIB,
)  # what allocated memory may differ by, and the allocator's own hoard grow


@pytest.mark.timeout(180)
def test_random_requests_leave_nothing_on_the_device() -> None:
    """Drafted and plain requests, aborts, deadlines and preemptions; memory is compared while idle."""
    config = resolve_engine("cuda", worker="gpu", num_pages=320, max_running=64)
    model = read_model(config.model)
    traffic = Traffic(96, model.vocab_size, 160, 32, frozenset(model.eos_token_ids))
    cluster = Loopback(config)
    try:
        campaign = Campaign(cluster, traffic, seed=1)
        campaign.run(WARM_UP, SECONDS)
        campaign.idle_load()
        before = _memory()
        began = time.monotonic()
        campaign.run(REQUESTS - WARM_UP, SECONDS)
        seconds = time.monotonic() - began
        load = campaign.idle_load()
        after = _memory()
    finally:
        cluster.close()
    tally = campaign.tally
    print(
        f"\n{tally.finished} requests finished, {tally.aborted} aborted, {tally.late} late; "
        f"{tally.tokens} tokens, {load.preemptions} preemptions, {(REQUESTS - WARM_UP) / seconds:.0f}/s; "
        f"allocated {before[0] / MIB:.1f} -> {after[0] / MIB:.1f} MiB, "
        f"reserved {before[1] / MIB:.0f} -> {after[1] / MIB:.0f} MiB"
    )
    assert tally.requests == REQUESTS and tally.aborted > REQUESTS // 20
    assert load.preemptions > 0, "the pool was large enough"
    assert after[0] - before[0] <= GROWTH
    assert after[1] - before[1] <= RESERVE


@pytest.mark.timeout(120)
def test_the_pool_takes_what_the_fraction_says() -> None:
    """Weights and pages together; graphs, activations and contexts lie outside the fraction: 2 GiB at most.

    The first engine of a process pays for contexts that the second finds. A pool that peers map is no tensor
    of PyTorch's allocator, so the device itself is asked.
    """
    total = torch.cuda.mem_get_info()[1]
    less, more = (_taken_at(fraction) for fraction in (0.2, 0.5))
    print(f"\n0.2 and 0.5 of {total / MIB:.0f} MiB: {less / MIB:.0f} and {more / MIB:.0f} MiB taken")
    assert abs((more - less) / total - 0.3) < 0.01
    assert abs(more / total - 0.5) < 0.015


def _taken_at(fraction: float) -> int:
    """Bytes of the device that an idle engine takes."""
    before = _used()
    config = resolve_engine("cuda", worker="gpu", num_pages=None, mem_fraction_static=fraction)
    cluster = Loopback(config)
    try:
        while any(worker.ready is None for worker in cluster.workers.values()):
            time.sleep(0.01)
        return _used() - before
    finally:
        cluster.close()
        torch.cuda.empty_cache()


def _used() -> int:
    """Bytes that are taken on the device, by all."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _memory() -> tuple[int, int]:
    """Bytes that tensors take on the device, and bytes that PyTorch holds there."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
