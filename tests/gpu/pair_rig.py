"""Clusters on two GPUs or more, one after the other, and where what is seen of them is written.

Every line is on disk as soon as it is known, every step has an end, and a step that fails is told and passed
over. It knows layouts by name and the flags that make them; what is measured is the scripts' own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from eyas.bench.backends import COMPLETIONS, RequestTemplate
from eyas.bench.http import MeasuredServer
from eyas.bench.measure import look
from eyas.bench.output import append_line
from eyas.bench.runner import TargetServer
from eyas.bench.shapes import SHAPES, write_model
from eyas.cluster.serve import GATEWAY, LocalCluster
from eyas.commands import CommandParser
from eyas.common.errors import ConfigError
from eyas.configuration import own_config
from eyas.flags import add_engine
from eyas.layout_flags import add_layout
from gateway.routing.placement import LatencyTargets

LAYOUTS = {  # split21: prompts by two GPUs, tokens by one of them
    "unified": ("--layout", "unified", "--workers", "{workers}"),
    "split": ("--layout", "split", "--prefill", "{prefill}", "--decode", "{decode}"),
    "split21": (
        "--layout",
        "split",
        "--prefill",
        "1",
        "--prefill-tp",
        "2",
        "--decode",
        "1",
        "--gpus",
        "0,1,1",
    ),
    "split12": (
        "--layout",
        "split",
        "--prefill",
        "1",
        "--decode",
        "1",
        "--decode-tp",
        "2",
        "--gpus",
        "0,0,1",
    ),
    "auto": ("--layout", "auto", "--workers", "{workers}"),
    "tp2": ("--layout", "unified", "--tensor-parallel-size", "2"),
    "one": ("--layout", "unified"),
}
PAIR = 2  # workers, as long as no other number is given
MODEL = Path("/tmp/eyas-llama-3.1-8b")  # a shape's folder: config and tokenizer, no weights
STOP_S = 30.0  # what is left of a script's time when its last cluster must end


@dataclass(frozen=True)
class Variant:
    """A layout, its rows of a step with prompts beside decode rows (None: the default), and its workers.

    Those of `split21` and the like are in their names.
    """

    layout: str
    mixed: int | None = None
    workers: int = PAIR

    @classmethod
    def parse(cls, text: str) -> Variant:
        """LAYOUT or LAYOUT@ROWS."""
        layout, at, rows = text.partition("@")
        if layout not in LAYOUTS or at and not rows.isdigit():
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(LAYOUTS)}, with @ROWS or not"
            )
        return cls(layout, int(rows) if rows else None)

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `eyas serve`."""
        rows = () if self.mixed is None else ("--mixed-step-tokens", str(self.mixed))
        prefill = self.workers // 2
        counts = {"workers": self.workers, "prefill": prefill, "decode": self.workers - prefill}
        return (*(flag.format(**counts) for flag in LAYOUTS[self.layout]), *rows)

    def __str__(self) -> str:
        return self.layout if self.mixed is None else f"{self.layout}@{self.mixed}"


@dataclass(frozen=True)
class Setting:
    """What all clusters of a script have in common. `ends_at`: monotonic seconds."""

    serve: tuple[str, ...]
    journal: Journal
    ends_at: float

    @property
    def left_s(self) -> float:
        """Seconds for further steps."""
        return self.ends_at - time.monotonic()


def add_setting(parser: argparse.ArgumentParser, layouts: Sequence[str]) -> None:
    """The flags that every script has; those it does not know go to `eyas serve`. `layouts`: by default; with
    none the script has its own.
    """
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="for NAME.jsonl, NAME.txt and cluster.log")
    add("--seconds", type=float, default=560.0, help="for everything (%(default)g)")
    add("--device", default="cuda", help="cpu: the embedded model, to try a script (%(default)s)")
    if layouts:
        add(
            "--layouts",
            nargs="+",
            type=Variant.parse,
            default=[Variant.parse(name) for name in layouts],
            metavar="LAYOUT[@ROWS]",
            help=f"one after the other, with --mixed-step-tokens ROWS ({' '.join(layouts)})",
        )


