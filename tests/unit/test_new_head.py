"""A kind of draft head that is made up: one product makes the next feature of a token and a feature.

It has no layers and no KV. Its file is the namespace below, its line a name in `HEADS`.
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
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import DraftConfig, ModelConfig
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kv.pool import KvPool
from eyas.engine.models import heads
from eyas.engine.models.base import Drafted
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.heads import NO_SHAPE, last_hidden_tap, stored_shapes
from eyas.engine.models.keys import Fit
from eyas.engine.models.ops.machine import Machine
from eyas.engine.models.ops.parts import JoinPart
from tests.unit.fused_heads import SIZES, same_drafts
from tests.unit.fused_models import FIRST
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import write_tiny_llama

HIDDEN = 64


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    if load_format == "dummy":
        return None
    shape = stored_shapes(raw, folder, str).get("link.weight", NO_SHAPE)
    if shape == NO_SHAPE:
        return None
    fit, hidden = Fit(folder), target.hidden_size
    fit.wants(shape == (hidden, 2 * hidden), f"its link.weight is {shape}")
    fit.settle()
    plain: dict[str, Any] = {"quantized": None, "renamed": (), "fused": ()}
    decoder = dataclasses.replace(target, folder=folder, layers=target.layers[:1], **plain)
    return DraftConfig(folder, "link", decoder, target.vocab_size, capture_layers=(target.num_layers,))


class LinkDraft:
    """next feature = link [token embedding ; feature]."""

    token_map: torch.Tensor | None = None
    block = None
    whole = False

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[Any]
    ) -> None:
        hidden = config.decoder.hidden_size
        self._machine, self._lm_head = machine, ends.lm_head
        self._join = JoinPart(ends.embedding, config.decoder.norm_eps)
        self._link = machine.matrix(weights.take("link.weight", (hidden, 2 * hidden)))

    @torch.inference_mode()
    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> Drafted:
        joined = self._machine.join(features, tokens, rows.positions, self._join)
        x = self._machine.product(joined, self._link)
        return Drafted(x, x)

    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> None:
        """There is no KV."""

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._machine.logits(rows, self._lm_head)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target", tied=False, **SIZES)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = {"describe_head": describe_head, "spelling": str, "NAME": "a link head"}
    halves = {"load_tap": last_hidden_tap, "load_draft": LinkDraft}
    monkeypatch.setitem(sys.modules, "eyas.engine.models.link", SimpleNamespace(**file, **halves))
    monkeypatch.setattr(heads, "HEADS", (*heads.HEADS, "link"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Link"]}))
    link = torch.randn(HIDDEN, 2 * HIDDEN, generator=torch.Generator().manual_seed(2)) / 8
    save_file({"link.weight": link}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("count", [1, 5, 8, 11])
def test_a_chain_follows_the_equation(target: Path, head: Path, count: int) -> None:
    """Of any number of rows; the second draft is made of the first one's feature."""
    rig, generator = Rig(target), torch.Generator().manual_seed(count)
    plain, stored = HeadRig(head, rig), load_file(target / "model.safetensors")
    link = load_file(head / "model.safetensors")["link.weight"]
    features, tokens = torch.randn(count, HIDDEN, generator=generator), list(range(7, 7 + count))
    pages, wanted = rig.table(2 * count), features
    for step in range(2):
        spans = [QuerySpan(pages, step * count, count)]
        features = plain.drafted(features, spans, tokens).features
        wanted = torch.cat((stored["model.embed_tokens.weight"][tokens], wanted), 1) @ link.T
        assert torch.allclose(features, wanted, atol=1e-5)
        logits = wanted @ stored["lm_head.weight"].T
        assert torch.allclose(plain.head.logits(features), logits, atol=1e-4)


def test_what_does_not_fit_is_refused_by_name(target: Path, head: Path) -> None:
    save_file({"link.weight": torch.zeros(HIDDEN, HIDDEN)}, head / "model.safetensors")
    with pytest.raises(ConfigError, match=r"its link.weight is \(64, 64\)"):
        HeadRig(head, Rig(target))
    save_file({"other.weight": torch.zeros(HIDDEN, HIDDEN)}, head / "model.safetensors")
    with pytest.raises(ConfigError, match="nor a link head"):
        HeadRig(head, Rig(target))


@pytest.mark.parametrize("way", ["narrow", pytest.param("wide", marks=pytest.mark.slow)])
def test_a_device_drafts_the_same(target: Path, head: Path, way: str) -> None:
    assert same_drafts(target, head, FIRST[way])
