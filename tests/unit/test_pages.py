"""Pages and the steps that may write them: a copy gets none that a step in flight may still write."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from eyas.engine.kv.pages import PagePool

PAGES = 6


@dataclass(eq=False)
class Owner:
    """Who took pages, and whether steps write them: a sequence's they do, a copy's not."""

    pages: list[int]
    computes: bool


class Steps(RuleBasedStateMachine):
    """Owners come and go while up to two steps are in flight, each of which may write every owner's pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.owners: list[Owner] = []
        self.flights: list[set[int]] = []  # the pages that each may write, the oldest first
        self.copies: set[int] = set()  # the pages that are copied before the next step

    @property
    def written(self) -> set[int]:
        return set().union(self.copies, *self.flights)

    @rule(count=st.integers(1, 3))
    def a_sequence_takes(self, count: int) -> None:
        if count <= self.pool.free:
            self.owners.append(Owner(self.pool.take(count), computes=True))

    @rule(count=st.integers(1, 3))
    def a_copy_takes(self, count: int) -> None:
        if count <= self.pool.settled:
            pages = self.pool.take(count, settled=True)
            assert not self.written & set(pages), "a step in flight may still write there"
            self.owners.append(Owner(pages, computes=False))

    @rule()
    def a_fork_takes(self) -> None:
        """The device copies a page of another sequence for it, after the steps in flight."""
        leader = next((owner for owner in self.owners if owner.computes), None)
        if leader is not None and self.pool.free:
            self.owners.append(Owner(self.pool.take(1), computes=True))
            self.copies |= {leader.pages[0], *self.owners[-1].pages}
            self.pool.copied()

    @rule()
    def nothing_follows(self) -> None:
        """As a loop does that has nothing to launch: it waits for the copies."""
        if self.copies and not self.flights:
            self.copies = set()
            self.pool.launched()
            self.pool.landed()

    @rule(data=st.data())
    def somebody_goes(self, data: st.DataObject) -> None:
        if self.owners:
            owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
            self.pool.drop(owner.pages)

    @rule(data=st.data())
    def a_page_goes_by_way_of_the_cache(self, data: st.DataObject) -> None:
        """It is kept, and forgotten once it is idle."""
        if self.owners:
            owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
            self.pool.keep(owner.pages[0])
            self.pool.drop(owner.pages)
            if self.flights and data.draw(st.booleans()):
                self.landed()
            self.pool.forget(owner.pages[0])

    @rule()
    def launched(self) -> None:
        if len(self.flights) < 2:
            mine = {page for owner in self.owners if owner.computes for page in owner.pages}
            self.flights.append(mine | self.copies)
            self.copies = set()
            self.pool.launched()

    @rule()
    def landed(self) -> None:
        if self.flights:
            self.flights.pop(0)
            self.pool.landed()

    @invariant()
    def every_page_is_somewhere(self) -> None:
        held = [page for owner in self.owners for page in owner.pages]
        assert len(held) == len(set(held)) and len(held) + self.pool.free == PAGES
        if not self.flights and not self.copies:
            assert self.pool.settled == self.pool.free, "nothing is in flight, and pages are kept back"


def play(examples: int = 500) -> None:
    run_state_machine_as_test(
        Steps,
        settings=settings(max_examples=examples, stateful_step_count=25, derandomize=True, deadline=None),
    )


@pytest.mark.parametrize("examples", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_a_copy_writes_where_no_step_does(examples: int) -> None:
    play(examples)


@pytest.mark.slow
def test_freeing_at_once_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "_release", lambda pool, page: pool._settled.append(page))
    with pytest.raises(AssertionError, match="may still write there"):
        play()


@pytest.mark.slow
def test_freeing_when_any_step_has_landed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest, although a younger one may write the page too."""

    def landed(pool: PagePool) -> None:
        pool._landed = pool._launched
        pool._settled += pool._limbo
        pool._limbo.clear()

    monkeypatch.setattr(PagePool, "landed", landed)
    with pytest.raises(AssertionError, match="may still write there"):
        play()


def test_what_is_copied_between_two_steps_is_free_for_copies_after_the_second_one() -> None:
    pool = PagePool(4)
    pool.launched()
    pages = pool.take(2)
    pool.copied()
    pool.drop(pages)
    pool.landed()
    assert (pool.free, pool.settled) == (4, 2)
    pool.launched()
    assert (pool.free, pool.settled) == (4, 2)
    pool.landed()
    assert (pool.free, pool.settled) == (4, 4)


def test_a_sequence_gets_what_is_in_limbo_first() -> None:
    """So what no step writes is left for copies."""
    pool = PagePool(4)
    old = pool.take(2)
    pool.launched()
    pool.drop(old)
    assert (pool.free, pool.settled) == (4, 2)
    assert set(pool.take(2)) == set(old) and pool.settled == 2
