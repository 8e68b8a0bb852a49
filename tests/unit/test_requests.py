"""The table of requests: what a gateway or a peer may say at any moment, and what is left afterwards."""

from __future__ import annotations

import time

import msgspec
import pytest
from engine_rig import PAGE, VOCAB, HandCopier, Rig, hand_pulls, handle, request

from eyas.common.errors import InvalidRequest
from eyas.common.types import FinishCause, FirstToken, KvKind, RequestChoice, WorkerBacklog
from eyas.engine.batch.sequence import GenerationKind
from eyas.engine.ipc.messages import (
    AttachKv,
    CancelGeneration,
    DrainEngine,
    OpenPull,
    PrefillPrompt,
    PullDone,
    PullReady,
    PullReleased,
    ReleaseHandle,
    ReleaseLease,
    RequestFailed,
    SubmitGeneration,
)
from eyas.engine.scheduling.backlog import backlog
from eyas.engine.scheduling.draft_kv import DraftKv

THREE = (RequestChoice(0), RequestChoice(1), RequestChoice(2))


def test_a_cancelled_leader_hands_its_prompt_to_the_next_choice() -> None:
    rig = Rig()
    rig.submit(request(10, *THREE))
    rig.requests.cancel(CancelGeneration("a", 0))
    (leader,) = rig.scheduler.waiting
    assert (leader.choice, leader.forks) == (1, (2,))
    rig.requests.cancel(CancelGeneration("a", 2))
    rig.requests.cancel(CancelGeneration("a", 1))
    assert not rig.requests.table and not rig.scheduler.waiting


def test_a_choice_cancelled_before_its_pages_came_never_joins() -> None:
    rig = Rig()
    rig.submit(request(10, *THREE), attach=True)
    rig.requests.attach(AttachKv("a", 1, (handle(10),)))
    (pull,) = rig.said(OpenPull)
    rig.requests.cancel(CancelGeneration("a", 1))
    rig.arrive(pull, *(FirstToken(c, 5) for c in range(3)))
    assert sorted(seq.choice for seq in rig.joined) == [0, 2]


def test_a_failure_of_an_admitted_request_names_the_field() -> None:
    rig = Rig()
    rig.submit(request(10), attach=True)
    rig.requests.attach(AttachKv("a", 1, (handle(9),)))
    (failed,) = rig.said(RequestFailed)
    error = failed.failure.error()
    assert isinstance(error, InvalidRequest) and error.param == "handles"


def test_the_last_choice_cancelled_while_waiting_ends_the_request() -> None:
    rig = Rig()
    rig.submit(request(10, RequestChoice(0), RequestChoice(1)), attach=True)
    rig.requests.cancel(CancelGeneration("a", 0))
    assert rig.requests.table
    rig.requests.cancel(CancelGeneration("a", 1))
    assert not rig.requests.table


def test_choices_that_run_hide_no_queue() -> None:
    """Three running sequences of one request are not three of the requests that came."""
    rig = Rig()
    rig.submit(request(10, *THREE), attach=True)
    assert rig.requests.waiting == 1
    rig.requests.attach(AttachKv("a", 1, (handle(10),)))
    (pull,) = rig.said(OpenPull)
    rig.arrive(pull, *(FirstToken(c, 5) for c in range(3)))
    assert len(rig.scheduler.running) == 3 and rig.requests.waiting == 0
    for number in range(rig.requests.admission.max_waiting):
        assert rig.requests.waiting == number
        rig.submit(request(10, id=f"later {number}"))
    assert not rig.refusals()
    rig.submit(request(10, id="one too many"))
    assert rig.refusals() == ["this worker's queue is full"]


def test_a_queued_request_is_one_however_many_choices_it_has() -> None:
    """Begun elsewhere, each of them is a sequence of its own from the start."""
    rig = Rig()
    begun = [RequestChoice(i, (5,)) for i in range(3)]
    for number in range(rig.requests.admission.max_waiting):
        rig.submit(request(10, *begun, id=f"{number}"))
    assert not rig.refusals() and rig.requests.waiting == 3 * rig.requests.queued > 0
    rig.submit(request(10, *begun, id="one too many"))
    assert rig.refusals() == ["this worker's queue is full"]


@pytest.mark.parametrize("attach", [False, True])
def test_a_request_that_has_begun_finds_a_place_in_a_full_queue(attach: bool) -> None:
    rig = Rig()
    for number in range(rig.requests.admission.max_waiting):
        rig.submit(request(10, id=f"{number}"))
    begun = msgspec.structs.replace(request(10, id="begun"), begun=True)
    rig.submit(begun, attach=attach)
    assert not rig.refusals() and "begun" in rig.requests.table
    rig.submit(request(10, id="new"))
    assert rig.refusals() == ["this worker's queue is full"]


