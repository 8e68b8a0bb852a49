"""How the cost of a token grows with the batch, the context, the width of a tree and the number of workers.

    python -m tests.gpu.time_growth --out FILE                    # on a GPU, five starts; --compile before
    python -m tests.gpu.time_growth --out FILE --plot growth.svg  # of what is in FILE, anywhere

Steps of an 8B's shape without weights run through the engine's own runner before it serves; rounds of trees
are those of an EAGLE-3 head, drafts of five levels and what verifies them. What workers bear together is
simulated with the built-in table: 8,192 / 256, 1 s and 8 ms, at the knee. `--device cpu` tries the script.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.bench import plot_style
from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.engine.loading import build
from eyas.engine.loading.step_rates import StepLimits, StepSample, _StepTimer
from eyas.engine.loop.runner import StepRunner
from eyas.simulator.cluster import ClusterLayout, ClusterShape
from eyas.simulator.goodput import SearchEffort, find_knee
from eyas.simulator.hardware import example
from eyas.simulator.workload import RandomTraffic, poisson
from gateway.routing.placement import LatencyTargets
from tests.gpu.lines import lines_of, say
from tests.gpu.steady import TINY, clocked, engine_config, shape_folders, warm

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131000)
WIDTHS, LEVELS, TOPK = (8, 16, 32, 64), 5, 8
DRAFTED = (1, 8)  # sequences, of rounds of trees
WORKERS = (1, 2, 4, 8, 16)
BEHIND = 1024
TITLES = (
    "Step over sequences of 1,024 tokens",
    "Step of one sequence over its context",
    "Round over the tokens of a tree",
    "Requests per second and worker, simulated",
)


@dataclass(frozen=True)
class GrowthPlan:
    """An engine's width of trees (0: no drafts), its sizes, and what is timed: what grows, how much."""

    width: int
    sizes: dict[str, Any]
    steps: tuple[tuple[str, int, StepSample], ...]


PLAIN = GrowthPlan(
    0,
    {
        "context_length": 131072,
        "max_running": 257,
        "num_pages": 17_500,
        "cuda_graph_bs": BATCHES,
        "cuda_graph_max_bs": 256,
    },
    (
        *(("batch", n, StepSample(n, BEHIND)) for n in BATCHES),
        *(("context", n, StepSample(1, n)) for n in CONTEXTS),
    ),
)
DRAFTING = {
    "context_length": 4096,
    "max_running": 9,
    "num_pages": 1000,
    "cuda_graph_bs": DRAFTED,
    "cuda_graph_max_bs": 8,
}
PLANS = (
    PLAIN,
    *(
        GrowthPlan(width, DRAFTING, tuple((f"width at {n}", width, StepSample(n, BEHIND)) for n in DRAFTED))
        for width in WIDTHS
    ),
)
LITTLE = {"context_length": 256, "max_running": 4, "num_pages": 64, "chunk_tokens": 32, "mixed_tokens": 32}
TRIED = (
    GrowthPlan(0, LITTLE, (("batch", 2, StepSample(2, 16)), ("context", 32, StepSample(1, 32)))),
    GrowthPlan(8, LITTLE, (("width at 1", 8, StepSample(1, 16)),)),
)


def measure(device: str, out: Path, compile_only: bool) -> None:
    """Runs every step, and notes its milliseconds. `compile_only`: compiles their kernels, no more."""
    plans = TRIED if device == "cpu" else PLANS
    with tempfile.TemporaryDirectory() as folder:
        folders = shape_folders(TINY if device == "cpu" else "llama-3.1-8b", Path(folder))
        configs = [_config(device, plan, *folders) for plan in plans]
        if device != "cpu":
            warm(configs)
        if compile_only:
            return
        for plan, config in zip(plans, configs, strict=True):
            _measure(plan, config, out)


def _config(device: str, plan: GrowthPlan, model: Path, head: Path) -> EngineConfig:
    sizes: dict[str, Any] = {"tune_seconds": 0.0} | plan.sizes
    if plan.width:
        sizes["speculation"] = SpeculationConfig(LEVELS, TOPK, plan.width)
    draft = str(head) if plan.width else None
    made: EngineConfig = engine_config(device, model=str(model), draft=draft, **sizes)
    return made


def _measure(plan: GrowthPlan, config: EngineConfig, out: Path) -> None:
    """What a plan times, while its engine starts."""

    def timed(runner: StepRunner, config: EngineConfig, most: StepLimits, grain: int = 1) -> None:
        timer = _StepTimer(runner, config.num_pages or 0, config.page_size, config.speculation.width, 0)
        for grows, count, sample in plan.steps:
            took = min(timer.seconds(sample) for _ in range(3))
            say(out, {"grows": grows, "count": count, "ms": round(1e3 * took, 4)})

    build._rates = timed
    with clocked(config):
        pass


def borne(layout: ClusterLayout, workers: int) -> float:
    """Requests per second and worker at the knee, as simulated."""
    prefill = workers // 2 if layout is ClusterLayout.SPLIT else 0
    shape = ClusterShape(example(), workers, layout, LatencyTargets(1.0, 0.008), prefill)
    traffic = RandomTraffic(8192, 256)

    def draw(rate: float, count: int, seed: int) -> Any:
        return poisson(traffic, rate, count, seed)

    return find_knee(shape, draw, SearchEffort(30.0, 200), 2.0 * workers).rate / workers


def plot(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """The four panels."""
    plot_style.check_plot(path)
    figure, axes = plot_style.panels(TITLES, "Growth: Llama-3.1-8B's shape, bf16, one H200")
    batch, context = points_of(lines, "batch"), points_of(lines, "context")
    _panel(axes[0], "sequences", "ms", {"step": batch, "per token": [(n, ms / n) for n, ms in batch]})
    _panel(axes[1], "tokens of context", "ms", {"step": context})
    alone = {n: [(1, ms)] for n, ms in batch}
    rounds = {f"{n} at once": alone.get(n, []) + points_of(lines, f"width at {n}") for n in DRAFTED}
    _panel(axes[2], "tokens verified per sequence and round (1: no drafts)", "ms", rounds)
    counts = {
        layout.value: [n for n in WORKERS if n > 1 or layout is not ClusterLayout.SPLIT]
        for layout in ClusterLayout
    }
    knees = {name: [(n, borne(ClusterLayout(name), n)) for n in some] for name, some in counts.items()}
    _panel(axes[3], "workers", "requests per second and worker", knees)
    plot_style.save(figure, path)


def _panel(axes: Any, over: str, what: str, series: dict[str, list[tuple[int, float]]]) -> None:
    """Series by name, each of points."""
    for look, points in zip(plot_style.LOOKS, series.values(), strict=False):
        plot_style.draw(axes, look, *zip(*points, strict=True))
    plot_style.log_scale(axes, "x")
    axes.set(xlabel=over, ylabel=what, ylim=(0, None))
    plot_style.label_ends(axes, [(name, points[-1]) for name, points in series.items()])


def points_of(lines: Sequence[dict[str, Any]], grows: str) -> list[tuple[int, float]]:
    """(how much, milliseconds) of what grows."""
    return [(line["count"], line["ms"]) for line in lines if line["grows"] == grows]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw FILE's lines, and measure nothing")
    parser.add_argument("--compile", action="store_true", help="kernels alone")
    given = parser.parse_args()
    if given.plot is not None:
        plot(lines_of(given.out), given.plot)
    else:
        measure(given.device, given.out, given.compile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
