"""Open-loop load: every request is sent when it is due, whatever became of those before it.

It knows requests with due times. A request that has no end in time counts as one that failed, so that runs on
different layouts have the same requests in the same order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.bench.jobs import FIRST_PLAIN_ID, LoadJob
from eyas.bench.records import RequestRecord
from eyas.bench.runner import ClientMeter, TargetServer
from eyas.common.machine.processes import raise_limit


@dataclass(frozen=True)
class Sent:
    """A record per job, in their order; what the client itself took of a core, and how late it was."""

    records: list[RequestRecord]
    client_cpu: float
    client_lag_ms: float


def token_ids(vocabulary: int, count: int, *seed: int) -> tuple[int, ...]:
    """Plain token ids of a vocabulary, the same for the same seed."""
    drawn = np.random.default_rng(seed).integers(FIRST_PLAIN_ID, vocabulary, count)
    return tuple(drawn.tolist())


async def send(target: TargetServer, jobs: Sequence[LoadJob], drain_s: float) -> Sent:
    """Sends jobs of one turn when they are due; ends `drain_s` after the last one at the latest.

    `start_s` of a record is from the run's zero; `waited_s` is how late the client sent it.
    """
    raise_limit()  # a connection per request that is under way
    zero = time.perf_counter()
    async with ClientMeter() as meter:
        tasks = [asyncio.create_task(_one(target, job, zero)) for job in jobs]
        last = max(job.due_s or 0.0 for job in jobs)
        try:
            await asyncio.wait(tasks, timeout=zero + last + drain_s - time.perf_counter())
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    records = [
        one if isinstance(one, RequestRecord) else _unended(job) for one, job in zip(ended, jobs, strict=True)
    ]
    return Sent(records, meter.cpu_s / (time.perf_counter() - zero), meter.lag_ms())


async def _one(target: TargetServer, job: LoadJob, zero: float) -> RequestRecord:
    due = zero + (job.due_s or 0.0)
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    turn = job.turns[0]
    record = await target.ask(job, turn.prompt, turn.max_tokens)
    record.waited_s = max(0.0, record.start_s - due)
    record.start_s -= zero
    return record


def _unended(job: LoadJob) -> RequestRecord:
    return RequestRecord(start_s=job.due_s or 0.0, error="it did not end in time")
