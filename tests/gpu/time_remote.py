"""Rounds whose drafts come from another GPU, against rounds that draft themselves.

    python -m tests.gpu.time_remote --out FILE [--shape llama-3.1-8b] [--batches 1 8 32]

A decode worker and a draft worker, each a front and an engine, on cuda:0 and cuda:1; then one worker alone,
which drafts in its steps. Weights are dummies, drafts are accepted by chance: chains of 3, 3.0 tokens per
round; with `--block` 7 drafts of one pass of a DFlash head, 5.0 tokens per round. Every line is on disk as
soon as it is known and names the paths that its commits took (mailbox: past the decode worker's host; shm: by
memory that both hosts share; grpc: by the fronts, as each sequence's first does but with a mailbox);
`--report` reads them again. `--device cpu` tries the script out, where nothing goes from GPU to GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from eyas.bench.output import append_line
from eyas.common.config import EngineConfig, SpeculationConfig, WorkerConfig, resolve_engine
from eyas.common.errors import EyasError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.common.wire import rpc
from eyas.common.wire.clients import DecodeSession, DecodeSessionClient
from eyas.common.wire.message import StepReply
from eyas.engine.speculation.synthetic import resolve
from eyas.worker import engine_main
from eyas.worker.worker import run_worker

CHAIN, BLOCK = (3, 3.0), (7, 5.0)  # drafts; tokens per round, the bonus too
PROMPT = 16
DECODE, DRAFT, METRICS = 47330, 47331, 47332  # ports
START_S, ANSWER_S = 300.0, 120.0
CLOSED_S = 0.1  # in which gRPC's tasks of a session that was closed come to their ends
DRAFTED = 0.8  # of an answer's rounds: its first ones go by before its drafter knows it
FIRST = 6  # rounds of an answer that are shown one by one
PAGE_S = 1.0  # the metrics are renewed every half second
MAILBOX, SHM, GRPC, COLOCATED = "mailbox", "shm", "grpc", "colocated"
TRANSFER = {MAILBOX: "cuda_ipc", SHM: "shm", GRPC: "grpc"}
"""What `--transfer` each way takes."""
Engine = Callable[[EngineConfig, str], None]


@dataclass(frozen=True)
class Setting:
    """What all measurements of a run share. `options`: of every engine."""

    device: str
    tokens: int  # of an answer
    batches: Sequence[int]
    options: dict[str, Any]

    def engine(self, number: int, *roles: Role, **more: Any) -> EngineConfig:
        """Of a worker on GPU `number`."""
        device = f"cuda:{number}" if self.device == "cuda" else self.device
        return replace(resolve_engine(device, **self.options), roles=roles, **more)

    def workers(self, way: str) -> list[tuple[WorkerConfig, Engine]]:
        """The processes of a way to draft."""
        if way == COLOCATED:
            engine = self.engine(0, *Role)
            return [(WorkerConfig(engine, port=DECODE, metrics_port=METRICS), engine_main.main)]
        decode, draft = (
            self.engine(number, role, transfer=TRANSFER[way])
            for number, role in enumerate((Role.DECODE, Role.DRAFT))
        )
        known = f"static:127.0.0.1:{DRAFT}"
        return [
            (WorkerConfig(draft, port=DRAFT), engine_main.main),
            (
                WorkerConfig(decode, port=DECODE, metrics_port=METRICS, registry=known),
                engine_main.main,
            ),
        ]


@contextlib.contextmanager
def running(workers: Sequence[tuple[WorkerConfig, Engine]]) -> Iterator[None]:
    """The processes of these workers, killed at the end."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_worker, args=worker) for worker in workers]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


