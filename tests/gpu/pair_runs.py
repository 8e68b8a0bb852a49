"""Runs of the goodput campaign read back: which requests kept the targets, and what that makes.

It knows the lines of `goodput.jsonl`. A run holds the same requests, in the same order, for every layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eyas.bench.saved import Floats
from eyas.simulator.goodput import ATTAINMENT
from eyas.simulator.workload import SimulatedRequest
from gateway.routing.placement import LatencyTargets
from tests.gpu.pair_workloads import WORKLOADS, Workload, small


@dataclass(frozen=True)
class Run:
    """One layout under one load. `counted`: the requests after the warm-up; arrays have all of them."""

    layout: str
    mixed: int | None
    workload: Workload
    rate: float
    seed: int
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Run:
        """From a line's object."""
        workload = WORKLOADS[fields["workload"]]
        workload = small(workload) if fields["small"] else workload
        workload = replace(workload, targets=LatencyTargets(*fields["targets"]))
        return cls(fields["layout"], fields["mixed"], workload, fields["rate"], fields["seed"], fields)

    @property
    def name(self) -> str:
        """The layout, and its mixed-step size if it is not the default."""
        return self.layout if self.mixed is None else f"{self.layout}@{self.mixed}"

    @property
    def case(self) -> tuple[str, float, int]:
        """What was sent: the same for every layout."""
        return self.workload.name, self.rate, self.seed

    @property
    def arrivals(self) -> list[SimulatedRequest]:
        """The requests, drawn again."""
        return self.workload.arrivals(self.rate, self.seed)

    @property
    def counted(self) -> Any:
        """Which requests count: [requests] of bool."""
        return np.array([arrival.at_s >= self.workload.warm_s for arrival in self.arrivals])

    def column(self, name: str) -> Floats:
        """A quantity in seconds of the requests that count and succeeded."""
        good = self.counted & np.array([not error for error in self.fields["errors"]])
        return np.asarray(self.fields[name], dtype=float)[good]

    @property
    def met(self) -> Floats:
        """1.0 for each request that counts and kept the targets, else 0.0; lateness of the client counts."""
        fields, targets = self.fields, self.workload.targets
        first = np.add(fields["ttft_s"], fields["waited_s"])
        good = np.array([not error for error in fields["errors"]])
        kept = good & (first <= targets.ttft_s) & (np.asarray(fields["tpot_s"]) <= targets.tpot_s)
        return kept[self.counted].astype(float)

    @property
    def attainment(self) -> float:
        """The part of the requests that kept the targets."""
        return float(self.met.mean())

    @property
    def goodput(self) -> float:
        """Requests per second that kept the targets, over the time in which they came."""
        times = [arrival.at_s for arrival in self.arrivals if arrival.at_s >= self.workload.warm_s]
        return float(self.met.sum()) / max(times[-1] - times[0], 1e-9)

    @property
    def failed(self) -> int:
        """Requests that failed or did not end in time."""
        return sum(bool(error) for error in self.fields["errors"])

    def line(self) -> str:
        """A row under `pair_goodput.HEAD`."""
        spreads = "".join(f"{_spread(self.column(name)):>18}" for name in ("ttft_s", "tpot_s"))
        return (
            f"{self.name:<13}{self.workload.name:<10}{self.rate:>6g}{len(self.met):>6}{self.attainment:>8.1%}"
            f"{self.goodput:>9.2f}{spreads}{self.failed:>8}{self.fields['gateway_cpu']:>9.2f}{self.fields['client_cpu']:>8.2f}"
            f"{self.fields['client_lag_ms']:>8.1f}"
        )


def _spread(seconds: Floats) -> str:
    if not len(seconds):
        return "-"
    return ", ".join(f"{1e3 * value:.2f}" for value in np.quantile(seconds, (0.5, 0.9)))


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs of all files; of one that was made twice, the later.

    Raises ValueError if they are of clusters that one table cannot compare.
    """
    found: dict[tuple[object, ...], Run] = {}
    clusters: set[tuple[int, LatencyTargets]] = set()
    for path in paths:
        for line in path.read_text().splitlines():
            fields = json.loads(line)
            if fields["event"] == "run":
                run = Run.read(fields)
                found[run.name, *run.case] = run
                clusters.add((run.fields["workers"], run.workload.targets))
    if len(clusters) > 1:
        raise ValueError("the files are of several numbers of workers, or of several targets")
    return list(found.values())


def bears(points: Sequence[tuple[float, float]]) -> tuple[float, str]:
    """The rate at which ATTAINMENT is kept, from (rate, attainment); and "", or "<" or ">" for a bound only.

    Between the highest rate that was borne and the next one, on a straight line.
    """
    points = sorted(points)
    borne = [point for point in points if point[1] >= ATTAINMENT]
    if not borne:
        return points[0][0], "<"
    good = borne[-1]
    above = [point for point in points if point[0] > good[0]]
    if not above:
        return good[0], ">"
    bad = above[0]
    share = (good[1] - ATTAINMENT) / (good[1] - bad[1])
    return good[0] + share * (bad[0] - good[0]), ""
