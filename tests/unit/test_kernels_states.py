"""The kernels of the gated delta rule against the recurrence row by row, and their bits among themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu, softplus

from eyas.engine.kernels.states.gates import gated_groups, gated_norm, rule_gates
from eyas.engine.layers.norm import rms_norm
from eyas.engine.models.ops import recurrent
from eyas.engine.models.ops.parts import DeltaPart
from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.shape import ChannelShape, DeltaShape, SpaceShape
from tests.unit.states_rig import DEVICE, Piece, Scene
from tests.unit.tensor_core import hopper

SHAPE = DeltaShape(1, 2, 16, 16, 4)


SPACE = SpaceShape(2, 4, 16, 48, 4)
CHANNELS = ChannelShape(1, 2, 16, 16, 4)


def text(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_prompts_in_pieces() -> None:
    scene = Scene(DeltaShape(2, 2, 16, 32, 3), 3)
    scene.step([Piece(0, text(0, 66)), Piece(2, text(100, 2))], prompt=True)
    scene.step([Piece(2, text(102, 62)), Piece(0, text(66, 1))], prompt=True)
    scene.step([Piece(0, text(67, 130))], prompt=True)


def test_few_rows_past_positions_of_states() -> None:
    """Single rows, chains that are accepted in part, and a chain across the next position."""
    scene = Scene(SHAPE, 3)
    scene.step([Piece(0, text(0, 59)), Piece(2, text(100, 62))], prompt=True)
    scene.step([Piece(0, text(59, 1)), Piece(2, text(162, 1))])
    scene.step([Piece(2, text(163, 4), certain=2), Piece(0, text(60, 3), certain=1)])
    scene.step([Piece(0, text(61, 8), certain=8), Piece(2, text(165, 2))])
    scene.step([Piece(0, text(69, 1)), Piece(2, text(167, 1))])
    scene.step([Piece(0, text(70, 1))])


TREE = [-1, 0, 0, 1, 2, 2, 4, 5, 6]


@pytest.mark.parametrize("start", [pytest.param(5, marks=pytest.mark.slow), 61])
def test_trees(start: int) -> None:
    scene = Scene(SHAPE, 2, width=9)
    scene.step([Piece(0, text(0, start)), Piece(1, text(200, 3))], prompt=True)
    scene.step([Piece(1, text(203, 2)), Piece(0, text(300, 9), TREE, certain=0)])
    scene.accept(0, start, [0, 2, 4, 6])
    scene.step([Piece(0, text(400, 9), TREE, certain=0)])
    scene.accept(0, start + 4, [0, 1])
    scene.step([Piece(0, text(410, 1)), Piece(1, text(205, 1))])


def test_groups_of_a_step() -> None:
    scene = Scene(DeltaShape(1, 1, 16, 16, 4), 3, width=9)
    scene.step([Piece(0, text(0, 9)), Piece(1, text(100, 5)), Piece(2, text(200, 20))], prompt=True)
    scene.mixed(Piece(0, text(300, 9), TREE), Piece(1, text(105, 1)), Piece(2, text(220, 11)))


def test_a_slot_that_came_from_elsewhere() -> None:
    """Its ring has rows of which the kernels have made nothing yet."""
    scene = Scene(SHAPE, 1)
    scene.step([Piece(0, text(0, 70))], prompt=True)
    for rows in vars(scene.solved).values():
        rows.fill_(-1)
    scene.step([Piece(0, [])], prompt=True, twin=False)
    scene.step([Piece(0, text(70, 2))])


def test_a_state_space_model() -> None:
    """Prompts, single rows, a chain, and trees; past positions of states."""
    scene = Scene(SPACE, 3, width=9)
    scene.step([Piece(0, text(0, 61)), Piece(2, text(100, 130))], prompt=True)
    scene.step([Piece(2, text(230, 2)), Piece(0, text(61, 2), certain=1)])
    scene.step([Piece(0, text(300, 9), TREE, certain=0), Piece(2, text(232, 1))])
    scene.accept(0, 62, [0, 2, 4, 6])
    scene.step([Piece(0, text(310, 1))])


def test_decays_of_key_elements() -> None:
    """A prompt past a state's position, single rows, a chain, and a tree."""
    scene = Scene(CHANNELS, 3, width=9)
    scene.step([Piece(0, text(0, 66)), Piece(2, text(100, 2))], prompt=True)
    scene.step([Piece(2, text(102, 1)), Piece(0, text(66, 2), certain=1)])
    scene.step([Piece(0, text(300, 9), TREE, certain=0), Piece(2, text(103, 1))])
    scene.accept(0, 67, [0, 2, 4, 6])
    scene.step([Piece(0, text(310, 1))])
    scene.layer.gates[0] = scene.layer.gates[0].roll(1, 1)
    with pytest.raises(AssertionError):  # of a neighbour's
        scene.step([Piece(0, text(311, 1))])


