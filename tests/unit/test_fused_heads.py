"""Draft heads of a device against the plain ones: features, outputs, KV and logits, narrow and wide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.heads import head_family
from eyas.engine.models.ops import device_machine
from eyas.engine.models.ops.device_machine import DeviceMachine
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.test_models_fused import FIRST, SLOTS, Steps, Twin, close, same_rows_written, with_tokens
from tests.unit.tiny import edit, write_tiny_eagle, write_tiny_eagle3, write_tiny_llama
from tests.unit.tiny_dflash import write_tiny_dflash

SIZES = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96, "vocab": 128}
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


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target", tied=False, **SIZES)


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


def same_drafts(target: Path, folder: Path, first: int) -> bool:
    """Whether the device's head does what the plain one does with the same captured rows."""
    rig = Rig(target)
    plain = HeadRig(folder, rig)
    plain.pool.tensor.fill_(float("nan"))
    twin = Twin(rig.config, rig.pool, torch.zeros(SLOTS, 16, dtype=torch.int32))
    with FolderWeights(target) as weights:
        model = Decoder(rig.config, weights, twin.machine)
    twin = Twin(plain.config.decoder, plain.pool, torch.zeros(SLOTS, 16, dtype=torch.int32))
    algorithm = plain.config.algorithm
    kind = head_family(algorithm)
    with FolderWeights(folder, kind.spelling) as weights:
        tap = kind.load_tap(plain.config, weights, model.final_norm, twin.machine)
        head = kind.load_draft(plain.config, weights, model.ends, twin.machine)
    assert tap.layers == plain.capture.layers
    same = []
    for rounds, chunks, spans, tokens in Steps(rig, first):
        captured = torch.randn(len(tokens), len(tap.layers) * rig.config.hidden_size)
        features = plain.capture.features(captured, tokens)
        same.append(close(tap.features(captured, tokens), features))
        expected = plain.forward(features, spans, tokens.tolist())
        rows = with_tokens(twin.rows(rounds, chunks), tokens.tolist())
        given = features.clone()
        head.keep(given, rows.tokens, rows, twin.pool)
        kept = twin.pool.tensor.view(torch.int32).clone()
        found, below = head.forward(given, rows.tokens, rows, twin.pool)
        assert below is found and torch.equal(given, features)
        same += [close(found, expected), same_rows_written(twin.pool, plain.pool)]
        same.append(torch.equal(kept, twin.pool.tensor.view(torch.int32)))
        same.append(close(head.logits(found[:5]), plain.head.logits(expected[:5])))
    return all(same)
