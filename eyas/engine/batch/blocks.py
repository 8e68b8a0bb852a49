"""The one height of every product in plain torch: what makes its rows independent of their company."""

from __future__ import annotations

ROWS = 8
"""Rows of every GEMM: a lone row takes another kernel, and 8 is about what a verify step has."""


def padded_rows(rows: int) -> int:
    """The next multiple of ROWS."""
    return -(-rows // ROWS) * ROWS
