"""Logits that are NaN or infinite fail the request whose they are, and no other; plain and on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as varied

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice, Role
from eyas.engine.batch.step_result import NOT_FINITE
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kernels.sampling import sample as kernels
from eyas.engine.models.eagle3 import Eagle3Draft
from eyas.engine.sampling.sampler import SampledRow, sample
from tests.unit.device_engines import SIZES, on_device, write_head
from tests.unit.loopback import Loopback, Result
from tests.unit.tiny import write_tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

BAD = 63  # prompts that end with it have logits that are not finite
PATIENCE_S = 600
FAILURE = "the model gave NaN or infinity as logits of this request"
NAN, INF = float("nan"), float("inf")
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
WARM = varied(GREEDY, temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(folder / "target", tied=False, **SIZES | {"vocab": 64})
    return EngineConfig(
        model=str(target),
        draft=None,
        num_pages=12,
        chunk_tokens=16,
        max_running=4,
        context_length=128,
        pool_dir=str(tmp_path_factory.mktemp("pools")),
        worker="unified",
    )


def drafting(config: EngineConfig) -> EngineConfig:
    head = Path(config.model).parent / "head"
    if not head.exists():
        write_head(head, Path(config.model))
    return replace(config, draft=str(head), speculation=SpeculationConfig(steps=2, topk=1, draft_tokens=3))


def request(name: str, last: int, params: SamplingParams = GREEDY, choices: int = 1) -> GenerationRequest:
    prompt = (*(i * 3 % 11 for i in range(20)), last)
    return GenerationRequest(name, prompt, params, tuple(RequestChoice(i) for i in range(choices)))


def poison(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """The embedding of BAD is not finite, as a broken computation would leave it: KV and logits follow."""
    take = WeightSource.take

    def taken(self: WeightSource, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Any:
        tensor = take(self, name, shape, dtype)
        if name == "model.embed_tokens.weight":
            tensor[BAD] = value
        return tensor

    monkeypatch.setattr(WeightSource, "take", taken)


def good(i: int = 0) -> list[GenerationRequest]:
    """A plain one, and one with noise and log-probabilities."""
    return [request(f"good{i}", 3), request(f"warm{i}", 7, varied(WARM, logprobs=2))]


def bad(i: int = 0) -> list[GenerationRequest]:
    """The same, and two choices."""
    return [
        request(f"nan{i}", BAD),
        request(f"nan-warm{i}", BAD, varied(WARM, logprobs=2)),
        request(f"nan-two{i}", BAD, WARM, 2),
    ]


def answers(config: EngineConfig, *batches: list[GenerationRequest]) -> tuple[dict[str, Result], int]:
    """What came of each request, a batch after the other, and how many the engine counted as failed."""
    cluster, results = Loopback(config), {}
    try:
        for batch in batches:
            asked = {one.id: cluster.submit(one, split=False) for one in batch}
            assert all(result.done.wait(PATIENCE_S) for result in asked.values())
            results |= asked
        (worker,) = cluster.workers.values()
    finally:
        cluster.close()
    assert worker.engine._scheduler.pool.used == 0
    return results, worker.engine._requests.spoiled


def plain(config: EngineConfig) -> EngineConfig:
    """The specification: without drafts, and in plain torch."""
    torch_alone = {"attention_backend": "torch", "prefill_attention_backend": "torch"}
    return replace(config, draft=None, overlap_schedule=False, **torch_alone)


def check(
    config: EngineConfig,
    value: float,
    batches: list[list[GenerationRequest]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few pages: those of the bad requests are the next good ones'."""
    expected, _ = answers(plain(config), good())
    poison(monkeypatch, value)
    results, count = answers(config, *batches)
    failed = {name for name in results if name.startswith("nan")}
    assert {results[name].failure for name in failed} == {FAILURE}
    assert not any(results[name].tokens for name in failed), "nothing of it is an answer"
    assert count == len(failed) > 0
    for name in results.keys() - failed:
        assert results[name].failure is None
        assert results[name].tokens == expected[f"{name[:-1]}0"].tokens, name


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_request_fails_alone_and_its_pages_harm_nobody(
    config: EngineConfig, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(config, value, [[*bad(0), *good(0)], good(1), [*bad(2), *good(2)], good(3)], monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("drafts", [False, True])
def test_the_same_on_a_device(config: EngineConfig, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(drafting(config) if drafts else config, num_pages=8)
    check(on_device(small), NAN, [[bad()[1], good()[0]]], monkeypatch)


def test_a_draft_head_that_gives_nan_costs_drafts_alone(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answers(config, good())
    logits = Eagle3Draft.logits
    monkeypatch.setattr(Eagle3Draft, "logits", lambda self, rows: logits(self, rows) * NAN)
    results, count = answers(drafting(config), good())
    assert {name: one.tokens for name, one in results.items()} == {n: r.tokens for n, r in expected.items()}
    assert count == 0


def test_the_prompt_may_be_computed_elsewhere(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that has the prompt sees it first."""
    poison(monkeypatch, NAN)
    both = [replace(config, roles=(role,), worker=role.value) for role in (Role.PREFILL, Role.DECODE)]
    cluster = Loopback(*both)
    try:
        result = cluster.submit(request("nan", BAD), split=True)
        assert result.done.wait(PATIENCE_S)
        fine = cluster.submit(request("good", 3), split=True)
        assert fine.done.wait(PATIENCE_S)
    finally:
        cluster.close()
    assert result.failure in (FAILURE, "lost")  # who says it first: the prompt's side, or its pages'
    assert not result.tokens
    assert fine.failure is None


@pytest.mark.parametrize("value", [NAN, -NAN, INF])
@pytest.mark.parametrize("params", [GREEDY, WARM, varied(WARM, top_k=3, top_p=0.9)])
def test_rows_are_marked_and_others_are_not(value: float, params: SamplingParams) -> None:
    """In the specification and on the device, which still has an id for its tables."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    expected = sample(logits, rows(params)).tokens
    logits[1, 299] = value
    found = sample(logits, rows(params)).tokens
    assert found == [expected[0], NOT_FINITE, expected[2]]
    out = torch.empty(3, dtype=torch.int32)
    places = torch.arange(3, dtype=torch.int32)
    kernels.choose(logits, kernels.SampledRows(places, places), tables(params), out)
    assert out.tolist() == [expected[0], -300, expected[2]]


def rows(params: SamplingParams) -> list[SampledRow]:
    return [SampledRow(params, 0, place, (), (), ()) for place in range(3)]


def tables(params: SamplingParams) -> Any:
    kinds = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32}
    kinds |= {"top_k": torch.int32, "seed": torch.int64}
    told = {name: torch.tensor([getattr(params, name)] * 3, dtype=kind) for name, kind in kinds.items()}
    return SimpleNamespace(**told, choice=torch.zeros(3, dtype=torch.int32))
