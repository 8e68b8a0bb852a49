"""The engine's bookkeeping without its model: scheduler, cache, leases, pulls, requests on made-up pages."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from eyas.common.params import SamplingParams
from eyas.common.types import FirstToken, GenerationRequest, KvHandle, KvKind, RankPages, RequestChoice
from eyas.common.wire.pool import PoolGeometry, PoolInfo, RankPool
from eyas.engine.batch.sequence import Sequence
from eyas.engine.ipc.messages import (
    Event,
    OpenPull,
    PagesLost,
    PullDone,
    PullMet,
    PullReleased,
    RequestFailed,
    RequestRejected,
    SubmitGeneration,
)
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.front_wire import FrontWire
from eyas.engine.kv.leases import LeaseTable
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.kv.pulls import PullManager
from eyas.engine.kv.states import PagesAndStates, StateSlots
from eyas.engine.scheduling.admission import AdmissionLimits
from eyas.engine.scheduling.limits import BatchLimits
from eyas.engine.scheduling.requests import RequestTable
from eyas.engine.scheduling.scheduler import Scheduler
from eyas.engine.scheduling.turns import StepRoom
from kv_transfer.backends.base import CopyJob, CopyResult, PeerSource
from kv_transfer.layout import RankPools
from kv_transfer.owner import LeaseOwner
from kv_transfer.peers import KvPeers, PeerPages, PeerRoute, PeerRoutes

PAGE = 4
VOCAB = 100
STATE_PAGES = 3
GEOMETRY = PoolGeometry(pages=64, page_size=PAGE, layers=1, kv_heads=1, head_dim=4, dtype="float32")
POOL = PoolInfo(7, "m", GEOMETRY, (RankPool(0, 5, {"grpc": {}}),))  # that `handle` is of


@dataclass
class HandCopier:
    """Copies stop when the test says so."""

    jobs: list[CopyJob] = field(default_factory=list)
    results: list[CopyResult] = field(default_factory=list)

    def submit(self, route: PeerRoute, job: CopyJob) -> None:
        self.jobs.append(job)

    def cancel(self, pull: int) -> None:
        """They run on until the test says otherwise."""

    def finish(self) -> None:
        self.results += [CopyResult(job, "hand", len(job.dst_pages), 0.0, None) for job in self.jobs]
        self.jobs.clear()

    def finished(self) -> list[CopyResult]:
        results, self.results = self.results, []
        return results


class KnownRoutes(PeerRoutes):
    """Every way is proven."""

    def known(self, pages: PeerPages) -> PeerRoute:
        return PeerRoute(backend=None, source=PeerSource())  # type: ignore[arg-type]


class MetPulls(PullManager):
    """The front has met every owner before it tells anything else of it."""

    def receive(self, command: Any) -> None:
        active = self._active.get(command.pull)
        if active is not None and not active.approaches:
            super().receive(PullMet(command.pull, POOL))
        super().receive(command)


def hand_pulls(copier: HandCopier, page_size: int, outbox: EventOutbox, first: int = 1) -> PullManager:
    """`first`: the number of its first pull."""
    routes, wire, numbers = (
        KnownRoutes({}, "auto", RankPools(GEOMETRY)),
        FrontWire(outbox),
        itertools.count(first),
    )
    return MetPulls(copier, routes, wire, page_size, outbox, numbers, KvPeers(""))  # type: ignore[arg-type]


class Rig:
    """Everything around `RequestTable`; `joined` lists the sequences that started from pulled pages.
    `states`: slots of states.
    """

    def __init__(
        self,
        pages: int = 64,
        *,
        lookahead: int = 0,
        max_running: int = 8,
        round_rows: int = 2,
        room: StepRoom | None = None,
        states: int = 0,
    ) -> None:
        slots = StateSlots(states) if states else None
        self.pool = PagePool(pages) if slots is None else PagesAndStates(pages, slots, STATE_PAGES)
        self.cache = PrefixCache(self.pool, PAGE, lookahead=lookahead, states=slots)
        self.outbox = EventOutbox()
        self.copier = HandCopier()
        self.pulls = self._pulls()
        limits = BatchLimits(PAGE, max_running, 16, round_rows, room=room)
        owner = LeaseOwner("here", 1, 30.0, itertools.count(1).__next__)
        self.leases = LeaseTable(owner, self.pool, PAGE, {KvKind.TARGET: "m"}, self.outbox)
        self.scheduler = Scheduler(self.pool, self.cache, limits, self.pulls)
        self.joined: list[Sequence] = []
        self.requests = RequestTable(
            scheduler=self.scheduler,
            leases=self.leases,
            pulls=self.pulls,
            draft_kv=None,
            outbox=self.outbox,
            admission=AdmissionLimits(64, VOCAB, max_waiting=8),
            joined=self._joined,
            left=lambda seq: None,
            copy_page=lambda source, target: None,
        )
        self.pulls.destination = self.requests

    def _pulls(self) -> PullManager:
        return hand_pulls(self.copier, PAGE, self.outbox)

    def _joined(self, seq: Sequence, feature: bytes) -> None:
        self.joined.append(seq)

    def submit(self, made: GenerationRequest, *, attach: bool = False) -> None:
        self.requests.submit(SubmitGeneration(made, 1, attach))

    def said(self, kind: type) -> list:
        """Events of one kind since the last call; the others are dropped."""
        events: list[Event] = self.outbox.take()
        return [event for event in events if isinstance(event, kind)]

    def refusals(self) -> list[str]:
        return [
            e.failure.message for e in self.outbox.take() if isinstance(e, (RequestRejected, RequestFailed))
        ]

    def arrive(self, pull: OpenPull, *first: FirstToken) -> None:
        """The owner finishes, the copies stop, the owner confirms."""
        self.pulls.receive(PullDone(pull.pull, first))
        self.poll()
        self.copier.finish()
        self.poll()
        self.pulls.receive(PullReleased(pull.pull, True))

    def poll(self) -> None:
        self.requests.remember()
        self.pulls.poll(time.monotonic())

    def lost(self) -> list[int]:
        return [event.attempt for event in self.said(PagesLost)]

    def held(self) -> int:
        """Pages, each as often as it has owners."""
        return sum(map(self.pool.owners, range(self.pool.num_pages)))


def request(
    prompt: int | tuple[int, ...], *choices: RequestChoice, id: str = "a", **params: int
) -> GenerationRequest:
    ids = tuple(range(prompt)) if isinstance(prompt, int) else prompt
    wanted = SamplingParams(**({"max_tokens": 8} | params))  # type: ignore[arg-type]
    return GenerationRequest(id, ids, wanted, choices or (RequestChoice(0),))


def handle(rows: int, *, id: int = 1, group: KvKind = KvKind.TARGET, shards: int = 1) -> KvHandle:
    shard = RankPages(0, tuple(range(-(-rows // PAGE))))
    return KvHandle("there", 7, 0, id, group, "m", rows, (shard,) * shards)
