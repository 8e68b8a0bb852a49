"""Scheduler, prefix cache and page pool: whatever happens, pages are owned once and all come back."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import msgspec
import pytest
from engine_rig import PAGE, Rig, handle, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eyas.common import prompt_room
from eyas.common.types import FirstToken, RequestChoice
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.ipc.messages import AttachKv, CancelGeneration, OpenPull, PullReady
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.scheduling import scheduler


def _apply(rig: Rig, works: list[SequenceWork], token: int = 1) -> None:
    """What the engine does with a step's outputs, as far as page accounting goes."""
    for work in works:
        seq = work.seq
        seq.kv_len = work.start + len(work.tokens)
        seq.draft_len = seq.kv_len if work.sample else seq.kv_len - 1
        if not work.sample:
            seq.draft_len = seq.kv_len
            continue
        seq.output.append(token)
        if seq.forks:
            rig.requests.cancel(CancelGeneration(seq.generation.id))
        elif len(seq.output) >= seq.generation.request.params.max_tokens:
            rig.requests.end(seq)
    rig.scheduler.preempted.clear()


def test_a_starved_sequence_gets_the_pages_that_a_pull_gave_back() -> None:
    """The pull waits in the queue again, but must not take its old pages before the sequence did."""
    rig = Rig(pages=10)
    rig.submit(request(4, max_tokens=24, id="old"))
    _apply(rig, rig.scheduler.schedule())
    rig.submit(request(tuple(range(50, 78)), max_tokens=1, id="new"), attach=True)
    rig.requests.attach(AttachKv("new", 1, (handle(28),)))
    rig.poll()
    assert rig.pool.free == 1, "the pull took the rest"
    rig.pulls.receive(PullReady(rig.said(OpenPull)[0].pull, 12))  # copies run into three of its pages
    tokens = 0
    for _ in range(40):
        works = rig.scheduler.schedule()
        tokens += len(works)
        _apply(rig, works)
        rig.poll()
        rig.copier.finish()
    assert tokens == 23, "the running sequence should have ended by now"
    assert rig.scheduler.preemptions == 0, "a pull goes first"


def test_choices_keep_their_slots_while_their_prompt_is_computed() -> None:
    """Else others of their call sit there, and the prompt is computed again for each choice."""
    rig = Rig(pages=40, max_running=4)
    for id, n in (("many", 3), ("one", 1), ("two", 1)):
        made = request(10, *map(RequestChoice, range(n)), id=id)
        rig.submit(msgspec.structs.replace(made, call="all"))
    works = rig.scheduler.schedule()
    assert [work.seq.generation.request.id for work in works] == ["many", "one"]
    (waiting,) = rig.scheduler.waiting
    rig.scheduler.waiting.remove(waiting)
    rig.scheduler.joining.append(waiting)
    assert rig.scheduler.join() is None


def test_a_preempted_sequence_computes_everything_again() -> None:
    rig = Rig(pages=9)
    for id in "ab":
        rig.submit(request(tuple(ord(id) - 90 + i for i in range(6)), max_tokens=16, id=id))
    for step in range(60):
        _apply(rig, rig.scheduler.schedule(), token=step)
    assert rig.scheduler.preemptions > 0
    assert not rig.requests.table and rig.held() == 0


