"""A static batch through an engine in this process: no server, no wire, but the real loop and scheduler.

A script on the engine's own thread submits a batch, and gets its trace when all of it has ended.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from eyas.common.errors import EyasError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, TokenEntry
from eyas.engine.ipc.messages import (
    Command,
    EngineReady,
    Event,
    PagesLost,
    RequestFailed,
    RequestRejected,
    ShutdownEngine,
    StepReply,
    SubmitGeneration,
)

BATCH_S = 300.0  # a batch that takes longer is given up
PAUSE_S = 0.05  # between batches: the step that was launched ahead of the last one's end lands meanwhile
RUNS, RUNS_S = 4, 5.0  # the most runs of a batch, and the seconds within which they begin


@dataclass(frozen=True)
class StaticBatch:
    """`size` requests of `input_len` prompt tokens, and `output_len` tokens to come for each."""

    size: int
    input_len: int
    output_len: int

    @property
    def name(self) -> str:
        """The name for people."""
        return f"batch of {self.size} x {self.input_len} + {self.output_len}"

    def requests(self, vocab_size: int, seed: str) -> list[GenerationRequest]:
        """Greedy, of random prompts that no earlier seed had: nothing of them is in a prefix cache."""
        params = SamplingParams(temperature=0.0, max_tokens=self.output_len, ignore_eos=True)
        requests = []
        for i in range(self.size):
            draw = random.Random(f"{seed} {self.size} {self.input_len} {i}")
            prompt = tuple(draw.randrange(vocab_size) for _ in range(self.input_len))
            requests.append(GenerationRequest(f"{seed} {i}", prompt, params, timeout_s=BATCH_S))
        return requests


@dataclass
class BatchTrace:
    """The times of an engine's messages about `size` requests, in seconds of the same clock as `began`.

    `steps`: the entries of each message. `failures`: of requests that did not end in tokens.
    """

    size: int
    began: float
    steps: list[tuple[float, tuple[TokenEntry, ...]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    finished: int = 0

    @property
    def over(self) -> bool:
        """True if every request has ended."""
        return self.finished + len(self.failures) == self.size

    def add(self, now: float, entries: tuple[TokenEntry, ...]) -> None:
        """Adds one message."""
        self.steps.append((now, entries))
        self.finished += sum(entry.finish is not None for entry in entries)

    @property
    def prefill_s(self) -> float:
        """Seconds until the last request had its first token."""
        return max(at for at, entries in self.steps if any(e.index == 0 for e in entries)) - self.began

    @property
    def total_s(self) -> float:
        """Seconds until the last token."""
        return self.steps[-1][0] - self.began

    def rounds(self) -> list[tuple[float, float]]:
        """(seconds, tokens per request) of each step in which all requests decode, but for their last ones.

        A step's time is that between two messages which both have tokens for every request.
        """
        rounds = []
        for (before, first), (after, entries) in zip(self.steps, self.steps[1:], strict=False):
            together = len(first) == len(entries) == self.size and all(e.index > 0 for e in entries)
            if together and not any(e.finish for e in entries):
                tokens = sum(len(e.tokens) for e in entries) / self.size
                rounds.append((after - before, tokens))
        return rounds


Script: TypeAlias = Generator[list[GenerationRequest], BatchTrace, None]


class ScriptLink:
    """The engine's link to a script, which begins when the engine is ready and ends it."""

    def __init__(self, script: Callable[[EngineReady], Script]) -> None:
        self._begin = script
        self._script: Script | None = None
        self._trace: BatchTrace | None = None
        self._rest_until = 0.0

    def recv(self, timeout_s: float, bells: Sequence[int] = ()) -> list[Command]:
        """Lets the engine work, or rest; then what the script wants next."""
        now = time.perf_counter()
        trace = self._trace
        if trace is not None and not trace.over and now - trace.began > BATCH_S:
            raise EyasError(f"a batch of {trace.size} did not end within {BATCH_S:g} s")
        if (trace is not None and not trace.over) or now < self._rest_until:
            time.sleep(timeout_s)
            return []
        return self._next()

    def _next(self) -> list[Command]:
        assert self._script is not None, "the engine says first of all that it is ready"
        try:
            # A generator that has not begun takes None alone.
            requests = next(self._script) if self._trace is None else self._script.send(self._trace)
        except StopIteration:
            return [ShutdownEngine()]
        self._trace = BatchTrace(len(requests), time.perf_counter())
        return [SubmitGeneration(request, attempt=1, attach=False) for request in requests]

    def send(self, events: Sequence[Event]) -> None:
        """Notes what was said of the requests, and when."""
        now, trace = time.perf_counter(), self._trace
        if trace is None or trace.over:
            ready = next((event for event in events if isinstance(event, EngineReady)), None)
            self._script = self._begin(ready) if ready else self._script
            return
        for event in events:
            if isinstance(event, StepReply):
                trace.add(now, event.entries)
            elif isinstance(event, RequestRejected | RequestFailed):
                trace.failures.append(event.failure.message)
            elif isinstance(event, PagesLost):
                trace.failures.append("the engine lost the request")
        if trace.over:
            self._rest_until = now + PAUSE_S


def repeat(
    batch: StaticBatch, vocab_size: int
) -> Generator[list[GenerationRequest], BatchTrace, list[BatchTrace]]:
    """Runs a batch a few times, for as long as that is quick; the first run warms up if there are others.

    Raises EyasError for a batch that failed, or that never ran together.
    """
    traces: list[BatchTrace] = []
    began = time.perf_counter()
    while len(traces) < RUNS and (not traces or time.perf_counter() - began < RUNS_S):
        trace = yield batch.requests(vocab_size, f"run {len(traces)}")
        if trace.failures:
            raise EyasError(f"{len(trace.failures)} of {batch.size} requests failed: {trace.failures[0]}")
        traces.append(trace)
    traces = traces[1:] or traces
    if batch.output_len > 2 and not any(trace.rounds() for trace in traces):
        reason = "the KV pages (--num-pages) or --max-running do not hold all of it"
        raise EyasError(f"it never decoded all at once: {reason}, or its answers are too short")
    return traces


def figures(batch: StaticBatch, traces: Sequence[BatchTrace]) -> dict[str, float | int]:
    """Latencies in seconds, throughputs in tokens per second; of several runs the medians.

    Decode latencies are those of the steps in which all requests decode; there are none for answers of one
    token. `accept_length`: tokens per request and step.
    """
    prefill = statistics.median(trace.prefill_s for trace in traces)
    total = statistics.median(trace.total_s for trace in traces)
    line: dict[str, float | int] = {
        "batch_size": batch.size,
        "input_len": batch.input_len,
        "output_len": batch.output_len,
        "prefill_latency": prefill,
        "prefill_throughput": batch.size * batch.input_len / prefill,
    }
    rounds = [one for trace in traces for one in trace.rounds()]
    if rounds:
        seconds = sorted(one[0] for one in rounds)
        accepted = statistics.mean(one[1] for one in rounds)
        median = statistics.median(seconds)
        line |= {
            "median_decode_latency": median,
            "p90_decode_latency": seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))],
            "median_decode_throughput": batch.size * accepted / median,
            "accept_length": accepted,
            "decode_steps": len(seconds),
        }
    lengths = batch.size * (batch.input_len + batch.output_len)
    return line | {"total_latency": total, "overall_throughput": lengths / total, "runs": len(traces)}
