"""One engine on a thread, timed while its whole batch decodes: what scripts of figures share.

It knows when each entry of each answer came. What is drafted, and what is compared, it does not know. On a
CPU the same engine runs its kernels in Triton's interpreter, for the scripts to be tried out.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.types import GenerationRequest, TokenEntry
from eyas.engine.ipc.messages import CancelGeneration, Event, StepReply
from eyas.engine.loading.startup import EngineStart
from tests.unit.device_engines import write_head
from tests.unit.loopback import Loopback, Result
from tests.unit.tiny import write_tiny_llama

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.unit import interpreted

    interpreted.install()

LOOK_S = 0.002
TINY = "tiny"  # a shape for Triton's interpreter
STUCK_S = 120.0


class Came(NamedTuple):
    """An entry, and when the engine told it, by `time.perf_counter`."""

    seconds: float
    entry: TokenEntry


class Clocked(Loopback):
    """A cluster that notes when every entry came, and counts tokens as they come: looks cost it nothing."""

    def __init__(self, *configs: EngineConfig) -> None:
        self.came: list[Came] = []
        self.tokens = self.begun = 0  # of all that came, and answers of which the first one came
        super().__init__(*configs)

    def event(self, worker: Any, event: Event) -> None:
        if isinstance(event, StepReply):
            now = time.perf_counter()
            self.came += [Came(now, entry) for entry in event.entries]
            self.tokens += sum(len(entry.tokens) for entry in event.entries)
            self.begun += sum(not entry.index for entry in event.entries)
        super().event(worker, event)

    def cancel(self, ids: Sequence[str]) -> None:
        """Ends these requests, and waits until the engine has none."""
        worker = self.by_role["decode"]
        for id in ids:
            worker.send(CancelGeneration(id))
        wait(lambda: not worker.engine._requests.table, STUCK_S)


def wait(until: Callable[[], bool], seconds: float) -> None:
    """Looks until it holds, or for so long."""
    end = time.perf_counter() + seconds
    while not until() and time.perf_counter() < end:
        time.sleep(LOOK_S)


@dataclass(frozen=True)
class Rate:
    """Of a batch in which every sequence decodes: rounds of all sequences together, their tokens, seconds."""

    rounds: int
    tokens: float
    seconds: float

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.rounds + other.rounds, self.tokens + other.tokens, self.seconds + other.seconds)

    def line(self, batch: int) -> dict[str, float]:
        """For a file of results."""
        return {
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "round_ms": round(1e3 * self.seconds * batch / self.rounds, 4),
            "tokens_per_round": round(self.tokens / self.rounds, 3),
        }


def rate(came: Sequence[Came], weight: Callable[[TokenEntry], float]) -> Rate:
    """Of entries in their order, the first of each answer left out; `weight`: tokens that one counts as.

    Clocks run from the step before the first counted one. Raises ValueError for fewer than two steps.
    """
    counted = [one for one in came if one.entry.index > 0]
    steps = sorted({one.seconds for one in counted})
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps are too few to be timed")
    after = [one.entry for one in counted if one.seconds > steps[0]]
    return Rate(len(after), sum(map(weight, after)), steps[-1] - steps[0])


def shape_folders(shape: str, folder: Path) -> tuple[Path, Path]:
    """A model without weights, and a head for it."""
    if shape == TINY:
        target = write_tiny_llama(folder / "model", layers=2, hidden=64, heads=2, vocab=1024)
        return target, write_head(folder / "head", target)
    model, head = folder / "model", folder / "head"
    command = [sys.executable, "-m", "eyas.bench.shapes", shape, str(model), "--head", str(head)]
    subprocess.run(command, check=True)
    return model, head


def engine_config(device: str, **options: Any) -> EngineConfig:
    """A unified worker of one GPU, prompts attended by Triton's kernel; on a CPU the same, interpreted."""
    options = {"load_format": "dummy", "worker": "unified", "transfer": "none"} | options
    if device != "cpu":
        return resolve_engine(device, prefill_attention_backend="triton", **options)
    later: dict[str, Any] = {"attention_backend": "triton", "prefill_attention_backend": "triton"}
    if "speculation" in options:  # synthetic acceptance is refused on a CPU
        later["speculation"] = options.pop("speculation")
    return replace(resolve_engine("cpu", **options), overlap_schedule=True, **later)


def warm(configs: Sequence[EngineConfig]) -> None:
    """Compiles what these engines launch, in many processes: first all of the first one, which most share."""
    began = time.perf_counter()
    for some in (configs[:1], configs[1:]):
        for start in [EngineStart.of(config) for config in some]:
            start.wait_for_kernels()
    print(f"kernels compiled in {time.perf_counter() - began:.1f} s", flush=True)


@contextmanager
def clocked(config: EngineConfig) -> Iterator[Clocked]:
    """An engine, from its start to its end; says how long it took to start, and by its log what took so long.

    Here it shares a heap with all that came, which a worker's engine does not: nothing searches it meanwhile.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("eyas.engine").setLevel(logging.INFO)
    began = time.perf_counter()
    gc.disable()
    cluster = Clocked(config)
    try:
        wait(lambda: cluster.workers["unified"].ready is not None, STUCK_S)
        print(f"started in {time.perf_counter() - began:.1f} s", flush=True)
        yield cluster
    finally:
        cluster.close()
        gc.enable()
        gc.collect()  # its pools, before the next engine's are made


def submit(cluster: Clocked, requests: Sequence[GenerationRequest]) -> list[Result]:
    """All at once."""
    cluster.came.clear()
    cluster.tokens = cluster.begun = 0
    return [cluster.submit(request, split=False) for request in requests]


def batch_line(cluster: Clocked, batch: int) -> dict[str, float]:
    """Of the batch that was answered last: from when all have begun until the first one ends."""
    begun = max(one.seconds for one in cluster.came if one.entry.index == 0)
    ended = min(one.seconds for one in cluster.came if one.entry.finish is not None)
    steady = [one for one in cluster.came if begun <= one.seconds <= ended]
    return rate(steady, lambda entry: len(entry.tokens)).line(batch)


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """A part whose failure is printed; what follows runs all the same."""
    try:
        yield
    except Exception:
        print(f"FAILED: {what}\n{traceback.format_exc()}", flush=True)
