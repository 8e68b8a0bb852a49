"""The highest rate at which enough requests keep their targets, found by playing a load at several rates.

More load never helps: the search halves the gap between a rate that was borne and one that was not. Every
layout sees the same draws, so that chance is the same for all. A played load has the figures of `eyas bench
serve`: TTFT from arrival to the first token, TPOT over the tokens after it, goodput in requests per second
that keep every target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eyas.simulator.cluster import ClusterShape, SimulationResult, play
from eyas.simulator.worker import SimulatedJob
from eyas.simulator.workload import SimulatedRequest
from gateway.routing.placement import LatencyTargets

ATTAINMENT = 0.9
"""The part of the requests that must keep every target."""
WARM_UP_S = 15.0
"""Earlier requests are not counted: batches fill, and preferences settle."""
LOWEST, HIGHEST = 1 / 64, 65536.0
Draw = Callable[[float, int, int], Sequence[SimulatedRequest]]
"""Rate per second, number of requests, seed."""


@dataclass(frozen=True)
class SearchEffort:
    """How a knee is searched: to the factor `precision`, by loads that last `seconds` after the warm-up, or
    as long as `fewest` requests take.
    """

    seconds: float = 90.0
    fewest: int = 300
    precision: float = 1.02
    seed: int = 1


@dataclass(frozen=True)
class GoodputKnee:
    """The highest rate per second that was borne, 0.0 if none was, and what happened at it."""

    rate: float
    outcome: LoadOutcome | None


def measure(shape: ClusterShape, draw: Draw, rate: float, effort: SearchEffort) -> LoadOutcome:
    """Simulates one rate once the cluster is warm."""
    count = max(effort.fewest, round(rate * effort.seconds)) + round(rate * WARM_UP_S)
    return outcome(play(shape, draw(rate, count, effort.seed)), shape.targets, WARM_UP_S)


def find_knee(shape: ClusterShape, draw: Draw, effort: SearchEffort, guess: float) -> GoodputKnee:
    """The knee of a cluster, looked for from `guess` requests per second."""
    best, missed = GoodputKnee(0.0, None), float("inf")
    rate, factor = min(max(guess, LOWEST), HIGHEST), 1.25
    while missed > best.rate * effort.precision and LOWEST <= rate <= HIGHEST:
        outcome = measure(shape, draw, rate, effort)
        if outcome.attainment >= ATTAINMENT:
            best = GoodputKnee(rate, outcome)
        else:
            missed = rate
        if best.rate and missed < float("inf"):
            rate = (best.rate * missed) ** 0.5
        else:
            rate = rate * factor if best.rate else rate / factor
            factor *= factor
    return best


def best_knee(
    shapes: Sequence[ClusterShape], draw: Draw, effort: SearchEffort, guess: float
) -> tuple[ClusterShape, GoodputKnee]:
    """The shape that bears most, and its knee. `shapes`: one or more, the likeliest first.

    Only a shape that bears more than the best before it is searched: the others cost one play each.
    """
    best, knee = shapes[0], find_knee(shapes[0], draw, effort, guess)
    for shape in shapes[1:]:
        more = knee.rate * effort.precision
        if not more or measure(shape, draw, more, effort).attainment >= ATTAINMENT:
            best, knee = shape, find_knee(shape, draw, effort, more or guess)
    return best, knee


@dataclass(frozen=True)
class LoadOutcome:
    """Seconds and rates of a load. `attainment`: the share of good requests; `goodput`: those per second."""

    requests: int
    refused: int
    attainment: float
    goodput: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    output_tokens_per_s: float
    apart: float
    """The part of the requests that two workers shared."""


def ttft_s(job: SimulatedJob, front_s: float) -> float:
    """The time from arrival to the first token at the client; infinite for a refused request."""
    return float("inf") if job.first_s is None else job.first_s - job.arrival.at_s + front_s


def tpot_s(job: SimulatedJob) -> float:
    """Per token after the first; 0 of an answer of one token."""
    if job.first_s is None or job.end_s is None or job.arrival.output == 1:
        return 0.0
    return (job.end_s - job.first_s) / (job.arrival.output - 1)


def outcome(played: SimulationResult, targets: LatencyTargets, warm_up_s: float = 0.0) -> LoadOutcome:
    """Figures of the requests that came after `warm_up_s`, of which there must be one."""
    jobs = [job for job in played.jobs if job.arrival.at_s >= warm_up_s]
    front_s = played.workers[0].hardware.front_s
    firsts = sorted(ttft_s(job, front_s) for job in jobs)
    rest = sorted(tpot_s(job) for job in jobs if job.end_s is not None and job.arrival.output > 1)
    good = sum(
        ttft_s(job, front_s) <= targets.ttft_s and tpot_s(job) <= targets.tpot_s and job.end_s is not None
        for job in jobs
    )
    sent_s = max(jobs[-1].arrival.at_s - jobs[0].arrival.at_s, 1e-9)
    tokens = sum(job.arrival.output for job in jobs if job.end_s is not None)
    return LoadOutcome(
        requests=len(jobs),
        refused=sum(job.end_s is None for job in jobs),
        attainment=good / len(jobs),
        goodput=good / sent_s,
        ttft_p50_s=quantile(firsts, 0.5),
        ttft_p90_s=quantile(firsts, 0.9),
        ttft_p99_s=quantile(firsts, 0.99),
        tpot_p50_s=quantile(rest, 0.5),
        tpot_p99_s=quantile(rest, 0.99),
        output_tokens_per_s=tokens / max(played.end_s - jobs[0].arrival.at_s, 1e-9),
        apart=sum(job.apart for job in jobs) / len(jobs),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the quantile of ascending values, by the nearest one; 0 of none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
