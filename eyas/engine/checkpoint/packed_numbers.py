"""The small numbers of a matrix with their zero points and scales, and how they are unpacked.

No torch is loaded here: numbers are unpacked by methods of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BLOCK = 64  # rows that are widened at a time: they stay in the processor's cache


@dataclass(frozen=True)
class PackedNumbers:
    """A matrix [n, k], which is (numbers - zeros) * scales.

    `numbers`: [n, k] in uint8 or int8, one in each. `zeros`: [n, groups], or one for all. `scales`:
    [n, groups]. `groups`: of each column its group, int64 [k]; None: columns in their order, as many in each.
    `values`: what number 0, 1, 2... stands for, float32; None: itself. `factor`: [1], what all scales have
    been multiplied by; without it they are of eight bits. None: of no meaning.
    """

    numbers: torch.Tensor
    zeros: torch.Tensor | int
    scales: torch.Tensor
    groups: torch.Tensor | None = None
    values: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> PackedNumbers:
        """Some rows and columns of the matrix. `groups` are named where columns cut through one."""
        from torch import arange

        zeros, scales, groups = self.zeros, self.scales[rows], self.groups
        zeros = zeros if isinstance(zeros, int) else zeros[rows]
        k, count = self.numbers.shape[1], scales.shape[1]
        first, last, step = columns.indices(k)
        each = k // count
        if groups is None and step == 1 and first % each == 0 and last % each == 0:
            some = slice(first // each, last // each)
            zeros, scales = zeros if isinstance(zeros, int) else zeros[:, some], scales[:, some]
        else:
            every = arange(k, device=scales.device) // each if groups is None else groups
            groups = every[columns]
        return PackedNumbers(self.numbers[rows, columns], zeros, scales, groups, self.values, self.factor)

    def contiguous(self) -> PackedNumbers:
        """The same, each tensor contiguous."""
        zeros, groups, values = self.zeros, self.groups, self.values
        return PackedNumbers(
            self.numbers.contiguous(),
            zeros if isinstance(zeros, int) else zeros.contiguous(),
            self.scales.contiguous(),
            None if groups is None else groups.contiguous(),
            None if values is None else values.contiguous(),
            self.factor,
        )

    def widened(self) -> torch.Tensor:
        """The matrix, float32 [n, k]."""
        n, k = self.numbers.shape
        scales = self.scales.float()
        zeros = self.zeros
        zeros = scales.new_full(scales.shape, zeros) if isinstance(zeros, int) else zeros.float()
        wide = scales.new_empty(n, k)
        for first in range(0, n, _BLOCK):
            rows = slice(first, first + _BLOCK)
            made, zero, scale = wide[rows].copy_(self._values(rows)), zeros[rows], scales[rows]
            if self.groups is not None:
                made.sub_(zero.index_select(1, self.groups)).mul_(scale.index_select(1, self.groups))
            else:
                made.view(len(made), scales.shape[1], -1).sub_(zero[..., None]).mul_(scale[..., None])
        return wide

    def _values(self, rows: slice) -> torch.Tensor:
        numbers = self.numbers[rows]
        if self.values is None:
            return numbers
        return self.values.index_select(0, numbers.flatten().int()).view(numbers.shape)


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [...] -> the 32 / bits numbers of each word, uint8 [..., 32 / bits], the lowest bits first.

    Of 3 bits, 32 are in three words [..., m]: uint8 [..., m / 3, 32].
    """
    from torch import uint8

    each: torch.Tensor = packed.flatten().view(uint8).view(*packed.shape, 4)
    if bits == 3:
        return _threes(each.view(*packed.shape[:-1], -1, 4, 3)).flatten(-2)
    if bits == 8:
        return each
    return halves(each) if bits == 4 else _split(halves(each), bits)


def halves(each: torch.Tensor) -> torch.Tensor:
    """uint8 [..., m] -> the numbers of four bits of each byte, uint8 [..., 2 m], the lower one first."""
    return _split(each, 4)


def _split(each: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of 2 * bits in bytes [..., m] -> those of which they are two, [..., 2 m], the lower first."""
    from torch import int16, uint8

    pairs = each.to(int16)
    pairs.bitwise_or_(pairs << 8 - bits)  # the lower half of a number is the first of two bytes
    numbers: torch.Tensor = pairs.bitwise_and_(0x0101 * (2**bits - 1)).view(uint8)
    return numbers


def _threes(bytes_of_eight: torch.Tensor) -> torch.Tensor:
    """Three bytes [..., 3] -> the eight numbers of 3 bits in them, uint8 [..., 8], the lowest first."""
    from torch import arange, int32, uint8

    low, middle, high = bytes_of_eight.to(int32).unbind(-1)
    joined = low | middle << 8 | high << 16
    return (joined[..., None] >> arange(0, 24, 3, device=joined.device)).bitwise_and_(7).to(uint8)


def columns_groups(stored: torch.Tensor, groups: int, end: str) -> torch.Tensor:
    """The group of each column, checked. Raises ValueError, which begins with the tensor's end."""
    least, most = (int(each) for each in stored.aminmax())
    if least < 0 or most >= groups:
        raise ValueError(f"{end} holds group {least if least < 0 else most}: there are {groups}, from 0 on")
    return stored.long()
