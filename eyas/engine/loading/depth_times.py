"""Measures at an engine's start how long rounds of each depth take, for the policy that chooses between them.

Made-up sequences of one token decode through the engine's own runner, before any page has an owner.
"""

from __future__ import annotations

import itertools
import time

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import Generation, Kind, Sequence, Work
from eyas.engine.device.depths import DepthBuckets
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.speculation.depths.pacing import DepthPacing

RUNS = 2  # of each: the shorter one counts
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def measure_depths(
    runner: DeviceRunner, depths: DepthBuckets, pacing: DepthPacing, config: EngineConfig
) -> None:
    """Tells `pacing` of a few batches. Their rows are garbage that is never read.

    A batch takes as long as the next larger one that has a graph: that one is measured in its place.
    """
    occupancies = itertools.count(-2, -1)  # real ones count from 0 up; -1 is none
    most = config.max_running
    for batch in sorted({min(depths.graphed(batch), most) for batch in BATCHES}):
        works = [_work(slot, next(occupancies), config) for slot in range(batch)]
        for depth in reversed(depths.places):  # plain rounds last: what they leave is never caught up
            depths.fixed = depth
            pacing.depths.times.measured(batch, depth, _seconds(runner, works))
    depths.fixed = None


def _seconds(runner: DeviceRunner, works: list[Work]) -> float:
    """Of a round that follows others, as an engine's do: the host prepares the next while one runs."""
    landed, flight = [], runner.launch(works)
    for _ in range(RUNS + 1):  # the first one verifies what the depth before it has drafted
        following = runner.launch(works) if runner.ahead else None
        flight.land()
        landed.append(time.monotonic())
        flight = following or runner.launch(works)
    flight.land()
    return min(after - before for before, after in itertools.pairwise(landed))


def _work(slot: int, occupancy: int, config: EngineConfig) -> Work:
    """A round of a sequence with a page; the rows that it grows beyond that fall into others' pages."""
    assert config.num_pages is not None
    request = GenerationRequest("measured", (0,), SamplingParams())
    seq = Sequence(slot, Generation(request, 0, Kind.LOCAL, 0.0, 0.0), 0, request.prompt_ids, [])
    seq.pages, seq.slot, seq.occupancy = [slot % config.num_pages], slot, occupancy
    return Work(seq, 0, [0], None, sample=True, round=True)
