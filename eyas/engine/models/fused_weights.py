"""A layer's matrices as its products on a GPU read them: of the model's type, or in FP8 as stored.

It knows how matrices are stacked and divided among ranks; it knows neither layers nor files. How a product's
rows are rounded says what its matrices are: in FP8 if they are (`Weights.rounding` of all of them), else
widened.
"""

from __future__ import annotations

import torch

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.fp8 import Rounding
from eyas.engine.checkpoint.quantized import FP8_SIDE
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kernels.blocks import Fp8Weight
from eyas.engine.kernels.grouped_task import Weight


def stacked(
    weights: Weights, names: list[str], rows: list[int], columns: int, rounding: Rounding | None
) -> Weight:
    """This rank's rows of each matrix, one below the other: [sum(rows) / ranks, columns].

    Raises ConfigError, by name, if a rank would cut a block.
    """
    if rounding is None:
        return weights.stack_rows(names, rows, columns)
    for name, count in zip(names, rows, strict=True):
        _check(name, "rows", count, (rounding, weights.placement.ranks))
    parts = [weights.take_fp8(n, (r, columns), 0) for n, r in zip(names, rows, strict=True)]
    stored, scales = zip(*parts, strict=True)
    return Fp8Weight(torch.cat(stored), torch.cat(scales), rounding)


def columns_of(weights: Weights, name: str, shape: tuple[int, int], rounding: Rounding | None) -> Weight:
    """This rank's columns of one matrix: [shape[0], shape[1] / ranks]."""
    if rounding is None:
        return weights.take_columns(name, shape)
    if weights.placement.ranks > 1:
        _check(name, "columns", shape[1], (rounding, weights.placement.ranks))
    return Fp8Weight(*weights.take_fp8(name, shape, 1), rounding)


def whole_of(weights: Weights, name: str, shape: tuple[int, int], rounding: Rounding | None) -> Weight:
    """One matrix, the same on every rank."""
    if rounding is None:
        return weights.take(name, shape)
    return Fp8Weight(*weights.take_fp8(name, shape, None), rounding)


def below(upper: Weight, lower: Weight) -> Weight:
    """Two matrices of the same width and kind, one below the other; the upper one of whole blocks, if any."""
    if isinstance(upper, Fp8Weight) and isinstance(lower, Fp8Weight):
        parts = torch.cat((upper.stored, lower.stored)), torch.cat((upper.scales, lower.scales))
        return Fp8Weight(*parts, upper.rounding)
    assert isinstance(upper, torch.Tensor) and isinstance(lower, torch.Tensor)
    return torch.cat((upper, lower))


def in_order(weight: Weight, rows: torch.Tensor) -> Weight:
    """With those rows, int64 [n], in this order; in FP8 blocks no row leaves its block."""
    if isinstance(weight, Fp8Weight):
        stored = weight.stored.view(torch.uint8)[rows].view(weight.stored.dtype)
        scales = weight.scales if weight.rounding.rows == "block" else weight.scales[rows]
        return Fp8Weight(stored, scales, weight.rounding)
    return weight[rows]


def _check(name: str, what: str, count: int, divided: tuple[Rounding, int]) -> None:
    rounding, ranks = divided
    if rounding.rows == "block" and count % (ranks * FP8_SIDE):
        raise ConfigError(
            f"tensor {name}: {count} {what} in FP8 blocks of {FP8_SIDE} cannot be divided by {ranks} ranks"
        )
