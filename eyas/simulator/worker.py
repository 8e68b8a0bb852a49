"""One simulated worker: its queue, what it computes, and how long its next step takes.

Steps are composed by the rule of the engine's scheduler, simplified: every decoding sequence has a row, then
prompts under way get rows, then waiting ones, under the same budgets and in the same order (a long prompt
yields to shorter ones for a while). Simplified: a sequence is admitted when its whole length fits, so nothing
is preempted; one caller; no drafts. Steps without prompts are taken together until something changes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from eyas.common.prompt_room import WaitingPrompt, prompt_room, tokens_ahead
from eyas.common.step_times import PaceMeter, PromptShare, StepPace, StepTimes
from eyas.engine.scheduling.limits import GPU_YIELD
from eyas.simulator.hardware import WorkerHardware
from eyas.simulator.workload import BLOCK_TOKENS, SimulatedRequest

LAUNCHED_AHEAD = 1
"""Steps that the engine has launched behind the one that runs: what comes now is in the one after."""

LEAST_LASTING = 1 / 32
"""The part of a token's bytes that a cached block takes at least, if all layers have windows."""


class BlockCache:
    """A cache of prefix blocks, with as many as its owner leaves it."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def cached(self, blocks: tuple[int, ...], prompt: int) -> int:
        """Tokens at the start of a prompt that are here; never all: the last one is always computed."""
        tokens = 0
        for block in blocks:
            if block not in self._blocks:
                break
            tokens += BLOCK_TOKENS
        return min(tokens, prompt - 1)

    def add(self, blocks: tuple[int, ...], room: int) -> None:
        """Holds `blocks`, and forgets the oldest until all take at most `room` tokens."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._blocks and len(self._blocks) * BLOCK_TOKENS > room:
            self._blocks.popitem(last=False)


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A request in the cluster. `decode` and `prefill`: indices of its workers; times in seconds, or None.

    `missing`, `sent`, `cached`: tokens of its prompt that are not computed, whose pages were sent or were
    there, and that were in the cache of the worker that computes it. `ahead`: as of `WaitingPrompt`.
    """

    number: int
    arrival: SimulatedRequest
    decode: int
    prefill: int
    missing: int = 0
    sent: int = 0
    cached: int = 0
    ahead: int = 0
    first_s: float | None = None
    end_s: float | None = None

    @property
    def apart(self) -> bool:
        """Whether two workers share it."""
        return self.decode != self.prefill

    @property
    def uncached(self) -> int:
        """Tokens of its prompt that are computed."""
        return self.arrival.prompt - self.cached

    @property
    def length(self) -> int:
        """Tokens at its end."""
        return self.arrival.prompt + self.arrival.output


@dataclass(slots=True)
class SimulatedStep:
    """Running steps: `rounds` of `each_s` seconds that begin at `start_s`; `rows`: prompt rows by job."""

    start_s: float
    each_s: float
    rounds: int
    rows: tuple[tuple[SimulatedJob, int], ...] = ()

    @property
    def end_s(self) -> float:
        """The end of the last step."""
        return self.start_s + self.each_s * self.rounds


class SimulatedWorker:
    """The state of one worker between events. The cluster calls it, and gives the times."""

    def __init__(self, hardware: WorkerHardware, believed: StepTimes | None) -> None:
        """`believed`: what its own table says of its steps; None: what they take."""
        self.hardware = hardware
        self.cache = BlockCache()
        self.step: SimulatedStep | None = None
        self.version = 0  # of `step`: an event with an older one is void
        self.pledged = 0  # sequences that will decode here and are computed elsewhere, or on their way
        self.pledged_context = 0
        self.queued = 0  # prompt tokens here that are not computed
        self._waiting: list[tuple[float, int, SimulatedJob]] = []
        self._prompts: list[SimulatedJob] = []
        self._joining: deque[SimulatedJob] = deque()  # their KV is here
        self._decoding: list[tuple[int, int, SimulatedJob]] = []  # by the round in which they end
        self._rounds = 0
        self._context = 0
        self._reserved = 0
        self._share = PromptShare()
        self._believed = believed
        self._meter = PaceMeter()

    # --- what a router sees ---------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """The sequences that decode here or will, once their prompts are computed."""
        return len(self._decoding) + self.pledged

    @property
    def context(self) -> int:
        """The tokens of these sequences."""
        return self._context + self.pledged_context

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def reserved(self) -> int:
        """Tokens of KV that requests hold here."""
        return self._reserved

    @property
    def idle(self) -> bool:
        """Whether it holds no request."""
        return not (self._waiting or self._prompts or self._joining or self._decoding or self.pledged)

    def prompt_share(self, now: float) -> float:
        """The part of its last seconds that went to steps with prompts."""
        return self._share.at(now)

    @property
    def pace(self) -> StepPace:
        """The ratio of its recent steps' times to their predictions."""
        return self._meter.pace

    # --- requests come --------------------------------------------------------------------------------------

    def enqueue(self, job: SimulatedJob, now: float) -> None:
        """Takes a prompt to compute."""
        job.ahead = tokens_ahead(job.arrival.prompt, self._missing())
        self.queued += job.missing
        delay = GPU_YIELD.seconds(job.arrival.prompt)
        heapq.heappush(self._waiting, (now + delay, job.number, job))

    def pledge(self, job: SimulatedJob) -> None:
        """Counts a sequence that will decode here."""
        self.pledged += 1
        self.pledged_context += job.arrival.prompt

    def unpledge(self, job: SimulatedJob) -> None:
        """Counts it no longer: it decodes now, or needs no decoding."""
        self.pledged -= 1
        self.pledged_context -= job.arrival.prompt

    def receive(self, job: SimulatedJob) -> None:
        """Takes a sequence whose prompt was computed elsewhere and has arrived."""
        self._joining.append(job)

    def release(self, job: SimulatedJob) -> None:
        """Frees the prompt's pages, which have been copied."""
        self._free(job, job.arrival.prompt)

    # --- steps ----------------------------------------------------------------------------------------------

    def begin(self, now: float) -> SimulatedStep | None:
        """Composes the next step, which the caller ends by `finish`; None: nothing can run."""
        self._join()
        self.version += 1
        rows = self._compose()
        decoding = len(self._decoding)
        if rows:
            self.step = SimulatedStep(now, self._step_s(self.hardware.times, rows), 1, rows)
        elif decoding:
            rounds = self._decoding[0][0] - self._rounds
            self.step = SimulatedStep(now, self._step_s(self.hardware.times, (), rounds), rounds)
        else:
            self.step = None
        return self.step

    def interrupt(self, now: float) -> SimulatedStep | None:
        """Cuts a row of steps without prompts after the one that runs now; None: there is nothing to cut."""
        step = self.step
        if step is None or step.rows or step.rounds == 1:
            return None
        done = int((now - step.start_s) / step.each_s) + 1 + LAUNCHED_AHEAD
        if done >= step.rounds:
            return None
        step.rounds = done
        self.version += 1
        return step

    def finish(self) -> tuple[list[SimulatedJob], list[SimulatedJob]]:
        """Ends the step: the jobs whose prompts it completed, and those whose answers."""
        step = self.step
        assert step is not None
        self.step = None
        self._share.ran(step.start_s, step.end_s, prompts=bool(step.rows))
        decoding = len(self._decoding)
        if self._believed is not None:
            total = sum(count for _, count in step.rows)
            predicted = self._step_s(self._believed, step.rows, step.rounds)
            self._meter.ran(decoding, total, step.end_s - step.start_s, step.rounds * predicted)
        self._rounds += step.rounds
        self._context += step.rounds * decoding
        ended = []
        while self._decoding and self._decoding[0][0] <= self._rounds:
            job = heapq.heappop(self._decoding)[2]
            self._context -= job.length - 1
            self._free(job, job.length)
            ended.append(job)
        computed = [job for job, rows in step.rows if self._compute(job, rows)]
        return computed, ended

    def decode(self, job: SimulatedJob) -> bool:
        """Lets a sequence whose prompt is here decode its further tokens; False: it has none, and ends."""
        if job.arrival.output == 1:
            self._free(job, job.length)
            return False
        self._add(job)
        return True

    # --- inside ---------------------------------------------------------------------------------------------

    def _compose(self) -> tuple[tuple[SimulatedJob, int], ...]:
        """The prompt rows of the next step."""
        if not self.queued:
            return ()
        room = prompt_room(self.hardware.budget, len(self._decoding), self._missing())
        rows = []

        def take(job: SimulatedJob) -> None:
            nonlocal room
            taken = min(job.missing, room.of(job.uncached))
            room = room.behind(job.uncached, taken)
            if taken:
                rows.append((job, taken))

        for job in self._prompts:
            take(job)
        while room.rows and self._waiting and self._admit(self._waiting[0][2]):
            job = heapq.heappop(self._waiting)[2]
            self._prompts.append(job)
            take(job)
        return tuple(rows)

    def _missing(self) -> Iterator[WaitingPrompt]:
        """The prompts that are not computed."""
        for job in itertools.chain(self._prompts, (job for _, _, job in self._waiting)):
            yield WaitingPrompt(job.uncached, job.missing, job.ahead)

    def _admit(self, job: SimulatedJob) -> bool:
        tokens = self.hardware.held(job.arrival.prompt if job.apart else job.length)
        running = len(self._decoding) + len(self._prompts)
        if running >= self.hardware.max_running or self._reserved + tokens > self.hardware.pool_tokens:
            return False
        self._reserved += tokens
        cached = self.cache.cached(job.arrival.blocks, job.arrival.prompt)
        job.cached, missing = cached, job.arrival.prompt - cached
        self.queued += missing - job.missing
        job.missing = missing
        return True

    def _join(self) -> None:
        while self._joining:
            job = self._joining[0]
            full = len(self._decoding) + len(self._prompts) >= self.hardware.max_running
            held = self.hardware.held(job.length)
            if full or self._reserved + held > self.hardware.pool_tokens:
                return
            self._joining.popleft()
            self.unpledge(job)
            self._reserved += held
            self._add(job)

    def _add(self, job: SimulatedJob) -> None:
        heapq.heappush(self._decoding, (self._rounds + job.arrival.output - 1, job.number, job))
        self._context += job.arrival.prompt

    def _compute(self, job: SimulatedJob, rows: int) -> bool:
        """Counts computed rows; True: the prompt is complete."""
        job.missing -= rows
        self.queued -= rows
        if job.missing:
            return False
        self._prompts.remove(job)
        self._cache(job, self.hardware.pool_tokens)
        return True

    def _free(self, job: SimulatedJob, tokens: int) -> None:
        self._reserved -= self.hardware.held(tokens)
        self._cache(job, self.hardware.pool_tokens - self._reserved)

    def _cache(self, job: SimulatedJob, room: int) -> None:
        """Holds the blocks of its prompt; of layers with windows next to nothing is cached."""
        self.cache.add(job.arrival.blocks, int(room / max(self.hardware.lasting, LEAST_LASTING)))

    def _step_s(self, times: StepTimes, rows: tuple[tuple[SimulatedJob, int], ...], rounds: int = 1) -> float:
        """Seconds of a step with these prompt rows; without any, of the one in the middle of `rounds`."""
        decoding = len(self._decoding)
        pairs = sum(count * (job.arrival.prompt - job.missing + count / 2) for job, count in rows)
        total = sum(count for _, count in rows)
        return times.step_s(decoding, self._context + decoding * (rounds - 1) / 2, total, pairs)
