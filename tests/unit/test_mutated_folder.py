"""A model's folder whose small files hold anything: it is a model, or one `ConfigError`, and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eyas.cluster.checks import check_model
from eyas.common.config import ASSETS
from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.folder import weight_files
from eyas.engine.layers.rotary import tables
from eyas.engine.models.table import read_model

DEMO_MODEL = ASSETS / "nano"
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")
FIELDS = {
    "config.json": [
        *json.loads((DEMO_MODEL / "config.json").read_text()),
        *("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window"),
        *("max_window_layers", "quantization_config", "partial_rotary_factor", "text_config"),
        *("n_routed_experts", "num_experts_per_tok", "num_local_experts", "moe_intermediate_size"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("first_k_dense_replace", "topk_method", "n_group", "topk_group", "routed_scaling_factor"),
        *("query_pre_attn_scalar", "final_logit_softcapping", "sliding_window_pattern"),
    ],
    "generation_config.json": ["eos_token_id", "temperature", "top_k", "top_p", "min_p", "max_new_tokens"],
    "tokenizer_config.json": ["added_tokens_decoder", "chat_template", "eos_token", "extra_special_tokens"],
    "model.safetensors.index.json": ["weight_map", "metadata"],
}
ARCHITECTURES = [
    *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM"),
    *("Qwen3MoeForCausalLM", "Gemma2ForCausalLM", "Gemma3ForConditionalGeneration", "DeepseekV3ForCausalLM"),
]
NUMBERS = (-1, 0, 1, 2, 5, 64, 4095, 4096, 2**31, 2**63, 10**400, 0.0, -0.0, 1e-320, 0.5, 2.5, 1e308)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([*NUMBERS, float("nan"), float("inf"), float("-inf")]),
    st.sampled_from(
        ["", "2", "model.safetensors", "../x", "/etc/passwd", "a\0b", "\ud800", "x" * 300, "yarn"]
    ),
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "dynamic", "yarn", "llama3", "default"])},
    optional={
        name: st.one_of(PLAIN, st.floats(0.001, 1e4))
        for name in ("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "mscale")
        + ("beta_slow", "attention_factor", "original_max_position_embeddings", "mscale_all_dim")
    },
)
VALUES = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    ROPE,
    st.dictionaries(
        st.sampled_from(["a", "factor", "vocab_size", "quant_method", "weights"]), PLAIN, max_size=3
    ),
)
CHANGES = st.one_of([
    st.tuples(st.just(file), st.dictionaries(st.sampled_from(FIELDS[file]), VALUES, min_size=1, max_size=3))
    for file in FILES
])  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The embedded model; its small files are written anew by each example."""
    path = tmp_path_factory.mktemp("model")
    for name in ("model.safetensors", "tokenizer.json"):
        os.symlink(DEMO_MODEL / name, path / name)
    yield path


