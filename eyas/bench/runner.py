"""One run: sends jobs when they are due, no more at a time than allowed, and keeps every record.

Each request is measured from the moment of sending to the last line of its answer. Latencies are defined as
in SGLang's `bench_serving`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from eyas.bench.backends import Message, ParsedEvent, Question, RequestTemplate, ServerBackend
from eyas.bench.http import MeasuredServer
from eyas.bench.jobs import JobTurn, LoadJob, arrivals
from eyas.bench.records import RequestRecord, RunRecord
from eyas.common.errors import EyasError
from eyas.common.machine.processes import raise_limit

LAG_EVERY_S = 0.01
DONE = b"[DONE]"


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
        """One job; `due` is a `time.perf_counter`."""
        async with self._places:
            await self._talk(job, due, records, [])

    async def _talk(
        self,
        job: LoadJob,
        due: float,
        records: list[RequestRecord],
        history: list[Message],
        behind: int = 0,
    ) -> None:
        """Runs a conversation whose first `behind` turns are `history`. Turns after a failure fail."""
        if job.system:
            history.append({"role": "system", "content": job.system})
        failed = False
        for place, turn in enumerate(job.turns, behind + 1):
            if failed:
                record = RequestRecord(error="an earlier turn of the conversation failed")
            else:
                if turn.subagents:
                    records += await self._subagents(turn.subagents, history, place - 1)
                    due = time.perf_counter()
                await asyncio.sleep(turn.think_s)
                record = await self._turn(job, turn, history)
                record.waited_s = max(0.0, record.start_s - due - turn.think_s)
                due = record.start_s + record.latency_s
                record.start_s -= self.zero
            failed, record.turn = bool(record.error), place
            records.append(record)
            self._on_record(record)

    async def _subagents(
        self, jobs: Sequence[LoadJob], history: list[Message], behind: int
    ) -> list[RequestRecord]:
        """All at once, each to its end; they take none of the places, since their parent waits."""
        now, records = time.perf_counter(), [list[RequestRecord]() for _ in jobs]
        talks = (
            self._talk(job, now, own, [*history], behind) for job, own in zip(jobs, records, strict=True)
        )
        await asyncio.gather(*talks)
        return [record for own in records for record in own]

    async def _turn(self, job: LoadJob, turn: JobTurn, history: list[Message]) -> RequestRecord:
        question: Question = turn.prompt
        if self._target.backend.chats:
            if turn.whole:
                history.clear()
            history += turn.messages or ({"role": "user", "content": str(turn.prompt)},)
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


@dataclass(frozen=True)
class TargetServer:
    """A server, the way to ask it, and the fields of every request."""

    server: MeasuredServer
    backend: ServerBackend
    template: RequestTemplate

    async def ask(self, job: LoadJob, question: Question, max_tokens: int) -> RequestRecord:
        """Sends one request and reads its answer; the clock starts just before the connection opens.

        `start_s` is the `time.perf_counter` of sending. Nothing is raised: a failure is in `error`.
        """
        body = msgspec.json.encode(self.backend.body(self.template, job, question, max_tokens))
        reading = AnswerReader(self.backend, time.perf_counter())
        record = reading.record
        try:
            await self.server.stream(self.backend.path, body, reading.event)
        except (EyasError, OSError) as error:
            record.error = str(error)
        reading.close(len(question) if isinstance(question, tuple) else 0, max_tokens)
        return record


class AnswerReader:
    """Reads the events of one answer into a record."""

    def __init__(self, backend: ServerBackend, began: float) -> None:
        """`began`: the `time.perf_counter` of sending."""
        self.record = RequestRecord(start_s=began)
        self._backend = backend
        self._last_text = began
        self._parts: list[str] = []
        self._counted: int | None = None  # output tokens, if every event with a text tells them

    def event(self, data: bytes, now: float) -> None:
        """Takes one event, which arrived at `now`. Raises EyasError if it is an error."""
        record = self.record
        record.latency_s = now - record.start_s
        if data == DONE:
            return
        parsed = self._backend.read(data)
        if parsed.text:
            self._gap(parsed.output_tokens, now)
            if self._backend.cumulative:
                self._parts.clear()
            self._parts.append(parsed.text)
        self._note(parsed)

    def _gap(self, output_tokens: int | None, now: float) -> None:
        """The first text ends the time to first token. Each later one adds a gap, or one per token told."""
        record = self.record
        if not record.ttft_s:
            record.ttft_s = now - record.start_s
        elif self._counted is None or output_tokens is None:
            record.itls_s.append(now - self._last_text)
            output_tokens = None
        elif (new := output_tokens - self._counted) > 0:
            record.itls_s += [(now - self._last_text) / new] * new
        else:
            return  # the text of tokens that were counted before
        self._last_text, self._counted = now, output_tokens

    def _note(self, parsed: ParsedEvent) -> None:
        record = self.record
        for name in (
            *("prompt_tokens", "output_tokens", "cached_tokens"),
            *("accepted", "rejected", "verify_steps"),
        ):
            if (count := getattr(parsed, name)) is not None:
                setattr(record, name, count)
        if parsed.timings:
            record.phases_ms = phases(parsed.timings)

    def close(self, prompt_tokens: int, max_tokens: int) -> None:
        """Completes the record. A server that tells no usage is taken to have answered `max_tokens`.

        Tokens may have no text (special ones, parts of characters): they are seen when the answer ends.
        """
        record = self.record
        record.text = "".join(self._parts)
        record.prompt_tokens = record.prompt_tokens or prompt_tokens
        if record.ttft_s:
            record.output_tokens = record.output_tokens or max_tokens
        elif record.output_tokens:
            record.ttft_s = record.latency_s
        elif not record.error:
            record.error = "no token came"


def phases(timings: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by name: server_first_token, prefill_queue, decode_transfer ..."""
    durations = {f"server_{key[:-3]}": value for key, value in timings.items() if key.endswith("_ms")}
    for leg in timings.get("legs") or ():
        durations |= {f"{leg['role']}_{key[:-3]}": value for key, value in leg.items() if key.endswith("_ms")}
    return {name: float(value) for name, value in durations.items() if value is not None}
