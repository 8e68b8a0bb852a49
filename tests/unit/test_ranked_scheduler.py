"""Several schedulers as one: where requests go, whose pages they take, and that all come back."""

from __future__ import annotations

import random

import pytest

from eyas.common.page_names import SHORT_BYTES
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.scheduling.limits import BatchLimits
from eyas.engine.scheduling.placement import SLACK, RankOffer, choose
from eyas.engine.scheduling.ranked import DataParallelScheduler, RankView
from eyas.engine.scheduling.scheduler import Scheduler

PAGE, PAGES = 4, 12


class Elsewhere:
    """Prompts that come from other workers: those of `given` have pages."""

    def __init__(self) -> None:
        self.given: list[Generation] = []

    def waiting(self) -> list[Generation]:
        return []

    def coming(self) -> list[Generation]:
        return self.given

    def preempt(self, among) -> bool:
        return any(map(among, self.given))


def _ranked(ranks: int = 2, running: int = 3) -> DataParallelScheduler:
    limits, elsewhere = BatchLimits(PAGE, running, 16, 1), Elsewhere()
    schedulers = []
    for rank in range(ranks):
        pages = PagePool(PAGES, PAGES * rank)
        cache = PrefixCache(pages, PAGE, lookahead=0)
        schedulers.append(Scheduler(pages, cache, limits, RankView(elsewhere, rank)))
    return DataParallelScheduler(schedulers)


def _sequence(uid: int, prompt: tuple[int, ...], forks: int = 0, caller: str = "") -> Sequence:
    choices = tuple(RequestChoice(i) for i in range(1 + forks))
    request = GenerationRequest(f"r{uid}", prompt, SamplingParams(max_tokens=50), choices, caller=caller)
    generation = Generation(request, 1, GenerationKind.LOCAL, float(uid), 1e9)
    seq = Sequence(uid, generation, 0, prompt, [], forks=tuple(range(1, 1 + forks)))
    generation.sequences.append(seq)
    return seq


def _run(scheduler: DataParallelScheduler, works: list[SequenceWork]) -> None:
    """A step that gives every sequence the token 1."""
    scheduler.pool.launched()
    for work in works:
        work.seq.kv_len = work.seq.draft_len = work.start + len(work.tokens)
        if work.sample:
            work.seq.output.append(1)
    scheduler.pool.landed()
    scheduler.preempted.clear()


# --- where a request goes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        ([RankOffer(0, 0, 9), RankOffer(0, 0, 9)], 0),
        ([RankOffer(0, 2, 9), RankOffer(0, 1, 1)], 1),  # fewer sequences, whatever the room
        ([RankOffer(0, 1, 3), RankOffer(0, 1, 4)], 1),  # then more room
        ([RankOffer(0, 0, 9), RankOffer(2, SLACK, 0)], 1),  # it has the prompt
        ([RankOffer(0, 0, 9), RankOffer(2, SLACK + 1, 0)], 0),  # and too much to do
        ([RankOffer(1, 3, 9), RankOffer(2, 3, 9), RankOffer(2, 2, 9)], 2),
    ],
)
def test_a_request_goes_where_most_is_cached_and_little_waits(places: list[RankOffer], wanted: int) -> None:
    assert choose(places) == wanted


def test_requests_spread_and_stay() -> None:
    scheduler = _ranked()
    sequences = [_sequence(i, tuple(range(10 * i, 10 * i + 5))) for i in range(6)]
    for seq in sequences:
        scheduler.enqueue(seq)
    works = scheduler.schedule()
    assert [seq.generation.rank for seq in sequences] == [0, 1] * 3
    assert [scheduler.pool.rank_of(work.seq.pages[0]) for work in works] == [0, 0, 0, 1, 1, 1], "rank by rank"
    assert len(scheduler.running) == scheduler.slots == 6


def test_what_waits_goes_to_a_rank_that_is_free() -> None:
    """Short requests end on one rank, and those that wait behind long ones on the other come over."""
    scheduler = _ranked(running=2)
    sequences = [_sequence(i, (i, i)) for i in range(8)]
    for seq in sequences:
        scheduler.enqueue(seq)
    _run(scheduler, scheduler.schedule())
    assert [seq.generation.rank for seq in sequences] == [0, 1] * 4
    for seq in sequences[1::2]:  # all of rank 1
        scheduler.remove(seq)
    scheduler.schedule()
    moved = [seq for seq in sequences[::2] if seq.generation.rank == 1]
    assert moved == [sequences[4]], "the next in turn, one with each step"
    assert moved[0] in [work.seq for work in scheduler.schedule()]


def test_what_has_begun_stays() -> None:
    """A preempted sequence's pages are in its own rank's cache."""
    scheduler = _ranked(running=1)
    first, begun = _sequence(0, (1, 2)), _sequence(1, (3, 4))
    begun.generation.rank, begun.generation.began = 0, 1.0
    scheduler.enqueue(first)
    _run(scheduler, scheduler.schedule())
    scheduler.enqueue(begun)
    for _ in range(3):
        _run(scheduler, scheduler.schedule())
    assert scheduler.waiting == [begun] and begun.generation.rank == 0


def test_turns_count_what_all_ranks_have() -> None:
    """Of two prompts that are to be pulled, the one whose caller has less on all ranks together is first."""
    scheduler = _ranked()
    callers = ["busy", "busy", "calm", "busy", "calm"]
    busy = [_sequence(uid, (uid, uid), caller=caller) for uid, caller in enumerate(callers)]
    for seq in busy[:3]:
        scheduler.enqueue(seq)
    scheduler.schedule()
    older, younger = (seq.generation for seq in busy[3:])
    assert scheduler.first([older, younger]) is younger


