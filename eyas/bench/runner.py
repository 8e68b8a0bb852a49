"""One run: sends jobs when they are due, no more at a time than allowed, and keeps every record."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.bench.asking import TargetServer
from eyas.bench.backends import Message, Question
from eyas.bench.jobs import JobTurn, LoadJob, arrivals
from eyas.bench.records import RequestRecord, RunRecord
from eyas.common.machine.processes import raise_limit

LAG_EVERY_S = 0.01


@dataclass(frozen=True)
class Workload:
    """The jobs of a run and their times: Poisson arrivals by `rate` per second (infinite: all at once).

    `max_concurrency`: jobs that run at a time; None: any number. `seed` draws the arrivals.
    """

    jobs: Sequence[LoadJob]
    rate: float = float("inf")
    max_concurrency: int | None = None
    seed: int = 1


OnRecord = Callable[[RequestRecord], None]


async def run_load(
    target: TargetServer, load: Workload, settings: dict[str, Any], on_record: OnRecord
) -> RunRecord:
    """Sends every job of `load`; calls `on_record` for each request that has ended.

    Nothing is raised for a failed request. If the caller is cancelled (Ctrl-C), the run ends at once with the
    requests that had ended, and is marked as not complete.
    """
    raise_limit()  # a connection per request that is under way
    sending = _LoadRun(target, load, on_record)
    complete = True
    async with ClientMeter() as meter:
        try:
            await sending.all()
        except asyncio.CancelledError:
            complete = False
            await sending.stop()
    seconds = time.perf_counter() - sending.zero
    return RunRecord(
        settings,
        seconds,
        records=sending.records(),
        client_cpu=meter.cpu_s / seconds,
        client_lag_ms=meter.lag_ms(),
        complete=complete,
    )


class _LoadRun:
    """The jobs of one load, under way."""

    def __init__(self, target: TargetServer, load: Workload, on_record: OnRecord) -> None:
        self._target = target
        self._load = load
        self._on_record = on_record
        self._places = asyncio.Semaphore(load.max_concurrency or max(1, len(load.jobs)))
        self._tasks: list[asyncio.Task[None]] = []
        self._records: list[list[RequestRecord]] = []
        self.zero = time.perf_counter()

    async def all(self) -> None:
        dues = arrivals(self._load.jobs, self._load.rate, self._load.seed)
        for due_s, job in sorted(zip(dues, self._load.jobs, strict=True), key=lambda pair: pair[0]):
            if (early_s := self.zero + due_s - time.perf_counter()) > 0:
                await asyncio.sleep(early_s)
            records: list[RequestRecord] = []
            self._records.append(records)
            self._tasks.append(asyncio.create_task(self._job(job, self.zero + due_s, records)))
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """Ends the tasks after a cancellation, which is then over."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if (current := asyncio.current_task()) is not None:
            current.uncancel()

    def records(self) -> list[RequestRecord]:
        """All records, in the order in which their jobs were due."""
        return [record for records in self._records for record in records]

    async def _job(self, job: LoadJob, due: float, records: list[RequestRecord]) -> None:
        """One job; `due` is a `time.perf_counter`. After a failure, the turns to come fail too."""
        history: list[Message] = []
        async with self._places:
            for turn in job.turns:
                if records and records[-1].error:
                    record = RequestRecord(error="an earlier turn of the conversation failed")
                else:
                    record = await self._turn(job, turn, history)
                    record.waited_s = max(0.0, record.start_s - due)
                    due = record.start_s + record.latency_s
                    record.start_s -= self.zero
                records.append(record)
                self._on_record(record)

    async def _turn(self, job: LoadJob, turn: JobTurn, history: list[Message]) -> RequestRecord:
        question: Question = turn.prompt
        if self._target.backend.chats:
            history.append({"role": "user", "content": str(turn.prompt)})
            question = history
        record = await self._target.ask(job, question, turn.max_tokens)
        history.append({"role": "assistant", "content": record.text})
        return record


class ClientMeter:
    """The cost of the client itself, between entry and exit: CPU seconds, and how late its event loop is."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._lags_s = [0.0]

    async def __aenter__(self) -> ClientMeter:
        self._began = time.process_time()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cpu_s = time.process_time() - self._began
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def lag_ms(self) -> float:
        """The lateness of the loop at the 99th percentile, in milliseconds."""
        return 1e3 * float(np.percentile(self._lags_s, 99))

    async def _watch(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(LAG_EVERY_S)
            self._lags_s.append(max(0.0, time.perf_counter() - began - LAG_EVERY_S))
