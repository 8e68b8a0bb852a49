"""The step loop: composes, launches, lands and commits each step.

With a runner that runs ahead, the next step is launched before the tokens of the current one are known: the
device has the exact state of every sequence, and the host has lower bounds, which it corrects one step later.
With the plain runner no step is ever in flight. Both run this code and give the same tokens.

`StepClock` predicts when the step in flight ends, so that the next step is composed as late as possible and
includes every request that has arrived. A step composed right after the previous one has landed would make a
new request wait for two whole steps. The prediction is an estimate, so the loop also polls the step in
flight: otherwise one slow step would delay all later steps of its shape.

`StepPaces` compares the time of each step with the table that the engine measured at its start. Routers use
the difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from eyas.common.histogram import STEP_SECONDS, STEP_SEQUENCES, Histogram
from eyas.common.step_times import PaceMeter, PromptShare, StepPace, StepTimes
from eyas.engine.batch.sequence import GenerationKind, SequenceWork
from eyas.engine.batch.step_result import StepResult
from eyas.engine.ipc.messages import PrefillStarted
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.loop.commit import StepCommitter
from eyas.engine.loop.runner import InFlightStep, StepRunner
from eyas.engine.scheduling.ranked import Schedulers
from eyas.engine.speculation.depth_pacing import DepthPacing

POLL_S = 0.001  # interval at which a step in flight is polled: it may end earlier than predicted
MARGIN_S = 0.0005  # the next step is composed this long before it must be


class StepClock:
    """Running estimates of the time of a step of each shape, and of the time to compose a step."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds: dict[Hashable, float] = {}
        self._composing_s = 0.0
        self._running: Hashable | None = None  # the shape of the step that the device computes
        self._since = 0.0

    def record_composing(self, began: float) -> None:
        """Records that a step was composed and launched; composing began at `began`."""
        self._composing_s = self._now() - began

    def step_ended(self) -> None:
        """Records that the step on the device has ended by now."""
        if self._running is not None:
            took = self._now() - self._since
            self._seconds[self._running] = min(took, 1.05 * self._seconds.get(self._running, took))
        self._running = None

    def step_started(self, shape: Hashable | None) -> None:
        """Records that the device now computes a step of this shape (None: it is idle)."""
        self.step_ended()
        self._running, self._since = shape, self._now()

    @property
    def spare_s(self) -> float:
        """Seconds until the next step must be composed, in whole milliseconds; 0.0 if unknown."""
        if self._running not in self._seconds:
            return 0.0
        end = self._since + self._seconds[self._running]
        spare = end - self._now() - 2 * self._composing_s - MARGIN_S
        return max(int(spare * 1000), 0) / 1000


@dataclass(frozen=True)
class StepCounts:
    """Histograms over all steps: `seconds` from launch to landing, and `sequences` per step."""

    seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    sequences: Histogram = field(default_factory=lambda: Histogram(STEP_SEQUENCES))

    def landed(self, sequences: int, seconds: float) -> None:
        """Counts a step that landed `seconds` after its launch."""
        self.seconds.add(seconds)
        self.sequences.add(sequences)