def test_an_attach_said_twice_does_not_disturb_its_own_pull() -> None:
    rig = Rig()
    rig.submit(request(10), attach=True)
    attach = AttachKv("a", 1, (handle(10), handle(9, id=2, group=KvKind.DRAFT)))
    rig.requests.attach(attach)
    (pull,) = rig.said(OpenPull)
    rig.requests.attach(attach)
    assert not rig.outbox.take(), "the second Attach gave the handles away"
    rig.arrive(pull, FirstToken(0, 5))
    assert len(rig.joined) == 1


def test_a_newer_attach_replaces_the_pull_and_gives_its_pages_back() -> None:
    rig = Rig()
    rig.submit(request(10), attach=True)
    rig.requests.attach(AttachKv("a", 1, (handle(10),)))
    rig.poll()
    assert rig.held() == 3
    rig.requests.attach(AttachKv("a", 2, (handle(10, id=5),)))
    assert rig.held() == 0
    assert [event.attempt for event in rig.said(OpenPull)] == [1, 2]
    rig.requests.attach(AttachKv("a", 1, (handle(10),)))  # late: refused, and nothing else
    assert rig.outbox.take() == [ReleaseHandle(handle(10), 1)]
    rig.requests.cancel(CancelGeneration("a"))
    assert rig.pulls.active == 0


def test_an_unused_draft_handle_is_returned_when_the_sequence_joins() -> None:
    rig = Rig()
    rig.submit(request(10), attach=True)
    draft = handle(9, id=2, group=KvKind.DRAFT)
    rig.requests.attach(AttachKv("a", 1, (handle(10), draft)))
    (pull,) = rig.said(OpenPull)
    rig.arrive(pull, FirstToken(0, 5))
    assert [event.handle for event in rig.said(ReleaseHandle)] == [draft]


@pytest.mark.parametrize(
    "first", [(), (FirstToken(0, 5),), (FirstToken(0, 5), FirstToken(1, VOCAB)), (FirstToken(0, -1),)]
)
def test_first_tokens_that_are_missing_or_no_tokens_are_a_lost_attempt(first: tuple) -> None:
    rig = Rig()
    rig.submit(request(10, RequestChoice(0), RequestChoice(1)), attach=True)
    rig.requests.attach(AttachKv("a", 1, (handle(10),)))
    (pull,) = rig.said(OpenPull)
    rig.arrive(pull, *first)
    assert rig.lost() == [1]
    assert rig.held() == 0 and "a" in rig.requests.table, "it keeps its place"
    rig.requests.attach(AttachKv("a", 2))
    assert [seq.generation.kind for seq in rig.scheduler.waiting] == [GenerationKind.LOCAL]


@pytest.mark.parametrize("handles", [(handle(9),), (handle(11),), (handle(10, group=KvKind.DRAFT),)])
def test_handles_that_do_not_fit_the_prompt_fail_the_request(handles: tuple) -> None:
    rig = Rig()
    rig.submit(request(10), attach=True)
    rig.requests.attach(AttachKv("a", 1, handles))
    rig.poll()
    assert rig.refusals() and not rig.requests.table and rig.held() == 0


def test_a_handle_of_no_shards_is_lost_before_a_byte_moves() -> None:
    rig = Rig()
    rig.submit(request(10), attach=True)
    rig.requests.attach(AttachKv("a", 1, (handle(10, shards=0),)))
    assert rig.lost() == [1] and rig.pulls.active == 0


def test_a_handle_of_more_ranks_than_its_owner_has_is_lost_before_a_byte_moves() -> None:
    rig = Rig()
    rig.submit(request(10), attach=True)
    rig.requests.attach(AttachKv("a", 1, (handle(10, shards=2),)))
    rig.pulls.receive(PullReady(1, 10))  # the front meets the owner first
    assert rig.lost() == [1] and not rig.copier.jobs and rig.pulls.active == 0


def test_first_tokens_given_with_an_attach_are_checked() -> None:
    rig = Rig()
    rig.submit(request(10), attach=True)
    rig.requests.attach(AttachKv("a", 1, (), (FirstToken(0, VOCAB),)))
    assert rig.refusals() and not rig.requests.table


def test_an_attach_whose_choices_all_ended_at_token_0_ends_the_request() -> None:
    rig = Rig()
    rig.submit(request(10), attach=True)
    rig.requests.attach(AttachKv("a", 1, (), (FirstToken(0, 5, finish=FinishCause.STOP),)))
    assert not rig.requests.table and not rig.scheduler.waiting


