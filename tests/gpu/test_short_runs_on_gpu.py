"""A draft worker's graphs: they draft what single launches draft, to the bit of its pool."""

from __future__ import annotations

import pytest
import torch

from eyas.common.config import SpeculationConfig
from eyas.engine.loading.draft_build import draft_worker
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.speculation.draft_worker.device_runner import DeviceDraftRunner
from tests.gpu.draft_rounds import CHAIN, TREE, Rounds, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chains", "trees"])
def test_graphs_draft_as_single_launches(spec: SpeculationConfig) -> None:
    runner = draft_worker(EngineSpec.of(settings(spec))).runner
    assert isinstance(runner, DeviceDraftRunner)
    batches = runner._drafts, runner._contexts
    assert all(len(some.graphs) > 2 for some in batches)
    drafted, pools = [], []
    for _ in range(2):
        runner.pool.tensor.zero_()
        drafted.append(Rounds(runner).run(spec))
        pools.append(runner.pool.tensor.cpu())
        for some in batches:
            some.graphs.clear()
    runner.pool.close()
    assert drafted[0] == drafted[1] and torch.equal(*pools)
    assert len({tokens for batch in drafted[0] for tokens in batch}) > 20
