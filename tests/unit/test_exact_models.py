"""A forward by the exact arithmetic: a position's logits have one set of bits, however it got there.

Triton's interpreter runs the kernels, with `tensor_core`'s model of Hopper's matrix unit, which stands for
cuBLAS as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from eyas.engine.attention.exact_rows import ExactAttention
from eyas.engine.attention.rows import Most, PagedAttention
from eyas.engine.batch.rows import DecodeRows, Rows
from eyas.engine.checkpoint.weights import FolderWeights, Placement
from eyas.engine.kernels import exact_wide, skinny
from eyas.engine.kernels.prefill import tile_rows
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.models.fused import FusedDecoder
from eyas.engine.models.fused_layer import LayerContext
from eyas.engine.models.table import read_model
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from tests.bits.compare import Composition, differences
from tests.unit import tensor_core
from tests.unit.families import write_family

pytestmark = pytest.mark.slow

PAGE, PAGES, LENGTH = 16, 10, 140
CHUNK, ROWS = "chunk", "rows"
Step = tuple[str, int]
NARROW: dict[str, list[Step]] = {
    "one chunk": [(CHUNK, 70)],
    "two chunks and rows": [(CHUNK, 7), (CHUNK, 60), (ROWS, 1), (ROWS, 2)],
    "a chain over a block's end": [(CHUNK, 62), (ROWS, 5)],
}
WIDE: dict[str, list[Step]] = {
    "one wide chunk": [(CHUNK, 135)],
    "narrow ones and a chain": [(CHUNK, 70), (CHUNK, 56), (ROWS, 4)],
}


class Model:
    """A model of 16 bits; its first slot has a prompt, whose tokens go any way through it."""

    def __init__(self, folder: Path, exact: bool) -> None:
        config = read_model(folder)
        self._shape = PoolShape(config.kv_format, 1 + PAGES, PAGE, torch.float16, "cpu")
        self._table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3)).int()[None] + 1
        attention = (ExactAttention if exact else PagedAttention)(
            self._table, config.num_heads, self._shape, Most(1, 8), pdl=False
        )
        launch, group = skinny.Launch.on("cpu", False, exact), ProcessGroup(RankInfo(), "cpu")
        context = LayerContext.on("cpu", config, group, launch, attention)
        with FolderWeights(folder, config.spelling, Placement("cpu", torch.float16)) as weights:
            self._model = FusedDecoder(config, weights, context)
        self._tile = tile_rows(config.num_heads, config.num_kv_heads)
        self._tokens = torch.randint(128, (LENGTH,), generator=torch.Generator().manual_seed(4)).int()

    def logits(self, steps: Sequence[Step]) -> dict[object, torch.Tensor]:
        """By position."""
        pool, done, found = KvPool(self._shape), 0, {}
        for kind, count in steps:
            places = torch.arange(done, done + count)
            kv_rows = self._table[0, places // PAGE] * PAGE + places % PAGE
            rounds = DecodeRows(torch.zeros(1).int(), torch.tensor([done]).int(), count)
            tiles = [(0, i, done + i, min(self._tile, count - i)) for i in range(0, count, self._tile)]
            rows = Rows(
                self._tokens[done : done + count],
                places.int(),
                kv_rows.int(),
                rounds if kind == ROWS else None,
                torch.tensor(tiles).int() if kind == CHUNK else None,
            )
            x, _ = self._model.forward(rows, pool)
            found |= dict(enumerate(self._model.logits(x), done))
            done += count
        return found


@pytest.fixture(autouse=True)
def _matrix_unit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(exact_wide, "matmul", tensor_core.matmul)
    with tensor_core.hopper():
        yield


def said(folder: Path, ways: dict[str, list[Step]], exact: bool = True) -> list[str]:
    """Of the model in `folder`."""
    model = Model(folder, exact)
    runs = [Composition(name, partial(model.logits, steps)) for name, steps in ways.items()]
    return [str(difference) for difference in differences(runs)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_a_positions_logits_do_not_depend_on_the_steps(tmp_path: Path, family: str) -> None:
    """By either way through the layers."""
    write_family(tmp_path, family, vocab_size=128, num_hidden_layers=1)
    assert said(tmp_path, WIDE) == []


@pytest.mark.timeout(600)
def test_by_the_kernels_of_today_they_do(tmp_path: Path) -> None:
    """On the narrow way alone; by the exact arithmetic the same steps agree."""
    write_family(tmp_path, "llama", vocab_size=128, num_hidden_layers=1)
    assert said(tmp_path, NARROW) == []
    assert said(tmp_path, NARROW, exact=False)


def test_what_is_not_exact_yet_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "llama_biases", vocab_size=128, num_hidden_layers=1)
    with pytest.raises(ValueError, match="without a bias behind attention"):
        Model(tmp_path, exact=True)