def test_choices_that_make_no_sense_are_refused() -> None:
    rig = Rig(max_running=4)
    for choices in (
        (RequestChoice(-1),),
        (RequestChoice(0), RequestChoice(0)),
        tuple(RequestChoice(i) for i in range(5)),
        (RequestChoice(0, (1,) * 8),),  # it has all its max_tokens already
    ):
        rig.submit(request(10, *choices))
        assert rig.refusals(), choices
    begun = request(10, RequestChoice(0, (1, 2)))
    rig.submit(begun, attach=True)
    assert rig.refusals(), "a begun choice does not wait for a prompt's pages"
    rig.requests.prefill(PrefillPrompt(begun, 1, False))
    assert rig.refusals(), "nor is it prefilled for elsewhere"
    rig.submit(begun)
    assert len(rig.scheduler.waiting) == 1


def test_pulled_pages_enter_a_cache_with_draft_kv_only_if_they_have_it() -> None:
    rig = Rig(lookahead=1)
    rig.submit(request(10), attach=True)
    rig.requests.attach(AttachKv("a", 1, (handle(10),)))
    (pull,) = rig.said(OpenPull)
    rig.arrive(pull, FirstToken(0, 5))
    assert rig.joined and rig.cache.cached_pages == 0
    rig.requests.cancel(CancelGeneration("a"))
    assert rig.pool.used == 0


class DraftPulls:
    """Both pulls of a prompt of ten rows, whose pages are taken back and lent again."""

    def __init__(self) -> None:
        self.rig = Rig(lookahead=1)
        self._copier = HandCopier()
        self._pulls = hand_pulls(self._copier, PAGE, self.rig.outbox, first=100)
        self.rig.requests.draft_kv = DraftKv(self._pulls, self.rig.pool, PAGE)
        self.rig.submit(request(10), attach=True)
        self.rig.requests.attach(AttachKv("a", 1, (handle(10), handle(9, id=2, group=KvKind.DRAFT))))
        opened = self.rig.said(OpenPull)
        self._target, self._draft = sorted(opened, key=lambda pull: pull.handle.group != KvKind.TARGET)
        self.poll()

    def poll(self) -> None:
        self.rig.poll()
        self._pulls.poll(time.monotonic())
        self.rig.requests.join(time.monotonic())

    def pause(self) -> None:
        """As one that retracts, for a few loops."""
        self.rig.requests.retract()
        self.rig.requests.lends = False
        for _ in range(3):
            self.poll()
        assert not self.rig.held(), "memory may leave"
        self.rig.requests.lends = True
        self.poll()

    def done(self, rows: int) -> None:
        """The owner has the draft KV of these rows, and all of them once they are nine."""
        told = PullReady(self._draft.pull, rows) if rows < 9 else PullDone(self._draft.pull, ())
        self._pulls.receive(told)
        self.poll()

    def copied(self) -> None:
        self._copier.finish()
        self.poll()

    def confirmed(self) -> None:
        """The owner says that what was copied of the draft KV is good."""
        self._pulls.receive(PullReleased(self._draft.pull, True))

    def arrived(self) -> int:
        """The rows of draft KV with which the prompt begins."""
        self.rig.arrive(self._target, FirstToken(0, 5))
        self.rig.requests.join(time.monotonic())
        (seq,) = self.rig.joined
        return seq.draft_len


@pytest.mark.parametrize("rows", [0, 4])
def test_the_draft_kv_of_a_prompt_that_loses_its_pages_comes_into_the_next_ones(rows: int) -> None:
    """Also if some of it was there."""
    pulls = DraftPulls()
    pulls.done(rows)
    pulls.copied()
    pulls.pause()
    pulls.done(9)
    pulls.copied()
    pulls.confirmed()
    assert pulls.arrived() == 9


@pytest.mark.parametrize("confirmed", [False, True])
def test_draft_kv_that_had_come_before_its_pages_were_lost_comes_no_more(confirmed: bool) -> None:
    """Its owner has let go of it: the prompt begins without it."""
    pulls = DraftPulls()
    pulls.done(9)
    pulls.copied()
    if confirmed:
        pulls.confirmed()
    pulls.pause()
    pulls.confirmed()
    assert pulls.arrived() == 0