@pytest.mark.parametrize("rows", [1, PAGE, PAGE + 1, 2 * PAGE])
def test_a_fully_cached_prompt_still_computes_its_last_row(rows: int) -> None:
    rig = Rig()
    for id in "abc":
        rig.submit(request(rows, max_tokens=1, id=id))
        (work,) = rig.scheduler.schedule()
        assert work.sample and work.tokens and work.start + len(work.tokens) == rows
        assert work.start == (0 if id == "a" else (rows - 1) // PAGE * PAGE)
        _apply(rig, [work])


@pytest.mark.parametrize(("waiting", "expected"), [(3, 4), (12, 4), (24, 4), (25, 9)])
def test_prompts_beside_rounds_are_cut_small_until_many_wait(waiting: int, expected: int) -> None:
    """Many: more than four of the largest steps compute."""
    rig = Rig(max_running=4)
    rig.scheduler.tables.limits = replace(
        rig.scheduler.limits, chunk_tokens=6, mixed_prefill_budget=lambda _, many: 9 if many else 4
    )
    rig.submit(request(2, max_tokens=9, id="running"))
    _apply(rig, rig.scheduler.schedule())
    rig.submit(request(tuple(range(20, 21 + waiting)), id="new"))  # whose last token is a row like a round's
    rounds, chunk = rig.scheduler.schedule()
    assert (rounds.round, chunk.round) == (True, False)
    assert len(chunk.tokens) == expected


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        pytest.param([20], [3], id="long"),
        pytest.param([12], [8], id="not long"),
        pytest.param([20, 18], [7], id="two"),
        pytest.param([18, 16, 4], [6, 2], id="two, and a short one behind"),
        pytest.param([20, 5], [3, 5], id="a short one behind"),
        pytest.param([40], [9], id="many tokens"),
    ],
)
def test_a_long_prompt_leaves_room_beside_rounds(
    prompts: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_room, "LONG_PROMPT", 14)
    rig = Rig(max_running=8)
    rig.scheduler.tables.limits = replace(
        rig.scheduler.limits,
        chunk_tokens=9,
        mixed_prefill_budget=lambda _, many: 9 if many else 8,
        long_prompt_rows=lambda rounds, ahead: 2 + rounds + ahead // 4,
    )
    rig.submit(request(2, max_tokens=9, id="running"))
    _apply(rig, rig.scheduler.schedule())
    for number, count in enumerate(prompts):
        rig.submit(request(tuple(range(30 * number + 20, 30 * number + 20 + count)), id=str(number)))
    rounds, *chunks = rig.scheduler.schedule()
    assert rounds.round and [len(chunk.tokens) for chunk in chunks] == expected


def _launch(rig: Rig) -> list[SequenceWork]:
    """Composes a step and launches it: its tokens are not known yet."""
    works = rig.scheduler.schedule()
    for work in works:
        work.seq.grow(1 if work.round else len(work.tokens), drafted=False)
        work.seq.in_flight += work.sample
    return works


def _land(rig: Rig, works: list[SequenceWork]) -> None:
    """Its tokens come, and prompts that ended are cached."""
    for work in works:
        work.seq.in_flight -= work.sample
        if work.sample:
            work.seq.output.append(1)
        if work.sample and not work.round:
            rig.scheduler.remember(work.seq)


