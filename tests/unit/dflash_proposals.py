"""What the runners of a draft worker propose with a DFlash head, plain and on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import Role
from eyas.engine.loading.draft_build import draft_worker
from eyas.engine.loading.spec import EngineSpec
from tests.unit.device_engines import SIZES
from tests.unit.draft_runners import CHAIN, Follower, on_device, pages, told
from tests.unit.tiny import write_tiny_llama
from tests.unit.tiny_dflash import write_tiny_dflash

BATCHES = ({"a": 11}, {"a": 2, "b": 6, "c": 1})  # rows of whom; a batch takes four of each, in several pieces


def proposals(
    folder: Path, write: Callable[..., Path] = write_tiny_dflash, steps: int = CHAIN.steps, **keys: Any
) -> list[list[tuple[list[int], list[int]]]]:
    """Of both runners, all batches in a row. `write`: the head, with `keys`."""
    target, spec = write_tiny_llama(folder / "target", **SIZES), SpeculationConfig(steps, 1, steps + 1)
    head = write(folder / "head", target, **{"layers": 1, "reads": (0, 2), **keys})
    plain = EngineConfig(
        model=str(target),
        draft=str(head),
        roles=(Role.DRAFT,),
        num_pages=64,
        max_running=3,
        context_length=256,
        pool_dir=str(folder),
        worker="draft",
        speculation=spec,
    )
    runners = [draft_worker(EngineSpec.of(config)).runner for config in (plain, on_device(plain))]
    seeded, free = SamplingParams(temperature=0.9, seed=2**63 + 5), pages()
    named = {"a": Follower("prompt", 0), "b": Follower("window", 37), "c": Follower("seeded", 20, seeded)}
    found = [[], []]
    for batch in BATCHES:
        of_both = told(runners, free, {named[name]: rows for name, rows in batch.items()}, spec)
        found = [before + now for before, now in zip(found, of_both, strict=True)]
    for runner in runners:
        runner.pool.close()
    return found
