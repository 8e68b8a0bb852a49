"""How long adapters take to come from a disk and into slots, and what streams without one notice of it.

    python -m tests.gpu.time_adapter_loads --out FILE [--rank 16] [--times 6]

Seven plain streams of an 8B shape run beside each part: nothing; adapters that are read; prompts of the plain
model; prompts for adapters that have their slot; for adapters that must first be copied into one; the same
again, when their prompts are cached; and reads again. Each prompt is new but in the part with cached ones, so
two parts differ in one thing. A line per part: the middle and the longest gap between a stream's tokens, what
took the engine's thread longest, and the longest launch and the longest landing of a step, each with the
step's shape. First come the steps of a load, with no stream; `--only-steps`: without an engine, in seconds.
`--device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from eyas.bench.shapes import SHAPES, write_model
from eyas.common.page_names import salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.adapters import peft
from eyas.engine.adapters.reader import AdapterReader
from eyas.engine.adapters.reading_process import ReadingProcess
from eyas.engine.adapters.sites import AdapterSite, AdapterSites, SitePart
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.host_tensors import HostTensors
from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.device import adapters
from eyas.engine.device.adapter_rooms import AdapterRooms
from eyas.engine.device.flight import LaunchedStep
from eyas.engine.formats.adapted import AdaptedProjection
from eyas.engine.formats.projection import Projection
from eyas.engine.models.table import read_model
from tests.gpu.lines import say
from tests.gpu.steady import Clocked, clocked, shape_folders, submit, warm
from tests.gpu.time_lora import SIZES, WAIT_S, Sizes, config_of, gaps_ms, requests, write_adapters
from tests.unit.loopback import wait_all

STREAMS, SLOTS = 7, 4
GRAPHS: dict[str, dict[str, Any]] = {
    "cuda": {"cuda_graph_bs": (8,), "mixed_tokens": 512},
    "cpu": {"num_pages": 512},
}
"""Every step has a graph: seven streams, and an answer that begins."""
LONG = 1600  # tokens of a stream, more than a part lasts
APART_S = 0.15
"""Between two loads or prompts, so that what each costs is a gap of its own."""


class Stopwatch:
    """Milliseconds of calls, by name."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = defaultdict(list)

    def watch(self, owner: Any, name: str, call: str = "") -> None:
        """Every call of `owner.name` from now on; known as `call`."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **named)
            finally:
                self.took[call or name].append(1e3 * (time.perf_counter() - began))

        setattr(owner, name, timed)

    def taken(self) -> dict[str, tuple[float, float]]:
        """Of each name the sum and the longest, since it was last asked."""
        took, self.took = self.took, defaultdict(list)
        return {name: (round(sum(each), 2), round(max(each), 2)) for name, each in took.items()}


def watched_loads() -> Stopwatch:
    """The steps of a load: on a GPU those of the process that reads are timed where it is read here, too."""
    watch = Stopwatch()
    for owner, name in (
        (peft, "read_files"),
        (peft, "_check_numbers"),
        (HostTensors, "digest_in_order"),
        (AdapterReader, "read"),
        (AdapterSites, "packed"),
        (ReadingProcess, "read"),
        (AdapterRooms, "__call__"),
        (AdapterRooms, "_locked"),
    ):
        watch.watch(owner, name)
    return watch


def watched_engine(cluster: Clocked) -> Stopwatch:
    """What the engine's thread does."""
    engine, watch = cluster.workers["unified"].engine, Stopwatch()
    for name in ("_receive", "_poll_background", "_send_events"):
        watch.watch(engine, name)
    watch.watch(engine._loop, "step")
    watch.watch(engine._parts.adapters.memory, "fill")
    return watch


