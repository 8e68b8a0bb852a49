"""Ways to answer the same requests: engines in this process, or a whole cluster over gRPC.

A way knows how to start, ask and stop. It does not know what the answers should be.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import msgspec

from eyas.client import AsyncClient, Completion
from eyas.cluster.serve import LocalCluster
from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig, GatewayConfig, ServeConfig
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.ipc.messages import CancelGeneration, FlushCache
from eyas.engine.speculation.drafters.base import Drafter
from tests.unit.loopback import Loopback, Result, wait_all

ANSWER_S = 300.0  # one answer, with 31 others beside it, on a busy machine
LOOK_S = 0.002  # between two looks at how far an answer has come

# By request id its output ids, or (id, log-probability) where it asks for those.
Tokens = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Task:
    """What to ask. `expected`: the answers, for drafters that know them; `done`: one more was given."""

    requests: tuple[GenerationRequest, ...]
    expected: Tokens
    done: Callable[[], None]


@dataclass(frozen=True)
class Answers:
    """What came, and how: verify steps, the drafts that they accepted, sequences that were preempted, and
    those that resumed from a cached state.
    """

    tokens: Tokens
    verify_steps: int
    accepted: int
    preemptions: int = 0
    resumed: int = 0

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.verify_steps if self.verify_steps else 0.0


class Way(ABC):
    @abstractmethod
    def serve(self, task: Task) -> Answers:
        """Answers all of `task`. Raises if a request fails or does not end."""


@dataclass(frozen=True)
class InProcess(Way):
    """Engines on threads: one that does everything, or a prefill, a decode and a draft engine.

    `foretold`: every request predicts its answer, but for a few tokens of it. `before`: requests that were
    answered when the others come, so that what they leave is cached.
    """

    configs: tuple[EngineConfig, ...]
    at_once: int
    drafter: Callable[[Tokens], Drafter] | None = None  # takes the place of the engine's own
    foretold: bool = False
    before: tuple[GenerationRequest, ...] = ()

    def serve(self, task: Task) -> Answers:
        with self._drafting(task), contextlib.closing(Loopback(*self.configs)) as cluster:
            self._begin(cluster)

            def ask(request: GenerationRequest) -> list[Result]:
                if self.foretold:
                    request = _foretold(request, task.expected[request.id])
                results = self._ask(cluster, request)
                task.done()
                return results

            with ThreadPoolExecutor(self.at_once) as callers:
                answers = list(callers.map(ask, task.requests))
        rounds = [entry for parts in answers for part in parts for entry in part.entries if entry.offered]
        workers = list(cluster.workers.values())
        return Answers(
            tokens={r.id: answered(parts) for r, parts in zip(task.requests, answers, strict=True)},
            verify_steps=len(rounds),
            accepted=sum(entry.accepted for entry in rounds),
            preemptions=sum(worker.load.preemptions for worker in workers if worker.load),
            resumed=sum(worker.load.states.hits for worker in workers if worker.load),
        )

    def _begin(self, cluster: Loopback) -> None:
        """What is done before the requests come."""
        for request in self.before:
            self._ask(cluster, request)

    def _ask(self, cluster: Loopback, request: GenerationRequest) -> list[Result]:
        """The parts of its answer, one after the other."""
        result = cluster.submit(request, split=len(self.configs) > 1)
        wait_all([result], ANSWER_S)
        return [result]

    def _drafting(self, task: Task) -> contextlib.AbstractContextManager[object]:
        if self.drafter is None:
            return contextlib.nullcontext()
        drafter = self.drafter(task.expected)
        return mock.patch("eyas.engine.loading.build._drafter", lambda *_: drafter)


@dataclass(frozen=True)
class Uncached(InProcess):
    """One engine, one request after the other; none finds anything of those before it."""

    def _ask(self, cluster: Loopback, request: GenerationRequest) -> list[Result]:
        (worker,) = cluster.workers.values()
        worker.send(FlushCache(1, ANSWER_S))
        return super()._ask(cluster, request)


@dataclass(frozen=True)
class Moved(InProcess):
    """Two engines that do everything: each answer is begun at the first, and goes on at the second."""

    def _ask(self, cluster: Loopback, request: GenerationRequest) -> list[Result]:
        first, second = cluster.workers
        begun = cluster.submit(request, split=False, at=first)
        count = 1 + zlib.crc32(request.id.encode()) % (request.params.max_tokens - 1)
        deadline = time.monotonic() + ANSWER_S
        while len(begun.tokens.get(0, ())) < count and begun.failure is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        cluster.workers[first].send(CancelGeneration(request.id))
        have = tuple(begun.tokens[0])
        if begun.finishes:
            return [begun]
        choice = RequestChoice(0, have)
        moved = msgspec.structs.replace(request, id=f"{request.id}, moved", choices=(choice,))
        result = cluster.submit(moved, split=False, at=second)
        wait_all([result], ANSWER_S)
        return [begun, result]


def answered(parts: Sequence[Result]) -> tuple[Any, ...]:
    """What an answer's parts gave: ids, or (id, log-probability) if those came."""
    found: dict[int, Any] = {}
    for entry in [entry for part in parts for entry in part.entries]:
        scores = [one and one.logprob for one in entry.logprobs]
        said = zip(entry.tokens, scores, strict=True) if scores else entry.tokens
        for index, one in enumerate(said, entry.index):
            found.setdefault(index, one)
    return tuple(found[index] for index in sorted(found))


def _foretold(request: GenerationRequest, answer: tuple[Any, ...]) -> GenerationRequest:
    """Some tokens into the answer two are wrong, later one is missing."""
    answer = tuple(one if isinstance(one, int) else one[0] for one in answer)
    told = (*answer[:5], 0, 0, *answer[7:15], *answer[16:])
    return msgspec.structs.replace(request, predicted=told)


@dataclass(frozen=True)
class Services(Way):
    """`eyas serve`: every service a process of its own, asked through the gateway's gRPC front."""

    config: ServeConfig
    at_once: int

    def serve(self, task: Task) -> Answers:
        return asyncio.run(self._serve(task))

    async def _serve(self, task: Task) -> Answers:
        ports = free_ports()
        gateway = GatewayConfig(port=next(ports), grpc_port=next(ports))
        config = replace(self.config, gateway=gateway)
        places = asyncio.Semaphore(self.at_once)
        async with LocalCluster(config, log=lambda name, line: None) as cluster:
            async with AsyncClient(cluster.grpc_address, timeout_s=ANSWER_S) as client:

                async def ask(request: GenerationRequest) -> Completion:
                    async with places:
                        options = msgspec.to_builtins(request.params)
                        answer = await client.generate(request.prompt_ids, **options)
                    task.done()
                    return answer

                answers = await asyncio.gather(*map(ask, task.requests))
        usages = [answer.usage for answer in answers]
        return Answers(
            tokens={r.id: a.choices[0].tokens for r, a in zip(task.requests, answers, strict=True)},
            verify_steps=sum(usage.verify_steps for usage in usages),
            accepted=sum(usage.accepted_prediction_tokens for usage in usages),
        )
