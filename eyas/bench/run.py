"""`eyas bench`: runs cases on one server, or on a cluster that it starts itself.

It knows which figures a report holds. It refuses to know how a request is sent and timed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.bench.cases import make_case
from eyas.bench.gateway_cost import measure_gateway
from eyas.bench.http import Server
from eyas.bench.load import Target, run_case
from eyas.bench.report import table
from eyas.common.config import ServeConfig
from eyas.common.errors import EyasError
from eyas.worker.screen import run_on_screen
from eyas.worker.serve import LocalCluster

VERIFY_STEPS, SYNTHETIC = "eyas_verify_steps_total", "eyas_synthetic_acceptance"
WARM_UP = ("1x64x32x2", "chat1")  # chats are always the same, so they are measured with a warm prefix cache


@dataclass(frozen=True)
class BenchPlan:
    """What to measure. `both` also measures every case without speculation."""

    cases: tuple[str, ...]
    vocab_size: int
    both: bool
    out: str | None


def make_plan(names: Sequence[str], vocab_size: int, both: bool, out: str | None) -> BenchPlan:
    """The plan for these cases. Raises ConfigError for an unknown one."""
    for name in names:
        make_case(name, vocab_size)
    return BenchPlan(tuple(names), vocab_size, both, out)


async def bench_server(server: Server, model: str | None, plan: BenchPlan) -> int:
    """Measures a running server and prints the report; `model` None: the first that it lists.

    Gives 1 if any request failed, else 0.
    """
    rows = await _measure(server, model or await _first_model(server), plan)
    return _report(rows, plan.out)


def bench_own(config: ServeConfig, plan: BenchPlan) -> int:
    """As `bench_server`, on a cluster started for it; also measures its start and the gateway's CPU cost."""

    async def measure(cluster: LocalCluster) -> int:
        rows: list[dict[str, Any]] = [{"case": "start to healthy", "seconds": round(cluster.start_s, 2)}]
        rows += await _measure(Server(cluster.url), cluster.model, plan)
        rows.append(await measure_gateway())
        return _report([{"layout": config.layout, **row} for row in rows], plan.out)

    return run_on_screen(config, measure, quiet=True)


async def _measure(server: Server, model: str, plan: BenchPlan) -> list[dict[str, Any]]:
    for name in WARM_UP:
        await run_case(Target(server, model), make_case(name, plan.vocab_size))
    rows = []
    for name in plan.cases:
        for speculative in (True, False) if plan.both else (True,):
            # Without drafts the prompts differ: the same ones would be in the prefix cache by then.
            case = make_case(name, plan.vocab_size, seed=1 if speculative else 2)
            before = await _figure(server, VERIFY_STEPS)
            figures = (await run_case(Target(server, model, speculative), case)).figures()
            steps = await _figure(server, VERIFY_STEPS) - before
            figures["speculative"] = speculative
            if speculative and await _figure(server, SYNTHETIC):
                figures["synthetic"] = True
            # A verify step gives its accepted drafts and one token of the model's own.
            figures["acceptance_length"] = round(1 + figures["accepted"] / steps, 2) if steps else None
            rows.append(figures)
    return rows


async def _first_model(server: Server) -> str:
    return str(json.loads(await server.get("/v1/models"))["data"][0]["id"])


async def _figure(server: Server, name: str) -> float:
    """The value of one metric; 0 for a server that does not have it."""
    try:
        page = (await server.get("/metrics")).decode()
    except EyasError:
        return 0.0
    found = re.search(rf"^{name} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _report(rows: list[dict[str, Any]], out: str | None) -> int:
    """Prints a table and the rows as JSON lines, appended to `out` too; 1 if any request failed."""
    print(table([row for row in rows if "ok" in row]))
    if any(row.get("synthetic") for row in rows):
        print(
            "drafts were accepted by chance (synthetic acceptance): acceptance is what the server was set to"
        )
    lines = [json.dumps(row) for row in rows]
    print("\n".join(lines), flush=True)
    if out:
        with Path(out).open("a") as file:
            file.writelines(line + "\n" for line in lines)
    return int(any(row.get("failed") for row in rows))
