"""A leg is one worker's part in one request: an entry in a decode Session, or one Prefill call.

A leg holds its worker and what it has sent there, and reports everything to the request it belongs to. A
request ignores the legs that it has replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Protocol

import msgspec

from eyas.common.errors import EyasError, Unavailable
from eyas.common.types import EngineTimings, FirstToken, GenerationRequest, KvHandle, Role, TokenEntry
from eyas.common.wire.clients import PrefillEvent, Reply
from eyas.common.wire.message import PrefillDone, PrefillStarted, RequestAdmitted, RequestFailed
from gateway.backends.base import FastPath
from gateway.backends.sessions import SessionListener
from gateway.routing.cluster import Cluster
from gateway.routing.in_flight import LegLoad, UnderWay

_log = logging.getLogger("eyas.gateway")

LAST_WORDS_S = 0.5
"""How long a Prefill call is read once its worker knows that the request is over. The call ends at once then,
behind what was on its way."""


class LegDraining(msgspec.Struct, frozen=True):
    """The leg's worker takes no new requests. The leg may stay, or its request may move."""


class LegEnded(msgspec.Struct, frozen=True):
    """The leg's stream has ended: no other event follows."""

    error: EyasError


LegEvent = Reply | PrefillEvent | LegDraining | LegEnded


class LegOwner(Protocol):
    """The request that legs report to. No method waits or raises."""

    def on_event(self, leg: DecodeLeg | PrefillLeg, event: LegEvent) -> None:
        """Takes what a leg's worker has said, tokens aside."""
        ...

    def on_entry(self, leg: DecodeLeg, entry: TokenEntry) -> None:
        """Takes tokens of a decode worker."""
        ...


class DecodeLeg(SessionListener):
    """A request on one decode worker, from `submit` to `close`.

    `begun`: some token was there when it was submitted. `admitted`: the worker has queued it. `waits`: it
    waits for pages, so it needs an `attach`. `lane`: takes entries that its owner need not see.
    """

    __slots__ = (
        *("_cluster", "_id", "_owner", "_sent", "_session", "_spoke", "_stake"),
        *("admitted", "attempt", "begun", "lane", "waits", "worker"),
    )

    def __init__(self, cluster: Cluster, worker: str, attempt: int, owner: LegOwner) -> None:
        self.worker = worker
        self.attempt = attempt
        self.begun = False
        self.admitted = False
        self.waits = False
        self.lane: FastPath | None = None
        self._id = ""
        self._sent = 0.0
        self._spoke = False  # so the prompt is computed
        self._stake: LegLoad | None = None
        self._cluster = cluster
        self._session = cluster.session(worker)
        self._owner = owner

    def submit(self, request: GenerationRequest, attach: bool, missing: int) -> None:
        """Queues the request on the worker; `attach`: it shall wait for pages, else it computes the `missing`
        tokens of the prompt. Raises Unavailable if the worker is not connected.
        """
        self._sent, self.begun, self.waits = time.monotonic(), request.begun, attach
        self._session.submit(request, attach, self)
        count, prompt = len(request.choices), len(request.prompt_ids)
        queued = 0 if attach else missing
        self._stake = self._cluster.occupy(self.worker, UnderWay(count, count * prompt, queued=queued))
        self._id = request.id

    def attach(
        self, attempt: int, handles: tuple[KvHandle, ...], first_tokens: tuple[FirstToken, ...]
    ) -> None:
        """Tells the worker where the pages are; without handles it computes the prompt itself."""
        self.waits = False
        self._session.attach(self._id, attempt, handles, first_tokens)

    def named(self, timings: EngineTimings) -> EngineTimings:
        """The worker's timings with what only the gateway measures."""
        return msgspec.structs.replace(timings, worker=self.worker, role=Role.DECODE, sent=self._sent)

    def cancel(self, choice: int) -> None:
        """Ends one choice on the worker."""
        self._session.cancel(self._id, choice)

    def close(self, cancel: bool) -> None:
        """Stops listening to the worker. `cancel`: the request still runs there and is to end. Idempotent."""
        if not self._id:
            return
        if cancel:
            self._session.cancel(self._id)
        self._session.forget(self._id)
        assert self._stake is not None
        self._stake.close()
        self._id = ""

    def on_entry(self, entry: TokenEntry) -> None:
        if not self._spoke and self._stake is not None:
            self._stake.computed()
            self._spoke = True
            self._cluster.did(self.worker)
        self._owner.on_entry(self, entry)

    def on_reply(self, reply: Reply) -> None:
        if isinstance(reply, RequestAdmitted):
            self.admitted = True
        elif isinstance(reply, RequestFailed):
            self._cluster.did(self.worker, reply.failure.error())
        self._owner.on_event(self, reply)

    def on_draining(self) -> None:
        self._owner.on_event(self, LegDraining())

    def on_gone(self, error: EyasError) -> None:
        self._owner.on_event(self, LegEnded(error))


