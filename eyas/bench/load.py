"""Sends a case to a server and measures the answers.

Times are the client's: time to first token (TTFT) from just before the connection opens, time per output
token (TPOT) as (last - first) / (tokens - 1). Token counts come from the server's usage. It refuses to know
which server it measures.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from eyas.bench.cases import Case, Job
from eyas.bench.http import Server
from eyas.common.errors import EyasError


@dataclass(frozen=True)
class Target:
    """A model on a server; `speculative` False asks for plain decoding (Eyas's extension, else not sent)."""

    server: Server
    model: str
    speculative: bool = True


@dataclass
class Measurement:
    """One request's times (since its start) and token counts; `error` is empty if it succeeded."""

    prompt_tokens: int = 0
    tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    ttft_s: float = 0.0
    last_s: float = 0.0
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; needs two tokens."""
        return (self.last_s - self.ttft_s) / (self.tokens - 1)


@dataclass
class Result:
    """One case: a measurement per request, and the seconds that all of them took together."""

    case: str
    seconds: float
    requests: list[Measurement] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """One flat JSON object: counts, tokens per second, percentiles in milliseconds."""
        good = [a for a in self.requests if not a.error]
        bad = [a for a in self.requests if a.error]
        out: dict[str, Any] = {"case": self.case, "ok": len(good), "failed": len(bad)}
        out["seconds"] = round(self.seconds, 2)
        out["in_tok_s"] = round(sum(a.prompt_tokens for a in good) / self.seconds, 1)
        out["out_tok_s"] = round(sum(a.tokens for a in good) / self.seconds, 1)
        for name, times in (
            ("ttft", [a.ttft_s for a in good]),
            ("tpot", [a.tpot_s for a in good if a.tokens > 1]),
        ):
            out[f"{name}_ms_p50"], out[f"{name}_ms_p99"] = _percentile(times, 0.5), _percentile(times, 0.99)
        drafted = sum(a.accepted + a.rejected for a in good)
        out["accepted"] = sum(a.accepted for a in good)
        out["acceptance_rate"] = round(out["accepted"] / drafted, 3) if drafted else None
        if bad:
            out["first_error"] = bad[0].error
        return out


def _percentile(seconds: list[float], share: float) -> float | None:
    if not seconds:
        return None
    return round(1e3 * sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * share))], 2)


async def run_case(target: Target, case: Case, seed: int = 1) -> Result:
    """Runs every job of `case`, in order. A failed request is counted; nothing is raised."""
    places = asyncio.Semaphore(case.concurrency)
    arrivals = random.Random(seed)

    async def one(job: Job) -> Measurement:
        async with places:
            return await ask(target, job)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for job in case.jobs:
            tasks.append(group.create_task(one(job)))
            if case.rate:
                await asyncio.sleep(arrivals.expovariate(case.rate))
    return Result(case.name, time.perf_counter() - began, [task.result() for task in tasks])


async def ask(target: Target, job: Job) -> Measurement:
    """Measures one streamed request."""
    answer = Measurement()
    path, body = _request(target, job)
    began = time.perf_counter()
    try:
        async for event in target.server.events(path, body):
            if usage := event.get("usage"):
                _count(answer, usage)
            if "error" in event:
                answer.error = str(event["error"])
            if any(_carries_token(choice) for choice in event.get("choices", ())):
                answer.last_s = time.perf_counter() - began
                answer.ttft_s = answer.ttft_s or answer.last_s
    except (EyasError, OSError, TimeoutError) as error:
        answer.error = str(error) or type(error).__name__
    if not answer.error and not answer.tokens:
        answer.error = "no token came"
    return answer


def _carries_token(choice: dict[str, Any]) -> bool:
    """Whether a chunk carries tokens: a completion's always does, a chat's first one has only a role."""
    return "text" in choice or bool(choice.get("delta", {}).get("content"))


def _request(target: Target, job: Job) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not target.speculative:
        body["speculative"] = False
    if isinstance(job.prompt, str):
        messages = [{"role": "user", "content": job.prompt}]
        return "/v1/chat/completions", {**body, "messages": messages}
    return "/v1/completions", {**body, "prompt": list(job.prompt), "ignore_eos": True}


def _count(answer: Measurement, usage: dict[str, Any]) -> None:
    details = usage.get("completion_tokens_details") or {}
    answer.prompt_tokens = usage.get("prompt_tokens", 0)
    answer.tokens = usage.get("completion_tokens", 0)
    answer.accepted = details.get("accepted_prediction_tokens") or 0
    answer.rejected = details.get("rejected_prediction_tokens") or 0
