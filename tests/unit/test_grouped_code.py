"""Kernels of tall blocks of experts compile for Hopper: an interpreter takes what no compiler does. Nothing
runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eyas.bench.tile_search import TuningBench, TuningJob, gated_pair
from eyas.engine.kernels.experts import grouped_wide
from eyas.engine.kernels.experts.grouped_task import GateActivation, GroupedTask, RowWalk
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile
from eyas.engine.kernels.launch.warm import KernelWarmup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def tall(itemsize: int, rows: int) -> None:
    """Both products of a model's experts, by blocks of `rows` rows."""
    bench = TuningBench(TuningJob(gated_pair(9, 512, 512, itemsize), 3), "meta")
    tile = GroupedTile(rows, 64, 128 // itemsize, warps=8, stages=3)
    for at, gate in enumerate((GateActivation(), None)):
        given = bench.inputs(at, 2048, rows)[0]
        walk = RowWalk(given.order, 3) if gate else RowWalk(given.order, scatter=True)
        task = GroupedTask(given.x, bench._weights[at], walk, tile, gate, None)
        grouped_wide.start(task, bench._launch)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_tall_blocks_compile(
    itemsize: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the warm-up sets is undone
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    KernelWarmup("tests.unit.test_grouped_code:tall", (itemsize, rows), 90, processes=2).wait()
    code = [path.read_text() for path in tmp_path.rglob("_by_depth.ptx")]
    assert len(code) == 2
    shapes = [len(set(re.findall(r"wgmma\.mma_async[\w.]*", text))) for text in code]
    assert shapes == [2 if grouped_wide.half_of(rows, itemsize) else 1] * 2, "half tiles have their own"
    assert not any(".local" in text for text in code)
