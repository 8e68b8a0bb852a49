"""The leases of an engine: pages of computed prompts that are offered to other workers until they are pulled.

Connects the state machine of `kv_transfer.owner` with the page pool and the front. How the bytes reach
another worker is the backends' task.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from eyas.common.errors import EyasError
from eyas.common.types import FirstToken, KvHandle, KvKind, RankPages
from eyas.engine.batch.sequence import Generation
from eyas.engine.ipc.messages import (
    LeaseReleased,
    ReleaseLease,
    WatchClosed,
    WatchOpened,
    WatchUpdate,
    WireFailure,
)
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.pages import PageOwners
from kv_transfer.layout import pages_for
from kv_transfer.lease_board import LeaseBoard
from kv_transfer.owner import LeaseOwner, LeaseUpdate, PageOffer


@dataclass(frozen=True)
class _LeasedPages:
    generation: str  # its id
    group: KvKind
    pages: frozenset[int]


@dataclass
class LeaseTable:
    """The leased pages of an engine, each of `page_size` rows. `layouts`: hashes of the page layouts, by
    group.

    Pages have the same numbers on all `ranks`. `board`: shows the leases to pullers of this host.
    """

    owner: LeaseOwner
    pool: PageOwners
    page_size: int
    layouts: dict[KvKind, str]
    outbox: EventOutbox
    ranks: int = 1
    board: LeaseBoard | None = None
    _handles: dict[str, list[KvHandle]] = field(default_factory=dict)  # by generation id, while it runs
    _leased: dict[int, _LeasedPages] = field(default_factory=dict)  # by handle id

    def offer(
        self, generation: Generation, pages: list[int], ends: list[int] | None = None
    ) -> tuple[KvHandle, ...]:
        """Leases the pages of a prompt that starts now: target KV, and draft KV if requested.

        `pages`: of all rows; `ends`: the last pages of layers with windows.
        """
        rows = len(generation.request.prompt_ids)
        whole = pages[: pages_for(rows, self.page_size)]
        handles = [self._offer(KvKind.TARGET, generation, whole + (ends or []), rows)]
        if generation.offer_draft and KvKind.DRAFT in self.layouts and rows > 1:
            fewer = pages[: pages_for(rows - 1, self.page_size)]
            handles.append(self._offer(KvKind.DRAFT, generation, fewer, rows - 1))
        self._handles[generation.id] = handles
        return tuple(handles)

    def _offer(self, group: KvKind, generation: Generation, pages: list[int], rows: int) -> KvHandle:
        leased = tuple(pages)
        self.pool.share(leased)
        shards = tuple(RankPages(rank, leased) for rank in range(self.ranks))
        offer = PageOffer(group, self.layouts[group], rows, shards, generation.deadline)
        handle = self.owner.offer(offer, time.monotonic())
        if self.board is not None:
            self.board.post(handle.id)
        self._leased[handle.id] = _LeasedPages(generation.id, group, frozenset(leased))
        return handle

    def is_offered(self, generation: Generation) -> bool:
        """True if the pages of the generation's prompt are leased."""
        return generation.id in self._handles

    def pages(self) -> frozenset[int]:
        """All leased pages."""
        return frozenset().union(*(leased.pages for leased in self._leased.values()))

    def covers(self, handle_id: int, group: KvKind, pages: Iterable[int]) -> bool:
        """True if these pages of a group are leased by this handle."""
        leased = self._leased.get(handle_id)
        return leased is not None and leased.group == group and leased.pages.issuperset(pages)

    def filled(self, generation: Generation, rows: int) -> None:
        """Marks the first `rows` rows as readable: the device has written them."""
        for handle in self._handles.get(generation.id, []):
            self.owner.filled(handle.id, min(rows, handle.tokens), time.monotonic())

    def finished(self, generation: Generation, first: tuple[FirstToken, ...], feature: bytes) -> None:
        """Marks all rows as readable, and adds the prompt's first tokens and last feature."""
        for handle in self._handles.pop(generation.id, []):
            self.owner.finished(handle.id, first, feature, time.monotonic())

    def withdraw(self, generation: Generation, error: EyasError | None = None) -> None:
        """Ends the leases of an unfinished prompt with `error`, which its pullers receive; None:
        cancelled.
        """
        for handle in self._handles.pop(generation.id, []):
            self.owner.withdraw(handle.id, time.monotonic(), error)

    def withdraw_all(self, error: EyasError) -> None:
        """Ends every lease with `error`, which its puller receives."""
        for handle_id in list(self._leased):
            self.owner.withdraw(handle_id, time.monotonic(), error)

    def abandon(self, id: str) -> None:
        """Ends the leases of generation `id`, whose caller has left: perhaps no puller received the
        handles.
        """
        handle_ids = [handle_id for handle_id, leased in self._leased.items() if leased.generation == id]
        for handle_id in handle_ids:
            self.owner.withdraw(handle_id, time.monotonic())

    def watch_opened(self, command: WatchOpened) -> None:
        """Opens a puller's Watch of a handle."""
        self.owner.watch_opened(command.watch, command.handle, command.attempt, time.monotonic())

    def watch_closed(self, command: WatchClosed) -> None:
        """Closes a puller's Watch."""
        self.owner.watch_closed(command.watch, time.monotonic())

    def release(self, command: ReleaseLease) -> None:
        """Ends a lease for its puller; the answer, if requested, says whether what it read is valid."""
        valid = self.owner.release(command.handle, command.epoch, command.attempt, time.monotonic())
        if command.call:
            self.outbox.add(LeaseReleased(command.call, valid))

    def poll(self, now: float) -> None:
        """Expires leases, sends Watch updates and frees pages of ended leases; called once per iteration."""
        self.owner.sweep(now)
        updates, freed = self.owner.take()
        self.outbox.add(*(_message(update) for update in updates))
        for handle_id in freed:
            if self.board is not None:
                self.board.strike(handle_id)
            self.pool.drop(self._leased.pop(handle_id).pages)


def _message(update: LeaseUpdate) -> WatchUpdate:
    failure = None if update.failure is None else WireFailure.of(update.failure)
    return WatchUpdate(
        update.watch, update.tokens, update.done, update.first_tokens, update.last_feature, failure
    )
