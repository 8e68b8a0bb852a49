"""Sums and joins across the GPUs of this host: are they right, and how long do they take inside a CUDA graph?

    python -m tests.gpu.time_parallel --out DIR [--ranks 2]

Writes DIR/parallel.json: microseconds a call, the median of five measurements.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import logging
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.one_shot import SUMS_ROWS
from eyas.engine.parallel.ranks import RankChannel, RankFollowers, RankInfo

HIDDEN = 4096
VOCABULARY = 128256
ROWS = (1, 8, 32, 64, 128)
CALLS = 64  # in a graph: an 8B model's sums in one step
REPLAYS = 20
MEASUREMENTS = 5
CHECKS = 400
LIMIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with RankFollowers(_follower, arguments.ranks, arguments.out / "meeting") as followers:
        followers.wait_ready(LIMIT_S)
        report = _measure_all(followers.rank_info, followers.dismiss)
    (arguments.out / "parallel.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))


def _follower(rank_info: RankInfo, channel: RankChannel) -> None:
    channel.ready()
    _measure_all(rank_info, lambda: None)


def _measure_all(rank_info: RankInfo, before_leaving: Callable[[], None]) -> dict[str, object]:
    """The same on every rank."""
    logging.basicConfig(format=f"rank {rank_info.rank}: %(message)s")
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a hang shows where
    device = f"cuda:{rank_info.rank}"
    group = ProcessGroup(rank_info, device)
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "ranks": rank_info.ranks}
    report["wrong calls"] = {
        "sum": _wrong_sums(group, device),
        "sum_add": _wrong_sums_with_residual(group, device),
    }
    report["microseconds"] = _times(group, device)
    report["one-shot is in use"] = group._one_shot is not None
    before_leaving()
    group.close()
    return report


def _rows(rows: int, seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, HIDDEN, generator=generator, device=device, dtype=torch.bfloat16)


def _wrong_sums(group: ProcessGroup, device: str) -> int:
    """Calls of CHECKS that are not to the bit the sum in the order of ranks; the ranks come at odd times."""
    chance, wrong = random.Random(group.rank), torch.zeros((), dtype=torch.int64, device=device)
    for check in range(CHECKS):
        parts = [_rows(1 + check % 128, check * group.ranks + r, device) for r in range(group.ranks)]
        wanted = functools.reduce(torch.add, [p.float() for p in parts]).bfloat16()
        torch.cuda._sleep(chance.choice([0, 0, 1000, 100_000]))
        group.all_reduce(parts[group.rank])
        wrong += (parts[group.rank] != wanted).any()
    return int(wrong)


def _wrong_sums_with_residual(group: ProcessGroup, device: str) -> int:
    chance, wrong = random.Random(group.rank), torch.zeros((), dtype=torch.int64, device=device)
    sums = torch.empty(ProcessGroup.sum_parts(HIDDEN), SUMS_ROWS, device=device)
    for check in range(CHECKS):
        rows = 1 + check % 128
        parts = [_rows(rows, check * group.ranks + r, device) for r in range(group.ranks)]
        residual = _rows(rows, -1 - check, device)
        wanted = functools.reduce(torch.add, [residual.float(), *(p.float() for p in parts)]).bfloat16()
        torch.cuda._sleep(chance.choice([0, 0, 1000, 100_000]))
        group.all_reduce_add(parts[group.rank], residual, sums)
        squares = wanted.float().square().sum(dim=1)
        near = (sums[:, :rows].sum(dim=0) / squares - 1).abs() < 1e-4
        wrong += (parts[group.rank] != wanted).any() | ~near.all()
    return int(wrong)


def _times(group: ProcessGroup, device: str) -> dict[str, float]:
    found = {}
    for rows in ROWS:
        x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        residual = torch.zeros_like(x)
        sums = torch.empty(ProcessGroup.sum_parts(HIDDEN), SUMS_ROWS, device=device)
        found[f"NCCL sum [{rows}, {HIDDEN}]"] = _microseconds(group, functools.partial(dist.all_reduce, x))
        one_shot = functools.partial(group.all_reduce, x)
        found[f"sum [{rows}, {HIDDEN}]"] = _microseconds(group, one_shot)
        one_shot = functools.partial(group.all_reduce_add, x, residual, sums)
        found[f"sum with residual and squares [{rows}, {HIDDEN}]"] = _microseconds(group, one_shot)
    for rows in (1, 32):
        logits = torch.zeros(rows, VOCABULARY // group.ranks, device=device)
        join = functools.partial(group.all_gather_columns, logits)
        found[f"join float32 [{rows}, {VOCABULARY}]"] = _microseconds(group, join, calls=4)
    return found


def _microseconds(group: ProcessGroup, call: Callable[[], object], calls: int = CALLS) -> float:
    """One of `calls` calls in a graph that is replayed without a pause."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    times = []
    for _ in range(MEASUREMENTS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        group.barrier()
        graph.replay()  # after it the ranks are in step
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / (REPLAYS * calls))
    return round(statistics.median(times), 2)


if __name__ == "__main__":
    main()
