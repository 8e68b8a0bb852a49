"""Every worker is killed at once in mid-campaign: what a shared store gives the ones that come after them.

`python -m tests.e2e.cold_restart [--no-store]`: conversations grow turn by turn, through a whole cluster;
SIGKILL takes all workers when some of them are over, and the supervisor starts new ones. It compares every
answer with those of a cluster that nothing disturbed, and the cached part of prompts before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import httpx

from eyas.cluster.serve import LocalCluster
from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig, GatewayConfig, ServeConfig
from tests.rpc.redis_server import redis_server

PROMPT, NEW, ANSWER, TURNS = 480, 40, 8, 10  # tokens; and turns of a conversation
WINDOW_S = 5.0
GIVE_UP_S = 120.0
ON_ITS_WAY_S = 0.5  # for an answer of a dead worker, and less than a new one takes to start
PAUSE_S = 0.1  # between tries while there is no worker
IDS = range(300, 4000)

Key = tuple[int, int]  # a conversation, and its turn


@dataclass(frozen=True)
class Turn:
    """A turn's answer. Times are monotonic seconds."""

    began: float
    over: float
    ids: tuple[int, ...]
    prompt: int
    cached: int


@dataclass
class Campaign:
    """Conversations, `width` of them at a time. `kill`: called once, when `kill_at` of all turns are over."""

    url: str
    conversations: int
    width: int
    kill: Callable[[], None] | None = None
    kill_at: float = 0.35
    turns: dict[Key, Turn] = field(default_factory=dict)
    killed: float = 0.0  # when

    async def run(self) -> Campaign:
        line = iter(range(self.conversations))
        async with httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False) as http:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.width):
                    group.create_task(self._converse(http, line))
        return self

    async def _converse(self, http: httpx.AsyncClient, line: Iterator[int]) -> None:
        for number in line:
            draw = random.Random(number)
            ids = draw.choices(IDS, k=PROMPT)
            for place in range(TURNS):
                ids += draw.choices(IDS, k=NEW)
                turn = await self._ask(http, ids)
                self.turns[number, place] = turn
                ids += turn.ids
                over = len(self.turns) / (self.conversations * TURNS)
                if self.kill is not None and not self.killed and over >= self.kill_at:
                    self.killed = time.monotonic()
                    self.kill()

    async def _ask(self, http: httpx.AsyncClient, ids: list[int]) -> Turn:
        """A client that tries again until it has an answer."""
        began = time.monotonic()
        body = {
            "model": GatewayConfig.served_model,
            "prompt": ids,
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        while True:
            tried = time.monotonic()
            assert tried < began + GIVE_UP_S, "no worker answers"
            reply = await http.post("/v1/completions", json=body)
            if reply.status_code == 200:
                said = reply.json()
                cached = (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                answer = tuple(said["choices"][0]["token_ids"])
                return Turn(tried, time.monotonic(), answer, len(ids), cached)
            assert reply.status_code in (429, 500, 502, 503, 504), reply.text
            await asyncio.sleep(PAUSE_S)

    def hit_rate(self, begin: float, end: float) -> float:
        """The cached part of prompts that were answered between these moments, first turns aside."""
        some = [t for (_, place), t in self.turns.items() if place and begin <= t.over < end]
        return sum(t.cached for t in some) / max(sum(t.prompt for t in some), 1)

    @property
    def back(self) -> float:
        """When the first request was answered behind the kill, and behind what was on its way then."""
        return min(turn.over for turn in self.turns.values() if turn.over > self.killed + ON_ITS_WAY_S)


@dataclass(frozen=True)
class Finding:
    """Hit rates before the kill and in the seconds after the cluster is back; answers that differ."""

    before: float
    after: float
    later: float
    away_s: float
    changed: int
    answers: int

    def __str__(self) -> str:
        return (
            f"{self.answers} answers, {self.changed} changed; away for {self.away_s:.1f} s; cached of "
            f"prompts: {self.before:.1%} before, {self.after:.1%} in the first {WINDOW_S:g} s, "
            f"{self.later:.1%} later"
        )


def config(store: str | None) -> ServeConfig:
    """A split cluster of the embedded model."""
    engine = EngineConfig(draft=None, num_pages=512, max_running=8)
    if store is not None:
        engine = replace(engine, host_cache_gb=0.4, kv_store=store)
    ports = free_ports()
    gateway = GatewayConfig(port=next(ports), grpc_port=next(ports))
    return ServeConfig(layout="split", prefill=1, decode=1, draft_workers=0, engine=engine, gateway=gateway)


async def answered(
    given: ServeConfig, conversations: int, width: int, *, kills: bool, heard: list[str]
) -> Campaign:
    """A campaign through a cluster of its own. `heard`: what its processes say."""
    async with LocalCluster(given, lambda name, line: heard.append(f"[{name}] {line}")) as cluster:

        def kill() -> None:
            for name, pid in cluster.pids.items():
                if name in cluster.addresses:
                    os.kill(pid, signal.SIGKILL)

        return await Campaign(cluster.url, conversations, width, kill if kills else None).run()


async def undisturbed(conversations: int, width: int) -> Campaign:
    """The campaign that the disturbed one is compared with."""
    return await answered(config(None), conversations, width, kills=False, heard=[])


async def compare(plain: Campaign, *, store: bool) -> Finding:
    """A disturbed campaign beside the undisturbed one."""
    async with redis_server() as server:
        given = config(server.url if store else None)
        seen = await answered(given, plain.conversations, plain.width, kills=True, heard=[])
    changed = sum(seen.turns[key].ids != turn.ids for key, turn in plain.turns.items())
    back = seen.back
    return Finding(
        before=seen.hit_rate(0.0, seen.killed),
        after=seen.hit_rate(back, back + WINDOW_S),
        later=seen.hit_rate(back + WINDOW_S, float("inf")),
        away_s=back - seen.killed,
        changed=changed,
        answers=len(plain.turns),
    )


def main() -> int:
    """The command line; 1 if an answer changed or the hit rate is not back."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.cold_restart", description=__doc__)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--width", type=int, default=6, help="conversations at a time")
    parser.add_argument("--no-store", action="store_true")
    given = parser.parse_args()

    async def run() -> Finding:
        plain = await undisturbed(given.conversations, given.width)
        return await compare(plain, store=not given.no_store)

    found = asyncio.run(run())
    print(found)
    return int(found.changed > 0 or found.after < 0.9 * found.before)


if __name__ == "__main__":
    sys.exit(main())
