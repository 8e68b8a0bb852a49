"""Figures as a person reads them, and as a file keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLUMNS = (
    ("case", "case"),
    ("ok", "ok"),
    ("failed", "failed"),
    ("tok/s", "out_tok_s"),
    ("TTFT p50 ms", "ttft_ms_p50"),
    ("p99", "ttft_ms_p99"),
    ("TPOT p50 ms", "tpot_ms_p50"),
    ("p99", "tpot_ms_p99"),
    ("accepted", "acceptance_rate"),
)


def table(rows: list[dict[str, Any]]) -> str:
    """A plain-text table of `Result.figures`, one line a case."""
    cells = [[title for title, _ in COLUMNS]]
    cells += [["-" if row.get(key) is None else str(row[key]) for _, key in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join(line) for line in lines)


def keep(rows: list[dict[str, Any]], file: str | None) -> None:
    """Prints every row as a JSON line, and appends the lines to `file` if there is one."""
    lines = [json.dumps(row) for row in rows]
    print("\n".join(lines))
    if file:
        with Path(file).open("a") as out:
            out.writelines(line + "\n" for line in lines)
