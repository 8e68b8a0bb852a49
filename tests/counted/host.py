"""What the host does for a step: schedule, pack, land, commit; its time as a ratio to a calibration loop.

The device is a stand-in that answers at once. Step and loop are timed in turn, in seconds that their thread
itself ran, so that a busy neighbour slows down both or neither. It knows nothing of models.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.device.buckets import GraphBuckets
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.device.step import StepInput, StepLayout
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.kernels.drafts.rounds import FACTS
from eyas.engine.loop.commit import StepCommitter
from eyas.engine.loop.drafting import DraftCoordinator
from eyas.engine.loop.step_loop import StepLoop
from eyas.engine.scheduling.limits import BatchLimits
from tests.unit.engine_rig import PAGE, Rig

PROMPT, CONTEXT = 4, 64
TIMED = 24  # steps after the last request has joined, while none has ended
TOKEN = 7
TRIES = 3


class ReadyDevice:
    """Twin of `eyas.engine.device.executor.StepExecutor`: every row gives the same token, at once."""

    def __init__(self, slots: int) -> None:
        self.tables = SlotTables(TableSizes(slots + 1, CONTEXT // PAGE + 1, context=CONTEXT), "cpu")
        self.state = SimpleNamespace(
            tables=self.tables, prompts=None, tap=None, drafter=None, lookup=None, adapters=None, trees=False
        )
        self.told = 0  # bytes: steps and what they write to the tables

    def begin(self, step: StepInput) -> None:
        self.told += step.data.nbytes + step.writes.nbytes

    def finish(self, step: StepInput) -> tuple[torch.Tensor, None]:
        shape = step.shape
        rounds = np.tile(np.array([1, *[0] * (FACTS - 1), TOKEN], np.int32), shape.batch)
        ends, paths = np.full(shape.ends, TOKEN, np.int32), np.zeros(shape.batch, np.int32)
        return torch.from_numpy(np.concatenate((rounds, ends, paths))[None]), None


class Busy:
    """A step loop with `count` sequences that all decode."""

    def __init__(self, count: int) -> None:
        self.device = ReadyDevice(count)
        self._rig = Rig(count * (CONTEXT // PAGE + 1), max_running=count)
        limits = BatchLimits(PAGE, count, count * PROMPT, 1)
        self._rig.scheduler.tables.limits = limits
        device: Any = self.device
        buckets, layout = GraphBuckets(1, PAGE, (count,)), StepLayout(PAGE, device.tables.padding_slot, PAGE)
        runner = DeviceRunner(device, buckets, [layout], GrammarManager(Path(), 0, ()), ahead=True)
        requests = self._rig.requests
        committer = StepCommitter(
            scheduler=self._rig.scheduler,
            runner=runner,
            drafting=DraftCoordinator(None, 0, 0),
            leases=self._rig.leases,
            outbox=self._rig.outbox,
            eos_ids=(),
            new_uid=requests.new_uid,
            on_end=requests.end,
            on_broken=requests.spoil,
            flush=lambda: None,
        )
        self._loop = StepLoop(self._rig.scheduler, runner, committer)
        self._admit(count)

    def step(self) -> None:
        """One of many alike: every sequence gets a token."""
        self._loop.step()
        self._rig.outbox.take()

    def _admit(self, count: int) -> None:
        params = SamplingParams(max_tokens=CONTEXT - PROMPT, ignore_eos=True)
        for i in range(count):
            ids = tuple((i + k) % 50 for k in range(PROMPT))
            self._rig.submit(GenerationRequest(f"r{i}", ids, params))
            if i % 8 == 7:  # as many as may wait
                self.step()
        self.step()
        self.step()
        assert len(self._rig.scheduler.running) == count


def counts() -> dict[str, int | float]:
    """Of steps of 64 and 256 sequences."""
    found: dict[str, int | float] = {}
    for count in (64, 256):
        busy = Busy(count)
        before = busy.device.told
        busy.step()
        found[f"{count} sequences: bytes to the device"] = busy.device.told - before
        ratios = [ratio(busy.step, TIMED), *(ratio(Busy(count).step, TIMED) for _ in range(TRIES - 1))]
        found[f"{count} sequences: time of a step"] = round(min(ratios), 1)
    return found


def ratio(step: Callable[[], None], times: int) -> float:
    """How much longer `step` takes than `calibrate`: the median of this number of pairs, run in turn."""
    gc.collect()
    gc.disable()
    try:
        return statistics.median(_seconds(step) / _seconds(calibrate) for _ in range(times))
    finally:
        gc.enable()


def calibrate() -> None:
    """What an interpreter does all day: calls, attributes, lists, dicts, tuples."""
    table: dict[int, list[tuple[int, int]]] = {}
    for i in range(1000):
        table.setdefault(i % 32, []).append((i, len(table)))
    for rows in table.values():
        rows.sort(key=_second)


def _second(pair: tuple[int, int]) -> int:
    return -pair[1]


def _seconds(run: Callable[[], None]) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began