class PrefillLeg:
    """One Prefill call. `handles` is None until the worker has started computing the prompt."""

    def __init__(self, cluster: Cluster, worker: str, owner: LegOwner) -> None:
        self.worker = worker
        self.admitted = False
        self.handles: tuple[KvHandle, ...] | None = None
        self._sent = 0.0
        self._prompt = "", 0  # its id and attempt on the worker
        self._calling = False
        self._closed = False
        self._cluster = cluster
        self._owner = owner
        self._task: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    def submit(self, request: GenerationRequest, attempt: int, offer_draft: bool, missing: int) -> None:
        """Starts the call. `offer_draft`: the worker shall offer draft KV too. `missing`: tokens that it has
        to compute.
        """
        self._prompt = request.id, attempt
        self._sent = time.monotonic()
        stake = self._cluster.occupy(self.worker, UnderWay(prompts=1, queued=missing))
        self._task = asyncio.create_task(self._follow(request, attempt, offer_draft, stake))
        self._task.add_done_callback(lambda _: stake.close())

    def named(self, timings: EngineTimings) -> EngineTimings:
        """The worker's timings with what only the gateway measures."""
        return msgspec.structs.replace(timings, worker=self.worker, role=Role.PREFILL, sent=self._sent)

    def close(self) -> None:
        """Ends the call if it still runs. Idempotent. Handles that are on their way go back."""
        if self._task is None or self._closed:
            return
        self._closed = True
        if self._calling and self.handles is None:
            self._leaving = asyncio.create_task(self._leave(self._task), name=f"leave {self.worker}")
        else:
            self._task.cancel()

    async def _leave(self, call: asyncio.Task[None]) -> None:
        """Has the worker end the prompt, and lets the call read what it has said. To cancel the call instead
        would lose handles whose prompt was done before the worker heard of it.
        """
        with contextlib.suppress(EyasError):  # it is lost, and so its pages, or an older one
            await self._cluster.prefill_client(self.worker).cancel(*self._prompt)
        await asyncio.wait([call], timeout=LAST_WORDS_S)
        call.cancel()

    async def _follow(
        self, request: GenerationRequest, attempt: int, offer_draft: bool, stake: LegLoad
    ) -> None:
        """Sends the prompt when its turn comes, and reports the call's events and its end. It reads the whole
        stream: leaving early would cancel it.
        """
        client = self._cluster.prefill_client(self.worker)
        error: EyasError = Unavailable(f"worker {self.worker} ended the prefill")
        done = False
        try:
            await self._cluster.pace.send(request.caller, len(request.prompt_ids), request.timeout_s)
            self._calling = True
            async for event in client.prefill(request, attempt, offer_draft):
                if self._closed and isinstance(event, PrefillStarted):
                    self._cluster.give_back(self.worker, event.handles, attempt)
                    return
                match event:
                    case RequestAdmitted():
                        self.admitted = True
                    case PrefillStarted(handles=handles):
                        self.admitted, self.handles = True, handles
                    case PrefillDone():
                        stake.computed()
                        self._cluster.did(self.worker)
                        done = True
                self._owner.on_event(self, event)
        except EyasError as caught:
            error = caught
        except Exception:
            _log.exception("the prefill of request %s failed", request.id)
            error = EyasError("internal error")
        if not done:
            self._cluster.did(self.worker, error)
        self._owner.on_event(self, LegEnded(error))
