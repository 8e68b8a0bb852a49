"""Gaps between the tokens of running streams while long prompts arrive at one engine, on one GPU.

    python -m tests.gpu.time_gaps --out FILE [--streams 48] [--gap-s 0.6] [--seconds 5] [--ways usual 320]

An 8B's shape without weights. Streams decode alone for a while, then prompts of 8,192 tokens come at even
intervals, and then they decode alone again: a plain step is the mean of before and after, since contexts
grow. One engine plays every way in turn: `large` computes prompts by its largest steps as soon as more than
one of these waits, a number is the most rows of a step with both until four of them wait, and `usual` is what
the engine does by itself. FILE gets a line of JSON for each. `--device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from eyas.common import prompt_room
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.scheduling.limits import BatchLimits
from eyas.simulator.goodput import quantile
from tests.gpu.lines import say
from tests.gpu.steady import TINY, Clocked, clocked, engine_config, shape_folders, wait, warm

LARGE, USUAL = "large", "usual"
STEPS = prompt_room.MANY_STEPS
DRAIN_S = 20.0


@dataclass(frozen=True)
class Load:
    """`streams` of prompts of `short` tokens, and prompts of `long` tokens every `gap_s` for `seconds`."""

    streams: int
    short: int
    long: int
    gap_s: float
    seconds: float

    def request(self, name: str, prompt: int, answer: int) -> GenerationRequest:
        """One, whose text begins like no other."""
        ids = tuple(random.Random(name).choices(range(300, 760), k=prompt))
        return GenerationRequest(
            name, ids, SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        )


def played(cluster: Clocked, load: Load, turn: int, answer: int) -> dict[str, Any]:
    """One way's figures: times in milliseconds, and rates per second from the first long prompt on."""
    steady = [load.request(f"{turn} steady {i}", load.short, answer) for i in range(load.streams)]
    cluster.came.clear()
    cluster.tokens = cluster.begun = 0
    for request in steady:
        cluster.submit(request, split=False)
    wait(lambda: cluster.begun == load.streams, DRAIN_S)
    time.sleep(load.seconds / 4)
    began, asked = time.perf_counter(), dict[str, float]()
    while (now := time.perf_counter()) < began + load.seconds:
        name = f"{turn} prompt {len(asked)}"
        asked[name] = now
        cluster.submit(load.request(name, load.long, 8), split=False)
        time.sleep(max(began + load.gap_s * len(asked) - time.perf_counter(), 0.0))
    wait(lambda: cluster.begun == load.streams + len(asked), DRAIN_S)
    ended = time.perf_counter()
    time.sleep(load.seconds / 5)
    cluster.cancel([request.id for request in steady])
    came: dict[str, list[float]] = defaultdict(list)
    for one in cluster.came:
        came[one.entry.id].append(one.seconds)
    streams = [came[request.id] for request in steady]
    firsts = sorted(came[name][0] - at for name, at in asked.items() if came[name])
    beside, alone_s = gaps(streams, began, ended), load.seconds / 5
    plain = [gaps(streams, began - alone_s, began), gaps(streams, ended, ended + alone_s)]
    tokens = sum(began < at <= ended for times in streams for at in times)
    before, after = (quantile(each, 0.5) for each in plain)
    step = (before + after) / 2
    return {
        "step_ms": ms(step),
        "before_ms": ms(before),
        "after_ms": ms(after),
        "gap_p50_ms": ms(quantile(beside, 0.5)),
        "gap_p99_ms": ms(quantile(beside, 0.99)),
        "gap_p99_steps": round(quantile(beside, 0.99) / max(step, 1e-9), 2),
        "ttft_p50_ms": ms(quantile(firsts, 0.5)),
        "ttft_last_ms": ms(firsts[-1] if firsts else float("nan")),
        "tokens_per_s": round(tokens / (ended - began), 1),
        "prompts_per_s": round(len(firsts) / (ended - began), 2),
        "prompts": f"{len(firsts)} of {len(asked)}",
    }


def gaps(streams: Sequence[Sequence[float]], since: float, until: float) -> list[float]:
    """Seconds between neighbouring tokens of a stream, of those that came meanwhile; ascending."""
    return sorted(
        after - before for times in streams for before, after in pairwise(times) if since < after <= until
    )


def ms(seconds: float) -> float:
    """Milliseconds."""
    return round(1e3 * seconds, 2)


def ways(cluster: Clocked, chosen: Sequence[str], largest: int) -> Iterator[str]:
    """Sets the engine to each way in turn, and says which. `largest`: rows of a step, before."""
    engine = cluster.workers["unified"].engine
    tables, runner = engine._scheduler.tables, engine._loop.runner
    usual: BatchLimits = tables.limits
    before = replace(
        usual, chunk_tokens=largest, mixed_prefill_budget=runner.prompt_rows, long_prompt_rows=None
    )
    for way in chosen:
        prompt_room.MANY_STEPS = 1 if way == LARGE else STEPS
        if way == LARGE:
            tables.limits = before
        elif way == USUAL:
            tables.limits = usual
        else:
            rows = capped(usual, int(way))
            tables.limits = replace(usual, mixed_prefill_budget=rows, long_prompt_rows=None)
        yield way


def capped(usual: BatchLimits, total: int) -> Any:
    """As usual where many wait, else at most `total` rows in a step with both."""
    rows = usual.mixed_prefill_budget
    assert rows is not None
    return lambda rounds, many: (
        rows(rounds, many) if many else max(min(rows(rounds, many), total - rounds), 1)
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--streams", type=int, nargs="+", default=[48])
    parser.add_argument("--short", type=int, default=256, help="tokens of a stream's prompt (%(default)d)")
    parser.add_argument("--gap-s", type=float, default=0.6, help="between two prompts (%(default)g)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of prompts, for each way (%(default)g)")
    parser.add_argument("--ways", nargs="+", default=[USUAL, "320", LARGE, USUAL], metavar="WAY")
    given = parser.parse_args()
    small = given.device == "cpu"
    sizes: dict[str, Any] = {"context_length": 16384, "max_running": 256, "num_pages": 50_000}
    if small:
        sizes = {"context_length": 1024, "max_running": 8, "num_pages": 512}
        sizes |= {"chunk_tokens": 64, "mixed_tokens": 48}
    with tempfile.TemporaryDirectory() as folder:
        model, _ = shape_folders(TINY if small else "llama-3.1-8b", Path(folder))
        config = engine_config(given.device, model=str(model), draft=None, **sizes)
        if not small:
            warm([config])
        with clocked(config) as cluster:
            for streams in given.streams:
                load = Load(
                    streams, 20 if small else given.short, 300 if small else 8192, given.gap_s, given.seconds
                )
                played(cluster, load, -streams, 800 if small else 8000)  # not counted
                for turn, way in enumerate(ways(cluster, given.ways, config.chunk_tokens)):
                    line = played(cluster, load, 1000 * streams + turn, 800 if small else 8000)
                    say(given.out, {"streams": streams, "way": way} | line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
