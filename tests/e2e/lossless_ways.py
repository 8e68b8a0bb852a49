"""Ways to answer the same requests: engines in this process, or a whole cluster over gRPC.

A way knows how to start, ask and stop. It does not know what the answers should be.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from unittest import mock

import msgspec

from eyas.client import AsyncClient, Completion
from eyas.cluster.serve import LocalCluster
from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig, GatewayConfig, ServeConfig
from eyas.common.types import GenerationRequest
from eyas.engine.speculation.drafters.base import Drafter
from tests.unit.loopback import Loopback, Result, wait_all

ANSWER_S = 300.0  # one answer, with 31 others beside it, on a busy machine

Tokens = Mapping[str, tuple[int, ...]]  # output ids by request id


@dataclass(frozen=True)
class Task:
    """What to ask. `expected`: the answers, for drafters that know them; `done`: one more was given."""

    requests: tuple[GenerationRequest, ...]
    expected: Tokens
    done: Callable[[], None]


@dataclass(frozen=True)
class Answers:
    """What came, and how: verify steps, the drafts that they accepted, sequences that were preempted."""

    tokens: Tokens
    verify_steps: int
    accepted: int
    preemptions: int = 0

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

    `foretold`: every request predicts its answer, but for a few tokens of it.
    """

    configs: tuple[EngineConfig, ...]
    at_once: int
    drafter: Callable[[Tokens], Drafter] | None = None  # takes the place of the engine's own
    foretold: bool = False

    def serve(self, task: Task) -> Answers:
        with self._drafting(task), contextlib.closing(Loopback(*self.configs)) as cluster:

            def ask(request: GenerationRequest) -> Result:
                if self.foretold:
                    request = _foretold(request, task.expected[request.id])
                result = cluster.submit(request, split=len(self.configs) > 1)
                wait_all([result], ANSWER_S)
                task.done()
                return result

            with ThreadPoolExecutor(self.at_once) as callers:
                results = list(callers.map(ask, task.requests))
        rounds = [entry for result in results for entry in result.entries if entry.offered]
        return Answers(
            tokens={r.id: tuple(a.tokens[0]) for r, a in zip(task.requests, results, strict=True)},
            verify_steps=len(rounds),
            accepted=sum(entry.accepted for entry in rounds),
            preemptions=sum(worker.load.preemptions for worker in cluster.workers.values() if worker.load),
        )

    def _drafting(self, task: Task) -> contextlib.AbstractContextManager[object]:
        if self.drafter is None:
            return contextlib.nullcontext()
        drafter = self.drafter(task.expected)
        return mock.patch("eyas.engine.loading.build._drafter", lambda *_: drafter)


def _foretold(request: GenerationRequest, answer: tuple[int, ...]) -> GenerationRequest:
    """Some tokens into the answer two are wrong, later one is missing."""
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
