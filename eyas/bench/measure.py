"""Makes a running server ready for a plan, and measures it, until a Ctrl-C.

That cancels a measurement between two callbacks of its loop: Python's own handler runs in the middle of
whatever the program does, and a cancellation from there may get lost.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from eyas.bench.backends import BACKENDS, RequestTemplate
from eyas.bench.http import MeasuredServer
from eyas.bench.jobs import JobTurn, LoadJob, fit, unlike
from eyas.bench.plan import LoadPlan
from eyas.bench.records import RequestRecord, RunRecord
from eyas.bench.runner import OnRecord, TargetServer, Workload, run_load
from eyas.common.errors import EyasError

SAFE_VOCABULARY = 4096  # where the server does not say: every model of today has more
WARMUP_TOKENS = 32
T = TypeVar("T")


@dataclass(frozen=True)
class ServerFacts:
    """Facts that a server gives about itself; None: it does not."""

    model: str | None
    vocab_size: int | None
    tells_timings: bool


async def look(server: MeasuredServer) -> ServerFacts:
    """Asks a server about itself. Raises Unavailable if nothing answers, Unauthorized for a wrong key."""
    models = await server.get_json("/v1/models")
    info = await server.get_json("/get_model_info")
    listed = models.get("data") if isinstance(models, dict) else None
    size = info.get("vocab_size") if isinstance(info, dict) else None
    return ServerFacts(
        model=str(listed[0]["id"]) if listed else None,
        vocab_size=size if isinstance(size, int) else None,
        tells_timings=await server.get_json("/cluster") is not None,  # a route of Eyas's own
    )


class LoadMeasurement:
    """A plan on a server that has answered its warm-up: `run` may be called again and again."""

    def __init__(self, plan: LoadPlan, server: MeasuredServer, facts: ServerFacts) -> None:
        self._plan = plan
        self._server = server
        self.vocab_size = plan.vocab_size or facts.vocab_size or SAFE_VOCABULARY
        self.vocab_from = _said_by(plan, facts)
        self._jobs = fit(plan.jobs, self.vocab_size)
        model = plan.model or facts.model or "default"
        template = RequestTemplate(
            model, plan.temperature, plan.ignore_eos, timings=facts.tells_timings, extra=plan.extra
        )
        self._target = TargetServer(server, BACKENDS[plan.backend], template)

    @classmethod
    async def begin(cls, plan: LoadPlan, server: MeasuredServer) -> LoadMeasurement:
        """Looks at the server and warms it up. Raises EyasError if nothing answers."""
        made = cls(plan, server, await look(server))
        await made._warm_up()
        return made

    async def run(self, on_record: OnRecord) -> RunRecord:
        """Runs the load once. Raises nothing for failed requests."""
        plan = self._plan
        load = Workload(self._jobs, plan.rate, plan.max_concurrency, plan.draw.seed)
        settings = {
            **plan.settings(),
            "model": self._target.template.model,
            "vocab_size": self.vocab_size,
            "url": self._server.url,
        }
        run = await run_load(self._target, load, settings, on_record)
        await self._ask_afterwards(run)
        return run

    async def _warm_up(self) -> None:
        first = self._jobs[0].turns[0]
        turn = JobTurn(unlike(first.prompt), min(first.max_tokens, WARMUP_TOKENS))
        load = Workload([LoadJob((turn,))] * self._plan.warmup, max_concurrency=self._plan.max_concurrency)
        run = await run_load(self._target, load, {}, lambda _: None)
        if not run.complete:
            raise asyncio.CancelledError
        if run.records and all(record.error for record in run.records):
            raise EyasError(f"no warm-up request succeeded: {run.records[0].error}")

    async def _ask_afterwards(self, run: RunRecord) -> None:
        """Adds what the server says of itself, and the acceptance length."""
        try:
            info = await self._server.get_json("/server_info")
        except EyasError:  # it may have died in the middle: the records say so
            info = None
        run.server_info = info if isinstance(info, dict) else None
        run.accept_length = acceptance_length(run.records, info)


def acceptance_length(records: Sequence[RequestRecord], server_info: Any) -> float | None:
    """Tokens per verify step, its own included; None without such steps.

    Where requests do not tell their steps, it is what SGLang's server tells of all since its start.
    """
    speculative = [record for record in records if not record.error and record.verify_steps is not None]
    if speculative:
        steps = sum(record.verify_steps or 0 for record in speculative)
        return 1 + sum(record.accepted for record in speculative) / steps if steps else None
    states = server_info.get("internal_states") if isinstance(server_info, dict) else None
    length = states[0].get("avg_spec_accept_length") if states else None
    return float(length) if isinstance(length, int | float) else None


def _said_by(plan: LoadPlan, facts: ServerFacts) -> str:
    if plan.vocab_size:
        return "--vocab-size"
    return "its vocabulary" if facts.vocab_size else "a guess: the server does not say; see --vocab-size"


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on a loop of its own and returns its result. The first Ctrl-C cancels it, a second one ends
    the process.

    Raises KeyboardInterrupt if it does not bear being cancelled. Where Ctrl-C is ignored it stays so.
    """

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def once() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            task.cancel()

        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, once)
        try:
            return await main
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    try:
        return uvloop.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