def make_setting(args: argparse.Namespace, serve: Sequence[str], name: str) -> Setting:
    """From the flags of `add_setting`. On a GPU, the shape of an 8B model with dummy weights."""
    model: tuple[str, ...] = ()
    if args.device != "cpu":
        if not (MODEL / "tokenizer_config.json").exists():
            write_model(SHAPES["llama-3.1-8b"], MODEL)
        model = ("--model", str(MODEL), "--load-format", "dummy")
    flags = ("--device", args.device, *model, "--draft", "none", *serve)
    return Setting(flags, Journal(args.out, name), time.monotonic() + args.seconds - STOP_S)


class Journal:
    """`NAME.jsonl` and `NAME.txt` in a folder, and `cluster.log`: what the processes of all clusters say."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines, self._text = folder / f"{name}.jsonl", folder / f"{name}.txt"
        self._log = (folder / "cluster.log").open("a", buffering=1)
        self._logging = threading.Lock()  # processes' lines come from threads
        self._began = time.monotonic()
        self.failed = 0

    def write(self, event: str, **fields: Any) -> None:
        """Appends a JSON object."""
        append_line(self._lines, {"event": event, **fields})

    def say(self, text: str) -> None:
        """Prints a line and appends it to the text."""
        print(text, flush=True)
        with self._text.open("a") as file:
            file.write(text + "\n")

    def failure(self, step: str, error: BaseException) -> None:
        """A step that failed, in both files; it counts in `failed`."""
        self.failed += 1
        self.write("failure", step=step, error=repr(error))
        self.say(f"FAILED {step}: {error!r}")

    def log(self, process: str, line: str) -> None:
        """What a process of a cluster says."""
        with self._logging:
            self._log.write(f"{time.monotonic() - self._began:7.1f} {process}: {line}\n")


async def step(setting: Setting, name: str, seconds: float, work: Awaitable[None]) -> None:
    """Awaits `work` for at most `seconds`, and no longer than the script may last; tells what fails."""
    try:
        async with asyncio.timeout(max(0.0, min(seconds, setting.left_s))):
            await work
    except Exception as error:  # whatever it is, the next step is worth its try
        setting.journal.failure(name, error)


@dataclass(frozen=True)
class Served:
    """How a cluster is asked, the size of its vocabulary, and its gateway's process."""

    target: TargetServer
    vocabulary: int
    gateway: psutil.Process

    def gateway_cpu_s(self) -> float:
        """What the gateway took of a core so far, in seconds."""
        times = self.gateway.cpu_times()
        return float(times.user + times.system)


@contextlib.asynccontextmanager
async def served(
    setting: Setting, variant: Variant, targets: LatencyTargets | None = None
) -> AsyncIterator[Served]:
    """A cluster that is ready. `targets`: what `auto` aims at; None: its own.

    Raises ConfigError for a layout that the command line does not have, DeadlineExceeded at start.
    """
    parser = CommandParser(prog="eyas serve")
    add_layout(parser)
    add_engine(parser)
    try:
        args = parser.parse_args([*variant.flags, *setting.serve])
    except SystemExit as refusal:
        raise ConfigError(f"--layout: {variant}: the command line refuses it", param="layout") from refusal
    setting.journal.log("campaign", f"{variant}: eyas serve {' '.join([*variant.flags, *setting.serve])}")
    config = own_config(args)
    if variant.layout == "auto" and targets is not None:
        aiming = dataclasses.replace(config.gateway, ttft_target=targets.ttft_s, tpot_target=targets.tpot_s)
        config = dataclasses.replace(config, gateway=aiming)
    async with LocalCluster(config, setting.journal.log) as cluster:
        setting.journal.write("start", layout=str(variant), seconds=round(cluster.start_s, 1))
        setting.journal.say(f"# {variant}: ready after {cluster.start_s:.1f} s")
        server = MeasuredServer(cluster.url)
        facts = await look(server)
        template = RequestTemplate(cluster.model, timings=True)
        gateway = psutil.Process(cluster.pids[GATEWAY])
        yield Served(TargetServer(server, COMPLETIONS, template), facts.vocab_size or 0, gateway)


def rounded(values: Sequence[float]) -> list[float]:
    """To microseconds, for a file."""
    return [round(value, 6) for value in values]
