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
from tests.unit.families import write_family
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_device_tells_experts_and_scores_what_it_sampled(tmp_path: Path) -> None:
    """With exact arithmetic, interpreted: sampled tokens are scored again to the bit there too."""
    write_family(tmp_path / "model", "qwen3_moe", vocab_size=16, num_hidden_layers=2)
    names = {"model": str(tmp_path / "model"), "draft": None, "pool_dir": str(tmp_path), "worker": "unified"}
    triton = {"attention_backend": "triton", "prefill_attention_backend": "triton", "dtype": "float16"}
    sizes = {"num_pages": 32, "chunk_tokens": 16, "max_running": 4, "context_length": 128}
    cluster = Loopback(EngineConfig(**names, **triton, **sizes, deterministic=True))
    prompt = tuple(range(1, 12))
    answer = ask(cluster, "answer", prompt, max_tokens=4, logprobs=0)
    scoring = {"max_tokens": 0, "prompt_logprobs": 0, "prompt_experts": True}
    scored = ask(cluster, "scored", (*prompt, *answer.tokens[0]), **scoring).entries[0].prompt
    config = cluster.workers["unified"].engine._parts.model
    cluster.close()
    assert scored is not None
    sampled = [one.logprob for entry in answer.entries for one in entry.logprobs]
    assert [row.logprob for row in scored.rows()][-4:] == sampled
    spec = config.layers[0].feed_forward
    told = np.frombuffer(scored.experts, np.int16).reshape(len(prompt) + 4 - 1, 2, spec.per_row)
    assert (told[:, 1] == -1).all()  # a dense layer
    mixed = told[:, 0].tolist()
    assert all(len(set(row)) == spec.per_row and set(row) < set(range(spec.experts)) for row in mixed)
