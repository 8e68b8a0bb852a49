"""The format of weights that docs/adding-a-weight-format.md makes up: INT8 with a scale for each row.

A CPU needs a `QuantizedConfig` and what reads it from a config.json; so does a GPU, where weights are then
widened as they are loaded. One that a GPU multiplies as it is stored is a `Projection` and its loader beside
that: the products of few and of many rows, and all of the layer around them, ask no weight what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint import methods, quantized
from eyas.engine.checkpoint.sizes import weight_bytes
from eyas.engine.checkpoint.weights import FolderWeights, WeightPlacement, WeightSource
from eyas.engine.formats import table
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.kernels.products.rows import act_mul
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from tests.unit.families import write_family
from tests.unit.fused_models import FIRST, LAYERS, same_forwards
from tests.unit.model_rig import Rig
from tests.unit.tiny import edit

KEPT = ("lm_head", "embed_tokens", "norm")
TOLD = {"quant_method": "int8_rows", "ignore": ["lm_head"]}


def of_the_page() -> dict[str, Any]:
    """What the page's example defines where it says that it belongs."""
    page = Path(__file__).parents[2] / "docs" / "adding-a-weight-format.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = dict(vars(quantized))
    exec(example, names)
    return names


PAGE = of_the_page()
Int8Config, read = PAGE["Int8Config"], PAGE["_int8"]


