"""`python -m tests.chaos.rolling`: every process of a cluster is restarted in turn, under load.

Each gets SIGTERM, may take its drain time, and is started again: workers first, the gateway last. Streams ask
all the time. None may fail or change its text, but those whose gateway leaves: they end with an error event
and [DONE], or were refused before they began. No supervisor runs here: what comes back was started
here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from eyas.cluster.child import ChildProcess
from eyas.cluster.plan import ClusterPlan, HostResources, gateway_argv, plan, worker_argv
from eyas.common.cluster.listening import free_ports
from eyas.common.config import GatewayConfig, ServeConfig, WorkerConfig
from eyas.common.types import GenerationRequest, Role
from tests.chaos.streams import make_requests

GATEWAY = "gateway"
DRAIN_S = 30.0  # of a worker
GATEWAY_DRAIN_S = 1.0  # less than a long answer takes: some are cut
START_S = 90.0
ANSWER_S = 120.0
SETTLE_S = 1.0  # between one restart and the next, for answers that show it
REFUSED_PAUSE_S = 0.1


@dataclass(frozen=True)
class Seen:
    """One stream. `error`: an error event's, a refusal's or the connection's; `ended`: [DONE] came last."""

    request: str
    began: float  # monotonic seconds
    over: float
    text: str = ""
    error: str = ""
    status: int = 0  # 0: no answer
    ended: bool = False


@dataclass(frozen=True)
class Restart:
    """From SIGTERM (`began`, monotonic) over the process's end to its serving again."""

    name: str
    began: float
    gone: float
    back: float
    code: int


class ByHand:
    """The processes of a plan, each started and ended by itself.

    `start` and `restart` raise AssertionError if the cluster is not whole in time.
    """

    def __init__(self, made: ClusterPlan) -> None:
        self._plan = made
        self.log: list[str] = []
        commands = {name: worker_argv(worker) for name, worker in made.workers.items()}
        commands[GATEWAY] = gateway_argv(made.gateway)
        self._children = {
            name: ChildProcess(name, (sys.executable, "-m", "eyas.cli", *argv), self._heard)
            for name, argv in commands.items()
        }
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{made.gateway.port}", timeout=ANSWER_S, trust_env=False
        )

    async def start(self) -> None:
        for child in self._children.values():
            child.start()
        await self._whole()

    async def close(self) -> None:
        await self.http.aclose()
        await asyncio.gather(*(child.stop(DRAIN_S + 10) for child in self._children.values()))

    async def restart(self, name: str) -> Restart:
        before = (await self._epochs()).get(name, "")
        child, began = self._children[name], time.monotonic()
        await child.stop(DRAIN_S + 10)
        gone, code = time.monotonic(), child.returncode
        child.start()
        await self._whole(but=before)
        return Restart(name, began, gone, time.monotonic(), code or 0)

    async def _whole(self, but: str = "") -> None:
        """Until the gateway would serve a request, by any worker, none of which has the epoch `but`."""
        deadline = time.monotonic() + START_S
        while len(epochs := await self._epochs()) < len(self._plan.workers) or but in epochs.values():
            assert time.monotonic() < deadline, "not whole in time:\n" + "\n".join(self.log[-40:])
            await asyncio.sleep(0.2)

    async def _epochs(self) -> dict[str, str]:
        """By name, of the workers that the gateway sends requests to; of none while it refuses them."""
        names = {worker.address: name for name, worker in self._plan.workers.items()}
        with contextlib.suppress(httpx.TransportError):
            if (await self.http.get("/health", timeout=5)).status_code == 200:
                workers = (await self.http.get("/cluster", timeout=5)).json()["workers"]
                serving = [w for w in workers if w["serving"]]
                able = [w for w in serving if w["connected"] or Role.DECODE not in w["roles"]]
                return {names[w["worker"]]: w["epoch"] for w in able}
        return {}

    def _heard(self, name: str, line: str) -> None:
        self.log.append(f"[{name}] {line}")


# --- streams -------------------------------------------------------------------------------------------


async def ask(http: httpx.AsyncClient, request: GenerationRequest) -> Seen:
    """One streamed completion, read to its end, whatever that is."""
    body = {"model": GatewayConfig.served_model, "prompt": request.prompt_ids, "stream": True}
    params = {k: v for k, v in msgspec.to_builtins(request.params).items() if k in SENT}
    seen = Seen(request.id, time.monotonic(), 0.0)
    lines: list[str] = []
    try:
        async with http.stream("POST", "/v1/completions", json=body | params) as reply:
            seen = dataclasses.replace(seen, status=reply.status_code)
            lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
    except httpx.TransportError as error:
        seen = dataclasses.replace(seen, error=repr(error))
    ended = lines[-1:] == ["[DONE]"]
    events: list[Any] = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    errors = [event["error"]["message"] for event in events if "error" in event]
    said = "; ".join([*errors, *filter(None, [seen.error])])
    return dataclasses.replace(seen, over=time.monotonic(), text=text, error=said, ended=ended)


SENT = {"max_tokens", "temperature", "top_p", "seed", "ignore_eos"}


