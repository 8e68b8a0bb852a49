"""An equation that no kernel knows runs on a device by the default verbs, beside the kernels that do know.

It is made up: a feed-forward with biases whose gate and up are clamped, a sigmoid of 1.7 gates,
and one more than up.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.layers.activations import ACTIVATIONS
from eyas.engine.loading.arithmetic import inexact
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from tests.unit.clamped_gate import LIMIT, clamped
from tests.unit.families import write_family
from tests.unit.fused_models import FIRST, LAYERS, same_forwards
from tests.unit.model_rig import Rig


def formula(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = mlp.gate_proj(x).clamp(max=LIMIT), mlp.up_proj(x).clamp(-LIMIT, LIMIT)
    return mlp.down_proj((up + 1.0) * gate * torch.sigmoid(1.7 * gate))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """One line of a table, and a specification that names it."""
    monkeypatch.setitem(ACTIVATIONS, "clamped", clamped)
    write_family(tmp_path, "llama", vocab_size=128, num_hidden_layers=LAYERS, mlp_bias=True)
    config = read_model(tmp_path)
    layers = [
        replace(each, feed_forward=replace(each.feed_forward, activation="clamped")) for each in config.layers
    ]
    return replace(config, layers=tuple(layers))


def test_a_cpu_computes_the_formula(model: ModelConfig, tmp_path: Path) -> None:
    """Said by transformers' modules, without a verb."""
    stated = write_family(tmp_path, "llama", vocab_size=128, num_hidden_layers=LAYERS, mlp_bias=True)
    for layer in stated.model.layers:
        layer.mlp.forward = partial(formula, layer.mlp)
    rig, tokens = Rig(tmp_path, model), list(range(40, 61))
    with torch.no_grad():
        wanted = stated(torch.tensor([tokens])).logits[0]
    found = rig.logits([QuerySpan(rig.table(21), 0, 21)], tokens)
    assert (found - wanted).abs().max() < 1e-3 * wanted.std()


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_it_is_the_plain_models(model: ModelConfig, first: int) -> None:
    assert refusal(model, model.vocab_size) == ""
    device = same_forwards(model.folder, first, model, Rig(model.folder, model))
    assert device.few_rows > 0  # all but this product are fused


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"activation": "silu"}, {"bias": False}])
def test_each_part_of_it_counts(model: ModelConfig, change: dict[str, Any]) -> None:
    other = [replace(each, feed_forward=replace(each.feed_forward, **change)) for each in model.layers]
    with pytest.raises((AssertionError, ConfigError)):
        same_forwards(
            model.folder, FIRST["narrow"], model, Rig(model.folder, replace(model, layers=tuple(other)))
        )


@pytest.mark.parametrize("change", [{"activation": "clamped"}, {"bias": True}])
def test_exact_arithmetic_refuses_what_runs_by_defaults(model: ModelConfig, change: dict[str, Any]) -> None:
    plain = replace(model.layers[0].feed_forward, activation="silu", bias=False)
    layers = [replace(each, feed_forward=replace(plain, **change)) for each in model.layers]
    config = EngineConfig(model=str(model.folder), dtype="bfloat16")
    assert "feed-forward" in inexact(replace(model, layers=tuple(layers)), config)
    usual = [replace(each, feed_forward=plain) for each in model.layers]
    assert inexact(replace(model, layers=tuple(usual)), config) == ""
