"""Every family against transformers: whole prompts, chunks and decode steps; and that each special counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.models.table import MODELS, read_model
from tests.unit.crossed import crossed
from tests.unit.families import SAMPLES, write_family
from tests.unit.family_changes import (
    CLOSE,
    LENGTH,
    Change,
    attention,
    common,
    edit,
    feed_forward,
    norms,
    prompt,
    wanted,
    whole,
)
from tests.unit.hybrid_rig import HYBRIDS
from tests.unit.model_rig import Rig

MORE = ("_halves", "_scaled", "_shares", "_window", "_windows", "_linear", "_eyes", "_lite", "kimi_k2")
"""Ends of the names of samples whose architecture is here by another sample, too."""


def test_every_architecture_has_a_sample() -> None:
    """Covers the models that transformers has; each other model states its equations in its own test."""
    known = {name for name in MODELS if hasattr(transformers, name)}
    assert {sample.model for sample in (*SAMPLES.values(), *HYBRIDS.values())} == known


@pytest.mark.parametrize("name", crossed(SAMPLES, quick=lambda name: not name.endswith(MORE)))
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """A whole prompt; the same in chunks; and its last rows one at a time."""
    model = write_family(tmp_path, name)
    tokens = prompt()
    expected = wanted(model, tokens)
    rig = Rig(tmp_path)
    assert (whole(rig, tokens) - expected).abs().max() < CLOSE
    assert expected.std() > 0.1

    table, parts = rig.table(LENGTH), []
    cuts = [0, 5, 69, *range(147, LENGTH + 1)]
    for start, end in zip(cuts, cuts[1:], strict=False):
        parts.append(rig.logits([QuerySpan(table, start, end - start)], tokens[start:end]))
    assert (torch.cat(parts) - expected).abs().max() < CLOSE


@pytest.mark.parametrize("length", [60, 64, 100, 128])
def test_dynamic_rope_is_transformers_for_a_sequence_that_fills_the_context(
    tmp_path: Path, length: int
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = write_family(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64)
    tokens = prompt(length)
    config = read_model(tmp_path)
    assert config.context_length == 128
    expected = wanted(model, tokens)
    assert (whole(Rig(tmp_path, config.limited_to(length)), tokens) - expected).abs().max() < CLOSE
    if length > 64:  # power check
        plain = whole(Rig(tmp_path, config.limited_to(64)), tokens)
        assert (plain - expected).abs().max() > 100 * CLOSE


@pytest.mark.parametrize("length", [60, 64, 100])
def test_longrope_is_transformers_for_a_sequence_that_fills_the_context(tmp_path: Path, length: int) -> None:
    """Short factors for as much as the model was first trained on, long ones for more."""
    model, tokens = write_family(tmp_path, "phi3"), prompt(length)
    config, expected = read_model(tmp_path), wanted(model, tokens)
    assert (whole(Rig(tmp_path, config.limited_to(length)), tokens) - expected).abs().max() < CLOSE
    other = whole(Rig(tmp_path, config.limited_to(64 if length > 64 else 65)), tokens)
    assert (other - expected).abs().max() > 100 * CLOSE


def test_an_older_phi3_is_the_same(tmp_path: Path) -> None:
    """`rope_scaling` without a theta, its kind under an older name, the lengths beside it."""
    model, tokens = write_family(tmp_path, "phi3"), prompt()
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    told = raw.pop("rope_parameters")
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        raw[name] = told.pop(name)
    assert raw["original_max_position_embeddings"] == 64
    path.write_text(json.dumps(raw | {"rope_scaling": told | {"rope_type": None, "type": "su"}}))
    assert (whole(Rig(tmp_path), tokens) - wanted(model, tokens)).abs().max() < CLOSE


def test_a_mistral_whose_layers_have_kinds_is_a_ministral(tmp_path: Path) -> None:
    """Ministral-8B was published under Mistral's name, and transformers takes it for what it is."""
    model = write_family(tmp_path, "ministral")
    edit(tmp_path, architectures=["MistralForCausalLM"], model_type="mistral")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)) is type(model)
    tokens = prompt()
    assert (whole(Rig(tmp_path), tokens) - wanted(model, tokens)).abs().max() < CLOSE


@pytest.mark.parametrize("name", ["qwen2", "qwen2_windows"])
def test_biases_of_a_qwen2_are_there_whatever_attention_bias_says(tmp_path: Path, name: str) -> None:
    model = write_family(tmp_path, name)
    edit(tmp_path, attention_bias=False)
    tokens = prompt()
    assert (whole(Rig(tmp_path), tokens) - wanted(model, tokens)).abs().max() < CLOSE


