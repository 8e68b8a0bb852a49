"""The recorded counts: how they are written down, and what differs from them.

An integer is exact. A number with a decimal point is a ratio to the calibration loop, and machines differ: it
may be `SLACK` times larger or smaller. It knows no workload.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

RENEW = "python -m tests.counted --renew"
SLACK = 1.6
"""An idle and a busy machine, and two versions of Python, differ by less."""

HEAD = f"""\
# What fixed workloads cost, counted: `make check` compares them (tests/counted).
# Integers are exact; a number with a decimal point is a ratio to a calibration loop ({SLACK} times it fails).
# Written by `{RENEW}`; the commit that renews it says why.
"""

Counts: TypeAlias = Mapping[str, int | float]
Table: TypeAlias = Mapping[str, Counts]  # by area: where the work is done


@dataclass(frozen=True)
class Difference:
    """One count that is not what was recorded; None: it is not counted any more, or was not before."""

    name: str
    recorded: int | float | None
    found: int | float | None

    def __str__(self) -> str:
        if self.recorded is None:
            return f"{self.name}: {self.found} now, and nothing is recorded"
        if self.found is None:
            return f"{self.name}: {self.recorded} is recorded, and it is not counted any more"
        word = "more" if self.found > self.recorded else "less"
        return f"{self.name}: {self.recorded} is recorded, {self.found} now: {word} work"


def differences(recorded: Table, found: Table) -> list[Difference]:
    """What differs, by area and name; less work differs too, so that the record stays true."""
    old, new = dict(_flat(recorded)), dict(_flat(found))
    names = sorted(old.keys() | new.keys())
    return [
        Difference(name, old.get(name), new.get(name))
        for name in names
        if not _same(old.get(name), new.get(name))
    ]


def complaint(found: list[Difference]) -> str:
    """What the check says when it fails."""
    lines = ["The work of fixed requests is not what tests/counted/baseline.toml says:"]
    lines += [f"  {difference}" for difference in found]
    lines.append(f"If that is meant: `{RENEW}`, and say why in the commit's message.")
    return "\n".join(lines)


def read(path: Path) -> Table:
    """The recorded counts; none if there is no file."""
    return tomllib.loads(path.read_text()) if path.exists() else {}


def renewed(recorded: Table, found: Table) -> Table:
    """`found`, but with the recorded ratios where they still hold: noise is no news."""
    return {
        area: {
            name: old if _same(old := recorded.get(area, {}).get(name), new) and old is not None else new
            for name, new in counts.items()
        }
        for area, counts in found.items()
    }


def text(table: Table) -> str:
    """The file: sorted, one count per line."""
    lines = [HEAD.rstrip()]
    for area, counts in sorted(table.items()):
        lines += ["", f"[{area}]"]
        lines += [f'"{name}" = {count}' for name, count in sorted(counts.items())]
    return "\n".join(lines) + "\n"


def _flat(table: Table) -> Iterator[tuple[str, int | float]]:
    for area, counts in table.items():
        for name, count in counts.items():
            yield f"{area}: {name}", count


def _same(recorded: int | float | None, found: int | float | None) -> bool:
    if isinstance(recorded, float) and isinstance(found, float):
        return found <= recorded * SLACK and recorded <= found * SLACK
    return type(recorded) is type(found) and recorded == found
