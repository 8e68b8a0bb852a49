"""The engine on a GPU, for each attention backend: the model's own tokens, drafted or not.

"flashinfer" stands for prompts by flashinfer, once it is built, beside triton's rounds.

bf16 rounds, so tokens are equal up to near-ties. The rule: a token of a greedy answer is right if the model
itself, computed by transformers in float32 along that answer, gives no other token a logit higher by more
than `SLACK`; how many answers are equal to the last token is told, and bounded too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.gpu.engine_runs import CPU, SHAPES, SLACK, Reference, chats, cluster_of, on_gpu, run_all
from tests.unit.loopback import Result, wait_all
from tests.unit.tiny import write_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

BACKENDS = ("torch", "triton", "flashinfer")
EQUAL = {"float32": 0.99, "bfloat16": 0.9}  # answers, at least
CPU_CHATS, CHATS = 100, 500


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_against_transformers(tmp_path: Path, shape: str, backend: str) -> None:
    """The best ids' log-probabilities on random models: the error of bf16 over the logits' deviation."""
    folder = write_tiny_llama(tmp_path / "model", **SHAPES[shape])
    prompt = torch.randint(256, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    config = on_gpu(backend, model=str(folder), draft=None)
    (result,) = run_all(config, [GenerationRequest("r", tuple(prompt), params)])
    reference, told = Reference(str(folder)), result.entries[0].prompt
    assert told is not None
    answer = [logprob for entry in result.entries for logprob in entry.logprobs]
    for text, scored, logits in (
        ("the answer", answer, reference.logits(prompt, result.tokens[0])),
        ("the prompt", told.rows(), reference.logits(prompt[:1], prompt[1:])),
    ):
        ids = torch.tensor([[id for id, _ in one.top] for one in scored])
        ours = torch.tensor([[value for _, value in one.top] for one in scored])
        wanted = logits.log_softmax(-1).gather(-1, ids)
        error = float((ours - wanted).square().mean().sqrt() / logits.std(-1).mean())
        print(f"\n{backend}, {shape}: relative error of bf16 log-probabilities of {text}: {error:.4f}")
        assert ids.shape == (len(logits), 20) and error < 0.03


@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", "float32"), *((backend, "bfloat16") for backend in BACKENDS)]
)
def test_greedy_text_is_that_of_transformers(backend: str, dtype: str) -> None:
    """Held-out chats of the embedded model, with drafts."""
    requests = chats(CPU_CHATS)
    results = run_all(on_gpu(backend, dtype=dtype), requests)
    reference = Reference(CPU.model)
    worst = [reference.excess(request, result) for request, result in zip(requests, results, strict=True)]
    equal = sum(excess == 0.0 for excess in worst)
    print(f"\n{backend}, {dtype}: {equal} of {CPU_CHATS} answers are transformers' own in float32;")
    print(f"the others leave it at a token whose logit is at most {max(worst):.3f} below the best")
    assert max(worst) <= SLACK[dtype]
    assert equal >= EQUAL[dtype] * CPU_CHATS


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_change_no_text_but_at_near_ties(backend: str) -> None:
    requests = chats(CHATS)
    drafted, plain = (run_all(on_gpu(backend, **how), requests) for how in ({}, {"draft": None}))
    differ = sum(a.tokens != b.tokens for a, b in zip(drafted, plain, strict=True))
    reference = Reference(CPU.model)
    worst = max(reference.excess(request, result) for request, result in zip(requests, drafted, strict=True))
    print(f"\n{backend}: {differ} of {CHATS} answers differ with drafts ({100 * differ / CHATS:.1f} %)")
    assert differ <= 0.1 * CHATS
    assert worst <= SLACK["bfloat16"]


@pytest.fixture(scope="module")
def cpu_results() -> list[Result]:
    return run_all(CPU, chats(CPU_CHATS))


@pytest.mark.parametrize("backend", BACKENDS)
def test_acceptance_is_that_of_the_cpu(cpu_results: list[Result], backend: str) -> None:
    """The same chats give the same acceptance length within the noise of near-ties, and the same answers."""
    results = run_all(on_gpu(backend), chats(CPU_CHATS))
    ours, wanted = acceptance_length(results), acceptance_length(cpu_results)
    equal = sum(a.tokens == b.tokens for a, b in zip(results, cpu_results, strict=True))
    print(f"\n{backend}: acceptance length {ours:.2f}, on the CPU {wanted:.2f}; {equal} equal answers")
    assert abs(ours - wanted) < 0.15
    assert equal >= EQUAL["bfloat16"] * CPU_CHATS


def test_prompts_go_over_to_flashinfer(caplog: pytest.LogCaptureFixture) -> None:
    """In all tests of it here, before the first prompt."""
    caplog.set_level(logging.INFO, "eyas.engine")
    run_all(on_gpu("flashinfer"), chats(2))
    assert "prompts attend by flashinfer from now on" in caplog.messages


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draft", [None, CPU.draft], ids=["plain", "drafted"])
def test_time_of_a_step(backend: str, draft: str | None) -> None:
    """Told, not judged."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    cluster = cluster_of(on_gpu(backend, draft=draft))
    try:
        for name in ("warm", "timed"):
            began = time.perf_counter()
            result = cluster.submit(GenerationRequest(name, tuple(range(100, 140)), params), split=False)
            wait_all([result], 120)
            seconds = time.perf_counter() - began
    finally:
        cluster.close()
    steps = len(result.entries)
    print(f"\n{backend}: {1e3 * seconds / steps:.2f} ms a step, {200 / seconds:.0f} tokens/s")
    assert len(result.tokens[0]) == 200


# --- requests and answers ------------------------------------------------------------------------------


def acceptance_length(results: Sequence[Result]) -> float:
    """Tokens a verify step gave, its own included."""
    entries = [entry for result in results for entry in result.entries if entry.offered]
    return 1 + sum(entry.accepted for entry in entries) / len(entries)
