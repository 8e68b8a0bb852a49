"""The engine of a target model: one loop that receives, steps and tells.

How a step goes is its pace's business: one at a time (`eyas.engine.loop.plain`, the specification), or one
ahead of the host (`eyas.engine.loop.overlapped`). The engine owns slots, pages, leases and every request; it
knows nothing of gRPC, HTTP or text.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from eyas.common.config import EngineConfig
from eyas.engine.batch.sequence import Sequence
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.messages import (
    Attach,
    Cancel,
    Command,
    CopyStopped,
    DraftDown,
    DraftUp,
    Drain,
    Load,
    Prefill,
    PullDone,
    PullFailed,
    PullMet,
    PullReady,
    PullReleased,
    Ready,
    Release,
    Shutdown,
    Stopped,
    Submit,
    WatchClosed,
    WatchOpened,
)
from eyas.engine.ipc.outbox import Outbox
from eyas.engine.kv.leases import Leases
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.pulls import Arrival, Pulls
from eyas.engine.loop.commit import Committer
from eyas.engine.loop.overlapped import OverlappedLoop
from eyas.engine.loop.patience import Patience
from eyas.engine.loop.plain import PlainLoop
from eyas.engine.loop.plain_runner import Runner
from eyas.engine.loop.step_counts import StepCounts
from eyas.engine.scheduling.requests import Admission, Requests
from eyas.engine.scheduling.scheduler import Scheduler
from eyas.engine.speculation.drafter import Commit, Draft, Drafter
from eyas.engine.speculation.remote import RemoteDrafter
from kv_transfer.copier import Copier

IDLE_S = 0.1  # the longest nap: deadlines and leases are looked after at least so often
COPYING_S = 0.001  # while copies run, their results are looked for so often
LOAD_S = 0.5  # the front hears of the load at least so often
STOP_S = 5.0  # a copy that still runs at shutdown is waited for so long


@dataclass(frozen=True)
class Parts:
    """Everything an engine is made of, loaded and warm. The runner's kind decides the pace."""

    config: EngineConfig
    model: ModelConfig
    runner: Runner | DeviceRunner
    pools: tuple[KvPool, ...]  # target first; a colocated draft pool shares its page numbers
    scheduler: Scheduler
    drafter: Drafter | None
    leases: Leases
    pulls: Pulls
    copier: Copier
    outbox: Outbox
    ready: Ready


