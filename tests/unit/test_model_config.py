"""What is read from a Hugging Face folder, and which folders are refused with which sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.models.heads import read_head
from eyas.engine.models.table import read_model
from tests.unit.tiny import write_tiny_eagle3, write_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", layers=2)


def edit(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_parameters": None}, RopeConfig(10000.0)),
        ({"rope_parameters": None, "rope_theta": 5e5}, RopeConfig(5e5)),
        (
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(5e5, "linear", 2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_in_either_spelling(folder: Path, changes: dict[str, Any], rope: RopeConfig) -> None:
    assert read_model(edit(folder, **changes)).layers[0].attention.rope == rope


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2},
        {"rope_type": "linear", "factor": 2.0},
        {"type": "linear", "rope_type": "linear", "factor": 2.0},
    ],
)
def test_rope_in_both_spellings_counts_once_and_only_if_they_agree(
    folder: Path, scaling: dict[str, Any]
) -> None:
    both = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    edit(folder, rope_parameters=both, rope_scaling=scaling)
    assert read_model(folder).layers[0].attention.rope == RopeConfig(5e5, "linear", 2.0)
    with pytest.raises(ConfigError, match="rope_scaling and rope_parameters differ in factor: keep one"):
        read_model(edit(folder, rope_scaling=scaling | {"factor": 4}))
    with pytest.raises(ConfigError, match="rope_scaling and rope_parameters differ in mscale: keep one"):
        read_model(edit(folder, rope_scaling=scaling, rope_parameters=both | {"mscale": 0.7}))


def test_defaults_that_old_configs_leave_out(folder: Path) -> None:
    config = read_model(edit(folder, head_dim=None, num_key_value_heads=None))
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


def test_end_tokens_come_from_both_configs(folder: Path) -> None:
    assert read_model(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read_model(folder).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"},
            "architecture RwkvForCausalLM .* is not",
        ),
        ({"architectures": None}, "architecture"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "has no short_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "has no factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": "many"}, "wrong kind.*many"),
        ({"architectures": 1}, "wrong kind"),
        ({"num_attention_heads": 0, "head_dim": None}, "wrong kind"),
        ({"max_position_embeddings": float("inf")}, "wrong kind"),
        ({"rope_parameters": "linear"}, "wrong kind.*'linear'"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling and rope_parameters differ in factor, rope_type",
        ),
    ],
)
def test_configs_that_cannot_be_served(folder: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_model(edit(folder, **changes))


def test_folders_that_cannot_be_served(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no config.json"):
        read_model(tmp_path)
    weights = (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        read_model(folder)
    weights.rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "lost.safetensors"}}')
    with pytest.raises(ConfigError, match="lost.safetensors"):
        read_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_model(folder)


def test_the_fingerprint_is_of_the_model_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    original = read_model(folder).fingerprint
    copy = write_tiny_llama(tmp_path / "copy", layers=2)
    assert read_model(copy).fingerprint == original
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors | {k: v * 1.5 for k, v in tensors.items()}, copy / "model.safetensors")
    assert read_model(copy).fingerprint != original
    assert read_model(edit(folder, rms_norm_eps=1e-6)).fingerprint != original


def test_reading_a_config_loads_no_torch(folder: Path) -> None:
    code = (
        "import sys; from eyas.engine.models.table import read_model;"
        f"read_model({str(folder)!r}).fingerprint; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --- without weights -----------------------------------------------------------------------------------


def test_a_dummy_model_needs_no_weights(folder: Path) -> None:
    stored = read_model(folder)
    (folder / "model.safetensors").unlink()
    dummy = read_model(folder, "dummy")
    assert dummy.hidden_size == stored.hidden_size
    assert len({dummy.fingerprint, read_model(folder, "dummy").fingerprint}) == 1
    assert read_model(edit(folder, rms_norm_eps=1e-6), "dummy").fingerprint != dummy.fingerprint


def test_dummy_and_stored_weights_have_different_fingerprints(folder: Path) -> None:
    stored, dummy = read_model(folder), read_model(folder, "dummy")
    assert stored.fingerprint != dummy.fingerprint


@pytest.mark.parametrize(
    ("draft_vocab", "size", "tensors"),
    [(96, 96, {"lm_head.weight", "d2t"}), (None, 256, set()), (256, 256, set())],
)
def test_a_dummy_head_is_what_its_config_says(
    folder: Path, tmp_path: Path, draft_vocab: int | None, size: int, tensors: set[str]
) -> None:
    head = write_tiny_eagle3(tmp_path / "head", folder, draft_vocab=draft_vocab)
    (head / "model.safetensors").unlink()
    target = read_model(edit(folder, num_hidden_layers=8), "dummy")
    dummy = read_head(head, target, "dummy")
    assert (dummy.draft_vocab_size, dummy.dummy_tensors) == (size, tensors)
    assert dummy.fingerprint == read_head(head, target, "dummy").fingerprint
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        read_head(head, target)


def test_the_context_is_lowered_and_never_raised(folder: Path) -> None:
    config = read_model(folder)
    assert config.limited_to(None) == config
    assert config.limited_to(100).context_length == 100
    assert config.limited_to(100).fingerprint == config.fingerprint, "the same keys and values"
    with pytest.raises(ConfigError, match="--context-length: 2049 is more than the 2048 tokens") as refused:
        config.limited_to(2049)
    assert refused.value.param == "context-length"


@pytest.mark.parametrize(
    ("architecture", "changes", "asked"),
    [
        ("MistralForCausalLM", {"sliding_window": 2048}, None),
        ("MistralForCausalLM", {"sliding_window": 512}, 512),
        ("MistralForCausalLM", {}, None),
        ("Qwen3ForCausalLM", {"sliding_window": 512}, None),
        ("Qwen3ForCausalLM", {"sliding_window": 512, "use_sliding_window": True}, None),
    ],
)
def test_a_window_that_hides_nothing_is_none(
    folder: Path, architecture: str, changes: dict[str, Any], asked: int | None
) -> None:
    plain = read_model(edit(folder, architectures=[architecture], sliding_window=None)).limited_to(asked)
    windowed = read_model(edit(folder, **changes)).limited_to(asked)
    assert windowed == plain
    assert windowed.fingerprint == plain.fingerprint


def test_each_layer_has_its_own_window(folder: Path) -> None:
    uses = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}
    config = read_model(edit(folder, architectures=["Qwen2ForCausalLM"], **uses)).limited_to(None)
    assert [layer.attention.window for layer in config.layers] == [0, 512]
    assert read_model(edit(folder, layer_types=["sliding_attention", "full_attention"])) != config
    with pytest.raises(ConfigError, match="layer_types"):
        read_model(edit(folder, layer_types=["sliding_attention", "linear_attention"]))
