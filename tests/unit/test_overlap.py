"""Steps launched ahead on a device of paper: every request gets the tokens that the plain rule gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from overlap_world import Setting, World, some_requests
from paper_device import VOCAB
from paper_grammars import GRAMMAR, PaperGrammars

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice, RequestDraftLimits, TokenEntry
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.batch.tables import TableWrites
from eyas.engine.batch.tree import DraftTree
from eyas.engine.device import slot_table
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.device.special import DraftNodes, StepMasks
from eyas.engine.device.step import StepShape
from eyas.engine.loop import commit
from eyas.engine.scheduling.limits import BatchLimits
from eyas.engine.speculation.feature_rows import RING_ROWS
from tests.unit.crossed import crossed

TIGHT = 14  # pages: the largest request needs 13


@pytest.mark.parametrize(("width", "seed"), crossed([1, 2, 4], range(3), quick=lambda width, seed: seed == 1))
def test_tokens_are_the_plain_rules(width: int, seed: int) -> None:
    world = World(seed, Setting(width))
    world.run(some_requests(seed, 30), cancels=0.1)
    assert world.runner.ahead > 15
    assert width == 1 or world.device.accepted > 20


@pytest.mark.parametrize(("width", "seed"), crossed([1, 3], range(3), quick=lambda width, seed: seed == 1))
def test_preemption_changes_no_token(width: int, seed: int) -> None:
    world = World(seed, Setting(width, pages=TIGHT))
    world.run(some_requests(seed, 30), cancels=0.05)
    assert world.rig.scheduler.preemptions > 0, "the pool was large enough"


@pytest.mark.parametrize("seed", crossed(range(3), quick=lambda seed: seed == 1))
def test_giving_way_to_another_call_changes_no_token(seed: int) -> None:
    """There are pages for all, so only who has more than a fair share of the slots is preempted."""
    world = World(seed, Setting(pages=300))
    world.run(some_requests(seed, 30, many=0.5), cancels=0.05)
    assert world.rig.scheduler.preemptions > 0, "no sequence had to give way"


@pytest.mark.parametrize(
    ("pages", "seed"),
    crossed([TIGHT + 4, 60], range(2), quick=lambda pages, seed: (pages == 60) == (seed == 0)),
)
def test_changing_depths_change_no_token_and_leave_no_gap_in_draft_kv(pages: int, seed: int) -> None:
    """Of each proposal all rows before it have been there for the head, also of pages from the cache."""
    world = World(seed, Setting(width=6, pages=pages, adaptive=True))
    world.run(some_requests(seed, 60), cancels=0.05)
    assert world.policy is not None and set(world.policy.chosen) == {0, 1, 3, 5}
    assert {shape.width for shape in world.runner.shapes} == {1, 2, 4, 6}
    assert world.device.accepted > 20 and world.device.caught_up > 1
    assert world.runner.ahead > 15


@pytest.mark.parametrize("seed", crossed(range(3), quick=lambda seed: seed == 0))
def test_rounds_in_which_a_head_waits_leave_no_gap_either(seed: int) -> None:
    """They make more than one row certain, and the next one has begun before it is known how many."""
    world = World(seed, Setting(width=6, adaptive=True, looks_up=True))
    world.run(some_requests(seed, 60), cancels=0.05)
    assert world.policy is not None and set(world.policy.chosen) == {0, 1, 3, 5, -5}
    assert {(shape.width, shape.headless) for shape in world.runner.shapes} >= {
        (1, False),
        (6, False),
        (6, True),
    }
    assert world.device.looked_up > 3 and world.device.accepted > 20 and world.device.caught_up > 1


def test_plain_rounds_are_caught_up_once_the_ring_is_full() -> None:
    world = World(0, Setting(width=3, adaptive=True, graphs=False))
    assert world.policy is not None
    world.policy.path = itertools.repeat(0)
    params = SamplingParams(max_tokens=36, temperature=0.0, ignore_eos=True)
    world.run([GenerationRequest("a", (1, 2, 3), params)])
    assert {shape.width for shape in world.runner.shapes if shape.batch} == {1}
    assert world.device.caught_up == 36 // RING_ROWS and not world.device.accepted


def test_those_that_wait_for_the_head_go_together() -> None:
    """They began one after the other, and still the head is called once per ring, not once for each."""
    world, params = World(0, Setting(width=3, adaptive=True)), SamplingParams(max_tokens=36, ignore_eos=True)
    assert world.policy is not None
    world.policy.path = itertools.repeat(0)
    for i in range(4):
        world.submit(GenerationRequest(f"{i}", (1, 2, 3), params))
        for _ in range(3):
            world.step()
    world.run(())
    assert world.device.caught_up > 4 and world.device.catch_ups <= 36 // RING_ROWS + 1


def test_a_head_that_is_not_told_of_plain_rounds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRunner, "_catch_up", lambda self, works, width: None)
    with pytest.raises(AssertionError, match="a row that the head was never given"):
        World(0, Setting(width=3, adaptive=True)).run(some_requests(0, 20))


def test_one_step_at_a_time_gives_the_same() -> None:
    world = World(0, Setting(ahead=False))
    world.run(some_requests(0, 20))
    assert world.runner.ahead == 0


@pytest.mark.parametrize("seed", crossed(range(2), quick=lambda seed: seed == 1))
def test_special_requests_get_the_same(seed: int) -> None:
    world = World(seed, Setting())
    world.run(some_requests(seed, 20, special=1.0, many=0.5), cancels=0.1)
    assert world.device.accepted > 0 and world.runner.special_ahead > 20


@pytest.mark.parametrize(
    "setting",
    [Setting(), Setting(width=1, pages=TIGHT), Setting(width=6, pages=TIGHT, adaptive=True)],
    ids=["drafts", "plain", "depths"],
)
@pytest.mark.parametrize("seed", crossed(range(3), quick=lambda seed: seed == 0))
def test_what_is_held_to_a_grammar_gets_the_same_and_runs_ahead(setting: Setting, seed: int) -> None:
    """Each row has its own mask, whatever is drafted, preempted or given up; and a step begins before the
    tokens are known that its masks follow from.
    """
    world = World(seed, setting)
    world.run(some_requests(seed, 30, held=0.6), cancels=0.1)
    assert world.runner.held_ahead > 25
    if setting.width > 1:
        assert world.device.accepted > 0 and world.device.masked_below > 0, "no mask below a root"
    if setting == Setting():
        assert world.device.forced > 0, "nothing was forced behind a step in flight"


def test_a_request_with_a_grammar_is_in_every_step_as_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and beside others; what its grammar forces is not looked for where its tokens are not known."""
    forced = PaperGrammars.forced

    def looked(self: PaperGrammars, seq: Sequence, most: int) -> DraftTree | None:
        assert not seq.in_flight
        return forced(self, seq, most)

    monkeypatch.setattr(PaperGrammars, "forced", looked)
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for others in ((), ("b", "c")):
        world = World(0, Setting())
        world.run(
            [
                GenerationRequest("a", (1, 2, 3), msgspec.structs.replace(plain, grammar=GRAMMAR)),
                *(GenerationRequest(name, (1, 2, 3), plain) for name in others),
            ]
        )
        waited = world.runner.rounds - world.runner.ahead
        assert waited <= 1 + len(others), "a step had landed before the next was launched"


