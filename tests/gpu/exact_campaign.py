"""Exact arithmetic by whole engines of the 8B shape: how many requests say another token in other company?

    python -m tests.gpu.exact_campaign --out FILE [--seconds N] [--kind experts] [--only "chain 3" ...]

Greedy and seeded requests alone, by 8, by 32, and up to 128 with arrivals, in a pool that is too small for
all; without drafts, with chains of 3 and with trees of 32, half of which draft what was said before, so that
drafts are accepted; answers that move: another worker began them, and this one goes on from their prompt and
first tokens; long prompts all at once, so that some are preempted; and second turns, whose first answers come
back as cached pages. The target is 0. Then the power of it, on fewer layers: `fast` must differ, and so must
each choice of today that is put back into `exact`. FILE gets a line of JSON whenever something is known, the
verdict last. `--only` takes some parts: "plain", "chain 3", "tree 32", "power".
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.attention.latent import PagedLatents
from eyas.engine.attention.rows import PagedAttention
from eyas.engine.formats import dense
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.skinny_tiles import tile_for
from eyas.engine.loading import arithmetic
from eyas.engine.loading.startup import EngineStart
from eyas.engine.models.ops import device_machine
from eyas.engine.models.ops.many_rows import ManyRows
from tests.gpu import atomic_sums
from tests.gpu.exact_rig import KINDS, ONE_WAY, Bed, Engine, Ledger, Way, asked
from tests.gpu.lines import lines_of, say

REQUESTS, ALONE, TURNS = 512, 24, 24
PAGES, RUNNING = 1800, 128
LONG = range(120, 601)  # prompts that fill the pool when all come at once
FEW_LAYERS = 8  # of the models that hazards run on: they start sooner
TOLD = 5  # differences of a company that are written out
LEAST_S = 15.0
NO_TIME = "there was no time"
START_S = 150.0  # for a start, its kernels and its end, at most
USUAL_START_S = 35.0
POWER_S = 90.0
END_S = 12.0  # for the answers that are still being made
Line = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One engine in a process of its own, and its share of the time for asking."""

    way: Way
    share: float

    @property
    def name(self) -> str:
        return self.way.drafts

    @property
    def most(self) -> int:
        """Requests that run at once: trees of more make steps of thousands of rows."""
        return 32 if self.way.drafts == "tree 32" else RUNNING


PARTS = (
    Part(Way("exact"), 0.4),
    Part(Way("exact", "chain 3"), 0.4),
    Part(Way("exact", "tree 32"), 0.2),
)
POWER = "power"  # the name of all hazards' part
ATOMICS = "sums by atomics"  # of a dense layer's products
CONTROL = "nothing put back"  # where the same few requests must not differ
HAZARDS: dict[str, Callable[[], Any]] = {
    CONTROL: lambda: contextlib.nullcontext(),
    "fast": lambda: contextlib.nullcontext(),
    "k cut by rows": lambda: patch.object(skinny, "exact_tile_for", tile_for),
    "today's attention": lambda: patch.multiple(
        arithmetic, ExactAttention=PagedAttention, ExactLatents=PagedLatents
    ),
    "today's wide rows": lambda: patch.object(device_machine, "ExactManyRows", ManyRows),
    ATOMICS: lambda: patch.object(dense, "exact_wide", atomic_sums.instead()),
}
BY_WAYS = ("k cut by rows", "today's wide rows", ATOMICS)
"""Hazards of models whose layers have two ways."""


def hazards_of(kind: str) -> list[str]:
    """Those that a kind of model must notice."""
    left_out = BY_WAYS if kind in ONE_WAY else (ATOMICS,) if kind == "experts" else ()
    return [name for name in HAZARDS if name not in left_out]


# --- one engine ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hazard(Part):
    """One engine in which something is put back; it is named after that."""

    hazard: str = ""

    @property
    def name(self) -> str:
        return self.hazard


