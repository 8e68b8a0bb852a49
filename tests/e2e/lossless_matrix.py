"""Every way to draft, in every shape, unified and split: each gives the tokens of plain decoding.

    python -m tests.e2e.lossless_matrix [--prompts 40]

The heads are the embedded model's own. The draft model is the embedded model without its last layer. No
DSpark head was trained for it: a random one stands beside n-grams, which give its blocks accepted drafts.
What is looked up, and what a request foretells, makes no tree of its own: in the shapes of trees it stands
beside the EAGLE-3 head's. The ways that are not about drafting (preemption, services, planted faults) are in
`tests.e2e.lossless`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open

from eyas.common.config import (
    NANO,
    NANO_DFLASH,
    NANO_EAGLE,
    NANO_HEAD,
    NANO_MTP,
    NANO_PEAGLE,
    EngineConfig,
    SpeculationConfig,
)
from eyas.engine.models.table import read_model
from tests.e2e.lossless import TOGETHER, Variant, main
from tests.e2e.lossless_ways import InProcess
from tests.unit.loopback import split_configs
from tests.unit.tiny import edit
from tests.unit.tiny_dflash import BLOCK, write_tiny_dspark

PROMPTS = 40
SHAPES = {
    "chain 3": SpeculationConfig(3),
    "chain 7": SpeculationConfig(7),
    "tree 16": SpeculationConfig(5, 4, 16),
    "tree 60": SpeculationConfig(7, 8, 60),
}
HEADS = {"EAGLE-2": NANO_EAGLE, "EAGLE-3": NANO_HEAD, "MTP": NANO_MTP}
BLOCKS = {"P-EAGLE": (NANO_PEAGLE, 10), "DFlash": (NANO_DFLASH, 15)}
"""Heads that draft in one pass, and the drafts of their blocks."""


def matrix(folder: Path) -> Iterator[Variant]:
    """All of it: 74 variants. `folder`: for the drafters that are made for it."""
    for kind, (head, most) in BLOCKS.items():
        for steps in (3, 7, most):
            yield from _layouts(f"{kind}, chain {steps}", _engine(SpeculationConfig(steps), str(head)))
        beside = _engine(SpeculationConfig(most, ngram=True), str(head))
        yield from _layouts(f"{kind} beside n-grams, chain {most}", beside)
    dspark = write_tiny_dspark(folder / "dspark", NANO)
    beside = _engine(SpeculationConfig(BLOCK - 1, ngram=True), str(dspark))
    yield from _layouts(f"DSpark beside n-grams, chain {BLOCK - 1}", beside)
    heads = HEADS | {"draft model": _shorter(folder / "shorter")}
    for shape, spec in SHAPES.items():
        for kind, head in heads.items():
            yield from _layouts(f"{kind}, {shape}", _engine(spec, str(head)))
        own = str(NANO_HEAD) if spec.topk > 1 else None
        looked_up = _engine(replace(spec, ngram=True), own)
        yield from _layouts(f"n-gram, {shape}", looked_up)
        yield from _layouts(f"suffix, {shape}", _engine(replace(spec, ngram=True, suffix=True), own))
        yield from _layouts(f"prediction, {shape}", looked_up, foretold=True)


def _shorter(folder: Path) -> Path:
    """The embedded model without its last layer."""
    kept = read_model(NANO).num_layers - 1
    shutil.copytree(NANO, folder)
    with safe_open(NANO / "model.safetensors", "pt") as file:
        last = [name for name in file.keys() if name.startswith(f"model.layers.{kept}.")]
    return Path(edit(folder, dict.fromkeys(last), num_hidden_layers=kept))


def _engine(spec: SpeculationConfig, draft: str | None) -> EngineConfig:
    spec = spec if spec.topk > 1 else replace(spec, draft_tokens=spec.steps + 1)
    return EngineConfig(draft=draft, worker="unified", num_pages=640, speculation=spec)


def _layouts(name: str, engine: EngineConfig, foretold: bool = False) -> Iterator[Variant]:
    """In one engine, and as prefill, decode and (if there is a head) draft engines."""
    split = split_configs(engine)
    yield Variant(f"{name}, unified", InProcess((engine,), TOGETHER, foretold=foretold))
    yield Variant(
        f"{name}, split", InProcess(split if engine.draft else split[:2], TOGETHER, foretold=foretold)
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.exit(main(list(matrix(Path(made))), "python -m tests.e2e.lossless_matrix", PROMPTS))
