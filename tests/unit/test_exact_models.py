"""A forward by the exact arithmetic: a position's logits have one set of bits, however it got there.

Triton's interpreter runs the kernels, with `tensor_core`'s model of Hopper's matrix unit, which stands for
cuBLAS as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.formats.packed import PackedProjection
from eyas.engine.models.ops import device_machine
from eyas.engine.models.ops.many_rows import ManyRows
from tests.bits.compare import Composition, differences
from tests.bits.models import CHUNK, ROWS, Model, Step
from tests.unit import tensor_core
from tests.unit.families import write_family
from tests.unit.fp8_formats import FORMATS, KEPT, write_format
from tests.unit.hybrid_rig import write_hybrid
from tests.unit.packed_formats import PACKINGS, write_packed
from tests.unit.tiny_deepseek import SMALL, write_tiny_deepseek

pytestmark = pytest.mark.slow

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "llama_biases",
    "granite",
    "ministral3",
    "glm4",
    "hunyuan",
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "glm4_moe",
    "llama4",
)
ALONE: dict[str, dict[str, int]] = {
    "glm4_moe": {"first_k_dense_replace": 0},
    "llama4": {"interleave_moe_layer_step": 1},
}
"""So that the only layer has experts."""
HALF = WeightPlacement("cpu", torch.float16)
NARROW: dict[str, list[Step]] = {
    "one chunk": [(CHUNK, 70)],
    "two chunks and rows": [(CHUNK, 7), (CHUNK, 60), (ROWS, 1), (ROWS, 2)],
    "a chain over a block's end": [(CHUNK, 62), (ROWS, 5)],
}
WIDE: dict[str, list[Step]] = {
    "one wide chunk": [(CHUNK, 135)],
    "narrow ones and a chain": [(CHUNK, 70), (CHUNK, 56), (ROWS, 4)],
}


@pytest.fixture(autouse=True)
def _matrix_unit() -> Iterator[None]:
    with tensor_core.hopper():
        yield


def said(folder: Path, ways: dict[str, list[Step]], exact: bool = True) -> list[str]:
    """Of the model in `folder`."""
    model = Model(folder, exact, HALF)
    runs = [Composition(name, partial(model.logits, steps)) for name, steps in ways.items()]
    return [str(difference) for difference in differences(runs)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_positions_logits_do_not_depend_on_the_steps(tmp_path: Path, family: str) -> None:
    """By either way through the layers."""
    write_family(tmp_path, family, vocab_size=128, num_hidden_layers=1, **ALONE.get(family, {}))
    assert said(tmp_path, WIDE) == []


IN_FP8 = [
    ("llama", "fp8 in blocks", "-"),
    ("gemma2", "channel and token", "self_attn"),
    ("qwen2", "tensor and tensor", "mlp."),
    ("qwen3_moe", "channel and token", "-"),
]
SIZES = {"vocab_size": 128, "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256}
SIZES |= {"head_dim": 64, "moe_intermediate_size": 128}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "form", "kept"), IN_FP8)
def test_weights_in_fp8_change_nothing_of_that(tmp_path: Path, family: str, form: str, kept: str) -> None:
    """With feed-forwards alone in FP8, with attention alone, and with experts."""
    write_family(tmp_path / "plain", family, std=0.08, **SIZES)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS[form], kept=(*KEPT, kept))
    assert said(tmp_path / "fp8", WIDE) == []


IN_FOUR_BITS = [("llama", "gptq"), ("qwen3", "awq"), ("gemma2", "w4a16, zero points")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "form"), IN_FOUR_BITS)
def test_packed_weights_change_nothing_of_that(tmp_path: Path, family: str, form: str) -> None:
    write_family(tmp_path / "plain", family, std=0.08, **SIZES)
    write_packed(tmp_path / "packed", tmp_path / "plain", PACKINGS[form])
    model = Model(tmp_path / "packed", True, HALF)
    assert {each for layer in model.layers for each in layer.formats} == {PackedProjection}
    assert said(tmp_path / "packed", WIDE) == []


HYBRID: dict[str, Any] = {
    "vocab_size": 128,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


OTHERS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_moe": {"shared_expert_intermediate_size": 32},  # as the others, so that it is one of them
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "lfm2"])
def test_nor_do_those_of_a_hybrid(tmp_path: Path, name: str) -> None:
    """Chunks that end inside a span and behind it, single rows and a chain over the next position."""
    write_hybrid(tmp_path, name, **HYBRID | OTHERS.get(name, {}))
    with tensor_core.hopper(folds=True):
        assert said(tmp_path, WIDE) == []


LATENT: dict[str, list[Step]] = {
    "one chunk": [(CHUNK, 75)],
    "a chain over the chunk's end": [(CHUNK, 62), (ROWS, 1), (CHUNK, 4), (ROWS, 8)],
}
FEW = {"num_hidden_layers": 2, "n_routed_experts": 8}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [48, None])
def test_latents_have_one_form(tmp_path: Path, rank: int | None) -> None:
    """Of queries with an inner row and of those without."""
    write_tiny_deepseek(tmp_path, SMALL | FEW | {"q_lora_rank": rank})
    assert said(tmp_path, LATENT) == []


@pytest.mark.timeout(600)
def test_todays_latents_are_noticed(tmp_path: Path) -> None:
    write_tiny_deepseek(tmp_path, SMALL | FEW)
    assert said(tmp_path, LATENT, exact=False)


@pytest.mark.timeout(600)
def test_by_the_kernels_of_today_they_do(tmp_path: Path) -> None:
    """On the narrow way alone; by the exact arithmetic the same steps agree, on logits near to today's."""
    write_family(tmp_path, "llama", vocab_size=128, num_hidden_layers=1)
    assert said(tmp_path, NARROW) == []
    assert said(tmp_path, NARROW, exact=False)
    steps = NARROW["one chunk"]
    exact, fast = (Model(tmp_path, exact, HALF).logits(steps) for exact in (True, False))
    error = max(float((exact[i] - fast[i]).abs().max()) for i in exact)
    assert error < 0.05 * float(torch.stack(list(fast.values())).std())


@pytest.mark.timeout(600)
def test_todays_wide_rows_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which round in other places than narrow ones."""
    write_family(tmp_path, "llama_biases", vocab_size=128, num_hidden_layers=1)
    monkeypatch.setattr(device_machine, "ExactManyRows", ManyRows)
    assert said(tmp_path, WIDE)
