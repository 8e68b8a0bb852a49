"""Keys that published configurations leave out or spell in a way of their own mean what transformers says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.layers.rotary import tables
from eyas.engine.models.keys import reading
from eyas.engine.models.table import MODELS

FOLDER = Path("folder")
READERS = {
    "Gemma3ForConditionalGeneration": "Gemma3Config",
    "Llama4ForConditionalGeneration": "Llama4Config",
    "Mistral3ForConditionalGeneration": "Mistral3Config",
    "Qwen2VLForConditionalGeneration": "Qwen2VLConfig",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLConfig",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5Config",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeConfig",
    "Qwen3VLForConditionalGeneration": "Qwen3VLConfig",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeConfig",
}


def described(architecture: str, raw: dict[str, Any]) -> ModelConfig:
    family = importlib.import_module(f"eyas.engine.models.{MODELS[architecture]}")
    with reading(FOLDER):
        config = family.describe(raw | {"architectures": [architecture]}, FOLDER)
    assert isinstance(config, ModelConfig)
    return config


def written(config: transformers.PretrainedConfig) -> dict[str, Any]:
    raw = json.loads(json.dumps(config.to_dict(), default=str))
    assert isinstance(raw, dict)
    return raw


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        *((architecture, {}) for architecture in READERS if "Mistral3" not in architecture),
        ("Mistral3ForConditionalGeneration", {"model_type": "mistral"}),
        ("Mistral3ForConditionalGeneration", {"model_type": "ministral3"}),
    ],
)
def test_sizes_of_a_text_config_may_be_left_out(architecture: str, text: dict[str, Any]) -> None:
    """A `text_config` that transformers writes may lack keys whose value is its class's default."""
    config = getattr(transformers, READERS[architecture])(text_config=text or None)
    whole = written(config)
    experts = {name: n for name, n in whole["text_config"].items() if name == "num_local_experts"}
    tied = {"tie_word_embeddings": whole["tie_word_embeddings"]}
    assert described(architecture, {"text_config": text | experts, **tied}) == described(architecture, whole)


@pytest.mark.parametrize(
    ("architecture", "config", "key"),
    [
        ("Olmo2ForCausalLM", "Olmo2Config", "rms_norm_eps"),
        ("Phi3ForCausalLM", "Phi3Config", "rms_norm_eps"),
        ("GptOssForCausalLM", "GptOssConfig", "rope_parameters"),
        ("GptOssForCausalLM", "GptOssConfig", "head_dim"),
    ],
)
def test_a_key_that_is_left_out_has_the_family_s_default(architecture: str, config: str, key: str) -> None:
    raw = written(getattr(transformers, config)())
    left_out = {name: value for name, value in raw.items() if name != key}
    assert described(architecture, left_out) == described(architecture, raw)


def test_a_llama3_rope_may_change_in_one_step() -> None:
    """Llama-4-Scout's factors are the same."""
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    text = {"rope_parameters": scaling}
    rope = described("Llama4ForConditionalGeneration", {"text_config": text}).layers[0].attention.rope
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=scaling)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert isinstance(rope, RopeConfig)
    cos, sin = tables(rope, 128, 4)
    torch.testing.assert_close(torch.atan2(sin, cos)[1], expected)


@pytest.mark.parametrize(("value", "tuned"), [(4, True), (True, True), (0, False), (False, False)])
def test_llama_4_s_temperature_is_a_switch_or_a_number(value: object, tuned: bool) -> None:
    text = {"attn_temperature_tuning": value}
    layers = described("Llama4ForConditionalGeneration", {"text_config": text}).layers
    assert (layers[3].attention.temper is not None) == tuned


def test_llama_4_without_layers_of_experts_has_none() -> None:
    layers = described("Llama4ForConditionalGeneration", {"text_config": {"moe_layers": []}}).layers
    assert not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in layers)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("CohereForCausalLM", "CohereConfig"), ("Cohere2ForCausalLM", "Cohere2Config")],
)
def test_command_r_says_its_context_in_a_key_of_its_own(architecture: str, config: str) -> None:
    raw = written(getattr(transformers, config)(max_position_embeddings=8192))
    assert described(architecture, raw).context_length == 8192
    assert described(architecture, raw | {"model_max_length": 131_072}).context_length == 131_072


def test_the_last_layer_of_an_exaone_4_sees_everything() -> None:
    raw = written(transformers.Exaone4Config(num_hidden_layers=6)) | {"sliding_window_pattern": "LLLG"}
    del raw["layer_types"]
    windows = [layer.attention.window for layer in described("Exaone4ForCausalLM", raw).layers]
    assert windows == [4096, 4096, 4096, 0, 4096, 0]


@pytest.mark.parametrize(
    ("architecture", "config"), [("GemmaForCausalLM", "GemmaConfig"), ("Gemma2ForCausalLM", "Gemma2Config")]
)
def test_a_gemma_that_sees_what_follows_is_refused(architecture: str, config: str) -> None:
    raw = written(getattr(transformers, config)()) | {"use_bidirectional_attention": True}
    with pytest.raises(ConfigError, match="use_bidirectional_attention of a Gemma is not supported"):
        described(architecture, raw)


def test_the_text_of_a_mistral_3_is_one_that_is_known() -> None:
    with pytest.raises(ConfigError, match="text_config of model_type mistral9 is not supported"):
        described("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "mistral9"}})
