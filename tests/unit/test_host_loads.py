"""Sequences whose pages come back from the host: they wait beside the others, and leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from engine_rig import PAGE, Rig, request

from eyas.common.errors import TransferFailed
from eyas.engine.batch.sequence import Sequence, SequenceWork
from eyas.engine.ipc.messages import CancelGeneration
from eyas.engine.kv.host_tier import HostTier
from eyas.engine.scheduling import host_loads
from eyas.engine.scheduling.host_loads import LOAD_TIMEOUT_S, HostLoads
from tests.unit.host_rig import HandMemory

PAGES, SLOTS = 12, 32
LONG = tuple(range(40, 63))  # five pages and a part; an answer of four tokens completes the sixth


class Tiered(Rig):
    """With a tier: `LONG` was computed, has left the pool, and is on the host."""

    def __init__(self, *, rate: float = 1.0) -> None:
        super().__init__(pages=PAGES)
        self.memory = HandMemory(ready=SLOTS)
        self.tier = HostTier(self.pool, self.cache, self.memory)
        self.host = self.scheduler.host = HostLoads(self.tier, self.pool, self.cache, PAGE, rate)
        self.answer("first", LONG)
        for _ in range(2):
            self.look_after()
            self.memory.finish_all()
        self.cache.evict(PAGES)
        assert self.cache.cached_pages == 0 and self.tier.cached_pages >= 5

    def answer(self, id: str, prompt: tuple[int, ...]) -> None:
        """From its submission to its end."""
        self.submit(request(prompt, id=id, max_tokens=4))
        while id in self.requests.table:
            self.step()

    def step(self) -> list[SequenceWork]:
        works = self.scheduler.schedule()
        for work in works:
            seq = work.seq
            seq.kv_len = seq.draft_len = work.start + len(work.tokens)
            if work.sample:
                seq.output.append(1)
                if len(seq.output) >= seq.generation.request.params.max_tokens:
                    self.requests.end(seq)
        self.scheduler.preempted.clear()
        return works

    def look_after(self, later: float = 0.0) -> list[Sequence]:
        back = self.host.poll(time.monotonic() + later)
        for seq in back:
            self.scheduler.enqueue(seq)
        return back

    def all_accounted(self) -> bool:
        slots = [held.slot for held in self.tier._pages.values()]
        idle = not any(held.copies for held in self.tier._pages.values())
        used = self.pool.used == 0 and self.pool.free + self.cache.cached_pages == PAGES
        return used and idle and len({*slots, *self.tier._free}) == len(slots) + self.tier.free == SLOTS


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_loads, "LEAST_TOKENS", 2 * PAGE)


def test_a_prompt_waits_for_its_pages_and_others_go_on() -> None:
    rig = Tiered()
    rig.submit(request(LONG, id="again", max_tokens=4))
    rig.submit(request((1, 2, 3), id="other", max_tokens=4))
    assert [work.seq.generation.id for work in rig.step()] == ["other"]
    assert not rig.scheduler.waiting and rig.requests.waiting == 1, "it is not in the queue, and counts"
    rig.memory.finish_all()
    (seq,) = rig.look_after()
    works = {work.seq.generation.id: work for work in rig.step()}
    assert (works["again"].start, seq.generation.cached_tokens) == (20, 20)
    assert rig.host.counts.tokens == 20 and rig.scheduler.cached_tokens == 20
    while rig.requests.table:
        rig.step()
    assert rig.all_accounted()


def test_a_fetch_that_is_over_as_it_begins_holds_no_sequence_up() -> None:
    """As where another sequence brings the same pages, or all slots are in use."""
    rig, began = Tiered(), []

    def fetch(names: Iterator[bytes], deadline: float, then: Callable[[], None]) -> None:
        began.append(len(list(names)))
        then()

    rig.host.cold = SimpleNamespace(pays=lambda: True, fetch=fetch, poll=lambda: None, busy=False)  # type: ignore[assignment]
    rig.submit(request((*LONG[:8], *range(40, 52)), id="again", max_tokens=2))
    for _ in range(20):
        rig.step()
        rig.memory.finish_all()
        rig.look_after()
    assert began == [2] and "again" not in rig.requests.table and rig.all_accounted()


def _cancelled(rig: Tiered) -> None:
    rig.requests.cancel(CancelGeneration("again"))
    assert not rig.requests.table
    rig.memory.finish_all()
    assert rig.look_after() == []
    assert rig.cache.cached_pages == 5, "what was on its way comes into the cache"


def _failed(rig: Tiered) -> None:
    rig.memory.finish(rig.memory.jobs[0], TransferFailed("by chance"))
    assert len(rig.look_after()) == 1 and rig.cache.cached_pages == 0
    assert rig.step()[0].start == 0, "it is computed"


def _late(rig: Tiered) -> None:
    assert rig.look_after() == []
    assert len(rig.look_after(LOAD_TIMEOUT_S + 0.1)) == 1
    assert rig.step()[0].start == 0 and len(rig.memory.jobs) == 1
    rig.memory.finish_all()
    assert rig.look_after() == [], "it has gone on already"


@pytest.mark.parametrize("what", [_cancelled, _failed, _late])
def test_whatever_becomes_of_a_load_pages_and_slots_come_back(what: Callable[[Tiered], None]) -> None:
    rig = Tiered()
    rig.submit(request(LONG, id="again", max_tokens=4))
    assert rig.step() == [] and rig.memory.copying
    what(rig)
    while rig.requests.table:
        rig.step()
    rig.memory.finish_all()
    rig.look_after()
    rig.memory.finish_all()
    rig.look_after()
    assert rig.all_accounted()


def test_loads_have_room_for_their_sequences() -> None:
    """Else one takes the pages that the other waits for, and both are loaded for nothing."""
    rig = Tiered()
    rig.submit(request(LONG, id="again", max_tokens=4))
    rig.submit(request((*LONG[:20], 9, 9), id="twin", max_tokens=4))
    assert rig.step() == []
    (load,) = rig.memory.jobs
    assert len(load.sources) == 5 and len(rig.scheduler.waiting) == 1, (
        "five pages of twelve are left, not seven"
    )
    rig.memory.finish_all()
    rig.look_after()
    assert rig.step(), "the second finds in the cache what the first has loaded"
    while rig.requests.table:
        rig.step()
    assert rig.host.counts.tokens == 20 and rig.all_accounted()


def test_the_text_of_a_sequence_that_waits_for_room_is_looked_up_once() -> None:
    """Not once a loop: names of a long text take a millisecond."""
    rig, looks = Tiered(), []
    rig.submit(request(LONG, id="again", max_tokens=4))
    rig.submit(request((*LONG[:20], 9, 9), id="twin", max_tokens=4))
    rig.step()
    match = rig.cache.match
    rig.cache.match = lambda *text: looks.append(1) or match(*text)  # type: ignore[method-assign]
    for _ in range(9):
        assert rig.step() == [] and len(rig.scheduler.waiting) == 1
    assert not looks
    rig.memory.finish_all()
    rig.look_after()
    while rig.requests.table:
        rig.step()
    assert looks and rig.host.counts.tokens == 20 and rig.all_accounted()


@pytest.mark.parametrize(
    ("prompt", "rate", "copy_s", "loads"),
    [(LONG, 1.0, 0.0, True), (LONG[:7], 1.0, 0.0, False), (LONG, 1e6, 1.0, False), (LONG, 1.0, 1.0, True)],
    ids=["as a rule", "short", "slow copies", "slower prompts"],
)
def test_pages_are_loaded_if_that_is_faster(
    prompt: tuple[int, ...], rate: float, copy_s: float, loads: bool
) -> None:
    rig = Tiered(rate=rate)
    rig.memory.copy_s = copy_s  # for the five pages that went out
    rig.submit(request(prompt, id="again", max_tokens=4))
    works = rig.step()
    assert bool(rig.memory.jobs) is loads and bool(works) is not loads


def test_a_flush_waits_for_loads_and_forgets_the_host_s_pages() -> None:
    rig = Tiered()
    rig.submit(request(LONG, id="again", max_tokens=4))
    rig.step()
    rig.requests.cancel(CancelGeneration("again"))
    assert rig.scheduler.flush() is None, "its pages still come into the cache"
    rig.memory.finish_all()
    rig.look_after()
    assert rig.scheduler.flush() >= 10 and rig.tier.cached_pages == rig.cache.cached_pages == 0
    rig.look_after()
    assert rig.all_accounted()
    loaded = rig.tier.loaded
    rig.answer("once more", LONG)
    assert rig.tier.loaded == loaded and rig.requests.scheduler.cached_tokens == 0
