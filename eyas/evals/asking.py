"""Asks one side every question of a task, a bounded number at a time, and keeps what came back.

A side is one server and the settings with which it is asked, as the command line names it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from eyas.client.reach import ServerAddress, http_options, locked, unreachable
from eyas.common.errors import ConfigError, EyasError, Unauthorized
from eyas.configuration import client_key
from eyas.evals.questions import EvalTask
from eyas.flags import http_url

TIMEOUT_S = 600.0  # a whole request
CONNECT_S = 10.0


@dataclass(frozen=True)
class TaskOptions:
    """The options of a task. `seed` counts above temperature 0 only; `max_tokens` None: the task's own."""

    parallel: int = 8
    temperature: float = 0.0
    seed: int = 1
    max_tokens: int | None = None

    def body(self, task: EvalTask, side: EvalSide, index: int) -> dict[str, Any]:
        """The request for question `index` of the task."""
        prompt = task.questions[index].prompt
        body: dict[str, Any] = {
            "model": side.model,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens or task.max_tokens,
        }
        if task.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if task.stop:
            body["stop"] = list(task.stop)
        if self.temperature > 0:
            body["seed"] = self.seed + index
        if not side.speculative:
            body["speculative"] = False
        return body


@dataclass(frozen=True)
class TaskAnswer:
    """The answer to one question. `error`: why none came; then no other field counts."""

    text: str = ""
    ended: bool = False
    """The model, or a stop string, ended it: it was not cut."""
    latency_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    accepted: int = 0
    """Drafted tokens that were accepted, where the server's usage says so; `rejected` likewise."""
    rejected: int = 0
    verify_steps: int | None = None
    """Steps that verified drafts, where the server says so."""
    error: str = ""


@dataclass(frozen=True)
class SideOutcome:
    """One side's answers, in the order of the questions, and the seconds that they took together."""

    side: EvalSide
    seconds: float
    answers: tuple[TaskAnswer, ...]


async def ask_all(
    side: EvalSide, task: EvalTask, asking: TaskOptions, answered: Callable[[], None]
) -> SideOutcome:
    """Asks everything; calls `answered` after each answer. A failed request becomes an Answer with its error.

    Raises EyasError if no server is there, or it lacks what the side asks of it.
    """
    limits = httpx.Limits(max_connections=asking.parallel)
    timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
    async with httpx.AsyncClient(
        base_url=side.url,
        limits=limits,
        timeout=timeout,
        **http_options(ServerAddress(side.url, side.api_key, side.ca)),
    ) as client:
        known, is_eyas = await _meet(client, side)
        path = "/v1/chat/completions" if task.chat else "/v1/completions"
        extra = {"timings": True} if is_eyas else {}
        turn = asyncio.Semaphore(asking.parallel)

        async def ask(index: int) -> TaskAnswer:
            async with turn:
                answer = await _answer(client, path, asking.body(task, known, index) | extra)
                answered()
                return answer

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(index)) for index in range(len(task.questions))]
        return SideOutcome(known, time.perf_counter() - start, tuple(each.result() for each in tasks))


async def _meet(client: httpx.AsyncClient, side: EvalSide) -> tuple[EvalSide, bool]:
    """The side with its model's name, and whether it is Eyas, which can drop drafts and counts its steps."""
    try:
        reply = await client.get("/v1/models", timeout=CONNECT_S)
    except httpx.ConnectError as error:
        raise unreachable(side.url, error) from error
    except httpx.HTTPError as error:
        raise EyasError(f"{side.url}: {error or type(error).__name__}") from error
    if reply.status_code == Unauthorized.http_status:
        raise locked(side.url, side.api_key)
    if reply.status_code >= 500:
        raise EyasError(f"{side.url}: HTTP {reply.status_code}: {_reason(reply)}")
    try:
        listed = reply.json()["data"][0]
        model, is_eyas = side.model or str(listed["id"]), listed.get("owned_by") == "eyas"
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if side.model is None:
            raise EyasError(f"{side.url} lists no model at /v1/models: name one with --model") from error
        model, is_eyas = side.model, False
    if not side.speculative and not is_eyas:
        raise EyasError(f"no-speculative: {side.url} is not Eyas, which alone can drop drafts per request")
    return dataclasses.replace(side, model=model), is_eyas


async def _answer(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> TaskAnswer:
    start = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reply = await client.post(path, json=body)
    except (httpx.HTTPError, TimeoutError) as error:
        return TaskAnswer(error=f"{type(error).__name__}: {error}".rstrip(": "))
    if reply.status_code != 200:
        return TaskAnswer(error=f"HTTP {reply.status_code}: {_reason(reply)}")
    try:
        return _read(reply.json(), time.perf_counter() - start)
    except (ValueError, LookupError, TypeError, AttributeError):
        return TaskAnswer(error=f"not an answer in OpenAI's shape: {reply.text[:100]!r}")


def _read(reply: dict[str, Any], latency_s: float) -> TaskAnswer:
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    details = usage.get("completion_tokens_details") or {}
    return TaskAnswer(
        text=(choice["message"]["content"] if "message" in choice else choice["text"]) or "",
        ended=choice.get("finish_reason") == "stop",
        latency_s=latency_s,
        prompt_tokens=usage.get("prompt_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or 0,
        accepted=details.get("accepted_prediction_tokens") or 0,
        rejected=details.get("rejected_prediction_tokens") or 0,
        verify_steps=(reply.get("timings") or {}).get("verify_steps"),
    )


def _reason(reply: httpx.Response) -> str:
    """The sentence of an error in OpenAI's shape, else the body's beginning."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return reply.text[:100]


@dataclass(frozen=True)
class EvalSide:
    """A server to ask. `model` None: the first that the server lists. `speculative` False: without drafts."""

    url: str
    api_key: str | None = dataclasses.field(default=None, repr=False)
    model: str | None = None
    speculative: bool = True
    ca: str | None = None

    def __str__(self) -> str:
        drafts = "" if self.speculative else ", no-speculative"
        return f"{self.url}, {self.model}{drafts}"


def sides_of(args: argparse.Namespace) -> list[EvalSide]:
    """The first side, and the second if there is one. Raises ConfigError for a side that cannot be read."""
    first = EvalSide(args.url, client_key(args), args.model, not args.no_speculative, args.ca)
    if args.against is None:
        return [first]
    second = read_side(args.against, first)
    if second == first:
        raise ConfigError("--against: both sides are the same", param="against")
    return [first, second]


def read_side(text: str, first: EvalSide) -> EvalSide:
    """A side from settings between commas; what they do not say is as on the first side."""
    side = first
    for setting in text.split(","):
        name, _, value = setting.partition("=")
        if setting in ("speculative", "no-speculative"):
            side = dataclasses.replace(side, speculative=setting == "speculative")
        elif name == "model" and value:
            side = dataclasses.replace(side, model=value)
        elif name == "api-key" and value:
            side = dataclasses.replace(side, api_key=value)
        elif name == "ca" and value:
            side = dataclasses.replace(side, ca=value)
        else:
            side = dataclasses.replace(side, url=_url(setting))
    return side


def _url(text: str) -> str:
    try:
        return http_url(text)
    except argparse.ArgumentTypeError as error:
        known = "a URL, model=ID, api-key=K, ca=FILE, speculative, no-speculative"
        raise ConfigError(f"--against: {text!r} is none of {known}", param="against") from error
