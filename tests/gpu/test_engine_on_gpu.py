"""The engine on a GPU, with the torch backend: right first. bf16, so tokens are equal up to near-ties."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.attention.base import Span
from eyas.engine.attention.torch_backend import TorchAttention
from eyas.engine.forward import build_batch
from eyas.engine.kv_pool import KvPool, PoolShape
from eyas.engine.model_config import ModelConfig
from eyas.engine.models.llama import Llama
from eyas.engine.weights import FolderWeights, Placement
from eyas.evals.heldout import held_out_prompts
from gateway.tokenizer import Tokenizer
from tests.unit.loopback import Loopback, Result, wait_all
from tests.unit.tiny import write_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

GPU = EngineConfig(device="cuda", num_pages=1024, worker="gpu")
CPU = EngineConfig(num_pages=1024, worker="cpu", draft=None)
CHATS = 200
SHAPES = [{}, {"heads": 4, "kv_heads": 4}, {"hidden": 128, "heads": 8, "head_dim": 32}]


@pytest.mark.parametrize("shape_of", SHAPES, ids=["gqa", "mha", "wide"])
def test_logits_against_transformers(tmp_path: Path, shape_of: dict[str, int]) -> None:
    """Relative error of bf16 logits: root mean square of the difference over that of the float32 logits."""
    from transformers import AutoModelForCausalLM

    folder = write_tiny_llama(tmp_path / "model", **shape_of)
    config = ModelConfig.from_folder(folder)
    placement = Placement("cuda", torch.bfloat16)
    sizes = (64, config.num_layers, 16, config.num_kv_heads, config.head_dim)
    shape = PoolShape(*sizes, placement.dtype, placement.device)
    pool, backend = KvPool(shape), TorchAttention(config.num_heads, shape)
    with FolderWeights(folder, placement=placement) as weights:
        model = Llama(config, weights, backend)
    tokens = torch.randint(256, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = build_batch([Span(list(range(20)), 0, 300)], tokens, 16, backend)
    ours = model.logits(model.forward(batch, pool)[0]).cpu()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    error = float((ours - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    print(f"\nrelative error of bf16 logits: {error:.4f}")
    assert error < 0.03


def test_answers_are_those_of_the_cpu() -> None:
    """Held-out chats of the embedded model, greedy: GPU with drafts, GPU without, CPU without."""
    requests = _chats()
    drafted, plain, cpu = _run(GPU, requests), _run(replace(GPU, draft=None), requests), _run(CPU, requests)
    same = {"drafted and plain": _equal(drafted, plain), "GPU and CPU": _equal(plain, cpu)}
    entries = [entry for result in drafted for entry in result.entries if entry.offered]
    length = 1 + sum(entry.accepted for entry in entries) / len(entries)
    print(f"\nequal answers of {CHATS}: {same}; acceptance length {length:.2f}")
    assert min(same.values()) >= 0.9 * CHATS
    assert length > 4.5


@pytest.mark.parametrize("draft", [None, GPU.draft], ids=["plain", "drafted"])
def test_time_of_a_step(draft: str | None) -> None:
    """Told, not judged: this backend plans on the host and launches every operation by itself."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    cluster = Loopback(replace(GPU, draft=draft))
    for name in ("warm", "timed"):
        began = time.perf_counter()
        result = cluster.submit(GenerationRequest(name, tuple(range(100, 140)), params), split=False)
        wait_all([result], 120)
        seconds = time.perf_counter() - began
    cluster.close()
    print(f"\n{1e3 * seconds / len(result.entries):.2f} ms a step, {200 / seconds:.0f} tokens/s")
    assert len(result.tokens[0]) == 200


def _chats() -> list[GenerationRequest]:
    tokenizer = Tokenizer.load(GPU.model)
    params = SamplingParams(temperature=0.0, max_tokens=96)

    async def encode() -> list[tuple[int, ...]]:
        return [await tokenizer.encode_chat(chat) for chat in held_out_prompts(CHATS, seed=5)]

    return [GenerationRequest(str(i), ids, params) for i, ids in enumerate(asyncio.run(encode()))]


def _run(config: EngineConfig, requests: list[GenerationRequest]) -> list[Result]:
    cluster = Loopback(config)
    results = [cluster.submit(request, split=False) for request in requests]
    wait_all(results, 300)
    cluster.close()
    return results


def _equal(some: list[Result], others: list[Result]) -> int:
    return sum(a.tokens == b.tokens for a, b in zip(some, others, strict=True))
