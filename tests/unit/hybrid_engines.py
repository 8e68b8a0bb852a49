"""Whole engines on a hybrid, and their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from loopback import Loopback, Result, Worker, wait_all

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.kv.states import StateSlots
from tests.unit.family_sample import VOCAB
from tests.unit.hybrid_rig import write_hybrid

WAIT_S = 120
NEW = 16
PARAMS = SamplingParams(temperature=0.7, seed=11, max_tokens=NEW, logprobs=1)


class Answer(NamedTuple):
    """Ids, and the bits of their log-probabilities."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def prompts() -> list[tuple[int, ...]]:
    """Texts that part at several places, with repetitions that lookups find."""
    draw = random.Random(5)
    pattern = draw.choices(range(3, VOCAB), k=37)
    text = [*pattern, *draw.choices(range(3, VOCAB), k=40), *pattern * 3]
    cuts = (3, 64, 100, 150, len(text))
    return [tuple(text[:cut] + draw.choices(range(3, VOCAB), k=9) + pattern[:7]) for cut in cuts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write_hybrid(folder / "model", "qwen3_next")
    return folder


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    plain = EngineConfig(
        model=str(folder / "model"),
        draft=None,
        num_pages=256,
        chunk_tokens=48,
        max_running=4,
        pool_dir=str(folder),
        worker="unified",
    )
    return replace(plain, **changes)


def answer(result: Result) -> Answer:
    logprobs = [one.logprob for entry in result.entries for one in entry.logprobs if one is not None]
    return Answer(tuple(result.tokens[0]), tuple(logprobs))


class Served:
    """A cluster, and the requests that it was given."""

    def __init__(self, *configs: EngineConfig) -> None:
        self.cluster = Loopback(*configs)
        self.split = len(configs) > 1
        self.count = 0

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = NEW,
        begun: tuple[int, ...] = (),
        salt: bytes = b"",
    ) -> Result:
        """`begun`: what another worker has answered so far."""
        self.count += 1
        params = msgspec.structs.replace(PARAMS, max_tokens=max_tokens)
        choices = (RequestChoice(0, begun),)
        request = GenerationRequest(f"r{self.count}", tuple(prompt), params, choices, salt=salt)
        return self.cluster.submit(request, split=self.split and not begun)

    def alone(self, prompt: Sequence[int]) -> Answer:
        result = self.ask(prompt)
        wait_all([result], WAIT_S)
        return answer(result)

    def together(self, every: Sequence[Sequence[int]], max_tokens: int = NEW) -> list[Answer]:
        results = [self.ask(prompt, max_tokens) for prompt in every]
        wait_all(results, WAIT_S)
        return [answer(result) for result in results]

    def states(self, worker: str = "unified") -> StateSlots:
        states = self.cluster.workers[worker].engine._scheduler.cache.states
        assert states is not None
        return states

    def close(self) -> list[Worker]:
        """Ends all workers; none has leaked a page or a slot."""
        self.cluster.close()
        for worker in self.cluster.workers.values():
            pool = worker.engine._scheduler.pool
            assert not pool.used
            assert not pool.states.pool.used
        return list(self.cluster.workers.values())
