"""Whole engines in exact arithmetic on a GPU: real chats with a real head, and the model's own logits.

The embedded model's head is right for most of its drafts, so that long chains and trees are accepted. The
8B shape, many more requests and the power of it are tests/gpu/exact_campaign.py's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from eyas.common.config import SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.gpu.engine_runs import SHAPES, Reference, chats, on_gpu, run_all
from tests.unit.loopback import Result
from tests.unit.tiny import write_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

CHATS = 300
WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"speculation": SpeculationConfig(steps=4, topk=4, draft_tokens=16)},
    "adaptive": {"speculation": replace(SpeculationConfig(), adaptive=True)},
    "lookup": {"draft": None, "speculation": replace(SpeculationConfig(), ngram=True)},
    "chunks": {"draft": None, "chunk_tokens": 32, "mixed_tokens": 32, "max_running": 24},
    "no graphs": {"draft": None, "cuda_graph_max_bs": 0, "overlap_schedule": False},
    "few pages": {"num_pages": 160, "max_running": 64},
}


def asked() -> list[GenerationRequest]:
    """Chats: greedy, and at a temperature with seeds; every third tells its log-probabilities."""
    found = []
    for i, chat in enumerate(chats(CHATS)):
        noise = {"temperature": 0.8, "seed": i} if i % 2 else {}
        wanted = {"logprobs": 1} if i % 3 == 0 else {}
        found.append(
            msgspec.structs.replace(chat, params=msgspec.structs.replace(chat.params, **noise, **wanted))
        )
    return found


def said(results: list[Result]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities, to the bit."""
    return [
        (result.tokens[0], [one.logprob for entry in result.entries for one in entry.logprobs])
        for result in results
    ]


@pytest.fixture(scope="module")
def plain() -> list[tuple[list[int], list[float]]]:
    return said(
        run_all(on_gpu("triton", deterministic=True, draft=None, max_running=1), asked()[:40])
    ) + said(run_all(on_gpu("triton", deterministic=True, draft=None), asked()[40:]))


@pytest.mark.parametrize("way", WAYS)
def test_no_way_changes_a_bit(way: str, plain: list[tuple[list[int], list[float]]]) -> None:
    """Against requests of which the first 40 ran alone."""
    found = said(run_all(on_gpu("triton", deterministic=True, **WAYS[way]), asked()))
    differing = [i for i, (a, b) in enumerate(zip(found, plain, strict=True)) if a != b]
    print(f"\n{way}: {len(differing)} of {CHATS} answers differ")
    assert differing == []


def test_fast_arithmetic_is_noticed(plain: list[tuple[list[int], list[float]]]) -> None:
    """By log-probabilities, if not by tokens."""
    first = asked()[:40]
    alone, together = (said(run_all(on_gpu("triton", draft=None, max_running=n), first)) for n in (1, 40))
    assert alone != together


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_against_transformers(tmp_path: Path, shape: str) -> None:
    """As of the fast kernels: the error of bf16 over the logits' deviation, along an answer."""
    folder = write_tiny_llama(tmp_path / "model", **SHAPES[shape])
    prompt = torch.randint(256, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=20)
    config = on_gpu("triton", deterministic=True, model=str(folder), draft=None)
    (result,) = run_all(config, [GenerationRequest("r", tuple(prompt), params)])
    told = [logprob for entry in result.entries for logprob in entry.logprobs]
    ids = torch.tensor([[id for id, _ in one.top] for one in told])
    ours = torch.tensor([[value for _, value in one.top] for one in told])
    logits = Reference(str(folder)).logits(prompt, result.tokens[0])
    wanted = logits.log_softmax(-1).gather(-1, ids)
    error = float((ours - wanted).square().mean().sqrt() / logits.std(-1).mean())
    print(f"\n{shape}: relative error of exact log-probabilities: {error:.4f}")
    assert ids.shape == (24, 20) and error < 0.03
