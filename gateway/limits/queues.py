"""The order in which callers' requests are served: fair between callers, and one after another.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), by caller: each has a virtual time, which advances by
the cost of what it gets over its weight; the caller with the least time is next. A caller that comes back
begins at the time that the others have reached, so it saves nothing up, and a flood delays its own caller
alone. The order within a caller is by arrival, which a priority moves by `PRIORITY_S` per unit: only requests
that come within a bounded time after another one can overtake it.

Between two new requests the event loop turns for everyone else. Reading a prompt of 60,000 ids takes the loop
some milliseconds, and sending it takes as long; a small request takes one or two in all. A hundred of either
in a row leave nothing for streams: gRPC gives the loop one message of a worker's session per turn, and each
new request brings two. So a request waits until the loop has had time and turns for others since the one
before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from bisect import insort
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from eyas.common.errors import Cancelled, DeadlineExceeded, Overloaded
from eyas.common.params import PRIORITY_S

Item = TypeVar("Item", bound=Hashable)
Done = TypeVar("Done")
LARGE_BYTES = 32 << 10
"""To send a request from here on is a piece of its own. A smaller one counts as this much among those that
wait: it is about a millisecond of work too."""
ID_BYTES = 6  # of a token id, as bodies write them
MAX_WAITING_BYTES = 64 << 20  # of requests that nothing was done for yet: some seconds of work
WAIT_S = 10.0  # that they wait
REST = 0.5  # of a piece's time, which the loop has for others after it
LEAST_REST_S = 0.001
TURNS = 16  # that the loop then makes, if more requests wait: some messages of each session
Holder = tuple[str, bool]  # a caller, and whether its pieces are large


@dataclass(frozen=True)
class QueueClaim:
    """The claim of a queued item.

    `cost`: its work, in any unit. `priority`: lower is earlier. `arrived`: seconds.
    """

    caller: str
    cost: float = 1.0
    weight: float = 1.0
    priority: int = 0
    arrived: float = 0.0


class FairQueue(Generic[Item]):
    """A queue of items by caller, in fair order."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[float, int, Item]]] = {}
        self._claims: dict[Item, tuple[QueueClaim, tuple[float, int, Item]]] = {}
        self._times: dict[str, float] = {}  # virtual, by caller
        self._now = 0.0  # the virtual time of the last that was served
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, item: Item, claim: QueueClaim) -> None:
        """Queues the item."""
        if claim.caller not in self._lines:
            self._times = {
                caller: at for caller, at in self._times.items() if at > self._now or caller in self._lines
            }
            self._times[claim.caller] = max(self._times.get(claim.caller, 0.0), self._now)
        entry = (claim.arrived + PRIORITY_S * claim.priority, next(self._numbers), item)
        insort(self._lines.setdefault(claim.caller, []), entry)
        self._claims[item] = claim, entry

    def first(self) -> Item:
        """The item that is scheduled next. The queue must not be empty."""
        caller = min(self._lines, key=lambda caller: (self._times[caller], self._lines[caller][0]))
        return self._lines[caller][0][-1]

    def serve(self, item: Item) -> None:
        """Charges the item to its caller and removes it."""
        claim, _ = self._claims[item]
        self._now = max(self._now, self._times[claim.caller])
        self._times[claim.caller] += claim.cost / claim.weight
        self.remove(item)

    def remove(self, item: Item) -> None:
        """Removes the item, if it is queued."""
        if item not in self._claims:
            return
        claim, entry = self._claims.pop(item)
        line = self._lines[claim.caller]
        line.remove(entry)
        if not line:
            del self._lines[claim.caller]
        if not self._lines:
            self._times.clear()  # the server is idle: earlier service no longer counts
            self._now = 0.0


# Pieces of work that wait for a turn: which is next, and which is refused once too much waits. What was begun
# goes before what is new, so that nothing piles up half done; within either, callers take turns
# (`gateway.limits.queues`), and so do the small and the large pieces of one. What is new is bounded in bytes:
# past the bound, the caller with most for its weight loses its newest. Pure values: no clock, no event loop.
class BoundedQueue(Generic[Item]):
    """A queue in which at most `most` bytes of new pieces wait."""

    def __init__(self, most: int, small: int, weight: Callable[[str], float]) -> None:
        """`small`: bytes of the largest piece that is small."""
        self._most = most
        self._small = small
        self._weight = weight
        self._started: FairQueue[Item] = FairQueue()
        self._new: FairQueue[Item] = FairQueue()
        self._sizes: dict[Holder, dict[Item, int]] = {}  # of new pieces, the oldest first
        self._holders: dict[Item, Holder] = {}
        self._started_sizes: dict[Item, int] = {}
        self._new_bytes = 0

    def __len__(self) -> int:
        return len(self._started) + len(self._new)

    @property
    def waiting(self) -> int:
        """The bytes of all queued pieces."""
        return self._new_bytes + sum(self._started_sizes.values())

    def add_started(self, item: Item, caller: str, size: int) -> None:
        """Queues the rest of work whose first piece has run."""
        self._started.add(item, self._claim(caller, size))
        self._started_sizes[item] = size

    def add_new(self, item: Item, caller: str, size: int) -> list[Item]:
        """Queues a new piece; removes and returns the pieces that exceed the bound, perhaps this one."""
        self._new.add(item, self._claim(caller, size))
        holder = caller, size > self._small
        self._holders[item] = holder
        self._sizes.setdefault(holder, {})[item] = size
        self._new_bytes += size
        refused = []
        while self._new_bytes > self._most:
            refused.append(next(reversed(self._sizes[self._heaviest()])))
            self.remove(refused[-1])
        return refused

    def next(self) -> Item:
        """Removes and returns the piece that is scheduled next. The queue must not be empty."""
        turns = self._started or self._new
        item = turns.first()
        turns.serve(item)
        self.remove(item)
        return item

    def remove(self, item: Item) -> None:
        """Removes the item, if it is queued."""
        self._started.remove(item)
        self._new.remove(item)
        self._started_sizes.pop(item, None)
        if (holder := self._holders.pop(item, None)) is not None:
            own = self._sizes[holder]
            self._new_bytes -= own.pop(item)
            if not own:
                del self._sizes[holder]

    def _claim(self, caller: str, size: int) -> QueueClaim:
        kind = "large" if size > self._small else "small"
        return QueueClaim(f"{caller}\0{kind}", float(size), self._weight(caller))

    def _heaviest(self) -> Holder:
        """Returns the caller with the largest share for its weight, and the kind of which it has more."""
        kinds = {holder: sum(own.values()) for holder, own in self._sizes.items()}
        usage = Counter[str]()
        for (caller, _), size in kinds.items():
            usage[caller] += size
        return max(kinds, key=lambda kind: (usage[kind[0]] / self._weight(kind[0]), kinds[kind]))


