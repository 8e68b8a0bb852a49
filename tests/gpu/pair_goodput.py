"""Goodput of layouts on two GPUs or more at rates near the simulated knee, the same requests for each.

    python -m tests.gpu.pair_goodput --out DIR --layouts unified split auto [--workloads 256/512 ...]

A case takes its window of 16 to 30 s and at most 10 s more, so all six workloads (13 cases) take a layout
about seven minutes; with `--shares 0.92`, one rate each, three and a half. `tests.gpu.pair_report` makes the
tables from the files of several commands. For another model `tests.gpu.pair_workloads` tells the rates
(`--at`). `--after FILE`: the clusters of static layouts start side by side, beside other work too (a part of
the memory for each: `--mem-fraction-static 0.28`); once FILE exists the layouts are measured in their order,
for SECONDS. `auto` measures its rates at its start, so it starts then. `--device cpu --small` tries it with
the embedded model.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from eyas.bench.jobs import LoadJob
from eyas.bench.records import RequestRecord
from eyas.simulator.cluster import ClusterLayout
from tests.gpu.pair_load import Sent, send, token_ids
from tests.gpu.pair_rig import Served, Setting, Variant, add_setting, make_setting, rounded, served, step
from tests.gpu.pair_runs import Run
from tests.gpu.pair_workloads import SEED, Workload, add_load, jobs, small, workloads

WARM_UP, WARM_UP_PROMPT, WARM_UP_ANSWER = 8, 300, 16
WARM_UP_S = 60.0
SETTLE_S = 0.5  # until what the case before gave up is forgotten
LOOK_S = 0.05
POLICY = ("eyas_placements_total", "eyas_step_pace", "eyas_worker_preference")
HEAD = (
    f"{'layout':<13}{'workload':<10}{'rate':>6}{'count':>6}{'within':>8}{'goodput':>9}"
    f"{'TTFT p50, p90 ms':>18}{'TPOT p50, p90 ms':>18}{'failed':>8}{'gateway':>9}{'client':>8}{'lag ms':>8}"
)


@dataclass(frozen=True)
class Case:
    """One run: a workload at a rate; `seed` draws it."""

    workload: Workload
    rate: float
    seed: int

    @property
    def ids_seed(self) -> tuple[int, ...]:
        """Of token ids: no two cases share a prompt, whose pages would still be in a cache."""
        return self.seed, round(1000 * self.rate), sum(self.workload.name.encode())


def main() -> int:
    """The command line; 1 if some step failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_setting(parser, ("unified", "split", "auto"))
    add_load(parser)
    parser.add_argument(
        "--shares", nargs="+", type=float, help="of each knee, as rates (each workload's own)"
    )
    parser.add_argument("--at", nargs="+", type=float, metavar="R", help="rates, in place of such shares")
    parser.add_argument("--seed", type=int, default=SEED, help="of all draws (%(default)d)")
    parser.add_argument("--small", action="store_true", help="short lengths, low rates")
    parser.add_argument("--after", type=Path, metavar="FILE", help="start now, and measure once it exists")
    args, serve = parser.parse_known_args()
    setting = make_setting(args, serve, "goodput")
    variants = [replace(variant, workers=args.workers) for variant in args.layouts]
    cases = list(_cases(args))
    if args.after is None:
        uvloop.run(_measure(setting, variants, cases, args.small))
    else:
        uvloop.run(_measure_later(setting, variants, cases, args))
    return int(setting.journal.failed > 0)


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for workload in map(small, workloads(args)) if args.small else workloads(args):
        for rate in args.at or (workload.near(args.shares) if args.shares else workload.rates):
            yield Case(workload, rate, args.seed)


async def _measure(
    setting: Setting, variants: Sequence[Variant], cases: Sequence[Case], little: bool
) -> None:
    setting.journal.say(HEAD)
    for variant in variants:
        await step(setting, str(variant), setting.left_s, _layout(setting, variant, cases, little))