class StepLog:
    """The steps of an engine: how long each took to launch and to land, and what it was."""

    def __init__(self, cluster: Clocked) -> None:
        runner = cluster.workers["unified"].engine._loop.runner
        self._captured = getattr(getattr(runner, "_executor", None), "_captured", {})
        self._longest: dict[str, tuple[float, str]] = {}
        inner, land = runner.launch, LaunchedStep.land

        def launch(works: Any) -> Any:
            began = time.perf_counter()
            flight = inner(works)
            self._note("launch", began, flight)
            return flight

        def landed(flight: LaunchedStep) -> Any:
            began = time.perf_counter()
            results = land(flight)
            self._note("land", began, flight)
            return results

        runner.launch = launch
        LaunchedStep.land = landed  # type: ignore[assignment, method-assign]

    def _note(self, what: str, began: float, flight: Any) -> None:
        took = 1e3 * (time.perf_counter() - began)
        if took > self._longest.get(what, (0.0, ""))[0]:
            self._longest[what] = (round(took, 2), self._called(flight))

    def _called(self, flight: Any) -> str:
        shape = getattr(flight, "shape", None)
        if shape is None:
            return ""
        adapted = ", adapted" if shape.adapted else ""
        graph = "a graph" if shape in self._captured else "no graph"
        return f"{shape.batch} rounds + {shape.chunk} rows{adapted}, {graph}"

    def taken(self) -> dict[str, tuple[float, str]]:
        """The longest of each kind since it was last asked."""
        longest, self._longest = self._longest, {}
        return longest


def prompt(sizes: Sizes, adapter: str, number: int) -> GenerationRequest:
    """One that is new with each number."""
    words = tuple((i * 11 + 13 * number + 1) % 499 for i in range(sizes.prompt))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    name = f"p{time.perf_counter_ns()}"
    return GenerationRequest(name, words, params, adapter=adapter, salt=salt_of("", adapter))


