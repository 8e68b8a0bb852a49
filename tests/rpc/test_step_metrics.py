"""A worker's page tells how long its steps take, how many sequences they have, and how old its queue is."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_worker import RealWorker, decoding, real_worker, tiny_config

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.common.wire import clients

TOKENS = 40


async def scraped(worker: RealWorker) -> dict[str, float]:
    """Every sample of the worker's page, by its name and the bucket's bound."""
    url = f"http://127.0.0.1:{worker.front.metrics_port}/metrics"
    page = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())).decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {sample.name + sample.labels.get("le", ""): sample.value for sample in samples}


async def test_steps_are_counted_and_the_queue_has_an_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.worker.front.TICK_S", 0.01)
    config = tiny_config(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    async with (
        real_worker(config, Role.DECODE, draft=None, max_running=1, pool_dir=str(tmp_path)) as w,
        decoding(w) as decode,
    ):
        for id in ("first", "second"):
            decode.session.submit(GenerationRequest(id, (3, 4, 5), params), attempt=1, attach=False)
        ages, counts, ended = [], [], 0

        async def look() -> None:
            while True:
                page = await scraped(w)
                ages.append(page["eyas_queue_age_seconds"])
                counts.append(page["eyas_step_seconds_count"])
                await asyncio.sleep(0.02)

        looking = asyncio.create_task(look())
        while ended < 2:
            ended += sum(entry.finish is not None for entry in (await decode.next(clients.StepReply)).entries)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

        waited = [age for age in ages if age > 0.0]
        assert waited == sorted(waited) and waited[0] < waited[-1] < 60.0, "the second request waited"
        assert counts == sorted(counts) and len(set(counts)) > 2
        async with asyncio.timeout(30):
            while (page := await scraped(w))["eyas_step_seconds_count"] < 2 * TOKENS:
                await asyncio.sleep(0.05)
        assert page["eyas_step_seconds_count"] == page["eyas_step_seconds_bucket+Inf"] == 2 * TOKENS
        assert page["eyas_step_sequences_sum"] == page["eyas_step_sequences_bucket1.0"] == 2 * TOKENS
        assert 0.0 < page["eyas_step_seconds_sum"] < 60.0 and page["eyas_queue_age_seconds"] == 0.0
