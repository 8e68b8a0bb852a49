"""A draft engine alone, and the drafter that talks to one: what peers may send, in any order and shape."""

from __future__ import annotations

import math

import pytest
import torch
from engine_rig import PAGE, VOCAB, handle

from eyas.common.params import SamplingParams
from eyas.common.types import KvKind
from eyas.engine.ipc.messages import (
    DraftClose,
    DraftClosed,
    DraftCommit,
    DraftDown,
    DraftOpen,
    DraftPeerGone,
    DraftProposal,
    DraftUp,
    EngineLoad,
    OpenPull,
    PullDone,
    PullFailed,
    ReleaseHandle,
    WireFailure,
)
from eyas.engine.ipc.row_ring import WAITING_ROWS
from eyas.engine.speculation.drafters.base import AcceptedRows
from eyas.engine.speculation.drafters.remote import MISSED_ROUNDS, RemoteDrafter
from tests.unit.draft_engine_drive import (
    NO_CHANNELS,
    PEER,
    SPEC,
    WIDTH,
    Drive,
    answers_of,
    new_commit,
    new_sequence,
    opened_sequences,
)


def test_commits_in_order_are_answered_once_a_batch() -> None:
    drive = Drive()
    proposals, closed = drive.up(new_sequence(base=3), new_commit(3, 10, 11), new_commit(5, 12))
    assert [(p.base_len, p.tokens) for p in proposals] == [(6, (12, 13))] and not closed
    proposals, _ = drive.up(new_commit(6, 13))
    assert [p.base_len for p in proposals] == [7]
    drive.up(DraftClose(1, 1))
    assert drive.pool.used == 0


def test_its_load_counts_the_commands_that_it_has_heard() -> None:
    loads = [
        event
        for event in Drive().tell(DraftUp((new_sequence(),), peer=PEER), DraftPeerGone(1))
        if isinstance(event, EngineLoad)
    ]
    assert [(load.heard, load.running) for load in loads] == [(2, 1)]


def test_its_load_counts_its_steps_and_their_sequences() -> None:
    drive = Drive()
    commits = tuple(new_commit(0, 5, seq=seq) for seq in (1, 2, 3))
    events = drive.tell(DraftUp(tuple(new_sequence(seq) for seq in (1, 2, 3)), commits, peer=PEER))
    [load] = [event for event in events if isinstance(event, EngineLoad)]
    assert sum(load.step_seconds) == sum(load.step_sequences) == 1
    assert load.step_sequences_total == 3 and load.step_seconds_total > 0.0


@pytest.mark.parametrize("base", [4, 6, 60])
def test_a_gap_or_a_repetition_ends_the_sequence(base: int) -> None:
    drive = Drive()
    drive.up(new_sequence(base=3), new_commit(3, 10, 11))
    proposals, closed = drive.up(new_commit(base, 12))
    assert not proposals and [c.seq for c in closed] == [1]
    assert drive.pool.used == 0
    assert not drive.up(new_commit(5, 12))[0], "nothing is drafted for it any more"


@pytest.mark.parametrize(
    "bad",
    [
        new_commit(3, VOCAB),
        new_commit(3, -1),
        new_commit(3),
        new_commit(3, 1, features=b"xyz"),
        new_commit(3, 1, steps=-1),
        new_commit(3, 1, steps=10**6),
        new_commit(3, 1, topk=0),
        new_commit(3, 1, topk=10**6),
        new_commit(3, 1, topk=4, draft_tokens=0),
        new_commit(3, *range(1, 62)),
    ],
)
def test_no_commit_ends_the_loop(bad: DraftCommit) -> None:
    drive = Drive(pages=64)
    drive.up(new_sequence(seq=2), new_commit(0, 5, seq=2))
    proposals, closed = drive.up(new_sequence(base=3), bad)
    assert not proposals and [c.seq for c in closed] == [1]
    proposals, _ = drive.up(new_commit(1, 6, seq=2))
    assert [p.seq for p in proposals] == [2], "the others go on"


@pytest.mark.parametrize(
    "bad",
    [
        new_sequence(base=64),
        new_sequence(base=-1),
        new_sequence(params=SamplingParams(temperature=math.nan)),
        new_sequence(base=9, handle=handle(8, group=KvKind.DRAFT)),
        new_sequence(base=8, handle=handle(8, group=KvKind.DRAFT, shards=0)),
    ],
)
def test_no_open_ends_the_loop(bad: DraftOpen) -> None:
    drive = Drive()
    _, closed = drive.up(bad)
    assert [c.seq for c in closed] == [1]
    assert (
        not drive.engine._sequences.followed and not drive.engine._sequences._prompts and drive.pool.used == 0
    )