def test_an_output_that_failed_since_its_step_began_has_no_masks() -> None:
    """Its request fails after the step, and alone."""
    world, grammars = World(0, Setting()), PaperGrammars()
    request = GenerationRequest("a", (1, 2), SamplingParams(grammar=GRAMMAR), speculative=False)
    generation = Generation(request, 1, GenerationKind.LOCAL, 0.0, 1.0)
    seq = Sequence(1, generation, 0, (1, 2), [], slot=3)
    generation.sequences.append(seq)
    nodes = DraftNodes.of(np.full((2, 1), -1, np.int32), world.tables.sizes.width)
    work = SequenceWork(seq, 1, [2], None, sample=True, round=True)
    assert StepMasks(grammars, {3: nodes}).of(work) == [], "the first look finds no state"
    assert len(StepMasks(grammars, {3: nodes}).of(work)) == 1


@pytest.mark.parametrize("setting", [Setting(width=1), Setting()], ids=["plain", "drafts"])
def test_masks_that_do_not_wait_for_their_tokens_are_noticed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PaperGrammars, "awaits", lambda self, seq: False)
    with pytest.raises(AssertionError):
        World(0, setting).run(some_requests(0, 30, held=0.6))


@pytest.mark.slow
def test_what_a_grammar_forces_is_drafted_and_harms_nothing_if_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = []
    for forced in (PaperGrammars.forced, lambda *_: None, lambda *_: DraftTree([5, 6], [-1, 0])):
        monkeypatch.setattr(PaperGrammars, "forced", forced)
        world = World(1, Setting(width=4, ahead=False))
        world.run(some_requests(1, 20, held=1.0))
        rounds.append(world.runner.rounds)
    assert rounds[0] < rounds[1] < rounds[2]


