"""Trains draft heads on one GPU, in minutes each: `python -m tests.gpu.train_heads WHAT --out DIR`.

`nano`: an EAGLE-2, an MTP and an EAGLE-3 head for the embedded model. `hundred`: a target of 100 M
parameters of the same text, and an EAGLE-3 head for it. Each stage is a command of its own, whose output,
logs and plots stand under DIR; a stage that is done is skipped, a killed one goes on. `--tiny --device cpu`
runs every stage in small.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.common.config import NANO
from eyas.train.text.core import Split
from eyas.train.text.dialogues import dialogue

FIRST = 1 << 31  # of the dialogues, which no target has seen
HEADS = {
    "eagle": ["--unroll", "1"],
    "mtp": ["--unroll", "4"],
    "eagle3": ["--unroll", "7", "--draft-vocab", "2048"],
}


@dataclass(frozen=True)
class Scale:
    """`dialogues`: lines of data. `head`, `grid`: flags of `eyas train` and `eyas bench speculative`."""

    dialogues: int
    head: tuple[str, ...]
    grid: tuple[str, ...]


LEARNING = ("--max-length", "1024", "--max-answer", "384", "--held-out", "256", "--learning-rate", "2e-3")
KEPT = ("--measure-every", "250", "--save-every", "250")
GRID = (
    *("--batch-size", "1", "8", "32", "64", "--steps", "3", "5", "--topk", "1", "4"),
    *("--draft-tokens", "16", "--num-prompts", "256", "--max-answer", "192"),
)
FULL = {
    "nano": Scale(24_000, ("--steps", "2000", "--batch-size", "32", *LEARNING, *KEPT), GRID),
    "hundred": Scale(24_000, ("--steps", "1500", "--batch-size", "16", *LEARNING, *KEPT), GRID),
}
TINY = Scale(
    40,
    (
        *("--steps", "2", "--batch-size", "1", "--max-length", "96", "--max-answer", "16"),
        *("--held-out", "2", "--measure-every", "1", "--save-every", "1"),
    ),
    (*("--batch-size", "1", "--steps", "2", "--topk", "1"), *("--num-prompts", "1", "--max-answer", "8")),
)
PARTS = ("train", "doctor", "grid")


@dataclass(frozen=True)
class Stages:
    """Where everything goes, and how large it is."""

    out: Path
    device: str
    scale: Scale

    def data(self) -> Path:
        """The dialogues; the last answer of each is the target's to give."""
        file = self.out / "data.jsonl"
        if not file.exists():
            lines = [
                json.dumps({"messages": [dict(message) for message in dialogue(5, FIRST + i, Split.TRAIN)]})
                for i in range(self.scale.dialogues)
            ]
            file.write_text("\n".join(lines) + "\n")
        return file

    def train(self, kind: str, target: Path) -> None:
        """Trains a head, or goes on with it."""
        folder = self.out / kind
        if (folder / "model.safetensors").exists():
            return
        words = ["--target", target, "--data", self.data(), "--out", folder, "--device", self.device]
        resume = ["--resume"] if (folder / "training" / "checkpoint.pt").exists() else []
        plot = ["--plot", self.out / f"{kind}.svg"]
        run("train", kind, *words, *plot, *resume, *HEADS[kind], *self.scale.head)

    def doctor(self, kind: str, target: Path) -> None:
        """Looks at it."""
        run("doctor", "head", self.out / kind, "--target", target, "--device", self.device)

    def grid(self, kind: str, target: Path) -> None:
        """Finds its best settings."""
        words = ["--model", target, "--draft", self.out / kind, "--device", self.device]
        results = ["--output-file", self.out / f"{kind}-grid.jsonl", "--plot", self.out / f"{kind}-grid.svg"]
        run("bench", "speculative", *words, "--prompts", self.data(), *results, *self.scale.grid)


def run(*words: object) -> None:
    """One command; the others follow whatever comes of it."""
    print("$ eyas", *words, flush=True)
    done = subprocess.run([sys.executable, "-m", "eyas.cli", *map(str, words)], check=False)
    print(f"exit code {done.returncode}", flush=True)


def make_hundred(stages: Stages, tiny: bool) -> Path:
    """The target of 100 M parameters: its folder, with the embedded model's tokenizer."""
    from eyas.train import nano
    from eyas.train.model import LlamaShape
    from eyas.train.plot import plot_training
    from eyas.train.target import Recipe

    shape = LlamaShape(hidden=768, layers=14, heads=12, kv_heads=4, head_dim=64, intermediate=2304)
    recipe = Recipe(steps=1000, rows=64, length=2048, rate=2e-3)
    scale = nano.TINY if tiny else nano.Scale(target=recipe, head=nano.FULL.head, model=shape)
    work = nano.Run(stages.out / "hundred", scale, stages.device, seed=0)
    if not (work.nano / "model.safetensors").exists():
        work.nano.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(NANO / name, work.nano)
        history = nano.make_target(work)
        (stages.out / "target.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
        plot_training(history, stages.out / "target.svg", "A target of 100 M parameters")
    return work.nano


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["nano", "hundred"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=list(HEADS), help="(all; of hundred: eagle3)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(all)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    stages = Stages(given.out, given.device, TINY if given.tiny else FULL[given.what])
    target = make_hundred(stages, given.tiny) if given.what == "hundred" else NANO
    for kind in given.kinds or (["eagle3"] if given.what == "hundred" else list(HEADS)):
        for part in given.parts:
            {"train": stages.train, "doctor": stages.doctor, "grid": stages.grid}[part](kind, target)


if __name__ == "__main__":
    main()
