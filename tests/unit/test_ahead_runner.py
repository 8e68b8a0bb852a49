"""Which rounds a device drafts ahead of, and what becomes of a run: verdicts that come meanwhile, features
that were lost, slots that went to others. Runs are scripted: `test_device_ahead` tests what they compute.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from eyas.common.params import SamplingParams
from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.ipc.messages import DraftCommit, DraftOpen
from eyas.engine.kv.pages import PagePool
from eyas.engine.speculation.draft_worker.ahead_drafter import AheadDrafter
from eyas.engine.speculation.draft_worker.chain_features import ChainFeatures
from eyas.engine.speculation.draft_worker.draft_runner import DeviceChain, DraftExtension, DraftInput
from eyas.engine.speculation.draft_worker.draft_sequences import DraftedSequence
from eyas.engine.speculation.draft_worker.outcome_runs import OutcomeResult, OutcomeRound
from eyas.engine.speculation.draft_worker.seats import SeatTables
from eyas.engine.speculation.drafters.ahead import AheadRound, AheadRunner, VerifiedRound, fan_out

STEPS, OUTCOMES, SLOTS = 3, 4, 3
CHAIN = [7, 8, 9]


class Runs:
    """What becomes of each run is said by the test: `whole`, and tokens by the ends of its rounds."""

    kept = ChainFeatures(SLOTS + 1, OUTCOMES, STEPS, torch.zeros(0, 2))
    context, most = 64, 2

    def __init__(self) -> None:
        self.done = False
        self.whole = True
        self.launched: list[list[OutcomeRound]] = []

    def launch(self, rounds: SequenceOf[OutcomeRound], writes: np.ndarray) -> None:
        self.launched.append(list(rounds))
        self.done = False

    def take(self) -> list[OutcomeResult]:
        self.done = True
        return [OutcomeResult(self.whole, [tokens_of(end) for end in one.ends]) for one in self.launched[-1]]


def tokens_of(end: tuple[int, int]) -> list[int]:
    """Of an outcome: the token that follows, then its drafts."""
    accepted, rank = end
    first = 10 + 10 * accepted + rank
    return [first, first + 100, first + 200, first + 300]


class Rig:
    def __init__(self) -> None:
        self.runs = Runs()
        self.seating = SeatTables(SlotTables(TableSizes(SLOTS + 1, 8), "cpu"), 4)
        self.runner = AheadRunner(self.runs, self.seating)  # type: ignore[arg-type]

    def chain(self, owner: str, outcome: int = 0) -> DeviceChain:
        return DeviceChain(CHAIN, owner, self.seating.seats.of(owner), outcome)

    def begin(self, owner: str, rows: int = 1, *, again: bool = True) -> AheadRound:
        new = DraftExtension([1, 2], 4, [5] * rows, torch.zeros(rows, 2))
        asked = DraftInput(owner, new, SamplingParams(), 0)
        return self.runner.begin(VerifiedRound(asked, self.chain(owner), again), 0.5)


def test_a_run_is_begun_looked_for_and_answers() -> None:
    rig = Rig()
    one = rig.begin("a")
    rig.runner.advance([one])
    assert len(rig.runs.launched) == 1 and not one.drafted and not one.written
    rig.runner.advance([one])
    assert len(rig.runs.launched) == 1 and not one.drafted, "it is still under way"
    rig.runs.done = True
    rig.runner.advance([one])
    assert one.drafted and one.written and one.outcomes == OUTCOMES
    ends = [(after, rank) for after, most in enumerate(fan_out(STEPS, 0.5, OUTCOMES)) for rank in range(most)]
    for number, (after, rank) in enumerate(ends):
        first, *drafts = tokens_of((after, rank))
        found = one.answer([*CHAIN[:after], first], 2)
        assert found is not None and (found.tokens, found.outcome) == (drafts[:2], number)
    assert one.answer([99], 2) is None and one.answer([99, tokens_of((1, 0))[0]], 2) is None
    assert one.answer([tokens_of((0, 0))[0]], STEPS + 1) is None, "nothing is made up"


def test_a_verdict_that_comes_meanwhile_waits_for_the_run() -> None:
    rig = Rig()
    one = rig.begin("a")
    rig.runner.advance([one])
    first, *drafts = tokens_of((0, 0))
    found = one.answer([first], STEPS)
    assert rig.runs.done and found is not None and found.tokens == drafts and one.written


def test_a_round_without_a_run_answers_nothing_and_waits_for_none() -> None:
    rig = Rig()
    flying, waiting = rig.begin("a"), rig.begin("b")
    rig.runner.advance([flying])
    assert waiting.answer([tokens_of((0, 0))[0]], STEPS) is None and not rig.runs.done
    assert not waiting.drafted and not waiting.written
    flying.end()
    assert rig.runs.done and flying.drafted


def test_features_that_were_lost_leave_nothing_written() -> None:
    rig = Rig()
    rig.runs.whole = False
    one = rig.begin("a")
    rig.runner.advance([one])
    assert one.answer([tokens_of((0, 0))[0]], STEPS) is None
    assert one.drafted and not one.written and one.outcomes == 0


def test_more_rounds_than_a_run_takes_go_one_after_another() -> None:
    rig = Rig()
    rounds = [rig.begin(owner) for owner in "abc"]
    rig.runner.advance(rounds)
    rig.runs.done = True
    rig.runner.advance(rounds)
    assert [len(run) for run in rig.runs.launched] == [2, 1]
    assert [one.drafted for one in rounds] == [True, True, False]


def test_a_chain_whose_slot_went_to_others_is_not_drafted_ahead_of() -> None:
    rig = Rig()
    lost, chain = rig.begin("a"), rig.chain("a")
    assert rig.runner.rows(chain, 10) == STEPS + OUTCOMES * STEPS
    for owner in "bcd":
        rig.seating.seats.of(owner)
    assert rig.runner.rows(chain, 10) == 0
    rig.runner.advance([lost])
    assert not rig.runs.launched and lost.drafted and not lost.written and lost.outcomes == 0
    rig.seating.seats.of("a")
    assert rig.runner.rows(chain, 10) == 0, "in its new slot nothing is kept"


def test_no_row_lies_behind_the_context() -> None:
    rig = Rig()
    rows = STEPS + OUTCOMES * STEPS
    assert rig.runner.rows(rig.chain("a"), Runs.context - rows) == rows
    assert rig.runner.rows(rig.chain("a"), Runs.context - rows + 1) == 0


def test_more_certain_rows_than_one_verdict_gives_are_left_to_the_next_proposal() -> None:
    rig = Rig()
    long, short = rig.begin("a", STEPS + 2, again=False), rig.begin("b", STEPS + 1, again=False)
    rig.runner.advance([long, short])
    assert (
        [one.draft_input.owner for one in rig.runs.launched[0]] == ["b"] and long.drafted and not long.written
    )


def test_the_feature_of_a_row_that_is_run_once_more_need_not_come_again() -> None:
    rig = Rig()
    rounds = [rig.begin("a"), rig.begin("b", again=False)]
    rig.runner.advance(rounds)
    assert [len(one.draft_input.extension.features) for one in rig.runs.launched[0]] == [0, 1]


def test_lent_pages_are_others_the_next_time() -> None:
    tables = SlotTables(TableSizes(2, 8), "cpu")
    seating = SeatTables(tables, 4)

    def told(pages: list[int], lent: int) -> list[int]:
        new = DraftExtension(pages, 0, [5], torch.zeros(1, 2))
        _, writes = seating.take([DraftInput("a", new, SamplingParams(), 0)], [lent])
        tables.apply(torch.from_numpy(writes))
        return tables.pages[0, : len(pages)].tolist()

    assert told([3, 5, 7, 8], 2) == [3, 5, 7, 8]
    assert told([3, 5, 9], 0) == [3, 5, 9]
    assert told([3, 5, 9, 7], 1) == [3, 5, 9, 7]


# --- in a draft engine's hands --------------------------------------------------------------------------


class Sequences:
    """What an `AheadDrafter` knows of the sequences: one, with a pool of its own."""

    def __init__(self) -> None:
        self.pool = PagePool(8)
        opened = DraftOpen(1, 1, 0, SamplingParams(), 0)
        one = self.one = DraftedSequence(opened, first=0, prompt=None, rows=0, pages=self.pool.take(1))
        self.followed = {(4, 1): one}
        one.commits = [DraftCommit(1, 1, 0, (5,), bytes(8), steps=STEPS)]
        one.answered()

    def spare(self, followed: DraftedSequence, rows: int) -> bool:
        followed.spare = self.pool.take(2)
        return True

    def end_ahead(self, followed: DraftedSequence) -> None:
        if followed.ahead is not None:
            followed.ahead.end()
        self.pool.drop(followed.spare)
        followed.spare, followed.ahead = [], None


class Told:
    """An `AheadDrafter`, with one sequence that has been proposed for."""

    def __init__(self) -> None:
        self.rig, self.sequences, self.rows = Rig(), Sequences(), object()
        self.ahead = AheadDrafter(self.rig.runner, self.sequences, lambda peer: self.rows)  # type: ignore[arg-type, return-value]
        self.begin()

    def begin(self) -> None:
        self.ahead.begin((4, 1), self.sequences.one, self.rig.chain("a"))


def test_rows_count_as_written_once_their_run_has_ended() -> None:
    told = Told()
    one = told.sequences.one
    told.ahead.advance()
    assert one.repairs and told.ahead.busy, "the run is under way"
    told.rig.runs.done = True
    told.ahead.advance()
    assert not one.repairs and one.rows == 1 and not told.ahead.busy
    assert told.ahead.counts.drafted == OUTCOMES


def test_so_they_do_if_a_verdict_waited_for_it() -> None:
    told = Told()
    one = told.sequences.one
    told.ahead.advance()
    one.commits = [DraftCommit(1, 1, 1, (tokens_of((0, 0))[0],), bytes(8), steps=STEPS)]
    found = told.ahead.answer(one)
    assert found is not None and list(found.tokens) == tokens_of((0, 0))[1:]
    assert not one.repairs and one.ahead is None and told.ahead.counts.hits == 1
    assert told.ahead.counts.drafted == OUTCOMES and len(told.sequences.pool.take(7)) == 7


def test_rows_whose_features_were_lost_are_still_to_be_written() -> None:
    told = Told()
    told.rig.runs.whole = False
    told.ahead.advance()
    told.rig.runs.done = True
    told.ahead.advance()
    assert told.sequences.one.repairs and not told.ahead.busy


def test_addresses_of_a_ring_that_is_gone_are_not_read() -> None:
    """The peer's line broke between the proposal and the run."""
    told = Told()
    told.rows = None
    told.ahead.advance()
    assert not told.rig.runs.launched and told.sequences.one.ahead is None and not told.sequences.one.spare


def test_pages_are_given_back_when_no_run_writes_to_them() -> None:
    told = Told()
    told.ahead.advance()
    assert not told.rig.runs.done
    told.ahead.end()
    assert told.rig.runs.done and not told.sequences.one.spare
