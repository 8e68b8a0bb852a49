"""The engine of a target model: one loop that receives commands, runs steps and sends events.

`eyas.engine.loop.step_loop` orders the parts of a step, and a `StepRunner` computes it. The engine owns
slots, pages, leases and every request.
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

IDLE_S = 0.1  # the longest nap: deadlines and leases are looked after at least so often
COPYING_S = 0.001  # while copies run, those are looked for so often that ring no bell
LOAD_S = 0.5  # the front hears of the load at least so often
NEWS = 256  # pages that a loop names to the front at most
COUNT_S = 0.1  # between two counts of the backlog, at least
STOP_S = 5.0  # the longest wait at shutdown for a copy that still runs


@dataclass(frozen=True)
class EngineParts:
    """Everything an engine is made of, loaded and warm.

    `drafter`: one outside the steps, if there is one. `pacing`: where depths are adaptive. `pulls`: of target
    KV; `draft_pulls`: of draft KV, if that lives here. `travels`: can pages leave the pools, or come there?
    `adapters`: None where none can be loaded. `store`: how weights change. `balance`: of ranks' experts, if
    these may have replicas.
    """

    config: EngineConfig
    model: ModelConfig
    runner: StepRunner
    pools: tuple[KvPool, ...]  # target first; a draft pool here shares its page numbers
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
    """Built from `EngineParts`; `run` blocks until `ShutdownEngine`, or until idle after `DrainEngine`.

    `pulse`: of all that the engine computes with.
    """

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
        self._between: list[Callable[[], None]] = []  # calls that wait for the end of the step in flight
        self._stopping = False
        self._progress = 0
        self._heard = 0  # commands
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
            tell=self._send,
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
            DraftDown: self._drafts_came,
            DrainEngine: requests.drain,
            ShutdownEngine: self._shut_down,
        }

    # --- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until it is told to stop, then frees everything and says `EngineStopped`."""
        gc.collect()
        gc.freeze()  # what the start left behind is not searched again: that would stop a step for 20 ms
        # Together, so that no worker is known to serve whose room is not known: it would count as full.
        self._link.send([self._parts.ready, self._stamped(self._load(), time.monotonic())])
        try:
            while not self._stopping:
                self._pulse.loop()
                self._receive()
                self._run_between()
                self._busy = self._control.runs and self._loop.step()
                self._requests.remember()
                self._busy |= self._look_after(time.monotonic())  # what may run now is not slept over
                self._stopping |= self._requests.draining and not self._work()
                self._tell()
        finally:
            self._close()
        self._link.send([EngineStopped()])

    def between_steps(self, call: Callable[[], None]) -> None:
        """Has `call` run once, by the engine's thread, while no step is in flight and the device is idle: it
        may write weights in place, or take memory away that steps read. What it raises ends the engine.

        The requests, pages and leases of the engine are where they were. A call that must not meet any looks
        for them itself, and may ask again. A call that takes long beats the engine's pulse.
        """
        self._between.append(call)

    def _run_between(self) -> None:
        if not self._between:
            return
        calls, self._between = self._between, []
        self._loop.rest()
        for call in calls:
            call()

    def _receive(self) -> None:
        """Take commands; wait for drafts while that is worth it, and nap when there is nothing to do."""
        self._listen(self._nap())
        while self._busy and (left := self._loop.spare_s) > 0:
            self._listen(left)
        deadline = time.monotonic() + self._drafting.wait_s
        while self._drafting.owed() and (left := deadline - time.monotonic()) > 0:
            self._listen(left)
        self._drafting.adopt()

    def _nap(self) -> float:
        """Seconds to wait for commands, or until a bell rings."""
        if self._busy:
            return 0.0
        others = self._untold or self._updates.looks or self._adapters.busy
        looks = self._parts.grammars.awaited() or self._copying or others
        return COPYING_S if looks else IDLE_S

    def _listen(self, timeout_s: float) -> None:
        """Carry out what the front and draft workers say; waits up to `timeout_s` for the first word."""
        bell = self._parts.bell
        copies = (bell.descriptor,) if self._copying else ()
        commands = self._link.recv(timeout_s, (*self._drafting.bells, *copies))
        if copies:
            bell.quiet()
        for command in commands:
            self._handlers[type(command)](command)
            self._heard += 1
            self._pulse()
        for down in self._drafting.arrived():
            self._drafts_came(down)
        self._link.send(self._drafting.outgoing())  # at once: it may be waited for

    def _look_after(self, now: float) -> bool:
        """The host's pages, leases, copies, pulls, free slots and deadlines. True: a sequence may run now."""
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
        """By what no step begins until an operator resumes; empty: by nothing."""
        return self._control.paused

    def _weights_away(self) -> bool:
        """Whether the memory of weights, and of adapters' slots, has left, or leaves."""
        return MemoryTag.WEIGHTS in self._control.released

    def _work(self) -> str:
        """The work that the engine still has, in words; empty: nothing."""
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
    def _untold(self) -> bool:
        host = self._scheduler.host
        return self._scheduler.cache.untold or (host is not None and host.untold)

    def _take_pull_report(self, command: PullReport) -> None:
        for pulls in self._pulls:
            pulls.receive(command)

    def _probe(self, command: ProbeLink) -> None:
        prober = self._parts.pulls.prober
        if self._control.released:
            prober.refuse(command, Unavailable("its pages are away: it sleeps"))
            return
        prober.begin(command, *self._scheduler.probed, time.monotonic())

    def _send(self) -> None:
        self._link.send([*self._outbox.take(), *self._drafting.outgoing()])

    def _tell(self) -> None:
        """One message up: what happened, and how loaded this worker is."""
        self._progress += 1
        events = [*self._outbox.take(), *self._drafting.outgoing()]
        sent_at, sent = self._loaded
        load = self._load()
        now = time.monotonic()
        if load != sent or now - sent_at > LOAD_S:
            self._loaded = (now, load)
            events.append(self._stamped(load, now))
        cache, origins = self._scheduler.cache, (b"", b"", b"")
        if cache.untold and self._parts.config.kv_events:
            origins = cache.origins(NEWS)
        host = (b"", b"") if self._scheduler.host is None else self._scheduler.host.news(NEWS)
        if any(changes := (*cache.news(NEWS), *origins, *host)):
            events.append(CacheUpdate(cache.shape.size, cache.shape.lookahead, *changes))
        self._link.send(events)

    def _stamped(self, load: EngineLoad, now: float) -> EngineLoad:
        """A copy with the counters that every loop changes, which alone are no news."""
        seconds, sequences = self._loop.counts.seconds, self._loop.counts.sequences
        return msgspec.structs.replace(
            load,
            progress=self._progress,
            heard=self._heard,
            nodes_verified=self._outbox.nodes_verified,
            step_seconds=tuple(seconds.counts),
            step_seconds_total=seconds.total,
            step_sequences=tuple(sequences.counts),
            step_sequences_total=sequences.total,
            oldest_waiting_s=self._requests.oldest_waiting_s(now),
            backlog=self._counted(now),
        )

    def _counted(self, now: float) -> WorkerBacklog:
        """Counted every `COUNT_S`: it takes a look at every request."""
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
            for path, some in pulls.moved.items():
                moved[path] = moved.get(path, TransferTotals()).joined(some)
        return moved

    def _drafts_came(self, down: DraftDown) -> None:
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
    """Why the experts that rows take are not told; empty: they are.

    They are told of rows that are computed again: only exact arithmetic chooses the same then.
    """
    if not most_taken(parts.model):
        return "the model has no experts, or none that are known"
    if parts.config.device_ranks > 1 or parts.config.dp_attention > 1:
        return "experts are told of where one process has the model"
    if not parts.config.arithmetic.startswith(EXACT):
        return "rows take the same experts again with exact arithmetic alone (--deterministic)"
    return ""
