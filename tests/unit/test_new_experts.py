"""Experts by an equation that no kernel knows run on a device by the default verbs, as dense layers do.

It is made up: the activation of `test_new_equation`, a bias of every expert's three products, a router with a
bias whose scores are roots, and a norm behind them. And a norm's absence before them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig, NormNames
from eyas.engine.kernels.experts.route import ChosenExperts, LocalExperts, Router, choose, choose_local
from eyas.engine.layers import routing
from eyas.engine.layers.activations import ACTIVATIONS
from eyas.engine.loading.arithmetic import inexact
from eyas.engine.models import feed_forward
from eyas.engine.models.ops import expert_products
from eyas.engine.models.ops.parts import RouterPart
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from eyas.engine.parallel.expert_places import SpreadExperts
from eyas.engine.parallel.expert_plan import ExpertSlots
from tests.unit.clamped_gate import clamped
from tests.unit.families import write_family
from tests.unit.fp8_block_weights import write_fp8
from tests.unit.fused_experts import BLOCKS, TIPPED, logits_differ
from tests.unit.fused_models import FIRST, LAYERS, same_forwards
from tests.unit.model_rig import Rig
from tests.unit.tiny_deepseek import SMALL as DEEPSEEK
from tests.unit.tiny_deepseek import write_tiny_deepseek

TINY: dict[str, Any] = {"vocab_size": 128, "num_hidden_layers": LAYERS}
NEW = {"activation": "clamped", "bias": True, "router_bias": True, "scores": "roots"}


def roots(logits: torch.Tensor) -> torch.Tensor:
    return (1.0 / logits.neg().exp_().add_(1.0)).sqrt_()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """Two lines of tables, and a specification that names them."""
    monkeypatch.setitem(ACTIVATIONS, "clamped", clamped)
    monkeypatch.setitem(routing.SCORES, "roots", roots)
    write_family(tmp_path, "qwen3_moe", mlp_only_layers=[], **TINY)
    config = read_model(tmp_path)
    store_more(tmp_path, config)
    norms = NormNames(after_feed_forward="post_mlp_layernorm")
    return changed(config, norms=norms, **NEW)


def store_more(folder: Path, config: ModelConfig) -> None:
    """Biases and a norm behind the experts, in the folder's only file."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(3)
    stored = load_file(file)
    for name, weight in list(stored.items()):
        if ".mlp." in name:
            stored[name.replace(".weight", ".bias")] = torch.randn(len(weight), generator=generator)
    for layer in range(LAYERS):
        gain = torch.rand(config.hidden_size, generator=generator) + 0.5
        stored[f"model.layers.{layer}.post_mlp_layernorm.weight"] = gain
    save_file(stored, file)


def changed(config: ModelConfig, norms: NormNames | None = None, **fields: Any) -> ModelConfig:
    layers = [
        replace(each, feed_forward=replace(each.feed_forward, **fields), norms=norms or each.norms)
        for each in config.layers
    ]
    return replace(config, layers=tuple(layers))


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_they_are_the_plain_models(model: ModelConfig, first: int) -> None:
    assert refusal(model, model.vocab_size) == ""
    device = same_forwards(model.folder, first, model, Rig(model.folder, model))
    assert device.few_rows > 0  # all but the experts' own part is fused


@pytest.mark.slow
def test_rows_that_passed_no_norm(model: ModelConfig) -> None:
    bare = changed(model, NormNames(before_feed_forward="", after_feed_forward="post_mlp_layernorm"))
    stored = load_file(model.folder / "model.safetensors")
    kept = {name: each for name, each in stored.items() if "post_attention_layernorm" not in name}
    save_file(kept, model.folder / "model.safetensors")
    same_forwards(model.folder, FIRST["narrow"], bare, Rig(model.folder, bare))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"activation": "silu"}, {"scores": "sigmoid"}, {"router_bias": False}, {"norms": NormNames()}],
    ids=lambda change: next(iter(change)),
)
def test_each_part_of_it_counts(model: ModelConfig, change: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, ConfigError)):
        same_forwards(model.folder, FIRST["narrow"], changed(model, **change), Rig(model.folder, model))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one shared expert among them", "two shared beside them", "FP8 blocks"])
