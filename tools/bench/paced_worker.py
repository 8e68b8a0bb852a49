"""A decode worker without an engine, for measurements of a gateway: one token per stream and step, at a pace.

    python -m tools.bench.paced_worker PORT STEP_MS

Its gRPC services are the real ones. It admits every request at once and says its first tokens; then each step
says the next token of all requests in one message, as an engine does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import uvloop

from decode_svc.servicer import DecodeServicer
from eyas.common.types import FinishCause, GenerationRequest, Role, TokenEntry, WorkerInfo
from eyas.common.wire import info, rpc
from eyas.common.wire.links import PageLink
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import (
    CancelGeneration,
    Command,
    EngineReady,
    RequestAdmitted,
    StepReply,
    SubmitGeneration,
)

CONTEXT = 1 << 20  # tokens: an answer is as long as the measurement
TOKENS = range(100, 1000)  # they come in turn: ordinary words of any vocabulary
VOCABULARY = 1 << 20  # ids that prompts may have: those of any model's template
FIRST = 8  # tokens that come at once: all that a gateway's canary asks for, however slow the pace


class PacedEngine:
    """Answers the commands of a front. `step` gives every running request its next token."""

    def __init__(self) -> None:
        self.client = EngineClient(self._hear)
        self.client.ready = EngineReady(
            epoch=1,
            model="paced",
            fingerprint="paced",
            draft_fingerprint="",
            context_length=CONTEXT,
            vocab_size=VOCABULARY,
            pages_total=1,
            pools={},
            files={},
            slowest_step_s=1.0,
        )
        self.client.accept()
        self._running: dict[str, tuple[GenerationRequest, int]] = {}  # by id; with its attempt
        self._at: dict[str, int] = {}  # the next output index

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def step(self) -> None:
        """Says one token of each request."""
        entries = [self._entry(*pair, tokens=1) for pair in list(self._running.values())]
        if entries:
            self.client.dispatch([StepReply(tuple(entries))])

    def _entry(self, request: GenerationRequest, attempt: int, tokens: int) -> TokenEntry:
        id, at, end = request.id, self._at[request.id], request.params.max_tokens
        self._at[id] = after = min(at + tokens, end)
        if after == end:
            self._forget(id)
        ids = tuple(TOKENS[i % len(TOKENS)] for i in range(at, after))
        return TokenEntry(id, attempt, 0, at, ids, finish=FinishCause.LENGTH if after == end else None)

    def _hear(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case SubmitGeneration(request, attempt):
                    self._running[request.id], self._at[request.id] = (request, attempt), 0
                    first = StepReply((self._entry(request, attempt, FIRST),))
                    self.client.dispatch([RequestAdmitted(request.id, attempt), first])
                case CancelGeneration(id):
                    self._forget(id)

    def _forget(self, id: str) -> None:
        self._running.pop(id, None)
        self._at.pop(id, None)


async def serve(port: int, step_s: float) -> None:
    """Serves until cancelled: a step every `step_s` seconds, or as often as the machine can."""
    engine, address = PacedEngine(), f"127.0.0.1:{port}"

    def describe() -> WorkerInfo:
        roles, ready = (Role.PREFILL, Role.DECODE), engine.client.ready
        return WorkerInfo(
            address, roles, 1, ready.model, ready.fingerprint, "", CONTEXT, VOCABULARY, 1, stays=True
        )

    async def probe(owner: str) -> list[PageLink]:
        return []

    async def flush(wait_s: float) -> int:
        return 0

    server = rpc.server()
    for servicer in (info.InfoServicer(describe, probe, flush), DecodeServicer(engine.client, describe)):
        servicer.register(server)
    rpc.bind(server, "127.0.0.1", port)
    await server.start()
    due = time.perf_counter()
    while True:
        due = max(due + step_s, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())
        engine.step()


if __name__ == "__main__":
    from eyas.common.machine.processes import die_with_parent

    die_with_parent()
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3))
