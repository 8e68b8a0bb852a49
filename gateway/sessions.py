"""One `DecodeService.Session` per worker, shared by all requests of this gateway, reopened when it breaks.

A session carries requests' messages up and hands what comes down to the request it belongs to. It knows
when a worker is alive; it refuses to know what a request does about it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from eyas.common.clients import DecodeSession, DecodeSessionClient, Heartbeat, Reply
from eyas.common.errors import EyasError, Unavailable
from eyas.common.replies import Step
from eyas.common.types import Entry, FirstToken, GenerationRequest, KvHandle

SILENCE_S = 5.0  # a live worker sends a heartbeat at once, and then every second
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0

_log = logging.getLogger("eyas.gateway")


class Listener(Protocol):
    """What a session tells one request about its place on this worker. No method waits or raises."""

    attempt: int  # with which it was submitted here: messages of lower attempts are not passed on

    def on_entry(self, entry: Entry) -> None: ...
    def on_reply(self, reply: Reply) -> None: ...
    def on_draining(self) -> None: ...
    def on_gone(self, error: EyasError) -> None: ...


class Session:
    """The gateway's line to one decode worker. `start` it once; `aclose` ends it for good.

    `submit`, `attach` and `cancel` never wait. A request hears of the worker's death by `on_gone`, once,
    and is forgotten with it; that the worker is draining it hears by `on_draining`, again and again.
    """

    def __init__(self, client: DecodeSessionClient, worker: str) -> None:
        self.worker = worker
        self._client = client
        self._listeners: dict[str, Listener] = {}
        self._stream: DecodeSession | None = None
        self._draining = False
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """The worker is there, and takes new requests."""
        return self._stream is not None and not self._draining

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"session {self.worker}")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, request: GenerationRequest, attach: bool, listener: Listener) -> None:
        """Queue a request under `listener.attempt`. Raises Unavailable while not connected."""
        if self._stream is None:
            raise Unavailable(f"worker {self.worker} is not connected")
        self._stream.submit(request, listener.attempt, attach)
        self._listeners[request.id] = listener  # of what was sent: a request that cannot be is not kept

    def attach(
        self, id: str, attempt: int, handles: tuple[KvHandle, ...], first_tokens: tuple[FirstToken, ...] = ()
    ) -> None:
        """See `DecodeSession.attach`. A no-op for requests that this session no longer holds."""
        if self._stream is not None and id in self._listeners:
            self._stream.attach(id, attempt, handles, first_tokens)

    def cancel(self, id: str, choice: int | None = None) -> None:
        """End a choice, or the request. A no-op for requests that this session no longer holds."""
        if self._stream is not None and id in self._listeners:
            self._stream.cancel(id, choice)

    def forget(self, id: str) -> None:
        """Whatever else comes for this request is dropped."""
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
                self._bury(error)
            finally:
                stream.close()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _listen(self, stream: DecodeSession) -> None:
        """Hand out what comes down; raises when the stream breaks, TimeoutError when it falls silent.

        The worker's first word opens the session: one that cannot serve ends the stream without any.
        """
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(SILENCE_S) as silence:
            async for event in stream:
                silence.reschedule(clock() + SILENCE_S)
                if self._stream is None:
                    self._stream, self._draining = stream, False
                    _log.info("session with worker %s is open", self.worker)
                match event:
                    case Step(entries):
                        self._hand_out(entries)
                    case Heartbeat(draining=True):
                        self._drain()
                    case Heartbeat():
                        pass
                    case _:
                        listener = self._listeners.get(event.id)
                        if listener is not None and event.attempt >= listener.attempt:
                            listener.on_reply(event)

    def _hand_out(self, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            listener = self._listeners.get(entry.id)
            if listener is not None and entry.attempt >= listener.attempt:
                listener.on_entry(entry)

    def _drain(self) -> None:
        """Said with every heartbeat: what cannot go elsewhere now may be able to at the next one."""
        if not self._draining:
            _log.info("worker %s is draining (%d requests)", self.worker, len(self._listeners))
        self._draining = True
        for listener in list(self._listeners.values()):
            listener.on_draining()

    def _bury(self, cause: Exception) -> None:
        """Tell every request that this worker, or the line to it, is gone."""
        if self._stream is None:
            return  # it never came up: nobody was here
        self._stream = None
        reason = f"worker {self.worker} was lost: {str(cause) or 'it fell silent'}"
        defect = not isinstance(cause, EyasError | TimeoutError)
        _log.warning("%s (%d requests)", reason, len(self._listeners), exc_info=cause if defect else None)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_gone(Unavailable(reason))
