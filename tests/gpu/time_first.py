"""The first prompts after a start on one GPU: how long they wait, and what is compiled or loaded meanwhile.

    python -m tests.gpu.time_first --out FILE [--arithmetic exact fast]

An 8B's shape without weights, each arithmetic in a process of its own, whose kernels were compiled before.
As soon as an engine is ready 32 prompts of 256 tokens come at once, then as many others twice more. FILE gets
a line for each time: milliseconds to the first tokens (the median of them, and the last), kernels that Triton
compiled, and those that it read from its cache, with their names. `--device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.gpu.lines import say_all
from tests.gpu.steady import TINY, Clocked, clocked, engine_config, shape_folders, submit, warm
from tests.unit.loopback import wait_all

EXACT, FAST = "exact", "fast"
COUNT, PROMPT = 32, 256
TURNS = 3
WAIT_S, LIMIT_S = 60.0, 150.0


@dataclass
class Kernels:
    """Names of the kernels that Triton has compiled, and of those that it has read from its cache."""

    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def listen(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        """Triton calls it for every variant that is launched for the first time."""
        (self.loaded if cache_hit else self.compiled).append(src.name)

    def taken(self) -> dict[str, Any]:
        """Those since the last call."""
        compiled, self.compiled = self.compiled, []
        loaded, self.loaded = self.loaded, []
        return {"compiled": sorted(compiled), "loaded": sorted(loaded)}


def config_of(arithmetic: str, device: str, model: Path) -> EngineConfig:
    """The engine of an arithmetic."""
    sizes = {"context_length": 1024, "max_running": 64, "num_pages": 64 * 64}
    options = {"chunk_tokens": 64} if device == "cpu" else {"deterministic": arithmetic == EXACT}
    config: EngineConfig = engine_config(device, model=str(model), draft=None, **sizes, **options)
    return config


def first_tokens(cluster: Clocked, turn: int, sizes: tuple[int, int]) -> dict[str, float]:
    """Milliseconds to the first tokens of so many prompts of so many tokens."""
    dice = random.Random(turn)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    requests = [
        GenerationRequest(f"{turn} {i}", tuple(dice.choices(range(300, 760), k=sizes[1])), params)
        for i in range(sizes[0])
    ]
    began = time.perf_counter()
    wait_all(submit(cluster, requests), WAIT_S)
    waited = sorted(1e3 * (one.seconds - began) for one in cluster.came if one.entry.index == 0)
    return {"median_ms": round(waited[len(waited) // 2], 1), "last_ms": round(waited[-1], 1)}


def measured(arithmetic: str, device: str, model: Path) -> Iterator[dict[str, Any]]:
    """Every turn of one engine, in this process."""
    kernels, sizes = Kernels(), (COUNT, PROMPT) if device == "cuda" else (3, 20)
    triton.knobs.compilation.listener = kernels.listen
    began = time.perf_counter()
    with clocked(config_of(arithmetic, device, model)) as cluster:
        ready = round(time.perf_counter() - began, 1)
        first = kernels.taken()
        yield {
            "arithmetic": arithmetic,
            "ready_s": ready,
            "compiled": first["compiled"],
            "loaded": len(first["loaded"]),
        }
        for turn in range(TURNS):
            line = first_tokens(cluster, turn, sizes)
            yield {"arithmetic": arithmetic, "turn": turn} | line | kernels.taken()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--arithmetic", choices=[EXACT, FAST], nargs="+", default=[EXACT, FAST])
    parser.add_argument("--folder", type=Path, help="of the model, in this process")
    given = parser.parse_args()
    if given.folder is not None:
        say_all(given.out, measured(given.arithmetic[0], given.device, given.folder))
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        model, _ = shape_folders("llama-3.1-8b" if given.device == "cuda" else TINY, Path(folder))
        warm([config_of(each, given.device, model) for each in given.arithmetic])
        for each in given.arithmetic:
            words = ["--out", str(given.out), "--device", given.device, "--folder", str(model)]
            command = [sys.executable, "-m", "tests.gpu.time_first", *words, "--arithmetic", each]
            failed |= subprocess.run(command, timeout=LIMIT_S).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
