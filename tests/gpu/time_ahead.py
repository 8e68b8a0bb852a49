"""What drafting ahead costs a draft worker's GPU: a proposal, a run ahead of its verdict, the host's work.

    python -m tests.gpu.time_ahead --out FILE [--shape llama-3.1-8b] [--batches 1 2 4] [--outcomes 8 16 24]

One GPU, a head of the shape with dummy weights, sequences of 512 rows. Per batch: `proposal`, which answers
commits of three rows whose features lie in this GPU's memory (graph A), and `ahead` (graph B), which drafts
for a number of outcomes of each. Of both `graph_ms` is what the device takes, `whole_ms` what passes until
the host has the result, `host_ms` what the host does of it before it could do other work. `start` is the time
to load, compile and capture: kernels are compiled ahead for the number of outcomes that workers have, for
others one by one. Every line is on disk as soon as it is known. To try the script out without a GPU:
`TRITON_INTERPRET=1 python -m tests.gpu.time_ahead --device cpu --shape tiny --times 1 --out FILE`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from eyas.bench.files import append_line
from eyas.common.config import EngineConfig, SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import KvKind, Role
from eyas.engine.ipc.row_ring import tag
from eyas.engine.loading.draft_build import draft_worker
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.startup import EngineStart
from eyas.engine.speculation.draft_worker.device_runner import DeviceDraftRunner
from eyas.engine.speculation.draft_worker.draft_commits import NO_FEATURES
from eyas.engine.speculation.draft_worker.draft_runner import (
    DraftExtension,
    DraftInput,
    ProposedTree,
    RingRow,
)
from eyas.engine.speculation.drafters.ahead import AheadRound, AheadRunner, VerifiedRound, rows_ahead
from kv_transfer.layout import pages_for
from tests.unit import interpreted

STEPS, NEW, ACCEPTANCE = 3, 3, 0.7  # of a chain; rows of a commit; of drafts, for the fan-out
PAGE, BELOW, WAIT_S = 16, 512, 60.0  # rows of a page; of a sequence before its commit
CHAIN = SpeculationConfig(STEPS, 1, STEPS + 1)


class Bench:
    """A draft worker with sequences of `below` rows."""

    def __init__(self, config: EngineConfig, batch: int, below: int) -> None:
        start = EngineStart.of(config)
        began = time.perf_counter()
        worker = draft_worker(EngineSpec.of(config), start)
        self.start_s = time.perf_counter() - began
        assert isinstance(worker.runner, DeviceDraftRunner) and isinstance(worker.ahead, AheadRunner)
        self.runner, self.ahead, self.below = worker.runner, worker.ahead, below
        self._cuda = config.device != "cpu"
        self._pages = pages_per_sequence(below, self.ahead.runs.kept.outcomes)
        shape, width = self.runner.pool.shape, worker.loaded.decoder(KvKind.DRAFT).hidden_size
        self._words = width * shape.dtype.itemsize // 4
        self._rings = torch.zeros(batch, NEW, self._words, dtype=torch.int64, device=shape.device)
        for place in range(batch):
            for row in range(NEW):
                self._rings[place, row] = tag(place + 1, below + row) << 32
        features = torch.randn(below, width)
        for place in range(batch):
            self.runner.draft([self._asked(place, 0, [1] * below, features)], CHAIN)

    def _asked(self, place: int, base: int, tokens: list[int], features: torch.Tensor) -> DraftInput:
        pages = range(place * self._pages, (place + 1) * self._pages)
        ringed = []
        if not len(features):
            rings = self._rings[place]
            ringed = [RingRow(rings[i].data_ptr(), tag(place + 1, base + i)) for i in range(len(tokens))]
        new = DraftExtension(pages, base, tokens, features, ringed=ringed)
        return DraftInput(place, new, SamplingParams(temperature=0.0), 0)

    def proposed(self, batch: int) -> list[ProposedTree]:
        """Answers a commit of each sequence."""
        asked = [self._asked(place, self.below, [1] * NEW, NO_FEATURES) for place in range(batch)]
        found = self.runner.draft(asked, CHAIN)
        assert all(one.whole for one in found)
        return found

    def begun(self, proposed: list[ProposedTree]) -> list[AheadRound]:
        """Rounds that are being verified; their newest rows are written."""
        rounds = []
        for place, one in enumerate(proposed):
            assert one.chain is not None
            asked = self._asked(place, self.below + NEW - 1, [1], NO_FEATURES)
            rounds.append(self.ahead.begin(VerifiedRound(asked, one.chain, again=True), ACCEPTANCE))
        return rounds

    def landed(self, rounds: list[AheadRound]) -> None:
        """Looks for the run until it has ended."""
        deadline = time.monotonic() + WAIT_S
        while not all(one.drafted for one in rounds):
            self.ahead.advance(rounds)
            if time.monotonic() > deadline:
                raise TimeoutError("a run does not end")
        assert all(one.written and one.outcomes for one in rounds)

    def graph_ms(self, launch: Callable[[], None], times: int) -> float:
        """Of the launches alone, one after another, with what they were told last."""
        if not self._cuda:
            return 1e3 * timed(launch)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(times):
            launch()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / times


def pages_per_sequence(below: int, outcomes: int) -> int:
    """With the rows that are drafted ahead."""
    return pages_for(below + NEW + rows_ahead(STEPS, outcomes), PAGE)


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def middle(seconds: list[float]) -> float:
    """The median, in milliseconds."""
    return round(1e3 * statistics.median(seconds), 4)


def measured(bench: Bench, batch: int, times: int) -> Iterator[dict[str, Any]]:
    """Two lines: of proposals, and of runs ahead."""
    outcomes, size = bench.ahead.runs.kept.outcomes, bench.runner.short.programs.size(batch)
    whole = [timed(lambda: bench.proposed(batch)) for _ in range(times)]
    graph = bench.graph_ms(torch.inference_mode()(lambda: bench.runner.short.programs.launch(size)), times)
    line = {"batch": batch, "outcomes": outcomes}
    yield {"part": "proposal", **line, "graph_ms": round(graph, 4), "whole_ms": middle(whole)}
    whole, host = [], []
    proposed = bench.proposed(batch)
    for _ in range(times):
        rounds, began = bench.begun(proposed), time.perf_counter()
        bench.ahead.advance(rounds)
        host.append(time.perf_counter() - began)
        bench.landed(rounds)
        whole.append(time.perf_counter() - began)
    runs = bench.ahead.runs.programs
    graph = bench.graph_ms(torch.inference_mode()(lambda: runs.launch(runs.size(batch))), times)
    found = {"graph_ms": round(graph, 4), "whole_ms": middle(whole), "host_ms": middle(host)}
    yield {"part": "ahead", **line, **found}


def config_of(given: argparse.Namespace, folder: Path) -> EngineConfig:
    """A draft worker's, without weights."""
    model, head = folder / "model", folder / "head"
    if not model.exists():
        shape = ["-m", "eyas.bench.shapes", given.shape, str(model), "--head", str(head)]
        subprocess.run([sys.executable, *shape], check=True)
    most = max(given.batches)
    config = replace(
        resolve_engine(
            given.device, max_running=most, load_format="dummy", model=str(model), draft=str(head)
        ),
        roles=(Role.DRAFT,),
        context_length=2 * BELOW,
        num_pages=most * pages_per_sequence(given.below, max(given.outcomes)),
        prefill_attention_backend="triton",
        attention_backend="triton",
        speculation=CHAIN,
        transfer="none" if given.device == "cuda" else "shm",
        pool_dir=str(folder),
    )
    return config


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--outcomes", type=int, nargs="+", default=[8, 16, 24])
    parser.add_argument("--times", type=int, default=50, help="repetitions of each figure (50)")
    parser.add_argument("--below", type=int, default=BELOW, help="rows of a sequence before its commit (512)")
    given = parser.parse_args()
    if given.device == "cpu":
        interpreted.install()
    with tempfile.TemporaryDirectory() as folder:
        for outcomes in given.outcomes:
            with mock.patch("eyas.engine.loading.draft_build.OUTCOMES", outcomes):
                bench = Bench(config_of(given, Path(folder)), max(given.batches), given.below)
            append_line(
                given.out, {"part": "start", "outcomes": outcomes, "seconds": round(bench.start_s, 2)}
            )
            for batch in given.batches:
                for line in measured(bench, batch, given.times):
                    append_line(given.out, line)
                    print(line, flush=True)
            bench.runner.pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
