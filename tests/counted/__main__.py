"""`make check` compares the work of fixed workloads with what is recorded in `baseline.toml`.

It counts what no clock and no neighbour changes; where time must be taken, it is a ratio. `--renew` records
today's counts and prints what that changes.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from tests.counted import baseline, engines, host, launches, wires

BASELINE = Path(__file__).with_name("baseline.toml")


def count(folder: Path) -> baseline.Table:
    """All counts, by area; models and pools lie in `folder`."""
    return {
        "engines": engines.counts(folder),
        "host": host.counts(),
        "launches": launches.counts(folder) | launches.latents_and_experts(folder / "deepseek"),
        "wires": asyncio.run(wires.counts()),
    }


def main(
    arguments: list[str], counting: Callable[[Path], baseline.Table] = count, record: Path = BASELINE
) -> int:
    """Exit code 1: a count is not what `record` says."""
    parser = argparse.ArgumentParser(prog="python -m tests.counted", description="Compares counted work.")
    parser.add_argument("--renew", action="store_true", help="record today's counts and print what changes")
    given = parser.parse_args(arguments)
    recorded = baseline.read(record)
    with tempfile.TemporaryDirectory() as folder:
        found = counting(Path(folder))
    if given.renew:
        _renew(record, baseline.text(baseline.renewed(recorded, found)))
        return 0
    if different := baseline.differences(recorded, found):
        print(baseline.complaint(different), file=sys.stderr)
        return 1
    print(f"counted work: {sum(map(len, found.values()))} counts are as recorded")
    return 0


def _renew(record: Path, text: str) -> None:
    old = record.read_text() if record.exists() else ""
    record.write_text(text)
    lines = difflib.unified_diff(old.splitlines(), text.splitlines(), "recorded", "now", lineterm="", n=0)
    print("\n".join(lines) or "nothing has changed")


if __name__ == "__main__":
    torch.set_num_threads(1)  # small models are faster so
    sys.exit(main(sys.argv[1:]))
