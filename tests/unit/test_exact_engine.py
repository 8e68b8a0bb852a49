"""A whole engine in exact arithmetic: a request's tokens and log-probabilities follow it alone, to the bit.

Triton's interpreter runs the kernels of the device path in half precision, with `tensor_core`'s model of
Hopper's matrix unit. tests/gpu/exact_campaign.py asks the same of a GPU and a model of use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.checkpoint.config import LatentSpec
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.loading.arithmetic import inexact
from eyas.engine.loading.build import build_engine
from eyas.engine.loading.spec import EngineSpec
from tests.unit import tensor_core
from tests.unit.exact_engines import Told, answers, config

__all__ = ["config"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tuple(i * i % 13 + i % 4 for i in range(45))
CHAIN = SpeculationConfig(steps=2, topk=1, draft_tokens=3)
TREE = SpeculationConfig(steps=2, topk=2, draft_tokens=4)


@pytest.fixture(autouse=True)
def _matrix_unit() -> Iterator[None]:
    with tensor_core.hopper():
        yield


def requests() -> list[GenerationRequest]:
    """A prompt of three chunks, one that crosses a block of keys, and a short one with noise."""
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)
    seeded = SamplingParams(temperature=0.8, seed=5, max_tokens=5, ignore_eos=True, logprobs=2)
    return [
        GenerationRequest("chunks", PROMPT[:40], greedy),
        GenerationRequest("block", PROMPT + PROMPT[:17], seeded),
        GenerationRequest("short", PROMPT[:5], seeded),
    ]


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> dict[str, Told]:
    """Each answer by an engine that has nothing else to do, drafts nothing, and takes a prompt at once."""
    with tensor_core.hopper():
        return answers(replace(config, draft=None, chunk_tokens=64), [[request] for request in requests()])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("drafts", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_answers_are_those_of_a_request_alone(
    config: EngineConfig, alone: dict[str, Told], drafts: SpeculationConfig | None
) -> None:
    """In a batch, in other chunks, and with drafts of any kind."""
    ways = replace(config, draft=None) if drafts is None else replace(config, speculation=drafts)
    assert answers(ways, [requests()]) == alone


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_by_fast_arithmetic_they_are_not(config: EngineConfig) -> None:
    """The power of the test above: a prompt of enough rows at once goes another way through the layers."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2)
    asked = [[GenerationRequest("long", (PROMPT * 3)[:132], params)]]
    for exact in (True, False):
        ways = [replace(config, draft=None, deterministic=exact, chunk_tokens=n) for n in (40, 140)]
        assert (answers(ways[0], asked) == answers(ways[1], asked)) == exact


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_keys_and_values_in_fp8_follow_a_request_alone(config: EngineConfig) -> None:
    """A prompt by the wide way through the layers, and in chunks by the narrow one."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2)
    asked = [[GenerationRequest("long", (PROMPT * 3)[:132], params)]]
    in_fp8 = replace(config, draft=None, kv_cache_dtype="fp8_e4m3")
    ways = [replace(in_fp8, chunk_tokens=count) for count in (40, 140)]
    assert answers(ways[0], asked) == answers(ways[1], asked)


def refused(config: EngineConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        build_engine(config, link=None)  # type: ignore[arg-type]
    assert found.value.param == "deterministic"


def test_what_is_not_covered_is_refused_by_name(config: EngineConfig) -> None:
    refused(replace(config, dtype="float32"), "--deterministic: products of float32")
    refused(replace(config, uniform_experts=True), "--deterministic: chance chooses experts")
    in_fp8 = replace(config, kv_cache_dtype="fp8_e4m3")
    target = EngineSpec.of(config).target
    latent = LatentSpec(
        num_heads=2, num_kv_heads=1, head_dim=48, rope=RopeConfig(), scale=1.0,
        kv_rank=32, query_rank=0, plain_dim=16, value_dim=16,
    )  # fmt: skip
    latents = replace(target, layers=(replace(target.layers[0], attention=latent),))
    assert "latents of --kv-cache-dtype fp8_e4m3" in inexact(latents, in_fp8)
    assert inexact(target, in_fp8) == inexact(latents, config) == ""
