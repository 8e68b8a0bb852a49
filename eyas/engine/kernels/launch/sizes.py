"""Whole numbers for grids and tiles, on the host: Triton's, which kernels know as well, take 3 us each."""

from __future__ import annotations


def cdiv(count: int, each: int) -> int:
    """The quotient count / each, rounded up."""
    return -(-count // each)


def power_of_2(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()


def padded_batch(batch: int) -> int:
    """The batch that a graph pads `batch` sequences to: 1, 2, 4, 8, then 8 more each, from 64 on 16, then 32.

    Dense where a padded row costs most. What is compiled follows this batch too, where it follows a batch at
    all: a start then compiles the kernels of every batch.
    """
    if batch <= 8:
        return power_of_2(batch)
    step = 8 if batch <= 64 else 16 if batch <= 128 else 32
    return cdiv(batch, step) * step
