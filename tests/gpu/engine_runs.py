"""Engines on a GPU: their configuration, chats to run on them, and the model's own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.models.table import read_model
from gateway.text.tokenizer import Tokenizer
from tests.unit.loopback import Loopback, Result, wait_all
from tools.nano.heldout import heldout_prompts

SHAPES = {"gqa": {"head_dim": 64}, "mha": {"heads": 4, "kv_heads": 4}, "wide": {"hidden": 128, "heads": 8}}
SLACK = {"float32": 0.01, "bfloat16": 0.25}  # logits; bf16's own error is 0.05 (root mean square)
CPU = EngineConfig(num_pages=1024, worker="cpu")
ANSWER = 96  # tokens at most
WAIT_S = 240.0


def on_gpu(backend: str, **changes: Any) -> EngineConfig:
    """A worker with such attention; skips the test where that cannot be imported."""
    if backend != "torch":
        pytest.importorskip(backend, reason=f"{backend} cannot be imported", exc_type=ImportError)
    rounds = "triton" if backend == "flashinfer" else backend
    backends = {"attention_backend": rounds, "prefill_attention_backend": backend}
    if backend == "flashinfer":  # a prompt's step has no graph then: in a graph they are triton's
        changes = {"mixed_tokens": 0} | changes
    return resolve_engine("cuda", **({"num_pages": 1024, "worker": "gpu"} | backends | changes))


def chats(count: int) -> list[GenerationRequest]:
    tokenizer = Tokenizer.load(CPU.model)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER)

    async def encode() -> list[tuple[int, ...]]:
        return [await tokenizer.encode_chat(chat) for chat in heldout_prompts(count, seed=5)]

    return [GenerationRequest(str(i), ids, params) for i, ids in enumerate(asyncio.run(encode()))]


def run_all(config: EngineConfig, requests: Sequence[GenerationRequest]) -> list[Result]:
    """Every request's answer; no more are queued at once than the engine takes."""
    config = replace(config, max_waiting=max(config.max_waiting, len(requests)))
    cluster = cluster_of(config)
    try:
        results = [cluster.submit(request, split=False) for request in requests]
        wait_all(results, WAIT_S)
    finally:
        cluster.close()
    return results


def cluster_of(config: EngineConfig) -> Loopback:
    """Skips the test where flashinfer has no kernel for the model's heads or for this GPU, and says so."""
    try:
        if config.prefill_attention_backend == "flashinfer":
            build_flashinfer(config)
        return Loopback(config)
    except ConfigError as refusal:
        if config.prefill_attention_backend != "flashinfer":
            raise
        pytest.skip(str(refusal))


def build_flashinfer(config: EngineConfig) -> None:
    """What was built once in a process stays: the engine's own build then ends at once."""
    from eyas.engine.attention.flashinfer_backend import Fa3Build

    head_dim = read_model(config.model, config.load_format).head_dim
    Fa3Build(getattr(torch, config.dtype), head_dim, config.device).wait()


@dataclass
class Reference:
    """A model as transformers computes it, in float32 on the GPU."""

    folder: str

    def __post_init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).cuda()

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """[len(output), vocabulary]: row i is what output[i] is chosen from."""
        ids = torch.tensor([[*prompt, *output]], device="cuda")
        return self._model(ids).logits[0, len(prompt) - 1 : -1].cpu()

    def excess(self, request: GenerationRequest, result: Result) -> float:
        """How far the answer's tokens are at most below the best; 0 for the model's own greedy answer."""
        output = result.tokens[0]
        logits = self.logits(request.prompt_ids, output)
        chosen = logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
        return float((logits.max(-1).values - chosen).max())