@pytest.mark.slow
def test_so_it_is_behind_a_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what that step gives: what is forced behind another end is no draft."""
    behind, rounds = PaperGrammars.forced_after, []

    def elsewhere(*given: Any) -> list[Any]:
        return [one._replace(token=(one.token + 1) % VOCAB) for one in behind(*given)]

    def wrong(*given: Any) -> list[Any]:
        return [one._replace(drafts=[5, 6, 7][: len(one.drafts)]) for one in behind(*given)]

    for found in (behind, elsewhere, wrong):
        monkeypatch.setattr(PaperGrammars, "forced_after", found)
        world = World(1, Setting(width=4))
        world.run(some_requests(1, 20, held=1.0))
        rounds.append(world.runner.rounds)
    assert rounds[0] < min(rounds[1:])


def test_drafts_without_masks_of_their_own_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = StepMasks.of

    def roots(self: StepMasks, *asked: Any) -> list[Any]:
        found = masks(self, *asked)
        return found[:1] * len(found)

    monkeypatch.setattr(StepMasks, "of", roots)
    with pytest.raises(AssertionError):
        World(0, Setting()).run(some_requests(0, 30, held=0.6))


def test_a_prompt_of_several_choices_has_masks_of_its_own_beside_others() -> None:
    """Its step is launched before the masks are filled, and counts as in flight by then."""
    world = World(0, Setting(width=1))
    held = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, grammar=GRAMMAR)
    both = (RequestChoice(0), RequestChoice(1))
    world.run(
        [
            GenerationRequest("a", (1, 2, 3), held),
            GenerationRequest("b", tuple(range(1, 12)), held, choices=both),
        ]
    )


def test_a_special_request_costs_its_own_rows_and_no_wait() -> None:
    """Beside two that ask for nothing: every round is launched before the one before it has landed."""
    world = World(0, Setting(width=3))
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    asking = msgspec.structs.replace(plain, logprobs=2, presence_penalty=0.5)
    world.run(
        [
            GenerationRequest(name, (1, 2, 3), params)
            for name, params in (("a", plain), ("b", asking), ("c", plain))
        ]
    )
    assert world.runner.rounds - world.runner.ahead <= 3, "a step had landed before the next was launched"
    assert set(world.device.special_rows) == {1, 3}, "of a prompt's end, and of a round"


def test_a_request_drafts_as_deep_as_it_allows() -> None:
    """Beside one that allows all, and narrows no row of that one."""
    world = World(0, Setting(width=6, graphs=False))
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    limits = {
        "all": RequestDraftLimits(),
        "steps": RequestDraftLimits(steps=2),
        "nodes": RequestDraftLimits(draft_tokens=2),
    }
    offered: dict[str, set[int]] = {name: set() for name in limits}
    told = world._told

    def heard(entry: TokenEntry) -> None:
        offered[entry.id].add(entry.offered)
        told(entry)

    world._told = heard  # type: ignore[method-assign]
    world.run(
        [GenerationRequest(name, (1, 2, 3), params, draft_limits=most) for name, most in limits.items()]
    )
    assert {name: max(depths) for name, depths in offered.items()} == {"all": 5, "steps": 2, "nodes": 1}


def test_a_request_without_drafts_has_one_row() -> None:
    """Beside one that is drafted for, and alone: the other ends first."""
    world = World(0, Setting(width=6, graphs=False))
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    world.run(
        [
            GenerationRequest(
                "long", (1, 2, 3), msgspec.structs.replace(params, max_tokens=16), speculative=False
            ),
            GenerationRequest("drafted", (4, 5), params),
        ]
    )
    steps = [shape for shape in world.runner.shapes if not shape.chunk]
    assert {shape.rows for shape in steps} <= {1, 6, 6 + 1} and world.device.accepted > 0
    assert StepShape(1, 6, singles=1) in steps and StepShape(0, 6, singles=1) in steps


@pytest.mark.parametrize("given_up", [0, 1])
def test_another_choice_leads_a_prompt_whose_first_is_given_up(given_up: int) -> None:
    """The noise of a token is its choice's, so the device must be told."""
    world = World(0, Setting())
    params = SamplingParams(max_tokens=10, seed=5, ignore_eos=True)
    request = GenerationRequest("a", tuple(range(20)), params, (RequestChoice(0), RequestChoice(1)))
    world.submit(request)
    world.step()
    world.cancel(world.stories["a"], given_up)
    world.run([])
    assert [len(tokens) for tokens in world.stories["a"].tokens.values()] == [
        10 * given_up,
        10 - 10 * given_up,
    ]