def _first_rows(rig: Rig, prompts: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """(step, row) with which each of these prompts begins, beside a stream, in steps that run ahead."""
    rig.submit(request((1, 2), max_tokens=64, id="stream"))
    _land(rig, _launch(rig))
    for id, prompt in prompts.items():
        params = {"prompt_logprobs": 0} if id == "scored" else {}
        rig.submit(request(prompt, max_tokens=9, id=id, **params))
    began: dict[str, tuple[int, int]] = {}
    flight = _launch(rig)
    for step in range(40):
        for work in flight:
            began.setdefault(work.seq.generation.request.id, (step, work.start))
        following = _launch(rig)
        _land(rig, flight)
        flight = following
    return began


@pytest.mark.parametrize("budget", [8, 2], ids=["rows for both", "rows for one"])
def test_a_prompt_waits_for_the_pages_of_one_that_begins_like_it(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others pass it. Those that begin like another for less than a long prompt do not wait, nor do those
    that are scored, which take nothing from the cache.
    """
    for module in (scheduler, prompt_room):
        monkeypatch.setattr(module, "LONG_PROMPT", 14)
    rig, shared = Rig(pages=100, max_running=8), tuple(range(20, 36))
    rig.scheduler.tables.limits = replace(
        rig.scheduler.limits,
        mixed_prefill_budget=lambda *_: 8,
        long_prompt_rows=lambda *_: budget,
    )
    prompts = {"first": (*shared, 3, 4), "same": (*shared, 5, 6), "short": (7, 8, 9)}
    prompts |= {"other": (*shared[:13], *range(50, 55)), "scored": (*shared, 5, 7)}
    began = _first_rows(rig, prompts)
    assert began["first"][1] == 0 and began["same"][1] == 16, "its first four pages were cached"
    assert began["same"][0] > max(began[id][0] for id in ("short", "other", "scored"))
    assert began["other"][1] == began["scored"][1] == 0


def test_pages_come_from_elsewhere_while_a_prompt_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no pages yet, so those of a later request are not kept back for it."""
    monkeypatch.setattr(scheduler, "LONG_PROMPT", 14)
    rig, shared = Rig(pages=100), tuple(range(20, 36))
    rig.submit(request((*shared, 3, 4), id="first"))
    _launch(rig)
    rig.submit(request((*shared, 5, 6), id="same"))
    rig.submit(request((7, 8, 9), id="pulled"), attach=True)
    _launch(rig)
    assert [seq.generation.request.id for seq in rig.scheduler.waiting] == ["same"]
    pulled = rig.requests.table["pulled"]
    assert rig.scheduler.lend(pulled, 3) is not None


def test_a_prompt_does_not_wait_for_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "LONG_PROMPT", 14)
    rig, shared = Rig(pages=100, max_running=8), tuple(range(20, 36))
    rig.submit(request(shared, max_tokens=1, id="before"))
    _apply(rig, rig.scheduler.schedule())
    began = _first_rows(rig, {"one": (*shared, *range(60, 76)), "two": (*shared, 5, 6)})
    assert began["one"][1] == began["two"][1] > 0 and began["two"][0] - began["one"][0] <= 1


def test_long_prompts_have_all_rows_where_nothing_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_room, "LONG_PROMPT", 14)
    rig = Rig(max_running=4)
    rig.scheduler.tables.limits = replace(
        rig.scheduler.limits, chunk_tokens=9, mixed_prefill_budget=lambda *_: 8, long_prompt_rows=lambda *_: 3
    )
    rig.submit(request(tuple(range(20, 40)), id="long"))
    assert [len(work.tokens) for work in rig.scheduler.schedule()] == [9]


def test_a_prompt_alone_has_more_rows_than_several_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_room, "MOST_TOGETHER", 6)

    def rows(*prompts: int) -> list[list[int]]:
        """Of two steps."""
        rig, steps = Rig(max_running=4), []
        rig.scheduler.tables.limits = replace(rig.scheduler.limits, chunk_tokens=12)
        for number, count in enumerate(prompts):
            rig.submit(request(tuple(range(40 * number, 40 * number + count)), id=str(number)))
        for _ in range(2):
            steps.append(rig.scheduler.schedule())
            _apply(rig, steps[-1])
        return [[len(work.tokens) for work in step if not work.round] for step in steps]

    assert rows(31) == [[12], [12]]
    assert rows(31, 5) == [[12], [12]], "the first of them has more than all together may"
    assert rows(4, 5) == [[4, 2], [3]]


def test_a_page_waits_for_its_eviction_once() -> None:
    """However often it is used: a cache that never fills up keeps nothing for each request."""
    pool = PagePool(2)
    cache = PrefixCache(pool, PAGE, lookahead=0)
    for first in range(2):
        (page,) = pool.take(1)
        for _ in range(5):
            cache.insert([first] * PAGE, [page], PAGE)
        pool.drop([page])
    assert len(cache._idle) == 2
    pool.drop(cache.match([0] * PAGE + [9]))
    assert cache.evict(1) == 1
    assert cache.match([1] * PAGE + [9]) == [], "the page of 0 was used last"
    assert cache.evict(2) == 1 and pool.free == 2


