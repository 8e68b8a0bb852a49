"""The host tier: what it finds is what was computed, whatever happens to pages while they are copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from eyas.common.errors import TransferFailed
from eyas.common.page_names import SHORT_BYTES, split
from eyas.engine.kv.host_tier import HostTier
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from tests.unit.host_rig import HandMemory

SIZE, PAGES, SLOTS = 2, 12, 7
Tokens = tuple[int, ...]


@dataclass(eq=False)
class Prompt:
    """One that is computed by the step in flight, or was; or whose pages are being loaded."""

    tokens: Tokens
    pages: list[int]
    loads: bool = False


def content(tokens: Sequence[int], page: int, lookahead: int) -> Tokens:
    """What a page of a prompt must hold: it is made of all tokens up to its end, and those it looks ahead."""
    return tuple(tokens[: (page + 1) * SIZE + lookahead])


class World(RuleBasedStateMachine):
    """Prompts come and go; a step in flight writes the pages of those it computes until it has landed."""

    lookahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.cache = PrefixCache(self.pool, SIZE, lookahead=self.lookahead)
        self.memory = HandMemory(ready=SLOTS)
        self.tier = HostTier(self.pool, self.cache, self.memory)
        self.prompts: list[Prompt] = []
        self.flight: list[tuple[int, Tokens]] | None = None  # pages that a step writes, and what
        self.loaded = 0
        self.told: set[bytes] = set()  # what is here, by what it says

    @rule(family=st.integers(0, 2), pages=st.integers(1, 5), last=st.integers(0, 2))
    @precondition(lambda self: self.flight is None)
    def a_prompt_is_computed(self, family: int, pages: int, last: int) -> None:
        """It takes what is cached, and the step that is launched writes the rest."""
        tokens = (*(family,) * (pages * SIZE - 1), last, 9)
        cached = self.cache.match(tokens)
        wanted = pages - len(cached)
        if wanted > self.pool.free:
            self.cache.evict(wanted - self.pool.free)
        if wanted > self.pool.free:
            self.pool.drop(cached)
            return
        prompt = Prompt(tokens, cached + self.pool.take(wanted))
        self.prompts.append(prompt)
        self.pool.launched()
        self.flight = [
            (prompt.pages[i], content(tokens, i, self.lookahead)) for i in range(len(cached), pages)
        ]
        for page, _ in self.flight:
            self.memory.pages[page] = object()  # half written

    @rule()
    @precondition(lambda self: self.flight is not None)
    def the_step_lands(self) -> None:
        assert self.flight is not None
        self.memory.pages.update(self.flight)
        self.pool.landed()
        self.flight = None

    @rule(data=st.data())
    def a_prompt_ends(self, data: st.DataObject) -> None:
        """Its pages are cached, also if they are complete only when the step in flight has landed."""
        ready = [prompt for prompt in self.prompts if not prompt.loads]
        if ready:
            prompt = data.draw(st.sampled_from(ready))
            self.prompts.remove(prompt)
            self.cache.insert(prompt.tokens, prompt.pages, len(prompt.pages) * SIZE)
            self.pool.drop(prompt.pages)

    @rule(family=st.integers(0, 2), pages=st.integers(1, 5), last=st.integers(0, 2))
    def what_is_found_is_loaded(self, family: int, pages: int, last: int) -> None:
        tokens = (*(family,) * (pages * SIZE - 1), last, 9)
        cached = self.cache.match(tokens)
        names = self.tier.find(self.cache.names_after(tokens, cached))
        if len(names) > self.pool.settled:
            self.cache.evict(len(names) - self.pool.settled)
        if not names or len(names) > self.pool.settled:
            self.pool.drop(cached)
            return
        prompt = Prompt(tokens, cached + self.pool.take(len(names), settled=True), loads=True)
        self.prompts.append(prompt)

        def then(error: object) -> None:
            self.prompts.remove(prompt)
            if error is None:
                expected = [content(tokens, i, self.lookahead) for i in range(len(prompt.pages))]
                flight = dict(self.flight or ())
                assert [flight.get(page, self.memory.pages[page]) for page in prompt.pages] == expected
                self.loaded += len(names)
                self.cache.insert(tokens, prompt.pages, len(prompt.pages) * SIZE)
            self.pool.drop(prompt.pages)

        self.tier.load(names, prompt.pages[len(cached) :], then)

    @rule(data=st.data(), works=st.booleans())
    @precondition(lambda self: self.memory.jobs)
    def a_copy_stops(self, data: st.DataObject, works: bool) -> None:
        job = data.draw(st.sampled_from(self.memory.jobs))
        self.memory.finish(job, None if works else TransferFailed("by chance"))

    @rule()
    def a_loop_ends(self) -> None:
        self.tier._seen = -PAGES  # it looks for pages each time
        self.tier.poll()

    @rule()
    @precondition(lambda self: self.flight is None and self.pool.used == 0)
    def all_is_forgotten(self) -> None:
        held = self.tier.cached_pages
        self.cache.evict(self.cache.cached_pages)
        assert self.tier.clear() == held and self.tier.cached_pages == self.cache.cached_pages == 0

    @invariant()
    def every_slot_has_one_use(self) -> None:
        held = [held.slot for held in self.tier._pages.values()]
        assert sorted([*held, *self.tier._free]) == list(range(self.tier._known))
        assert self.tier.cached_pages == sum(one.filled for one in self.tier._pages.values())

    @invariant()
    def it_tells_what_comes_and_leaves(self) -> None:
        for most in (1, 1000):  # a part, then the rest
            came, left = self.tier.take_changes(most)
            self.told = self.told - set(split(left)) | set(split(came))
        filled = {name[:SHORT_BYTES] for name, one in self.tier._pages.items() if one.filled}
        assert self.told == filled and not self.tier.changed

    @invariant()
    def what_is_held_is_what_was_computed(self) -> None:
        """Every text that the tier could be asked for, by the plain rule."""
        for family in range(3):
            for last in range(3):
                tokens = (*(family,) * (5 * SIZE - 1), last, 9)
                for i, name in enumerate(self.cache.names_after(tokens, ())):
                    held = self.tier._pages.get(name)
                    if held is not None and held.filled:
                        assert self.memory.places[held.slot] == content(tokens, i, self.lookahead)

    def teardown(self) -> None:
        """In the end no page has an owner, and all are free or cached."""
        if self.flight is not None:
            self.the_step_lands()
        self.memory.finish_all()
        self.memory.poll()
        assert not [prompt for prompt in self.prompts if prompt.loads]
        for prompt in self.prompts:
            self.pool.drop(prompt.pages)
        assert self.pool.used == 0 and self.pool.free + self.cache.cached_pages == PAGES
        assert all(held.filled and not held.copies for held in self.tier._pages.values())


class LookingAhead(World):
    """Where pages hold draft KV as well."""

    lookahead = 1


@pytest.mark.parametrize("world", [World, LookingAhead])
def test_what_comes_back_is_what_was_computed(world: type[World]) -> None:
    run_state_machine_as_test(
        world, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )


class Plain:
    """A tier whose copies end at once, and a text of `pages` pages for every number."""

    def __init__(self, pages: int, slots: int) -> None:
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, SIZE, lookahead=0)
        self.memory = HandMemory(ready=slots)
        self.tier = HostTier(self.pool, self.cache, self.memory)

    def text(self, number: int, pages: int) -> Tokens:
        return (*(number,) * (pages * SIZE), 99)

    def run(self, tokens: Tokens) -> None:
        """It is computed, and ends; the tier looks after its pages; others then need all pages."""
        pages = self.pool.take(len(tokens) // SIZE)
        self.cache.insert(tokens, pages, len(pages) * SIZE)
        self.pool.drop(pages)
        for _ in range(2):
            self.tier._seen = -self.pool.num_pages
            self.tier.poll()
            self.memory.finish_all()
        self.cache.evict(self.pool.num_pages)

    def found(self, tokens: Tokens) -> int:
        return len(self.tier.find(self.cache.names_after(tokens, ())))


def test_a_full_tier_drops_what_left_longest_ago_and_a_prefix_after_what_follows_it() -> None:
    plain = Plain(pages=8, slots=10)
    texts = [plain.text(number, 4) for number in range(3)]
    for text in texts:
        plain.run(text)
    assert [plain.found(text) for text in texts] == [2, 4, 4]
    plain.tier.load(
        plain.tier.find(plain.cache.names_after(texts[0], ())), plain.pool.take(2), lambda _: None
    )
    plain.memory.finish_all()
    plain.run(plain.text(3, 4))
    assert [plain.found(text) for text in texts] == [2, 0, 4], "the first was wanted again"


def test_a_text_that_grows_outlives_what_left_in_between() -> None:
    """Its first pages went to the host long before its last."""
    plain = Plain(pages=8, slots=6)
    plain.run(plain.text(1, 2))
    plain.run(plain.text(2, 2))
    longer = plain.text(1, 3)
    pages = plain.pool.take(3)
    plain.cache.insert(longer, pages, 6)
    plain.pool.drop(pages[2:])  # the first two are in use, so that the last alone is copied
    plain.tier._seen = -8
    plain.tier.poll()
    plain.memory.finish_all()
    plain.tier.poll()
    plain.pool.drop(pages[:2])
    plain.cache.evict(8)
    plain.run(plain.text(3, 3))
    assert (plain.found(longer), plain.found(plain.text(2, 2))) == (3, 0)


def test_a_text_that_leaves_again_is_dropped_after_those_that_left_in_between() -> None:
    plain = Plain(pages=4, slots=4)
    for number in (1, 2, 1, 3):
        plain.run(plain.text(number, 2))
    assert [plain.found(plain.text(number, 2)) for number in (1, 2, 3)] == [2, 0, 2]


def test_a_page_that_is_evicted_before_its_copy_ends_is_lost() -> None:
    """Even if the same text is in the same page again by then: what was read in between is not known."""
    plain = Plain(pages=2, slots=2)
    for _ in range(2):
        pages = plain.pool.take(2)
        plain.cache.insert(plain.text(1, 2), pages, 2 * SIZE)
        plain.pool.drop(pages)
        if not plain.memory.jobs:
            plain.tier.poll()
            assert [job.sources for job in plain.memory.jobs] == [pages]
            plain.cache.evict(2)
    plain.memory.finish_all()
    plain.memory.poll()
    assert plain.found(plain.text(1, 2)) == plain.tier.cached_pages == 0 and plain.tier.free == 2


def test_what_is_being_loaded_is_not_dropped() -> None:
    plain = Plain(pages=4, slots=2)
    plain.run(plain.text(1, 2))
    pages = plain.pool.take(2)
    names = plain.tier.find(plain.cache.names_after(plain.text(1, 2), ()))
    plain.tier.load(names, pages, lambda _: None)
    (load,) = plain.memory.jobs
    other = plain.pool.take(2)
    plain.cache.insert(plain.text(2, 2), other, 2 * SIZE)
    plain.pool.drop(other)
    plain.tier.poll()
    assert plain.memory.jobs == [load]
    plain.memory.finish(load)
    plain.pool.drop(pages)
    plain.run(plain.text(3, 2))
    assert (plain.found(plain.text(1, 2)), plain.found(plain.text(2, 2))) == (0, 2)


def test_a_tier_that_is_larger_than_the_pool_copies_what_falls_idle() -> None:
    plain = Plain(pages=12, slots=13)
    for number in range(2):
        pages = plain.pool.take(2)
        plain.cache.insert(plain.text(number, 2), pages, 2 * SIZE)
        plain.pool.drop(pages)
        plain.tier.poll()
        assert plain.pool.free >= 8 and plain.memory.jobs[-1].sources == pages
        plain.memory.finish_all()
        plain.tier.poll()
    assert plain.tier.cached_pages == 4 and not plain.memory.jobs


def test_on_a_crowded_pool_new_sequences_wait_for_copies_and_running_ones_do_not() -> None:
    """While one step runs, the next is composed: what has just ended is not evicted for it unread."""
    for runs in (False, True):
        plain = Plain(pages=4, slots=8)
        pages = plain.pool.take(4)
        plain.cache.insert(plain.text(1, 4), pages, 4 * SIZE)
        plain.pool.launched()
        plain.pool.drop(pages)
        plain.tier.poll()
        assert not plain.memory.jobs and plain.tier.busy, "a step in flight may write them"
        assert plain.cache.evict(4, spare=True) == 0
        plain.pool.landed()
        plain.tier.poll()
        assert sorted(plain.memory.jobs[0].sources) == sorted(pages)
        assert plain.cache.evict(4, spare=True) == 0 and plain.pool.free == 0
        if runs:
            assert plain.cache.evict(4) == 4
        plain.memory.finish_all()
        plain.tier.poll()
        assert not plain.tier.busy and not plain.cache.spared
        assert plain.cache.evict(4, spare=True) == (0 if runs else 4)
        assert plain.found(plain.text(1, 4)) == (0 if runs else 4)


def test_pages_are_copied_only_when_free_ones_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engine.kv.host_tier.AHEAD", 4)
    plain = Plain(pages=12, slots=12)
    for number in range(6):
        pages = plain.pool.take(2)
        plain.cache.insert(plain.text(number, 2), pages, 2 * SIZE)
        plain.pool.drop(pages)
        plain.tier.poll()
        copied = sum(len(job.sources) for job in plain.memory.jobs)
        assert copied == (4 if plain.pool.free < 4 else 0)
    (first, *_) = plain.memory.jobs
    assert sorted(first.sources) == [0, 1, 2, 3], "those that leave first"
