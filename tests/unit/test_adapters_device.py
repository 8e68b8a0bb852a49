"""Engines of the device path with adapters, in Triton's interpreter: their answers are those of plain torch;
in exact arithmetic a request's tokens follow it and its adapter alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from adapter_rig import write_adapter
from loopback import Loopback, wait_all
from tiny import write_tiny_llama

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.page_names import salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.loading import follower
from tests.unit import tensor_core
from tests.unit.adapter_rig import PATIENCE_S, PROMPT
from tests.unit.device_engines import SIZES, write_head
from tests.unit.device_ranks_rig import interpreted_follower
from tests.unit.tiny_deepseek import FEW, V3, write_tiny_nextn_deepseek

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.timeout(400)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=4, ignore_eos=True)
CHAIN = SpeculationConfig(steps=2, draft_tokens=3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(folder / "target", tied=False, **SIZES | {"kv_heads": 2, "vocab": 32})
    for seed in range(2):
        modules = ("q_proj", "v_proj", "down_proj", "lm_head") if seed else ()
        write_adapter(folder / f"a{seed}", target, rank=12 * (1 + seed), seed=seed, modules=modules)
    write_head(folder / "head", target)
    return EngineConfig(
        model=str(target),
        draft=None,
        num_pages=48,
        chunk_tokens=16,
        max_running=4,
        context_length=256,
        pool_dir=str(folder),
        worker="unified",
        max_loras=2,
        max_lora_rank=32,
    )


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, plain: EngineConfig) -> EngineConfig:
    """One adapter updates all experts, and the shared one; the other some of their matrices, and a router."""
    folder = tmp_path_factory.mktemp("experts")
    write_tiny_nextn_deepseek(folder / "target", V3)
    names = (*(f"experts.{i}" for i in range(FEW["n_routed_experts"])), "shared_experts")
    modules = tuple(f".1.mlp.{name}.{part}_proj" for name in names for part in ("gate", "up", "down"))
    for seed in range(2):
        write_adapter(
            folder / f"a{seed}", folder / "target", rank=12 * (1 + seed), seed=seed, modules=modules
        )
        modules = (".1.mlp.experts.1.up_proj", ".1.mlp.experts.2.down_proj", ".1.mlp.gate")
    return replace(plain, model=str(folder / "target"), pool_dir=str(folder), lora_experts=True)


def _on_device(plain: EngineConfig, **changes: object) -> EngineConfig:
    triton = {"attention_backend": "triton", "prefill_attention_backend": "triton"}
    return replace(plain, overlap_schedule=True, **triton, **changes)  # type: ignore[arg-type]


def _requests(adapters: Sequence[str]) -> list[GenerationRequest]:
    made = []
    for number, adapter in enumerate(adapters):
        params, prompt = (SEEDED if number % 2 else GREEDY), PROMPT[3 * number :]
        salt = salt_of("", adapter)
        made.append(GenerationRequest(f"r{number}", prompt, params, adapter=adapter, salt=salt))
    return made


def _answers(config: EngineConfig, *, alone: bool = False) -> list[list[int]]:
    cluster, folder = Loopback(config), Path(config.pool_dir)
    try:
        ids = [cluster.load_adapter(folder / f"a{seed}").id for seed in range(2)]
        requests = _requests(["", *ids])
        answers = []
        for group in [[request] for request in requests] if alone else [requests]:
            results = [cluster.submit(request, split=False) for request in group]
            wait_all(results, PATIENCE_S)
            answers += [result.tokens[0] for result in results]
        return answers
    finally:
        cluster.close()


def test_the_device_says_what_plain_torch_does(plain: EngineConfig) -> None:
    assert _answers(_on_device(plain)) == _answers(plain)


def test_exact_answers_follow_their_own_adapter_alone(plain: EngineConfig) -> None:
    exact = _on_device(plain, dtype="float16", deterministic=True)
    with tensor_core.hopper():
        assert _answers(exact, alone=True) == _answers(exact)


def test_experts_on_the_device_say_what_plain_torch_does(experts: EngineConfig) -> None:
    assert _answers(_on_device(experts)) == _answers(experts)


def test_exact_answers_of_experts_follow_their_own_adapter_alone(experts: EngineConfig) -> None:
    exact = _on_device(experts, dtype="float16", deterministic=True)
    with tensor_core.hopper():
        assert _answers(exact, alone=True) == _answers(exact)


def test_drafts_change_no_token_of_an_adapter(plain: EngineConfig) -> None:
    head = str(Path(plain.pool_dir) / "head")
    drafted = _on_device(plain, draft=head, speculation=CHAIN)
    assert _answers(drafted) == _answers(plain)


def test_answers_that_take_turns_are_those_of_plain_torch(
    plain: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent back after each token, behind a step that was launched before, and on in another step."""
    monkeypatch.setattr("eyas.engine.scheduling.adapter_turns.TURN_S", 0.0)
    expected, head = _answers(plain), str(Path(plain.pool_dir) / "head")
    assert _answers(_on_device(plain, max_loras=1, draft=head, speculation=CHAIN)) == expected


def test_two_ranks_share_an_adapter(plain: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the rows of its heads and its part of the inner columns, of both factors."""
    monkeypatch.setattr(follower, "main", interpreted_follower)
    shared = _on_device(plain, tensor_parallel_size=2, transfer="none")
    assert _answers(shared) == _answers(plain)
