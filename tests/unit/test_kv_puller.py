"""The puller's rules one by one: what is copied when, and what happens when anything goes wrong."""

from __future__ import annotations

import pytest

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.types import FirstToken, KvHandle, KvKind, RankPages
from kv_transfer.backends.base import CopyJob, CopyResult
from kv_transfer.puller import (
    DRAIN_S,
    RELEASE_S,
    AskVerdict,
    CloseWatch,
    OpenWatch,
    PagesFree,
    PullAttempt,
    PullComplete,
    PullIncomplete,
    PullState,
    SendRelease,
)

DEADLINE = 100.0
FIRST = (FirstToken(0, 42),)
DST = (20, 21, 22)
HANDLE = KvHandle("prefill:1", 7, 0, 3, KvKind.TARGET, "meaning", 40, (RankPages(0, (4, 5, 9)),))
BROKEN = TransferFailed("The Watch broke.")


@pytest.fixture
def pull() -> PullAttempt:
    pull = PullAttempt(11, HANDLE, 2, page_size=16, deadline=DEADLINE)
    assert pull.take_actions() == [OpenWatch(HANDLE, 2)]
    return pull


def moved(job: CopyJob) -> CopyResult:
    return CopyResult(job, "local", 100 * len(job.dst_pages), 0.001)


def finish_copies(pull: PullAttempt, now: float) -> list[object]:
    """Report every copy asked for since the last look; returns the other actions, and those that follow."""
    actions = pull.take_actions()
    for job in actions:
        if isinstance(job, CopyJob):
            pull.copied(moved(job), now)
    return [a for a in actions if not isinstance(a, CopyJob)] + pull.take_actions()


def start_one_copy(pull: PullAttempt) -> CopyJob:
    pull.start(DST, 0, now=1.0)
    pull.ready(16, now=2.0)
    (job,) = pull.take_actions()
    assert isinstance(job, CopyJob)
    return job


def to_validating(pull: PullAttempt) -> None:
    pull.start(DST, 0, now=1.0)
    pull.done(FIRST, b"feature", now=2.0)
    assert finish_copies(pull, now=3.0) == [AskVerdict()]
    assert pull.state is PullState.VALIDATING


def test_whole_pages_follow_ready_and_the_partial_one_follows_done(pull):
    pull.start(DST, 0, 1.0)
    pull.ready(15, 1.0)
    assert pull.take_actions() == []
    pull.ready(33, 1.0)
    assert pull.take_actions() == [CopyJob(11, 0, RankPages(0, (4, 5)), (20, 21))]
    pull.ready(40, 1.0)
    assert pull.take_actions() == [], "the last page is partial: it is final only at done"
    pull.done(FIRST, b"", 1.0)
    assert pull.take_actions() == [CopyJob(11, 1, RankPages(0, (9,)), (22,))]


def test_pages_of_the_prefix_cache_are_not_copied(pull):
    pull.ready(32, 0.5)
    pull.start(DST, 1, 1.0)
    assert pull.take_actions() == [CopyJob(11, 0, RankPages(0, (5,)), (21,))]


def test_a_fully_cached_prompt_is_only_validated(pull):
    pull.start(DST, 3, 1.0)
    pull.done(FIRST, b"", 2.0)
    assert pull.take_actions() == [AskVerdict()]


def test_it_completes_when_the_owner_says_valid(pull):
    to_validating(pull)
    pull.released(True, 4.0)
    assert pull.take_actions() == [CloseWatch(), PullComplete(FIRST, b"feature", 300, 3.0, "local")]
    assert pull.state is PullState.COMPLETE and pull.over


def test_done_may_come_before_there_are_pages(pull):
    pull.done(FIRST, b"feature", 0.5)
    assert pull.state is PullState.WAITING and pull.take_actions() == []
    pull.start(DST, 0, 1.0)
    assert finish_copies(pull, 2.0) == [AskVerdict()]


def test_an_invalid_release_loses_the_pages(pull):
    to_validating(pull)
    pull.released(False, 4.0)
    lost, closed, free = pull.take_actions()
    assert isinstance(lost, PullIncomplete) and (closed, free) == (CloseWatch(), PagesFree(DST))
    assert pull.state is PullState.FAILED and pull.over
    pull.released(True, 4.0)
    assert pull.take_actions() == [] and pull.state is PullState.FAILED


def test_validation_waits_for_the_slowest_shard():
    shards = (RankPages(0, (4, 5, 9)), RankPages(1, (4, 5, 9)))
    pull = PullAttempt(11, KvHandle("p", 7, 0, 3, KvKind.TARGET, "m", 40, shards), 2, 16, DEADLINE)
    pull.start(DST, 0, 1.0)
    pull.done(FIRST, b"", 1.0)
    _, first, second = pull.take_actions()
    assert [job.source.rank for job in (first, second)] == [0, 1]
    pull.copied(moved(second), 2.0)
    assert pull.take_actions() == []
    pull.copied(moved(first), 2.0)
    assert pull.take_actions() == [AskVerdict()]


def test_a_cancelled_pull_keeps_its_pages_until_the_copy_stopped(pull):
    job = start_one_copy(pull)
    pull.cancel(3.0)
    assert pull.take_actions() == [SendRelease(), CloseWatch()], "Incomplete is not told"
    assert pull.state is PullState.DRAINING and not pull.over
    pull.copied(moved(job), 4.0)
    assert pull.take_actions() == [PagesFree(DST)]
    assert pull.state is PullState.FAILED and pull.over