async def answered(session: DecodeSession, name: str, batch: int, count: int) -> dict[str, Any]:
    """Of a batch of answers of `count` tokens that begin together; their first tokens do not count, but in
    `whole_ms`. A head in the target's worker drafts before these tokens are known, another one behind them.
    """
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    left, asked = {f"{name} {i}" for i in range(batch)}, time.perf_counter()
    for i, id in enumerate(sorted(left)):
        session.submit(GenerationRequest(id, tuple(range(100 + i, 100 + i + PROMPT)), params), 1, False)
    began, rounds, tokens, offered = 0.0, 0, 0, 0
    watched, times = min(left), list[float]()
    async with contextlib.aclosing(aiter(session)) as events:
        async for event in events:
            for entry in event.entries if isinstance(event, StepReply) else ():
                began = began or time.perf_counter()
                if entry.id == watched:
                    times.append(time.perf_counter())
                rounds += entry.index > 0
                tokens += len(entry.tokens) if entry.index else 0
                offered += bool(entry.offered)
                left -= {entry.id} if entry.finish is not None else set()
            if not left:
                break
    ended = time.perf_counter()
    seconds = ended - began
    return {
        "whole_ms": round(1e3 * (ended - asked), 1),
        "round_ms": round(1e3 * seconds * batch / rounds, 3),
        **pace(times),
        "tokens_per_round": round(tokens / rounds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "drafted": round(offered / rounds, 3),
    }


def pace(times: Sequence[float]) -> dict[str, Any]:
    """Of the moments when one sequence's tokens came: the median round, and by how much all rounds together
    took longer than as many of those. What an answer's beginning costs is there and in the first rounds, and
    in no median.
    """
    gaps = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
    if not gaps:
        return {}
    steady = statistics.median(gaps)
    beyond, first = round(sum(gaps) - steady * len(gaps), 1), [round(gap, 1) for gap in gaps[:FIRST]]
    return {"steady_ms": round(steady, 3), "beyond_ms": beyond, "first_ms": first}


def counted(name: str, port: int) -> dict[str, float]:
    """What a worker's page of metrics says of this counter so far, by its one label ("" without);
    the model's name aside.
    """
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    page = re.sub(r'model_name="[^"]*",?', "", page).replace("{}", "")
    rows = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return {row.split('"')[1] if '"' in row else "": float(row.split()[-1]) for row in rows}


def commits(port: int) -> dict[str, float]:
    """Commits so far by path, as a decode worker's page says."""
    return counted("eyas_draft_commits_total", port)


async def until_drafting(session: DecodeSession, drafted: float) -> None:
    """Answers small batches until the worker is there, and that share of its rounds has drafts."""
    for number in range(1000):
        async with asyncio.timeout(START_S):
            found = await answered(session, f"warm {number}", 1, 96)
        if found["drafted"] >= drafted:
            return
    raise TimeoutError("no drafts came")


async def measured(setting: Setting, way: str) -> AsyncGenerator[dict[str, Any], None]:
    """A line per batch."""
    address = f"127.0.0.1:{DECODE}"
    with running(setting.workers(way)):
        async with rpc.channel(address) as channel, ready(channel, address) as session:
            for batch in setting.batches:
                async with asyncio.timeout(ANSWER_S):
                    await answered(session, f"learn {batch}", batch, setting.tokens)
                    await asyncio.sleep(PAGE_S)
                    before = commits(METRICS)
                    found = await answered(session, f"count {batch}", batch, setting.tokens)
                    await asyncio.sleep(PAGE_S)
                paths = {path: total - before.get(path, 0.0) for path, total in commits(METRICS).items()}
                yield {"way": way, "batch": batch, **found, "commits": paths}


@contextlib.asynccontextmanager
async def opened(channel: grpc.aio.Channel, address: str) -> AsyncIterator[DecodeSession]:
    """A session, closed at the end, and so are the tasks that gRPC has for it."""
    session = DecodeSessionClient(channel, address).open()
    try:
        yield session
    finally:
        session.close()
        await asyncio.sleep(CLOSED_S)


@contextlib.asynccontextmanager
async def ready(
    channel: grpc.aio.Channel, address: str, drafted: float = DRAFTED
) -> AsyncIterator[DecodeSession]:
    """A session with the worker, once that share of its rounds has drafts."""
    began = False
    async with asyncio.timeout(START_S):
        await channel.channel_ready()
    deadline = time.monotonic() + START_S
    while not began:
        async with opened(channel, address) as session:
            with contextlib.suppress(EyasError):  # it is still loading
                await until_drafting(session, drafted)
                began = True
            if began:
                yield session
        if time.monotonic() > deadline:
            raise TimeoutError("the worker does not come")
        await asyncio.sleep(0.5)


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row per batch and way, and its tokens per second over those of a colocated head."""
    alone = {line["batch"]: line["tokens_per_s"] for line in lines if line["way"] == COLOCATED}
    names = f"{'batch':>5} {'way':>9}", f"{'round ms':>9} {'steady':>7} {'tokens':>7} {'drafted':>8}"
    yield " ".join((*names, f"{'tokens/s':>9} ratio"))
    for line in sorted(lines, key=lambda line: (line["batch"], line["way"])):
        ratio = line["tokens_per_s"] / alone[line["batch"]] if line["batch"] in alone else 0.0
        rounds = f"{line['round_ms']:>9.3f} {line.get('steady_ms', 0.0):>7.3f}"
        figures = f"{rounds} {line['tokens_per_round']:>7.2f} {line['drafted']:>8.2f}"
        case = f"{line['batch']:>5} {line['way']:>9}"
        yield f"{case} {figures} {line['tokens_per_s']:>9.0f} {ratio:.3f}"


def setting_of(given: argparse.Namespace, folder: Path) -> Setting:
    """On GPUs a shape without weights; on a CPU the embedded model, whose drafts are judged as they are."""
    most = max(given.batches)
    pages = most * (PROMPT + given.tokens + 64) // 16 + 64
    options: dict[str, Any] = {"max_running": most, "num_pages": pages}
    steps, length = BLOCK if given.block else CHAIN
    if given.device == "cpu":
        return Setting(
            "cpu",
            given.tokens,
            given.batches,
            options | {"speculation": SpeculationConfig(steps, 1, steps + 1)},
        )
    model, head = folder / "model", folder / "head"
    kind = "--block-head" if given.block else "--head"
    shape = ["-m", "eyas.bench.shapes", given.shape, str(model), kind, str(head)]
    subprocess.run([sys.executable, *shape], check=True)
    spec = SpeculationConfig(steps, 1, steps + 1, synthetic_rates=resolve(steps, (), length))
    options |= {"model": str(model), "draft": str(head), "load_format": "dummy", "speculation": spec}
    options |= {"context_length": 2048, "prefill_attention_backend": "triton"}
    return Setting("cuda", given.tokens, given.batches, options)


async def measure(setting: Setting, given: argparse.Namespace) -> None:
    """Every way, each with workers of its own."""
    for way in (COLOCATED, *given.ways):
        async with contextlib.aclosing(measured(setting, way)) as lines:
            async for line in lines:
                append_line(given.out, line)
                print(line, flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ways", choices=list(TRANSFER), nargs="+", default=list(TRANSFER))
    parser.add_argument("--tokens", type=int, default=384, help="per answer (384)")
    parser.add_argument("--block", action="store_true", help="a head that drafts all in one pass (GPUs)")
    parser.add_argument("--report", action="store_true", help="only print the table of what FILE has")
    given = parser.parse_args()
    if not given.report:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(setting_of(given, Path(folder)), given))
    print(*report([json.loads(line) for line in given.out.read_text().splitlines()]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