def test_a_cached_prompt_draws_its_continuation() -> None:
    scheduler = _ranked()
    first, other = _sequence(0, tuple(range(9))), _sequence(1, tuple(range(40, 49)))
    for seq in (first, other):
        scheduler.enqueue(seq)
    _run(scheduler, scheduler.schedule())
    cached = other.pages[:2]
    for seq in (first, other):
        scheduler.remove(seq)
    again = _sequence(2, (*range(40, 48), 7, 7))
    scheduler.enqueue(again)
    scheduler.schedule()
    assert again.generation.rank == other.generation.rank == 1
    assert again.pages[:2] == cached
    assert scheduler.cached_tokens == 8


def test_forks_take_pages_of_their_prompts_rank() -> None:
    scheduler = _ranked()
    scheduler.enqueue(_sequence(0, (1, 2, 3)))
    leader = _sequence(1, tuple(range(20, 30)), forks=1)
    scheduler.enqueue(leader)
    _run(scheduler, scheduler.schedule())
    follower = Sequence(9, leader.generation, 1, leader.prompt, [1])
    (copy,) = scheduler.fork(leader, follower) or ()
    assert {scheduler.pool.rank_of(page) for page in (*copy, *follower.pages)} == {1}


# --- pages ---------------------------------------------------------------------------------------------


def test_whatever_happens_pages_are_owned_once_and_all_come_back() -> None:
    """Arrivals, steps, ends and cancellations by chance; little room, so that ranks preempt."""
    rng, scheduler = random.Random(4), _ranked(ranks=3)
    alive: list[Sequence] = []
    preempted = 0
    for uid in range(400):
        if len(alive) < 12:
            seq = _sequence(uid, tuple(rng.randrange(3) for _ in range(rng.randrange(1, 14))))
            alive.append(seq)
            scheduler.enqueue(seq)
        works = scheduler.schedule()
        preempted += len(scheduler.preempted)
        for work in works:
            ranks = {scheduler.pool.rank_of(page) for page in work.seq.pages}
            assert ranks == {work.seq.generation.rank}
        ranks = [work.seq.generation.rank for work in works]
        assert ranks == sorted(ranks), "a step is composed rank by rank"
        _run(scheduler, works)
        for seq in [s for s in alive if len(s.output) > 20 or rng.random() < 0.05]:
            alive.remove(seq)
            scheduler.remove(seq)
    assert preempted > 0 and scheduler.preemptions == preempted
    for seq in alive:
        scheduler.remove(seq)
    assert scheduler.pool.used == 0 and not scheduler.running and not scheduler.waiting


def test_what_another_rank_takes_runs_at_once_where_nothing_else_does() -> None:
    """The rank that has its prompt has no room, and no step follows that would look again."""
    scheduler = _ranked()
    first = _sequence(0, tuple(range(9)))
    scheduler.enqueue(first)
    _run(scheduler, scheduler.schedule())
    scheduler.remove(first)
    full = scheduler._ranks[0].pool
    full.take(full.free)  # they are on loan, say
    second = _sequence(1, (*range(9), 50))
    scheduler.enqueue(second)
    assert second.generation.rank == 0
    assert [work.seq for work in scheduler.schedule()] == [second] and second.generation.rank == 1


def test_pages_are_shared_and_dropped_where_they_are() -> None:
    """As leases do, which know no ranks."""
    scheduler = _ranked()
    sequences = [_sequence(i, tuple(range(10 * i, 10 * i + 5))) for i in range(2)]
    for seq in sequences:
        scheduler.enqueue(seq)
    _run(scheduler, scheduler.schedule())
    pages = [page for seq in sequences for page in seq.pages]
    scheduler.pool.share(pages)
    for seq in sequences:
        scheduler.remove(seq)
    assert scheduler.pool.used == len(pages)
    scheduler.pool.drop(pages)
    assert scheduler.pool.used == 0


def test_a_rank_takes_pages_back_from_its_own_pulls_alone() -> None:
    elsewhere = Elsewhere()
    mine, theirs = (_sequence(uid, (1,)).generation for uid in range(2))
    mine.rank, theirs.rank = 0, 1
    elsewhere.given = [theirs]
    here = RankView(elsewhere, 0)
    assert not here.preempt() and list(here.coming()) == []
    elsewhere.given.append(mine)
    assert here.preempt() and list(here.coming()) == [mine]


def test_news_of_all_ranks_are_told() -> None:
    scheduler = _ranked()
    for uid in range(2):
        seq = _sequence(uid, tuple(range(10 * uid, 10 * uid + 9)))
        scheduler.enqueue(seq)
        _run(scheduler, scheduler.schedule())
        scheduler.remove(seq)
    came, left = scheduler.cache.take_changes(100)
    assert len(came) == 4 * SHORT_BYTES and not left, "two pages of each rank"


def test_all_ranks_forget_or_none() -> None:
    scheduler = _ranked()
    first, second = (_sequence(i, tuple(range(20 * i, 20 * i + 9))) for i in range(2))
    for seq in (first, second):
        scheduler.enqueue(seq)
    _run(scheduler, scheduler.schedule())
    scheduler.remove(first)
    assert first.generation.rank != second.generation.rank
    assert scheduler.flush() is None, "the other rank runs something"
    scheduler.remove(second)
    assert scheduler.flush() == 4 and scheduler.flush() == 0
    assert all(rank.cache.cached_pages == 0 and rank.pool.free == PAGES for rank in scheduler._ranks)