def write(folder: Path, **files: str) -> None:
    """The small files as they are, and those that are given instead."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
        if (DEMO_MODEL / name).exists():
            (folder / name).write_bytes((DEMO_MODEL / name).read_bytes())
    for name, text in files.items():
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))


def outcome(folder: Path, *, template: bool = True) -> ModelConfig | str:
    """What a start makes of the folder, before weights are read: a model, or its sentence.

    `template`: with the chat template, which takes most of the time.
    """
    try:
        if template:
            check_model(str(folder))
        config = read_model(folder).limited_to(None)
        for layer in dict.fromkeys(config.layers):
            cos, sin = tables(
                layer.attention.rope, layer.attention.rotated_dim, min(config.context_length, 64)
            )
            assert bool(cos.isfinite().all() and sin.isfinite().all()), layer.attention.rope
    except ConfigError as error:
        assert "\n" not in error.message, "one line"
        return error.message
    assert all(isinstance(id, int) and 0 <= id < config.vocab_size for id in config.eos_token_ids)
    assert all(file.parent == folder for file in weight_files(folder))
    return config


def changed(file: str, changes: dict[str, Any]) -> str:
    path = DEMO_MODEL / file
    return json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes)


@settings(max_examples=50, derandomize=True)
@given(change=CHANGES, architecture=st.sampled_from(ARCHITECTURES))
@example(("config.json", {"rope_scaling": {"rope_type": "yarn", "factor": 1e-320}}), "LlamaForCausalLM")
@example(("config.json", {"hidden_size": 10**400}), "LlamaForCausalLM")
def test_any_values_are_a_model_or_one_sentence(
    folder: Path, change: tuple[str, dict[str, Any]], architecture: str
) -> None:
    file, values = change
    if file == "config.json":
        values = {"architectures": [architecture]} | values
    write(folder, **{file: changed(file, values)})
    outcome(folder, template=file in ("tokenizer_config.json", "generation_config.json"))


@settings(max_examples=20, derandomize=True)
@given(file=st.sampled_from(FILES), cut=st.integers(0, 400), put=st.text('{}[]",:0-9ae\\\0é', max_size=4))
def test_any_text_is_a_model_or_one_sentence(folder: Path, file: str, cut: int, put: str) -> None:
    text = changed(file, {"weight_map": {"x": "model.safetensors"}} if "index" in file else {})
    write(folder, **{file: text[:cut] + put + text[cut + 1 :]})
    outcome(folder)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "[]", "7", "", '{"a":1,"a":2}']
)
def test_what_is_no_object_names_its_file(folder: Path, file: str, text: str) -> None:
    write(folder, **{file: text})
    said = outcome(folder)
    assert isinstance(said, str)
    assert file in said


@pytest.mark.parametrize(
    "id", [5000, 4096, "2", ["2"], 2.5, -1, [[2]], True, {}, [None], float("nan"), 10**400]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_is_an_id_of_the_vocabulary(folder: Path, file: str, id: Any) -> None:
    write(folder, **{file: changed(file, {"eos_token_id": id})})
    said = outcome(folder)
    assert isinstance(said, str)
    assert f"{folder}/{file}: eos_token_id" in said
    assert "of the 4096 in the vocabulary" in said


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf"), "2", True, 1e-300, 1e300, 10**400])
def test_a_rope_factor_is_a_sensible_number(folder: Path, kind: str, factor: Any) -> None:
    rest = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {"rope_type": kind, "factor": factor, **rest}
    write(folder, **{"config.json": changed("config.json", {"rope_scaling": scaling})})
    said = outcome(folder)
    assert isinstance(said, str)
    assert "config.json" in said
    assert "factor" in said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads 0 must be 1 or more"),
        ({"head_dim": 0}, "head_dim 0 must be 1 or more"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0 must be 1 or more"),
        ({"num_hidden_layers": -3}, "num_hidden_layers -3 must be 1 or more"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 must be 4096 or less"),
        ({"hidden_size": True}, "hidden_size True must be a whole number"),
        ({"intermediate_size": "656"}, "intermediate_size '656' must be a whole number"),
        ({"vocab_size": [4096]}, r"vocab_size \[4096\] must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan must be a finite number"),
        (
            {"max_position_embeddings": 2**40},
            "max_position_embeddings 1099511627776 must be 16777216 or less",
        ),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false' must be true or false"),
        ({"rope_theta": float("inf")}, "rope_theta inf must be a finite number"),
        ({"rope_theta": 0}, "rope_theta 0.0 is not a positive number"),
        ({"architectures": "LlamaForCausalLM"}, "architectures 'LlamaForCausalLM' must be a list of strings"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 0}}, "beta_fast 0.0 of the yarn"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 5,
                    "high_freq_factor": 4,
                }
            },
            "low_freq_factor 5.0 is above high_freq_factor 4.0",
        ),
    ],
)
def test_a_number_is_refused_by_name(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    write(folder, **{"config.json": changed("config.json", changes)})
    with pytest.raises(ConfigError, match=rf"config\.json of {folder}.*: {sentence}"):
        read_model(folder)


@pytest.mark.parametrize(
    "name", [5, None, True, [], {}, "", "../x", "a/../../x", "/etc/passwd", "a\0b", "x" * 300]
)
def test_a_weight_file_is_named_within_the_folder(folder: Path, name: Any) -> None:
    write(folder, **{"model.safetensors.index.json": json.dumps({"weight_map": {"x": name}})})
    with pytest.raises(
        ConfigError, match=r"index\.json: weight_map has .* for 'x', which is no name of a file"
    ):
        weight_files(folder)
