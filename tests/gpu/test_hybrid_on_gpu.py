"""A hybrid on a GPU, in graphs: transformers' greedy tokens, from cached states, with drafts of every kind,
preempted, and split between two workers on one GPU.

A token is right if transformers in float32 gives no other a logit that is higher by more than
`near_ties.SLACK`; or would not, if it decided near ties of the row between experts as bfloat16 may have.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from tests.gpu import near_ties
from tests.unit.hybrid_rig import add_mtp_layer, write_hybrid
from tests.unit.loopback import Loopback, Result, wait_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

VOCAB, NEW = 2048, 80
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 2048,
}
OTHERS: dict[str, dict[str, Any]] = {
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"moe_intermediate_size": 64},
    "falcon_h1": {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_ssm": 512, "mamba_d_state": 64},
    "mamba2": {"num_heads": 16, "head_dim": 32, "state_size": 64},
}
CHAIN = {"speculation": SpeculationConfig(steps=3, draft_tokens=4, ngram=True)}
TREE = {"speculation": SpeculationConfig(steps=2, topk=6, draft_tokens=12, ngram=True)}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": CHAIN,
    "preempted": {"num_pages": 40, "state_slots": 4, "context_length": 600},
    "mtp chain": CHAIN,
    "mtp tree": TREE,
    "split": CHAIN,
    "split mtp tree": TREE,
}


def prompts() -> list[tuple[int, ...]]:
    """Texts that part at several places, with repetitions that lookups find."""
    draw = torch.Generator().manual_seed(2)
    pattern = torch.randint(3, VOCAB, (50,), generator=draw).tolist()
    text = pattern + torch.randint(3, VOCAB, (200,), generator=draw).tolist() + pattern * 6
    return [tuple(text[:cut] + pattern[:7]) for cut in (3, 64, 100, 300, 301, 500)]


def configs(folder: Path, pools: str, way: str, **changes: Any) -> list[EngineConfig]:
    asked = {"num_pages": 512, "pool_dir": pools, "max_running": 8, "chunk_tokens": 256} | changes
    asked |= {"prefill_attention_backend": "triton", "cuda_graph_bs": (2, 8)}  # a start takes seconds
    head = str(folder / "model") if "mtp" in way else None
    whole = resolve_engine("cuda", model=str(folder / "model"), draft=head, **asked | WAYS[way])
    if not way.startswith("split"):
        return [replace(whole, worker="unified")]
    drafts = () if head is None else (Role.DRAFT,)
    return [
        replace(whole, roles=(Role.PREFILL,), worker="prefill", transfer="cuda_ipc"),
        replace(whole, roles=(Role.DECODE, *drafts), worker="decode", transfer="cuda_ipc"),
    ]


@pytest.fixture
def pools() -> Iterator[str]:
    """A folder whose sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="eyas", dir="/dev/shm") as folder:
        yield folder


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_transformers_own(tmp_path: Path, pools: str, way: str) -> None:
    model = write_hybrid(tmp_path / "model", "qwen3_5", **SIZES).cuda()
    add_mtp_layer(tmp_path / "model", "layers.2.", SIZES["hidden_size"])
    _serve(tmp_path, pools, way, model)


@pytest.mark.parametrize("way", ["chain", "split"])
@pytest.mark.parametrize("family", OTHERS)
def test_tokens_of_other_kinds_are_transformers_own(
    tmp_path: Path, pools: str, family: str, way: str
) -> None:
    """Short convolutions; a state beside attention, with multipliers; and layers with states alone."""
    model = write_hybrid(tmp_path / "model", family, **SIZES | OTHERS[family]).cuda()
    _serve(tmp_path, pools, way, model)


def _serve(folder: Path, pools: str, way: str, model: Any) -> None:
    """Serves prompts twice, judges every token, and sees that nothing is left."""
    cluster = Loopback(*configs(folder, pools, way))
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    try:
        for turn in range(2):  # the second time from states that the first one left
            made = [GenerationRequest(f"{turn} {i}", prompt, params) for i, prompt in enumerate(prompts())]
            results = [cluster.submit(one, split=way.startswith("split")) for one in made]
            wait_all(results, 120)
            for one, result in zip(made, results, strict=True):
                near_ties.judge(model, one.prompt_ids, result.tokens[0])
        every = [worker.engine._scheduler for worker in cluster.workers.values()]
        assert every[0].cache.states.hits
        assert every[0].preemptions or way != "preempted"
    finally:
        cluster.close()
    assert not any(scheduler.cache.states.pool.used for scheduler in every)


def test_no_way_changes_a_bit_of_exact_answers(tmp_path: Path, pools: str) -> None:
    """Tokens at a temperature, and the bits of their log-probabilities."""
    write_hybrid(tmp_path / "model", "qwen3_5", **SIZES)
    add_mtp_layer(tmp_path / "model", "layers.2.", SIZES["hidden_size"])
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=NEW, ignore_eos=True, logprobs=1)
    told: dict[str, list[Any]] = {}
    for way in ("plain", "chain", "preempted", "mtp tree", "split"):
        cluster = Loopback(*configs(tmp_path, pools, way, deterministic=True, dtype="bfloat16"))
        try:
            for turn in range(2):
                made = [GenerationRequest(f"{turn} {i}", text, params) for i, text in enumerate(prompts())]
                results = [cluster.submit(one, split=way.startswith("split")) for one in made]
                wait_all(results, 120)
                told[f"{way} {turn}"] = [(result.tokens[0], _logprobs(result)) for result in results]
        finally:
            cluster.close()
    differing = {
        way: sum(a != b for a, b in zip(found, told["plain 0"], strict=True)) for way, found in told.items()
    }
    assert not any(differing.values()), differing


def _logprobs(result: Result) -> list[float]:
    return [one.logprob for entry in result.entries for one in entry.logprobs or () if one is not None]
