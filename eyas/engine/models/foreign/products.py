"""Products of a foreign model on a CPU: in blocks of rows of one size, so that a row keeps its bits in any
company, as `eyas.engine.layers.linear` has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from eyas.engine.layers.linear import in_blocks

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class ProductsInBlocks(TorchFunctionMode):
    """While it is entered, products of rows and a matrix take rows block by block."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called in place of every function of torch."""
        more = kwargs or {}
        if func is F.linear:
            return _linear(*args, **more)
        if func in _PRODUCTS and not more and args[0].dim() > 1 and args[1].dim() == 2:
            return _linear(args[0], args[1].t())
        if func is torch.addmm and not more:
            bias, rows, matrix = args
            return in_blocks(partial(_addmm, bias, matrix), rows)
        return func(*args, **more)


def row_by_row(device: str) -> contextlib.AbstractContextManager[Any]:
    """The context of a foreign model's code on that device: there a row's bits are its own, as far as Eyas
    has a way to see to it.
    """
    return ProductsInBlocks() if device == "cpu" else contextlib.nullcontext()


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = input.reshape(-1, input.shape[-1])
    made = in_blocks(lambda block: F.linear(block, weight, bias), rows)
    return made.view(*input.shape[:-1], made.shape[-1])


def _addmm(bias: torch.Tensor, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, rows, matrix)
