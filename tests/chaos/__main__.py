"""`make chaos`: the campaign, its log, its table. The exit code is 1 if anything was lost or left over.

On two GPUs, each with a prefill and a decode worker, so that one of each kind remains when one is struck:

    python -m tests.chaos --device cuda --layout split --gpus 0,1,0,1 --seconds 300 --streams 32

With `--layout auto` the preferences of two workers change every second. `--each 4` on eight GPUs has four of
each kind.

With `--hybrid` the model has recurrent states, few slots for them and an MTP head, which drafts trees.

With `--heavy` prompts are long, drafts are trees, and two workers have all roles: steps take seconds on two
cores, and no request may be lost because one is taken for a hang.

With `--adapters` requests have adapters, more than there are slots, and one comes, changes and goes.

With `--tiers` KV goes to the host's memory, to a disk and to a Redis, which is killed and stopped as well.

Flags of `eyas serve` choose the model and more. On a GPU, answers that differ from the undisturbed ones are
counted: near-ties fall either way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from eyas.commands import CommandParser
from eyas.common.config import NANO
from eyas.configuration import own_config
from eyas.flags import add_engine
from eyas.layout_flags import add_layout
from eyas.process_flags import add_adapters
from tests.chaos.adapters import AdapterTurns
from tests.chaos.campaign import Campaign, Findings, Plan
from tests.chaos.rig import ENGINE, ON_CPU, WORKERS, Site
from tests.chaos.stores import TormentedStore
from tests.chaos.streams import heavy_requests, make_requests
from tests.unit.hybrid_rig import write_with_mtp

REQUESTS, HEAVY_REQUESTS, TIERED_REQUESTS = 64, 8, 24
TIERED_LENGTHS = (300, 400, 500)  # long enough to be worth a load; together more than the pools hold
HEAVY = (
    *("--layout", "unified", "--num-pages", "1024", "--chunk-tokens", "256"),
    *("--spec-topk", "4", "--spec-steps", "5", "--spec-draft-tokens", "32"),
)
HYBRID = (
    *("--layout", "split", "--state-slots", "10"),
    *("--spec-topk", "3", "--spec-steps", "3", "--spec-draft-tokens", "8"),
)
STOP_S, SHORT_STOP_S = 20.0, 10.0  # how long a stopped worker is: longer than it takes to be given up
SIZES = ("--num-pages", ENGINE.num_pages, "--chunk-tokens", ENGINE.chunk_tokens)
PLACES = ("--max-running", ENGINE.max_running, "--max-waiting", ENGINE.max_waiting)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description="Torments a cluster.", allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=600.0, help="of faults (default: %(default)g)")
    parser.add_argument("--streams", type=int, help="at a time (default: 32; heavy ones: 12)")
    parser.add_argument("--aborts", type=int, help="requests given up (default: 500; heavy ones: 20)")
    parser.add_argument("--seed", type=int, default=1, help="repeats the faults of the run that had it")
    parser.add_argument("--out", type=Path, default=Path(".run/chaos.jsonl"), help="(default: %(default)s)")
    parser.add_argument("--heavy", action="store_true", help="long prompts and trees of drafts")
    parser.add_argument(
        "--hybrid", action="store_true", help="a model with recurrent states, trees of drafts"
    )
    parser.add_argument("--adapters", action="store_true", help="more adapters than slots, one that changes")
    parser.add_argument("--tiers", action="store_true", help="KV on the host, a disk and a Redis, tormented")
    parser.add_argument("--each", type=int, default=WORKERS, help="workers of a kind (default: %(default)d)")
    given, serve = parser.parse_known_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    store = (
        TormentedStore(given.seed, lambda text: console.print(f"           {text}")) if given.tiers else None
    )
    with tempfile.TemporaryDirectory() as scratch:
        serve = [*HEAVY * given.heavy, *(_hybrid(Path(scratch, "model")) if given.hybrid else ()), *serve]
        serve += () if store is None else store.flags(Path(scratch, "pages"))
        adapters = AdapterTurns.written(Path(scratch, "adapters")) if given.adapters else None
        serve += () if adapters is None else adapters.flags()
        site = dataclasses.replace(read_site(serve, given.each), heavy=given.heavy)
        return _tormented(given, site, (store, adapters), console)


def _hybrid(folder: Path) -> Sequence[str]:
    """The flags for a small random hybrid that is stored there."""
    write_with_mtp(folder, "qwen3_next", vocab_size=4096, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder / name)
    return (*HYBRID, "--model", str(folder), "--draft", str(folder))


def _tormented(
    given: argparse.Namespace,
    site: Site,
    beside: tuple[TormentedStore | None, AdapterTurns | None],
    console: Console,
) -> int:
    """Runs the campaign; 1 if anything was lost or is left over. `beside`: what is tormented, too."""
    store, adapters = beside
    logging.basicConfig(level=logging.ERROR)  # that workers are lost is no news here
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", buffering=1) as journal:
        stop_s = STOP_S if site == ON_CPU else SHORT_STOP_S
        streams, aborts = (12, 20) if given.heavy else (32, 500)
        streams = streams if given.streams is None else given.streams
        aborts = aborts if given.aborts is None else given.aborts
        plan = Plan(given.seed, given.seconds, streams, aborts, stop_s, site=site)
        findings = asyncio.run(_run(Campaign(plan, journal, console, adapters), plan, store))
    console.print(report(findings))
    if store is not None:
        console.print(f"the store was killed and stopped: {dict(store.faults)}")
    for problem in findings.problems:
        console.print(f"[red]{problem}", highlight=False)
    return int(bool(findings.problems))


def read_site(flags: Sequence[str], each: int = WORKERS) -> Site:
    """The cluster of these flags of `eyas serve`, with as many workers `each` kind; none: the usual one.

    Raises ConfigError.
    """
    if not flags and each == WORKERS:
        return ON_CPU
    parser = CommandParser(prog="make chaos")
    add_layout(parser)
    add_engine(parser)
    add_adapters(parser)
    args = parser.parse_args([*map(str, (*SIZES, *PLACES)), *flags])
    drafted = ("draft_workers",) if args.device == "cpu" and own_config(args).engine.draft else ()
    split = own_config(args).layout == "split"
    for name in ("prefill", "decode", *drafted) if split else ("workers",):
        setattr(args, name, each)
    return Site(own_config(args), each)


async def _run(campaign: Campaign, plan: Plan, store: TormentedStore | None) -> Findings:
    async with contextlib.nullcontext() if store is None else store.tormented():
        if plan.site.heavy:
            return await campaign.run(heavy_requests(HEAVY_REQUESTS, plan.seed))
        if store is not None:
            return await campaign.run(heavy_requests(TIERED_REQUESTS, plan.seed, TIERED_LENGTHS))
        return await campaign.run(await make_requests(REQUESTS, plan.seed))


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
        "streams with other tokens, which may be": sum(outcome.differs for outcome in outcomes),
        "requests with other tokens, undisturbed": findings.calm,
        **{f"given up: {way}": n for way, n in sorted(findings.aborts.items())},
        **{f"adapters: {what}": n for what, n in sorted(findings.adapters.items())},
        "other violations": len(findings.violations),
        **{f"in the end: {name}": int(total) for name, total in findings.tiers.items()},
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _counted(names: Iterable[str]) -> list[tuple[str, int]]:
    return sorted(Counter(names).items())


if __name__ == "__main__":
    sys.exit(main())