class Load:
    """`width` streams at a time, until `finish`."""

    def __init__(self, http: httpx.AsyncClient, requests: Sequence[GenerationRequest], seed: int) -> None:
        self._http = http
        self._requests = requests
        self._seed = seed
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.seen: list[Seen] = []

    def start(self, width: int) -> None:
        self._tasks = [asyncio.create_task(self._ask_on(number)) for number in range(width)]

    async def finish(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _ask_on(self, number: int) -> None:
        rng = random.Random(f"rolling/{self._seed}/{number}")
        while not self._over:
            seen = await ask(self._http, rng.choice(self._requests))
            self.seen.append(seen)
            if seen.error:
                await asyncio.sleep(REFUSED_PAUSE_S)


# --- the course of events, and what is made of it ------------------------------------------------------


@dataclass(frozen=True)
class Findings:
    restarts: list[Restart]
    seen: list[Seen]
    problems: list[str]


def judge(restarts: Sequence[Restart], seen: Sequence[Seen], expected: dict[str, str]) -> list[str]:
    """A line for everything that should not have been."""
    wrong = [f"{r.name} ended with code {r.code}" for r in restarts if r.code]
    away = [(r.began, r.back) for r in restarts if r.name == GATEWAY]
    for s in seen:
        told = f"stream {s.request} of {s.over - s.began:.1f} s (status {s.status})"
        if not s.error:
            if not s.ended or s.text != expected[s.request]:
                wrong.append(f"{told} gave another text" if s.ended else f"{told} had no [DONE]")
        elif not any(began <= s.over and s.began <= back for began, back in away):
            wrong.append(f"{told} failed with the gateway in place: {s.error}")
        elif s.status == 200 and not (s.ended and expected[s.request].startswith(s.text)):
            wrong.append(f"{told} did not end with an error event and [DONE]: {s.error}")
        elif s.status not in (0, 200, 503):
            wrong.append(f"{told}: {s.error}")
    if not any(s.over > r.began for r in restarts for s in seen):
        wrong.append("no stream saw a restart")
    return wrong


@contextlib.asynccontextmanager
async def by_hand(config: ServeConfig) -> AsyncIterator[ByHand]:
    """A cluster that serves; afterwards nothing of it is left, or AssertionError."""
    with tempfile.TemporaryDirectory(prefix="eyas-rolling-", dir=config.engine.pool_dir) as pools:
        engine = dataclasses.replace(config.engine, pool_dir=pools)
        ports = free_ports()
        gateway = GatewayConfig(port=next(ports), grpc_port=next(ports), drain_s=GATEWAY_DRAIN_S)
        made = plan(
            dataclasses.replace(config, gateway=gateway, engine=engine), ports, HostResources(cores=1)
        )
        cluster = ByHand(dataclasses.replace(made, workers=_draining(made.workers)))
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.close()
        assert not list(Path(pools).iterdir()), "pools are left"


def _draining(workers: dict[str, WorkerConfig]) -> dict[str, WorkerConfig]:
    return {name: dataclasses.replace(worker, drain_s=DRAIN_S) for name, worker in workers.items()}


async def roll(config: ServeConfig, names: Sequence[str], width: int, seed: int) -> Findings:
    """Restarts the named processes one after the other while `width` streams ask."""
    requests = await make_requests(2 * width, seed)
    async with by_hand(config) as cluster:
        calm = await asyncio.gather(*(ask(cluster.http, request) for request in requests))
        expected = {seen.request: seen.text for seen in calm}
        problems = [f"undisturbed, {seen.request} failed: {seen.error}" for seen in calm if seen.error]
        load = Load(cluster.http, requests, seed)
        load.start(width)
        restarts = []
        for name in names:
            await asyncio.sleep(SETTLE_S)
            restarts.append(await cluster.restart(name))
        await asyncio.sleep(SETTLE_S)
        await load.finish()
    return Findings(restarts, load.seen, problems + judge(restarts, load.seen, expected))


def report(findings: Findings) -> Table:
    """A row for each restart: what it took, and the streams that ended meanwhile."""
    table = Table(
        "process", "left after", "back after", "streams", "whole", "cut", "refused",
        title="A rolling restart",
    )  # fmt: skip
    for r in findings.restarts:
        met = [s for s in findings.seen if r.began <= s.over <= r.back]
        cut = sum(bool(s.error) and s.status == 200 for s in met)
        refused = sum(bool(s.error) and s.status != 200 for s in met)
        times = f"{r.gone - r.began:.1f} s", f"{r.back - r.began:.1f} s"
        counts = len(met), sum(not s.error for s in met), cut, refused
        table.add_row(r.name, *times, *map(str, counts))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.rolling", description="A rolling restart.")
    parser.add_argument("--streams", type=int, default=8, help="at a time (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=1, help="of what is asked")
    given = parser.parse_args()
    config = ServeConfig(layout="split", prefill=2, decode=2, draft_workers=1)
    names = [*plan(config, itertools.count(1), HostResources(cores=1)).workers, GATEWAY]
    findings = asyncio.run(roll(config, names, given.streams, given.seed))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(report(findings))
    console.print(f"{len(findings.seen)} streams, {len(findings.problems)} problems")
    for problem in findings.problems:
        console.print(f"[red]{problem}", highlight=False)
    return int(bool(findings.problems))


if __name__ == "__main__":
    sys.exit(main())
