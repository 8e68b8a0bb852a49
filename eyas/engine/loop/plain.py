"""The plain loop's step, the specification: composed, run and committed before the next is thought of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from eyas.engine.batch.sequence import Kind, Sequence, Work
from eyas.engine.ipc.messages import PrefillStarted
from eyas.engine.ipc.outbox import Outbox
from eyas.engine.kv.leases import Leases
from eyas.engine.loop.commit import Committer
from eyas.engine.loop.patience import Patience
from eyas.engine.loop.plain_runner import Runner
from eyas.engine.loop.step_counts import StepCounts
from eyas.engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class PlainLoop:
    """`stop_drafting` is told of every sequence that lost its place."""

    scheduler: Scheduler
    runner: Runner
    rounds: Committer
    leases: Leases
    outbox: Outbox
    patience: Patience
    stop_drafting: Callable[[Sequence], None]
    counts: StepCounts

    @property
    def spare_s(self) -> float:
        """Nothing runs between the steps of this loop: the next begins at once."""
        return 0.0

    def step(self) -> bool:
        """One step; False when nothing can run."""
        works = self.scheduler.schedule()
        preempted, self.scheduler.preempted = self.scheduler.preempted, []
        for seq in preempted:
            self.stop_drafting(seq)
        if not works:
            return False
        began = time.monotonic()
        for work in works:
            self._begin(work, began)
        outputs = self.runner.run(works)
        took = time.monotonic() - began
        self.patience.stepped(outputs, took)
        self.counts.landed(len(works), took)
        self.rounds.commit(outputs)
        return True

    def _begin(self, work: Work, now: float) -> None:
        """First chunk of a request: its time starts, and a prompt for elsewhere is offered."""
        generation = work.seq.generation
        generation.began = generation.began or now
        if generation.kind is Kind.PREFILL and not self.leases.is_offered(generation):
            handles = self.leases.offer(generation, work.seq.pages)
            self.outbox.add(PrefillStarted(generation.id, generation.attempt, handles))
