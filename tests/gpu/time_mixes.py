"""Six mixes of traffic through one engine: depth as it adapts over the best fixed depth, at each batch size.

    python -m tests.gpu.time_mixes --out FILE [--shape llama-3.1-8b] [--batches 1 8] [--seconds 150]

A mix gives each sequence its chance of a draft (`tests.unit.pacing_world.MIXES`). The device knows one chance
per depth: that of the mix's sequences together, whose mean the batch has. Dummy weights and synthetic
acceptance, chains of 7 of an EAGLE-3 head. Of each batch all depths are fixed for a moment, which says how
long their rounds take and so which is best for each mix. Then, mix after mix, depth adapts: first to learn,
then in turns with the depth that is best when fixed, for what ran before heats a card. A round counts as
many tokens as its depth is worth. FILE gets a line of JSON per batch and mix, and the verdict is printed
last. `--device cpu` tries the script out with a tiny model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.engine.device.runner import DeviceRunner
from tests.gpu.lines import say
from tests.gpu.steady import Clocked, clocked, warm
from tests.gpu.time_adaptive import MOMENTS, TARGET, Moment, Seen, watched, worth
from tests.gpu.time_depths import OTHER, config_of
from tests.unit.pacing_world import MIXES, mixed

BATCHES = (1, 8, 32, 128, 256)
LESSONS, TURNS = {"cuda": 5, "cpu": 1}, {"cuda": 4, "cpu": 1}
BRIEF = {"cuda": Moment(8, 48, 0.12, 0.3), "cpu": Moment(1, 24, 0.0, 60.0)}
"""In which a depth is timed to be known."""


def together(mix: str, steps: int) -> tuple[float, ...]:
    """The chance of each of `steps` drafts in turn, once those above it are accepted, over the sequences of a
    mix.
    """
    each = mixed(mix, len(MIXES[mix]))
    reached = [float(np.mean(each**depth)) for depth in range(steps + 1)]
    return tuple(below / above for above, below in zip(reached, reached[1:], strict=False))


class MixedTraffic:
    """One engine under batches of every mix. `device`: how long moments are."""

    def __init__(self, cluster: Clocked, device: str) -> None:
        engine = cluster.workers["unified"].engine
        runner = engine._parts.runner
        assert isinstance(runner, DeviceRunner) and runner._depths is not None
        self._cluster, self._device, self._depths = cluster, device, runner._depths
        self._loop, self._pacing = engine._loop, engine._loop.pacing
        self._rates = runner._executor.state.synthetic
        self._count = 0

    def cells(self, batch: int, mixes: Sequence[str]) -> Iterator[dict[str, Any]]:
        """A line per mix."""
        steps = max(self._depths.places)
        brief = {
            depth: self._watch(batch, depth, (0.5,) * steps, BRIEF[self._device])
            for depth in self._depths.places
        }
        took = {depth: seen.worth.seconds * batch / seen.worth.rounds for depth, seen in brief.items()}
        for mix in mixes:
            chances = together(mix, steps)
            speeds = {depth: batch * worth(chances, depth) / seconds for depth, seconds in took.items()}
            best = max(speeds, key=speeds.__getitem__)
            adapted, fixed = self._in_turns(batch, best, chances)
            line = {"batch": batch, "mix": mix, "best": best, "adapts": adapted.line(batch)}
            line |= {"fixed": fixed.line(batch), "round_ms": {d: round(1e3 * t, 3) for d, t in took.items()}}
            ratio = line["adapts"]["tokens_per_s"] / line["fixed"]["tokens_per_s"]
            yield {"synthetic": True, **line, "ratio": round(ratio, 4)}

    def _in_turns(self, batch: int, best: int, chances: tuple[float, ...]) -> tuple[Seen, Seen]:
        learnt, counted = MOMENTS[self._device]
        for _ in range(LESSONS[self._device]):
            self._watch(batch, None, chances, learnt)
        pairs = [
            [self._watch(batch, depth, chances, counted) for depth in (None, best)]
            for _ in range(TURNS[self._device])
        ]
        adapted, fixed = (reduce(add, seen) for seen in zip(*pairs, strict=True))
        return adapted, fixed

    def _watch(self, batch: int, depth: int | None, chances: tuple[float, ...], moment: Moment) -> Seen:
        """A batch in which a draft has such a chance. `depth`: fixed, of which the policy learns nothing;
        None: it adapts.
        """
        self._depths.fixed = depth
        self._loop.pacing = self._pacing if depth is None else None
        assert self._rates is not None
        with torch.inference_mode():
            self._rates.copy_(torch.tensor(chances))
        self._count += 1
        return watched(self._cluster, f"moment {self._count}", batch, chances, moment)


def report(lines: Sequence[dict[str, Any]], wanted: int) -> Iterator[str]:
    """A row per batch and mix, then the least."""
    for line in lines:
        depths = ", ".join(f"{depth}: {share:.2f}" for depth, share in line["adapts"]["depths"].items())
        passed = "PASS" if line["ratio"] >= TARGET else "FAIL"
        yield f"{line['batch']:>4} {line['mix']:<10} {line['ratio']:.3f} {passed} of {line['best']}; {depths}"
    if lines:
        least = min(line["ratio"] for line in lines)
        verdict = "PASS" if least >= TARGET and len(lines) == wanted else "FAIL"
        yield f"least of {len(lines)} of {wanted} cells: {least:.3f} of {TARGET} {verdict}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=list(MOMENTS), default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--mixes", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--seconds", type=float, default=150.0, help="no cell begins after (%(default)s)")
    given = parser.parse_args()
    end, lines = time.monotonic() + given.seconds, []
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(given, OTHER, Path(folder))
        warm([config])
        with clocked(config) as cluster:
            traffic = MixedTraffic(cluster, given.device)
            for line in chain.from_iterable(traffic.cells(batch, given.mixes) for batch in given.batches):
                say(given.out, line)
                lines.append(line)
                if time.monotonic() > end:
                    break
    print(*report(lines, len(given.batches) * len(given.mixes)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
