"""The draft KV of pulled prompts: it comes into the same pages as their target KV, of a pool of its own.

It is advice, like all drafting: a prompt whose draft KV is refused, lost or late begins without it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import is_

from eyas.common.errors import EyasError
from eyas.common.types import KvHandle
from eyas.engine.batch.sequence import Generation
from eyas.engine.kv.pages import PageOwners
from eyas.engine.kv.pulls import PullArrival, PullManager
from kv_transfer.layout import pages_for

DRAFT_WAIT_S = 1.0  # a prompt that is here waits no longer for its draft KV


@dataclass
class _ComingDraftKv:
    """The draft KV of one prompt. `pages`: those lent to the prompt; the first `filled` are filled."""

    pages: list[int] | None = None
    filled: int = 0
    rows: int = 0  # that came
    over: bool = False  # no more will
    arrival: PullArrival | None = None  # of the prompt's target KV, which waits for this
    deadline: float = 0.0  # when that has waited for long enough, in monotonic seconds


class DraftKv:
    """The destination of the draft pool's pulls, whose owners are generations."""

    def __init__(self, pulls: PullManager, pool: PageOwners, page_size: int) -> None:
        self._pulls = pulls
        self._pool = pool
        self._page_size = page_size
        self._coming: dict[Generation, _ComingDraftKv] = {}
        pulls.destination = self

    # --- as the requests go ----------------------------------------------------------------------------

    def open(self, generation: Generation, handle: KvHandle) -> None:
        """Pull `handle`, of all rows of the prompt but the last, as soon as the prompt is lent pages."""
        self._coming[generation] = _ComingDraftKv()
        if handle.tokens == len(generation.request.prompt_ids) - 1:
            self._pulls.open(generation, handle, generation.attempt, generation.deadline)
        else:
            self._pulls.refuse(handle, generation.attempt)
            self._coming[generation].over = True

    def lent(self, generation: Generation, pages: list[int], filled: int) -> None:
        """The prompt was lent pages."""
        coming = self._coming.get(generation)
        if coming is not None and not coming.over:
            coming.pages, coming.filled = pages, filled

    def taken(self, pages: list[int]) -> None:
        """A prompt has lost the pages that it was lent, as in a pause. Its draft KV comes into the next ones,
        unless it was all here: its owner has let go of it then.
        """
        for generation, coming in self._coming.items():
            if coming.pages == pages:
                coming.pages, coming.rows = None, 0
                waits = generation in self._pulls.waiting()
                if not waits and not self._pulls.preempt(partial(is_, generation)):
                    self._pulls.cancel(generation)
                    coming.over = True

    def keep(self, generation: Generation, arrival: PullArrival) -> bool:
        """The prompt's target KV is here. True: `complete` gives it back, with its draft KV or without."""
        coming = self._coming.get(generation)
        if coming is None or coming.over:
            return False
        coming.arrival, coming.deadline = arrival, time.monotonic() + DRAFT_WAIT_S
        return True

    def complete(self, now: float) -> Iterator[tuple[Generation, PullArrival]]:
        """Prompts whose draft KV is here, or is not waited for any more."""
        for generation, coming in list(self._coming.items()):
            if coming.arrival is not None and (coming.over or now > coming.deadline):
                arrival, coming.arrival = coming.arrival, None
                self._pulls.cancel(generation)
                yield generation, arrival

    def rows(self, generation: Generation) -> int:
        """The number of rows of the prompt whose draft KV came."""
        coming = self._coming.get(generation)
        return 0 if coming is None else coming.rows

    def forget(self, generation: Generation) -> None:
        """The generation goes, or another attempt begins."""
        coming = self._coming.pop(generation, None)
        if coming is None:
            return
        self._pulls.cancel(generation)
        if coming.arrival is not None:
            self._pool.drop(coming.arrival.pages)

    # --- the destination of pulls (`eyas.engine.kv.pulls.PullDestination`) ----------------------------------

    def first(self, owners: list[Hashable]) -> Hashable:
        """The first whose prompt was lent pages; if there is none, the first of all."""
        return next((owner for owner in owners if self._of(owner).pages is not None), owners[0])

    def lend(self, owner: Hashable, handle: KvHandle) -> tuple[list[int], int] | None:
        """The prompt's own pages, once it has some. Those from the cache have their draft KV."""
        coming = self._of(owner)
        if coming.pages is None:
            return None
        pages = coming.pages[: pages_for(handle.tokens, self._page_size)]
        self._pool.share(pages)
        return pages, min(coming.filled, len(pages))

    def refused(self, owner: Hashable, handle: KvHandle, now: float) -> None:
        """Does nothing. Draft KV waits for the pages of its prompt, and no other pull waits for draft KV."""

    def arrived(self, owner: Hashable, arrival: PullArrival) -> None:
        """Notes that the draft KV is here; the pages remain with their prompt."""
        coming = self._of(owner)
        coming.rows, coming.over = arrival.handle.tokens, True
        self._pool.drop(arrival.pages)

    def lost(self, owner: Hashable, error: EyasError) -> None:
        """Notes that no draft KV will come: the prompt begins without it."""
        self._of(owner).over = True

    def pages_free(self, pages: list[int]) -> None:
        """Drops the pull's claim to these pages."""
        self._pool.drop(pages)

    def _of(self, owner: Hashable) -> _ComingDraftKv:
        assert isinstance(owner, Generation)
        return self._coming[owner]
