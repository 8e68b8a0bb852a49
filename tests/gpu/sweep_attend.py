"""Finds the tilings of the attention kernels: `python -m tests.gpu.sweep_attend --seconds 100 --out DIR`.

Prints one line a figure, every case as it is tiled now first of all, and leaves attend.json in DIR with every
measurement. A run cut off still says what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from eyas.bench.kernels.timing import graph_us
from eyas.engine.kernels.attention.attend import AttentionLaunch, attend
from eyas.engine.kernels.attention.attend_tiles import AttentionTiling, most_parts, tiling_of
from eyas.engine.kernels.attention.prefill import ChunkTiling, attend_chunks, chunk_tiling, tile_rows
from tests.gpu.attend_bench import (
    BATCH,
    CHAINS,
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    PLAIN,
    PROMPTS,
    TREES,
    Call,
    Case,
    Pool,
    Prompt,
    queries_of,
    relative_error,
    seen_by,
)

_SHARED_BYTES = 227 << 10
_TOO_WRONG = 0.01


class Sweep:
    def __init__(self, seconds: float, out: Path) -> None:
        self._deadline, self._file = time.monotonic() + seconds, out / "attend.json"
        self._records: list[dict[str, Any]] = []
        self._pool = Pool()
        self._launch = self._pool.launch((*PLAIN, *CHAINS, *TREES))

    def run(self) -> None:
        cases = (*PLAIN, *CHAINS, *TREES)
        self.compile([(case, tiling_now(case)) for case in cases])
        for case in cases:
            self.say_now(case)
        self.compile_chunks([chunk_tiling()])
        for prompt in PROMPTS:
            self.say(prompt, self.prompt_times(prompt, [chunk_tiling()]))
        for family in (PLAIN, CHAINS, TREES):
            cuts = list(cuts_of(family[0]))
            self.compile([(family[0], replace(cut, parts=1)) for cut in cuts])
            for case in family:
                self.search(case, cuts)
        self.compile_chunks(CHUNK_TILINGS)
        for prompt in PROMPTS:
            self.say(prompt, self.prompt_times(prompt, CHUNK_TILINGS))

    # --- decode ------------------------------------------------------------------------------------------

    def search(self, case: Case, cuts: Sequence[AttentionTiling]) -> None:
        """All cuts with as many parts as now, then the best few with more and fewer."""
        parts = tiling_now(case).parts
        times = self.times(case, [replace(cut, parts=min(parts, most_parts(cut.rows))) for cut in cuts])
        other = [p for p in (1, 2, 3, 4, 6, 8, 16) if p != parts]
        finer = [
            replace(cut, parts=p) for cut in ranked(times)[:4] for p in other if p <= most_parts(cut.rows)
        ]
        self.say(case, times | self.times(case, finer))

    def say_now(self, case: Case) -> None:
        """As it is tiled now, with and without programmatic dependent launch."""
        for pdl in (True, False):
            launch = replace(self._launch, pdl=pdl)
            self.say(case, self.times(case, [tiling_now(case)], launch), note=f" pdl={pdl}")

    def times(
        self, case: Case, tilings: Iterable[AttentionTiling], launch: AttentionLaunch | None = None
    ) -> dict[AttentionTiling, float]:
        """Microseconds of each tiling that works, on keys that are in no cache."""
        batch = len(case.lengths)
        ends = [length + case.width for length in case.lengths]
        sets = 1 if batch == BATCH else 2
        self._pool.seat(ends * sets)
        queries = [queries_of(case, i * batch) for i in range(sets)]
        q = torch.randn(batch * case.width, HEADS, DIM, device="cuda").bfloat16()
        launch = launch or self._launch
        count = max(8, min(2 * LAYERS, (1 << 30) // case.nbytes))

        def calls(tiling: AttentionTiling) -> list[Call]:
            return [
                lambda i=i: attend(q, self._pool.layer(i), queries[i // LAYERS % sets], launch, tiling)
                for i in range(count)
            ]

        some = sorted({0, batch // 2, batch - 1})
        expected = torch.cat(
            [self._pool.expected(q.view(batch, -1, HEADS, DIM)[b], b, seen_by(case, b)) for b in some]
        )

        def error(result: torch.Tensor) -> float:
            return relative_error(result.view(batch, -1, HEADS, DIM)[some].flatten(0, 1), expected)

        return self.measured(case, tilings, calls, error)

    def compile(self, launches: Iterable[tuple[Case, AttentionTiling]]) -> None:
        """In parallel; what does not compile fails again when it is run."""
        began = time.monotonic()
        q = torch.empty(1, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        pool = ThreadPoolExecutor(os.cpu_count())
        with pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for (case, tiling), pdl in product(list(launches), (True, False)):
                if pdl or tiling == tiling_now(case):
                    launch = replace(self._launch, pdl=pdl, compile_only=True)
                    attend(q, self._pool.layer(0), queries_of(case, 0), launch, tiling)
        print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)

    # --- prompts -----------------------------------------------------------------------------------------

    def prompt_times(self, prompt: Prompt, tilings: Iterable[ChunkTiling]) -> dict[ChunkTiling, float]:
        """Microseconds of each tiling that works."""
        self._pool.seat([prefix + count for prefix, count in prompt.chunks])
        q = torch.randn(sum(count for _, count in prompt.chunks), HEADS, DIM, device="cuda").bfloat16()

        def calls(tiling: ChunkTiling) -> list[Call]:
            tiles = tiles_of(prompt, tile_rows(HEADS, KV_HEADS, tiling.rows))
            return [lambda i=i: attend_chunks(q, self._pool.layer(i), tiles, tiling) for i in range(4)]

        prefix, count = prompt.chunks[0]
        rows = torch.tensor([0, count // 2 + 1, count - 1], device="cuda")
        seen = torch.arange(prefix + count, device="cuda") <= prefix + rows[:, None]
        expected = self._pool.expected(q[rows], 0, seen)
        return self.measured(prompt, tilings, calls, lambda got: relative_error(got[rows], expected))

    def compile_chunks(self, tilings: Iterable[ChunkTiling]) -> None:
        began = time.monotonic()
        q = torch.empty(1, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        tiles = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
        pool = ThreadPoolExecutor(os.cpu_count())
        with pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for tiling in tilings:
                attend_chunks(q, self._pool.layer(0), tiles, tiling, compile_only=True)
        print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)

    # --- what both share ---------------------------------------------------------------------------------

    def measured(
        self,
        case: Case | Prompt,
        tilings: Iterable[Any],
        calls: Callable[[Any], list[Call]],
        error: Callable[[Any], float],
    ) -> dict[Any, float]:
        times = {}
        for tiling in tilings:
            if time.monotonic() > self._deadline:
                break
            record = {"case": case.name, **asdict(tiling)}
            try:
                record["error"] = error(calls(tiling)[0]())
                record["us"] = graph_us(calls(tiling), replays=7)
            except Exception as failure:  # a tiling too large for the machine is a finding, not an end
                record["failed"] = f"{type(failure).__name__}: {failure}"[:200]
            if not record.get("error", 0.0) < _TOO_WRONG:
                print(f"WRONG {record}", flush=True)
            elif "us" in record:
                times[tiling] = record["us"]
            self._records.append(record)
        return times

    def say(self, case: Case | Prompt, times: dict[Any, float], note: str = "") -> None:
        for tiling in ranked(times)[:3]:
            us = times[tiling]
            print(f"{case.name:22} {us:8.2f} us {case.speed(us)} {tiling}{note}", flush=True)
        self.save()

    def save(self) -> None:
        self._file.write_text(json.dumps(self._records, indent=1))


def tiling_now(case: Case) -> AttentionTiling:
    return tiling_of(len(case.lengths), case.rows, KV_HEADS)


def cuts_of(case: Case) -> Iterator[AttentionTiling]:
    """Tilings that fit the machine, in one part; tiles of under 64 rows leave room for a second program."""
    most = max(16, triton.next_power_of_2(case.rows))
    for rows, keys, warps, stages in product((16, 32, 64, 128), (32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
        result_registers = rows * DIM // (warps * 32)
        buffers = stages if rows >= 64 else stages - 1
        shared = 2 * keys * DIM * 2 * buffers * (1 if rows >= 64 else 2)
        if rows <= most and 16 <= result_registers <= 64 and shared < _SHARED_BYTES:
            yield AttentionTiling(rows, keys, 1, warps, stages)


CHUNK_TILINGS = tuple(
    ChunkTiling(rows, keys, warps, stages)
    for rows, keys, warps in ((128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4), (128, 32, 8))
    for stages in (2, 3, 4)
)


def tiles_of(prompt: Prompt, most: int) -> torch.Tensor:
    """The prompt's chunks cut into tiles of `most` rows, those with most keys first."""
    tiles, row = [], 0
    for slot, (prefix, count) in enumerate(prompt.chunks):
        tiles += [(slot, row + i, prefix + i, min(most, count - i)) for i in range(0, count, most)]
        row += count
    return torch.tensor(sorted(tiles, key=lambda tile: -tile[2]), dtype=torch.int32, device="cuda")


def ranked(times: dict[Any, float]) -> list[Any]:
    return sorted(times, key=times.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(args.seconds, args.out)
    try:
        sweep.run()
    finally:
        sweep.save()


if __name__ == "__main__":
    main()
