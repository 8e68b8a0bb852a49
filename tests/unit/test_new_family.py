"""A family that transformers does not have: its file, its line, and its equations in plain torch.

It is made up: OLMo 2's norms, heads that are rotated by half, windows in three of four layers, and a SwiGLU
with biases whose gate and up are clamped. So are the file (`describe`) and the lines of the two tables.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.layers import activations
from eyas.engine.models import keys, olmo2, table
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from tests.unit.fused_models import FIRST, same_forwards
from tests.unit.model_rig import Rig

HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, LAYERS, VOCAB, WINDOW, LIMIT = 64, 4, 2, 32, 96, 4, 128, 8, 1.5
HALVES = {"attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}
CONFIG = {
    "architectures": ["KestrelForCausalLM"],
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "sliding_window": WINDOW,
    "partial_rotary_factor": 0.5,
    "mlp_bias": True,
    "eos_token_id": 1,
}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The family's file."""
    attention, plain = keys.attention(raw), keys.feed_forward(raw)
    feed_forward = dataclasses.replace(plain, activation="clamped_silu", bias=True)
    windows = keys.layer_windows(raw, [layer % 4 != 3 for layer in range(keys.count(raw))])
    layers = [LayerSpec(dataclasses.replace(attention, window=w), feed_forward, olmo2.NORMS) for w in windows]
    return keys.decoder(raw, folder, layers)


def clamped_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return activations.silu(gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT))


def made() -> dict[str, torch.Tensor]:
    """The tensors of a tiny random model."""
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 2 * columns**-0.5

    def gain() -> torch.Tensor:
        return 0.5 + torch.rand(HIDDEN, generator=generator)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = gain()
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        for name, count in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items():
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = matrix(count * DIM, HIDDEN)
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * DIM)
        for name, shape in {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}.items():
            tensors[f"{layer}.mlp.{name}_proj.weight"] = matrix(*shape)
            tensors[f"{layer}.mlp.{name}_proj.bias"] = torch.randn(shape[0], generator=generator)
        tensors |= {f"{layer}.{norm}.weight": gain() for norm in HALVES.values()}
    return tensors


# --- the equations, without a line of the engine ----------------------------------------------------------


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The first half of each head [rows, heads, 32], element i with element i + 8."""
    turns = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    turned = torch.complex(x[..., :8], x[..., 8:16]) * torch.polar(torch.ones(1), turns)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 16:]), -1)


def attended(x: torch.Tensor, weights: dict[str, torch.Tensor], window: int) -> torch.Tensor:
    q, k, v = ((x @ weights[f"self_attn.{n}_proj.weight"].T).view(len(x), -1, DIM) for n in "qkv")
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (rotated(k), v))
    back = torch.arange(len(x))[:, None] - torch.arange(len(x))
    seen = (back >= 0) & (back < window)
    scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / DIM**0.5
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return mixed.flatten(1) @ weights["self_attn.o_proj.weight"].T


def fed_forward(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    def linear(name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows @ weights[f"mlp.{name}_proj.weight"].T + weights[f"mlp.{name}_proj.bias"]

    gate, up = linear("gate", x).clamp(max=LIMIT), linear("up", x).clamp(-LIMIT, LIMIT)
    return linear("down", gate * torch.sigmoid(gate) * up)


def stated(tensors: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Logits of all tokens."""
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        window = len(tokens) if layer == 3 else WINDOW
        x = x + norm(attended(x, weights, window), weights[HALVES["attn"] + ".weight"])
        x = x + norm(fed_forward(x, weights), weights[HALVES["mlp"] + ".weight"])
    return norm(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


# --- the comparison ---------------------------------------------------------------------------------------

TOKENS = list(range(20, 60))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = SimpleNamespace(describe=describe)
    monkeypatch.setitem(sys.modules, "eyas.engine.models.kestrel", file)
    monkeypatch.setitem(table.MODELS, "KestrelForCausalLM", "kestrel")
    monkeypatch.setitem(activations.ACTIVATIONS, "clamped_silu", clamped_silu)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(made(), tmp_path / "model.safetensors")
    return tmp_path


def difference(folder: Path, config: ModelConfig | None = None) -> float:
    """The largest one of a prompt that comes in three chunks, as a part of the logits' deviation."""
    rig, wanted = Rig(folder, config), stated(made(), TOKENS)
    pages, parts = rig.table(len(TOKENS)), ((0, 7), (7, 29), (29, 40))
    chunks = [rig.logits([QuerySpan(pages, first, end - first)], TOKENS[first:end]) for first, end in parts]
    return float((torch.cat(chunks) - wanted).abs().max() / wanted.std())


def test_a_cpu_computes_the_equations(folder: Path) -> None:
    assert difference(folder) < 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {"attention": {"window": 0}},
        {"attention": {"window": WINDOW + 1}},
        {"attention": {"rope": dataclasses.replace(keys.read_rope({}, {}), share=1.0)}},
        {"feed_forward": {"activation": "silu"}},
        {"feed_forward": {"bias": False}},
        {"norms": {"after_attention": HALVES["mlp"], "after_feed_forward": HALVES["attn"]}},
    ],
    ids=lambda change: " ".join(f"{part} {next(iter(value))}" for part, value in change.items()),
)
def test_each_part_of_it_counts(folder: Path, change: dict[str, Any]) -> None:
    """By the numbers; or because a tensor is left unread."""
    config = read_model(folder)
    ((part, fields),) = change.items()
    layers = [
        dataclasses.replace(layer, **{part: dataclasses.replace(getattr(layer, part), **fields)})
        for layer in config.layers
    ]
    try:
        found = difference(folder, dataclasses.replace(config, layers=tuple(layers)))
    except ConfigError as error:
        assert "bias" in error.message
    else:
        assert found > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_the_kernels_compute_what_the_decoder_does(folder: Path, first: int) -> None:
    assert refusal(read_model(folder), VOCAB) == ""
    same_forwards(folder, first)


def test_a_slip_in_the_file_is_the_cause_of_what_users_see(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slip = SimpleNamespace(describe=lambda raw, folder: raw.heads)
    monkeypatch.setitem(sys.modules, "eyas.engine.models.kestrel", slip)
    with pytest.raises(
        ConfigError, match="a value of the wrong kind: 'dict' object has no attribute"
    ) as seen:
        read_model(folder)
    assert isinstance(seen.value.__cause__, AttributeError)