@dataclass
class Beside:
    """Parts beside streams. `watch`: of the engine's thread."""

    cluster: Clocked
    sizes: Sizes
    watch: Stopwatch
    steps: StepLog
    out: Path
    prompts: int = 0

    def part(self, name: str, *calls: Callable[[], object]) -> None:
        """Calls apart from each other, and what the streams noticed."""
        running = submit(self.cluster, requests(self.sizes, [""] * STREAMS, answer=LONG))
        while self.cluster.begun < STREAMS:
            time.sleep(0.01)
        time.sleep(APART_S)
        self.watch.taken()
        self.steps.taken()
        since = time.perf_counter()
        for call in calls:
            call()
            time.sleep(APART_S)
        until = time.perf_counter()
        assert not any(each.done.is_set() for each in running), "streams were too short"
        gaps, took = gaps_ms(self.cluster, since, until), self.watch.taken()
        self.cluster.cancel([id for id in self.cluster.results if id.startswith("r")])
        longest = {name: most for name, (_, most) in took.items()}
        say(
            self.out,
            {
                "part": name,
                "gaps_ms": [round(gaps[len(gaps) // 2], 2), *sorted({round(gap, 2) for gap in gaps})[-4:]],
                **longest,
                **self.steps.taken(),
            },
        )

    def answered(self, adapter: str, new: bool = True) -> Callable[[], None]:
        """A prompt for it, to its end."""
        self.prompts += new
        number = self.prompts if new else 1

        def call() -> None:
            wait_all([self.cluster.submit(prompt(self.sizes, adapter, number), split=False)], WAIT_S)

        return call


def main() -> None:
    """All parts."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--times", type=int, default=6, help="loads and prompts of each part, at least 5")
    parser.add_argument("--only-steps", action="store_true")
    options = parser.parse_args()
    if options.only_steps:
        time_steps(options)
        return
    sizes = SIZES[options.device]
    load = watched_loads()
    with tempfile.TemporaryDirectory() as scratch:
        model, _ = shape_folders(sizes.shape, Path(scratch))
        folders = write_adapters(Path(scratch) / "adapters", model, options.rank, 3 * options.times)
        config = config_of(options.device, model, SLOTS, options.rank, **GRAPHS[options.device])
        warm([config])
        with clocked(config) as cluster:
            ids = []
            for folder in folders[: options.times]:
                began = time.perf_counter()
                ids.append(cluster.load_adapter(folder).id)
                took = round(1e3 * (time.perf_counter() - began), 1)
                say(options.out, {"load_ms": took} | {name: all for name, (all, _) in load.taken().items()})
            beside = Beside(cluster, sizes, watched_engine(cluster), StepLog(cluster), options.out)
            time_beside(beside, folders[options.times :], ids)
            say(options.out, {"disk": load.taken()})


def time_steps(options: argparse.Namespace) -> None:
    """The steps of loads into slots of matrices that are not there."""
    torch.set_num_threads(1)  # as the process that reads
    shape = SHAPES["llama-3.1-8b"]
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_model(shape, model)
        folders = write_adapters(Path(scratch) / "adapters", model, options.rank, options.times)
        config = read_model(model, "dummy")
        load, matrices = watched_loads(), list(matrices_of(config, options.device))
        slots = adapters.DeviceAdapters(AdapterReader(config, options.rank), matrices, SLOTS, options.device)
        held = []
        for number, folder in enumerate(folders):
            slots._sites.packed(slots._reader.read(folder, slots._sites.check), folder)  # its steps, here
            began = time.perf_counter()
            held.append(slots.read(folder))
            read = time.perf_counter()
            filled = slots.fill(1 + number % SLOTS, held[-1])
            begun = time.perf_counter()
            while not filled():
                time.sleep(1e-4)
            spans = {
                "load_ms": read - began,
                "fill_call_ms": begun - read,
                "fill_ms": time.perf_counter() - read,
            }
            line = {name: round(1e3 * seconds, 2) for name, seconds in spans.items()}
            say(options.out, line | {name: all for name, (all, _) in load.taken().items()})


def matrices_of(config: ModelConfig, device: str) -> Iterator[AdaptedProjection]:
    """What adapters update of an 8B shape, as a GPU has it: the rows of gate and up take turns."""
    placement, gain = WeightPlacement(device, torch.bfloat16), torch.ones(config.hidden_size, device=device)
    hidden, attention = config.hidden_size, config.layers[0].attention
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    width = config.layers[0].feed_forward.width
    turns = torch.arange(2 * width).view(2, width).t().flatten()
    for layer in range(config.num_layers):
        stem = f"model.layers.{layer}"

        def part(name: str, rows: int, columns: int, stem: str = stem) -> SitePart:
            return SitePart(f"{stem}.{name}_proj.weight", (rows, columns), 0)

        qkv = [
            part(f"self_attn.{name}", rows, hidden)
            for name, rows in zip("qkv", (queries, keys, keys), strict=True)
        ]
        gate_up = [part(f"mlp.{name}", width, hidden) for name in ("gate", "up")]
        for site in (
            AdapterSite(tuple(qkv), placement, gain=gain),
            AdapterSite((part("self_attn.o", hidden, queries),), placement),
            AdapterSite(tuple(gate_up), placement, order=turns, gain=gain),
            AdapterSite((part("mlp.down", hidden, width),), placement),
        ):
            yield AdaptedProjection(cast("Projection", None), site)


def time_beside(beside: Beside, folders: Sequence[Path], ids: Sequence[str]) -> None:
    """The parts in their order; each adapter that `ids` names has lost its slot when its turn comes again."""
    half = len(folders) // 2
    first, cluster = ids[0], beside.cluster
    beside.part("warm", *(beside.answered(id) for id in ["", *ids]))
    beside.part("nothing", *[lambda: time.sleep(APART_S)] * len(ids))
    beside.part("disk", *(partial(cluster.load_adapter, folder) for folder in folders[:half]))
    beside.part("plain prompts", *(beside.answered("") for _ in ids))
    beside.part("prompts of one adapter", beside.answered(first), *(beside.answered(first) for _ in ids))
    beside.part("prompts and slots", *(beside.answered(id) for id in ids))
    beside.part("slots, prompts cached", *(beside.answered(id, new=False) for id in [*ids, *ids]))
    beside.part("disk again", *(partial(cluster.load_adapter, folder) for folder in folders[half:]))


if __name__ == "__main__":
    main()
