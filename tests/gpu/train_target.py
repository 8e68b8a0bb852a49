"""Trains a target of 100 M parameters on the embedded model's text, in a given time, on one GPU.

    python -m tests.gpu.train_target --out DIR [--seconds 210]

A few steps are timed first; as many as fit are then the run's, whose learning rate falls to nothing at their
end. That number stands in a file, so a killed run goes on with the same. DIR/hundred/nano is the target.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from eyas.common.config import NANO
from eyas.train.head_command import plot_training
from eyas.train.model import LlamaShape
from eyas.train.recipe import TrainingRecipe, descend, optimisers
from tools.nano import build as nano
from tools.nano.model import NanoModel
from tools.nano.target import next_token_loss

SHAPE = LlamaShape(hidden=768, layers=14, heads=12, kv_heads=4, head_dim=64, intermediate=2304)
RECIPE = TrainingRecipe(steps=1000, rows=64, length=2048, rate=2e-3)
SETTLING, TIMED, LEAST = 4, 4, 50  # steps
START_S = 25.0  # of the run itself: text, compilation from the cache, the file at the end


def step_s(recipe: TrainingRecipe) -> float:
    """Seconds of a step on text that means nothing."""
    model = NanoModel(SHAPE).to("cuda")
    objective = torch.compile(next_token_loss)
    opts = optimisers(model, recipe, frozenset({"embed_tokens.weight"}))
    packed = torch.randint(SHAPE.vocab, (recipe.rows, recipe.length + 1), dtype=torch.int32)
    for step in range(SETTLING + TIMED):
        if step == SETTLING:
            torch.cuda.synchronize()
            began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = objective(model, packed.to("cuda", non_blocking=True))
        descend(model, loss, opts, recipe, step)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / TIMED


def fitting(file: Path, seconds: float) -> TrainingRecipe:
    """The recipe with as many steps as fit, or as many as the file says."""
    if file.exists():
        return replace(RECIPE, **json.loads(file.read_text()))
    began, found = time.perf_counter(), RECIPE
    while True:
        try:
            each = step_s(found)
            break
        except torch.cuda.OutOfMemoryError:
            found = replace(found, rows=found.rows // 2, steps=2 * found.steps)
        finally:
            gc.collect()
            torch.cuda.empty_cache()
    left = seconds - (time.perf_counter() - began) - START_S
    found = replace(found, steps=max(LEAST, min(found.steps, int(left / each))))
    print(f"a step takes {1e3 * each:.0f} ms: {found.steps} steps of {found.rows} rows", flush=True)
    file.write_text(json.dumps({"steps": found.steps, "rows": found.rows}))
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=210.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    folder = given.out / "hundred"
    folder.mkdir(parents=True, exist_ok=True)
    scale = nano.TINY
    if not given.tiny:
        recipe = fitting(folder / "steps.json", given.seconds)
        scale = nano.RunScale(target=recipe, head=nano.FULL.head, model=SHAPE)
    work = nano.BuildRun(folder, scale, given.device, seed=0)
    work.nano.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, work.nano)
    history = nano.make_target(work)
    (given.out / "target.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    plot_training(history, given.out / "target.svg", "A target of 100 M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