class Engine:
    """Built from `Parts`; `run` blocks until `Shutdown`, or until nothing is left to do after `Drain`."""

    def __init__(self, parts: Parts, link: EngineLink) -> None:
        self._parts = parts
        self._link = link
        self._scheduler = parts.scheduler
        self._drafter = parts.drafter
        self._remote = parts.drafter if isinstance(parts.drafter, RemoteDrafter) else None
        self._outbox = parts.outbox
        self._patience = Patience()
        self._counts = StepCounts()
        config = parts.config
        admission = Admission(
            context_length=parts.ready.context_length,
            vocab_size=parts.model.vocab_size,
            max_waiting=config.max_waiting,
            transfer_policy=config.transfer_policy,
            travels=config.device == "cpu",
        )
        self._requests = Requests(
            scheduler=parts.scheduler,
            leases=parts.leases,
            pulls=parts.pulls,
            outbox=parts.outbox,
            admission=admission,
            stop_drafting=self._stop_drafting,
            on_join=self._on_join,
            copy_page=parts.pools[0].copy_page,
        )
        parts.pulls.destination = self._requests
        parts.scheduler.reclaim = parts.pulls.preempt
        parts.scheduler.pulls_waiting = self._requests.pulls_waiting
        parts.scheduler.pulls_running = self._requests.pulls_running
        self._rounds, self._pace = self._paces(parts)
        self._handlers = self._routes()
        self._stopping = False
        self._progress = 0
        self._heard = 0  # commands
        self._loaded: tuple[float, Load | None] = (0.0, None)
        self._busy = False

    def _paces(self, parts: Parts) -> tuple[Committer, PlainLoop | OverlappedLoop]:
        rounds = Committer(
            scheduler=parts.scheduler,
            pools=parts.pools,
            drafter=parts.drafter,
            leases=parts.leases,
            outbox=parts.outbox,
            eos_ids=tuple(parts.model.eos_token_ids),
            new_uid=self._requests.new_uid,
            on_end=self._requests.end,
        )
        scheduler, leases, outbox = parts.scheduler, parts.leases, parts.outbox
        if isinstance(parts.runner, DeviceRunner):
            ahead = parts.config.overlap_schedule
            return rounds, OverlappedLoop(rounds, parts.runner, self._counts, ahead)
        return rounds, PlainLoop(
            scheduler,
            parts.runner,
            rounds,
            leases,
            outbox,
            self._patience,
            self._stop_drafting,
            self._counts,
        )

    def _routes(self) -> dict[type, Callable[..., None]]:
        requests, leases, pulls = self._requests, self._parts.leases, self._parts.pulls
        return {
            Submit: requests.submit,
            Attach: requests.attach,
            Cancel: requests.cancel,
            Prefill: requests.prefill,
            WatchOpened: leases.watch_opened,
            WatchClosed: leases.watch_closed,
            Release: leases.release,
            PullMet: pulls.told,
            PullReady: pulls.told,
            PullDone: pulls.told,
            PullFailed: pulls.told,
            PullReleased: pulls.told,
            CopyStopped: pulls.told,
            DraftDown: self._drafts_came,
            Drain: requests.drain,
            Shutdown: self._shut_down,
        }

    # --- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        gc.collect()
        gc.freeze()  # what the start left behind is not searched again: that would stop a step for 20 ms
        self._link.send([self._parts.ready])
        try:
            while not self._stopping:
                self._receive()
                self._busy = self._pace.step()
                self._look_after(time.monotonic())
                self._stopping |= self._requests.draining and not self._holds_something()
                self._tell()
        finally:
            self._close()
        self._link.send([Stopped()])

    def _receive(self) -> None:
        """Take commands; wait for drafts while that is worth it, and nap when there is nothing to do."""
        nap = 0.0 if self._busy else COPYING_S if self._parts.pulls.active else IDLE_S
        self._dispatch(self._link.recv(nap))
        while self._busy and (left := self._pace.spare_s) > 0:
            self._dispatch(self._link.recv(left))
        if self._drafter is None:
            return
        deadline = time.monotonic() + self._patience.draft_wait_s
        while self._drafter.owed() and (left := deadline - time.monotonic()) > 0:
            self._dispatch(self._link.recv(left))
        for draft in self._drafter.take():
            self._adopt(draft)

    def _dispatch(self, commands: SequenceOf[Command]) -> None:
        for command in commands:
            self._handlers[type(command)](command)
            self._heard += 1
        self._link.send(self._asked())  # at once: it may be waited for

    def _look_after(self, now: float) -> None:
        """Leases, pulls, free slots and deadlines."""
        self._parts.pulls.poll(now)
        self._requests.join()
        self._requests.expire(now)
        self._parts.leases.poll(now)

    def _holds_something(self) -> bool:
        parts = self._parts
        return bool(self._busy or self._requests.table or parts.pulls.active or parts.leases.owner.active)

    def _tell(self) -> None:
        """One message up: what happened, and how loaded this worker is."""
        self._progress += 1
        events = [*self._outbox.take(), *self._asked()]
        told_at, told = self._loaded
        load = self._load()
        now = time.monotonic()
        if load != told or now - told_at > LOAD_S:
            self._loaded = (now, load)
            events.append(self._stamped(load, now))
        self._link.send(events)

    def _stamped(self, load: Load, now: float) -> Load:
        """With what every loop changes, which alone is no news."""
        seconds, sequences = self._counts.seconds, self._counts.sequences
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
        )

    def _load(self) -> Load:
        scheduler = self._scheduler
        running = len(scheduler.running)
        return Load(
            progress=0,
            pending=bool(running or scheduler.waiting),
            running=running,
            waiting=self._requests.waiting,
            pages_used=scheduler.pool.used,
            cached_tokens=scheduler.cached_tokens,
            prompt_tokens=scheduler.prompt_tokens,
            preemptions=scheduler.preemptions,
            leases=self._parts.leases.owner.active,
            moved=dict(self._parts.pulls.moved),
            pulls_failed=self._parts.pulls.failed,
            drafts_late=self._remote.late_rounds if self._remote else 0,
        )

    # --- drafting ------------------------------------------------------------------------------------

    def _asked(self) -> list[DraftUp]:
        """What a drafter far away is to hear next."""
        return self._remote.outgoing() if self._remote else []

    def _drafts_came(self, down: DraftDown) -> None:
        if self._remote:
            for handle, attempt in self._remote.deliver(down):
                self._parts.pulls.refuse(handle, attempt)

    def _adopt(self, draft: Draft) -> None:
        """Verify what is left of a proposal after the tokens committed since, within what may be emitted."""
        seq = draft.seq
        if not seq.pages or not seq.drafting or draft.base >= len(seq):
            return
        tree = draft.tree.trim(seq.tokens(draft.base + 1, len(seq)))
        left = seq.generation.request.params.max_tokens - len(seq.output) - 1
        if tree:
            tree = tree.narrow(self._scheduler.limits.round_rows - 1).truncate_depth(left)
        seq.tree = tree or None

    def _on_join(self, seq: Sequence, arrival: Arrival) -> None:
        """A pulled sequence starts: its first commit is (last feature, token 0)."""
        generation, base, drafter = seq.generation, len(seq.prompt) - 1, self._drafter
        whole = len(arrival.last_feature) == 4 * self._parts.ready.draft_width
        if drafter is None or drafter.local_kv or not whole:
            return
        feature = torch.from_numpy(np.frombuffer(arrival.last_feature, np.float32).copy())[None]
        seq.window.add(base, feature)
        if self._rounds.start_drafting(seq, base, generation.draft_handle):
            generation.draft_claimed = True
            drafter.post([Commit(seq, base, seq.output[:1], feature, propose=True)])

    def _stop_drafting(self, seq: Sequence) -> None:
        if self._drafter is not None and seq.drafting:
            self._drafter.close(seq)
        seq.drafting = False

    # --- the end -------------------------------------------------------------------------------------

    def _shut_down(self, _: Shutdown) -> None:
        self._stopping = True

    def _close(self) -> None:
        if isinstance(self._parts.runner, DeviceRunner):
            self._parts.runner.close()
        if self._parts.copier.close(time.monotonic() + STOP_S):
            for pool in self._parts.pools:
                pool.close()
