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
from eyas.engine.checkpoint.config import DraftConfig, ModelConfig, Rope
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
        ({"rope_parameters": None}, Rope(10000.0)),
        ({"rope_parameters": None, "rope_theta": 5e5}, Rope(5e5)),
        (
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            Rope(5e5, "linear", 2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            Rope(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            Rope(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_in_either_spelling(folder: Path, changes: dict[str, Any], rope: Rope) -> None:
    assert ModelConfig.from_folder(edit(folder, **changes)).rope == rope


def test_defaults_that_old_configs_leave_out(folder: Path) -> None:
    config = ModelConfig.from_folder(edit(folder, head_dim=None, num_key_value_heads=None))
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


def test_end_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    assert ModelConfig.from_folder(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert ModelConfig.from_folder(folder).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM .* is not supported"),
        ({"architectures": None}, "architecture"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "has no factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"vocab_size": "many"}, "wrong kind.*many"),
    ],
)
def test_configs_that_cannot_be_served(folder: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ModelConfig.from_folder(edit(folder, **changes))


def test_folders_that_cannot_be_served(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no config.json"):
        ModelConfig.from_folder(tmp_path)
    weights = (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        ModelConfig.from_folder(folder)
    weights.rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "lost.safetensors"}}')
    with pytest.raises(ConfigError, match="lost.safetensors"):
        ModelConfig.from_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.from_folder(folder)


def test_the_fingerprint_is_of_the_model_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    original = ModelConfig.from_folder(folder).fingerprint
    copy = write_tiny_llama(tmp_path / "copy", layers=2)
    assert ModelConfig.from_folder(copy).fingerprint == original
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors | {k: v * 1.5 for k, v in tensors.items()}, copy / "model.safetensors")
    assert ModelConfig.from_folder(copy).fingerprint != original
    assert ModelConfig.from_folder(edit(folder, rms_norm_eps=1e-6)).fingerprint != original


def test_reading_a_config_loads_no_torch(folder: Path) -> None:
    code = (
        "import sys; from eyas.engine.checkpoint.config import ModelConfig;"
        f"ModelConfig.from_folder({str(folder)!r}).fingerprint; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --- without weights -----------------------------------------------------------------------------------


def test_a_dummy_model_needs_no_weights(folder: Path) -> None:
    stored = ModelConfig.from_folder(folder)
    (folder / "model.safetensors").unlink()
    dummy = ModelConfig.from_folder(folder, "dummy")
    assert dummy.hidden_size == stored.hidden_size
    assert len({dummy.fingerprint, ModelConfig.from_folder(folder, "dummy").fingerprint}) == 1
    assert ModelConfig.from_folder(edit(folder, rms_norm_eps=1e-6), "dummy").fingerprint != dummy.fingerprint


def test_dummy_and_stored_weights_have_different_fingerprints(folder: Path) -> None:
    stored, dummy = ModelConfig.from_folder(folder), ModelConfig.from_folder(folder, "dummy")
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
    target = ModelConfig.from_folder(edit(folder, num_hidden_layers=8), "dummy")
    dummy = DraftConfig.from_folder(head, target, "dummy")
    assert (dummy.draft_vocab_size, dummy.dummy_tensors) == (size, tensors)
    assert dummy.fingerprint == DraftConfig.from_folder(head, target, "dummy").fingerprint
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        DraftConfig.from_folder(head, target)


def test_the_context_is_lowered_and_never_raised(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    assert config.limited_to(None) == config
    assert config.limited_to(100).context_length == 100
    assert config.limited_to(100).fingerprint == config.fingerprint, "the same keys and values"
    with pytest.raises(ConfigError, match="--context-length: 2049 is more than the 2048 tokens") as refused:
        config.limited_to(2049)
    assert refused.value.param == "context-length"


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"sliding_window": 2048}, None),
        ({"sliding_window": 4096, "use_sliding_window": True}, None),
        ({"sliding_window": 512, "use_sliding_window": False}, None),
        ({"sliding_window": 512}, 512),
    ],
)
def test_a_window_as_long_as_the_context_is_none(
    folder: Path, changes: dict[str, Any], asked: int | None
) -> None:
    plain = ModelConfig.from_folder(folder).limited_to(asked)
    windowed = ModelConfig.from_folder(edit(folder, **changes)).limited_to(asked)
    assert windowed.context_length == plain.context_length
    assert windowed.fingerprint == plain.fingerprint


@pytest.mark.parametrize("asked", [None, 513])
def test_a_shorter_window_is_refused(folder: Path, asked: int | None) -> None:
    config = ModelConfig.from_folder(edit(folder, sliding_window=512))
    with pytest.raises(ConfigError, match="sliding_window of 512 tokens .*--context-length 512"):
        config.limited_to(asked)