def test_a_prompt_larger_than_the_pool_keeps_nobody_waiting() -> None:
    """It is refused, and its owner told at once; pulls are served in order, so it would block all others."""
    drive = Drive(pages=4)
    large = handle(5 * PAGE, group=KvKind.DRAFT)
    events = drive.tell(DraftUp((new_sequence(base=9, handle=large),), peer=PEER))
    assert [c.seq for c in answers_of(events)[1]] == [1]
    assert [e.handle for e in events if isinstance(e, ReleaseHandle)] == [large] and drive.pulls.active == 0
    small = new_sequence(seq=2, base=9, handle=handle(9, id=2, group=KvKind.DRAFT))
    events = drive.tell(DraftUp((small,), (new_commit(9, 50, seq=2),), peer=PEER))
    (pull,) = [e for e in events if isinstance(e, OpenPull)]
    assert [p.seq for p in answers_of(drive.pull_here(pull))[0]] == [2]


def test_a_prompt_without_room_keeps_nobody_waiting() -> None:
    """Its sequences are closed at once, to be opened from their window, and its owner has its pages again."""
    drive = Drive(pages=8)
    drive.up(new_sequence(seq=1), new_commit(0, *range(3 * PAGE), seq=1))
    assert drive.pool.used > 8 - 6
    large = new_sequence(seq=2, base=9, handle=handle(6 * PAGE, id=2, group=KvKind.DRAFT))
    small = new_sequence(seq=3, base=5, handle=handle(5, id=3, group=KvKind.DRAFT))
    events = drive.tell(DraftUp((large, small), (new_commit(5, 50, seq=3),), peer=PEER))
    refused, pull = [e for e in events if isinstance(e, OpenPull)]
    events += drive.tell(PullDone(refused.pull, ()))
    assert [c.seq for c in answers_of(events)[1]] == [2]
    assert refused.handle in [e.handle for e in events if isinstance(e, ReleaseHandle)]
    assert [p.seq for p in answers_of(drive.pull_here(pull))[0]] == [3]


def test_choices_share_one_pull_and_own_what_they_write() -> None:
    drive = Drive()
    draft = handle(9, group=KvKind.DRAFT)
    opens = [new_sequence(seq=s, base=9, handle=draft) for s in (1, 2)]
    events = drive.tell(
        DraftUp(tuple(opens), (new_commit(9, 50, seq=1), new_commit(9, 60, seq=2)), peer=PEER)
    )
    (pull,) = [e for e in events if isinstance(e, OpenPull)]
    assert answers_of(events) == ([], []), "nothing is drafted before the prompt is here"
    proposals, closed = answers_of(drive.pull_here(pull))
    assert not closed and sorted((p.seq, p.tokens[0]) for p in proposals) == [(1, 50), (2, 60)]
    first, second = (drive.engine._sequences.followed[PEER, seq].pages for seq in (1, 2))
    assert first[:2] == second[:2] and not set(first[2:]) & set(second[2:])
    drive.up(DraftClose(1, 1), DraftClose(2, 2))
    assert drive.pool.used == 0 and not drive.engine._sequences._prompts


def test_a_lost_prompt_closes_its_sequences() -> None:
    drive = Drive()
    events = drive.tell(DraftUp((new_sequence(base=9, handle=handle(9, group=KvKind.DRAFT)),), peer=PEER))
    (pull,) = [e for e in events if isinstance(e, OpenPull)]
    _, closed = answers_of(drive.tell(PullFailed(pull.pull, WireFailure("transfer_failed", "gone"))))
    assert [c.seq for c in closed] == [1] and drive.pool.used == 0 and drive.pulls.active == 0


def test_a_sequence_that_gets_no_page_of_its_own_is_closed_not_fed_garbage() -> None:
    drive = Drive(pages=4)  # 3 for the prompt, one copy: the second choice has none
    draft = handle(9, group=KvKind.DRAFT)
    opens = tuple(new_sequence(seq=s, base=9, handle=draft) for s in (1, 2))
    events = drive.tell(DraftUp(opens, (new_commit(9, 50, seq=1),), peer=PEER))
    (pull,) = [e for e in events if isinstance(e, OpenPull)]
    proposals, closed = answers_of(drive.pull_here(pull))
    assert [p.seq for p in proposals] == [1] and [c.seq for c in closed] == [2]
    drive.up(DraftClose(1, 1))
    assert not drive.up(new_commit(9, 60, seq=2))[0]
    assert drive.pool.used == 0


