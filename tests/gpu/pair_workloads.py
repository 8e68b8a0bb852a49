"""The loads of the goodput campaign, and the rates at which layouts of two GPUs, or more, are compared.

    python -m tests.gpu.pair_workloads [--workers 8] [--rates FILE --slo ttft=1s,tpot=40ms]

prints the simulated knees of every layout, each at its best mixed-step size, from which the rates follow. The
same draws are simulated and sent: a load is a list of simulated requests, and its blocks become token ids.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from eyas.bench.jobs import LoadJob
from eyas.bench.records import LatencySlo
from eyas.common.prompt_room import StepBudget
from eyas.simulator.cluster import ClusterLayout, ClusterShape, play
from eyas.simulator.goodput import ATTAINMENT, Draw, LoadOutcome, outcome
from eyas.simulator.hardware import WorkerHardware, example, read_hardware
from eyas.simulator.workload import BLOCK_TOKENS, ChatTraffic, RandomTraffic, SimulatedRequest, chats, poisson
from gateway.routing.placement import LatencyTargets
from tests.gpu.pair_load import token_ids
from tests.gpu.pair_rig import PAIR

MIXED = (256, 512, 1024)
SEED = 1
PRECISION = 1.02
TARGETS = LatencyTargets(1.0, 0.008)
"""One pair for all workloads: a cluster that decides per request is told it at its start."""

SHARES = (0.85, 1.0)
"""Rates are these parts of the higher knee of the static layouts, as simulated."""


@dataclass(frozen=True)
class Workload:
    """A load, its targets, and the rates per second at which it is sent for `seconds`.

    Requests of the first `warm_s` are not counted: batches fill, and `auto` finds its preferences. `knee`: of
    the better static layout of two workers, simulated with the very requests of SEED's runs.
    """

    name: str
    draw: Draw
    knee: float
    targets: LatencyTargets = TARGETS
    more: tuple[float, ...] = ()
    seconds: float = 16.0
    warm_s: float = 4.0

    @property
    def rates(self) -> tuple[float, ...]:
        """In rising order."""
        return tuple(sorted({*self.near(SHARES), *self.more}))

    def near(self, shares: Sequence[float]) -> tuple[float, ...]:
        """These parts of the knee, in two digits, for people."""
        return tuple(float(f"{share * self.knee:.2g}") for share in shares)

    def scaled(self, share: float) -> Workload:
        """The same load; its rates are multiplied by `share`."""
        return replace(self, knee=self.knee * share, more=tuple(share * rate for rate in self.more))

    def arrivals(self, rate: float, seed: int) -> list[SimulatedRequest]:
        """The requests of one run; no rate and no workload shares a prompt with another."""
        drawn = self.draw(rate, round(2 * rate * self.seconds) + 40, seed)
        return [arrival for arrival in drawn if arrival.at_s < self.seconds]

    def drain_s(self, arrivals: Sequence[SimulatedRequest]) -> float:
        """How long after its arrival a request may end, and still have kept its targets."""
        longest = max(arrival.output for arrival in arrivals)
        return self.targets.ttft_s + self.targets.tpot_s * longest + 1.0


def gamma(
    traffic: RandomTraffic, rate: float, count: int, seed: int, cv: float = 3.0
) -> list[SimulatedRequest]:
    """Requests in bursts: gaps of a gamma distribution, `cv` its standard deviation over its mean."""
    rng, shape = random.Random(f"gamma {seed}"), cv**-2
    at_s, arrivals = 0.0, []
    for request in poisson(traffic, rate, count, seed):
        at_s += rng.gammavariate(shape, 1 / (rate * shape))
        arrivals.append(replace(request, at_s=at_s))
    return arrivals


def _plain(prompt: int, answer: int) -> Draw:
    return partial(poisson, RandomTraffic(prompt, answer))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("256/512", _plain(256, 512), 47.9),
        Workload("1024/1024", _plain(1024, 1024), 13.1, seconds=20.0, warm_s=8.0),
        Workload("2000/1000", _plain(2000, 1000), 7.5, seconds=20.0, warm_s=8.0),
        Workload("8192/256", _plain(8192, 256), 3.8, more=(2.0,), seconds=30.0, warm_s=12.0),
        Workload("chats", partial(chats, ChatTraffic(6, 512, 256, 1.5)), 22.6, seconds=22.0, warm_s=9.0),
        Workload("bursts", partial(gamma, RandomTraffic(1024, 256)), 32.1, seconds=28.0, warm_s=12.0),
    )
}


def small(workload: Workload) -> Workload:
    """The same in little, to try a script with the embedded model on a CPU."""
    draws: dict[str, Draw] = {
        "chats": partial(chats, ChatTraffic(2, 600, 8, 0.5)),
        "bursts": partial(gamma, RandomTraffic(32, 8)),
        "8192/256": _plain(256, 8),
    }
    draw = draws.get(workload.name, _plain(16, 16))
    return replace(
        workload, draw=draw, targets=LatencyTargets(2.0, 0.2), knee=2.0, more=(), seconds=5.0, warm_s=1.0
    )


def jobs(arrivals: Sequence[SimulatedRequest], vocabulary: int, *seed: int) -> list[LoadJob]:
    """The requests as they are sent: a block's tokens follow from its id, those after the blocks are new.

    So a cache of pages finds the same tokens of a prompt as the simulator's cache of blocks does.
    """
    blocks: dict[int, tuple[int, ...]] = {}
    found = []
    for number, arrival in enumerate(arrivals):
        ids: list[int] = []
        for block in arrival.blocks:
            if block not in blocks:
                blocks[block] = token_ids(vocabulary, BLOCK_TOKENS, *seed, 0, block)
            ids += blocks[block]
        ids += token_ids(vocabulary, arrival.prompt - len(ids), *seed, 1, number)
        found.append(LoadJob.single(tuple(ids), arrival.output, arrival.at_s))
    return found


@dataclass(frozen=True)
class Cluster:
    """Workers that are alike; half of them prefill in a split layout. `mixed`: of a step; None: theirs."""

    layout: ClusterLayout
    mixed: int | None = None
    workers: int = PAIR
    hardware: WorkerHardware = field(default_factory=example)

    def shape(self, targets: LatencyTargets) -> ClusterShape:
        """As the simulator has it."""
        hardware, prefill = self.hardware, self.workers // 2 if self.layout is ClusterLayout.SPLIT else 0
        if self.mixed is not None:
            hardware = replace(hardware, budget=StepBudget(hardware.budget.chunk_tokens, self.mixed))
        return ClusterShape(hardware, self.workers, self.layout, targets, prefill)


def simulated(workload: Workload, arrivals: Sequence[SimulatedRequest], cluster: Cluster) -> LoadOutcome:
    """What the simulator says of the very requests that are sent."""
    return outcome(play(cluster.shape(workload.targets), arrivals), workload.targets, workload.warm_s)


def window_knee(workload: Workload, cluster: Cluster) -> float:
    """The highest rate at which SEED's run keeps the targets, between a quarter of the knee and twice it."""
    return knee_between(workload, cluster, workload.knee / 4, workload.knee * 2)