def test_cancelling_in_the_queue_lets_the_owner_free_at_once(pull):
    pull.cancel(1.0)
    assert pull.take_actions() == [SendRelease(), CloseWatch()]
    assert pull.over


def test_cancelling_twice_says_nothing_twice(pull):
    pull.cancel(1.0)
    pull.take_actions()
    pull.cancel(2.0)
    pull.failed(BROKEN, 2.0)
    assert pull.take_actions() == []


def test_a_preempted_pull_starts_again_from_nothing(pull):
    job = start_one_copy(pull)
    pull.preempt(3.0)
    assert pull.state is PullState.DRAINING and pull.take_actions() == [], "the Watch stays open"
    pull.done(FIRST, b"", 3.5)
    pull.copied(moved(job), 4.0)
    assert pull.take_actions() == [PagesFree(DST)] and pull.state is PullState.WAITING
    pull.start((30, 31, 32), 0, 5.0)
    (again,) = pull.take_actions()
    assert again.source.pages == (4, 5, 9) and again.dst_pages == (30, 31, 32)
    pull.copied(moved(job), 5.5)
    assert pull.state is PullState.PULLING, "a result of the first try is nothing to the second"
    pull.copied(moved(again), 6.0)
    pull.released(True, 7.0)
    assert pull.take_actions()[-1] == PullComplete(FIRST, b"", 300, 2.0, "local")


def test_validating_cannot_be_preempted(pull):
    to_validating(pull)
    pull.preempt(3.5)
    assert pull.state is PullState.VALIDATING
    pull.released(True, 4.0)
    assert pull.state is PullState.COMPLETE


def test_a_broken_watch_is_said_at_once_and_drains(pull):
    job = start_one_copy(pull)
    pull.failed(BROKEN, 3.0)
    assert pull.take_actions() == [PullIncomplete(BROKEN), SendRelease(), CloseWatch()]
    pull.copied(moved(job), 4.0)
    assert pull.take_actions() == [PagesFree(DST)]


def test_a_broken_watch_ends_even_a_preempted_pull(pull):
    job = start_one_copy(pull)
    pull.preempt(3.0)
    pull.failed(BROKEN, 3.5)
    assert PullIncomplete(BROKEN) in pull.take_actions()
    pull.copied(moved(job), 4.0)
    assert pull.state is PullState.FAILED and pull.over


def test_while_validating_only_the_owners_answer_counts(pull):
    to_validating(pull)
    pull.failed(BROKEN, 3.5)
    pull.released(True, 4.0)
    assert pull.state is PullState.COMPLETE


def test_a_failed_copy_loses_the_attempt(pull):
    job = start_one_copy(pull)
    error = TransferFailed("The pool is gone.")
    pull.copied(CopyResult(job, "shm", 0, 0.0, error), 3.0)
    assert pull.take_actions() == [PullIncomplete(error), SendRelease(), CloseWatch(), PagesFree(DST)]
    assert pull.over


@pytest.mark.parametrize("started", [False, True])
def test_waiting_and_pulling_end_at_the_requests_deadline(pull, started):
    if started:
        pull.start(DST, 0, 1.0)
    pull.sweep(DEADLINE - 0.01)
    assert pull.take_actions() == []
    pull.sweep(DEADLINE)
    lost = pull.take_actions()[0]
    assert isinstance(lost, PullIncomplete) and "deadline" in lost.error.message
    assert pull.over


def test_an_owner_that_never_answers_release_is_given_up(pull):
    to_validating(pull)
    pull.released(True, 3.0 + RELEASE_S)
    assert isinstance(pull.take_actions()[0], PullIncomplete), "an answer after the deadline comes too late"
    assert pull.state is PullState.FAILED


def test_a_stuck_copy_holds_its_pages_but_not_the_attempt(pull):
    job = start_one_copy(pull)
    pull.preempt(3.0)
    pull.sweep(3.0 + DRAIN_S)
    assert [type(a) for a in pull.take_actions()] == [PullIncomplete, SendRelease, CloseWatch]
    assert pull.state is PullState.FAILED and not pull.over
    pull.copied(moved(job), 50.0)
    assert pull.take_actions() == [PagesFree(DST)]
    assert pull.over


def test_a_handle_without_shards_is_refused():
    with pytest.raises(ConfigError, match="lists no shard"):
        PullAttempt(11, KvHandle("p", 7, 0, 3, KvKind.TARGET, "m", 40, ()), 2, 16, DEADLINE)


def test_a_handle_whose_shards_cannot_hold_its_tokens_is_refused():
    handle = KvHandle("p", 7, 0, 3, KvKind.TARGET, "m", 64, HANDLE.shards)
    with pytest.raises(ConfigError, match="lists 3 pages for rank 0, but 64 rows take 4"):
        PullAttempt(1, handle, 1, 16, DEADLINE)


def test_a_handle_without_rows_is_only_validated():
    pull = PullAttempt(1, KvHandle("p", 7, 0, 3, KvKind.DRAFT, "m", 0, (RankPages(0, ()),)), 1, 16, DEADLINE)
    pull.start((), 0, 1.0)
    pull.done(FIRST, b"", 2.0)
    assert pull.take_actions()[1:] == [AskVerdict()]
