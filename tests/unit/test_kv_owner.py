"""The owner's rules one by one: who may read, how long, and when pages are free. Time is a number here."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from eyas.common.types import FirstToken, KvHandle, KvKind, RankPages
from kv_transfer.owner import HURRY_S, LeaseOwner, LeaseUpdate, PageOffer

EPOCH = 7
LEASE = 30.0
DEADLINE = 100.0
SHARDS = (RankPages(0, (4, 5, 6)),)
FIRST = (FirstToken(0, 42),)
OFFER = PageOffer(KvKind.TARGET, "meaning", 40, SHARDS, DEADLINE)


@pytest.fixture
def owner() -> LeaseOwner:
    return LeaseOwner("10.0.0.1:9000", EPOCH, LEASE, itertools.count(1).__next__)


def ready_handle(owner: LeaseOwner) -> int:
    handle = owner.offer(OFFER, now=0.0).id
    owner.finished(handle, FIRST, b"feature", now=1.0)
    return handle


def watch(owner: LeaseOwner, number: int, handle: int, epoch: int, attempt: int, now: float) -> None:
    """Opens a Watch on a handle of `OFFER`."""
    shown = KvHandle("10.0.0.1:9000", epoch, 0, handle, OFFER.group, OFFER.layout, OFFER.tokens, OFFER.shards)
    owner.watch_opened(number, shown, attempt, now)


def told(owner: LeaseOwner) -> list[LeaseUpdate]:
    return owner.take()[0]


def freed(owner: LeaseOwner) -> list[int]:
    return owner.take()[1]


def test_an_offer_becomes_a_handle_that_names_its_owner(owner):
    first, second = owner.offer(OFFER, 0.0), owner.offer(OFFER, 0.0)
    assert (first.worker, first.epoch, first.group) == ("10.0.0.1:9000", EPOCH, KvKind.TARGET)
    assert (first.layout, first.tokens, first.shards) == ("meaning", 40, SHARDS)
    assert first.id != second.id
    assert owner.active == 2


def test_a_watch_hears_progress_then_done(owner):
    handle = owner.offer(OFFER, 0.0).id
    watch(owner, 1, handle, EPOCH, 1, 0.0)
    assert told(owner) == [LeaseUpdate(1, tokens=0)]
    owner.filled(handle, 16, 1.0)
    owner.filled(handle, 32, 1.1)
    assert told(owner) == [LeaseUpdate(1, tokens=32)], "two advances in a step are one update"
    assert told(owner) == []
    owner.finished(handle, FIRST, b"feature", 2.0)
    assert told(owner) == [LeaseUpdate(1, 40, True, FIRST, b"feature")]


def test_a_late_watch_hears_everything_at_once(owner):
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 1, 2.0)
    assert told(owner) == [LeaseUpdate(1, 40, True, FIRST, b"feature")]


def test_release_of_a_ready_handle_is_valid_once(owner):
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 3, 2.0)
    assert owner.release(handle, EPOCH, 3, 5.0) is True
    assert freed(owner) == [handle]
    assert owner.release(handle, EPOCH, 3, 5.0) is False
    assert freed(owner) == []


@pytest.mark.parametrize("epoch, attempt", [(EPOCH - 1, 3), (EPOCH + 1, 3), (EPOCH, 2)])
def test_a_stale_release_changes_nothing(owner, epoch, attempt):
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 3, 2.0)
    assert owner.release(handle, epoch, attempt, 5.0) is False
    assert freed(owner) == []
    assert owner.release(handle, EPOCH, 3, 5.0) is True


def test_release_before_ready_means_that_nobody_will_pull(owner):
    handle = owner.offer(OFFER, 0.0).id
    assert owner.release(handle, EPOCH, 1, 0.5) is False
    assert freed(owner) == [handle]
    owner.filled(handle, 16, 1.0)
    owner.finished(handle, FIRST, b"", 2.0)
    assert owner.take() == ([], []), "the prompt goes on, the handle does not come back"


def test_without_a_watch_the_lease_lasts_lease_s(owner):
    handle = ready_handle(owner)
    owner.sweep(LEASE - 0.01)
    assert freed(owner) == []
    owner.sweep(LEASE)
    assert freed(owner) == [handle]


def test_a_lapsed_lease_is_invalid_even_if_nobody_swept(owner):
    handle = ready_handle(owner)
    assert owner.release(handle, EPOCH, 1, LEASE) is False
    assert freed(owner) == [handle]


def test_a_lapsed_lease_cannot_be_renewed(owner):
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 1, LEASE)
    (update,) = told(owner)
    assert update.watch == 1 and update.failure is not None and "not valid" in update.failure.message


def test_an_open_watch_holds_the_lease_until_the_requests_deadline(owner):
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 1, 2.0)
    owner.sweep(DEADLINE - 0.01)
    assert told(owner)[-1].failure is None
    owner.sweep(DEADLINE)
    updates, free = owner.take()
    assert free == [handle]
    assert [u.failure.code for u in updates if u.failure] == ["transfer_failed"]


def test_closing_the_watch_starts_the_lease_again(owner):
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 1, 2.0)
    owner.watch_closed(1, 50.0)
    owner.sweep(50.0 + LEASE - 0.01)
    assert owner.active == 1
    owner.sweep(50.0 + LEASE)
    assert freed(owner) == [handle]


def test_closing_the_watch_late_never_outlives_the_deadline(owner):
    watch(owner, 1, ready_handle(owner), EPOCH, 1, 2.0)
    owner.watch_closed(1, DEADLINE - 1.0)
    owner.sweep(DEADLINE)
    assert owner.active == 0


def test_what_is_waited_for_ends_if_nobody_watches_it(owner):
    filling, watched, left = owner.offer(OFFER, now=0.0).id, ready_handle(owner), ready_handle(owner)
    watch(owner, 1, watched, EPOCH, 1, 2.0)
    owner.hurry(1.0 + HURRY_S - 0.01)
    assert freed(owner) == []
    owner.hurry(1.0 + HURRY_S)
    assert freed(owner) == [left]
    owner.watch_closed(1, 50.0)
    owner.finished(filling, FIRST, b"feature", now=29.9)
    owner.hurry(50.0 + HURRY_S - 0.01)
    assert owner.active == 1
    owner.hurry(50.0 + HURRY_S)
    assert owner.active == 0


def test_a_higher_attempt_ends_the_lower_watch(owner):
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 1, 2.0)
    watch(owner, 2, handle, EPOCH, 2, 3.0)
    lower, higher = sorted(told(owner), key=lambda update: update.watch)
    assert lower.failure is not None and higher.failure is None and higher.done
    owner.watch_closed(1, 4.0)
    owner.sweep(4.0 + LEASE)
    assert owner.active == 1, "the loser's hanging up is nothing to the winner's lease"
    assert owner.release(handle, EPOCH, 1, 40.0) is False
    assert owner.release(handle, EPOCH, 2, 40.0) is True


def test_a_lower_attempt_is_refused_and_does_not_disturb(owner):
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 2, 2.0)
    owner.take()
    watch(owner, 2, handle, EPOCH, 1, 3.0)
    (update,) = told(owner)
    assert update.watch == 2 and update.failure is not None
    assert owner.release(handle, EPOCH, 2, 4.0) is True


@pytest.mark.parametrize(
    "change",
    [
        {"id": 99},
        {"epoch": EPOCH - 1},
        {"group": KvKind.DRAFT},
        {"layout": "other"},
        {"tokens": 48},
        {"shards": (RankPages(1, (4, 5, 6)),)},
        {"shards": (RankPages(0, (4, 5, 7)),)},
        {"shards": (RankPages(0, (4, 5, 6, 7)),)},
    ],
)
def test_a_watch_must_show_the_handle_as_it_was_offered(owner, change):
    handle = owner.offer(OFFER, 0.0)
    owner.finished(handle.id, FIRST, b"feature", 1.0)
    owner.watch_opened(4, handle, 1, 2.0)
    owner.take()
    owner.watch_opened(5, msgspec.structs.replace(handle, **change), 2, 2.0)
    (update,) = told(owner)
    assert update.watch == 5 and update.failure is not None and update.failure.code == "transfer_failed"
    assert owner.release(handle.id, EPOCH, 1, 3.0) is True, "a refused Watch disturbs no other"


def test_withdrawing_tells_the_watch_that_it_was_cancelled(owner):
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 1, 2.0)
    owner.withdraw(handle, 3.0)
    updates, free = owner.take()
    assert [u.failure.code for u in updates] == ["cancelled"]
    assert free == [handle]
    owner.withdraw(handle, 3.0)
    assert owner.take() == ([], [])


def test_a_closed_watch_hears_nothing_more(owner):
    handle = owner.offer(OFFER, 0.0).id
    watch(owner, 1, handle, EPOCH, 1, 0.0)
    owner.watch_closed(1, 0.0)
    owner.filled(handle, 16, 1.0)
    owner.withdraw(handle, 2.0)
    assert told(owner) == []


def test_progress_never_goes_back(owner):
    handle = owner.offer(OFFER, 0.0).id
    owner.filled(handle, 32, 1.0)
    owner.filled(handle, 16, 1.0)
    watch(owner, 1, handle, EPOCH, 1, 1.0)
    assert told(owner) == [LeaseUpdate(1, tokens=32)]


def test_a_refused_watch_that_hung_up_is_not_answered(owner):
    watch(owner, 1, 99, EPOCH, 1, 0.0)
    owner.watch_closed(1, 0.0)
    assert told(owner) == []


def test_a_release_by_a_higher_attempt_ends_the_lower_watch(owner):
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 1, 2.0)
    assert owner.release(handle, EPOCH, 2, 3.0) is True
    (update,) = told(owner)
    assert update.watch == 1 and update.failure is not None


def test_one_failure_is_not_sticky(owner):
    owner.withdraw(owner.offer(OFFER, 0.0).id, 1.0)
    handle = ready_handle(owner)
    watch(owner, 1, handle, EPOCH, 1, 2.0)
    assert owner.release(handle, EPOCH, 1, 3.0) is True