def test_pages_of_forks_that_never_ran_are_free_for_copies() -> None:
    """Nothing runs after them that would say that the copies of their pages have been made."""
    world = World(0, Setting())
    pool, choices = world.rig.scheduler.pool, (RequestChoice(0), RequestChoice(1), RequestChoice(2))
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    world.submit(GenerationRequest("a", tuple(range(9)), params, choices))
    while not pool.copying:
        assert world.step()
    world.cancel(world.stories["a"], None)
    assert world.device.waits == 0 and pool.settled < pool.free
    world.run([])
    assert world.device.waits == 1 and pool.settled == pool.free


def test_all_but_the_last_row_of_a_prompt_fits_into_chunks() -> None:
    world = World(0, Setting())
    world.run([GenerationRequest("a", tuple(range(9)), SamplingParams(max_tokens=5, temperature=0.0))])


# --- power: each of these mistakes is noticed ----------------------------------------------------------


def _too_few_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchLimits, "rows_ahead", property(lambda limits: limits.round_rows))


def _history_does_not_matter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "special", property(lambda seq: bool(seq.next_forks)))


def _forks_share_their_last_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceRunner, "copy_page", lambda runner, source, target: None)


def _drafts_after_the_end_are_kept(patch: pytest.MonkeyPatch) -> None:
    finish = commit.finish
    patch.setattr(commit, "finish", lambda *known: (known[-1], finish(*known)[1]))


def _new_pages_are_not_told(patch: pytest.MonkeyPatch) -> None:
    put = TableWrites.put

    def forgetful(writes: TableWrites, name: str, slot: int, words: list[int], start: int = 0) -> None:
        if name != "pages" or not start:
            put(writes, name, slot, words, start)

    patch.setattr(TableWrites, "put", forgetful)


def _last_prompt_row_is_a_round_like_any_other(patch: pytest.MonkeyPatch) -> None:
    told = slot_table.SlotOccupant
    patch.setattr(slot_table, "SlotOccupant", lambda *known: told(*known, grows=True))


def _choices_sound_alike(patch: pytest.MonkeyPatch) -> None:
    occupy = TableWrites.occupy

    def first(
        writes: TableWrites, slot: int, params: SamplingParams, choice: int, *, speculative: int
    ) -> None:
        occupy(writes, slot, params, 0, speculative=speculative)

    patch.setattr(TableWrites, "occupy", first)


FAULTS = [
    _too_few_pages,
    _history_does_not_matter,
    _forks_share_their_last_page,
    _drafts_after_the_end_are_kept,
    _new_pages_are_not_told,
    _last_prompt_row_is_a_round_like_any_other,
    _choices_sound_alike,
]


@pytest.mark.parametrize("fault", crossed(FAULTS, quick=lambda fault: fault in FAULTS[::3]))
def test_a_mistake_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(4):
            World(seed, Setting(pages=TIGHT)).run(some_requests(seed, 30), cancels=0.1)
