"""Owner-side glue: what a prefilled prompt offers to other workers, and who holds its pages until then.

The rules of leases are `kv_transfer.owner`; this file gives them pages and carries their words to the front.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from eyas.common.types import FirstToken, KvHandle, KvKind, Shard
from eyas.engine.batch.sequence import Generation
from eyas.engine.ipc.messages import Failure, Release, Released, WatchClosed, WatchOpened, WatchUpdate
from eyas.engine.ipc.outbox import Outbox
from eyas.engine.kv.pages import PagePool
from kv_transfer.layout import pages_for
from kv_transfer.owner import Offer, Owner, Update


@dataclass(frozen=True)
class OfferedPool:
    """What handles say of a pool: where its bytes are, and the hash of what they mean."""

    path: str
    layout_hash: str


@dataclass
class Leases:
    owner: Owner
    pool: PagePool
    page_size: int
    offered: dict[KvKind, OfferedPool]
    outbox: Outbox
    _handles: dict[str, list[KvHandle]] = field(default_factory=dict)  # by generation id, while it runs
    _pages: dict[int, tuple[str, list[int]]] = field(default_factory=dict)  # by handle id: whose, which

    def offer(self, generation: Generation, pages: list[int]) -> tuple[KvHandle, ...]:
        """Lease the pages of a prompt that starts now: its target KV, and draft KV if asked for."""
        rows = len(generation.request.prompt_ids)
        handles = [self._offer(KvKind.TARGET, generation, pages, rows)]
        if generation.offer_draft and KvKind.DRAFT in self.offered and rows > 1:
            handles.append(self._offer(KvKind.DRAFT, generation, pages, rows - 1))
        self._handles[generation.id] = handles
        return tuple(handles)

    def _offer(self, group: KvKind, generation: Generation, pages: list[int], rows: int) -> KvHandle:
        held = pages[: pages_for(rows, self.page_size)]
        self.pool.share(held)
        source = self.offered[group]
        shard = Shard(rank=0, pool=source.path, pages=tuple(held))
        offer = Offer(group, source.layout_hash, rows, (shard,), generation.deadline)
        handle = self.owner.offer(offer, time.monotonic())
        self._pages[handle.id] = generation.id, held
        return handle

    def is_offered(self, generation: Generation) -> bool:
        return generation.id in self._handles

    def filled(self, generation: Generation, rows: int) -> None:
        now = time.monotonic()
        for handle in self._handles.get(generation.id, []):
            self.owner.filled(handle.id, min(rows, handle.tokens), now)

    def finished(self, generation: Generation, first: tuple[FirstToken, ...], feature: bytes) -> None:
        now = time.monotonic()
        for handle in self._handles.pop(generation.id, []):
            self.owner.finished(handle.id, first, feature, now)

    def withdraw(self, generation: Generation) -> None:
        """The prompt was cancelled before it was done."""
        for handle in self._handles.pop(generation.id, []):
            self.owner.withdraw(handle.id, time.monotonic())

    def abandon(self, id: str) -> None:
        """The caller left when the prompt was done already: nobody may have been told of its handles."""
        for handle_id in [handle_id for handle_id, (whose, _) in self._pages.items() if whose == id]:
            self.owner.withdraw(handle_id, time.monotonic())

    def watch_opened(self, command: WatchOpened) -> None:
        self.owner.watch_opened(command.watch, command.handle, command.attempt, time.monotonic())

    def watch_closed(self, command: WatchClosed) -> None:
        self.owner.watch_closed(command.watch, time.monotonic())

    def release(self, command: Release) -> None:
        valid = self.owner.release(command.handle, command.epoch, command.attempt, time.monotonic())
        self.outbox.add(Released(command.call, valid))

    def poll(self, now: float) -> None:
        """Once a loop: expire, tell the watchers, free what nobody may read any more."""
        self.owner.sweep(now)
        updates, freed = self.owner.take()
        self.outbox.add(*(_message(update) for update in updates))
        for handle_id in freed:
            _, pages = self._pages.pop(handle_id)
            self.pool.drop(pages)


def _message(update: Update) -> WatchUpdate:
    failure = None if update.failure is None else Failure(update.failure.code, update.failure.message)
    return WatchUpdate(
        update.watch, update.tokens, update.done, update.first_tokens, update.last_feature, failure
    )
