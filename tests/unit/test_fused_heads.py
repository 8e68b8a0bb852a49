"""Draft heads of a device against the plain ones: features, outputs, KV and logits, narrow and wide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.engine.models.ops import device_machine
from eyas.engine.models.ops.device_machine import DeviceMachine
from tests.unit.fused_heads import SIZES, same_drafts, target
from tests.unit.fused_models import FIRST
from tests.unit.tiny import edit, write_tiny_eagle, write_tiny_eagle3, write_tiny_llama
from tests.unit.tiny_dflash import write_tiny_dflash

__all__ = ["target"]  # a fixture

CAPTURE = {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}


def gain(size: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(size)) + 0.5


def eagle(folder: Path, target: Path) -> Path:
    return write_tiny_eagle(folder, target)


def two_layers(folder: Path, target: Path) -> Path:
    head = write_tiny_eagle(folder, target, layers=2, bias=False)
    biases = {f"layers.0.self_attn.{p}_proj.bias": gain(64 if p == "q" else 32) for p in "qkv"}
    return edit(head, dict(biases) | {"embed_tokens.weight": torch.randn(128, 64)})


def variants(folder: Path, target: Path) -> Path:
    """As speculators has them, and a second layer."""
    head = write_tiny_eagle3(folder, target, draft_vocab=48)
    other = load_file(write_tiny_eagle(folder / "other", target, layers=2) / "model.safetensors")
    second = {name: tensor for name, tensor in other.items() if name.startswith("layers.1.")}
    told: dict[str, Any] = {"norm_before_residual": True, "norm_output": True}
    return edit(head, second | {"input_norm.weight": gain(192)}, **CAPTURE, **told)


def last_hidden(folder: Path, target: Path) -> Path:
    head = write_tiny_eagle3(folder, target)
    return edit(head, {"fc.weight": None}, eagle_config={"use_aux_hidden_state": False})


def narrower(folder: Path, target: Path) -> Path:
    narrow = write_tiny_llama(folder / "narrow", hidden=48, **SIZES)
    head = write_tiny_eagle3(folder, narrow, draft_vocab=48)
    own = {"fc.weight": torch.randn(48, 192) / 14, "embed_tokens.weight": torch.randn(128, 48)}
    return edit(head, dict(own), **CAPTURE)


def block(folder: Path, target: Path) -> Path:
    return write_tiny_dflash(folder, target, reads=(0, 1, 2))


CASES = [("narrow", kind) for kind in (block, eagle, two_layers, variants, last_hidden, narrower)]
CASES += [("wide", kind) for kind in (block, eagle, two_layers, variants)]
QUICK = ("narrow", eagle)


@pytest.mark.parametrize(
    ("way", "kind"), [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow) for case in CASES]
)
def test_a_head_is_a_head(target: Path, tmp_path: Path, way: str, kind: Any) -> None:
    assert same_drafts(target, kind(tmp_path / "head", target), FIRST[way])


@pytest.mark.slow
def test_the_comparison_notices_a_lost_bias(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = eagle(tmp_path / "head", target)
    product = DeviceMachine.product
    monkeypatch.setattr(DeviceMachine, "product", lambda self, x, fc, bias=None: product(self, x, fc))
    assert not same_drafts(target, head, FIRST["narrow"])


@pytest.mark.slow
def test_the_comparison_notices_joined_rows_that_are_normed(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, join = eagle(tmp_path / "head", target), device_machine.join
    monkeypatch.setattr(device_machine, "join", lambda t, e, f, eps, pdl, _: join(t, e, f, 1e-5, pdl))
    assert not same_drafts(target, head, FIRST["narrow"])
