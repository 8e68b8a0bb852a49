"""Routes by which an operator pauses generation and releases memory on all workers, as SGLang's and vLLM's.

They read small bodies or none; vLLM's routes have a query. The answer contains what each worker did.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from eyas.common.errors import InvalidRequest
from eyas.common.wire.control import (
    ALL_TAGS,
    MOST_PAUSE_S,
    ContinueGeneration,
    ControlOutcome,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
)
from gateway.backends.base import GenerationBackend
from gateway.formats.fields import RequestBody
from gateway.http.openapi import HttpEndpoint
from gateway.http.operators import OperatorBodies
from gateway.http.pages import json_response

MOST_BYTES = 65_536
LEVELS = ("1", "2")  # of vLLM's sleep


class PauseBody(RequestBody):
    """The body of /pause_generation."""

    mode: Literal["abort", "in_place", "retract"] = "abort"
    """What becomes of requests that run: they end with what they have, keep their KV, or lose it and wait."""

    timeout: Annotated[float, Field(ge=0, le=MOST_PAUSE_S)] = 0.0
    """Seconds after which generation goes on by itself, once memory is there; 0: it does not."""


class EmptyBody(RequestBody):
    """The body of /continue_generation, /sleep and /wake_up: nothing."""


class MemoryBody(RequestBody):
    """The body of /release_memory_occupation and /resume_memory_occupation."""

    tags: list[Literal["weights", "kv_cache"]] | None = None
    """Which memory; all of it without."""

    @property
    def named(self) -> tuple[MemoryTag, ...]:
        """The tags."""
        return ALL_TAGS if self.tags is None else tuple(map(MemoryTag, self.tags))


class ControlEndpoints:
    """The endpoints. Each turns a request into a response; `wire` handles their errors."""

    def __init__(self, backend: GenerationBackend, *, keyed: bool) -> None:
        """`keyed`: callers need a key. Otherwise only callers on this machine are allowed."""
        self._backend = backend
        self._bodies = OperatorBodies(MOST_BYTES, "control the server", keyed=keyed)

    def endpoints(self) -> list[HttpEndpoint]:
        """The rows of the route table that this class answers."""
        return [
            HttpEndpoint(
                "POST",
                "/pause_generation",
                self.pause,
                "Stops generation, as SGLang; requests wait",
                PauseBody,
            ),
            HttpEndpoint(
                "POST", "/continue_generation", self.go_on, "Lets generation go on, as SGLang", EmptyBody
            ),
            HttpEndpoint(
                "POST",
                "/release_memory_occupation",
                self.release,
                "Lets weights and KV leave their memory, as SGLang",
                MemoryBody,
            ),
            HttpEndpoint(
                "POST",
                "/resume_memory_occupation",
                self.resume,
                "Takes the memory of weights and KV again, as SGLang",
                MemoryBody,
            ),
            HttpEndpoint(
                "POST", "/sleep", self.sleep, "Lets all memory go, as vLLM", EmptyBody, query=("level",)
            ),
            HttpEndpoint("POST", "/wake_up", self.wake_up, "Takes it again, as vLLM", EmptyBody),
            HttpEndpoint("GET", "/is_sleeping", self.is_sleeping, "Whether memory is away, as vLLM"),
        ]

    async def pause(self, request: Request) -> Response:
        """Pauses every worker. Requests that arrive during the pause wait, each until its deadline."""
        body = await self._bodies.read(PauseBody, request)
        outcomes = await self._backend.control(PauseGeneration(PauseMode(body.mode), body.timeout))
        count = sum(outcome.requests for outcome in outcomes.values())
        return json_response({"status": "ok", "message": "Generation paused.", "requests": count})

    async def go_on(self, request: Request) -> Response:
        """Continues generation on every worker. Raises Busy while memory of one is released."""
        await self._bodies.read(EmptyBody, request)
        await self._backend.control(ContinueGeneration())
        return json_response({"status": "ok", "message": "Generation goes on."})

    async def release(self, request: Request) -> Response:
        """Releases memory on every worker. Raises Busy if requests still use it."""
        body = await self._bodies.read(MemoryBody, request)
        return _moved(await self._backend.control(ReleaseMemory(body.named)))

    async def resume(self, request: Request) -> Response:
        """Resumes memory on every worker."""
        body = await self._bodies.read(MemoryBody, request)
        return _moved(await self._backend.control(ResumeMemory(body.named)))

    async def sleep(self, request: Request) -> Response:
        """Releases weights and KV. `level` 2, at which vLLM drops the weights, acts as level 1."""
        await self._bodies.read(EmptyBody, request)
        if (level := request.query_params.get("level", "1")) not in LEVELS:
            raise InvalidRequest(f"level is {level[:20]!r}: it is 1 or 2", param="level")
        return _moved(await self._backend.control(ReleaseMemory(ALL_TAGS)))

    async def wake_up(self, request: Request) -> Response:
        """Resumes the memory of each of the query's `tags`; without any, all memory."""
        await self._bodies.read(EmptyBody, request)
        tags = request.query_params.getlist("tags")
        if unknown := [tag for tag in tags if tag not in ALL_TAGS]:
            named = " or ".join(ALL_TAGS)
            raise InvalidRequest(f"tags has {unknown[0][:20]!r}: it is {named}", param="tags")
        named_tags = tuple(map(MemoryTag, tags)) or ALL_TAGS
        return _moved(await self._backend.control(ResumeMemory(named_tags)))

    async def is_sleeping(self, _: Request) -> Response:
        """Returns whether memory of any worker is released."""
        sleeps = any(link.info.released for link in self._backend.links())
        return json_response({"is_sleeping": sleeps})


def _moved(outcomes: dict[str, ControlOutcome]) -> Response:
    moved: dict[str, Any] = {worker: outcome.moved for worker, outcome in outcomes.items()}
    return json_response({"status": "ok", "moved": moved})
