"""How the cost of a token grows with the batch, with the context, and with the number of workers.

    python -m tests.gpu.time_growth --out FILE                   # on a GPU, 5 s beside the start
    python -m tests.gpu.time_growth --out FILE --plot growth.svg  # of what is in FILE, anywhere

Steps of an 8B's shape without weights run through the engine's own runner before it serves. What workers
bear together is simulated with the built-in table: 8,192 / 256, 1 s and 8 ms, at the knee. `--device cpu`
tries the script out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.bench import plot_style
from eyas.common.config import EngineConfig
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
WORKERS = (1, 2, 4, 8, 16)
BEHIND = 1024
TITLES = (
    "Step over sequences of 1,024 tokens",
    "Step of one sequence over its context",
    "Requests per second and worker, simulated",
)


def samples(small: bool) -> list[tuple[str, int, StepSample]]:
    """(what grows, how much, the step)."""
    if small:
        return [
            ("batch", 2, StepSample(2, 16)),
            ("context", 32, StepSample(1, 32)),
        ]
    return [
        *(("batch", n, StepSample(n, BEHIND)) for n in BATCHES),
        *(("context", n, StepSample(1, n)) for n in CONTEXTS),
    ]


def measure(device: str, out: Path) -> None:
    """Runs every step, and notes its milliseconds."""
    small = device == "cpu"

    def timed(runner: StepRunner, config: EngineConfig, most: StepLimits, grain: int = 1) -> None:
        timer = _StepTimer(runner, config.num_pages or 0, config.page_size, config.speculation.width, 0)
        for grows, count, sample in samples(small):
            took = min(timer.seconds(sample) for _ in range(3))
            say(out, {"grows": grows, "count": count, "ms": round(1e3 * took, 4)})

    build._rates = timed
    sizes: dict[str, Any] = {"context_length": 131072, "max_running": 257, "num_pages": 40_000}
    if small:
        sizes = {
            "context_length": 256,
            "max_running": 4,
            "num_pages": 64,
            "chunk_tokens": 32,
            "mixed_tokens": 32,
        }
    with tempfile.TemporaryDirectory() as folder:
        model, _ = shape_folders(TINY if small else "llama-3.1-8b", Path(folder))
        config = engine_config(device, model=str(model), draft=None, **sizes)
        if not small:
            warm([config])
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
    """The three panels."""
    plot_style.check_plot(path)
    figure, axes = plot_style.panels(TITLES, "Growth: Llama-3.1-8B's shape, bf16, one H200")
    for panel, grows, unit in zip(axes, ("batch", "context"), ("sequences", "tokens"), strict=False):
        points = [(line["count"], line["ms"]) for line in lines if line["grows"] == grows]
        plot_style.draw(panel, plot_style.LOOKS[0], *zip(*points, strict=True))
        plot_style.label(panel, "step", points[-1], left=True)
        plot_style.log_scale(panel, "x")
        panel.set(xlabel=unit, ylabel="ms", ylim=(0, None))
    each = [(line["count"], line["ms"] / line["count"]) for line in lines if line["grows"] == "batch"]
    plot_style.draw(axes[0], plot_style.LOOKS[1], *zip(*each, strict=True))
    plot_style.label(axes[0], "per token", each[len(each) // 3])
    for look, layout in zip(plot_style.LOOKS, ClusterLayout, strict=False):
        counts = [n for n in WORKERS if n > 1 or layout is not ClusterLayout.SPLIT]
        values = [borne(layout, n) for n in counts]
        plot_style.draw(axes[2], look, counts, values)
        plot_style.label(axes[2], layout.value, (counts[-1], values[-1]), left=True)
    plot_style.log_scale(axes[2], "x")
    axes[2].set(xlabel="workers", ylabel="requests per second and worker", ylim=(0, None))
    plot_style.save(figure, path)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw FILE's lines, and measure nothing")
    given = parser.parse_args()
    if given.plot is not None:
        plot(lines_of(given.out), given.plot)
    else:
        measure(given.device, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
