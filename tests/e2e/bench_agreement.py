"""Whether `eyas bench` and another load client measure the same server alike.

    python -m tests.e2e.bench_agreement CLIENT --url URL [--case 2x64x32x6] [--rounds 5] [--python PYTHON]
    python -m tests.e2e.bench_agreement CLIENT --stub

CLIENT is a program that takes --url, --model, --vocab and a case, sends the same prompts in the same order,
and ends its output with a line of JSON that has ttft_ms_p50 and tpot_ms_p50. The two take turns, so that a
busy neighbour disturbs both alike; each figure is the median over the rounds. `--stub`: against a server that
sends tokens at a fixed pace. The exit code is 0 if both figures agree within the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time

from eyas.bench.backends import COMPLETIONS, RequestTemplate
from eyas.bench.cases import make_case
from eyas.bench.http import MeasuredServer
from eyas.bench.jobs import fit
from eyas.bench.measure import SAFE_VOCABULARY, look
from eyas.bench.runner import TargetServer, Workload, run_load
from eyas.common.cluster.listening import free_ports

BOUND = 0.03
WARM_UP = "1x128x64x2"  # as the other client does, so that both find the server as busy
STUB_START_S = 3.0
Figures = dict[str, float]


def ours(url: str, case_name: str) -> Figures:
    """The medians of `eyas bench`, in ms, with the other's definition of a median."""

    async def measured() -> Figures:
        server = MeasuredServer(url)
        facts = await look(server)
        target = TargetServer(server, COMPLETIONS, RequestTemplate(facts.model or "stub"))
        for name in (WARM_UP, case_name):
            case = make_case(name)
            load = Workload(
                fit(case.jobs, facts.vocab_size or SAFE_VOCABULARY), max_concurrency=case.concurrency
            )
            run = await run_load(target, load, {}, lambda _: None)
        errors = [record.error for record in run.records if record.error]
        assert not errors, errors
        times = {
            "ttft": [record.ttft_s for record in run.records],
            "tpot": [record.tpot_s or 0.0 for record in run.records],
        }
        return {name: 1e3 * sorted(values)[len(values) // 2] for name, values in times.items()}

    return asyncio.run(measured())


def theirs(args: argparse.Namespace, url: str) -> Figures:
    """The medians of the other client, in ms."""
    flags = ("--url", url, "--model", args.model, "--vocab", str(args.vocab), args.case)
    command = (args.python, args.client, *flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    line = json.loads("{" + done.stdout.rpartition("{")[2])
    return {name: line[f"{name}_ms_p50"] for name in ("ttft", "tpot")}


def compare(args: argparse.Namespace, url: str) -> bool:
    """Takes turns, prints every round, and tells whether the medians agree."""
    rounds: list[tuple[Figures, Figures]] = []
    ours(url, args.case)  # prompts are in the prefix cache from here on
    for number in range(args.rounds):
        if number % 2:
            rounds.append((ours(url, args.case), theirs(args, url)))
        else:
            other = theirs(args, url)
            rounds.append((ours(url, args.case), other))
        print(f"round {number + 1}: ours {rounds[-1][0]}, theirs {rounds[-1][1]}", flush=True)
    agree = True
    for name in ("ttft", "tpot"):
        mine, other_ms = (statistics.median(pair[side][name] for pair in rounds) for side in (0, 1))
        agree &= abs(mine / other_ms - 1) <= BOUND
        print(f"{name}: ours {mine:.3f} ms, theirs {other_ms:.3f} ms, ratio {mine / other_ms:.4f}")
    return agree


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench_agreement")
    parser.add_argument("client", metavar="CLIENT")
    parser.add_argument("--url", help="a running server")
    parser.add_argument("--stub", action="store_true", help="a server of a fixed pace instead")
    parser.add_argument("--model", default="eyas-nano")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--case", default="2x64x32x6")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable, help="runs CLIENT")
    args = parser.parse_args()
    if not args.stub:
        return 0 if compare(args, args.url) else 1
    port = str(next(free_ports()))
    stub = (sys.executable, "-m", "tools.bench.overhead", "--stub", port, "--streams", "2")
    with subprocess.Popen((*stub, "--tokens-per-second", "100"), stdin=subprocess.PIPE) as server:
        try:
            time.sleep(STUB_START_S)
            return 0 if compare(args, f"http://127.0.0.1:{port}") else 1
        finally:
            server.kill()


if __name__ == "__main__":
    sys.exit(main())
