"""Models of four-bit weights on the device path, whose kernels read them packed, against the plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.engine.formats.dense import DenseProjection
from eyas.engine.formats.ordered import OrderedProjection
from eyas.engine.formats.packed import PackedProjection
from eyas.engine.models.ops.device import DeviceOps
from eyas.engine.models.ops.few_rows import FewRows
from tests.unit.families import write_family
from tests.unit.fused_models import FIRST, same_forwards
from tests.unit.packed_formats import PACKINGS, write_packed

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 128, "num_hidden_layers": 2, "hidden_size": 192, "intermediate_size": 320}
FEW, MANY = FIRST.values()
FORMS = [("llama", "gptq"), ("qwen3", "awq"), ("gemma2", "w4a16"), ("qwen2", "w4a16, zero points")]


@pytest.mark.parametrize("first", [FEW, MANY])
@pytest.mark.parametrize(("family", "name"), FORMS)
def test_models_are_the_plain_ones(tmp_path: Path, family: str, name: str, first: int) -> None:
    write_family(tmp_path / "plain", family, std=0.08, **SIZES)
    write_packed(tmp_path / "packed", tmp_path / "plain", PACKINGS[name])
    model = same_forwards(tmp_path / "packed", first)
    assert {each for layer in model.layers for each in layer.formats} == {PackedProjection}


@pytest.mark.parametrize("name", ["gptq", "w4a16, zero points"])
def test_experts_are_multiplied_as_they_are_packed(tmp_path: Path, name: str) -> None:
    write_family(tmp_path / "plain", "mixtral", std=0.08, **SIZES)
    write_packed(tmp_path / "packed", tmp_path / "plain", PACKINGS[name])
    model = same_forwards(tmp_path / "packed", FEW)
    assert {each for layer in model.layers for each in layer.formats} == {PackedProjection}


ORDERED = ["w4a16, by activations", "gptq, 8 bits, by activations"]


def ordered(folder: Path, name: str) -> Path:
    """A model whose columns are in groups in an order of their own, q, k and v in the same."""
    write_family(folder / "plain", "llama", std=0.08, **SIZES)
    write_packed(folder / "packed", folder / "plain", PACKINGS[name])
    return folder / "packed"


@pytest.mark.parametrize("first", [FEW, MANY])
@pytest.mark.parametrize("name", ORDERED)
def test_columns_in_an_order_of_their_own_are_packed(tmp_path: Path, name: str, first: int) -> None:
    model = same_forwards(ordered(tmp_path, name), first)
    assert {each for layer in model.layers for each in layer.formats} == {OrderedProjection}


def test_an_order_that_rows_do_not_take_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power check: rows as they are."""
    monkeypatch.setattr(OrderedProjection, "_in_order", lambda _, x: x)
    with pytest.raises(AssertionError):
        same_forwards(ordered(tmp_path, ORDERED[0]), FEW)


def test_groups_of_16_in_an_order_of_their_own_are_widened(tmp_path: Path) -> None:
    model = same_forwards(ordered(tmp_path, "gptq, by activations"), FEW)
    assert {each for layer in model.layers for each in layer.formats} == {DenseProjection}


def test_norms_need_no_kernel_behind_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product before leaves its rows with the next norm's gain."""
    calls: list[str] = []
    for kind, name in ((DeviceOps, "_finished"), (FewRows, "embed")):
        plain = getattr(kind, name)

        def counted(*args: Any, name: str = name, plain: Any = plain, **named: Any) -> Any:
            calls.append(name)
            return plain(*args, **named)

        monkeypatch.setattr(kind, name, counted)
    write_family(tmp_path / "plain", "llama", std=0.08, **SIZES)
    write_packed(tmp_path / "packed", tmp_path / "plain", PACKINGS["gptq"])
    same_forwards(tmp_path / "packed", FEW)
    assert calls.count("_finished") == calls.count("embed") > 0