def test_a_window_of_a_mixtral_is_every_layers(tmp_path: Path) -> None:
    model = write_family(tmp_path, "mixtral_window")
    edit(tmp_path, layer_types=["full_attention"] * 4)
    tokens = prompt()
    assert (whole(Rig(tmp_path), tokens) - wanted(model, tokens)).abs().max() < CLOSE


def test_a_mixtral_that_leaves_keys_out_has_transformers_defaults(tmp_path: Path) -> None:
    write_family(tmp_path, "mixtral")
    edit(tmp_path, rope_parameters=None, rms_norm_eps=None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if v is not None}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = prompt()
    assert (whole(Rig(tmp_path), tokens) - wanted(model, tokens)).abs().max() < CLOSE


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"attn_logit_softcapping": 20.0}, "attn_logit_softcapping"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            "rope_parameters has factor, rope_type",
        ),
    ],
)
def test_what_transformers_leaves_out_of_a_gemma3_is_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    write_family(tmp_path, "gemma3")
    edit(tmp_path, **changes)
    with pytest.raises(ConfigError, match=complaint):
        read_model(tmp_path)


def test_both_kinds_of_a_gemmas_rope_count_for_its_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    ropes = {"full_attention": yarn, "sliding_attention": {"rope_type": "default"}}
    write_family(tmp_path, "gemma3", rope_parameters=ropes)
    assert read_model(tmp_path).context_length == 4 * 512
    edit(tmp_path, rope_scaling=yarn)
    read_model(tmp_path)
    edit(tmp_path, rope_scaling=yarn | {"factor": 8.0})
    with pytest.raises(ConfigError, match="differ in factor"):
        read_model(tmp_path)


