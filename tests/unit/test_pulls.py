"""Copies that the front makes: asked for, told, and their pages kept while anything may write to them."""

from __future__ import annotations

from engine_rig import Rig, handle, request

from eyas.common.types import FirstToken
from eyas.engine.ipc.messages import (
    Attach,
    Cancel,
    ClosePull,
    CopyPages,
    CopyStopped,
    Event,
    Failure,
    Lost,
    OpenPull,
    PullDone,
    PullMet,
    PullReady,
    PullReleased,
    ReleasePull,
    StopCopies,
)

STOPPED = Failure("cancelled", "the pull was given up")


def pulling(rig: Rig) -> int:
    """A request of 28 prompt tokens (7 pages) whose pull goes by grpc and has pages; the pull's number."""
    rig.submit(request(28, id="a"), attach=True)
    rig.requests.attach(Attach("a", 1, (handle(28),)))
    (opened,) = rig.said(OpenPull)
    rig.pulls.told(PullMet(opened.pull, "grpc"))
    rig.poll()
    return opened.pull


def of(events: list[Event], kind: type) -> list:
    return [event for event in events if isinstance(event, kind)]


def test_pages_are_asked_for_as_they_become_ready_and_count_once_all_stopped() -> None:
    rig = Rig()
    pull = pulling(rig)
    rig.pulls.told(PullReady(pull, 13))
    (first,) = rig.said(CopyPages)
    assert (first.pull, first.number, len(first.pages)) == (pull, 0, 3) and first.pages == handle(28).shards[
        0
    ].pages[:3]
    rig.pulls.told(PullDone(pull, (FirstToken(0, 5),)))
    (second,) = rig.said(CopyPages)
    assert second.number == 1 and not set(first.dst_pages) & set(second.dst_pages)
    rig.pulls.told(CopyStopped(pull, 1, 400, 0.1))
    assert rig.said(ReleasePull) == []
    rig.pulls.told(CopyStopped(pull, 0, 300, 0.1))
    assert rig.said(ReleasePull) == [ReleasePull(pull)]
    rig.pulls.told(PullReleased(pull, True))
    (seq,) = rig.joined
    assert seq.pages == [*first.dst_pages, *second.dst_pages]
    assert (seq.generation.transfer_path, seq.generation.transfer_bytes) == ("grpc", 700)
    assert rig.copier.jobs == []


def test_a_cancelled_pull_keeps_its_pages_until_the_front_says_stopped() -> None:
    rig = Rig()
    pull = pulling(rig)
    rig.pulls.told(PullReady(pull, 28))
    rig.requests.cancel(Cancel("a"))
    assert rig.said(ClosePull) == [ClosePull(pull)]
    assert rig.held() == 7
    rig.pulls.told(CopyStopped(pull, 0, 0, 0.1, STOPPED))
    assert rig.held() == 0 and rig.pulls.active == 0


def test_a_preempted_pull_stops_its_copies_and_starts_again() -> None:
    rig = Rig()
    pull = pulling(rig)
    rig.pulls.told(PullReady(pull, 12))
    rig.outbox.take()
    assert rig.pulls.preempt()
    events = rig.outbox.take()
    assert of(events, StopCopies) == [StopCopies(pull)] and of(events, ClosePull) == [] and rig.held() == 7
    rig.pulls.told(CopyStopped(pull, 0, 0, 0.1, STOPPED))
    assert rig.held() == 0
    rig.poll()
    (again,) = rig.said(CopyPages)
    assert (again.number, len(again.pages)) == (1, 3)


def test_a_failed_copy_loses_the_attempt() -> None:
    rig = Rig()
    pull = pulling(rig)
    rig.pulls.told(PullReady(pull, 12))
    rig.outbox.take()
    rig.pulls.told(CopyStopped(pull, 0, 0, 0.1, Failure("unavailable", "the peer is gone")))
    assert [type(event) for event in rig.outbox.take()] == [Lost, ReleasePull, ClosePull]
    assert rig.held() == 0
