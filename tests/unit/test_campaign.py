"""A few hundred random requests, some given up, on an engine whose pool is too small for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.common.config import EngineConfig
from tests.unit.campaign import Campaign, Traffic
from tests.unit.loopback import Loopback
from tests.unit.tiny import EOS_TOKEN_ID, write_tiny_eagle3, write_tiny_llama

REQUESTS = 300
TRAFFIC = Traffic(
    at_once=24, vocab_size=256, longest_prompt=32, longest_answer=12, eos_ids=frozenset({EOS_TOKEN_ID})
)


@pytest.mark.slow
def test_random_requests_leave_nothing(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target")
    head = write_tiny_eagle3(tmp_path / "head", target)
    config = EngineConfig(
        model=str(target),
        draft=str(head),
        num_pages=28,
        max_running=16,
        chunk_tokens=48,
        pool_dir=str(tmp_path),
        worker="unified",
    )
    cluster = Loopback(config)
    try:
        campaign = Campaign(cluster, TRAFFIC, seed=1)
        campaign.run(REQUESTS, seconds=100)
        load = campaign.idle_load()
    finally:
        cluster.close()
    assert campaign.tally.requests == REQUESTS
    assert campaign.tally.finished > 100 and campaign.tally.aborted > 20
    assert load.preemptions > 0, "the pool was large enough"