class _World(RuleBasedStateMachine):
    """Requests of every kind come, run, are pulled, cancelled and preempted in a pool that is too small."""

    lookahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(pages=14, lookahead=self.lookahead, max_running=3)
        self.numbers = 0
        self.tokens = random.Random(1)
        self.opened: dict[str, OpenPull] = {}

    def _prompt(self, rows: int, family: int) -> tuple[int, ...]:
        return tuple((family * 7 + i) % 50 for i in range(rows))

    @rule(rows=st.integers(1, 20), family=st.integers(0, 2), most=st.integers(1, 30), n=st.integers(1, 2))
    def compute_here(self, rows: int, family: int, most: int, n: int) -> None:
        self.numbers += 1
        choices = tuple(RequestChoice(i) for i in range(n))
        self.rig.submit(request(self._prompt(rows, family), *choices, id=f"l{self.numbers}", max_tokens=most))

    @rule(rows=st.integers(1, 20), family=st.integers(0, 2), most=st.integers(1, 30), n=st.integers(1, 3))
    def pull(self, rows: int, family: int, most: int, n: int) -> None:
        self.numbers += 1
        id = f"p{self.numbers}"
        choices = tuple(RequestChoice(i) for i in range(n))
        self.rig.submit(request(self._prompt(rows, family), *choices, id=id, max_tokens=most), attach=True)
        self.rig.said(OpenPull)
        self.rig.requests.attach(AttachKv(id, 1, (handle(rows, id=self.numbers),)))
        for event in self.rig.said(OpenPull):
            self.opened[id] = event

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), whole=st.booleans())
    def arrives(self, data: st.DataObject, whole: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.opened)))
        if whole:
            self.rig.arrive(self.opened.pop(id), *(FirstToken(c, 60) for c in range(3)))
        else:
            self.rig.pulls.receive(PullReady(self.opened[id].pull, 2 * PAGE))

    @rule(count=st.integers(1, 10))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()
            self.every_claim_has_an_owner()

    def _step(self) -> None:
        works = self.rig.scheduler.schedule()
        written = [page for w in works for page in self._pages(w)]
        assert len(written) == len(set(written)), "two sequences write one page"
        _apply(self.rig, works, self.tokens.randrange(50))
        self.rig.poll()
        self.rig.requests.join(time.monotonic())

    def _pages(self, work: SequenceWork) -> set[int]:
        rows = range(work.start, work.start + len(work.tokens))
        pages = {work.seq.pages[row // PAGE] for row in rows}
        assert all(self.rig.pool.owners(page) == 1 for page in pages), "a shared page is written"
        assert not pages & self.rig.cache._nodes.keys(), "a cached page is written"
        return pages

    @rule()
    def copies_stop(self) -> None:
        self.rig.copier.finish()
        self.rig.poll()

    @precondition(lambda self: self.rig.requests.table)
    @rule(data=st.data(), choice=st.sampled_from([None, 0, 1]))
    def cancel(self, data: st.DataObject, choice: int | None) -> None:
        id = data.draw(st.sampled_from(sorted(self.rig.requests.table)))
        self.rig.requests.cancel(CancelGeneration(id, choice))

    @invariant()
    def every_claim_has_an_owner(self) -> None:
        rig = self.rig
        lent = [a.pages for a in rig.pulls._active.values() if a.pull._loan is not None]
        held = [seq.pages for g in rig.requests.table.values() for seq in g.sequences]
        assert rig.held() == sum(map(len, [*lent, *held]))
        assert rig.pool.used == len({page for pages in [*lent, *held] for page in pages})
        for seq in rig.scheduler.running:
            assert len(seq.pages) * PAGE >= seq.kv_len
        assert len(rig.scheduler.running) <= rig.scheduler.limits.max_running

    def teardown(self) -> None:
        for id in list(self.rig.requests.table):
            self.rig.requests.cancel(CancelGeneration(id))
        self.copies_stop()
        assert self.rig.held() == 0 and self.rig.pulls.active == 0
        assert not self.rig.scheduler.running and not self.rig.scheduler.waiting
        self.rig.cache.evict(self.rig.cache.cached_pages)
        assert self.rig.cache.cached_pages == 0 and self.rig.pool.free == self.rig.pool.num_pages


class _WorldWithDrafts(_World):
    lookahead = 1


TestPages = _World.TestCase
TestPagesWithDraftKv = _WorldWithDrafts.TestCase
TestPages.settings = TestPagesWithDraftKv.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None
)
