"""Owner-side glue: what a prefilled prompt offers to other workers, and who holds its pages until then.

The rules of leases are `kv_transfer.owner`; this file gives them pages and carries their words to the front.
Where pages are read is the business of `Offers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eyas.common.errors import EyasError
from eyas.common.types import FirstToken, KvHandle, KvKind, Shard
from eyas.engine.batch.sequence import Generation
from eyas.engine.ipc.messages import Failure, Release, Released, WatchClosed, WatchOpened, WatchUpdate
from eyas.engine.ipc.outbox import Outbox
from eyas.engine.kv.offers import Offers, Placed
from eyas.engine.kv.pages import PagePool
from kv_transfer.layout import pages_for
from kv_transfer.owner import Offer, Owner, Update


@dataclass
class Leases:
    """The pages that this engine offers, each page of `page_size` rows. `offers`: where they are read."""

    owner: Owner
    pool: PagePool
    page_size: int
    offers: dict[KvKind, Offers]
    outbox: Outbox
    _handles: dict[str, list[KvHandle]] = field(default_factory=dict)  # by generation id, while it runs
    _placed: dict[int, tuple[str, Placed]] = field(default_factory=dict)  # by handle id: whose, where

    def reserve(self, generation: Generation) -> bool:
        """Room for what `offer` will lease, before the prompt begins; False: not now."""
        rows = self._rows(generation)
        if all(self.offers[g].reserve(generation.id, pages_for(n, self.page_size)) for g, n in rows):
            return True
        self.leave(generation)  # a part of it is of no use
        return False

    def leave(self, generation: Generation) -> None:
        """It does not begin now: what is reserved for it is free."""
        for offers in self.offers.values():
            offers.leave(generation.id)

    def offer(self, generation: Generation, pages: list[int]) -> tuple[KvHandle, ...]:
        """Lease the pages of a prompt that starts now: its target KV, and draft KV if asked for."""
        handles = [self._offer(group, generation, pages, rows) for group, rows in self._rows(generation)]
        self._handles[generation.id] = handles
        return tuple(handles)

    def _rows(self, generation: Generation) -> list[tuple[KvKind, int]]:
        """What a prompt offers: groups, and rows of each."""
        rows = len(generation.request.prompt_ids)
        draft = generation.offer_draft and KvKind.DRAFT in self.offers and rows > 1
        return [(KvKind.TARGET, rows), *([(KvKind.DRAFT, rows - 1)] if draft else [])]

    def _offer(self, group: KvKind, generation: Generation, pages: list[int], rows: int) -> KvHandle:
        held = pages[: pages_for(rows, self.page_size)]
        self.pool.share(held)
        offers = self.offers[group]
        placed = offers.place(generation.id, held)
        shards = (Shard(rank=0, pages=placed.numbers),)
        offer = Offer(group, offers.layout_hash, rows, shards, generation.deadline)
        handle = self.owner.offer(offer, time.monotonic())
        self._placed[handle.id] = generation.id, placed
        return handle

    def is_offered(self, generation: Generation) -> bool:
        """Whether the pages of its prompt are leased."""
        return generation.id in self._handles

    def filled(self, generation: Generation, rows: int) -> None:
        """The first `rows` rows are past their device event; watchers hear of it once they can read them."""
        for handle in self._handles.get(generation.id, []):
            self._fill(handle, min(rows, handle.tokens))

    def _fill(self, handle: KvHandle, rows: int) -> None:
        self._show(handle, rows // self.page_size, lambda now: self.owner.filled(handle.id, rows, now))

    def finished(self, generation: Generation, first: tuple[FirstToken, ...], feature: bytes) -> None:
        """All rows are, and this is what the prompt gave besides."""
        for handle in self._handles.pop(generation.id, []):
            self._finish(handle, first, feature)

    def _finish(self, handle: KvHandle, first: tuple[FirstToken, ...], feature: bytes) -> None:
        pages = pages_for(handle.tokens, self.page_size)
        self._show(handle, pages, lambda now: self.owner.finished(handle.id, first, feature, now))

    def _show(self, handle: KvHandle, pages: int, tell: Callable[[float], None]) -> None:
        """`tell` the owner, with the time, once the first `pages` pages of a handle can be read."""
        if handle.id not in self._placed:
            return  # its lease is over

        def then(error: EyasError | None) -> None:
            now = time.monotonic()
            if error is None:
                tell(now)
            else:
                self.owner.failed(handle.id, error.code, error.message, now)

        self._placed[handle.id][1].show(pages, then)

    def withdraw(self, generation: Generation) -> None:
        """The prompt was cancelled before it was done."""
        self.leave(generation)
        for handle in self._handles.pop(generation.id, []):
            self.owner.withdraw(handle.id, time.monotonic())

    def abandon(self, id: str) -> None:
        """The caller left when the prompt was done already: perhaps no puller was told of its handles."""
        for handle_id in [handle_id for handle_id, (whose, _) in self._placed.items() if whose == id]:
            self.owner.withdraw(handle_id, time.monotonic())

    def watch_opened(self, command: WatchOpened) -> None:
        """A puller has begun to watch a handle."""
        self.owner.watch_opened(command.watch, command.handle, command.attempt, time.monotonic())

    def watch_closed(self, command: WatchClosed) -> None:
        """A puller has stopped watching."""
        self.owner.watch_closed(command.watch, time.monotonic())

    def release(self, command: Release) -> None:
        """A puller needs the pages no longer; the answer says whether all that it read was valid."""
        valid = self.owner.release(command.handle, command.epoch, command.attempt, time.monotonic())
        self.outbox.add(Released(command.call, valid))

    @property
    def copying(self) -> bool:
        """Are pages on their way to where they can be read?"""
        return any(offers.copying for offers in self.offers.values())

    def poll(self, now: float) -> None:
        """Once a loop: expire, tell the watchers, free what no puller may read any more."""
        for offers in self.offers.values():
            offers.poll()
        self.owner.sweep(now)
        updates, freed = self.owner.take()
        self.outbox.add(*(_message(update) for update in updates))
        for handle_id in freed:
            self._placed.pop(handle_id)[1].end()


def _message(update: Update) -> WatchUpdate:
    failure = None if update.failure is None else Failure(update.failure.code, update.failure.message)
    return WatchUpdate(
        update.watch, update.tokens, update.done, update.first_tokens, update.last_feature, failure
    )
