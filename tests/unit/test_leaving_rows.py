"""Rows of prompts that give no token end at the last layer's attention: no token changes by that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.loading import follower
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.layer import DecoderLayer
from eyas.engine.models.ops import device_machine
from eyas.engine.models.ops.device import DeviceOps
from eyas.engine.parallel.ranks import RankChannel, RankInfo
from tests.unit.device_engines import (
    DRAFTS,
    PROMPT,
    SIZES,
    answers,
    config,
    logprobs,
    on_device,
    requests,
    rounds,
    tokens,
)
from tests.unit.device_ranks_rig import interpreted_follower, no_group_stays
from tests.unit.families import write_family
from tests.unit.tiny import write_tiny_llama

__all__ = ["config"]  # a fixture

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

no_group = pytest.fixture(no_group_stays)

CHUNK = 16  # rows of a step with prompts
FAMILIES: dict[str, dict[str, int]] = {
    "cohere": {},
    "gemma2": {},
    "gemma4_tokens": {"hidden_size_per_layer_input": 16},
    "phi": {},
    "qwen3_moe": {},
}


def asked(logprobs: int | None = None) -> list[GenerationRequest]:
    """A short prompt, and one of three chunks, which share steps with its rounds."""
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=logprobs)
    prompts = {"short": PROMPT[3:12], "long": (*PROMPT, *PROMPT[5:14])}
    return [GenerationRequest(name, prompt, greedy) for name, prompt in prompts.items()]


def told(config: EngineConfig) -> list[dict[int, list[int]]]:
    """The tokens of both together, and of the long one alone."""
    return [*tokens(answers(config, asked())[0]), *tokens(answers(config, asked()[1:])[0])]


@contextmanager
def many_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """Layers have no kernels of few rows. Yields the numbers of rows that left the last layer, by step, and
    the calls of last layers that no row leaves.
    """
    seen: dict[str, list[int]] = {"left": [], "kept": []}
    fewer, keep = DeviceOps.fewer, DecoderLayer.keep

    def some(ops: Any, residual: Any, rows: torch.Tensor) -> Any:
        seen["left"].append(len(rows))
        return fewer(ops, residual, rows)

    def alone(layer: Any, *args: Any) -> None:
        seen["kept"].append(layer.number)
        keep(layer, *args)

    with monkeypatch.context() as patched:
        patched.setattr(device_machine, "most_rows", lambda *_, **__: 0)
        patched.setattr(DeviceOps, "fewer", some)
        patched.setattr(DecoderLayer, "keep", alone)
        yield seen


def test_tokens_are_the_plain_engines(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(config, draft=None)
    expected = told(plain)
    with many_rows(monkeypatch) as seen:
        assert told(on_device(plain)) == expected
        assert seen["left"] and max(seen["left"]) < CHUNK and set(seen["kept"]) == {1}
        monkeypatch.setattr(DeviceOps, "some", lambda ops, x, rows: x.index_select(0, rows * 0))
        assert told(on_device(plain)) != expected, "it is the rows that count"


@pytest.mark.slow
@pytest.mark.parametrize("taps", [[0, 0, 0], [0, 0, 1]], ids=["before the last layer", "behind it"])
def test_draft_heads_and_scored_prompts_have_all_rows(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, taps: list[int]
) -> None:
    """The rows that a head reads, those of forks, and those of which log-probabilities are reported."""
    head = Path(config.draft or "") / "config.json"
    before = json.loads(head.read_text())
    changed = before | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": taps}}
    drafting, both = replace(config, speculation=DRAFTS["chain"]), [*asked(), *requests()]
    try:
        head.write_text(json.dumps(changed))
        expected, _ = answers(drafting, both)
        with many_rows(monkeypatch) as seen:
            found, _ = answers(on_device(drafting), both)
    finally:
        head.write_text(json.dumps(before))
    assert bool(seen["left"]) == (1 not in taps)
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]
    (ours,), (theirs,) = ([e.prompt for e in r[2].entries if e.prompt] for r in (found, expected))
    for mine, its in zip(ours.rows(), theirs.rows(), strict=True):
        assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)


def many_rows_follower(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
    """A follower whose layers have no kernels of few rows either."""
    device_machine.most_rows = lambda *_, **__: 0
    interpreted_follower(loaded, rank_info, channel)


@pytest.mark.slow
def test_ranks_that_share_a_model_leave_out_the_same_rows(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_group: None
) -> None:
    """Else their sums were of different rows, or one waited for another's."""
    write_tiny_llama(tmp_path / "target", tied=False, **SIZES | {"kv_heads": 2, "vocab": 32})
    plain = replace(config, draft=None, model=str(tmp_path / "target"), transfer="none")
    both = [*asked(), GenerationRequest("scored", PROMPT[2:24], requests()[0].params)]
    expected = tokens(answers(plain, both)[0])
    monkeypatch.setattr(follower, "main", many_rows_follower)
    with many_rows(monkeypatch) as seen:
        assert tokens(answers(replace(on_device(plain), tensor_parallel_size=2), both)[0]) == expected
    assert seen["left"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_so_are_those_of_other_families(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Whose last layer adds both halves at once, norms what it adds, reads tokens, or has experts."""
    write_family(tmp_path / family, family, vocab_size=16, **FAMILIES[family])
    plain = replace(config, draft=None, model=str(tmp_path / family))
    expected = told(plain)
    with many_rows(monkeypatch) as seen:
        assert told(on_device(plain)) == expected
    assert seen["left"] and seen["kept"]


@pytest.mark.slow
def test_exact_answers_have_the_bits_of_whole_layers(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = replace(on_device(config), draft=None, dtype="float16", deterministic=True)

    def bits() -> list[list[float]]:
        return [logprobs(result) for result in answers(exact, asked(logprobs=1))[0]]

    with many_rows(monkeypatch) as seen:
        found = bits()
        assert seen["left"]
        monkeypatch.setattr(Decoder, "may_drop", lambda *_: False)
        before = len(seen["left"])
        assert bits() == found and len(seen["left"]) == before
