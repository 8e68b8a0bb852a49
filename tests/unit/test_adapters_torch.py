"""Adapters in plain torch: what a model computes with one is what the merged weights compute, whatever its
family stores as one matrix; and a row's bits depend on its own adapter alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_rig import write_adapter, write_merged
from families import write_family
from model_rig import Rig
from tiny import write_tiny_llama

from eyas.engine.attention.forward import rows_of_adapters
from eyas.engine.batch.spans import QuerySpan

PROMPT = [3, 17, 5, 99, 42, 7, 23, 64, 5, 12, 88, 1, 30]


def _logits(rig: Rig, adapter: int = 0) -> torch.Tensor:
    span = QuerySpan(rig.table(len(PROMPT)), 0, len(PROMPT), adapter=adapter)
    return rig.logits([span], PROMPT)


def _check(model: Path, adapter: Path, folder: Path) -> None:
    rig, merged = Rig(model, adapted=4), Rig(write_merged(folder, model, adapter))
    rig.fill(3, adapter)
    plain, updated, expected = _logits(rig), _logits(rig, 3), _logits(merged)
    torch.testing.assert_close(updated, expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())
    assert (plain - expected).abs().max() > 0.05 * expected.abs().max()
    torch.testing.assert_close(plain, _logits(Rig(model)), rtol=0, atol=0)


MORE = (
    "glm4",
    "cohere",
    "falcon",
    "granite",
    "gemma2",
    "olmo2",
    "stablelm",
    "mixtral",
    "starcoder2",
    "opt",
    "gptj",
)
UPDATED = {
    "deepseek_v3": (
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
}
"""Modules of families that have others, which adapters do not update: the keys' and values' of latents."""


ROUTED = {"deepseek_v3": "mlp.gate", "mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router"}
"""The router's name in further families."""


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "phi3", "gpt2", "gpt_neox", "deepseek_v3", "qwen3_moe"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in MORE),
    ],
)
def test_an_adapter_is_the_merged_model(tmp_path: Path, family: str) -> None:
    write_family(tmp_path / "model", family)
    modules = UPDATED.get(family, ())
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "model", modules=modules)
    _check(tmp_path / "model", adapter, tmp_path / "merged")


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in ROUTED)]
)
def test_a_router_is_updated_as_it_is_merged(tmp_path: Path, family: str) -> None:
    """So much that other experts are chosen."""
    write_family(tmp_path / "model", family)
    model, router = tmp_path / "model", ROUTED.get(family, "mlp.gate")
    adapter = write_adapter(tmp_path / "adapter", model, modules=("q_proj", "o_proj", router), size=2.0)
    _check(model, adapter, tmp_path / "merged")


def test_an_output_head_is_updated_as_it_is_merged(tmp_path: Path) -> None:
    """Logits of all rows, and of some of them."""
    model = write_tiny_llama(tmp_path / "model", tied=False)
    adapter = write_adapter(tmp_path / "adapter", model, modules=("lm_head", "q_proj"))
    _check(model, adapter, tmp_path / "merged")
    rig = Rig(model, adapted=2)
    rig.fill(1, adapter)
    spans = [QuerySpan(rig.table(len(PROMPT)), 0, len(PROMPT), adapter=slot) for slot in (0, 1)]
    residual, _ = rig.forward(spans, PROMPT * 2)
    whole, picked = rig.logits(spans, PROMPT * 2), torch.tensor([20, 3, 20, 14])
    some = rig.model.logits(residual, picked, adapters=rows_of_adapters(spans, "cpu"))
    torch.testing.assert_close(some, whole[picked], rtol=0, atol=0)
