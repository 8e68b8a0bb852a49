"""Each special of a dense family counts: a decoder that leaves it out gives other logits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import NormNames, Temper
from eyas.engine.checkpoint.rope import NO_ROPE, RopeConfig
from eyas.engine.loading.arithmetic import inexact
from eyas.engine.models.table import read_model
from tests.unit.crossed import crossed
from tests.unit.dense_families import DENSE
from tests.unit.families import write_family
from tests.unit.family_changes import (
    ROPE,
    Change,
    attention,
    common,
    every,
    feed_forward,
    layers,
    norms,
    prompt,
    unnoticed,
    wanted,
)

SPECIALS: dict[str, dict[str, Change]] = {
    "smollm3": {"rope nowhere": attention(rope=RopeConfig(2e6)), "all layers rotate": attention(rope=ROPE)},
    "smollm3_windows": {"windows": attention(window=0), "output bias": attention(output_bias=False)},
    "olmo3": {
        "windows": attention(window=0),
        "stretched everywhere": layers(
            lambda i, layer: dataclasses.replace(
                layer, attention=dataclasses.replace(layer.attention, rope=ROPE)
            )
        ),
        "norms of rows": attention(row_norms=False),
    },
    "seed_oss": {"biases": attention(qkv_bias=False), "output bias": attention(output_bias=False)},
    "exaone4": {
        "windows": attention(window=0),
        "rotates everywhere": attention(rope=ROPE),
        "norms of heads": attention(head_norms=False),
        "norms behind": norms(after_feed_forward=""),
    },
    "exaone4_small": {"rotates": attention(rope=NO_ROPE)},
    "ministral3": {"temperature": attention(temper=None), "span": attention(temper=Temper(0.5, 65))},
    "ministral3_with_eyes": {"temperature": attention(temper=None)},
    "glm": {"neighbours": attention(adjacent=False), "part": attention(rope=ROPE)},
    "glm4": {"neighbours": attention(adjacent=False), "norms behind": norms(after_attention="")},
    "ernie4_5": {"neighbours": attention(adjacent=False), "biases": feed_forward(bias=False)},
    "hunyuan": {"behind": attention(norms_behind=False), "norms": attention(head_norms=False)},
    "hunyuan_alpha": {"alpha": attention(rope=ROPE)},
    "gemma": {"embeddings": common(embedding_scale=1.0), "offset": common(norm_offset=0.0)},
    "gemma4": {
        "values of keys": attention(keys_as_values=False),
        "windows": attention(window=0),
        "norms of values": attention(value_norms=False),
        "norms of heads": attention(head_norms=False),
        "number of a layer": every(scaled=False),
        "scores": attention(scale=0.25),
        "rope": attention(rope=ROPE),
        "soft cap": common(logit_soft_cap=0.0),
    },
    "gemma4_tokens": {
        "vectors": lambda config: every(token_width=0)(dataclasses.replace(config, token_rows=0)),
        "values of another layer": attention(shared_from=None),
    },
    "gpt2": {
        "positions": common(positions=0),
        "scores by layer": attention(scale=0.25),
        "mean": common(centred=False, norm_bias=False),
        "biases": attention(qkv_bias=False),
    },
    "gptj": {
        "side by side": every(parallel=False),
        "neighbours": attention(adjacent=False),
        "part": attention(rope=ROPE),
        "logits": common(head_bias=False),
    },
    "gpt_neox": {
        "side by side": every(parallel=False),
        "part": attention(rope=ROPE),
        "bias of o": attention(output_bias=False),
        "activation": feed_forward(activation="relu"),
    },
    "gpt_neox_one_after_the_other": {"one after the other": every(parallel=True)},
    "falcon": {"side by side": every(parallel=False), "activation": feed_forward(activation="relu")},
    "falcon_groups": {
        "two norms": every(norms=NormNames("ln_attn", "", "ln_attn", "")),
        "biases": feed_forward(bias=False),
    },
    "glm4v": {"neighbours": attention(adjacent=False), "norms behind": norms(after_attention="")},
    "helium": {"neighbours": attention(adjacent=False)},
    "qwen2_vl": {"biases": attention(qkv_bias=False)},
    "qwen3_vl": {"norms of heads": attention(head_norms=False)},
    "cohere": {
        "mean": common(centred=False),
        "side by side": every(parallel=False),
        "neighbours": attention(adjacent=False),
        "logits": common(logit_scale=1.0),
    },
    "cohere_norms": {"norms of heads": attention(centred_heads=False)},
    "cohere2": {"windows": attention(window=0), "rotates everywhere": attention(rope=ROPE)},
    "nemotron": {
        "mean": common(centred=False, norm_bias=False),
        "offset": common(norm_offset=0.0),
        "part": attention(rope=ROPE),
        "square": feed_forward(activation="relu"),
    },
    "apertus": {"xIELU": feed_forward(activation="relu2"), "norms of heads": attention(head_norms=False)},
    "starcoder2": {
        "windows": attention(window=0),
        "norm bias": common(norm_bias=False),
        "activation": feed_forward(activation="silu"),
    },
    "phi": {"side by side": every(parallel=False), "logits": common(head_bias=False)},
    "stablelm": {"mean": common(centred=False, norm_bias=False), "biases": attention(qkv_bias=False)},
    "stablelm_side_by_side": {"side by side": every(parallel=False)},
    "arcee": {"biases": feed_forward(bias=False)},
    "opt": {"positions": common(positions=0), "offset": common(position_offset=1)},
    "granite": {
        "embeddings": common(embedding_scale=1.0),
        "scores": attention(scale=0.25),
        "residual": every(residual_scale=1.0),
        "logits": common(logit_scale=1.0),
    },
}


QUICK = (
    "smollm3",
    "olmo3",
    "exaone4",
    "ministral3",
    "glm4",
    "hunyuan",
    "cohere",
    "nemotron",
    "apertus",
    "opt",
    "granite",
)
"""Every kind of special by one family that has it."""


@pytest.mark.parametrize("name", crossed(SPECIALS, quick=lambda name: name in QUICK))
def test_each_special_counts(tmp_path: Path, name: str) -> None:
    model, tokens = write_family(tmp_path, name), prompt()
    assert unnoticed(tmp_path, SPECIALS[name], wanted(model, tokens), tokens) == []


NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "ffn_dim",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


@pytest.mark.parametrize(
    "model", {sample.model: None for sample in DENSE.values() if sample.model.endswith("ForCausalLM")}
)
def test_keys_that_are_left_out_have_transformers_defaults(tmp_path: Path, model: str) -> None:
    """Of a model that says no more than its sizes."""
    sample = next(each for each in DENSE.values() if each.model == model)
    full = json.loads(json.dumps(getattr(transformers, sample.config)().to_dict()))
    bare = {name: full[name] for name in NEEDED if full.get(name) is not None}
    read = []
    for raw in (full, bare):
        (tmp_path / "config.json").write_text(
            json.dumps(raw | {"architectures": [model], "eos_token_id": None})
        )
        read.append(read_model(tmp_path, "dummy"))
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cohere", "take off the mean"),
        ("opt", "take off the mean"),
        ("apertus", "feed-forward"),
        ("olmo3", "norms over whole rows"),
        ("granite", ""),
        ("hunyuan", ""),
        ("ministral3", ""),
    ],
)
def test_exact_arithmetic_computes_it_or_refuses_it_by_name(tmp_path: Path, name: str, why: str) -> None:
    """Those it computes are in `tests/unit/test_exact_models.py`."""
    write_family(tmp_path, name)
    found = inexact(read_model(tmp_path), EngineConfig(model=str(tmp_path), dtype="bfloat16"))
    assert why in found and bool(found) == bool(why)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("phi", "qk_layernorm", True), ("stablelm", "qk_layernorm", True), ("opt", "word_embed_proj_dim", 32)],
)
def test_what_no_equation_here_says_is_refused_by_name(
    tmp_path: Path, name: str, key: str, value: Any
) -> None:
    write_family(tmp_path, name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=key):
        read_model(tmp_path)
