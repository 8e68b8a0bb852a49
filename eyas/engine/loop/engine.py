"""The engine of a target model: one loop that receives commands, runs steps and sends events.

`StepLoop` orders the parts of a step, and a `StepRunner` computes it. The engine owns the slots, pages,
leases and requests.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from eyas.common.config import EngineConfig
from eyas.common.errors import Unavailable
from eyas.common.step_times import UNSEEN
from eyas.common.types import EXACT, WorkerBacklog
from eyas.common.wire.control import MemoryTag, PauseMode
from eyas.engine.adapters.table import AdapterTable
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.ipc.adapter_messages import LoadAdapter, UnloadAdapter
from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.messages import (
    AttachKv,
    CacheUpdate,
    CancelGeneration,
    ControlEngine,
    DraftDown,
    DrainEngine,
    EngineLoad,
    EngineReady,
    EngineStopped,
    FlushCache,
    HostCache,
    PrefillPrompt,
    ProbeLink,
    ReleaseLease,
    ShutdownEngine,
    StagePages,
    SubmitGeneration,
    TransferTotals,
    UnstagePages,
    WatchClosed,
    WatchOpened,
    WeightsCall,
)
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.ipc.pulse import EngineHeartbeat
from eyas.engine.kv.leases import LeaseTable
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.pulls import PULL_REPORTS, PullManager, PullReport
from eyas.engine.kv.stager import PageStager
from eyas.engine.loop.commit import StepCommitter
from eyas.engine.loop.control import EngineControl, MemoryParts
from eyas.engine.loop.drafting import DraftCoordinator
from eyas.engine.loop.expert_balance import ExpertBalance
from eyas.engine.loop.runner import StepRunner
from eyas.engine.loop.step_loop import StepLoop, StepPaces
from eyas.engine.loop.weight_updates import WeightStore, WeightUpdates
from eyas.engine.models.ops.recording import most_taken
from eyas.engine.scheduling.adapter_commands import AdapterCommands
from eyas.engine.scheduling.admission import AdmissionLimits
from eyas.engine.scheduling.backlog import backlog
from eyas.engine.scheduling.draft_kv import DraftKv
from eyas.engine.scheduling.flushes import CacheFlushes
from eyas.engine.scheduling.ranked import Schedulers
from eyas.engine.scheduling.requests import RequestTable
from eyas.engine.speculation.depth_pacing import DepthPacing
from eyas.engine.speculation.drafters.base import Drafter
from kv_transfer.copier import PageCopier
from kv_transfer.copy_threads import CopyBell

IDLE_S = 0.1  # the longest wait for a command: deadlines and leases are checked at this interval
COPYING_S = 0.001  # the same while copies run: some kinds of copy signal no descriptor when they end
LOAD_S = 0.5  # the longest time between two reports of the load to the front
MAX_CACHE_CHANGES = 256  # changed pages that one iteration reports to the front, at most
COUNT_S = 0.1  # the shortest time between two counts of the backlog
STOP_S = 5.0  # the longest wait at shutdown for a running copy


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine, loaded and warmed up.

    `drafter`: a drafter outside the steps, if any. `pacing`: adapts the draft depth, if that is on. `pulls`:
    of target KV; `draft_pulls`: of draft KV, if it is stored in this engine. `travels`: whether pages can be
    sent to and received from other workers. `adapters`: None if adapters cannot be loaded. `store`: replaces
    the weights. `balance`: replicates busy experts among ranks, if that is on.
    """

    config: EngineConfig
    model: ModelConfig
    runner: StepRunner
    pools: tuple[KvPool, ...]  # the target's first; a draft pool shares its page numbers
    scheduler: Schedulers
    drafter: Drafter | None
    pacing: DepthPacing | None
    leases: LeaseTable
    stager: PageStager
    pulls: PullManager
    draft_pulls: PullManager | None
    copiers: tuple[PageCopier, ...]
    bell: CopyBell
    travels: bool
    memory: MemoryParts
    outbox: EventOutbox
    grammars: GrammarManager
    ready: EngineReady
    store: WeightStore
    adapters: AdapterTable | None = None
    balance: ExpertBalance | None = None