def test_defaults_give_what_kernels_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of equations that kernels know: with groups, a correction, shared experts; and of weights in FP8."""
    monkeypatch.setattr(feed_forward, "GATES", {})
    monkeypatch.setattr(expert_products, "KNOWN_SCORES", ())
    if kind == "FP8 blocks":
        sizes = {"moe_intermediate_size": 128, "mlp_only_layers": [], **TINY, **BLOCKS}
        write_family(tmp_path / "plain", "qwen3_moe", std=0.08, **sizes)
        write_fp8(tmp_path / "blocks", tmp_path / "plain", None)
        assert logits_differ(tmp_path / "blocks", tmp_path / "blocks") < TIPPED
        return
    write_tiny_deepseek(tmp_path, DEEPSEEK | TINY | {"n_shared_experts": 1 + (kind[0] == "t")})
    same_forwards(tmp_path, FIRST["narrow"])


@pytest.mark.parametrize("change", NEW.items(), ids=NEW)
def test_exact_arithmetic_refuses_what_runs_by_defaults(
    model: ModelConfig, change: tuple[str, object]
) -> None:
    usual = changed(model, NormNames(), activation="silu", bias=False, router_bias=False, scores="softmax")
    config = EngineConfig(model=str(model.folder), dtype="bfloat16")
    assert inexact(usual, config) == ""
    assert "feed-forward" in inexact(changed(usual, **dict([change])), config)


V3: dict[str, Any] = {"groups": 4, "topk_groups": 2, "group_best": 2, "scale": 2.5, "corrected": True}


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
@pytest.mark.parametrize("held", [False, True])
def test_the_default_choice_is_the_kernels(scores: str, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all experts, and of those that a rank has: with groups, a correction and a shared expert."""
    spec = ExpertsSpec(width=16, experts=16, per_row=3, scores=scores, normalised=True, **V3)
    generator = torch.Generator().manual_seed(1)
    logits, correction = torch.randn(9, 16, generator=generator), torch.randn(16, generator=generator)
    part = RouterPart(spec, logits, None, correction, {}, range(4, 8), True)
    here = None
    if held:
        here = LocalExperts(part.own, range(2, 5), torch.arange(9, dtype=torch.int32) - 1)
    kernel: ChosenExperts = choose_local(logits, Router(spec, correction, True), here)
    default = expert_products.chosen_by_default(logits, part, here, uniform=False)
    assert torch.equal(default.experts, kernel.experts) and default.experts.dtype == torch.int32
    assert torch.allclose(default.weights, kernel.weights)


@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_number_of_an_expert_goes_with_it_to_every_rank(spares: int, rank: int) -> None:
    """What weights are multiplied by, of an expert, is that of the model's number, not of the rank's slot."""
    spec = ExpertsSpec(width=16, experts=8, per_row=3, scores="sigmoid", normalised=True)
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))
    slots, rows = ExpertSlots(8, 2, spares), range(20 * rank, 20 * (rank + 1))
    places = SpreadExperts(slots, rank, 1, "cpu").of("a layer") if spares else None
    if places is not None:
        places.set((4, 7, 0, 2))
    own = range(4 * rank, 4 * (rank + 1))
    part = RouterPart(spec, logits, None, None, {}, own, False, places=places)
    local = expert_products._local(part, rows, torch.arange(40, dtype=torch.int32))
    whole, here = choose(logits, spec).experts, choose_local(logits, Router(spec), local).experts
    named = expert_products._named(here, part, local)
    assert torch.equal(named[here >= 0], whole[here >= 0].to(named.dtype))
    assert bool((here >= 4).any()) == bool(spares), "slots behind the homes are taken where there are some"