class Int8Projection(Projection):
    """Unfused: the weight is widened for each product, and no gain goes into it."""

    matrix = None

    def folded(self, gain: torch.Tensor) -> torch.Tensor:
        return gain

    def apply(self, x: Any, products: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        made: torch.Tensor = x @ (self.weight.stored * self.scales[:, None]).to(x.dtype).t()
        return made if bias is None else made + bias

    def gated(self, x: Any, products: Any, gate: Any) -> torch.Tensor:
        return act_mul(self.apply(x, products), gate.gelu, products.launch.pdl)

    def exact_shares(self, x: Any, products: Any, kind: str, span: int) -> torch.Tensor:
        raise NotImplementedError

    def below(self, lower: Projection) -> Self:
        parts = self.weight, lower.weight
        return type(self)(joined([(part.stored, part.scales) for part in parts]))

    def in_order(self, rows: torch.Tensor) -> Self:
        return type(self)(StoredWeight(self.weight.stored[rows], self.scales[rows]))

    def room(self, count: int) -> Self:
        raise NotImplementedError

    def put(self, place: int, part: Projection) -> None:
        raise NotImplementedError

    @property
    def scales(self) -> torch.Tensor:
        assert self.weight.scales is not None
        return self.weight.scales


def joined(parts: list[Any]) -> StoredWeight:
    """One below the other: (numbers, scales) each."""
    numbers, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return StoredWeight(numbers, scales)


@dataclass(frozen=True)
class Int8Loader:
    weights: WeightSource

    @classmethod
    def of(cls, weights: WeightSource, names: list[str]) -> Self | None:
        here = isinstance(weights.quantized, Int8Config) and all(map(weights.is_quantized, names))
        return cls(weights) if here else None

    def rows(self, names: list[str], rows: list[int], columns: int) -> Int8Projection:
        parts = [self.weights.take_stored(n, (r, columns), 0) for n, r in zip(names, rows, strict=True)]
        return Int8Projection(joined(parts))

    def columns(self, name: str, shape: tuple[int, int]) -> Int8Projection:
        return Int8Projection(StoredWeight(*self.weights.take_stored(name, shape, 1)))

    def whole(self, name: str, shape: tuple[int, int]) -> Int8Projection:
        return Int8Projection(StoredWeight(*self.weights.take_stored(name, shape, None)))


Stored = Callable[..., Path]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """A tiny model in this format; beside it, in "meant", what its numbers mean."""
    monkeypatch.setitem(methods.METHODS, "int8_rows", read)

    def write(told: dict[str, Any] = TOLD) -> Path:
        write_family(tmp_path / "meant", "qwen3", vocab_size=128, num_hidden_layers=LAYERS)
        raw = json.loads((tmp_path / "meant" / "config.json").read_text())
        tensors, meant = {}, load_file(tmp_path / "meant" / "model.safetensors")
        for name, weight in meant.items():
            tensors[name] = weight
            if weight.dim() == 2 and not any(part in name for part in KEPT):
                scales = weight.abs().amax(1) / 127
                tensors[name] = (weight / scales[:, None]).round().to(torch.int8)
                tensors[name + "_scale"] = scales
                meant[name] = tensors[name].float() * scales[:, None]
        save_file(meant, tmp_path / "meant" / "model.safetensors")
        (tmp_path / "int8").mkdir()
        (tmp_path / "int8" / "config.json").write_text(json.dumps(raw | {"quantization_config": told}))
        save_file(tensors, tmp_path / "int8" / "model.safetensors")
        return tmp_path / "int8"

    return write


def logits(folder: Path) -> torch.Tensor:
    rig = Rig(folder)
    return rig.logits([QuerySpan(rig.table(21), 0, 21)], list(range(40, 61)))


def test_a_cpu_computes_with_what_is_meant(stored: Stored) -> None:
    folder = stored()
    assert torch.equal(logits(folder), logits(folder.parent / "meant"))
    assert refusal(read_model(folder), 128) == ""  # a GPU widens it as well


def test_without_a_reader_it_is_refused_by_name(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored()
    monkeypatch.delitem(methods.METHODS, "int8_rows")
    with pytest.raises(ConfigError, match="quant_method 'int8_rows' is not supported"):
        read_model(folder)


def test_numbers_that_are_not_what_they_are_said_to_be(stored: Stored) -> None:
    folder = stored(TOLD | {"ignore": ["lm_head", "o_proj"]})
    with pytest.raises(ConfigError, match="o_proj.weight is stored as I8, though quantization_config says"):
        logits(folder)
    plain = replace(read_model(folder), quantized=None)
    with pytest.raises(ConfigError, match="is stored as I8: only F64, F32, F16, BF16 can be read there"):
        Rig(folder, plain)


def test_a_scale_that_is_missing_or_broken_is_named(stored: Stored) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale"
    folder = stored()
    edit(folder, {name: torch.full_like(load_file(folder / "model.safetensors")[name], torch.nan)})
    with pytest.raises(ConfigError, match="up_proj.weight of .* holds NaN"):
        logits(folder)
    edit(folder, {name: None})
    with pytest.raises(ConfigError, match=f"has no tensor {name}"):
        logits(folder)


def test_its_weights_count_where_memory_is_estimated(stored: Stored) -> None:
    folder = stored()
    found, meant = (
        weight_bytes(read_model(each), "bfloat16", "cpu") for each in (folder, folder.parent / "meant")
    )
    assert meant.total <= found.total < 1.05 * meant.total  # with scales


def test_a_rank_has_its_rows_or_columns_and_their_scales(stored: Stored) -> None:
    folder, name = stored(), "model.layers.0.mlp.down_proj.weight"
    whole = load_file(folder / "model.safetensors")
    n, k = whole[name].shape
    with FolderWeights(folder, placement=WeightPlacement(rank=1, ranks=2), quantized=read(TOLD)) as weights:
        rows, scales = weights.take_stored(name, (n, k), 0)
        columns, every = weights.take_stored(name, (n, k), 1)
    assert torch.equal(rows, whole[name][n // 2 :]) and torch.equal(scales, whole[name + "_scale"][n // 2 :])
    assert torch.equal(columns, whole[name][:, k // 2 :]) and torch.equal(every, whole[name + "_scale"])


@pytest.mark.slow
@pytest.mark.parametrize(("way", "widened"), [("narrow", True), ("narrow", False), ("wide", False)])
def test_a_device_has_it_widened_or_as_it_is(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, way: str, widened: bool
) -> None:
    if not widened:
        monkeypatch.setattr(table, "FORMATS", (Int8Loader, *table.FORMATS))
    model = same_forwards(stored(), FIRST[way])
    found = {type(each).__name__ for layer in model.layers for each in layer.mixing}
    assert found == {"DenseProjection" if widened else "Int8Projection"}
