"""New weights under load on a split cluster whose workers are killed in every phase of an update.

    python -m tests.e2e.weight_chaos [--rounds 12] [--seed 0]

Two sets of weights, A (the start's) and B, take turns by `/update_weights_from_disk`, while streams ask; in
each round a worker gets SIGKILL a random time after the update has begun, or when it is closed, or when
another one has committed. An update may fail, and then names why. Every answer must be the one of the
weights that it says it is of, as computed by a cluster that was started on them and never changed. After each
round the cluster must serve one version again. It prints one line per round, and exits with 1 for a mix.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from eyas.cluster.serve import LocalCluster
from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig, GatewayConfig, ServeConfig
from eyas.common.errors import EyasError
from eyas.common.types import WeightsInfo
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient
from tests.e2e.served import make_folders

PROMPTS = [[7 + (11 * i + 3 * j) % 3000 for j in range(30 + 9 * i)] for i in range(6)]
ORDINARY = {200, 409, 502, 503, 504}
"""Statuses of a request that is answered, or hears why it was not."""
SETTLE_S = 60.0
MOMENTS = ("prepare", "close", "commit")

Answers = dict[tuple[str, int], list[int]]
"""Ids by set and prompt."""


@dataclass
class Round:
    """What became of an update."""

    moment: str
    killed: str
    success: bool
    message: str
    settled_s: float


@dataclass
class Findings:
    """Over all rounds."""

    rounds: list[Round] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)  # by set
    statuses: Counter[int] = field(default_factory=Counter)
    mixed: list[str] = field(default_factory=list)


def config(model: str) -> ServeConfig:
    """A split cluster: one worker computes prompts, two decode."""
    engine = EngineConfig(model=model, draft=None, num_pages=512, max_running=8)
    ports = free_ports()
    gateway = GatewayConfig(port=next(ports), grpc_port=next(ports))
    return ServeConfig(layout="split", prefill=1, decode=2, draft_workers=0, engine=engine, gateway=gateway)


def folders(parent: Path) -> tuple[Path, Path]:
    """A and B."""
    first = Path(make_folders(parent).model)
    second = parent / "B"
    shutil.copytree(first, second)
    stored, chance = load_file(second / "model.safetensors"), torch.Generator().manual_seed(5)
    for name, tensor in stored.items():
        stored[name] = tensor + 0.2 * tensor.std() * torch.randn(tensor.shape, generator=chance)
    save_file(stored, second / "model.safetensors")
    return first, second


async def generate(http: httpx.AsyncClient, prompt: int, tokens: int) -> httpx.Response:
    """One request."""
    sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPTS[prompt], "sampling_params": sampling}
    return await http.post("/generate", json=body)


async def alone(model: Path, name: str, tokens: int) -> Answers:
    """What a cluster answers that was started on these weights."""
    answers: Answers = {}
    async with LocalCluster(config(str(model)), lambda *_: None) as cluster, client(cluster) as http:
        for prompt in range(len(PROMPTS)):
            answers[name, prompt] = (await generate(http, prompt, tokens)).json()["output_ids"]
    return answers


def client(cluster: LocalCluster) -> httpx.AsyncClient:
    """For the cluster's HTTP."""
    return httpx.AsyncClient(base_url=cluster.url, timeout=120, trust_env=False)