@pytest.mark.parametrize("lost", ["bias", "skip"])
def test_a_state_space_model_that_loses_a_part(lost: str) -> None:
    """The comparison sees what a kernel would leave out."""
    scene = Scene(SPACE, 1)
    scene.lose(lost)
    with pytest.raises(AssertionError):
        scene.step([Piece(0, text(0, 3))])


def test_sizes_that_no_tile_has() -> None:
    for shape, message in (
        (DeltaShape(1, 1, 24, 16, 4), "keys of a power of 2, 16 or more, not 24"),
        (DeltaShape(1, 1, 16, 24, 4), "values of a multiple of 16, not 24"),
    ):
        with pytest.raises(ValueError, match=message):
            Scene(shape, 1).step([Piece(0, text(0, 1))])
    with pytest.raises(ValueError, match="65 rows of a sequence are more than 64"):
        Scene(SHAPE, 1).step([Piece(0, text(0, 65))])


def matrix_unit() -> AbstractContextManager[None]:
    """That of the GPU, or a model of Hopper's."""
    return nullcontext() if torch.cuda.is_available() else hopper(folds=True)


@pytest.mark.parametrize("kind", [DeltaShape, SpaceShape, ChannelShape])
def test_bits_follow_from_a_rows_path_alone(kind: type[DeltaShape]) -> None:
    """One prompt; one in pieces beside others; single rows; chains and trees, across a state's position."""
    shape = kind(1, 1, 16, 16, 4)
    with matrix_unit():
        whole = _scene(shape)
        [expected] = whole.step([Piece(0, text(0, 70))], prompt=True, twin=False)
        pieces = _scene(shape)
        found = [pieces.step([Piece(0, text(0, 7))], prompt=True, twin=False)[0]]
        for first, count in ((7, 50), (57, 9)):
            others = [Piece(1, text(200 + first, 3)), Piece(0, text(first, count))]
            found.append(pieces.step(others, prompt=True, twin=False)[1])
        found += [pieces.step([Piece(0, [row])], twin=False)[0] for row in range(66, 70)]
        assert torch.equal(torch.cat(found), expected)

        chains = _scene(shape)
        chains.step([Piece(0, text(0, 61)), Piece(1, text(200, 9))], prompt=True, twin=False)
        both = [Piece(1, text(300, 2)), Piece(0, text(61, 6), certain=0)]
        assert torch.equal(chains.step(both, twin=False)[1], expected[61:67])
        tree = [61, 7, 62, 63, 8, 64, 9, 65, 66]
        [found_tree] = chains.step([Piece(0, tree, [-1, 0, 0, 2, 2, 3, 3, 5, 7], certain=0)], twin=False)
        path = [0, 2, 3, 5, 7, 8]
        assert torch.equal(found_tree[path], expected[61:67])
        chains.accept(0, 61, path)
        last = [chains.step([Piece(0, [row])], twin=False)[0] for row in range(67, 70)]
        assert torch.equal(torch.cat(last), expected[67:])
        for scene in (pieces, chains):
            assert torch.equal(scene.layer.states[0], whole.layer.states[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="numpy's products have orders of their own")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [DeltaShape, SpaceShape, ChannelShape])
