"""The kernels of a short convolution have the bits of the specification: chunks, rounds, trees, tails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from eyas.engine.kernels.states.short import convolve
from eyas.engine.states import plain
from eyas.engine.states.convolution import ShortConvolution
from eyas.engine.states.rows import StateGroups, StateRows
from eyas.engine.states.shape import ConvolutionShape
from tests.unit.states_rig import DEVICE, Piece, Scene

TREE = [-1, 0, 0, 1, 2, 2, 4, 5, 6]


def text(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


class ShortScene(Scene):
    """Slots of a layer of a short convolution."""

    def __init__(self, columns: int, kernel: int, slots: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(ConvolutionShape.of_columns(columns, kernel), slots, dtype, width=9)
        self.gates = torch.empty(512, 0, device=DEVICE)
        self.short = ShortConvolution(self.shape, self.rule.filters)

    def _computed(
        self,
        pieces: Sequence[Piece],
        rows: StateRows,
        inputs: torch.Tensor,
        gates: torch.Tensor,
        prompt: bool,
    ) -> torch.Tensor:
        groups = StateGroups(*((None, None, rows) if prompt else (rows, None, None)), None, None)
        return convolve(inputs, self.short, self.layer, groups)

    def _compare(self, rows: StateRows, inputs: torch.Tensor, gates: torch.Tensor, out: torch.Tensor) -> None:
        other = self.twin.layers[0]
        assert torch.equal(out, plain.recur(rows, other, self.short, inputs, gates))
        columns = (rows.slots, rows.starts, rows.counts, rows.folds)
        for slot, start, count, fold in zip(*(each.tolist()[:-1] for each in columns), strict=True):
            if fold:
                assert torch.equal(self.layer.tails[slot], other.tails[slot])
            places = torch.arange(fold, start + count) % other.inputs.shape[1]
            assert torch.equal(self.layer.inputs[slot, places], other.inputs[slot, places])


@pytest.mark.parametrize(("columns", "kernel"), [(48, 3), (160, 4)])
def test_prompts_in_pieces_and_rounds_past_positions(columns: int, kernel: int) -> None:
    scene = ShortScene(columns, kernel, 3)
    scene.step([Piece(0, text(0, 59)), Piece(2, text(100, 2))], prompt=True)
    scene.step([Piece(2, text(102, 130)), Piece(0, text(59, 1))], prompt=True)
    scene.step([Piece(2, text(232, 4), certain=2), Piece(0, text(60, 8), certain=8)])
    scene.step([Piece(0, text(68, 1)), Piece(2, text(234, 1))])


def test_trees_and_rows_of_16_bits() -> None:
    scene = ShortScene(32, 3, 2, torch.float16)
    scene.step([Piece(0, text(0, 61)), Piece(1, text(200, 1))], prompt=True)
    scene.step([Piece(1, text(201, 2)), Piece(0, text(300, 9), TREE, certain=0)])
    scene.accept(0, 61, [0, 2, 4, 6])
    scene.step([Piece(0, text(400, 9), TREE, certain=0)])


def test_groups_of_a_step_are_each_a_forward() -> None:
    scene = ShortScene(16, 3, 3)
    rows = [scene._rows([Piece(number, text(100 * number, 5))], prompt=True) for number in range(3)]
    alone = scene._rows([Piece(number, text(100 * number, 5)) for number in range(3)], prompt=True)
    tokens = torch.tensor([100 * number + i for number in range(3) for i in range(5)], device=DEVICE)
    for number, one in enumerate(rows):
        one.firsts.add_(5 * number)
        one.before.copy_(torch.arange(-1, 4))
    inputs = scene.inputs[tokens]
    made = convolve(inputs, scene.short, scene.layer, StateGroups(*rows, None, None))
    assert torch.equal(made, plain.recur(alone, scene.twin.layers[0], scene.short, inputs, scene.gates[:15]))