class Chaos:
    """A campaign. `sets`: A and B; `expected`: their answers."""

    def __init__(self, sets: dict[str, Path], expected: Answers, tokens: int, seed: int) -> None:
        self._sets, self._expected, self._tokens = sets, expected, tokens
        self._dice = random.Random(seed)
        self._over = False
        self.findings = Findings()

    async def run(self, rounds: int) -> Findings:
        """All rounds."""
        async with LocalCluster(config(str(self._sets["A"])), lambda *_: None) as cluster:
            async with client(cluster) as http:
                streams = [asyncio.create_task(self._stream(http, i)) for i in range(len(PROMPTS))]
                for number in range(rounds):
                    self.findings.rounds.append(await self._round(cluster, http, number))
                    print(f"{number:3} {self.findings.rounds[-1]}", flush=True)
                self._over = True
                await asyncio.gather(*streams)
        return self.findings

    def named(self, version: str) -> str:
        """The set of weights of a version."""
        return "A" if version == "default" else version[-1]

    async def _stream(self, http: httpx.AsyncClient, prompt: int) -> None:
        while not self._over:
            response = await generate(http, prompt, self._tokens)
            self.findings.statuses[response.status_code] += 1
            if response.status_code != 200:
                await asyncio.sleep(0.1)
                continue
            answer = response.json()
            name = answer["meta_info"]["weight_version"]
            own = self.named(name)
            self.findings.answers[own] += 1
            if answer["output_ids"] != self._expected[own, prompt]:
                self.findings.mixed.append(f"prompt {prompt} of {name}")

    async def _round(self, cluster: LocalCluster, http: httpx.AsyncClient, number: int) -> Round:
        name, moment = f"{number}{'BA'[number % 2]}", MOMENTS[number % len(MOMENTS)]
        victim = self._dice.choice(sorted(cluster.addresses))
        body = {
            "model_path": str(self._sets[name[-1]]),
            "weight_version": name,
            "running": self._dice.choice(("drain", "restart", "abort")),
            "timeout": 20,
        }
        update = asyncio.create_task(http.post("/update_weights_from_disk", json=body))
        await self._wait_for(moment, cluster, victim, update)
        if (pid := cluster.pids.get(victim)) is not None:
            os.kill(pid, signal.SIGKILL)
        outcome: dict[str, Any] = (await update).json()
        began = time.monotonic()
        await self._settled(cluster, http)
        return Round(moment, victim, outcome["success"], outcome["message"], time.monotonic() - began)

    async def _wait_for(
        self, moment: str, cluster: LocalCluster, victim: str, update: asyncio.Task[httpx.Response]
    ) -> None:
        """Until the moment of the update has come, or it is over."""
        if moment == "prepare":
            await asyncio.sleep(self._dice.uniform(0.0, 0.1))
            return
        others = [address for name, address in cluster.addresses.items() if name != victim]
        before = await weights(cluster.addresses[victim])
        while not update.done():
            if moment == "close" and (own := await weights(cluster.addresses[victim])) and own.closed:
                return
            if moment == "commit":
                seen = [await weights(other) for other in others]
                if before and any(one and one.generation > before.generation for one in seen):
                    return
            await asyncio.sleep(0.002)

    async def _settled(self, cluster: LocalCluster, http: httpx.AsyncClient) -> None:
        """Waits until all workers serve one version, and a request is answered."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                seen = [await weights(address) for address in cluster.addresses.values()]
                one = all(seen) and len({each.digest for each in seen if each}) == 1
                if one and not any(each.closed for each in seen if each):
                    response = await generate(http, 0, 1)
                    if response.status_code == 200:
                        return
                await asyncio.sleep(0.1)


async def weights(address: str) -> WeightsInfo | None:
    """Those of a worker, if it answers and is loaded."""
    async with rpc.channel(address) as channel:
        try:
            info = await InfoClient(channel).info(1.0)
        except EyasError:
            return None
    return None if info.starting else info.weights


async def campaign(rounds: int, seed: int, tokens: int = 24) -> Findings:
    """A campaign in a folder of its own."""
    with tempfile.TemporaryDirectory() as parent:
        first, second = folders(Path(parent))
        expected = await alone(first, "A", tokens) | await alone(second, "B", tokens)
        assert expected["A", 0] != expected["B", 0]
        return await Chaos({"A": first, "B": second}, expected, tokens, seed).run(rounds)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    findings = asyncio.run(campaign(args.rounds, args.seed))
    done = sum(one.success for one in findings.rounds)
    print(f"{done} of {len(findings.rounds)} updates succeeded; answers {dict(findings.answers)}")
    mixed = ", ".join(findings.mixed[:6]) or "none"
    print(f"statuses {dict(findings.statuses)}; {len(findings.mixed)} mixed: {mixed}")
    return 1 if findings.mixed or not set(findings.statuses) <= ORDINARY else 0


if __name__ == "__main__":
    sys.exit(main())
