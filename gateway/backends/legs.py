"""A leg is the part of one request on one worker: an entry in a decode Session, or one Prefill call.

A leg reports every event of its worker to its request, and counts as load of the worker until it is closed. A
request ignores legs that it has replaced.
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

CANCEL_GRACE_S = 0.5
"""How long a Prefill call is still read after its worker was notified that the request is over. The worker
then ends the call immediately, after the events that were already on their way."""


class LegDraining(msgspec.Struct, frozen=True):
    """The worker of the leg takes no new requests. The request may stay there or move."""


class LegEnded(msgspec.Struct, frozen=True):
    """The stream of the leg has ended: no other event follows."""

    error: EyasError


LegEvent = Reply | PrefillEvent | LegDraining | LegEnded


class LegOwner(Protocol):
    """The request that receives the events of legs. No method waits or raises."""

    def on_event(self, leg: DecodeLeg | PrefillLeg, event: LegEvent) -> None:
        """Called with every event of a leg except tokens."""
        ...

    def on_entry(self, leg: DecodeLeg, entry: TokenEntry) -> None:
        """Called with the tokens of a decode worker."""
        ...


class DecodeLeg(SessionListener):
    """A request on one decode worker, from `submit` to `close`.

    `begun`: the request had tokens when it was submitted. `admitted`: the worker has queued it. `waits`: it
    waits for pages, so it needs an `attach`. `lane`: takes the entries that its owner need not process.
    """

    __slots__ = (
        *("_cluster", "_id", "_owner", "_sent", "_session", "_produced", "_load"),
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
        self._produced = False  # a token has arrived, so the prompt is computed
        self._load: LegLoad | None = None
        self._cluster = cluster
        self._session = cluster.session(worker)
        self._owner = owner

    def submit(self, request: GenerationRequest, attach: bool, missing: int) -> None:
        """Queues the request on the worker. With `attach` it waits for pages; otherwise the worker computes
        the `missing` tokens of the prompt. Raises Unavailable if the worker is not connected.
        """
        self._sent, self.begun, self.waits = time.monotonic(), request.begun, attach
        self._session.submit(request, attach, self)
        count, prompt = len(request.choices), len(request.prompt_ids)
        queued = 0 if attach else missing
        self._load = self._cluster.occupy(self.worker, UnderWay(count, count * prompt, queued=queued))
        self._id = request.id

    def attach(
        self, attempt: int, handles: tuple[KvHandle, ...], first_tokens: tuple[FirstToken, ...]
    ) -> None:
        """Sends the worker the handles of the prompt's pages. Without any it computes the prompt itself."""
        self.waits = False
        self._session.attach(self._id, attempt, handles, first_tokens)

    def named(self, timings: EngineTimings) -> EngineTimings:
        """The worker's timings, completed by its name, its role and the time of the submit."""
        return msgspec.structs.replace(timings, worker=self.worker, role=Role.DECODE, sent=self._sent)

    def cancel(self, choice: int) -> None:
        """Ends one choice on the worker."""
        self._session.cancel(self._id, choice)

    def close(self, cancel: bool) -> None:
        """Stops listening to the worker. `cancel` also ends the request on the worker. Idempotent."""
        if not self._id:
            return
        if cancel:
            self._session.cancel(self._id)
        self._session.forget(self._id)
        assert self._load is not None
        self._load.close()
        self._id = ""

    def on_entry(self, entry: TokenEntry) -> None:
        if not self._produced and self._load is not None:
            self._load.computed()
            self._produced = True
            self._cluster.record_outcome(self.worker)
        self._owner.on_entry(self, entry)

    def on_reply(self, reply: Reply) -> None:
        if isinstance(reply, RequestAdmitted):
            self.admitted = True
        elif isinstance(reply, RequestFailed):
            self._cluster.record_outcome(self.worker, reply.failure.error())
        self._owner.on_event(self, reply)

    def on_draining(self) -> None:
        self._owner.on_event(self, LegDraining())

    def on_lost(self, error: EyasError) -> None:
        self._owner.on_event(self, LegEnded(error))


class PrefillLeg:
    """One Prefill call. `handles` is None until the worker has started computing the prompt."""

    def __init__(self, cluster: Cluster, worker: str, owner: LegOwner) -> None:
        self.worker = worker
        self.admitted = False
        self.handles: tuple[KvHandle, ...] | None = None
        self._sent = 0.0
        self._prompt = "", 0  # the id and attempt of the request on the worker
        self._calling = False
        self._closed = False
        self._cluster = cluster
        self._owner = owner
        self._task: asyncio.Task[None] | None = None
        self._cancelling: asyncio.Task[None] | None = None

    def submit(self, request: GenerationRequest, attempt: int, offer_draft: bool, missing: int) -> None:
        """Starts the call. `offer_draft`: the worker also offers draft KV. `missing`: the number of prompt
        tokens that it must compute.
        """
        self._prompt = request.id, attempt
        self._sent = time.monotonic()
        load = self._cluster.occupy(self.worker, UnderWay(prompts=1, queued=missing))
        self._task = asyncio.create_task(self._follow(request, attempt, offer_draft, load))
        self._task.add_done_callback(lambda _: load.close())

    def named(self, timings: EngineTimings) -> EngineTimings:
        """The worker's timings, completed by its name, its role and the time of the submit."""
        return msgspec.structs.replace(timings, worker=self.worker, role=Role.PREFILL, sent=self._sent)

    def close(self) -> None:
        """Ends the call if it still runs. Handles that arrive later are returned. Idempotent."""
        if self._task is None or self._closed:
            return
        self._closed = True
        if self._calling and self.handles is None:
            self._cancelling = asyncio.create_task(
                self._cancel_prompt(self._task), name=f"leave {self.worker}"
            )
        else:
            self._task.cancel()

    async def _cancel_prompt(self, call: asyncio.Task[None]) -> None:
        """Cancels the prompt on the worker, then reads the call to its end for at most CANCEL_GRACE_S.

        Cancelling the call itself would lose the handles of a prompt that was done before the cancel arrived.
        """
        with contextlib.suppress(
            EyasError
        ):  # the worker is lost, and its pages with it, or it is an older one
            await self._cluster.prefill_client(self.worker).cancel(*self._prompt)
        await asyncio.wait([call], timeout=CANCEL_GRACE_S)
        call.cancel()

    async def _follow(
        self, request: GenerationRequest, attempt: int, offer_draft: bool, load: LegLoad
    ) -> None:
        """Sends the prompt when it is scheduled, then reports the events of the call and its end.

        Reads the whole stream: leaving it early would cancel the call.
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
                        load.computed()
                        self._cluster.record_outcome(self.worker)
                        done = True
                self._owner.on_event(self, event)
        except EyasError as caught:
            error = caught
        except Exception:
            _log.exception("the prefill of request %s failed", request.id)
            error = EyasError("internal error")
        if not done:
            self._cluster.record_outcome(self.worker, error)
        self._owner.on_event(self, LegEnded(error))
