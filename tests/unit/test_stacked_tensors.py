"""Tensors that a folder stores as one for all experts are read as those that models ask for, by any rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.stacked_tensors import RowTensor, StackedTensor
from eyas.engine.checkpoint.weights import CPU, FolderWeights, WeightPlacement

PAIR = ("gate.weight", "up.weight")
EXPERTS, ROWS, COLUMNS = 3, 8, 6


def reading(
    folder: Path, stored: torch.Tensor, kind: StackedTensor, placement: WeightPlacement = CPU
) -> FolderWeights:
    save_file({"a.experts.both": stored.contiguous()}, folder / "model.safetensors")
    return FolderWeights(folder, placement=placement, fused=(kind,))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_experts_part_is_read_of_the_whole(
    tmp_path: Path, transposed: bool, interleaved: bool, ranks: int
) -> None:
    gate, up = torch.randn(2, EXPERTS, ROWS, COLUMNS)
    both = torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)
    kind = StackedTensor("experts.both", PAIR, transposed, interleaved)
    placement = WeightPlacement(rank=ranks - 1, ranks=ranks)
    with reading(tmp_path, both.transpose(1, 2) if transposed else both, kind, placement) as weights:
        rows, columns = ROWS // ranks, COLUMNS // ranks
        for expert in range(EXPERTS):
            for name, whole in (("gate", gate[expert]), ("up", up[expert])):
                asked = f"a.experts.{expert}.{name}.weight", (ROWS, COLUMNS)
                assert torch.equal(weights.take(*asked), whole)
                assert torch.equal(weights.take_rows(*asked), whole[-rows:])
                assert torch.equal(weights.take_columns(*asked), whole[:, -columns:])
        assert "a.experts.both" not in weights and weights.left(("a.",)) == []


@pytest.mark.parametrize("turned", [False, True])
def test_a_matrix_with_as_many_rows_as_it_should_have_columns_is_transposed(
    tmp_path: Path, turned: bool
) -> None:
    whole = torch.randn(EXPERTS, ROWS, COLUMNS)
    kind = StackedTensor("experts.both", ("down.weight",), columns=COLUMNS)
    with reading(tmp_path, whole.transpose(1, 2) if turned else whole, kind) as weights:
        assert torch.equal(weights.take("a.experts.1.down.weight", (ROWS, COLUMNS)), whole[1])


def test_a_single_row_is_a_vector(tmp_path: Path) -> None:
    save_file({"a.row": torch.arange(4.0)[None], "b.row": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    with FolderWeights(tmp_path, prefixes=("a.",), fused=(RowTensor("row"),)) as weights:
        assert weights.take("a.row", (4,)).tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ConfigError, match=r"tensor b.row is \(2, 4\): no single row"):
        FolderWeights(tmp_path, fused=(RowTensor("row"),))


def test_biases_are_vectors(tmp_path: Path) -> None:
    both = torch.randn(EXPERTS, 2 * ROWS)
    kind = StackedTensor("experts.both", ("gate.bias", "up.bias"), interleaved=True)
    with reading(tmp_path, both, kind, WeightPlacement(rank=1, ranks=2)) as weights:
        assert torch.equal(weights.take("a.experts.2.up.bias", (ROWS,)), both[2, 1::2])
        assert torch.equal(weights.take_rows("a.experts.1.gate.bias", (ROWS,)), both[1, ::2][ROWS // 2 :])
        assert len(weights.left(("a.",))) == 2 * EXPERTS - 2


@pytest.mark.parametrize("shape", [(4,), (3, 7, 4), (1, 1, 2, 4)])
def test_what_has_no_such_parts_is_refused_by_name(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"tensor a.experts.both is \(.*\): no gate.weight and up.weight"):
        reading(tmp_path, torch.randn(shape), StackedTensor("experts.both", PAIR))
