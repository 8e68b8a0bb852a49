"""A draft worker's runners, plain and on the device, which follow the same sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import Role
from eyas.engine.loading.draft_build import draft_worker
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput
from eyas.engine.speculation.draft_worker.draft_sequences import BatchRunner
from tests.unit.device_engines import SIZES, write_head
from tests.unit.tiny import write_tiny_llama
from tests.unit.tiny_dflash import write_tiny_dflash
from tests.unit.tiny_mtp import write_tiny_mimo

WIDTH, VOCAB, PAGE = SIZES["hidden"], SIZES["vocab"], 16
CHAIN = SpeculationConfig(steps=3, topk=1, draft_tokens=4)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["eagle3", pytest.param("three mtp layers", marks=pytest.mark.slow)])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    if request.param != "three mtp layers":
        target = write_tiny_llama(folder / "target", **SIZES)
        write = write_head if request.param == "eagle3" else partial(write_tiny_dflash, reads=(0, 2))
        head = write(folder / "head", target)
    else:
        target = head = write_tiny_mimo(folder / "target", stages=3, **SIZES)
    return EngineConfig(
        model=str(target),
        draft=str(head),
        roles=(Role.DRAFT,),
        num_pages=64,
        max_running=3,
        context_length=256,
        pool_dir=str(tmp_path_factory.mktemp("pools")),
        worker="draft",
        speculation=CHAIN,
    )


def on_device(plain: EngineConfig) -> EngineConfig:
    """Batches are filled up to 2 or 3 sequences, as graphs want it."""
    return replace(
        plain, attention_backend="triton", prefill_attention_backend="triton", cuda_graph_bs=(2, 3)
    )


@pytest.fixture
def runners(plain: EngineConfig, request: pytest.FixtureRequest) -> Iterator[list[BatchRunner]]:
    """The plain runner, and the device's, of the same shape."""
    spec = getattr(request, "param", CHAIN)
    configs = (replace(plain, speculation=spec), replace(on_device(plain), speculation=spec))
    found = [draft_worker(EngineSpec.of(config)).runner for config in configs]
    yield found
    for runner in found:
        runner.pool.close()


class Follower:
    """One sequence, told to both runners: each has pages of its own for it, and lays its rows out its way."""

    def __init__(self, name: str, base: int, params: SamplingParams = GREEDY) -> None:
        self.name, self.base, self.lowest, self.params = name, base, base, params
        self._pages: dict[int, list[int]] = {}
        self._draws = random.Random(name)
        self._generator = torch.Generator().manual_seed(len(name) + base)

    def commit(self, rows: int, runners: list[BatchRunner], free: list[list[int]]) -> list[DraftInput]:
        """The same rows as each runner wants to hear of them."""
        tokens = [self._draws.randrange(VOCAB) for _ in range(rows)]
        features = torch.randn(rows, WIDTH, generator=self._generator)
        asked = []
        for i, runner in enumerate(runners):
            offset = self.lowest - self.lowest % runner.alignment
            pages = self._pages.setdefault(i, [])
            while len(pages) * PAGE < self.base + rows - offset + 8:
                pages.append(free[i].pop())
            new = DraftExtension(list(pages), self.base - offset, tokens, features, offset)
            asked.append(DraftInput(self.name, new, self.params, 1, self.lowest))
        self.base += rows
        return asked


def told(
    runners: list[BatchRunner],
    free: list[list[int]],
    rows: dict[Follower, int],
    spec: SpeculationConfig | None,
) -> list[list[tuple[list[int], list[int]]]]:
    """What each runner proposes for the same batch."""
    asked = [one.commit(count, runners, free) for one, count in rows.items()]
    found = []
    for runner, batch in zip(runners, zip(*asked, strict=True), strict=True):
        trees = [proposed.tree for proposed in runner.draft(list(batch), spec)]
        found.append([(list(tree.tokens), list(tree.parents)) for tree in trees])
    return found


def pages() -> list[list[int]]:
    """Of each runner, in an order of its own."""
    return [random.Random(seed).sample(range(64), 64) for seed in (1, 2)]
