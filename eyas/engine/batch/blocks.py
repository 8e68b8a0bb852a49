"""The row count of every matrix product in plain torch. Using one makes a row independent of the others."""

from __future__ import annotations

ROWS = 8
"""Rows per GEMM: a single row would take another kernel, and a verify step has about 8 rows."""


def padded_rows(rows: int) -> int:
    """The next multiple of ROWS."""
    return -(-rows // ROWS) * ROWS
