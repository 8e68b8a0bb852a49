"""Measurements as a table for people. It knows columns, and refuses to know how anything was measured."""

from __future__ import annotations

from typing import Any

COLUMNS = (
    ("case", "case"),
    ("drafts", "speculative"),
    ("ok", "ok"),
    ("failed", "failed"),
    ("tok/s", "out_tok_s"),
    ("TTFT p50 ms", "ttft_ms_p50"),
    ("p99", "ttft_ms_p99"),
    ("TPOT p50 ms", "tpot_ms_p50"),
    ("p99", "tpot_ms_p99"),
    ("accepted", "acceptance_rate"),
    ("per verify", "acceptance_length"),
)


def table(rows: list[dict[str, Any]]) -> str:
    """A plain-text table of `Result.figures`, one line per case."""
    cells = [[title for title, _ in COLUMNS]]
    cells += [["-" if row.get(key) is None else str(row[key]) for _, key in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join(line) for line in lines)