def test_a_follower_without_a_slot_can_be_cancelled_while_it_waits() -> None:
    rig = Rig(max_running=2)
    rig.submit(request(10, RequestChoice(0), RequestChoice(1)), attach=True)
    rig.submit(request(5, id="b"))
    rig.scheduler.schedule()
    rig.requests.attach(AttachKv("a", 1, (handle(10),)))
    (pull,) = rig.said(OpenPull)
    rig.arrive(pull, FirstToken(0, 5), FirstToken(1, 6))
    follower = next(seq for seq in rig.requests.table["a"].sequences if not seq.pages or seq.choice == 1)
    rig.requests.cancel(CancelGeneration("a", follower.choice))
    rig.requests.cancel(CancelGeneration("a"))
    rig.requests.cancel(CancelGeneration("b"))
    assert rig.held() == 0 and not rig.scheduler.waiting and not rig.scheduler.running


def test_a_stale_release_is_answered_and_changes_nothing() -> None:
    rig = Rig()
    rig.leases.release(ReleaseLease(call=3, handle=99, epoch=1, attempt=1))
    (event,) = rig.outbox.take()
    assert event.call == 3 and not event.valid


def test_a_prompt_given_up_after_it_was_done_leaves_no_lease() -> None:
    rig = Rig()
    rig.requests.prefill(PrefillPrompt(request(10), 1, False))
    (work,) = rig.scheduler.schedule()
    generation = work.seq.generation
    rig.leases.offer(generation, work.seq.pages)
    rig.leases.finished(generation, (FirstToken(0, 5),), b"")
    rig.requests.end(work.seq)
    rig.requests.cancel(CancelGeneration("another"))
    rig.leases.poll(time.monotonic())
    assert rig.held() == 3
    rig.requests.cancel(CancelGeneration("a"))
    rig.leases.poll(time.monotonic())
    assert rig.held() == 0


def test_a_drained_worker_keeps_what_it_has_begun_and_accepts_nothing_more() -> None:
    rig = Rig(max_running=1)
    for id in ("begun", "queued"):
        rig.requests.prefill(PrefillPrompt(request(8, id=id), 1, False))
    begun = rig.requests.table["begun"]
    rig.leases.offer(begun, rig.scheduler.lend(begun, 8)[0])
    rig.submit(request(8, id="waiting"), attach=True)
    rig.submit(request(8, id="local"))
    rig.outbox.take()
    rig.requests.drain(DrainEngine())
    (failed,) = rig.said(RequestFailed)
    assert (failed.id, failed.failure.code) == ("queued", "unavailable")
    assert set(rig.requests.table) == {"begun", "waiting", "local"}
    rig.submit(request(8, id="new"))
    rig.requests.prefill(PrefillPrompt(request(8, id="new too"), 1, False))
    assert rig.refusals() == ["the worker is draining"] * 2


def test_what_is_left_of_an_earlier_attempt_ends_no_later_one() -> None:
    rig = Rig()
    rig.submit(request(10))
    old = rig.requests.table["a"]
    rig.requests.submit(SubmitGeneration(request(10), 2, attach=False))
    new = rig.requests.table["a"]
    assert new is not old and new.attempt == 2
    rig.said(RequestFailed)
    rig.requests.fail(old, InvalidRequest("its grammar came to nothing"))
    assert rig.requests.table == {"a": new} and not rig.said(RequestFailed)
    rig.requests._drop(old)
    assert rig.requests.table == {"a": new} and len(rig.scheduler.waiting) == 1


# --- the backlog ---------------------------------------------------------------------------------------


def test_the_backlog_counts_what_decodes_here_and_what_is_to_be_computed() -> None:
    rig = Rig(max_running=4)
    assert backlog(rig.requests, 0.25) == WorkerBacklog(0, 0, 0, 0.25, 8, 8 + 4, kv_room=64 * PAGE)
    rig.submit(request(10, *THREE, id="local"))
    rig.submit(request(20, *THREE, id="pulls"), attach=True)
    rig.requests.prefill(PrefillPrompt(request(30, id="elsewhere"), 1, False))
    told = backlog(rig.requests, 0.0)
    assert (told.decoding, told.context) == (3 + 3, 3 * 10 + 3 * 20)
    assert told.queued == (10 - 1) + (30 - 1)
    assert (told.prefill_room, told.decode_room) == (8 - 3, 8 - 3 + 4)
    assert told.kv_room == 64 * PAGE - 10 - 20 - 30
    rig.scheduler.schedule()  # the local prompt's first chunk of 16 rows, all of it, and 6 of the other
    told = backlog(rig.requests, 0.0)
    assert (told.prefill_room, told.decode_room) == (8 - 1, 8 - 1 + 2)


def test_a_draining_worker_has_no_room() -> None:
    rig = Rig()
    rig.requests.drain(DrainEngine())
    assert backlog(rig.requests, 0.0) == WorkerBacklog()
