"""The embedded model and its head: text, tokenizer, target, regenerated answers, EAGLE-3 head, in this order.

    python -m tools.nano.build --out DIR

The composition root of this folder. A stage whose result is in the output folder already is skipped, so a run
can be continued.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from tokenizers import Tokenizer

from eyas.train.model import LlamaShape
from eyas.train.recipe import TrainingRecipe
from eyas.train.saving import TrainingCheckpoint
from tools.nano.data import IDS, ShardPacking, batches, make_prompts, make_shard, shards
from tools.nano.files import STOP, load_target, save_head, save_target
from tools.nano.generate import SamplingOptions, generate
from tools.nano.head import UNROLL, head_of, train_head
from tools.nano.model import NanoModel
from tools.nano.target import TargetRun
from tools.nano.tokenizer import (
    ANSWER_BIT,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

logger = logging.getLogger(__name__)
TOKENS_PER_DIALOGUE = 150  # a low estimate; it decides how many shards are made
REGENERATED_FROM = 1 << 30  # shards whose dialogues target training never reaches
LONGEST_PROMPT = 400
TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)  # mostly greedy, because the head is mostly used so


@dataclass(frozen=True)
class RunScale:
    """The sizes of a run."""

    target: TrainingRecipe
    head: TrainingRecipe
    model: LlamaShape = LlamaShape()
    tokenizer_dialogues: int = 60_000
    regenerated: int = 48_000
    generation_batch: int = 4096
    longest_answer: int = 384


FULL = RunScale(
    target=TrainingRecipe(steps=4500, rows=64, length=2048),
    head=TrainingRecipe(steps=4500, rows=32, length=1024 + UNROLL, rate=2e-3),
)
TINY = RunScale(
    target=TrainingRecipe(steps=12, rows=4, length=128),
    head=TrainingRecipe(steps=6, rows=2, length=64 + UNROLL),
    model=LlamaShape(hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=96),
    tokenizer_dialogues=20_000,
    regenerated=16,
    generation_batch=8,
    longest_answer=16,
)


@dataclass(frozen=True)
class BuildRun:
    """The output folder of one run, and its seed."""

    out: Path
    scale: RunScale
    device: str
    seed: int

    @property
    def nano(self) -> Path:
        """The target's folder."""
        return self.out / "nano"

    @property
    def head(self) -> Path:
        """The draft head's folder."""
        return self.out / "nano-eagle3"

    @property
    def processes(self) -> int:
        """The number of processes that make text; 0 on a CPU, where a run is only a smoke test."""
        return max(1, (os.cpu_count() or 2) - 1) if self.device == "cuda" else 0

    def shards_for(self, recipe: TrainingRecipe, share: float = 1.0) -> tuple[ShardPacking, int]:
        """The packing, and how many shards hold this share of a recipe's tokens."""
        packing = ShardPacking(self.nano, self.seed)
        return packing, int(share * recipe.tokens / (packing.dialogues * TOKENS_PER_DIALOGUE)) + 1


def make_target(run: BuildRun) -> list[dict[str, Any]]:
    """Trains and saves the target, from where a killed run left it; gives a line for each report.

    What a killed run had read after its last checkpoint is not read again.
    """
    recipe = run.scale.target
    model = NanoModel(run.scale.model).to(run.device)
    packing, count = run.shards_for(recipe)
    checkpoint = TrainingCheckpoint(run.out / "target.pt", {"seed": run.seed, "steps": recipe.steps})
    training = TargetRun(model, recipe, checkpoint)
    numbers = range(count * training.step // recipe.steps, count)
    with shards(make_shard, packing, numbers, run.processes) as stream:
        training.train(batches(stream, recipe.rows, recipe.length))
    save_target(model, run.nano)
    checkpoint.path.unlink(missing_ok=True)
    return training.history


def regenerate(run: BuildRun, target: NanoModel, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Dialogues whose last answer comes from the target: uint16 ids with answer bits."""
    packing = ShardPacking(run.nano, run.seed, dialogues=min(2000, run.scale.regenerated))
    numbers = range(REGENERATED_FROM, REGENERATED_FROM + run.scale.regenerated // packing.dialogues)
    with shards(make_prompts, packing, numbers, run.processes) as stream:
        prompts = [row for shard in stream for row in shard if len(row) <= LONGEST_PROMPT]
    prompts.sort(key=len)
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    done: list[np.ndarray] = []
    size = run.scale.generation_batch
    for start in track(range(0, len(prompts), size), description="answers"):
        batch = prompts[start : start + size]
        temperature = TEMPERATURES[start // size % len(TEMPERATURES)]
        sampling = SamplingOptions(STOP, run.scale.longest_answer, temperature, seed=run.seed + start)
        answers = generate(target, [(row & IDS).tolist() for row in batch], sampling)
        for row, answer in zip(batch, answers, strict=True):
            said = np.array(answer, np.uint16) | np.uint16(ANSWER_BIT)
            done.append(np.concatenate((row, said, np.array(newline, np.uint16))))
    random.Random(run.seed).shuffle(done)
    return done


def _mixed(own: list[np.ndarray], written: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Two thirds of the tokens are the target's own answers, repeated; the rest is the generated text."""
    joined = np.concatenate(own)
    at = 0
    for shard in written:
        take = 2 * len(shard)
        while take > 0:
            piece = joined[at : at + take]
            take, at = take - len(piece), (at + len(piece)) % len(joined)
            yield piece
        yield shard


def make_head(run: BuildRun) -> None:
    """Makes the target write answers, then trains and saves the head."""
    recipe = run.scale.head
    target = load_target(run.nano, run.device)
    own = regenerate(run, load_target(run.nano, run.device).to(torch.bfloat16), load_tokenizer(run.nano))
    logger.info("the target wrote %d answers, %d tokens in all", len(own), sum(map(len, own)))
    head = head_of(target).to(run.device)
    packing, count = run.shards_for(recipe, 1 / 3)
    with shards(make_shard, packing, range(count), run.processes) as stream:
        train_head(head, target, batches(_mixed(own, stream), recipe.rows, recipe.length), recipe)
    save_head(head, run.head)


def train_nano(out: Path, *, scale: RunScale, device: str, seed: int = 0) -> None:
    """Makes the embedded model under `out`: `nano/` and `nano-eagle3/`."""
    run = BuildRun(out, scale, device, seed)
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    if not (run.nano / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(seed, scale.tokenizer_dialogues), run.nano)
    if not (run.nano / "model.safetensors").exists():
        make_target(run)
    make_head(run)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.nano.build", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for nano/ and nano-eagle3/")
    add("--tiny", action="store_true", help="a smoke test of every stage")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(a GPU if there is one)")
    add("--seed", type=int, default=0, metavar="N", help="(0)")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train_nano(given.out, scale=TINY if given.tiny else FULL, device=given.device, seed=given.seed)


if __name__ == "__main__":
    main()
