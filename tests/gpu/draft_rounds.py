"""Seeded rounds of a draft worker on a GPU, and its configuration."""

from __future__ import annotations

import random

import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import Role
from eyas.engine.ipc.row_ring import RingRow, tag
from eyas.engine.speculation.draft_worker.device_runner import DeviceDraftRunner
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput
from tests.gpu.engine_runs import on_gpu

CHAIN = SpeculationConfig(steps=3, topk=1, draft_tokens=4)
TREE = SpeculationConfig(steps=3, topk=4, draft_tokens=16)
SEQUENCES, PAGES, ROUNDS = 12, 12, 12


def settings(spec: SpeculationConfig) -> EngineConfig:
    sizes = {"max_running": SEQUENCES, "num_pages": SEQUENCES * PAGES, "cuda_graph_max_bs": SEQUENCES}
    return on_gpu("triton", roles=(Role.DRAFT,), deterministic=True, speculation=spec, **sizes)


class Rounds:
    """Seeded rounds of sequences, whose features come from the host or lie in this GPU's memory by turns."""

    def __init__(self, runner: DeviceDraftRunner) -> None:
        self._runner = runner
        self._width = runner._drafts._state.width
        self._draws = random.Random(3)
        self._bases = [0] * SEQUENCES
        self._rings: list[torch.Tensor] = []  # kept: the runner has addresses

    def run(self, spec: SpeculationConfig) -> list[list[tuple[int, ...]]]:
        found = []
        for number in range(ROUNDS):
            some = self._draws.sample(range(SEQUENCES), self._draws.randint(1, SEQUENCES))
            asked = [self._asked(place, ringed=number % 3 > 0) for place in some]
            proposed = self._runner.draft(asked, spec)
            assert all(one.whole for one in proposed)
            found.append([tuple(one.tree.tokens) for one in proposed])
        return found

    def _asked(self, place: int, *, ringed: bool) -> DraftInput:
        base = self._bases[place]
        tokens = [self._draws.randrange(4096) for _ in range(self._draws.randint(1, 9))]
        rows = len(tokens)
        self._bases[place] += rows
        generator = torch.Generator().manual_seed(100 * place + base)
        features, far = torch.randn(rows, self._width, generator=generator), []
        if ringed:
            far, features = self._far(features, place, base), features[:0]
        pages = range(place * PAGES, (place + 1) * PAGES)
        params = SamplingParams(temperature=place % 2, seed=place)
        owner = 0, place, 1  # as of a draft engine; the warm-up has others
        return DraftInput(owner, DraftExtension(pages, base, tokens, features, ringed=far), params, 0)

    def _far(self, features: torch.Tensor, place: int, base: int) -> list[RingRow]:
        shape = self._runner.pool.shape
        words = features.to(shape.device, shape.dtype).view(torch.int32).long() & 0xFFFFFFFF
        tags = [tag(place + 1, base + i) for i in range(len(features))]
        ring = (torch.tensor(tags, device=shape.device)[:, None] << 32) | words
        self._rings.append(ring)
        return [RingRow(row.data_ptr(), tag) for row, tag in zip(ring, tags, strict=True)]
