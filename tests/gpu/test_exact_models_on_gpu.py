"""Small models of every kind in exact arithmetic on a GPU: a position's logits have one set of bits.

Their products of many rows are by our own kernels: whether cuBLAS has the same bits, every start asks, and
tests/gpu/test_bits_on_gpu.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from eyas.engine.checkpoint.weights import WeightPlacement
from tests.bits.compare import Composition, differences
from tests.bits.models import CHUNK, ROWS, Model, Step
from tests.unit.families import write_family
from tests.unit.fp8_formats import FORMATS, KEPT, write_format
from tests.unit.hybrid_rig import write_hybrid
from tests.unit.tiny_deepseek import WHOLE, write_tiny_deepseek

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
STEPS: dict[str, list[Step]] = {
    "one chunk": [(CHUNK, 400)],
    "narrow chunks and chains": [*[(CHUNK, 100)] * 3, (CHUNK, 60), *[(ROWS, 8)] * 5],
    "wide chunks and rows": [(CHUNK, 150), (CHUNK, 200), (CHUNK, 40), *[(ROWS, 1)] * 10],
}


def said(folder: Path, exact: bool = True) -> list[str]:
    """The first differences of the model in `folder`."""
    model = Model(folder, exact, WeightPlacement("cuda", torch.bfloat16), cublas=False)
    runs = [Composition(name, partial(model.logits, steps)) for name, steps in STEPS.items()]
    return [str(difference) for difference in differences(runs)[:5]]


@pytest.mark.parametrize("family", ["llama", "llama_biases", "gemma2", "mixtral", "qwen3_moe"])
def test_a_positions_logits_do_not_depend_on_the_steps(tmp_path: Path, family: str) -> None:
    write_family(tmp_path, family, **SIZES)
    assert said(tmp_path) == []


STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
}


CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "lfm2"])
def test_nor_do_those_of_a_hybrid(tmp_path: Path, name: str) -> None:
    write_hybrid(tmp_path, name, **SIZES | STATES | (CONVOLUTIONS if name == "lfm2" else {}))
    assert said(tmp_path) == []


FP8 = {"num_hidden_layers": 1, "head_dim": 64, "num_key_value_heads": 2, "moe_intermediate_size": 256}
IN_FP8 = [
    ("llama", "fp8 in blocks", "-"),
    ("llama", "fp8 in blocks, ue8m0", "-"),
    ("gemma2", "channel and token", "self_attn"),
    ("qwen2", "tensor and tensor", "mlp."),
    ("qwen3_moe", "channel and token", "-"),
]


@pytest.mark.parametrize(("family", "form", "kept"), IN_FP8)
def test_weights_in_fp8_change_nothing_of_that(tmp_path: Path, family: str, form: str, kept: str) -> None:
    write_family(tmp_path / "plain", family, std=0.08, **SIZES | FP8)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS[form], kept=(*KEPT, kept))
    assert said(tmp_path / "fp8") == []


LATENT = WHOLE | {"num_hidden_layers": 2, "max_position_embeddings": 1024}


@pytest.mark.parametrize("form", ["", "fp8 in blocks"])
def test_latents_have_one_form(tmp_path: Path, form: str) -> None:
    write_tiny_deepseek(tmp_path / "plain", LATENT)
    if form:
        write_format(tmp_path / form, tmp_path / "plain", FORMATS[form])
    assert said(tmp_path / (form or "plain")) == []


def test_by_the_fast_arithmetic_they_do(tmp_path: Path) -> None:
    write_family(tmp_path, "llama", **SIZES)
    assert said(tmp_path, exact=False)
