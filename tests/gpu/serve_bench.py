"""A server on the GPU under load.

    python -m tests.gpu.serve_bench --out DIR [--cases ...] [--extra JSON ...] [serve flags]

Starts `eyas serve`, tells how long it took to be healthy, sends one case of `eyas bench suite` after another,
and tells beside each result how much CPU the gateway, the front and the engine used meanwhile. Everything it
learns is in DIR as soon as it is known (`results.txt`; `serve.log` is the server's own), every wait has an
end, and nothing outlives it. It knows processes and lines of text; the suite measures. `--rank8`: the model
is one rank of eight of DeepSeek-V3, in DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from eyas.bench.http import MeasuredServer
from eyas.bench.measure import look
from eyas.bench.suite import WARM_UP, BenchSuite
from eyas.common.cluster.listening import free_ports
from eyas.common.errors import EyasError
from tests.gpu.answer_latent import LAYERS, write_rank

SERVE = ("--device", "cuda", "--layout", "unified", "--load-format", "dummy")  # flags given later win
CASES = ("bs1", "bs8", "bs32", "s1k")
HALVES = ("gateway", "front", "engine")
GRACE_S = 15.0
POLL_S = 0.1
FIGURES = (
    "failed",
    "completed",
    "duration",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "accept_length",
)


@dataclass(frozen=True)
class Plan:
    out: Path
    label: str
    cases: tuple[str, ...]
    extras: tuple[str, ...]
    flags: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description="Load an Eyas server and measure it.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--rank8", action="store_true", help="serve one rank of eight of DeepSeek-V3")
    parser.add_argument(
        "--extra", nargs="+", default=["{}"], metavar="JSON", help="further fields; a case runs with each"
    )
    parser.add_argument("--label", default="eyas")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything, the start included")
    args, flags = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rank8:
        write_rank(args.out / "rank8", LAYERS)
        flags += ["--model", str(args.out / "rank8"), "--draft", "none", "--uniform-experts"]
    plan = Plan(args.out, args.label, tuple(args.cases), tuple(args.extra), tuple(flags))
    return asyncio.run(_measure(plan, args.seconds))


async def _measure(plan: Plan, seconds: float) -> int:
    report = Report(plan)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # ends the server too
    try:
        async with asyncio.timeout(seconds), _served(plan, report) as server:
            for case, extra in itertools.product(plan.cases, plan.extras):
                report.result(await _run(plan, server, case, extra))
    except TimeoutError:
        report.failure(f"not done after {seconds:g} s")
    except (RuntimeError, EyasError) as error:
        report.failure(str(error))
    return int(report.failed)


class Report:
    """`results.txt` and standard output, a line at a time. `failed`: some request, case or start did."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.failed = False

    def line(self, text: str) -> None:
        print(text, flush=True)
        with (self._plan.out / "results.txt").open("a") as file:
            file.write(text + "\n")

    def result(self, result: dict[str, Any]) -> None:
        self.failed |= bool(result.get("failed", True))
        self.line(f"RES {self._plan.label} {result.pop('case')} {json.dumps(result)}")

    def failure(self, reason: str) -> None:
        self.failed = True
        self.line(f"FAILED {self._plan.label}: {reason}")
        log = self._plan.out / "serve.log"
        tail = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
        print("\n".join(f"  | {line}" for line in tail), flush=True)


# --- the server ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    target: MeasuredServer
    model: str
    root: psutil.Process

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the gateway, of the workers' fronts, and of their engines."""
        used = dict.fromkeys(HALVES, 0.0)
        for process in self.root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if half := _half(process):
                    times = process.cpu_times()
                    used[half] += times.user + times.system
        return used


def _half(process: psutil.Process) -> str | None:
    """What a process of the cluster is, by its command line; an engine is spawned by its front."""
    words = process.cmdline()
    if "eyas.cli" in words:
        return {"gateway": "gateway", "worker": "front"}.get(words[words.index("eyas.cli") + 1])
    return "engine" if any("multiprocessing.spawn" in word for word in words) else None


@contextlib.asynccontextmanager
async def _served(plan: Plan, report: Report) -> AsyncIterator[Server]:
    """A healthy server. Raises RuntimeError if it ends instead; at the end all of its processes are gone."""
    ports = free_ports()
    port, grpc_port = next(ports), next(ports)
    flags = ("--port", str(port), "--grpc-port", str(grpc_port), *SERVE, *plan.flags)
    began = time.monotonic()
    with (plan.out / "serve.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "eyas.cli", "serve", *flags), stdout=log, stderr=log
        )
    root = psutil.Process(process.pid)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=5.0
        ) as http:
            await _healthy(http, process)
            report.line(f"START {plan.label} {time.monotonic() - began:.1f} s to healthy: {' '.join(flags)}")
            model = (await http.get("/get_model_info")).json()
        yield Server(MeasuredServer(f"http://127.0.0.1:{port}"), model["served_model_name"], root)
    finally:
        await _end(process, root)


async def _healthy(http: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    while process.returncode is None:
        with contextlib.suppress(httpx.HTTPError):
            if (await http.get("/health")).status_code == 200:
                return
        await asyncio.sleep(POLL_S)
    raise RuntimeError(f"the server ended with code {process.returncode} at start")


async def _end(process: asyncio.subprocess.Process, root: psutil.Process) -> None:
    """Asks it to stop, then kills what is left."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = root.children(recursive=True)
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await process.wait()
    for left in (*family, root):
        with contextlib.suppress(psutil.Error):
            left.kill()


# --- the load ----------------------------------------------------------------------------------------


async def _run(plan: Plan, server: Server, case: str, extra: str) -> dict[str, Any]:
    """The figures of one case, and the CPU seconds that each part used per second of it.

    Raises EyasError if no request succeeds.
    """
    suite, target = BenchSuite((case,), (True,), server.model, None, json.loads(extra)), server.target
    facts = await look(target)
    await suite.case(target, facts, WARM_UP)
    before, began = server.cpu_s(), time.monotonic()
    row = await suite.case(target, facts, case)
    seconds, after = time.monotonic() - began, server.cpu_s()
    used = {half: after[half] - before[half] for half in HALVES}
    tokens = max(1, row["total_output_tokens"])
    figures = {name: row[name] if row[name] is None else round(row[name], 3) for name in FIGURES}
    figures["cpu"] = {half: round(spent / seconds, 3) for half, spent in used.items()}
    figures["cpu_us_per_token"] = {half: round(1e6 * used[half] / tokens, 2) for half in HALVES[:2]}
    return {"case": case, **({} if extra == "{}" else {"extra": extra}), **figures}


if __name__ == "__main__":
    sys.exit(main())
