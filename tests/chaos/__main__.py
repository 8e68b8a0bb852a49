"""`make chaos`: the campaign, its log, its table. The exit code is 1 if anything was lost or left over."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.campaign import Campaign, Findings, Plan
from tests.chaos.streams import make_requests

REQUESTS = 64


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description="Torments a cluster.")
    parser.add_argument("--seconds", type=float, default=600.0, help="of faults (default: %(default)g)")
    parser.add_argument("--streams", type=int, default=32, help="at a time (default: %(default)d)")
    parser.add_argument("--aborts", type=int, default=500, help="requests given up (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=1, help="repeats the faults of the run that had it")
    parser.add_argument("--out", type=Path, default=Path(".run/chaos.jsonl"), help="(default: %(default)s)")
    given = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # that workers are lost is no news here
    console = Console(width=None if sys.stdout.isatty() else 120)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", buffering=1) as journal:
        plan = Plan(given.seed, given.seconds, given.streams, given.aborts)
        findings = asyncio.run(_run(Campaign(plan, journal, console), given.seed))
    console.print(report(findings))
    for problem in findings.problems:
        console.print(f"[red]{problem}", highlight=False)
    return int(bool(findings.problems))


async def _run(campaign: Campaign, seed: int) -> Findings:
    return await campaign.run(await make_requests(REQUESTS, seed))


def report(findings: Findings) -> Table:
    table = Table("what", "count", title="A cluster under torment")
    outcomes = findings.outcomes
    rows: dict[str, object] = {
        **{f"fault: {name}": n for name, n in _counted(f"{f.kind} {f.role}" for f in findings.faults)},
        **{f"fault {name}": n for name, n in _counted(f.phase.value for f in findings.faults)},
        "faults whose phase did not come": findings.unreached,
        "streams": len(outcomes),
        "tokens": sum(outcome.tokens for outcome in outcomes),
        "streams that went on elsewhere": sum(outcome.attempts > 1 for outcome in outcomes),
        "streams that had to come back, for want of a place": sum(bool(one.refused) for one in outcomes),
        "longest stream, seconds": round(max((outcome.seconds for outcome in outcomes), default=0.0), 1),
        "streams that failed or differed": sum(bool(outcome.error) for outcome in outcomes),
        **{f"given up: {way}": n for way, n in sorted(findings.aborts.items())},
        "other violations": len(findings.violations),
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _counted(names: Iterable[str]) -> list[tuple[str, int]]:
    return sorted(Counter(names).items())


if __name__ == "__main__":
    sys.exit(main())