@dataclass
class Run:
    """What one engine is asked, and what is held against what was said before."""

    bed: Bed
    part: Part
    ledger: Ledger
    out: Path
    ends_at: float
    requests: list[GenerationRequest] = field(init=False)

    def __post_init__(self) -> None:
        self.requests = asked(self.bed, REQUESTS)

    def all(self, engine: Engine) -> None:
        """Until there is no time: the companies of all parts first, then large ones again and again."""
        plain, most = self.part.way.drafts == "plain", self.part.most
        self._ask(engine, "alone", self._predicting(self.requests[:ALONE]), 1)
        self._turns(engine, "second turns from cached answers" if plain else "second turns")
        self._ask(engine, "by 8", self.requests[: 2 * ALONE], 8)
        self._ask(engine, "by 32", self._predicting(self.requests[:256]), 32)
        self._moved(engine, self.requests[:128])
        long = [request for request in self.requests if len(request.prompt_ids) in LONG]
        self._ask(engine, "long ones at once", long, len(long))
        rounds = 0
        while time.monotonic() < self.ends_at:
            again = self.requests[::-1] if rounds % 2 else self.requests
            asked_now = self._predicting(again) if rounds % 2 else again
            self._ask(engine, f"up to {most}, round {rounds}", asked_now, most + 16, gap_s=0.002)
            self._moved(engine, again[rounds % 4 :: 4])
            rounds += 1

    def few(self, engine: Engine) -> None:
        """What takes seconds."""
        self._ask(engine, "alone", self.requests[: ALONE // 2], 1)
        self._ask(engine, f"up to {RUNNING}", self.requests[:160], RUNNING)
        self._ask(engine, "in another order", self.requests[159::-1], RUNNING // 2)

    def _predicting(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Every second one brings what was said, if it is known: then drafts are accepted."""
        if self.part.way.drafts == "plain":
            return list(requests)
        return [
            msgspec.structs.replace(request, predicted=self.ledger.tokens(request) if i % 4 < 2 else ())
            for i, request in enumerate(requests)
        ]

    def _moved(self, engine: Engine, requests: Sequence[GenerationRequest]) -> None:
        """As the gateway moves them when a worker is lost: with the tokens that their clients have."""
        moved = []
        for request in requests:
            if said := self.ledger.tokens(request):
                has = said[: random.Random(len(said) + int(request.id)).randint(1, len(said) - 1)]
                moved.append(msgspec.structs.replace(request, choices=(RequestChoice(0, has),), begun=True))
        self._ask(engine, "moved", moved, self.part.most)

    def _turns(self, engine: Engine, company: str) -> None:
        """What follows the first answers; whether their pages are cached depends on what ran before."""
        found = []
        for request in self.requests[:TURNS]:
            if said := self.ledger.tokens(request):
                prompt = (*request.prompt_ids, *said, *request.prompt_ids[:20])
                found.append(
                    msgspec.structs.replace(request, id=f"{request.id}, second turn", prompt_ids=prompt)
                )
        self._ask(engine, company, found, 8)

    def _ask(
        self, engine: Engine, company: str, requests: Sequence[GenerationRequest], at_once: int, gap_s=0.0
    ) -> None:
        began, before = time.monotonic(), (self.ledger.compared, self.ledger.differing)
        count, accepted, told, preempted = 0, 0, [], engine.preemptions
        for request, result in engine.flow(requests, at_once, self.ends_at, gap_s):
            count += 1
            accepted += sum(entry.accepted for entry in result.entries)
            name = f"{self.part.name}, {company}"
            moved = len(request.choices[0].output_ids)
            difference = self.ledger.add(name, request.id, result, moved)
            if difference is not None and len(told) < TOLD:
                told.append(difference | {"prompt": len(request.prompt_ids), "moved": moved})
        line = {"part": self.part.name, "company": company, "requests": count}
        line["compared"] = self.ledger.compared - before[0]
        line["differing"] = self.ledger.differing - before[1]
        line |= {"first": told, "accepted drafts": accepted, "s": round(time.monotonic() - began, 1)}
        say(self.out, line | {"preemptions": engine.preemptions - preempted})


def run_part(bed: Bed, part: Part, out: Path, seconds: float, latest: float) -> None:
    """In this process, which ends with it. The time for asking begins when the engine is there, and ends at
    `latest`, by the clock of all processes.
    """
    began = time.monotonic()
    logging.basicConfig(level=logging.INFO)
    config = config_of(bed, part.way)
    EngineStart.of(config).wait_for_kernels()
    compiled_s = time.monotonic() - began
    path = bed.folder / "said.json"
    engine = Engine(config)
    ready = {"part": part.name, "kernels s": round(compiled_s, 1)}
    say(out, ready | {"ready s": round(time.monotonic() - began, 1)})
    run = Run(bed, part, Ledger.read(path), out, min(time.monotonic() + seconds, latest))
    try:
        run.all(engine)
    finally:
        run.ledger.write(path)
    sys.stdout.flush()
    os._exit(0)  # a device that hangs keeps no time from the others


def run_power(bed: Bed, out: Path) -> None:
    """Every hazard, one engine after another in this process: few layers, no graphs, their own answers."""
    for name in hazards_of(bed.kind):
        put_back = HAZARDS[name]
        way = Way("fast" if name == "fast" else "exact", layers=FEW_LAYERS)
        options = {} if bed.device == "cpu" else {"cuda_graph_max_bs": 0}
        config = bed.config(way, num_pages=PAGES, max_running=RUNNING, max_waiting=1024, **options)
        try:
            EngineStart.of(config).wait_for_kernels()
            with put_back():
                engine = Engine(config)
                try:
                    Run(bed, Hazard(way, 0.0, name), Ledger(), out, time.monotonic() + 60.0).few(engine)
                finally:
                    engine.close()
        except ConfigError as error:  # a start that notices a hazard is as good as an answer that does
            say(out, {"part": name, "refused at the start": error.message})
        except Exception:
            say(out, {"part": name, "failed": traceback.format_exc()})


def config_of(bed: Bed, way: Way) -> EngineConfig:
    """With few graphs: the others take time to start."""
    graphs = (1, 8, 32) if way.drafts == "tree 32" else (1, 8, 32, 64, RUNNING)
    options = {} if bed.device == "cpu" else {"cuda_graph_bs": graphs}
    return bed.config(way, num_pages=PAGES, max_running=RUNNING, max_waiting=1024, **options)


# --- all of them -----------------------------------------------------------------------------------------


def run_all(bed: Bed, args: argparse.Namespace) -> Iterator[str]:
    """One part after another, each with its share of the time, while the kernels of the next are compiled;
    yields the failures.
    """
    ends_at = time.monotonic() + args.seconds
    parts = [part for part in PARTS if part.name in args.only]
    for i, part in enumerate(parts):
        left = ends_at - time.monotonic()
        if left < LEAST_S:
            yield f"{part.name}: {NO_TIME}"
            continue
        for_asking = left - len(parts[i:]) * USUAL_START_S - POWER_S * (POWER in args.only)
        seconds = max(LEAST_S, for_asking * part.share / sum(part.share for part in parts[i:]))
        following = parts[i + 1 : i + 2]
        ahead = [subprocess.Popen(command(bed, args, next.name, "--compile")) for next in following]
        times = ("--seconds", f"{seconds:.0f}", "--latest", f"{ends_at - END_S:.0f}")
        own = command(bed, args, part.name, *times)
        try:
            subprocess.run(own, check=True, timeout=min(left, seconds + START_S))
        except subprocess.SubprocessError as error:
            yield f"{part.name}: {error}"
        for process in ahead:
            with contextlib.suppress(subprocess.SubprocessError):
                process.wait(max(ends_at - time.monotonic(), 1.0))
            process.kill()
    left = ends_at - time.monotonic()
    try:
        if POWER not in args.only:
            pass
        elif left < LEAST_S:
            yield f"{POWER}: {NO_TIME}"
        else:
            subprocess.run(command(bed, args, POWER), check=True, timeout=left)
    except subprocess.SubprocessError as error:
        yield f"{POWER}: {error}"


def command(bed: Bed, args: argparse.Namespace, part: str, *flags: str) -> list[str]:
    words = [sys.executable, "-m", "tests.gpu.exact_campaign", "--part", part, "--out", args.out]
    words += [
        "--device",
        bed.device,
        "--shape",
        bed.shape,
        "--kind",
        bed.kind,
        "--layers",
        bed.layers,
        "--folder",
        bed.folder,
        *flags,
    ]
    return [str(word) for word in words]


def verdict(out: Path, failures: list[str], only: Sequence[str], hazards: Sequence[str]) -> Line:
    """Of all lines: exact ones differ nowhere, and every hazard somewhere. `only`: the parts that were asked
    for.
    """
    counted: dict[str, list[int]] = {}
    refused: set[str] = set()
    for line in lines_of(out):
        if "refused at the start" in line:
            refused.add(line["part"])
        if "compared" in line:
            found = counted.setdefault(line["part"], [0, 0])
            found[0] += line["compared"]
            found[1] += line["differing"]
    exact = [counted.get(part.name, [0, 0]) for part in PARTS if part.name in only]
    compared, differing = (sum(pair[i] for pair in exact) for i in (0, 1))
    hazards = hazards if POWER in only else ()
    ran = [name for name in hazards if name in counted or name in refused]
    missed = [name for name in ran if name not in (CONTROL, *refused) and not counted[name][1]]
    differing += counted.get(CONTROL, [0, 0])[1]
    compared += counted.get(CONTROL, [0, 0])[0]
    late = [text for text in failures if text.endswith(NO_TIME)]
    good = not differing and not missed and len(late) == len(failures)
    good = good and all(pair[0] for pair in exact) and CONTROL not in refused
    whole = not late and len(ran) == len(hazards)
    summary = {"exact": f"{differing} of {compared} answers differ", "compared and differing": counted}
    summary |= {"refused at the start": sorted(refused)}
    summary |= {"power: noticed nothing in": missed, "failures": failures}
    return summary | {"verdict": "FAIL" if not good else "PASS" if whole else "PASS, as far as it went"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=290.0, help="for everything (%(default)g)")
    parser.add_argument("--device", default="cuda", help="cpu: plain torch, to try the script")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--kind", choices=KINDS, default="dense", help="of model (%(default)s)")
    parser.add_argument("--layers", type=int, default=0, help="of the models (0: all)")
    parser.add_argument("--part", help="one alone, in this process")
    parser.add_argument("--latest", type=float, default=float("inf"), help="of the part's questions")
    parser.add_argument("--folder", type=Path)
    names = [*(part.name for part in PARTS), POWER]
    parser.add_argument("--only", choices=names, nargs="+", default=names, help="these parts (all)")
    parser.add_argument("--compile", action="store_true", help="only the part's kernels")
    args = parser.parse_args()
    if args.part is not None:
        bed = Bed(args.device, args.shape, args.folder, args.kind, args.layers)
        try:
            if args.part == POWER:
                run_power(bed, args.out)
                return 0
            part = next(part for part in PARTS if part.name == args.part)
            if args.compile:
                EngineStart.of(config_of(bed, part.way)).wait_for_kernels()
                return 0
            run_part(bed, part, args.out, args.seconds, args.latest)
        except BaseException:
            say(args.out, {"part": args.part, "failed": traceback.format_exc()})
            os._exit(1)
    with tempfile.TemporaryDirectory() as folder:
        bed = Bed(args.device, args.shape, Path(folder), args.kind, args.layers)
        bed.written()
        failures = list(run_all(bed, args))
        found = verdict(args.out, failures, args.only, hazards_of(args.kind))
    say(args.out, found)
    return int(found["verdict"] == "FAIL")


if __name__ == "__main__":
    sys.exit(main())
