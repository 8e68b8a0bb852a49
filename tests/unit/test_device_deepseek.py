"""DeepSeek whole on the device path, kernels interpreted: the plain engine's tokens, whatever is drafted.

The NextN layer behind the model's own is the draft head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.attention.latent_prompts import ExpandedPrompts
from eyas.engine.batch.spans import QuerySpan
from tests.unit.test_device_engine import answers, on_device, rounds, tokens
from tests.unit.tiny import edit
from tests.unit.tiny_deepseek import SMALL, write_tiny_nextn_deepseek

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

FEW = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
V3 = SMALL | FEW | {"vocab_size": 16, "num_hidden_layers": 2, "first_k_dense_replace": 1}
LITE = V3 | {"q_lora_rank": None, "n_shared_experts": 2}
V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
"""What else a config.json of V2-Lite says."""
CORRECTION = "model.layers.{}.mlp.gate.e_score_correction_bias"  # which V2 does not have

DRAFTS = {
    "plain": None,
    "chain": SpeculationConfig(steps=2, topk=1, draft_tokens=3),
    "tree": SpeculationConfig(steps=2, topk=2, draft_tokens=4),
}
PROMPT = tuple((7 * i * i + i) % 16 for i in range(22))  # random drafts are right now and then


def write(folder: Path, sizes: dict[str, Any]) -> EngineConfig:
    """The plain engine of such a model."""
    write_tiny_nextn_deepseek(folder, sizes)
    if sizes is LITE:
        edit(folder, {CORRECTION.format(layer): None for layer in (1, 2)}, **V2)
    return EngineConfig(
        model=str(folder),
        draft=str(folder),
        num_pages=32,
        chunk_tokens=16,
        max_running=4,
        context_length=128,
        pool_dir=str(folder),
        worker="unified",
    )


def asked() -> list[GenerationRequest]:
    """A prompt of two chunks, and a short one whose answer is drawn."""
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=2**63 + 7, max_tokens=5, ignore_eos=True)
    return [GenerationRequest("chunks", PROMPT, greedy), GenerationRequest("short", (7, 9, 11), seeded)]


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("sizes", [V3, LITE], ids=["V3", "V2-Lite"])
def test_the_tokens_are_the_plain_engines(tmp_path: Path, sizes: dict[str, Any], drafts: str) -> None:
    config, spec = write(tmp_path, sizes), DRAFTS[drafts]
    config = replace(config, draft=None) if spec is None else replace(config, speculation=spec)
    expected, _ = answers(config, asked())
    found, _ = answers(on_device(config), asked())
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]
    if spec is not None:
        assert any(entry.accepted for result in found for entry in result.entries), "no draft was ever right"


def test_latents_in_fp8_have_the_plain_engines_tokens(tmp_path: Path) -> None:
    config = replace(write(tmp_path, V3), speculation=DRAFTS["chain"], kv_cache_dtype="fp8_e4m3")
    expected, _ = answers(config, asked())
    found, _ = answers(on_device(config), asked())
    assert tokens(found) == tokens(expected)


def test_prompts_in_the_expanded_form_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the target and of its head, whether it pays or not."""
    config = replace(write(tmp_path, V3), speculation=DRAFTS["chain"])
    expected, _ = answers(config, asked())
    spans: list[QuerySpan] = []

    def pays(self: ExpandedPrompts, planned: Sequence[QuerySpan]) -> bool:
        spans.extend(planned)
        return True

    monkeypatch.setattr(ExpandedPrompts, "pays", pays)
    found, _ = answers(on_device(config), asked())
    assert tokens(found) == tokens(expected)
    assert any(span.start for span in spans) and len(spans) >= 3, "chunks with and without a prefix"
