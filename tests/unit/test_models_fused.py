"""The fused models against the plain ones: hidden rows, captured rows, KV and logits, narrow and wide."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.engine.checkpoint.config import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig, NormNames
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.kernels.products import skinny
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.eagle3 import Eagle3Draft, Eagle3Tap, spelling
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from tests.unit.families import write_family
from tests.unit.fused_models import (
    CAPTURE,
    FIRST,
    LAYERS,
    SLOTS,
    Steps,
    Twin,
    close,
    same_forwards,
    same_rows_written,
    target,
    write_head,
)
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import edit

__all__ = ["target"]  # a fixture

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_a_llama_is_a_llama(target: Path, first: int) -> None:
    same_forwards(target, first)


WINDOW = 11  # less than a prompt
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_yarn": {},
    "llama_biases": {},
    "mistral": {"sliding_window": WINDOW},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {},
    "granite": {},
    "ministral3": {"sliding_window": WINDOW},
    "glm4": {},
    "hunyuan": {},
    "cohere2": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere_norms": {"attention_bias": False},
    "nemotron": {},
    "apertus": {},
    "phi": {},
    "opt": {},
    "phi3": {"sliding_window": WINDOW},
    "phi3_short": {},
    "qwen2": {},
    "qwen2_windows": {"sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {},
    "gpt_oss": {"sliding_window": WINDOW},
    "glm4_moe": {},
    "granite_moe_shared": {},
    "minimax_m2": {},
    "llama4": {"attention_chunk_size": 9},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen2_moe_windows": {},  # its shared expert is like the others
    "ernie4_5_moe": {},
    "hunyuan_moe": {},
    "gemma2": {"sliding_window": WINDOW},
    "gemma3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_tokens": {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 128,
    },
    "gemma4_moe": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
}
WAYS = [("narrow", family) for family in FAMILIES] + [
    ("wide", f) for f in ("qwen2", "qwen3", "gemma2", "olmo2", "gpt_oss", "cohere2", "opt", "gemma4")
]


@pytest.mark.parametrize(("way", "family"), WAYS)
def test_every_family(tmp_path: Path, way: str, family: str) -> None:
    """Few rows take the narrow way, with output biases too."""
    sizes = {"vocab_size": 128, "num_hidden_layers": LAYERS} | FAMILIES[family]
    write_family(tmp_path, family, **sizes)
    assert same_forwards(tmp_path, FIRST[way]).few_rows == skinny.MAX_ROWS


def test_norms_over_whole_rows_between_what_is_fused(tmp_path: Path) -> None:
    """Few rows: q, k and v by default verbs, everything else by kernels."""
    sizes = {"vocab_size": 128, "num_hidden_layers": LAYERS, "attention_bias": False}
    write_family(tmp_path, "olmo2", **sizes)
    assert same_forwards(tmp_path, FIRST["narrow"]).few_rows == skinny.MAX_ROWS


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
@pytest.mark.parametrize("bare", [0, 1])
def test_a_layer_without_a_norm_before_it(target: Path, tmp_path: Path, first: int, bare: int) -> None:
    """As draft heads have it; and it is another model."""
    folder = Path(shutil.copytree(target, tmp_path / "bare"))
    edit(folder, {f"model.layers.{bare}.input_layernorm.weight": None})
    usual = read_model(folder)
    layers = list(usual.layers)
    layers[bare] = replace(layers[bare], norms=NormNames(before_attention=""))
    config = replace(usual, layers=tuple(layers))
    same_forwards(folder, first, config, Rig(folder, config))
    with pytest.raises(AssertionError):
        same_forwards(folder, first, config, Rig(target))


SPECIALS: dict[str, dict[str, Any]] = {
    "window": {"attention": {"window": 0}},
    "cap of scores": {"attention": {"soft_cap": 0.0}},
    "scale": {"attention": {"scale": 0.25}},
    "rope": {"attention": {"rope": RopeConfig(theta=100.0)}},
    "cap of logits": {"logit_soft_cap": 0.0},
    "embedding scale": {"embedding_scale": 1.0},
    "offset of gains": {"norm_offset": 0.0},
}


@pytest.mark.parametrize("special", SPECIALS)
def test_every_special_counts(tmp_path: Path, special: str) -> None:
    """What makes Gemma another model than Llama is not lost on the way to the kernels."""
    write_family(tmp_path, "gemma2", vocab_size=128, num_hidden_layers=LAYERS, sliding_window=WINDOW)
    common = dict(SPECIALS[special])
    changed = common.pop("attention", {})
    config = read_model(tmp_path)
    layers = [replace(layer, attention=replace(layer.attention, **changed)) for layer in config.layers]
    with pytest.raises(AssertionError):
        same_forwards(tmp_path, FIRST["narrow"], replace(config, layers=tuple(layers), **common))


def test_every_field_of_a_specification_is_known() -> None:
    """A new one is computed by the kernels or refused by name; then it may be added here."""
    known = {
        ModelConfig: "folder architecture vocab_size hidden_size norm_eps layers context_length tied_head "
        "norm_offset centred norm_bias head_bias positions position_offset token_rows embedding_scale "
        "logit_scale logit_soft_cap quantized unread renamed fused foreign eos_token_ids load_format",
        LayerSpec: "attention feed_forward norms residual_scale parallel token_width scaled delta both",
        AttentionSpec: "num_heads num_kv_heads head_dim rope scale window unseen soft_cap qkv_bias "
        "output_bias head_norms row_norms sinks norms_behind centred_heads adjacent "
        "temper chunk bare_norms value_norms keys_as_values shared_from gated",
        FeedForwardSpec: "width activation bias gated",
        NormNames: "before_attention after_attention before_feed_forward after_feed_forward",
    }
    for spec, names in known.items():
        assert [field.name for field in fields(spec)] == names.split()


@dataclass(frozen=True)
class Experts:
    """A feed-forward that no kernel knows."""

    width: int
    activation: str = "silu"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"feed_forward": Experts(96)}, "layers whose feed-forward is a Experts"),
        ({"feed_forward": FeedForwardSpec(90)}, "intermediate_size 90 (a multiple of 16 is needed)"),
    ],
)
def test_what_no_kernel_computes_is_refused_by_name(target: Path, change: dict[str, Any], why: str) -> None:
    config = read_model(target)
    last = replace(config.layers[-1], **change)
    assert refusal(replace(config, layers=(*config.layers[:-1], last)), 128) == why


def test_sizes_that_no_kernel_has_are_refused_by_name(target: Path) -> None:
    config = read_model(target)
    assert refusal(config, 120) == "vocabulary rows 120 (a multiple of 16 is needed)"
    vectors = replace(config, layers=tuple(replace(layer, token_width=8) for layer in config.layers))
    assert refusal(vectors, 128) == "hidden_size_per_layer_input 8 (a multiple of 16 is needed)"
    (layer, _), dims = config.layers, "16, 32, 64, 128, 256, 512"
    wide = replace(layer, attention=replace(layer.attention, head_dim=80))
    assert refusal(replace(config, layers=(wide,)), 128) == f"heads of 80 ({dims} are served)"


@pytest.mark.parametrize("draft_vocab", [None, 48], ids=["shared", "own_head"])
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_a_head_is_a_head(target: Path, tmp_path: Path, first: int, draft_vocab: int | None) -> None:
    rig = Rig(target)
    folder = write_head(tmp_path / "head", target, draft_vocab)
    plain = HeadRig(folder, rig)
    plain.pool.tensor.fill_(float("nan"))
    tables = torch.zeros(SLOTS, 8, dtype=torch.int32)
    twin = Twin(plain.config.decoder, plain.pool, tables)
    with FolderWeights(target) as weights:
        model = Decoder(rig.config, weights, twin.machine)
    with FolderWeights(folder, spelling) as weights:
        tap = Eagle3Tap(plain.config, weights, twin.machine)
        head = Eagle3Draft(plain.config, weights, model.ends, twin.machine)
    assert tap.layers == CAPTURE
    for rounds, chunks, spans, tokens in Steps(rig, first):
        captured = torch.randn(len(tokens), len(CAPTURE) * rig.config.hidden_size)
        features = plain.capture.features(captured, tokens)
        assert close(tap.features(captured, tokens), features[: len(tokens)])
        expected = plain.forward(features[: len(tokens)], spans, tokens.tolist())
        rows = twin.rows(rounds, chunks)
        found, same = head.forward(features[: len(tokens)].contiguous(), tokens.int(), rows, twin.pool)
        assert same is found
        assert close(found, expected) and same_rows_written(twin.pool, plain.pool)
        assert close(head.logits(found[:5]), plain.head.logits(expected[:5]))
    same_map = plain.head.token_map is None or torch.equal(head.token_map, plain.head.token_map)
    assert same_map and (head.token_map is None) == (draft_vocab is None)