def test_a_peer_that_vanishes_leaves_nothing() -> None:
    drive = Drive()
    drive.up(
        new_sequence(), new_commit(0, 5), new_sequence(seq=2, base=9, handle=handle(9, group=KvKind.DRAFT))
    )
    drive.tell(DraftPeerGone(PEER))
    assert drive.pool.used == 0 and drive.pulls.active == 0 and not drive.engine._sequences.followed


# --- the other end: RemoteDrafter ---------------------------------------------------------------------


def _drafter(*workers: str) -> RemoteDrafter:
    drafter = RemoteDrafter(SPEC, VOCAB, NO_CHANNELS)
    for worker in workers or ("w",):
        drafter.deliver(DraftDown(worker=worker))
    return drafter


def test_the_choices_of_a_request_go_to_one_worker_and_requests_are_spread() -> None:
    drafter = _drafter("w", "v")
    for id in "ab":
        opened_sequences(drafter, 3, id)
    ups = drafter.outgoing()
    assert sorted(len(up.opens) for up in ups) == [3, 3]


def test_proposals_that_are_no_trees_or_too_large_are_dropped() -> None:
    drafter = _drafter()
    (seq,) = opened_sequences(drafter, 1)
    generation = drafter._followed[seq.uid].generation
    for tokens, parents in [((1, 2), (0, 1)), ((VOCAB,), (-1,)), ((1,) * 4, (-1,) * 4), ((1,), ())]:
        drafter.deliver(DraftDown((DraftProposal(seq.uid, generation, 5, tokens, parents),), worker="w"))
        assert drafter.take() == []
    drafter.deliver(DraftDown((DraftProposal(seq.uid, generation, 5, (1, 2), (-1, 0)),), worker="w"))
    assert len(drafter.take()) == 1


def test_a_worker_that_never_answers_is_soon_not_waited_for() -> None:
    drafter = _drafter()
    (seq,) = opened_sequences(drafter, 1)
    for i in range(MISSED_ROUNDS + 1):
        drafter.post([AcceptedRows(seq, 4 + i, [9], torch.zeros(1, WIDTH), SPEC)])
        assert drafter.owed() == (i < MISSED_ROUNDS)
    drafter.close(seq)
    assert not drafter.owed() and [c.seq for up in drafter.outgoing() for c in up.closes] == [seq.uid]


def test_rows_below_which_nothing_is_wanted_are_taken_without_an_answer() -> None:
    drive = Drive(pages=64)
    assert drive.up(new_sequence(), new_commit(0, 5, steps=0)) == ([], [])
    ((proposal,), closed) = drive.up(new_commit(1, 6))
    assert proposal.base_len == 2 and len(proposal.tokens) == 2 and not closed
    drafter = _drafter()
    (seq,) = opened_sequences(drafter, 1)
    drafter.post([AcceptedRows(seq, 4, [9], torch.zeros(1, WIDTH), SPEC)])
    assert drafter.owed()
    drafter.outgoing()
    for i in range(3):
        drafter.post([AcceptedRows(seq, 5 + i, [9 + i], torch.zeros(1, WIDTH), None)])
        assert not drafter.owed() and not drafter.outgoing(), "such rows wait .."
    drafter.post([AcceptedRows(seq, 8, [12], torch.zeros(1, WIDTH), SPEC)])
    ((commit,),) = [up.commits for up in drafter.outgoing()]
    assert (commit.base_len, commit.tokens, commit.steps) == (5, (9, 10, 11, 12), SPEC.steps), ".. for others"
    for i in range(WAITING_ROWS):
        drafter.post([AcceptedRows(seq, 9 + i, [9], torch.zeros(1, WIDTH), None)])
    ((commit,),) = [up.commits for up in drafter.outgoing()]
    assert (len(commit.tokens), commit.steps) == (WAITING_ROWS, 0), "until they are many"


def test_pages_are_reserved_for_what_the_runner_writes_whatever_is_wanted() -> None:
    """A device drafts in its own shape, and only cuts what it says."""
    drive = Drive()
    drive.runner.least_rows = 3 * PAGE
    for base, steps in ((0, 1), (2, 0)):
        drive.up(*([new_sequence()] if base == 0 else []), new_commit(base, 5, 6, steps=steps))
        assert drive.pool.used == 4


def test_news_of_a_sequence_that_is_gone_does_not_put_its_worker_off() -> None:
    drafter = _drafter()
    (seq,) = opened_sequences(drafter, 1)
    drafter.deliver(DraftDown(closed=(DraftClosed(seq.uid, 99, "old"),), worker="w"))
    assert seq.drafting and drafter.open(seq, 4, None)
    drafter.deliver(DraftDown(closed=(DraftClosed(0, 0, "the stream broke"),), worker="w"))
    assert not seq.drafting and not drafter.open(seq, 4, None)
