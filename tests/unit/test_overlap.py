"""Steps launched ahead on a device of paper: every request gets the tokens that the plain rule gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from overlap_world import Setting, World, some_requests

from eyas.common.params import SamplingParams
from eyas.common.types import Choice, GenerationRequest
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.tables import TableWrites
from eyas.engine.device import runner as device_runner
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.loop import commit
from eyas.engine.scheduling.scheduler import Limits

TIGHT = 14  # pages: the largest request needs 13


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [1, 2, 4])
def test_tokens_are_the_plain_rules(width: int, seed: int) -> None:
    world = World(seed, Setting(width))
    world.run(some_requests(seed, 30), cancels=0.1)
    assert world.runner.ahead > 15
    assert width == 1 or world.device.accepted > 20


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [1, 3])
def test_preemption_changes_no_token(width: int, seed: int) -> None:
    world = World(seed, Setting(width, pages=TIGHT))
    world.run(some_requests(seed, 30), cancels=0.05)
    assert world.rig.scheduler.preemptions > 0, "the pool was large enough"


@pytest.mark.parametrize("seed", range(3))
def test_giving_way_to_another_call_changes_no_token(seed: int) -> None:
    """There are pages for all, so only who has more than a fair share of the slots is preempted."""
    world = World(seed, Setting(pages=300))
    world.run(some_requests(seed, 30, many=0.5), cancels=0.05)
    assert world.rig.scheduler.preemptions > 0, "no sequence had to give way"


def test_one_step_at_a_time_gives_the_same() -> None:
    world = World(0, Setting(ahead=False))
    world.run(some_requests(0, 20))
    assert world.runner.ahead == 0


@pytest.mark.parametrize("seed", range(2))
def test_the_host_samples_what_only_it_knows(seed: int) -> None:
    world = World(seed, Setting())
    world.run(some_requests(seed, 20, host=1.0, many=0.5), cancels=0.1)
    assert world.device.accepted > 0


@pytest.mark.parametrize("given_up", [0, 1])
def test_another_choice_leads_a_prompt_whose_first_is_given_up(given_up: int) -> None:
    """The noise of a token is its choice's, so the device must be told."""
    world = World(0, Setting())
    params = SamplingParams(max_tokens=10, seed=5, ignore_eos=True)
    request = GenerationRequest("a", tuple(range(20)), params, (Choice(0), Choice(1)))
    world.submit(request)
    world.step()
    world.cancel(world.stories["a"], given_up)
    world.run([])
    assert [len(tokens) for tokens in world.stories["a"].tokens.values()] == [
        10 * given_up,
        10 - 10 * given_up,
    ]


def test_all_but_the_last_row_of_a_prompt_fits_into_chunks() -> None:
    world = World(0, Setting())
    world.run([GenerationRequest("a", tuple(range(9)), SamplingParams(max_tokens=5, temperature=0.0))])


# --- power: each of these mistakes is noticed ----------------------------------------------------------


def _too_few_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "rows_ahead", property(lambda limits: limits.round_rows))


def _history_does_not_matter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "needs_host", property(lambda seq: bool(seq.forks)))


def _forks_share_their_last_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceRunner, "copy_page", lambda runner, source, target: None)


def _drafts_after_the_end_are_kept(patch: pytest.MonkeyPatch) -> None:
    finish = commit.finish
    patch.setattr(commit, "finish", lambda *known: (known[-1], finish(*known)[1]))


def _new_pages_are_not_told(patch: pytest.MonkeyPatch) -> None:
    put = TableWrites.put

    def forgetful(writes: TableWrites, name: str, slot: int, words: list[int], start: int = 0) -> None:
        if not start:
            put(writes, name, slot, words)

    patch.setattr(TableWrites, "put", forgetful)


def _last_prompt_row_is_a_round_like_any_other(patch: pytest.MonkeyPatch) -> None:
    told = device_runner._Told
    patch.setattr(device_runner, "_Told", lambda occupancy, choice: told(occupancy, choice, grows=True))


def _choices_sound_alike(patch: pytest.MonkeyPatch) -> None:
    occupy = TableWrites.occupy

    def first(
        writes: TableWrites, slot: int, params: SamplingParams, choice: int, *, speculative: bool
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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_mistake_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(4):
            World(seed, Setting(pages=TIGHT)).run(some_requests(seed, 30), cancels=0.1)
