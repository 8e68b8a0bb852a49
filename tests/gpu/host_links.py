"""What links between hosts are predicted to give an 8B model's prompts, simulated: no card is needed.

    python -m tests.gpu.host_links [--seconds 20]

The table of docs/clusters.md: how long token 2 of one prompt alone comes after token 1, and the highest rate
of 8192/256 that two hosts of eight GPUs bear, one of which computes prompts while the other decodes. Workers
are those of `eyas plan`. Rates of ways were measured between GPUs of one host; those of cards are assumed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial

from eyas.simulator.cluster import ClusterLayout, ClusterShape, play
from eyas.simulator.goodput import SearchEffort, find_knee, measure
from eyas.simulator.hardware import WorkerHardware, example
from eyas.simulator.workload import RandomTraffic, SimulatedRequest, poisson
from gateway.routing.placement import LatencyTargets

PROMPT, ANSWER = 8192, 256
TARGETS = LatencyTargets(1.0, 0.008)
DRAW = partial(poisson, RandomTraffic(PROMPT, ANSWER))
GPUS = 8
"""Of a host; all of them share its cards."""

CARD = 0.8 * 50.0
"""GB/s of a card of 400 Gb/s. Assumed: 80 % of line, as Eyas's READs over NVLink had of a bare loop's."""

PCIE, READS, SLOTS, TCP = 54.0, 160.0, 19.4, 5.4
"""GB/s, measured: a GPU's PCIe copy; READs of scattered pages; pinned slots; TCP between two workers."""

HANDOVER_S = 3.0e-3
"""From the last copy to token 2's launch, as traced: the word of the prompt's end, its notice, the launch."""


@dataclass(frozen=True)
class HostLink:
    """A way between two hosts: GB/s that a pair of GPUs gets alone, and with all GPUs of the hosts busy."""

    name: str
    alone: float
    shared: float

    @classmethod
    def over(cls, name: str, way: float, cards: float) -> HostLink:
        """`way`: GB/s of one pair of workers without a bound by cards; `cards`: of all cards of a host."""
        return cls(name, min(way, cards), min(way, cards / GPUS))

    def worker(self, rate: float) -> WorkerHardware:
        """The 8B model's worker, whose pages leave at `rate` GB/s."""
        return replace(example(), link_bytes_per_s=1e9 * rate, link_s=HANDOVER_S)


LINKS = (
    HostLink.over("`cuda_ipc` in one host, to compare", 330.0, 330.0 * GPUS),
    *(HostLink.over(f"`rdma`, {n} x 400 Gb/s", min(PCIE, READS), n * CARD) for n in (8, 4, 1)),
    *(HostLink.over(f"`nixl` by pinned slots, {n} x 400 Gb/s", SLOTS, n * CARD) for n in (8, 4, 1)),
    HostLink.over("`tcp`, 400 Gb/s", TCP, CARD),
    HostLink.over("`tcp`, 100 Gb/s", TCP, CARD / 4),
)


def second_behind_first(hardware: WorkerHardware, layout: ClusterLayout) -> float:
    """Seconds from the first token to the second of one prompt alone."""
    (job,) = play(_shape(hardware, 2, layout), [SimulatedRequest(0.0, PROMPT, 2)]).jobs
    assert job.first_s is not None and job.end_s is not None
    return job.end_s - job.first_s


def print_links(seconds: float) -> None:
    """The table: a row per way."""
    shape = _shape(example(), 2 * GPUS, ClusterLayout.UNIFIED)
    effort = SearchEffort(seconds=seconds)
    unified = find_knee(shape, DRAW, effort, 1.5 * shape.workers).rate
    print(f"TTFT and TPOT p50 at {unified:.1f} requests per second, the most that unified workers bear.\n")
    print("| way | GB/s of a pair, alone and in a crowd | token 2 behind token 1 | requests per second "
          "| over unified | TTFT p50 | TPOT p50 |")  # fmt: skip
    print("|---|--:|--:|--:|--:|--:|--:|")
    rows = [("unified, no link", "-", example(), shape)]
    for link in LINKS:
        crowd = _shape(link.worker(link.shared), 2 * GPUS, ClusterLayout.SPLIT)
        rows.append((link.name, f"{link.alone:.3g}, {link.shared:.3g}", link.worker(link.alone), crowd))
    for name, rates, alone, crowd in rows:
        behind = 1e3 * second_behind_first(alone, crowd.layout)
        knee = find_knee(crowd, DRAW, effort, unified).rate
        same = measure(crowd, DRAW, unified, effort)
        print(f"| {name} | {rates} | {behind:.1f} ms | {knee:.1f} | {knee / unified:.2f} "
              f"| {1e3 * same.ttft_p50_s:.0f} ms | {1e3 * same.tpot_p50_s:.1f} ms |", flush=True)  # fmt: skip


def _shape(hardware: WorkerHardware, workers: int, layout: ClusterLayout) -> ClusterShape:
    """A cluster; half of a split one's workers compute prompts."""
    prefill = workers // 2 if layout is ClusterLayout.SPLIT else 0
    return ClusterShape(hardware, workers, layout, TARGETS, prefill)


def main() -> None:
    """The command line: prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="a load lasts (20)")
    args = parser.parse_args()
    print_links(args.seconds)


if __name__ == "__main__":
    main()
