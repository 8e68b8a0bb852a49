"""States of sequences: whose slot, at which position, kept for whom, and never lost."""

from __future__ import annotations

import random

import pytest
from state_world import StateWorld, token_after

from eyas.engine.batch.sequence import Sequence
from eyas.engine.states.shape import SPAN


def _text(seed: int, count: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100), k=count))


def _answered(world: StateWorld, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(token_after(ids))
    return tuple(ids)


def test_a_longer_answer_passes_positions_and_leaves_its_last_state() -> None:
    world, prompt = StateWorld(1), _text(1, 150)
    world.submit(prompt, max_tokens=200)
    world.run()
    world.check_idle()
    assert world.slots.kept == 2, "one at the prompt's end, and one at the answer's"
    before = world.runner.computed
    world.submit(_answered(world, prompt, 200) + _text(2, 30), max_tokens=4)
    world.run()
    resumed = (150 + 200 - 1) // SPAN * SPAN
    assert world.slots.hits == 1 and world.slots.resumed_tokens == resumed
    assert world.runner.computed - before < 380 - resumed + 30
    world.check_idle()


def test_a_state_that_an_answer_leaves_finds_its_place_by_the_answers_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And looks at no token before them: of 17,000 that took 1.3 ms."""
    world, looks = StateWorld(6), list[int]()
    world.submit(_text(1, 150), max_tokens=2)
    states, cache = world.rig.scheduler.tables.states, world.rig.cache
    give_back, keys = states.give_back, cache._keys

    def watched(seq: Sequence) -> None:
        look = lambda tokens, rows, first=0: looks.append(first) or keys(tokens, rows, first)  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_keys", look)
            give_back(seq)

    monkeypatch.setattr(states, "give_back", watched)
    world.run()
    assert looks and min(looks) >= 150 // SPAN * SPAN // cache.shape.size
    world.check_idle()


def test_pages_without_a_state_are_computed_again_and_the_next_text_finds_one() -> None:
    """Texts part behind 100 rows, where nothing was kept at first."""
    world, shared = StateWorld(2), _text(3, 100)
    for number in range(3):
        world.submit(shared + _text(10 + number, 90), max_tokens=2)
        world.run()
    assert world.slots.hits == 1 and world.slots.resumed_tokens == SPAN
    assert world.slots.missed_tokens == 100 + (100 - SPAN)
    world.check_idle()


def test_a_request_waits_for_a_slot_and_kept_states_make_room() -> None:
    world = StateWorld(3, slots=2)
    for number in range(6):
        world.submit(_text(number, 130), max_tokens=6)
    for _ in range(4):
        world.step()
    assert len(world.rig.scheduler.running) == 2 and len(list(world.rig.scheduler.waiting)) == 4
    world.run()
    world.check_idle()
    assert world.slots.kept <= 2


def test_choices_take_copies_of_the_state_behind_their_prompt() -> None:
    world = StateWorld(4)
    world.submit(_text(4, 140), choices=3, max_tokens=70)
    world.run()
    world.check_idle()


def test_choices_that_have_no_slot_wait() -> None:
    world = StateWorld(5, slots=2)
    world.submit(_text(5, 140), choices=4, max_tokens=30)
    world.run()
    world.check_idle()


def test_leases_of_all_slots_leave_no_room_for_a_request() -> None:
    """So that workers that wait for each other's slots compute a prompt themselves."""
    rig = StateWorld(9, slots=2).rig
    pages = [0, 1, 2, *rig.pool.pages_of(0)]
    assert rig.scheduler.beside(pages) == rig.pool.num_pages - 3
    assert rig.scheduler.beside([*pages, *rig.pool.pages_of(1)]) == 0


def test_states_go_with_the_pages_before_them() -> None:
    world = StateWorld(6, pages=90)
    for number in range(8):
        world.submit(_text(number, 200), max_tokens=4)
        world.run()
    world.check_idle()
    assert 0 < world.slots.kept < 8
    world.rig.scheduler.flush()
    assert not world.slots.kept and world.slots.pool.free == world.slots.pool.num_pages


def test_a_spoiled_text_leaves_no_state() -> None:
    world = StateWorld(7)
    world.submit(_text(7, 1200), max_tokens=40)
    while not world.rig.scheduler.running or world.rig.scheduler.running[0].in_prompt:
        world.step()
    assert world.slots.kept, "at a spaced position of a long prompt"
    world.rig.requests.spoil(world.rig.scheduler.running[0].generation)
    world.requests.clear()
    world.run()
    assert not world.slots.kept
    world.check_idle()


def test_spaced_states_take_no_place_of_those_at_ends() -> None:
    world = StateWorld(8, slots=4, pages=2000)
    for number in range(3):
        world.submit(_text(number, 140), max_tokens=2)
        world.run()
    world.submit(_text(9, 3500), max_tokens=2)
    world.run()
    world.submit(_text(1, 140) + _text(12, 20), max_tokens=2)
    world.run()
    assert world.slots.hits == 1, "only the oldest end went, for that of the long prompt"
    world.check_idle()


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_read_their_own_states(seed: int) -> None:
    """Few slots and pages: preempted, cancelled, forked, drafted; every step checks its slots."""
    chance = random.Random(seed)
    world = StateWorld(
        seed, slots=chance.choice((3, 5, 12)), pages=chance.choice((120, 160, 400)), max_running=4
    )
    texts = [_text(seed, 400)]
    for _ in range(40):
        cut = chance.choice(texts)
        prompt = cut[: chance.randint(1, len(cut))] + _text(chance.randrange(9), chance.randint(1, 80))
        id = world.submit(
            prompt[:300], choices=chance.choice((1, 1, 1, 2, 3)), max_tokens=chance.randint(1, 90)
        )
        texts.append(_answered(world, prompt[:300], 60))
        for _ in range(chance.randint(0, 12)):
            world.step()
        if chance.random() < 0.15:
            world.cancel(id)
    world.run()
    world.check_idle()
    assert world.slots.hits and world.runner.accepted