def test_a_published_gemma_leans_on_transformers_defaults(tmp_path: Path) -> None:
    """The 4B configuration in its older spelling."""
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text = sizes | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model(tmp_path, "dummy")
    known = transformers.Gemma3TextConfig(**json.loads(json.dumps(text)))
    assert [layer.attention.window > 0 for layer in config.layers] == [
        kind == "sliding_attention" for kind in known.layer_types
    ]
    local, everywhere = (config.layers[i].attention for i in (0, 5))
    assert (local.window, local.rope) == (
        1024,
        RopeConfig(known.rope_parameters["sliding_attention"]["rope_theta"]),
    )
    theta = known.rope_parameters["full_attention"]["rope_theta"]
    assert (everywhere.window, everywhere.rope) == (0, RopeConfig(theta, "linear", 8.0))
    assert local.num_heads == known.num_attention_heads and local.head_dim == known.head_dim
    assert config.kv_format.kv_heads == known.num_key_value_heads and config.vocab_size == known.vocab_size
    assert config.context_length == known.max_position_embeddings and config.eos_token_ids == (1, 106)
    assert config.tied_head and config.norm_eps == known.rms_norm_eps


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("ministral", attention(window=0), marks=pytest.mark.slow),
        ("mistral", attention(window=0)),
        pytest.param("mistral", attention(window=41), marks=pytest.mark.slow),
        pytest.param("mistral", attention(window=39), marks=pytest.mark.slow),
        ("qwen2", attention(qkv_bias=False)),
        pytest.param("qwen2_windows", attention(window=0), marks=pytest.mark.slow),
        ("olmo2", attention(row_norms=False)),
        pytest.param("olmo2", norms(after_attention=""), marks=pytest.mark.slow),
        ("olmo2", norms(before_attention="post_attention_layernorm")),
        pytest.param("phi3", attention(window=0), marks=pytest.mark.slow),
        ("phi3", attention(rope=RopeConfig(10000.0, share=0.75))),
        pytest.param("phi3_short", attention(rope=RopeConfig(10000.0)), marks=pytest.mark.slow),
        ("qwen3", attention(head_norms=False)),
        ("llama_biases", attention(output_bias=False)),
        ("llama_yarn", attention(rope=RopeConfig(10000.0))),
        ("gemma2", attention(soft_cap=0.0)),
        pytest.param("gemma2", common(logit_soft_cap=0.0), marks=pytest.mark.slow),
        pytest.param("gemma3", attention(window=0), marks=pytest.mark.slow),
        pytest.param("gemma3", attention(scale=0.25), marks=pytest.mark.slow),
        pytest.param("gemma3", attention(rope=RopeConfig(1000000.0)), marks=pytest.mark.slow),
        ("gemma3", attention(rope=RopeConfig(10000.0))),
        pytest.param("gemma3", feed_forward(activation="silu"), marks=pytest.mark.slow),
        pytest.param("gemma3", norms(after_attention=""), marks=pytest.mark.slow),
        pytest.param("gemma3", norms(after_feed_forward=""), marks=pytest.mark.slow),
        pytest.param("gemma3", common(norm_offset=0.0), marks=pytest.mark.slow),
        ("gemma3", common(embedding_scale=1.0)),
        pytest.param("deepseek_v2", feed_forward(topk_groups=4), marks=pytest.mark.slow),
        pytest.param("deepseek_v2", feed_forward(group_best=2), marks=pytest.mark.slow),
        pytest.param("deepseek_v2", feed_forward(scale=1.0), marks=pytest.mark.slow),
        ("deepseek_v2_lite", feed_forward(normalised=True)),
        pytest.param("deepseek_v2_lite", attention(rope=RopeConfig(10000.0)), marks=pytest.mark.slow),
        pytest.param("deepseek_v3_halves", attention(adjacent=True), marks=pytest.mark.slow),
        pytest.param("kimi_k2", feed_forward(scores="softmax"), marks=pytest.mark.slow),
        ("kimi_k2", feed_forward(corrected=False)),
        ("mixtral", feed_forward(normalised=False)),
        pytest.param("mixtral", feed_forward(per_row=1), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", feed_forward(normalised=False), marks=pytest.mark.slow),
        pytest.param("qwen3_moe_shares", feed_forward(normalised=True), marks=pytest.mark.slow),
    ],
)
def test_without_its_special_a_family_is_another_model(tmp_path: Path, name: str, change: Change) -> None:
    """Power check: what the comparison above would say of a decoder that left this out.

    One that leaves out tensors does not even start.
    """
    model = write_family(tmp_path, name)
    tokens = prompt()
    try:
        rig = Rig(tmp_path, change(read_model(tmp_path)))
    except ConfigError as refused:
        assert "does not read" in str(refused)
        return
    assert (whole(rig, tokens) - wanted(model, tokens)).abs().max() > 100 * CLOSE


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads 0 must be 1 or more"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0 is not between 1 and the 12 experts"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok 13 is not between"),
        ({"n_group": 0}, "n_group 0 does not divide the 12 experts"),
        ({"n_group": 5}, "n_group 5 does not divide the 12 experts"),
        ({"n_group": 12}, "n_group 12 leaves groups of fewer than 2 experts"),
        ({"topk_group": 5}, "topk_group 5 is not between 1 and n_group 4"),
        ({"topk_group": 1, "num_experts_per_tok": 4}, "topk_group 1 leaves fewer than 4 experts"),
        ({"rms_norm_eps": -1}, "rms_norm_eps -1.0 is no small number"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta -1.0 is not a positive number"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    write_family(tmp_path, "deepseek_v3")
    edit(tmp_path, **changes)
    with pytest.raises(ConfigError, match=f"config.json of .*: {complaint}"):
        read_model(tmp_path)


def test_a_window_is_not_negative(tmp_path: Path) -> None:
    write_family(tmp_path, "mistral")
    edit(tmp_path, sliding_window=-1)
    with pytest.raises(ConfigError, match="sliding_window -1 is negative"):
        read_model(tmp_path)


def test_layers_that_cannot_share_a_pool_are_refused_by_name(tmp_path: Path) -> None:
    write_family(tmp_path, "llama")
    config = read_model(tmp_path)
    first, *rest = config.layers
    for fields, complaint in (
        ({"num_kv_heads": 3}, "num_key_value_heads must divide num_attention_heads"),
        ({"shared_from": 1}, "num_kv_shared_layers: layer 1 has no keys and values for 2 heads of 16"),
    ):
        odd = dataclasses.replace(first, attention=dataclasses.replace(first.attention, **fields))
        with pytest.raises(ConfigError, match=complaint):
            dataclasses.replace(config, layers=(odd, *rest))
    odd, even = (attention(num_heads=12, num_kv_heads=number)(config).layers[0] for number in (3, 4))
    with pytest.raises(ConfigError, match="differs between layers: 3 heads of 16 do not fit rows of 64"):
        dataclasses.replace(config, layers=(odd, even))
    with pytest.raises(ConfigError, match="it has no layers"):
        dataclasses.replace(config, layers=())
