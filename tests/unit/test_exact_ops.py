"""The script that names an operation whose bits follow its company: what it blames, and what it does not."""

from __future__ import annotations

import torch

from tests.gpu.exact_ops import Trace, faults

ROWS = torch.arange(24.0).view(6, 4)


def trace(cuts: list[int], **gave: torch.Tensor) -> Trace:
    """A product of `ROWS`, and what reads them and all rows before; in steps of so many rows."""
    made = Trace()
    for part in range(len(cuts)):
        first, last = sum(cuts[:part]), sum(cuts[: part + 1])
        made.begin(last - first)
        for verb in ("product", "recur"):
            here = gave.get(verb, ROWS)[first:last]
            made.add(verb, made.rows(gave.get("read", ROWS)[first:last]), made.rows(here))
    return made


def changed(row: int) -> torch.Tensor:
    rows = ROWS.clone()
    rows[row, 2] += 1.0
    return rows


def test_the_same_in_other_steps_is_no_fault() -> None:
    assert list(faults(trace([6]), trace([1, 3, 2]))) == []


def test_what_reads_the_same_and_gives_something_else_is_blamed() -> None:
    [fault] = faults(trace([6]), trace([1, 3, 2], product=changed(4)))
    assert (fault["operation"], fault["first"], fault["rows"], fault["place"]) == ("product 0", 4, 1, 2)


def test_what_reads_something_else_is_not_nor_what_stands_behind_such_a_row() -> None:
    other = trace([2, 4], read=changed(3), product=changed(3), recur=changed(4))
    assert list(faults(trace([6]), other)) == []