def test_bits_on_a_gpu(kind: type[DeltaShape], dtype: torch.dtype) -> None:
    """The law of `test_bits_follow_from_a_rows_path_alone` at heads as models have them."""
    whole, pieces = (Scene(kind(2, 4, 128, 128, 4), 2, dtype, width=16) for _ in range(2))
    [expected] = whole.step([Piece(0, text(0, 200))], prompt=True, twin=False)
    found = []
    for first, count in ((0, 7), (7, 50), (57, 66), (123, 70)):
        both = [Piece(1, text(300 + first // 2, 3)), Piece(0, text(first, count))]
        found.append(pieces.step(both, prompt=True, twin=False)[1])
    found.append(pieces.step([Piece(0, text(193, 5))], twin=False)[0])
    found += [pieces.step([Piece(0, [row])], twin=False)[0] for row in (198, 199)]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(pieces.layer.states[0], whole.layer.states[0])


def test_a_wrong_bit_of_what_a_row_adds_is_noticed() -> None:
    with matrix_unit():
        whole, other = _scene(SHAPE), _scene(SHAPE)
        for scene in (whole, other):
            scene.step([Piece(0, text(0, 20))], prompt=True, twin=False)
        added = other.solved.added[0, 17]
        added.view(torch.int16)[..., 0] += 8
        found, expected = (scene.step([Piece(0, [20])], twin=False)[0] for scene in (other, whole))
        assert not torch.equal(found, expected)


def _scene(shape: DeltaShape) -> Scene:
    return Scene(shape, 2, torch.float16, width=9)


@pytest.mark.parametrize("heads", [3, 4])
def test_gates_and_the_norm_behind(heads: int) -> None:
    random = torch.Generator().manual_seed(heads)
    product = torch.randn(5, 2 * heads + heads * 16, generator=random).to(DEVICE) * 4
    steps, shares, gate = product.split((heads, heads, heads * 16), 1)
    bias = torch.randn(heads, generator=random).to(DEVICE) - 6
    rate = -torch.rand(heads, generator=random).to(DEVICE)
    found = rule_gates((shares, steps), bias, rate, replace(SHAPE, reach=2.0))
    expected = torch.cat((softplus(steps.double() + bias) * rate, 2 * shares.double().sigmoid()), 1)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=0)
    made = torch.randn(5, heads * 16, generator=random).to(DEVICE)
    gain = torch.rand(16, generator=random).to(DEVICE)
    expected = rms_norm(made.unflatten(1, (heads, 16)), gain, 1e-6).flatten(1) * silu(gate)
    assert torch.allclose(gated_norm(made, gate, gain, 1e-6), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("first", [False, True])
def test_gates_and_the_norm_of_a_state_space_model(groups: int, first: bool) -> None:
    random = torch.Generator().manual_seed(groups)
    shape = SpaceShape(1, 3, 16, 16, 4, limits=(0.02, 3.0), norm_groups=groups, norm_first=first)
    made, gate, numbers = (torch.randn(5, n, generator=random).to(DEVICE) * 4 for n in (48, 48, 3))
    bias = torch.randn(3, generator=random).to(DEVICE) - 2
    rate = -torch.rand(3, generator=random).to(DEVICE)
    gain = torch.rand(48, generator=random).to(DEVICE) if groups else None
    rule = DeltaRule(shape, torch.ones(4, shape.inputs, device=DEVICE))
    part: DeltaPart[None] = DeltaPart(None, rule, rate, bias, gain)
    found = rule_gates((numbers,), bias, rate, shape)
    assert torch.allclose(found, recurrent.gates((numbers,), part), rtol=1e-5, atol=0)
    expected = recurrent.gated(made, gate, part, 1e-6)
    assert torch.allclose(gated_groups(made, gate, gain, shape, 1e-6), expected, rtol=1e-5, atol=1e-6)
