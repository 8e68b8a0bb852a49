"""Attacks on a running server, one after the other, while 32 good streams go on.

`python -m tests.e2e.attacks` starts `eyas serve` with two keys. The attacker has one of them and a process of
low priority: it would run elsewhere. Each attack must be answered as it may be and in time; meanwhile the
good streams give what was recorded, no gap between two pieces exceeds a bound, and memory is bounded and
given back. The exit code is 1 if anything is not so. `--only WORD` chooses attacks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
from rich.console import Console
from rich.table import Table

from eyas.client import AsyncClient
from eyas.common.config import NANO, NANO_HEAD
from eyas.common.security import api_keys
from tests.e2e.attacks.attack import Attack, Tally, Target
from tests.e2e.attacks.bodies import BODIES
from tests.e2e.attacks.calls import CALLS
from tests.e2e.attacks.good import GoodStreams, Window
from tests.e2e.attacks.memory import KINDS, Memory, MiB, Watch
from tests.e2e.attacks.sockets import SOCKETS
from tests.e2e.served import Folders, Served, serving

ATTACKS = {attack.name: attack for attack in (*SOCKETS, *BODIES, *CALLS)}
GOOD, BAD = "good-key", "bad-key"
STREAMS = 32
CALM_S = 15.0  # without an attack, at first
BACK_S = 30.0  # memory is back after this long
GAP_S = 3.0  # the longest gap in a good stream, above the longest one in calm
GROWN = {"gateway": 1024 * MiB, "children": 2600 * MiB, "workers": 640 * MiB}  # at most, above the start
LEFT = {"gateway": 96 * MiB, "children": 640 * MiB, "workers": 640 * MiB}  # above the start, BACK_S later
NICE = 10  # of an attacker
SHOWN = 40  # lines of a traceback


@dataclass
class Row:
    """What one attack did. `memory`: before, at most, after."""

    name: str
    tally: Tally
    window: Window
    memory: tuple[Memory, Memory, Memory]
    back_s: float
    problems: list[str] = field(default_factory=list)


async def attacked(
    attack: Attack, target: Target, watch: Watch, streams: GoodStreams, calm_gap_s: float
) -> Row:
    """One attack from a process of its own, and what is left after it."""
    before = watch.now()
    streams.turn()
    async with watch.peak() as peak:
        tally = await _run_apart(attack.name, target)
        ended = time.monotonic()
        while time.monotonic() - ended < BACK_S and _above(watch.now(), before, LEFT):
            await asyncio.sleep(0.5)
        await asyncio.sleep(1)
    back_s, after = time.monotonic() - ended - 1, watch.now()
    row = Row(attack.name, tally, streams.turn(), (before, peak, after), back_s)
    row.problems += attack.problems(tally)
    row.problems += row.window.problems[:5]
    row.problems += [f"{said} at most" for said in _above(peak, before, GROWN)]
    row.problems += [f"{said} after {BACK_S:g} s" for said in _above(after, before, LEFT)]
    if row.window.worst_s > calm_gap_s + GAP_S:
        row.problems.append(f"a good stream paused for {row.window.worst_s:.1f} s")
    return row


def _above(now: Memory, before: Memory, bounds: dict[str, int]) -> list[str]:
    grown = {kind: now[kind] - before[kind] for kind in KINDS}
    return [f"{kind} grew by {grown[kind] // MiB} MiB" for kind in KINDS if grown[kind] > bounds[kind]]


async def _run_apart(name: str, target: Target) -> Tally:
    command = [sys.executable, "-m", "tests.e2e.attacks", "--attack", name]
    command += ["--at", f"{target.port},{target.grpc_port}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    if process.returncode:
        return Tally(Counter({"the attacker failed": 1}))
    answers, slowest_s = json.loads(said)
    return Tally(Counter(answers), slowest_s)


def attacker(name: str, at: str) -> int:
    """The attacker's process."""
    port, grpc_port = map(int, at.split(","))
    os.nice(NICE)
    tally = Tally()
    asyncio.run(_attack(ATTACKS[name], Target(port, grpc_port, BAD), tally))
    print(json.dumps([tally.answers, tally.slowest_s]))
    return 0


async def _attack(attack: Attack, target: Target, tally: Tally) -> None:
    await attack.run(target, tally)


async def campaign(served: Served, names: list[str], console: Console) -> list[Row]:
    """A row for each of these attacks, the first one for a while of calm."""
    watch = Watch(served.process.pid)
    headers = {"authorization": f"Bearer {GOOD}"}
    target = Target(served.port, served.grpc_port, BAD)
    streams, rows = GoodStreams(target, STREAMS), list[Row]()
    async with (
        httpx.AsyncClient(base_url=served.url, headers=headers, timeout=300, trust_env=False) as http,
        AsyncClient(target.address, api_key=GOOD, retries=0) as grpc,
    ):
        await streams.record(http, grpc)
        streams.start()
        await asyncio.sleep(CALM_S)
        calm = watch.now()
        rows.append(Row("none", Tally(), streams.turn(), (calm, calm, calm), 0.0))
        console.print(line(rows[0]), markup=False, highlight=False)
        calm_gap_s = rows[0].window.worst_s
        for name in names:
            rows.append(await attacked(ATTACKS[name], target, watch, streams, calm_gap_s))
            console.print(line(rows[-1]), markup=False, highlight=False)
        await streams.finish()
    return rows


def line(row: Row) -> str:
    """A row as it is told when it is done."""
    return f"{', '.join(cells(row))}: {'; '.join(row.problems) or 'ok'}"


def cells(row: Row) -> list[str]:
    """A row of the report."""
    answers = ", ".join(f"{count} {answer}" for answer, count in sorted(row.tally.answers.items()))
    window = row.window
    gaps = " / ".join(f"{1000 * gap:.0f}" for gap in (window.at(0.5), window.at(0.99), window.worst_s))
    good = f"{window.answers}, first after {window.first_s:.1f} s" + (
        f" ({window.refused} refused)" if window.refused else ""
    )
    memory = [" / ".join(str(held[kind] // MiB) for held in row.memory) for kind in KINDS]
    return [row.name, answers, f"{row.tally.slowest_s:.1f} s", good, gaps, *memory, f"{row.back_s:.1f} s"]


def report(rows: list[Row]) -> Table:
    """MiB before, at most, after; gaps in ms."""
    table = Table("attack", "answers", "slowest", "good answers", "gap p50 / p99 / max", *KINDS, "back")
    for row in rows:
        table.add_row(*cells(row))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.attacks", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="attacks whose names hold one"
    )
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        return attacker(given.attack, given.at)
    console = Console(width=None if sys.stdout.isatty() else 200)
    os.environ[api_keys.VARIABLE] = f"{GOOD}\n{BAD}"
    names = [name for name in ATTACKS if any(word in name for word in given.only)]
    with serving(Folders(str(NANO), str(NANO_HEAD))) as served:
        rows = asyncio.run(campaign(served, names, console))
        found = [place for place, line in enumerate(served.lines) if "Traceback" in line]
    console.print(report(rows))
    for place in found:
        console.print("\n".join(served.lines[place : place + SHOWN]), markup=False)
    console.print(f"{len(found)} tracebacks in the server's log")
    return int(bool(found or any(row.problems for row in rows)))


if __name__ == "__main__":
    sys.exit(main())
