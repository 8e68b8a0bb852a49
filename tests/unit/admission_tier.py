"""One tier as a value: a real engine without a model, whose loop turns when it is told to.

Scheduler, prefix cache, leases, pulls, requests and rounds are as they are; pages hold nothing, and every
token is the same. It knows who may hold a page, and looks whenever one is written.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from engine_rig import HandCopier, hand_pulls

from eyas.common.config import EngineConfig
from eyas.common.types import KvKind
from eyas.engine.batch.sequence import Generation, Sequence, SequenceWork
from eyas.engine.batch.step_result import StepResult
from eyas.engine.ipc.messages import (
    Command,
    Event,
    ShutdownEngine,
)
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.leases import LeaseTable
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import CacheNode, PrefixCache
from eyas.engine.kv.stager import PageStager
from eyas.engine.loop.engine import Engine, EngineParts
from eyas.engine.loop.plain_runner import ComputedStep
from eyas.engine.loop.step_loop import StepClock
from eyas.engine.scheduling.fairness import CallShares
from eyas.engine.scheduling.limits import BatchLimits
from eyas.engine.scheduling.scheduler import Scheduler
from kv_transfer.copy_threads import CopyBell
from kv_transfer.layout import pages_for
from kv_transfer.owner import LeaseOwner
from kv_transfer.puller import PullState

PAGE, CHUNK, ROUND_ROWS, VOCAB = 2, 5, 1, 100
LEASE_S = 30.0
TOKEN = (VOCAB - 1,)


class StandStillCopier(HandCopier):
    """As an engine needs it: there is no thread to wait for."""

    brief = False

    def close(self, deadline: float) -> bool:
        return False


def _holds_nothing(seq: Any) -> bool:
    return False


class NoGrammars:
    """Of an engine whose requests have none; a world can be stored."""

    def awaited(self) -> bool:
        return False

    def take_failed(self) -> dict[Any, Any]:
        return {}

    def cut(self, seq: Any, tree: Any) -> Any:
        return tree

    def close(self) -> None:
        pass


class FakeModel:
    """Model, runner and pool in one. It computes no token, but looks at the pages that it would write."""

    vocab_size, eos_token_ids = VOCAB, ()
    experts, foreign = (), None  # none has experts

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    drafts = ahead = False

    def close(self) -> bool:
        return True

    def launch(self, works: list[SequenceWork]) -> ComputedStep:
        for work in works:
            rows = range(work.start, work.start + len(work.tokens))
            for page in {work.seq.pages[row // PAGE] for row in rows}:
                readers = self._tier.readers(page, but=work.seq)
                assert not readers, f"page {page} is written, and read by {readers}"
        return ComputedStep(works, [_landed(work) for work in works], 0.0)

    def copy_page(self, source: int, target: int) -> None:
        pass

    def wait(self) -> None:
        pass


def _standing() -> float:
    return 0.0


def _landed(work: SequenceWork) -> StepResult:
    if not work.sample:
        return StepResult(work)
    return StepResult(work, TOKEN, forks={choice: (*TOKEN, None) for choice in work.seq.forks})


def _leased(lease: Any) -> tuple[int, ...]:
    pages: tuple[int, ...] = lease.handle.shards[0].pages
    return pages


class NoThread:
    """In the place of an executor, whose queue cannot be stored: no world here changes weights or sleeps."""

    def shutdown(self, **options: bool) -> None:
        pass


class Tier:
    """An engine that runs one turn of its loop when told to, and the commands that wait for it."""

    def __init__(self, name: str, pages: int, max_running: int) -> None:
        self.inbox: list[Command] = []
        self._batch: list[Command] = []
        self._said: list[Event] = []
        pool, outbox, copier = PagePool(pages), EventOutbox(), StandStillCopier()
        self.pulls = hand_pulls(copier, PAGE, outbox)
        cache, limits = (
            PrefixCache(pool, PAGE, lookahead=0),
            BatchLimits(PAGE, max_running, CHUNK, ROUND_ROWS),
        )
        owner = LeaseOwner(name, 1, LEASE_S, itertools.count(1).__next__)
        self.leases = LeaseTable(owner, pool, PAGE, {KvKind.TARGET: "m"}, outbox)
        self.scheduler = Scheduler(pool, cache, limits, self.pulls, holds=_holds_nothing)
        model: Any = FakeModel(self)
        ready: Any = SimpleNamespace(context_length=64, draft_width=0, rates=None)
        self.copier = copier
        parts = EngineParts(
            config=EngineConfig(),
            model=model,
            runner=model,
            pools=(model,),
            scheduler=self.scheduler,
            drafter=None,
            pacing=None,
            leases=self.leases,
            stager=PageStager({}, self.leases.covers, outbox),
            pulls=self.pulls,
            draft_pulls=None,
            copiers=(copier,),  # type: ignore[arg-type]
            bell=CopyBell(),
            travels=True,
            memory={},
            outbox=outbox,
            grammars=NoGrammars(),  # type: ignore[arg-type]
            ready=ready,
            store=None,  # type: ignore[arg-type]
        )
        self.engine = Engine(parts, self)
        self.engine._loop._clock = StepClock(_standing)  # a world can be stored
        updates = self.engine._updates
        updates._thread = updates._reader = self.engine._control._thread = NoThread()  # type: ignore[assignment]
        updates._reading = nullcontext()  # type: ignore[assignment]
        self.gave_way = False  # somebody, to another call, so far
        self.scheduler._take_from_richer = self._take_from_richer  # type: ignore[method-assign]
        self.requests = self.engine._requests

    # --- the engine's link: one turn, then `ShutdownEngine` ---

    def recv(self, timeout_s: float, bells: tuple[int, ...] = ()) -> list[Command]:
        return [*self._batch, ShutdownEngine()]

    def send(self, events: list[Event]) -> None:
        self._said += events

    def turn(self, count: int) -> list[Event]:
        """One turn of the loop that finds the next `count` commands in its inbox; what it said."""
        self._batch, self.inbox = self.inbox[:count], self.inbox[count:]
        self.engine.run()
        self.engine._stopping = False
        said, self._said, self._batch = self._said, [], []
        return said

    def _take_from_richer(self, claimant: Generation, shares: CallShares, gain: int) -> bool:
        taken = Scheduler._take_from_richer(self.scheduler, claimant, shares, gain)
        self.gave_way = self.gave_way or taken
        return taken

    # --- who owns what ---

    def sequences(self) -> list[Sequence]:
        return [seq for generation in self.requests.table.values() for seq in generation.sequences]

    def loans(self) -> list[tuple[int, ...]]:
        loans = [active.pull._loan for active in self.pulls._active.values()]
        return [loan.pages for loan in loans if loan is not None]

    def readers(self, page: int, but: Sequence) -> list[str]:
        found = [f"request {s.generation.id}" for s in self.sequences() if s is not but and page in s.pages]
        found += ["a pull" for loan in self.loans() if page in loan]
        found += ["the cache"] if page in self.scheduler.cache._nodes else []
        return found

    def check(self) -> None:
        """Every claim on a page has one owner that is known."""
        leased = map(_leased, self.leases.owner._leases.values())
        held = [*self.loans(), *(seq.pages for seq in self.sequences()), *leased]
        claims = Counter(page for pages in held for page in pages)
        owners = map(self.scheduler.pool.owners, range(self.scheduler.pool.num_pages))
        assert list(owners) == [claims[page] for page in range(self.scheduler.pool.num_pages)]
        assert self.scheduler.pool.used == len(claims)
        assert len(self.scheduler.running) <= self.scheduler.limits.max_running

    def idle(self) -> bool:
        """Nothing is held but what the cache keeps."""
        scheduler = self.scheduler
        busy = [*self.requests.table, *scheduler.joining, *scheduler.running, *scheduler.waiting]
        return not (
            busy or scheduler.pool.used or self.pulls.active or self.leases.owner.active or self.inbox
        )

    def exhausted(self) -> bool:
        """Somebody waits for more pages than there are."""
        pool, cache = self.scheduler.pool, self.scheduler.cache
        room = pool.free + sum(not pool.owners(page) for page in cache._nodes)
        pulls = [a.pull for a in self.pulls._active.values()]
        wanted = [pull._page_count for pull in pulls if pull.state is PullState.WAITING]
        return any(
            pages > room for pages in wanted + [pages_for(len(s), PAGE) for s in self.scheduler.waiting]
        )

    def shape(self) -> Hashable:
        """All that the future depends on, pages and handles numbered in the order in which they are met."""
        page: dict[int, int] = {}

        def named(pages: Iterator[int] | list[int] | tuple[int, ...]) -> tuple[int, ...]:
            return tuple(page.setdefault(p, len(page)) for p in pages)

        def name(seq: Sequence) -> tuple[str, int]:
            return seq.generation.id, seq.choice

        scheduler, owner, cache = self.scheduler, self.leases.owner, self.scheduler.cache
        idle = [page for page in cache._idle if not scheduler.pool.owners(page)]
        order = {page: place for place, page in enumerate(idle)}
        return (
            [
                (g.id, g.attempt, g.attached, g.kind, [c.index for c in g.request.choices])
                for _, g in sorted(self.requests.table.items())
            ],
            [
                (name(s), len(s.output), s.kv_len, s.forks, s.keeps, named(s.pages))
                for s in sorted(self.sequences(), key=name)
            ],
            [name(s) for s in scheduler.running],
            [name(s) for s in scheduler.waiting],
            [name(s) for s in scheduler.joining],
            [
                (
                    a.owner.id,  # type: ignore[attr-defined]
                    a.pull.state,
                    a.pull._decided,
                    a.pull._readable,
                    a.pull._answer is not None,
                    a.pull._loan
                    and (named(a.pull._loan.pages), a.pull._loan.copied_to, len(a.pull._loan.running)),
                )
                for a in self.pulls._active.values()
            ],
            (len(self.copier.jobs), len(self.copier.results)),
            [
                (lease.is_ready, lease.readable, lease.attempt, lease.watch is None, named(_leased(lease)))
                for lease in owner._leases.values()
            ],
            [
                (tuple(_path(n)), order.get(n.page), *named([n.page]))
                for n in sorted(cache._nodes.values(), key=_path)
            ],
            scheduler.pool.free,
        )


def _path(node: CacheNode) -> list[tuple[int, ...]]:
    return [] if node.parent is None else [*_path(node.parent), node.key]
