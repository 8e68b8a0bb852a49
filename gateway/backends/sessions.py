"""One `DecodeService.Session` per worker, shared by all requests of this gateway, reopened when it breaks.

A session sends the messages of requests to the worker and passes each reply to its request. It detects that a
worker is lost; the requests decide what follows.
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
POLLS, POLL_S = 5, 0.05
"""The number of polls for a message before a worker counts as lost, and the seconds between two of them: an
event loop that was busy must first read the messages that have arrived."""

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0

_log = logging.getLogger("eyas.gateway")


class SessionListener(Protocol):
    """The callbacks of one request on a worker. No method waits or raises."""

    __slots__ = ()

    attempt: int  # of its submit: messages of lower attempts are not passed on
    lane: FastPath | None  # where entries are offered first

    def on_entry(self, entry: TokenEntry) -> None:
        """Called with new tokens of one choice."""
        ...

    def on_reply(self, reply: Reply) -> None:
        """Called with every other message of the worker about the request."""
        ...

    def on_draining(self) -> None:
        """Called with every heartbeat of a draining worker, which takes no new requests."""
        ...

    def on_lost(self, error: EyasError) -> None:
        """Called when the worker, or the connection to it, is lost. No other call follows."""
        ...


class WorkerSession:
    """The gateway's stream to one decode worker. `start` opens it, once; `aclose` ends it permanently.

    `submit`, `attach` and `cancel` never wait. When the worker is lost, `on_lost` is called for every
    request, and the session forgets them; while it drains, `on_draining` is called for each with every
    heartbeat.
    """

    def __init__(self, client: DecodeSessionClient, worker: str) -> None:
        self.worker = worker
        self._client = client
        self._listeners: dict[str, SessionListener] = {}
        self._stream: DecodeSession | None = None
        self._draining = False
        self._stalled = False
        self._last_message_at = 0.0  # time of the last message, monotonic seconds
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether the stream is open and the worker takes new requests."""
        return self._stream is not None and not self._draining and not self._stalled

    def start(self) -> None:
        """Opens the stream, and opens it again whenever it breaks, until `aclose`."""
        self._task = asyncio.create_task(self._run(), name=f"session {self.worker}")

    async def aclose(self) -> None:
        """Ends the stream without notifying the listeners."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, request: GenerationRequest, attach: bool, listener: SessionListener) -> None:
        """Queues a request under `listener.attempt`. With `attach` it waits for pages.

        Raises Unavailable while not connected.
        """
        if self._stream is None:
            raise Unavailable(f"worker {self.worker} is not connected")
        self._stream.submit(request, listener.attempt, attach)
        self._listeners[request.id] = listener  # only after the submit has not raised

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
        """Drops all further messages for this request."""
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
        """Passes messages to their listeners. Raises when the stream breaks; TimeoutError for a silent
        worker.

        The first message opens the session: a worker that cannot serve ends the stream without one.
        """
        self._last_message_at = time.monotonic()
        async with asyncio.timeout(None) as silence:
            watch = asyncio.create_task(self._end_in_silence(silence), name=f"silence {self.worker}")
            try:
                async for event in stream:
                    self._last_message_at = time.monotonic()
                    if self._stream is None:
                        self._stream, self._draining, self._stalled = stream, False, False
                        _log.info("session with worker %s is open", self.worker)
                    self._take(event)
            finally:
                watch.cancel()

    async def _end_in_silence(self, silence: asyncio.Timeout) -> None:
        """Lets `silence` expire after `SILENCE_S` without a message, if none is waiting to be read either."""
        while True:
            last = self._last_message_at
            await asyncio.sleep(last + SILENCE_S - time.monotonic())
            for _ in range(POLLS):
                if self._last_message_at != last:
                    break
                await asyncio.sleep(POLL_S)
            if self._last_message_at == last:
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
        """Notifies all listeners, at every heartbeat: a request that cannot move now may be able to later."""
        if not self._draining:
            _log.info("worker %s is draining (%d requests)", self.worker, len(self._listeners))
        self._draining = True
        for listener in list(self._listeners.values()):
            listener.on_draining()

    def _report_lost(self, cause: Exception) -> None:
        """Notifies every request that this worker, or the connection to it, is lost."""
        if self._stream is None:
            return  # the stream never opened, so no request used it
        self._stream = None
        reason = f"worker {self.worker} was lost: {str(cause) or 'it fell silent'}"
        defect = not isinstance(cause, EyasError | TimeoutError)
        _log.warning("%s (%d requests)", reason, len(self._listeners), exc_info=cause if defect else None)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_lost(Unavailable(reason))