@dataclass
class StepLoop:
    """Runs steps, at most one of them in flight.

    `pacing` adapts the draft depth and `paces` estimates step times for routers; both receive every landed
    step. `beat` is called after each part of a step.
    """

    scheduler: Schedulers
    runner: StepRunner
    committer: StepCommitter
    pacing: DepthPacing | None = None
    paces: StepPaces | None = None
    beat: Beat = no_pulse
    counts: StepCounts = field(default_factory=StepCounts)
    share: PromptShare = field(default_factory=PromptShare)
    _flight: InFlightStep | None = field(default=None, init=False)
    _landed_at: float | None = field(default=None, init=False)  # when the last step landed; None: idle since
    _clock: StepClock = field(default_factory=StepClock, init=False)

    @property
    def spare_s(self) -> float:
        """Seconds to receive commands before this is read again; 0.0: compose the next step now."""
        if self._flight is None or self._flight.over:
            self._clock.step_ended()
            return 0.0
        return min(self._clock.spare_s, POLL_S)

    def step(self) -> bool:
        """Launches the next step, if any, then lands the previous one. False if there was neither."""
        began = time.monotonic()
        works = self.scheduler.schedule()
        self.committer.drafting.plain = self.scheduler.crowded
        self._forget_preempted()
        if not works and self._flight is None:
            self._landed_at = None
            self._finish_copies()
            return False
        self.beat()
        launched = self._launch(works) if works else None
        self.beat()
        self._clock.record_composing(began)
        self._land(launched)
        if not self.runner.ahead or self.committer.drafting.blocks_next_step():
            self._land(None)
        return True

    def quiesce(self) -> None:
        """Lands the step in flight, if any, and waits until the device is idle: it neither computes nor reads
        weights before the next `step`. Sequences, their pages and their states are unchanged.
        """
        self._land(None)
        self._copy_states()
        self.runner.wait()
        self.scheduler.pool.launched()
        self.scheduler.pool.landed()
        self._landed_at = None

    def _forget_preempted(self) -> None:
        preempted, self.scheduler.preempted = self.scheduler.preempted, []
        for seq in preempted:
            self.committer.drafting.stop(seq)

    def _finish_copies(self) -> None:
        """Waits for page copies when no step follows them: sequences may be waiting for those pages."""
        if self._copy_states() or self.scheduler.pool.copying:
            self.runner.wait()
            self.scheduler.pool.launched()
            self.scheduler.pool.landed()

    def _copy_states(self) -> bool:
        """Copies the states that the next step needs; False if there are none."""
        copies = self.scheduler.state_copies()
        for source, target in copies:
            self.runner.copy_state(source, target)
        return bool(copies)

    def _launch(self, works: list[SequenceWork]) -> InFlightStep:
        now = time.monotonic()
        self.runner.draft_wait_s = self.committer.drafting.wait_s
        self._copy_states()
        if self.committer.drafting.begin_prompts(works):
            self.committer.flush()  # before the launch: a large step takes the host about 10 ms to launch
        flight = self.runner.launch(works)
        self.scheduler.pool.launched()
        for work in works:
            drafted = self.runner.drafts and work.followed and not work.waits(flight.depth)
            self._record_launch(work, now, drafted=drafted)
        return flight

    def _record_launch(self, work: SequenceWork, now: float, *, drafted: bool) -> None:
        """Updates the sequence's lower bounds; offers the pages of a prompt that another worker decodes.

        `drafted`: a draft head in the step processes these rows.
        """
        seq, generation = work.seq, work.seq.generation
        generation.began = generation.began or now
        if generation.kind is GenerationKind.PREFILL and not self.committer.leases.is_offered(generation):
            handles = self.committer.leases.offer(generation, *self.scheduler.tables.offered(seq))
            self.committer.outbox.add(PrefillStarted(generation.id, generation.attempt, handles))
        seq.grow(1 if work.round else len(work.tokens), drafted=drafted)
        seq.bound = work.fold
        seq.in_flight += work.sample
        seq.tree = None

    def _land(self, following: InFlightStep | None) -> None:
        """Waits for the step in flight, if any, and commits it while `following` runs on the device."""
        flight, self._flight = self._flight, following
        landed = flight.land() if flight is not None else ()
        self.beat()
        self._clock.step_started(None if following is None else following.shape)
        if flight is not None:
            self._commit(flight, landed)
        if following is not None:
            following.complete()

    def _commit(self, flight: InFlightStep, landed: SequenceOf[StepResult]) -> None:
        """Commits the results of the step, and reports its time to all estimates."""
        self.scheduler.pool.landed()
        now = time.monotonic()
        seconds = now - max(flight.launched, self._landed_at or 0.0)
        self.share.ran(flight.launched, now, prompts=not all(work.round for work in flight.works))
        self.counts.landed(len(flight.works), now - flight.launched)
        if self.paces is not None:
            self.paces.landed(flight.works, seconds)
        self.committer.drafting.record_step(landed, seconds)
        if self.pacing is not None:
            since = None if self._landed_at is None else now - self._landed_at
            self.pacing.landed(landed, flight.depth, since)
        self._landed_at = now
        self.committer.commit(landed)


class StepPaces:
    """How much slower or faster steps of one engine are than measured at its start."""

    def __init__(self, times: StepTimes) -> None:
        """`times`: as measured at the start."""
        self._times = times
        self._meter = PaceMeter()

    def landed(self, works: SequenceOf[SequenceWork], seconds: float) -> None:
        """Records a step of `seconds`, from its launch or from the previous landing, whichever is later."""
        decoding = context = rows = 0
        pairs = 0.0
        for work in works:
            if work.round:
                decoding += 1
                context += work.start + 1
            else:
                count = len(work.tokens)
                rows += count
                pairs += count * (work.start + count / 2)
        self._meter.ran(decoding, rows, seconds, self._times.step_s(decoding, context, rows, pairs))

    @property
    def pace(self) -> StepPace:
        """The pace of each kind of step; 0.0 for a kind that has not run."""
        return self._meter.pace
