"""The overlapped loop's step: the next one is launched before this one's tokens are known.

The plain loop (`eyas.engine.loop.plain`) is the specification: this one gives the same tokens. The device
keeps every sequence's truth; the host holds lower bounds and learns the result one step late. What it learns
of a sequence that has ended, or lost its seat, changes no page.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.stopping import finish
from eyas.engine.device.flight import Flight, Landed
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.loop.commit import Committer
from eyas.engine.loop.step_clock import StepClock
from eyas.engine.loop.step_counts import StepCounts
from eyas.engine.scheduling.scheduler import Scheduler


@dataclass
class OverlappedLoop:
    """Launches and lands steps. `plain`: what the plain loop commits with, whose parts are used here."""

    plain: Committer
    runner: DeviceRunner
    counts: StepCounts
    ahead: bool = True  # False: every step lands before the next is composed
    _flight: Flight | None = field(default=None, init=False)
    _clock: StepClock = field(default_factory=StepClock, init=False)

    @property
    def spare_s(self) -> float:
        """How long the loop may still listen before the next step has to be composed."""
        return self._clock.spare_s if self.ahead else 0.0

    @property
    def scheduler(self) -> Scheduler:
        return self.plain.scheduler

    def step(self) -> bool:
        """Launch what can run, then land what was launched before; False when there was neither."""
        began = time.monotonic()
        works = self.scheduler.schedule()
        self.scheduler.preempted.clear()
        by_host = any(work.seq.needs_host for work in works if work.sample)
        wait = by_host or not self.ahead
        if wait and self._flight is not None:
            self._land()
            works = [work for work in works if work.seq.slot >= 0]  # the others have just ended
        if not works and self._flight is None:
            return False
        launched = self.runner.launch(works, by_host=by_host) if works else None
        self._note(launched)
        self._clock.composed(began)
        if self._flight is None:
            self._clock.runs(None)
        self._land()
        self._flight = launched
        if wait:
            self._land()
        self._clock.runs(None if self._flight is None else self._flight.shape)
        return True

    def _note(self, flight: Flight | None) -> None:
        """The lower bounds that hold once this flight has run."""
        if flight is None:
            return
        now = time.monotonic()
        for work in flight.works:
            seq = work.seq
            seq.generation.began = seq.generation.began or now
            seq.kv_len += len(work.tokens)
            seq.draft_len = seq.kv_len
            seq.in_flight += work.sample

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        found = flight.land()
        self.counts.landed(len(flight.works), time.monotonic() - flight.launched)
        for landed in found:
            landed.seq.in_flight -= 1
            if landed.seq in landed.seq.generation.sequences:  # else it was cancelled meanwhile
                self._commit(landed)

    def _commit(self, landed: Landed) -> None:
        seq = landed.seq
        params = seq.generation.request.params
        kept, why = finish(params, self.plain.eos_ids, len(seq.output), landed.tokens)
        drafts = landed.drafts._replace(accepted=min(landed.drafts.accepted, len(kept)))
        self.plain.outbox.entry(seq, kept, landed.logprobs, why, drafts=drafts)
        seq.output += kept
        if seq.occupancy == landed.occupancy:
            seq.kv_len += len(kept) - 1
            seq.draft_len = seq.kv_len
        self._fork(landed)
        if why is not None:
            self.plain.on_end(seq)

    def _fork(self, landed: Landed) -> None:
        """The prompt is done: its other choices get their first token and their pages."""
        leader = landed.seq
        choices, leader.forks = leader.forks, ()
        generation = leader.generation
        for choice, (token, logprob) in zip(choices, landed.extra, strict=False):
            kept, why = finish(generation.request.params, self.plain.eos_ids, 0, [token])
            follower = Sequence(self.plain.new_uid(), generation, choice, leader.prompt, [])
            self.plain.outbox.entry(follower, kept, [logprob], why)
            if why is not None:
                continue
            follower.output = list(kept)
            generation.sequences.append(follower)
            copy = self.scheduler.fork(leader, follower)
            if copy is not None:
                self.runner.copy_page(*copy)