def knee_between(
    workload: Workload, cluster: Cluster, good: float, bad: float, precision: float = PRECISION
) -> float:
    """The same between two rates; `good`, if none above it does."""
    while bad > good * precision:
        rate = (good * bad) ** 0.5
        run = simulated(workload, workload.arrivals(rate, SEED), cluster)
        good, bad = (rate, bad) if run.attainment >= ATTAINMENT else (good, rate)
    return good


def add_load(parser: argparse.ArgumentParser) -> None:
    """The flags that say what a cluster is asked."""
    add = parser.add_argument
    add("--workers", type=int, default=PAIR, help="of a cluster (%(default)d)")
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add(
        "--slo",
        type=LatencySlo.parse,
        metavar="ttft=T,tpot=T",
        help="bounds of a good request (ttft=1s,tpot=8ms)",
    )


def workloads(args: argparse.Namespace) -> list[Workload]:
    """Of the flags of `add_load`: a knee grows with the workers."""
    found = [WORKLOADS[name].scaled(args.workers / PAIR) for name in args.workloads]
    bounds = {f"{kind}_s": bound for kind, bound in (args.slo.bounds_s if args.slo else {}).items()}
    return [replace(workload, targets=replace(workload.targets, **bounds)) for workload in found]


def main() -> None:
    """The command line: prints knees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_load(parser)
    parser.add_argument("--rates", type=Path, metavar="FILE", help="what a worker does (an 8B model's)")
    args = parser.parse_args()
    hardware = read_hardware(args.rates) if args.rates else example()
    slower = hardware.times.step_s(1, 0.0) / example().times.step_s(1, 0.0)
    for workload in (workload.scaled(1.0 / slower) for workload in workloads(args)):
        said = [workload.name.ljust(10)]
        for layout in ClusterLayout:
            clusters = {mixed: Cluster(layout, mixed, args.workers, hardware) for mixed in MIXED}
            knees = {mixed: window_knee(workload, cluster) for mixed, cluster in clusters.items()}
            best = max(knees, key=lambda mixed: knees[mixed])
            said.append(
                f"{layout.value} " + " ".join(f"{knees[m]:.1f}@{m}" + "*" * (m == best) for m in MIXED)
            )
        print("; ".join(said), "-> rates", *workload.rates, flush=True)


if __name__ == "__main__":
    main()
