"""Trains draft heads on one GPU, in minutes each: `python -m tests.gpu.train_heads WHAT --out DIR`.

`nano`: an EAGLE-2, an MTP, an EAGLE-3, a P-EAGLE and a DFlash head for the embedded model. `hundred`: a
target of 100 M parameters of the same text, and an EAGLE-3 head for it, within `--seconds`; then what the
head gains by its own acceptance (`speed`). Each stage is a command of its own, whose output, logs and plots
stand under DIR; a stage that is done is skipped, a killed one goes on.
`--tiny --device cpu` runs every stage in small.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.common.config import NANO
from tools.nano.text.core import TextSplit
from tools.nano.text.dialogues import dialogue

FIRST = 1 << 31  # of the dialogues, which no target has seen
FRESH, QUESTIONS = FIRST + (1 << 20), 256  # and no head
HEADS = {
    "eagle": ["--unroll", "1"],
    "mtp": ["--unroll", "4"],
    "eagle3": ["--unroll", "7", "--draft-vocab", "2048"],
    "peagle": ["--unroll", "10", "--draft-vocab", "2048"],
    "dflash": ["--unroll", "15"],
}
CHAINS = {"peagle": ("5", "10"), "dflash": ("7", "15")}  # of kinds that draft no trees


@dataclass(frozen=True)
class Scale:
    """`dialogues`: lines of data. `head`, `grid`: flags of `eyas train` and `eyas bench speculative`."""

    dialogues: int
    head: tuple[str, ...]
    grid: tuple[str, ...]
    speed: tuple[str, ...] = ()


LEARNING = ("--max-length", "1024", "--max-answer", "384", "--held-out", "256", "--learning-rate", "2e-3")
KEPT = ("--measure-every", "250", "--save-every", "250")
GRID = (
    *("--batch-size", "1", "8", "32", "64", "--steps", "3", "5", "--topk", "1", "4"),
    *("--draft-tokens", "16", "--num-prompts", "256", "--max-answer", "192"),
)
FULL = {
    "nano": Scale(24_000, ("--steps", "2000", "--batch-size", "32", *LEARNING, *KEPT), GRID),
    "hundred": Scale(12_000, ("--steps", "900", "--batch-size", "16", *LEARNING, *KEPT), GRID),
}
TINY = Scale(
    40,
    (
        *("--steps", "2", "--batch-size", "1", "--max-length", "96", "--max-answer", "16"),
        *("--held-out", "2", "--measure-every", "1", "--save-every", "1"),
    ),
    (*("--batch-size", "1", "--steps", "2", "--topk", "1"), *("--num-prompts", "1", "--max-answer", "8")),
    ("--batches", "1", "2", "--longest", "8"),
)
PARTS = {
    "nano": ("train", "doctor", "grid"),
    "hundred": ("target", "train", "doctor", "speed", "grid"),
}
SHARE = 0.5  # of the time, for the target


@dataclass(frozen=True)
class Stages:
    """Where everything goes, how large it is, and when it ends by `time.monotonic`."""

    out: Path
    device: str
    scale: Scale
    end: float

    def data(self) -> Path:
        """The dialogues; the last answer of each is the target's to give."""
        return self._dialogues("data.jsonl", FIRST, self.scale.dialogues)

    def _dialogues(self, name: str, first: int, count: int) -> Path:
        file = self.out / name
        if not file.exists():
            lines = [
                json.dumps({"messages": [dict(message) for message in dialogue(5, number, TextSplit.TRAIN)]})
                for number in range(first, first + count)
            ]
            file.write_text("\n".join(lines) + "\n")
        return file

    def target(self, kind: str, target: Path) -> None:
        """Trains the target of 100 M parameters, in its share of the time."""
        if (target / "model.safetensors").exists():
            return
        seconds = SHARE * (self.end - time.monotonic())
        tiny = ["--tiny"] if self.scale is TINY else []
        words = ["--out", self.out, "--device", self.device, "--seconds", int(seconds), *tiny]
        self._run("tests.gpu.train_target", *words)

    def train(self, kind: str, target: Path) -> None:
        """Trains a head, or goes on with it."""
        folder = self.out / kind
        if (folder / "model.safetensors").exists():
            return
        words = ["--target", target, "--data", self.data(), "--out", folder, "--device", self.device]
        resume = ["--resume"] if (folder / "training" / "checkpoint.pt").exists() else []
        plot = ["--plot", self.out / f"{kind}.svg"]
        self._run("eyas.cli", "train", kind, *words, *plot, *resume, *HEADS[kind], *self.scale.head)

    def doctor(self, kind: str, target: Path) -> None:
        """Looks at it."""
        self._run("eyas.cli", "doctor", "head", self.out / kind, "--target", target, "--device", self.device)

    def grid(self, kind: str, target: Path) -> None:
        """Finds its best settings."""
        words = ["--model", target, "--draft", self.out / kind, "--device", self.device]
        results = ["--output-file", self.out / f"{kind}-grid.jsonl", "--plot", self.out / f"{kind}-grid.svg"]
        shapes = [*self.scale.grid, *(("--topk", "1") if kind in CHAINS else ())]
        self._run("eyas.cli", "bench", "speculative", *words, "--prompts", self.data(), *results, *shapes)

    def speed(self, kind: str, target: Path) -> None:
        """What it gains, greedily and at temperature 1."""
        words = ["--target", target, "--draft", self.out / kind, "--device", self.device]
        fresh = self._dialogues("fresh.jsonl", FRESH, QUESTIONS)
        out = self.out / f"{kind}-speed.jsonl"
        words += ["--prompts", fresh, "--out", out, "--chains", *CHAINS.get(kind, ("3", "5", "7"))]
        self._run("tests.gpu.real_head", *words, *self.scale.speed)

    def _run(self, module: str, *words: object) -> None:
        """One command, until the time is over; the others follow whatever comes of it."""
        began, left = time.monotonic(), self.end - time.monotonic()
        print("$ python -m", module, *words, flush=True)
        if left <= 0:
            print("no time is left for it", flush=True)
            return
        try:
            command = [sys.executable, "-m", module, *map(str, words)]
            said = f"exit code {subprocess.run(command, check=False, timeout=left).returncode}"
        except subprocess.TimeoutExpired:
            said = "it was ended: the time is over; the same command goes on with it"
        print(f"{said}, {time.monotonic() - began:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["nano", "hundred"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=list(HEADS), help="(all; of hundred: eagle3)")
    parts = sorted({part for some in PARTS.values() for part in some})
    parser.add_argument("--parts", nargs="+", choices=parts, help="(all)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which it ends (3600)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    scale, end = TINY if given.tiny else FULL[given.what], time.monotonic() + given.seconds
    stages = Stages(given.out, given.device, scale, end)
    target = given.out / "hundred" / "nano" if given.what == "hundred" else NANO
    for kind in given.kinds or (["eagle3"] if given.what == "hundred" else list(HEADS)):
        for part in given.parts or PARTS[given.what]:
            getattr(stages, part)(kind, target)


if __name__ == "__main__":
    main()
