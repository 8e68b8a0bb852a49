"""Rows of prompts that give no token end at the last layer's attention: no token changes by that."""

from __future__ import annotations

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
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.layer import DecoderLayer
from eyas.engine.models.ops import device_machine
from eyas.engine.models.ops.device import DeviceOps
from tests.unit.device_engines import PROMPT, answers, config, logprobs, on_device, tokens
from tests.unit.families import write_family

__all__ = ["config"]  # a fixture

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

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
