"""A NextN head on one rank of eight of DeepSeek-V3: adaptive depth against 0, 1 and 2 steps of drafting.

    python -m tests.gpu.time_nextn --out FILE [--layers N] [--batches 1 8 32 128]

Dummy FP8 blocks, uniform routing, synthetic acceptance: 2.2 tokens per round of 2 steps. One engine has all
depths, for two of this size fit no GPU: a depth is fixed while it is measured, each batch decodes for a few
moments per way, and the ways come in turns. Tokens are counted as in `tests.gpu.time_adaptive`. FILE gets a
line of JSON per batch and way; the table is printed last. `--device cpu` tries the script out with a tiny
model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from eyas.bench.files import append_line
from eyas.common.config import EngineConfig, SpeculationConfig
from tests.gpu.answer_latent import LAYERS, write_rank
from tests.gpu.steady import Clocked, clocked, engine_config, warm
from tests.gpu.time_adaptive import CONTEXT, MOMENTS, TARGET, Seen, watched
from tests.unit.test_device_deepseek import V3
from tests.unit.tiny_deepseek import write_tiny_nextn_deepseek

BATCHES = (1, 8, 32, 128)
STEPS, RATE = 2, 0.704  # 1 + r + r^2 = 2.2 tokens per round
TURNS = 3
WAYS = (0, 1, 2, None)
"""Steps of drafting; None: adaptive."""
PAGES = 8000


def config_of(device: str, folder: Path, layers: int, batches: Sequence[int]) -> EngineConfig:
    """An engine of such a model, whose folder is written."""
    spec = SpeculationConfig(STEPS, 1, STEPS + 1, synthetic_rates=(RATE,) * STEPS, adaptive=True)
    if device == "cpu":
        write_tiny_nextn_deepseek(folder, V3 | {"vocab_size": 512})
        sizes: dict[str, Any] = {"num_pages": CONTEXT // 8, "chunk_tokens": 16}
    else:
        write_rank(folder, layers)
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(told | {"num_nextn_predict_layers": 1}))
        sizes = {"num_pages": PAGES, "chunk_tokens": 4096, "uniform_experts": True}
        sizes["cuda_graph_bs"] = tuple(batches)
    sizes |= {"model": str(folder), "draft": str(folder), "context_length": CONTEXT}
    return engine_config(device, max_running=max(batches), speculation=spec, **sizes)


def measured(cluster: Clocked, device: str, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A line per batch and way."""
    depths = cluster.workers["unified"].engine._parts.runner._depths
    learnt, counted = MOMENTS[device]
    for batch in batches:
        seen: dict[int | None, list[Seen]] = defaultdict(list)
        for turn in range(TURNS):
            for way in WAYS:
                depths.fixed = way
                name = f"{batch} {way} {turn}"
                watched(cluster, f"learn {name}", batch, RATE, learnt)
                seen[way].append(watched(cluster, f"count {name}", batch, RATE, counted))
        for way, moments in seen.items():
            line = reduce(add, moments).line(batch)
            yield {"synthetic": True, "steps": "adaptive" if way is None else way, "batch": batch} | line


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row per batch: tokens per second of every way, and adaptive over the best of the others."""
    found: dict[int, dict[Any, float]] = defaultdict(dict)
    for line in lines:
        found[line["batch"]][line["steps"]] = line["tokens_per_s"]
    yield "batch   0 steps    1 step   2 steps  adaptive   ratio"
    for batch, ways in sorted(found.items()):
        ratio = ways["adaptive"] / max(ways[steps] for steps in (0, 1, 2))
        figures = "".join(f"{ways[steps]:10.0f}" for steps in (0, 1, 2, "adaptive"))
        yield f"{batch:5}{figures}{ratio:8.3f} {'PASS' if ratio >= TARGET else 'FAIL'}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=list(MOMENTS), default="cuda")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(given.device, Path(folder), given.layers, given.batches)
        warm([config])
        with clocked(config) as cluster:
            for line in measured(cluster, given.device, given.batches):
                append_line(given.out, line)
                print(line, flush=True)
                lines.append(line)
    print(*report(lines), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
