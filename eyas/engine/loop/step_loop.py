"""The step loop: each step is composed, launched, landed and committed.

A runner that runs ahead has the next step launched before this one's tokens are known: the device keeps every
sequence's truth, and the host holds lower bounds and learns the result one step late. With the plain runner
nothing is ever in flight, and the same code is the specification: both give the same tokens.

`StepClock` predicts the end of the step in flight, so that the next is composed late, with all newcomers. A
step composed as soon as the one before has landed would keep every newcomer waiting for two whole steps. What
it expects is a guess: the loop also looks whether the step is over, else a step that was once seen to end
late would be waited for that long ever after.

`StepPaces` compares the steps that landed with the table that the engine measured at its start. Routers
decide what follows from the difference.
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

LOOK_S = 0.001  # a step in flight may end earlier than expected: that is looked for so often
MARGIN_S = 0.0005


class StepClock:
    """Learns how long steps of a shape take, and how long it takes to compose one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds: dict[Hashable, float] = {}
        self._composing_s = 0.0
        self._running: Hashable | None = None  # the shape of the step that the device works on
        self._since = 0.0

    def composed(self, began: float) -> None:
        """Takes note of a step that was composed and launched; composing began at `began`."""
        self._composing_s = self._now() - began

    def ended(self) -> None:
        """The device has ended its step, as is seen just now."""
        if self._running is not None:
            took = self._now() - self._since
            self._seconds[self._running] = min(took, 1.05 * self._seconds.get(self._running, took))
        self._running = None

    def runs(self, shape: Hashable | None) -> None:
        """The device has ended a step by now, if there was one, and goes on with one of this shape."""
        self.ended()
        self._running, self._since = shape, self._now()

    @property
    def spare_s(self) -> float:
        """Seconds until the next step must be begun: 0 if that is not known. Whole milliseconds."""
        if self._running not in self._seconds:
            return 0.0
        end = self._since + self._seconds[self._running]
        spare = end - self._now() - 2 * self._composing_s - MARGIN_S
        return max(int(spare * 1000), 0) / 1000


@dataclass(frozen=True)
class StepCounts:
    """Two histograms over all steps: `seconds` from launch to landing, and `sequences` per step."""

    seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    sequences: Histogram = field(default_factory=lambda: Histogram(STEP_SEQUENCES))

    def landed(self, sequences: int, seconds: float) -> None:
        """Counts a step that has landed, `seconds` after its launch."""
        self.seconds.add(seconds)
        self.sequences.add(sequences)


@dataclass
class StepLoop:
    """The loop of steps; at most one flight is in the air between two steps.

    `pacing` is told of each, where depths adapt, and `paces`, where a router asks how long steps take.
    `beat`: is called after each part of a step.
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
    _landed_at: float | None = field(default=None, init=False)  # the last step; None: it idled since
    _clock: StepClock = field(default_factory=StepClock, init=False)

    @property
    def spare_s(self) -> float:
        """Seconds for which the loop may listen until it asks again; 0: the next step has to be composed."""
        if self._flight is None or self._flight.over:
            self._clock.ended()
            return 0.0
        return min(self._clock.spare_s, LOOK_S)

    def step(self) -> bool:
        """Launches the next step if there is one, then lands the one before; False when there was neither."""
        began = time.monotonic()
        works = self.scheduler.schedule()
        self.committer.drafting.plain = self.scheduler.crowded
        self._forget_preempted()
        if not works and self._flight is None:
            self._landed_at = None
            self._settle()
            return False
        self.beat()
        launched = self._launch(works) if works else None
        self.beat()
        self._clock.composed(began)
        self._land(launched)
        if not self.runner.ahead or self.committer.drafting.awaits():
            self._land(None)
        return True

    def rest(self) -> None:
        """Lands the step in flight, if there is one, and waits for the device: it computes nothing, and reads
        no weights, before the next `step`. Sequences stay where they are.
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

    def _settle(self) -> None:
        """Waits for copies of pages that no step follows: sequences may wait for those pages."""
        if self._copy_states() or self.scheduler.pool.copying:
            self.runner.wait()
            self.scheduler.pool.launched()
            self.scheduler.pool.landed()

    def _copy_states(self) -> bool:
        """Makes the copies of states that come before the next step; False if there are none."""
        copies = self.scheduler.state_copies()
        for source, target in copies:
            self.runner.copy_state(source, target)
        return bool(copies)

    def _launch(self, works: list[SequenceWork]) -> InFlightStep:
        now = time.monotonic()
        self.runner.draft_wait_s = self.committer.drafting.wait_s
        self._copy_states()
        if self.committer.drafting.beginning(works):
            self.committer.tell()  # a large step takes the host some 10 ms, and is over soon after
        flight = self.runner.launch(works)
        self.scheduler.pool.launched()
        for work in works:
            drafted = self.runner.drafts and work.followed and not work.waits(flight.depth)
            self._note(work, now, drafted=drafted)
        return flight

    def _note(self, work: SequenceWork, now: float, *, drafted: bool) -> None:
        """The lower bounds that hold once this has run; a prompt for elsewhere is offered as it begins.

        `drafted`: a head in the step takes its rows.
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
        """Waits for the flight in the air, if any; `following` flies while what landed is committed."""
        flight, self._flight = self._flight, following
        landed = flight.land() if flight is not None else ()
        self.beat()
        self._clock.runs(None if following is None else following.shape)
        if flight is not None:
            self._commit(flight, landed)
        if following is not None:
            following.complete()

    def _commit(self, flight: InFlightStep, landed: SequenceOf[StepResult]) -> None:
        """Commits the results of the flight, and reports its time to those that learn from it."""
        self.scheduler.pool.landed()
        now = time.monotonic()
        seconds = now - max(flight.launched, self._landed_at or 0.0)
        self.share.ran(flight.launched, now, prompts=not all(work.round for work in flight.works))
        self.counts.landed(len(flight.works), now - flight.launched)
        if self.paces is not None:
            self.paces.landed(flight.works, seconds)
        self.committer.drafting.stepped(landed, seconds)
        if self.pacing is not None:
            since = None if self._landed_at is None else now - self._landed_at
            self.pacing.landed(landed, flight.depth, since)
        self._landed_at = now
        self.committer.commit(landed)


class StepPaces:
    """The step paces of one engine. A step takes one look at each of its works."""

    def __init__(self, times: StepTimes) -> None:
        """`times`: as measured at the start."""
        self._times = times
        self._meter = PaceMeter()

    def landed(self, works: SequenceOf[SequenceWork], seconds: float) -> None:
        """A step took `seconds` from its launch, or from the landing of the one before if that came later."""
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
        """The pace by kind of step; 0.0 for one that it has not seen."""
        return self._meter.pace
