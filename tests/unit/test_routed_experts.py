"""Which experts an answer's rows took, as a second pass over its text tells it: those that they took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import Loopback, Result, split_configs, wait_all

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.models.ops.recording import ExpertRecorder
from tests.unit.tiny_deepseek import SMALL, write_tiny_nextn_deepseek

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = tuple(range(7, 40))
LAYERS, PER_ROW, ANSWER = SMALL["num_hidden_layers"], SMALL["num_experts_per_tok"], 24


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = tmp_path_factory.mktemp("models") / "deepseek"
    write_tiny_nextn_deepseek(folder)
    names = {"model": str(folder), "draft": None, "pool_dir": str(tmp_path_factory.mktemp("pools"))}
    return EngineConfig(**names, num_pages=64, chunk_tokens=48, context_length=160, worker="unified")


def ask(
    cluster: Loopback, name: str, prompt: tuple[int, ...], *, split: bool = False, **params: Any
) -> Result:
    wanted = {"temperature": 1.0, "seed": 5, "max_tokens": ANSWER, "ignore_eos": True} | params
    result = cluster.submit(GenerationRequest(name, prompt, SamplingParams(**wanted)), split=split)
    wait_all([result], 60)
    return result


def experts(cluster: Loopback, text: tuple[int, ...], *, split: bool = False) -> np.ndarray:
    scoring = {"max_tokens": 0, "prompt_logprobs": 0, "prompt_experts": True}
    result = ask(cluster, f"experts {len(cluster.results)}", text, split=split, **scoring)
    (told,) = [entry.prompt for entry in result.entries if entry.prompt is not None]
    return np.frombuffer(told.experts, np.int16).reshape(len(text) - 1, LAYERS, PER_ROW)


class Spy:
    """Hears every forward of a model that decodes one sequence without drafts: what its rows took."""

    def __init__(self, model: Any) -> None:
        self.recorder, self.forward = ExpertRecorder(model.config), model.forward
        self.model, self.taken = model, {}
        model.forward = self

    def __call__(self, rows: Any, pool: Any, taps: tuple[int, ...] = ()) -> Any:
        with self.recorder.hearing(self.model):
            made = self.forward(rows, pool, taps)
        each = self.recorder.rows(torch.arange(len(rows.positions)))
        self.taken |= dict(zip(rows.positions.tolist(), each.tolist(), strict=True))
        return made


def test_a_second_pass_tells_the_experts_that_were_taken(base: EngineConfig) -> None:
    """In a few chunks, beside the answer's own pages in the cache."""
    cluster = Loopback(replace(base, chunk_tokens=16))
    model = cluster.workers["unified"].engine._parts.runner.model
    spy = Spy(model)
    answer = ask(cluster, "answer", PROMPT)
    del model.forward
    text = (*PROMPT, *answer.tokens[0])
    told = experts(cluster, text)
    cluster.close()
    assert told.tolist() == [spy.taken[position] for position in range(len(text) - 1)]
    assert (told[:, 0] == -1).all()  # a dense layer
    assert len(np.unique(told[:, 1:])) == SMALL["n_routed_experts"]
    assert all(len(set(row)) == PER_ROW for row in told[:, 1:].reshape(-1, PER_ROW).tolist())


@pytest.mark.parametrize("way", ["drafts", "split"])
def test_they_are_the_same_by_every_way(base: EngineConfig, way: str) -> None:
    plain = Loopback(base)
    answer = ask(plain, "answer", PROMPT)
    text = (*PROMPT, *answer.tokens[0])
    told = experts(plain, text)
    plain.close()
    split = way == "split"
    config = base if split else replace(base, draft=base.model)
    other = Loopback(*(split_configs(config)[:2] if split else (config,)))
    assert ask(other, "answer", PROMPT, split=split).tokens == answer.tokens
    assert (experts(other, text, split=split) == told).all()
    other.close()
