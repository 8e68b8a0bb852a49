"""The events of a simulated cluster: arrivals, ends of steps, pages that arrive, preferences that change.

Requests are placed by the gateway's own policy (`gateway.routing.placement`, `gateway.routing.preference`),
from a snapshot that is never late.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from eyas.common.step_times import StepPace, StepTimes, mean_pace
from eyas.simulator.hardware import WorkerHardware
from eyas.simulator.worker import SimulatedJob, SimulatedStep, SimulatedWorker
from eyas.simulator.workload import SimulatedRequest
from gateway.routing.capacity import RequestMix, within_reach
from gateway.routing.placement import (
    AdmissionPreference,
    LatencyTargets,
    MeasuredRates,
    RequestPlacement,
    WorkerPlace,
    place,
)
from gateway.routing.preference import DemandMeter, PaceMemory, estimates, prefer, preferring

ASK_EVERY_S = 1.0
"""How often the number of workers that prefer prompts is thought over."""


class ClusterLayout(Enum):
    """The roles of workers: all of them, one each, or as the policy says."""

    UNIFIED = "unified"
    SPLIT = "split"
    AUTO = "auto"


@dataclass(frozen=True)
class ClusterShape:
    """A cluster of alike workers. `prefill`: of a split one, how many compute prompts (the first ones).

    `believed`: what the workers say of their steps at their start, if that is not what steps really take.
    """

    hardware: WorkerHardware
    workers: int
    layout: ClusterLayout
    targets: LatencyTargets
    prefill: int = 0
    believed: StepTimes | None = None


@dataclass
class SimulationResult:
    """The result of a load: its jobs in order of arrival, and each worker as it was left.

    `refused`: the jobs that came while every worker was full. `flips`: how often preferences changed.
    """

    jobs: list[SimulatedJob]
    refused: list[SimulatedJob]
    workers: list[SimulatedWorker]
    end_s: float
    flips: int


Policy = Callable[[SimulatedRequest, Sequence[WorkerPlace]], RequestPlacement | None]
"""Places a request: the workers are the indices of their places, as text. None: every worker is full."""


def play(
    shape: ClusterShape, arrivals: Iterable[SimulatedRequest], policy: Policy | None = None
) -> SimulationResult:
    """Runs a load to its end. Arrivals come in order of time. Deterministic, if `policy` is.

    `policy`: None: the gateway's for `--layout auto`, within what the layout allows.
    """
    return _SimulatedCluster(shape, policy).run(iter(arrivals))


class _SimulatedCluster:
    def __init__(self, shape: ClusterShape, policy: Policy | None) -> None:
        self._shape = shape
        self._policy = policy or self._predicted
        self._auto = shape.layout is ClusterLayout.AUTO
        hardware = shape.hardware
        self._workers = [SimulatedWorker(hardware, shape.believed) for _ in range(shape.workers)]
        self._rates = MeasuredRates(shape.believed or hardware.times, hardware.budget, shape.targets)
        self._preferences = [AdmissionPreference.ANY] * shape.workers
        self._leaving = [0.0] * shape.workers  # when each worker's outgoing link is free
        self._coming = [0.0] * shape.workers  # and its incoming one
        self._events: list[tuple[float, int, int, int, SimulatedJob | None]] = []
        self._order = itertools.count()
        self._demand = DemandMeter()
        self._ask_s = ASK_EVERY_S
        self._paces = PaceMemory()
        self._thought: tuple[RequestMix, StepPace] | None = None  # that the estimates are for
        self._bears: list[float] = []  # requests per second by the number of workers that prefer prompts
        self._played = SimulationResult([], [], self._workers, 0.0, 0)

    def run(self, arrivals: Iterable[SimulatedRequest]) -> SimulationResult:
        """Takes the arrivals and all that follows from them in order of time."""
        for number, arrival in enumerate(arrivals):
            self._advance(arrival.at_s)
            self._arrive(number, arrival)
        self._advance(float("inf"))
        return self._played

    def _advance(self, until: float) -> None:
        """Handles every event before `until`."""
        while self._events and self._events[0][0] <= until:
            now, _, index, version, job = heapq.heappop(self._events)
            worker = self._workers[index]
            if job is not None:
                self._pages_arrived(now, job)
            elif version == worker.version:
                self._end_step(now, index)
                self._played.end_s = now

    def _at(self, when: float, index: int, version: int = 0, job: SimulatedJob | None = None) -> None:
        heapq.heappush(self._events, (when, next(self._order), index, version, job))

    # --- requests -------------------------------------------------------------------------------------------

    def _arrive(self, number: int, arrival: SimulatedRequest) -> None:
        now = arrival.at_s
        if self._auto and now >= self._ask_s:
            self._think(now)
        placement = None
        hardware = self._shape.hardware
        if hardware.held(arrival.prompt + arrival.output) <= hardware.pool_tokens:
            places = [self._place(index, arrival, now) for index in range(len(self._workers))]
            placement = self._policy(arrival, places)
        if placement is None:
            self._refuse(SimulatedJob(number, arrival, -1, -1))
            return
        decode = int(placement.decode)
        job = SimulatedJob(
            number, arrival, decode, decode if placement.prefill is None else int(placement.prefill)
        )
        job.missing = arrival.prompt - self._workers[job.prefill].cache.cached(arrival.blocks, arrival.prompt)
        self._demand.add_request(now, arrival.prompt, job.missing)
        self._demand.answered(arrival.output)
        self._played.jobs.append(job)
        self._workers[job.prefill].enqueue(job, now)
        self._workers[decode].pledge(job)
        self._wake(job.prefill, now)

    def _predicted(self, arrival: SimulatedRequest, places: Sequence[WorkerPlace]) -> RequestPlacement | None:
        apart = self._shape.layout is not ClusterLayout.UNIFIED
        return place(arrival.prompt, places, self._rates, apart)

    def _refuse(self, job: SimulatedJob) -> None:
        self._played.jobs.append(job)
        self._played.refused.append(job)

    def _place(self, index: int, arrival: SimulatedRequest, now: float) -> WorkerPlace:
        worker, shape = self._workers[index], self._shape
        split = shape.layout is ClusterLayout.SPLIT
        room = max(shape.hardware.max_waiting - worker.waiting, 0)
        seats = max(shape.hardware.max_running + shape.hardware.max_waiting - worker.sequences, 0)
        return WorkerPlace(
            worker=str(index),
            sequences=worker.sequences,
            context=worker.context,
            queued=worker.queued,
            prompt_share=worker.prompt_share(now),
            prefill_room=0 if split and index >= shape.prefill else room,
            decode_room=0 if split and index < shape.prefill else seats,
            cached=worker.cache.cached(arrival.blocks, arrival.prompt) if arrival.blocks else 0,
            preference=self._preferences[index],
        )

    # --- steps ----------------------------------------------------------------------------------------------

    def _wake(self, index: int, now: float) -> None:
        """Wakes a worker that got something: it begins a step, or ends its row of steps early."""
        worker = self._workers[index]
        if worker.step is None:
            self._begin(index, now)
        else:
            cut = worker.interrupt(now)
            if cut is not None:
                self._at(cut.end_s, index, worker.version)

    def _begin(self, index: int, now: float) -> None:
        worker = self._workers[index]
        step: SimulatedStep | None = worker.begin(now)
        if step is not None:
            self._at(step.end_s, index, worker.version)

    def _end_step(self, now: float, index: int) -> None:
        worker = self._workers[index]
        prompts = [job for job, _ in worker.step.rows] if worker.step else []
        computed, ended = worker.finish()
        for job in ended:
            job.end_s = now
            self._answered(job)
        for job in computed:
            job.first_s = now
            if not job.apart:
                worker.unpledge(job)
                if not worker.decode(job):
                    job.end_s = now
        for job in prompts:
            if job.apart:
                self._send(job, now)
        self._begin(index, now)

    def _answered(self, job: SimulatedJob) -> None:
        assert job.first_s is not None and job.end_s is not None
        targets, later = self._rates.targets, max(job.arrival.output - 1, 1)
        first_s = job.first_s - job.arrival.at_s + self._shape.hardware.front_s
        met = first_s <= targets.ttft_s and (job.end_s - job.first_s) / later <= targets.tpot_s
        self._demand.targets.ended(job.end_s, job.arrival.at_s, met)

    # --- pages ----------------------------------------------------------------------------------------------

    def _send(self, job: SimulatedJob, now: float) -> None:
        """Lets the pages that a step filled travel while the next step runs, after all that left its worker
        or is on its way to the other. What layers with windows still hold, and states, go with the last.
        """
        complete = not job.missing
        if job.arrival.output == 1:
            if complete:
                self._answered_by_prompt(job, now)
            return
        hardware = self._shape.hardware
        there = self._workers[job.decode].cache.cached(job.arrival.blocks, job.arrival.prompt)
        done = job.arrival.prompt - job.missing
        moved = max(done - max(job.sent, there), 0) * hardware.lasting * hardware.kv_bytes_per_token
        job.sent = done
        if complete:
            whole = done - there
            moved += (hardware.held(whole) - whole * hardware.lasting) * hardware.kv_bytes_per_token
            moved += hardware.state_bytes
        busy = moved / hardware.link_bytes_per_s
        leaves = max(now, self._leaving[job.prefill])
        self._leaving[job.prefill] = leaves + busy
        self._coming[job.decode] = max(leaves, self._coming[job.decode]) + busy
        if complete:
            self._at(self._coming[job.decode] + hardware.link_s, job.prefill, job=job)

    def _answered_by_prompt(self, job: SimulatedJob, now: float) -> None:
        """Ends a request of one token: no pages travel."""
        job.end_s = now
        self._workers[job.decode].unpledge(job)
        self._workers[job.prefill].release(job)

    def _pages_arrived(self, now: float, job: SimulatedJob) -> None:
        self._workers[job.prefill].release(job)
        self._workers[job.decode].receive(job)
        self._wake(job.prefill, now)
        self._wake(job.decode, now)

    # --- preferences ----------------------------------------------------------------------------------------

    def _think(self, now: float) -> None:
        """Lets preferences follow what was asked since the last time, and how long steps took."""
        self._ask_s = now + ASK_EVERY_S
        empty = SimulatedRequest(now, 1, 1)
        places = [self._place(index, empty, now) for index in range(len(self._workers))]
        prefilling = preferring(places)
        self._paces.record(prefilling, mean_pace(worker.pace for worker in self._workers))
        mix, pace = self._demand.mix(), self._paces.at(prefilling)
        if mix is None:
            return
        if (mix, pace) != self._thought:
            self._thought = mix, pace
            times, targets = replace(self._rates.times, pace=pace), self._shape.targets
            rates = replace(self._rates, times=times, targets=targets, answer=mix.output)
            self._rates = replace(rates, targets=within_reach(mix, len(places), rates))
            self._bears = estimates(mix, len(places), self._rates, self._paces)
        preferences = prefer(places, self._demand.best_split(now, self._bears, prefilling))
        new = [preferences[str(index)] for index in range(len(self._workers))]
        self._played.flips += new != self._preferences
        self._preferences = new