class ReadQueue:
    """The turns of new requests, and of large pieces of work, on this event loop. A piece is what its caller
    does, without a wait, after `enter` or `go_on` has returned; `aside` does it in a thread.
    """

    def __init__(self, weight: Callable[[str], float] = lambda caller: 1.0) -> None:
        """`weight`: a caller's part, beside others that wait."""
        self._line: BoundedQueue[asyncio.Future[None]] = BoundedQueue(MAX_WAITING_BYTES, LARGE_BYTES, weight)
        self._began = 0.0  # the newest piece
        self._aside = False  # it runs in a thread
        self._turns = 0  # that the loop owes to others since

    @property
    def waiting(self) -> tuple[int, int]:
        """(pieces that wait for their turn, their bytes, of each `LARGE_BYTES` at least)."""
        return len(self._line), self._line.waiting

    async def enter(
        self, caller: str, size: int, left: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """The turn of a request of this many bytes. `left`: returns once its caller has left, where that does
        not cancel this call.

        Raises Overloaded if too much waits, or it waited for `WAIT_S`; Cancelled if the caller left.
        """
        if self._begins():
            return
        turn = asyncio.get_running_loop().create_future()
        said = "too many requests wait to be read: send it again later"
        for refused in self._line.add_new(turn, caller, max(size, LARGE_BYTES)):
            if not refused.done():
                refused.set_exception(Overloaded(said))
        try:
            with contextlib.nullcontext() if left is None else _given_up(turn, left):
                await self._wait(turn, WAIT_S)
        except TimeoutError:
            raise Overloaded(said) from None

    async def go_on(self, caller: str, size: int, within_s: float) -> bool:
        """The turn of more work on what has entered; whether it was waited for. Raises DeadlineExceeded if it
        takes longer to come.
        """
        if self._begins():
            return False
        turn = asyncio.get_running_loop().create_future()
        self._line.add_started(turn, caller, size)
        try:
            await self._wait(turn, within_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the request waited {within_s:g} s to be sent to a worker") from None
        return True

    async def send(self, caller: str, tokens: int, within_s: float) -> bool:
        """Waits until a prompt of this number of tokens may be sent to a worker. A small one need not
        wait.
        """
        size = ID_BYTES * tokens
        return size >= LARGE_BYTES and await self.go_on(caller, size, within_s)

    async def aside(self, work: Callable[[], Done]) -> Done:
        """Does a long piece in a thread, so that the loop goes on with streams. The next piece begins after
        it, also where its caller has left. To be called without a wait after `enter` or `go_on`.
        """
        self._aside = True
        done = asyncio.get_running_loop().run_in_executor(None, work)
        done.add_done_callback(self._came_back)
        return await asyncio.shield(done)

    def _came_back(self, done: asyncio.Future[Any]) -> None:
        """The piece in the thread has worked. What it raised is its caller's, who may have left."""
        done.exception()
        self._aside = False
        self._rest()

    def _begins(self) -> bool:
        """Begins a piece if none must wait; returns whether it did."""
        if self._turns:
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._turns = TURNS
        asyncio.get_running_loop().call_soon(self._rest)  # behind the piece

    async def _wait(self, turn: asyncio.Future[None], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await turn
        finally:
            self._line.remove(turn)

    def _rest(self) -> None:
        """A piece has worked, unless it does so in a thread."""
        if self._aside:
            return
        pause_s = max(REST * (time.monotonic() - self._began), LEAST_REST_S)
        asyncio.get_running_loop().call_later(pause_s, self._turn)

    def _turn(self) -> None:
        """The loop has turned for others. If none waits, it is enough."""
        if not self._line:
            self._turns = 0
            return
        self._turns -= 1
        if self._turns:
            asyncio.get_running_loop().call_soon(self._turn)
            return
        turn = self._line.next()
        if not turn.done():  # its caller may be leaving
            turn.set_result(None)
        self._begin()


@contextlib.contextmanager
def _given_up(turn: asyncio.Future[None], left: Callable[[], Awaitable[object]]) -> Iterator[None]:
    """Raises Cancelled where `turn` is awaited once `left` returns."""

    async def give_up() -> None:
        await left()
        if not turn.done():
            turn.set_exception(Cancelled("the client left before its request was read"))

    watch = asyncio.create_task(give_up(), name="client of a waiting request")
    try:
        yield
    finally:
        watch.cancel()
