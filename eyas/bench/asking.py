"""One request, measured: from the moment of sending to the last line of its answer.

Latencies are defined as in SGLang's `bench_serving`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from eyas.bench.backends import ParsedEvent, Question, RequestTemplate, ServerBackend
from eyas.bench.http import MeasuredServer
from eyas.bench.jobs import LoadJob
from eyas.bench.records import RequestRecord
from eyas.common.errors import EyasError

DONE = b"[DONE]"


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
        for name in ("prompt_tokens", "output_tokens", "accepted", "rejected", "verify_steps"):
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
