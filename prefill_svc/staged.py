"""The bytes of pages that no front can map: the engine copies them to staging, window by window.

Who may read which pages is the servicer's and the engine's business.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass

from eyas.common.errors import DeadlineExceeded, TransferFailed, Unavailable
from eyas.common.types import KvKind
from eyas.common.wire.buffer import StreamBuffer
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import EngineStopped, PagesStaged, StagePages, UnstagePages
from kv_transfer.area import Pages
from kv_transfer.backends.stream import chunks
from kv_transfer.layout import window_pages

AT_ONCE = 2  # windows of one stream: while one is sent, the next one is copied
SLOT_LEASE_S = 20.0  # a puller that reads slots itself has them so long: its READs are given up before that
STAGED_S = 5.0  # an engine that has not copied a window by then has too much to do
TAKEN_S = 3.0  # a puller that takes no chunk in this time gives its slots back: others wait for them


@dataclass(frozen=True)
class StagedPages:
    """The pages of one lease. `slots`: the mapped staging; `handle` 0: the proof page alone."""

    engine: EngineClient
    slots: Pages
    group: KvKind
    handle: int

    async def chunks(self, pages: Sequence[int]) -> AsyncGenerator[bytes, None]:
        """The bytes of `pages`, in order. However this ends, every slot goes back.

        Raises TransferFailed if the engine does not copy them, or the caller is too slow; Unavailable.
        """
        size = window_pages(self.slots.shape[1])
        later = asyncio.get_running_loop().call_later
        left = (tuple(pages[i : i + size]) for i in range(0, len(pages), size))
        windows: deque[StagedWindow] = deque()
        try:
            while True:
                while len(windows) < AT_ONCE and (some := next(left, None)):
                    windows.append(StagedWindow(self, some))
                if not windows:
                    return
                for data in chunks(self.slots, await windows[0].staged()):
                    slow = later(TAKEN_S, _end, windows)
                    try:
                        yield data
                    finally:
                        slow.cancel()
                    if windows[0].ended:
                        raise TransferFailed(f"the puller took nothing for {TAKEN_S:g} s")
                windows.popleft().end()
        finally:
            _end(windows)


class StagedWindow:
    """Some pages of a lease, from the request for their copies until `end`."""

    def __init__(self, source: StagedPages, pages: tuple[int, ...]) -> None:
        self.ended = False
        self._engine = source.engine
        deadline = asyncio.get_running_loop().time() + STAGED_S
        self._answer: StreamBuffer[PagesStaged | EngineStopped] = StreamBuffer(2, deadline)
        self._call = source.engine.open(self._answer.put)
        source.engine.send(StagePages(self._call, source.group, source.handle, pages))

    async def staged(self) -> tuple[int, ...]:
        """The slots with the copies."""
        try:
            answer = await self._answer.get()
        except DeadlineExceeded:
            raise TransferFailed(f"the engine staged no pages within {STAGED_S:g} s") from None
        match answer:
            case PagesStaged(failure=None, slots=slots):
                return slots
            case PagesStaged(failure=failure) | EngineStopped(failure=failure) if failure is not None:
                raise failure.error()
        raise Unavailable("the engine has left")

    def end(self) -> None:
        """The slots go back, if they came or when they come."""
        if not self.ended:
            self.ended = True
            self._engine.close(self._call)
            self._engine.send(UnstagePages(self._call))


def _end(windows: Iterable[StagedWindow]) -> None:
    for window in windows:
        window.end()