async def _measure_later(
    setting: Setting, variants: Sequence[Variant], cases: Sequence[Case], args: argparse.Namespace
) -> None:
    """Static layouts start at once, and all are measured once a file exists, for so many seconds."""
    async with AsyncExitStack() as stack:
        clusters: dict[Variant, Served] = {}
        for variant in variants:
            if variant.layout != ClusterLayout.AUTO.value:
                clusters[variant] = await stack.enter_async_context(served(setting, variant))
                await _warm_up(clusters[variant])
        setting.journal.say(f"# waiting for {args.after}")
        while not args.after.exists():
            await asyncio.sleep(LOOK_S)
        setting = replace(setting, ends_at=time.monotonic() + args.seconds)
        setting.journal.say(HEAD)
        for variant in variants:
            if variant in clusters:
                await _each(setting, variant, cases, clusters[variant], args.small)
            else:
                await step(
                    setting, str(variant), setting.left_s, _layout(setting, variant, cases, args.small)
                )


async def _layout(setting: Setting, variant: Variant, cases: Sequence[Case], little: bool) -> None:
    async with served(setting, variant, cases[0].workload.targets) as cluster:
        await _warm_up(cluster)
        await _each(setting, variant, cases, cluster, little)


async def _each(
    setting: Setting, variant: Variant, cases: Sequence[Case], cluster: Served, little: bool
) -> None:
    for case in cases:
        seconds = case.workload.seconds + 60.0
        name = f"{variant}, {case.workload.name} at {case.rate:g}"
        await step(setting, name, seconds, _case(setting, variant, case, cluster, little))


async def _warm_up(cluster: Served) -> None:
    """The first requests of a cluster meet things that are made once: connections, routes of pages."""
    prompts = [token_ids(cluster.vocabulary, WARM_UP_PROMPT, 7, number) for number in range(WARM_UP)]
    warming = [LoadJob.single(ids, WARM_UP_ANSWER, 0.0) for ids in prompts]
    async with asyncio.timeout(WARM_UP_S):
        await send(cluster.target, warming, WARM_UP_S)


async def _case(setting: Setting, variant: Variant, case: Case, cluster: Served, little: bool) -> None:
    workload, arrivals = case.workload, case.workload.arrivals(case.rate, case.seed)
    if arrivals[-1].at_s <= workload.warm_s:
        raise ValueError("no request comes after the warm-up")
    if setting.left_s < workload.seconds + workload.drain_s(arrivals):
        raise TimeoutError(f"{setting.left_s:.0f} s are left, too few")
    await asyncio.sleep(SETTLE_S)
    load = jobs(arrivals, cluster.vocabulary, *case.ids_seed)
    began, before = time.monotonic(), cluster.gateway_cpu_s()
    sent = await send(cluster.target, load, workload.drain_s(arrivals))
    gateway_cpu = (cluster.gateway_cpu_s() - before) / (time.monotonic() - began)
    fields = {
        "layout": variant.layout, "mixed": variant.mixed, "workload": workload.name, "rate": case.rate,
        "seed": case.seed, "small": little, "workers": variant.workers,
        "targets": (workload.targets.ttft_s, workload.targets.tpot_s),
        "gateway_cpu": round(gateway_cpu, 3), **_columns(sent),
        "policy": await _policy(cluster),
    }  # fmt: skip
    setting.journal.write("run", **fields)
    setting.journal.say(Run.read(fields).line())


async def _policy(cluster: Served) -> list[str]:
    """What the gateway's metrics say of its decisions, at the end of a run: a line each."""
    page = (await cluster.target.server.get("/metrics")).decode()
    return [line for line in page.splitlines() if line.startswith(POLICY)]


def _columns(sent: Sent) -> dict[str, object]:
    """A list per quantity, with an entry per request; seconds."""

    def column(name: str) -> list[float]:
        return rounded([getattr(record, name) or 0.0 for record in sent.records])

    return {
        **{name: column(name) for name in ("ttft_s", "tpot_s", "waited_s", "latency_s")},
        "output_tokens": [record.output_tokens for record in sent.records],
        "apart": [_apart(record) for record in sent.records],
        "errors": [record.error for record in sent.records],
        "client_cpu": round(sent.client_cpu, 3),
        "client_lag_ms": round(sent.client_lag_ms, 2),
    }


def _apart(record: RequestRecord) -> bool:
    """Whether pages were moved for it."""
    return "decode_transfer" in record.phases_ms


if __name__ == "__main__":
    sys.exit(main())
