"""Whole numbers for grids and tiles, on the host: Triton's, which kernels know as well, take 3 us each."""

from __future__ import annotations


def cdiv(count: int, each: int) -> int:
    """How many times `each` it takes to hold `count`."""
    return -(-count // each)


def power_of_2(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()