class Engine:
    """Built from `EngineParts`; `run` blocks until `ShutdownEngine`, or until idle after `DrainEngine`."""

    def __init__(self, parts: EngineParts, link: EngineLink, pulse: EngineHeartbeat | None = None) -> None:
        self._parts = parts
        self._link = link
        self._pulse = pulse or EngineHeartbeat(link)
        self._scheduler = parts.scheduler
        self._outbox = parts.outbox
        self._pulls = [pulls for pulls in (parts.pulls, parts.draft_pulls) if pulls is not None]
        nodes = parts.scheduler.limits.round_rows - 1
        spec, width = parts.config.speculation, parts.ready.draft_width
        self._drafting = DraftCoordinator(parts.drafter, width, nodes, spec, parts.pacing, parts.grammars)
        self._requests = self._new_requests()
        self._adapters = AdapterCommands(parts.adapters, parts.outbox, self._weights_away)
        self._flushes = CacheFlushes(parts.scheduler, parts.outbox, self._work, self._drafting.forget_answers)
        self._updates = self._new_updates()
        self._loop = self._new_loop()
        self._control = self._new_control()
        self._handlers = self._routes()
        self._between: list[Callable[[], None]] = []  # calls to run when the step in flight has ended
        self._stopping = False
        self._progress = 0
        self._commands = 0  # received
        self._loaded: tuple[float, EngineLoad | None] = (0.0, None)
        self._backlog: tuple[float, WorkerBacklog] = (0.0, WorkerBacklog())
        self._busy = False

    def _new_requests(self) -> RequestTable:
        parts, pages = self._parts, self._scheduler.pool
        admission = AdmissionLimits(
            context_length=parts.ready.context_length,
            vocab_size=parts.model.vocab_size,
            max_waiting=parts.config.max_waiting,
            travels=parts.travels,
            drafts=parts.config.speculation if parts.config.speculates else None,
            no_experts=_no_experts(parts),
        )
        draft_kv = None
        if parts.draft_pulls is not None:
            draft_kv = DraftKv(parts.draft_pulls, pages, parts.config.page_size)
        requests = RequestTable(
            scheduler=parts.scheduler,
            leases=parts.leases,
            pulls=parts.pulls,
            draft_kv=draft_kv,
            outbox=parts.outbox,
            admission=admission,
            joined=self._drafting.join,
            left=self._drafting.stop,
            copy_page=parts.runner.copy_page,
            adapters=parts.adapters,
        )
        parts.pulls.destination = requests
        if parts.adapters is not None:
            parts.adapters.has_requests = requests.has_requests
        return requests

    def _new_loop(self) -> StepLoop:
        parts = self._parts
        committer = StepCommitter(
            scheduler=parts.scheduler,
            runner=parts.runner,
            drafting=self._drafting,
            leases=parts.leases,
            outbox=parts.outbox,
            eos_ids=tuple(parts.model.eos_token_ids),
            new_uid=self._requests.new_uid,
            on_end=self._requests.end,
            on_broken=self._requests.spoil,
            flush=self._flush,
        )
        rates = parts.ready.rates
        paces = None if rates is None else StepPaces(rates.times)
        return StepLoop(parts.scheduler, parts.runner, committer, parts.pacing, paces, self._pulse)

    def _new_control(self) -> EngineControl:
        parts = self._parts
        return EngineControl(
            loop=self._loop,
            scheduler=parts.scheduler,
            requests=self._requests,
            outbox=parts.outbox,
            memory=parts.memory,
            work=self._work,
            forget=self._drafting.forget_answers,
        )

    def _new_updates(self) -> WeightUpdates:
        return WeightUpdates(
            store=self._parts.store,
            requests=self._requests,
            outbox=self._outbox,
            work=self._work,
            forget=self._flushes.flush,
            between=self.between_steps,
            beat=self._pulse,
            away=self._weights_away,
            paused=self._paused,
        )

    def _routes(self) -> dict[type, Callable[..., None]]:
        requests, leases, stager = self._requests, self._parts.leases, self._parts.stager
        return {
            SubmitGeneration: requests.submit,
            AttachKv: requests.attach,
            CancelGeneration: requests.cancel,
            PrefillPrompt: requests.prefill,
            WatchOpened: leases.watch_opened,
            WatchClosed: leases.watch_closed,
            ReleaseLease: leases.release,
            StagePages: stager.stage,
            UnstagePages: stager.unstage,
            **dict.fromkeys(PULL_REPORTS, self._take_pull_report),
            ProbeLink: self._probe,
            FlushCache: self._flushes.begin,
            WeightsCall: self._updates.receive,
            LoadAdapter: self._adapters.load,
            UnloadAdapter: self._adapters.unload,
            ControlEngine: self._control.receive,
            DraftDown: self._deliver_drafts,
            DrainEngine: requests.drain,
            ShutdownEngine: self._shut_down,
        }

    # --- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until `ShutdownEngine`, then frees everything and sends `EngineStopped`."""
        gc.collect()
        gc.freeze()  # later collections skip the objects of the start, which would stop a step for 20 ms
        # One message: a router that knew the worker without its capacity would count it as full.
        self._link.send([self._parts.ready, self._with_counters(self._load(), time.monotonic())])
        try:
            while not self._stopping:
                self._pulse.loop()
                self._receive()
                self._run_between()
                self._busy = self._control.runs and self._loop.step()
                self._requests.remember()
                self._busy |= self._poll_background(time.monotonic())
                self._stopping |= self._requests.draining and not self._work()
                self._send_events()
        finally:
            self._close()
        self._link.send([EngineStopped()])

    def between_steps(self, call: Callable[[], None]) -> None:
        """Runs `call` once, in the engine's thread, while no step is in flight and the device is idle: it may
        overwrite weights, or release memory that steps read. An exception from it ends the engine.

        Requests, pages and leases stay as they are: a call that needs them gone checks for them itself, and
        may schedule itself again. A call that takes long must beat the engine's pulse.
        """
        self._between.append(call)

    def _run_between(self) -> None:
        if not self._between:
            return
        calls, self._between = self._between, []
        self._loop.quiesce()
        for call in calls:
            call()

    def _receive(self) -> None:
        """Handles commands until the next step is due; waits for drafts as long as that pays."""
        self._handle_commands(self._idle_timeout_s())
        while self._busy and (left := self._loop.spare_s) > 0:
            self._handle_commands(left)
        deadline = time.monotonic() + self._drafting.wait_s
        while self._drafting.owed() and (left := deadline - time.monotonic()) > 0:
            self._handle_commands(left)
        self._drafting.adopt()

    def _idle_timeout_s(self) -> float:
        """Seconds to wait for a command, or for a descriptor that becomes readable."""
        if self._busy:
            return 0.0
        updating = self._cache_changed or self._updates.looks or self._adapters.busy
        polling = self._parts.grammars.awaited() or self._copying or updating
        return COPYING_S if polling else IDLE_S

    def _handle_commands(self, timeout_s: float) -> None:
        """Handles messages of the front and of draft workers; waits up to `timeout_s` for the first."""
        bell = self._parts.bell
        copies = (bell.descriptor,) if self._copying else ()
        commands = self._link.recv(timeout_s, (*self._drafting.bells, *copies))
        if copies:
            bell.quiet()
        for command in commands:
            self._handlers[type(command)](command)
            self._commands += 1
            self._pulse()
        for down in self._drafting.arrived():
            self._deliver_drafts(down)
        self._link.send(self._drafting.outgoing())  # immediately: the draft worker may be waiting

    def _poll_background(self, now: float) -> bool:
        """Polls host pages, leases, copies, pulls, slots and deadlines. True if a sequence may run now."""
        joins, back, used = self._requests.joins, [], self._scheduler.pool.used
        if self._scheduler.host is not None:
            back = self._scheduler.host.poll(now)
            for seq in back:
                self._scheduler.enqueue(seq)
            self._scheduler.host.look_ahead(self._scheduler.waiting)
        for pulls in self._pulls:
            pulls.poll(now)
        self._adapters.poll()
        seats = self._scheduler.adapters is not None and not self._weights_away()
        seated = seats and self._scheduler.seat_adapters()
        self._requests.join(now)
        self._requests.expire(now)
        for generation, error in self._parts.grammars.take_failed().items():
            self._requests.fail(generation, error)
        if self._updates.waits or self._flushes.waits or self._control.waits:
            self._parts.leases.owner.hurry(now)
        self._parts.leases.poll(now)
        self._parts.stager.poll()
        self._flushes.poll(now)
        self._control.poll(now)
        self._updates.poll(now)
        if self._parts.balance is not None and not self._weights_away():
            self._parts.balance.poll(now)
        freed = self._scheduler.pool.used < used and self._scheduler.waiting
        return bool(back or freed or seated) or self._requests.joins > joins

    def _paused(self) -> frozenset[PauseMode]:
        """The pauses in effect; no step runs until an operator ends them. Empty: not paused."""
        return self._control.paused

    def _weights_away(self) -> bool:
        """Whether the memory of the weights and of the adapters' slots is released, or is being released."""
        return MemoryTag.WEIGHTS in self._control.released

    def _work(self) -> str:
        """The engine's unfinished work, as "2 requests, 1 lease"; empty if it has none."""
        counts = {
            "request": len(self._requests.table),
            "pull": self._pulling,
            "lease": self._parts.leases.owner.active,
            "step": int(self._busy),
        }
        return ", ".join(f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count)

    @property
    def _pulling(self) -> int:
        return sum(pulls.active for pulls in self._pulls)

    @property
    def _copying(self) -> bool:
        host = self._scheduler.host
        moving = self._control.moving or self._parts.stager.copying
        return bool(self._pulling or moving or (host is not None and host.copying))

    @property
    def _cache_changed(self) -> bool:
        """Whether changes of the prefix cache are still to be reported to the front."""
        host = self._scheduler.host
        return self._scheduler.cache.changed or (host is not None and host.changed)

    def _take_pull_report(self, command: PullReport) -> None:
        for pulls in self._pulls:
            pulls.receive(command)

    def _probe(self, command: ProbeLink) -> None:
        prober = self._parts.pulls.prober
        if self._control.released:
            prober.refuse(command, Unavailable("its pages are away: it sleeps"))
            return
        prober.begin(command, *self._scheduler.probed, time.monotonic())

    def _flush(self) -> None:
        """Sends all events and draft messages now, in the middle of an iteration."""
        self._link.send([*self._outbox.take(), *self._drafting.outgoing()])

    def _send_events(self) -> None:
        """Sends the iteration's events, changes of the load and changes of the prefix cache as one
        message.
        """
        self._progress += 1
        events = [*self._outbox.take(), *self._drafting.outgoing()]
        sent_at, sent = self._loaded
        load = self._load()
        now = time.monotonic()
        if load != sent or now - sent_at > LOAD_S:
            self._loaded = (now, load)
            events.append(self._with_counters(load, now))
        cache, origins = self._scheduler.cache, (b"", b"", b"")
        if cache.changed and self._parts.config.kv_events:
            origins = cache.origins(MAX_CACHE_CHANGES)
        host = self._scheduler.host
        on_host = (b"", b"") if host is None else host.take_changes(MAX_CACHE_CHANGES)
        if any(changes := (*cache.take_changes(MAX_CACHE_CHANGES), *origins, *on_host)):
            events.append(CacheUpdate(cache.shape.size, cache.shape.lookahead, *changes))
        self._link.send(events)

    def _with_counters(self, load: EngineLoad, now: float) -> EngineLoad:
        """A copy of `load` with the counters that change in every iteration, and alone are not worth a
        report.
        """
        seconds, sequences = self._loop.counts.seconds, self._loop.counts.sequences
        return msgspec.structs.replace(
            load,
            progress=self._progress,
            heard=self._commands,
            nodes_verified=self._outbox.nodes_verified,
            step_seconds=tuple(seconds.counts),
            step_seconds_total=seconds.total,
            step_sequences=tuple(sequences.counts),
            step_sequences_total=sequences.total,
            oldest_waiting_s=self._requests.oldest_waiting_s(now),
            backlog=self._current_backlog(now),
        )

    def _current_backlog(self, now: float) -> WorkerBacklog:
        """The backlog, counted anew after `COUNT_S`, since that visits every request."""
        if now - self._backlog[0] > COUNT_S:
            paces = self._loop.paces
            pace = UNSEEN if paces is None else paces.pace
            self._backlog = (now, backlog(self._requests, self._loop.share.at(now), pace))
        return self._backlog[1]

    def _load(self) -> EngineLoad:
        scheduler = self._scheduler
        running = len(scheduler.running)
        return EngineLoad(
            progress=0,
            pending=bool(running or scheduler.waiting),
            running=running,
            waiting=self._requests.waiting,
            pages_used=scheduler.pool.used,
            cached_tokens=scheduler.cached_tokens,
            prompt_tokens=scheduler.prompt_tokens,
            preemptions=scheduler.preemptions,
            logits_not_finite=self._requests.spoiled,
            leases=self._parts.leases.owner.active,
            moved=self._moved(),
            ways_refused=dict(sum((pulls.routes.refused for pulls in self._pulls), Counter[str]())),
            pulls_failed=sum(pulls.failed for pulls in self._pulls),
            drafts_late=self._drafting.missed_rounds,
            drafts_sent=dict(self._drafting.sent),
            host=HostCache() if scheduler.host is None else scheduler.host.counts,
            states=scheduler.states,
            weights=self._updates.info,
            adapters=self._adapters.counts(0 if scheduler.adapters is None else scheduler.adapters.waiting),
            paused=bool(self._control.paused),
            released=self._control.released,
        )

    def _moved(self) -> dict[str, TransferTotals]:
        """Transfer totals of all pulls, by path."""
        moved: dict[str, TransferTotals] = {}
        for pulls in self._pulls:
            for path, totals in pulls.moved.items():
                moved[path] = moved.get(path, TransferTotals()).joined(totals)
        return moved

    def _deliver_drafts(self, down: DraftDown) -> None:
        for handle, attempt in self._drafting.deliver(down):
            self._parts.pulls.refuse(handle, attempt)

    # --- the end -------------------------------------------------------------------------------------

    def _shut_down(self, _: ShutdownEngine) -> None:
        self._stopping = True

    def _close(self) -> None:
        self._control.close()
        self._parts.grammars.close()
        self._updates.close()
        if self._parts.adapters is not None:
            self._parts.adapters.close()
        self._drafting.leave()
        idle = self._parts.runner.close()
        deadline, host = time.monotonic() + STOP_S, self._scheduler.host
        ends = [copier.close for copier in self._parts.copiers]
        if host is not None:
            ends.append(host.close)
        if all([idle, *(end(deadline) for end in ends)]):
            for pool in self._parts.pools:
                pool.close()


def _no_experts(parts: EngineParts) -> str:
    """Why this engine cannot report routed experts; empty if it can.

    They are reported for rows that are computed a second time, which take the same experts under exact
    arithmetic alone.
    """
    if not most_taken(parts.model):
        return "the model has no experts, or none that are known"
    if parts.config.device_ranks > 1 or parts.config.dp_attention > 1:
        return "experts are returned where one process has the model"
    if not parts.config.arithmetic.startswith(EXACT):
        return "rows take the same experts again with exact arithmetic alone (--deterministic)"
    return ""
