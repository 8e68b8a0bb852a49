"""EAGLE-3 heads as others publish them, against their equations: variants, layers, captured layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models.heads import read_head
from tests.unit.crossed import crossed
from tests.unit.head_chain import NOTICED, SAME, worst_difference
from tests.unit.head_equations import Eagle3
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import edit, write_tiny_eagle, write_tiny_eagle3, write_tiny_llama

LAYERS, USUAL = 8, (2, 4, 5)
IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
NESTED = (
    *SIZES,
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
)
Folders = tuple[Path, Path]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    target = write_tiny_llama(tmp_path / "target", layers=LAYERS, rope=rope, tied=False)
    return target, write_tiny_eagle3(tmp_path / "head", target, draft_vocab=100)


def gains(*names: str, size: int = 64) -> dict[str, torch.Tensor | None]:
    return {f"{name}.weight": torch.rand(size) + 0.5 for name in names}


def nested(head: Path, ids: tuple[int, ...] = USUAL, **config: object) -> None:
    """Makes a folder of the official layout one as speculators writes them."""
    told = json.loads((head / "config.json").read_text())
    inner = {key: told.pop(key) for key in NESTED}
    told |= {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", IDS: list(ids)}
    told |= {"transformer_layer_config": inner | {"model_type": "llama"}, "target_hidden_size": None}
    edit(head, None, lambda name: name.replace("midlayer.", "layers.0."))
    (head / "config.json").write_text(json.dumps(told | config))


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "norm_before_residual": ({"norm_before_residual": True}, {}, "the other residual"),
    "norm_output": ({"norm_output": True}, {}, "the other recurrence"),
    "fc_norm": ({"fc_norm": True}, gains("fc_norm.0", "fc_norm.1", "fc_norm.2"), "no norm before fc"),
    "norm_before_fc": ({"norm_before_fc": True}, gains("input_norm", size=192), "no norm before fc"),
    "embedding": ({}, {"embed_tokens.weight": torch.randn(256, 64)}, "the target's embedding"),
}


@pytest.mark.parametrize(
    "variant", crossed(VARIANTS, quick=lambda variant: variant not in ("norm_before_fc", "embedding"))
)
def test_a_variant_computes_its_equations(folders: Folders, variant: str) -> None:
    """And not the usual ones."""
    config, tensors, wrong = VARIANTS[variant]
    target, head = folders
    edit(head, tensors, **config)
    assert worst_difference(folders, Eagle3(head, target, tuple(config)), USUAL) < SAME
    assert worst_difference(folders, Eagle3(head, target, tuple(config), wrong), USUAL) > NOTICED


def test_the_usual_head_is_none_of_the_variants(folders: Folders) -> None:
    target, head = folders
    assert worst_difference(folders, Eagle3(head, target), USUAL) < SAME
    for wrong in ("the other residual", "the other recurrence", "the target's rope_theta"):
        assert worst_difference(folders, Eagle3(head, target, wrong=wrong), USUAL) > NOTICED, wrong
    assert worst_difference(folders, Eagle3(head, target), USUAL, late=1) > NOTICED


def test_a_head_as_speculators_writes_it(folders: Folders) -> None:
    target, head = folders
    variants = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    edit(head, gains("input_norm", size=192))
    nested(head, (2, 4, 7), **variants)
    paper = Eagle3(head, target, tuple(variants))
    assert worst_difference(folders, paper, (2, 4, 7)) < SAME


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_speculators_tells_a_rope_in_either_place(folders: Folders, inside: bool) -> None:
    target, head = folders
    nested(head)
    told = json.loads((head / "config.json").read_text())
    (told["transformer_layer_config"] if inside else told).update(rope_theta=500000.0)
    told["transformer_layer_config"]["rope_scaling"] = None
    (head / "config.json").write_text(json.dumps(told))
    paper = Eagle3(head, target, wrong="the target's rope_theta")
    assert worst_difference(folders, paper, USUAL) < SAME


@pytest.mark.parametrize(
    ("config", "asked", "taps"),
    [
        pytest.param({}, (), USUAL, marks=pytest.mark.slow),
        ({"eagle_config": {IDS: [0, 3, 7]}}, (), (1, 4, 8)),
        pytest.param({IDS: [0, 3, 7]}, (), (0, 3, 7), marks=pytest.mark.slow),
        pytest.param({IDS: [1, 3, 9]}, (2, 4, 8), (2, 4, 8), marks=pytest.mark.slow),
    ],
    ids=["paper", "outputs", "inputs", "flag"],
)
def test_captured_layers(
    folders: Folders, config: dict[str, Any], asked: tuple[int, ...], taps: tuple[int, ...]
) -> None:
    target, head = folders
    edit(head, **config)
    assert worst_difference(folders, Eagle3(head, target), taps, asked) < SAME
    shifted = tuple(layer - 1 if layer else 1 for layer in taps)
    assert worst_difference(folders, Eagle3(head, target), shifted, asked) > NOTICED


def test_the_last_hidden_state_as_a_feature(folders: Folders) -> None:
    target, head = folders
    aux = {"use_aux_hidden_state": False, IDS: []}
    edit(head, {"fc.weight": None}, eagle_config=aux)
    paper = Eagle3(head, target, ("last_hidden",))
    assert worst_difference(folders, paper, (LAYERS,)) < SAME
    wrong = Eagle3(head, target, ("last_hidden",), "the feature before the norm")
    assert worst_difference(folders, wrong, (LAYERS,)) > NOTICED


@pytest.mark.parametrize("told", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 40))])
def test_layers_are_counted_by_their_tensors(tmp_path: Path, folders: Folders, told: int) -> None:
    """The second is a Llama's; config.json may state one, both or the target's depth."""
    target, head = folders
    other = write_tiny_eagle(tmp_path / "other", target, layers=2)
    stored = load_file(other / "model.safetensors")
    second = {name: t for name, t in stored.items() if name.startswith("layers.1.")}
    edit(head, dict(second), num_hidden_layers=told)
    rig = HeadRig(head, Rig(target))
    assert rig.config.decoder.num_layers == rig.pool.shape.format.layers == 2
    assert worst_difference(folders, Eagle3(head, target), USUAL) < SAME


def test_a_narrower_head_has_ends_of_its_own(tmp_path: Path, folders: Folders) -> None:
    target, _ = folders
    narrow = write_tiny_llama(tmp_path / "narrow", hidden=48)
    head = write_tiny_eagle3(tmp_path / "other", narrow, draft_vocab=100)
    own = {"fc.weight": torch.randn(48, 192) / 14, "embed_tokens.weight": torch.randn(256, 48)}
    edit(head, dict(own), target_hidden_size=64)
    assert worst_difference((target, head), Eagle3(head, target), USUAL) < SAME
    config = read_head(head, Rig(target).config)
    assert (config.decoder.hidden_size, config.captured_width) == (48, 192)


@pytest.mark.parametrize(
    ("tensors", "config", "complaint"),
    [
        ({}, {"target_hidden_size": 128}, "head: its target_hidden_size is not the target's"),
        ({}, {"hidden_size": 48}, "not the target's, and it lacks embed_tokens.weight$"),
        ({"fc.weight": None}, {}, "head has no tensor fc.weight"),
        (gains("fc_norm.0"), {}, "head has no tensor fc_norm.1.weight"),
        (
            {"layers.1.self_attn.q_proj.weight": torch.ones(64, 64)},
            {},
            "head has no tensor layers.1.input_layernorm",
        ),
        (gains("layers.1.hidden_norm"), {}, "head: its tensor layers.1.hidden_norm.weight belongs to"),
        ({"embed_tokens.weight": torch.ones(255, 64)}, {}, r"embed_tokens.weight of .*head is \(255, 64\)"),
        ({}, {IDS: [2, 4]}, r"fc.weight of .*head is \(64, 192\), its config says \(64, 128\)"),
        ({}, {IDS: [2, 4, 9]}, r"head captures the layers 2, 4, 9, .* 0 to 8 \(--draft-capture-layers"),
        (
            {},
            {"eagle_config": {IDS: [2, 4, 8]}},
            "head captures the layers 3, 5, 9, and the target has 0 to 8",
        ),
    ],
)
def test_a_head_that_cannot_work_is_refused(
    folders: Folders, tensors: dict[str, torch.Tensor | None], config: dict[str, Any], complaint: str
) -> None:
    target, head = folders
    edit(head, tensors, **config)
    with pytest.raises(ConfigError, match=complaint):
        HeadRig(head, Rig(target))


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ((1, 2), "--draft-capture-layers: draft head .*head is fed with 3 layers, and 1, 2 are 2"),
        ((1, 2, 9), "--draft-capture-layers: 1, 2, 9: the target of draft head .*head has the layers 0 to 8"),
    ],
)
def test_layers_that_a_flag_names_and_do_not_fit_are_the_flags(
    folders: Folders, asked: tuple[int, ...], complaint: str
) -> None:
    target, head = folders
    model: ModelConfig = Rig(target).config
    with pytest.raises(ConfigError, match=complaint):
        read_head(head, model, capture_layers=asked)
    assert read_head(edit(head, None, **{IDS: [2, 4]}), model, capture_layers=USUAL).capture_layers == USUAL


def test_what_changes_an_equation_changes_the_fingerprint(folders: Folders) -> None:
    """Draft KV and features of unequal heads must not meet."""
    target, head = folders
    model: ModelConfig = Rig(target).config
    configs: list[dict[str, Any]] = [
        {},
        {"norm_output": True},
        {"norm_before_residual": True},
        {IDS: [1, 2, 3]},
    ]
    found = []
    for config in configs:
        plain = {"norm_output": False, "norm_before_residual": False, IDS: None}
        found.append(read_head(edit(head, **plain | config), model).fingerprint)
    assert len(set(found)) == len(configs)
    assert read_head(head, model, capture_layers=USUAL).fingerprint == found[0]
