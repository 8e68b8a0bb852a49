"""One `DecodeService.Session` per worker, shared by all requests of this gateway, reopened when it breaks.

A session sends messages of requests to the worker and hands each reply to its request. It says whether the
worker is alive; the request decides what follows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from eyas.common.errors import EyasError, Unavailable
from eyas.common.types import FirstToken, GenerationRequest, KvHandle, TokenEntry
from eyas.common.wire.clients import DecodeSession, DecodeSessionClient, Heartbeat, Reply, SessionEvent
from eyas.common.wire.message import StepReply
from gateway.backends.base import FastPath

SILENCE_S = 5.0  # without a message a worker counts as lost: it sends a heartbeat every second
LOOKS, LOOK_S = 5, 0.05
"""Before that verdict the event loop turns this often, with pauses of this length: if it was busy, it first
reads what the worker has sent meanwhile."""

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0

_log = logging.getLogger("eyas.gateway")


class SessionListener(Protocol):
    """One request on this worker, as its session calls it. No method waits or raises."""

    __slots__ = ()

    attempt: int  # of its submit: messages of lower attempts are not passed on
    lane: FastPath | None  # where entries are offered first

    def on_entry(self, entry: TokenEntry) -> None:
        """Takes tokens of one choice."""
        ...

    def on_reply(self, reply: Reply) -> None:
        """Takes what the worker says of the request, tokens aside."""
        ...

    def on_draining(self) -> None:
        """The worker takes no new requests. Called with every heartbeat of a draining worker."""
        ...

    def on_gone(self, error: EyasError) -> None:
        """The worker, or the connection to it, is lost. No other call follows."""
        ...


class WorkerSession:
    """The gateway's stream to one decode worker. `start` it once; `aclose` ends it for good.

    `submit`, `attach` and `cancel` never wait. When the worker is lost, every request is told by `on_gone`
    and forgotten; while it drains, every request is told by `on_draining` with each heartbeat.
    """

    def __init__(self, client: DecodeSessionClient, worker: str) -> None:
        self.worker = worker
        self._client = client
        self._listeners: dict[str, SessionListener] = {}
        self._stream: DecodeSession | None = None
        self._draining = False
        self._stalled = False
        self._heard = 0.0  # a message, in monotonic seconds
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether the stream is open and the worker takes new requests."""
        return self._stream is not None and not self._draining and not self._stalled

    def start(self) -> None:
        """Opens the stream, and opens it again whenever it breaks, until `aclose`."""
        self._task = asyncio.create_task(self._run(), name=f"session {self.worker}")

    async def aclose(self) -> None:
        """Ends the stream. Listeners are told nothing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, request: GenerationRequest, attach: bool, listener: SessionListener) -> None:
        """Queues a request under `listener.attempt`; `attach`: it waits for pages.

        Raises Unavailable while not connected.
        """
        if self._stream is None:
            raise Unavailable(f"worker {self.worker} is not connected")
        self._stream.submit(request, listener.attempt, attach)
        self._listeners[request.id] = listener  # only once it was sent

    def attach(
        self, id: str, attempt: int, handles: tuple[KvHandle, ...], first_tokens: tuple[FirstToken, ...] = ()
    ) -> None:
        """See `DecodeSession.attach`. A no-op for requests that this session no longer holds."""
        if self._stream is not None and id in self._listeners:
            self._stream.attach(id, attempt, handles, first_tokens)

    def cancel(self, id: str, choice: int | None = None) -> None:
        """Ends a choice, or the request. A no-op for requests that this session no longer holds."""
        if self._stream is not None and id in self._listeners:
            self._stream.cancel(id, choice)

    def forget(self, id: str) -> None:
        """Drops all that still comes for this request."""
        self._listeners.pop(id, None)

    # --- the worker's side ---

    async def _run(self) -> None:
        backoff = MIN_BACKOFF_S
        while True:
            stream = self._client.open()
            try:
                await self._listen(stream)
            except Exception as error:
                if self._stream is not None:
                    backoff = MIN_BACKOFF_S
                self._report_lost(error)
            finally:
                stream.close()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _listen(self, stream: DecodeSession) -> None:
        """Hands out messages. Raises when the stream breaks, TimeoutError when the worker falls silent.

        The first message opens the session: a worker that cannot serve ends the stream without one.
        """
        self._heard = time.monotonic()
        async with asyncio.timeout(None) as silence:
            watch = asyncio.create_task(self._end_in_silence(silence), name=f"silence {self.worker}")
            try:
                async for event in stream:
                    self._heard = time.monotonic()
                    if self._stream is None:
                        self._stream, self._draining, self._stalled = stream, False, False
                        _log.info("session with worker %s is open", self.worker)
                    self._take(event)
            finally:
                watch.cancel()

    async def _end_in_silence(self, silence: asyncio.Timeout) -> None:
        """Lets `silence` expire once nothing came for `SILENCE_S`, and nothing was there to be read."""
        while True:
            heard = self._heard
            await asyncio.sleep(heard + SILENCE_S - time.monotonic())
            for _ in range(LOOKS):
                if self._heard != heard:
                    break
                await asyncio.sleep(LOOK_S)
            if self._heard == heard:
                silence.reschedule(asyncio.get_running_loop().time())
                return

    def _take(self, event: SessionEvent) -> None:
        match event:
            case StepReply(entries):
                self._hand_out(entries)
            case Heartbeat(draining=True):
                self._drain()
            case Heartbeat(stalled=stalled):
                self._stalled = stalled
            case _:
                listener = self._listeners.get(event.id)
                if listener is not None and event.attempt >= listener.attempt:
                    listener.on_reply(event)

    def _hand_out(self, entries: tuple[TokenEntry, ...]) -> None:
        now, known = time.monotonic(), self._listeners
        for entry in entries:
            listener = known.get(entry.id)
            if listener is not None and entry.attempt >= listener.attempt:
                lane = listener.lane
                if lane is None or not lane.offer(entry, now):
                    listener.on_entry(entry)

    def _drain(self) -> None:
        """Tells all listeners, at every heartbeat: one that cannot move now may be able to at the next."""
        if not self._draining:
            _log.info("worker %s is draining (%d requests)", self.worker, len(self._listeners))
        self._draining = True
        for listener in list(self._listeners.values()):
            listener.on_draining()

    def _report_lost(self, cause: Exception) -> None:
        """Tells every request that this worker, or the connection to it, is lost."""
        if self._stream is None:
            return  # the stream never opened, so no request used it
        self._stream = None
        reason = f"worker {self.worker} was lost: {str(cause) or 'it fell silent'}"
        defect = not isinstance(cause, EyasError | TimeoutError)
        _log.warning("%s (%d requests)", reason, len(self._listeners), exc_info=cause if defect else None)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_gone(Unavailable(reason))
