"""Checks that weights are finite numbers. A model with NaN or infinity serves, and its answers are empty.

What is found of a tensor stays on its device until all are loaded: asking a GPU means waiting for it.
"""

from __future__ import annotations

from collections import defaultdict

import torch

_FP8_NAN = 127
"""Of e4m3, which has no infinity, the bits of a NaN without their sign: the largest there are."""


class FiniteCheck:
    """Takes tensors in any order, and says at the end which of them have NaN or infinity."""

    def __init__(self) -> None:
        # Numbers of one dtype, finite if all elements of their tensor are. Two dtypes cannot be stacked.
        self._names: defaultdict[torch.dtype, list[str]] = defaultdict(list)
        self._found: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)

    def see(self, name: str, tensor: torch.Tensor) -> None:
        """Looks at a tensor of floating-point numbers; others are never infinite."""
        if tensor.numel() and tensor.is_floating_point():
            for number in _extremes(tensor):
                self._names[number.dtype].append(name)
                self._found[number.dtype].append(number)

    def broken(self) -> list[str]:
        """The names of the tensors that are not finite, each once. Waits for the device, once."""
        if not self._found:
            return []
        finite = torch.cat([torch.stack(numbers).isfinite() for numbers in self._found.values()])
        names = [name for each in self._names.values() for name in each]
        return list(dict.fromkeys(n for n, holds in zip(names, finite.tolist(), strict=True) if not holds))


def _extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scalars that are finite if all elements are. A minimum and a maximum cannot overflow, as sums can."""
    if tensor.dtype is not torch.float8_e4m3fn:
        return torch.aminmax(tensor)
    largest = tensor.view(torch.uint8).bitwise_and(_FP8_NAN).amax()
    return ((_FP8_NAN - largest.float()).reciprocal(),)
