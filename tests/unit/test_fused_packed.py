"""Models of weights in eight bits, MXFP4 and NVFP4 on the device path, which reads them packed, against the
plain ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.sizes import weight_bytes
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.formats.dense import DenseProjection
from eyas.engine.formats.fp4 import Fp4Projection
from eyas.engine.formats.packed import PackedLoader, PackedProjection
from eyas.engine.formats.table import loader_of
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.products import skinny
from eyas.engine.models.table import read_model
from tests.unit.families import write_family
from tests.unit.fp4_formats import FP4
from tests.unit.fused_models import FIRST, same_forwards
from tests.unit.packed_formats import PACKINGS, write_packed
from tests.unit.tiny import edit

SIZES = {"vocab_size": 128, "num_hidden_layers": 1, "hidden_size": 192, "intermediate_size": 320}
FEW, MANY = FIRST.values()
PAIR = ("gate", "up")
ALL = PACKINGS | FP4
FORMS = [
    ("llama", "w8a16"),
    ("qwen3", "gptq, 8 bits, by row"),
    ("qwen2", "w8a8, zero points"),
    ("gemma2", "w8a8, by tensor"),
    ("llama", "mxfp4"),
    ("llama", "nvfp4"),
    ("qwen3", "modelopt"),
]


def served(folder: Path, family: str, name: str) -> Path:
    write_family(folder / "plain", family, std=0.08, **SIZES)
    write_packed(folder / "packed", folder / "plain", ALL[name])
    return folder / "packed"


@pytest.mark.slow
@pytest.mark.parametrize("first", [FEW, MANY])
@pytest.mark.parametrize(("family", "name"), FORMS)
def test_models_are_the_plain_ones(tmp_path: Path, family: str, name: str, first: int) -> None:
    model = same_forwards(served(tmp_path, family, name), first)
    assert {each for layer in model.layers for each in layer.formats} == {PackedProjection}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("w8a16", PackedProjection), ("nvfp4", Fp4Projection)])
def test_experts_are_multiplied_as_they_are_packed(tmp_path: Path, name: str, kind: type[object]) -> None:
    model = same_forwards(served(tmp_path, "mixtral", name), FEW)
    assert {each for layer in model.layers for each in layer.formats} == {PackedProjection, kind}


def test_an_expert_with_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """A layer's would be widened: experts are all of one format."""
    folder = served(tmp_path, "qwen3_moe", "nvfp4")
    name = "model.layers.0.mlp.experts.1.down_proj"
    scale = load_file(folder / "model.safetensors")[f"{name}.weight_scale"]
    scale.view(torch.uint8)[3, 1] = 0x7F
    edit(folder, {f"{name}.weight_scale": scale})
    config, why = read_model(folder), "has a scale that is no number: experts stay packed"
    with (
        pytest.raises(ConfigError, match=f"tensor {name}.weight {why}"),
        FolderWeights(folder, quantized=config.quantized) as weights,
    ):
        shape = scale.shape[0], scale.shape[1] * 16
        loader_of(weights, [f"{name}.weight"], exact=False).whole(f"{name}.weight", shape)


@pytest.mark.slow
def test_a_scale_that_is_too_large_is_widened(tmp_path: Path) -> None:
    """Of one matrix, whose neighbours stay packed."""
    folder = served(tmp_path, "llama", "mxfp4")
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    scale = load_file(folder / "model.safetensors")[name]
    scale[0, 0] = 127 + 5
    edit(folder, {name: scale})
    model = same_forwards(folder, FEW)
    assert {each for layer in model.layers for each in layer.formats} == {PackedProjection, DenseProjection}


def test_many_rows_read_a_copy_of_the_widened_matrix(tmp_path: Path) -> None:
    folder, names = served(tmp_path, "llama", "w8a16"), [f"model.layers.0.mlp.{n}_proj.weight" for n in PAIR]
    config, x = read_model(folder), torch.randn(skinny.MAX_ROWS + 1, SIZES["hidden_size"])
    products = GroupedProducts(skinny.ProductLaunch.on("cpu", pdl=False))
    with FolderWeights(folder, config.spelling, quantized=config.quantized) as weights:
        loader = loader_of(weights, names, exact=False)
        assert isinstance(loader, PackedLoader)
        made = [each.rows(names, [320, 320], 192) for each in (loader, replace(loader, copies=True))]
    order = torch.arange(639, -1, -1)
    for plain, copied in (made, [each.in_order(order) for each in made]):
        assert isinstance(copied, PackedProjection) and copied.copy is not None
        assert torch.equal(copied.apply(x, products), plain.apply(x, products))
        few = [each.apply(x[:3], products) for each in (copied, plain)]
        copied.copy.zero_()
        assert not copied.apply(x, products).any() and not copied.weight.stored.any()
        assert torch.equal(*few) and torch.equal(few[0], copied.apply(x[:3], products)), "few rows do not"


@pytest.mark.parametrize(("name", "of_32"), [("w8a16", 32), ("nvfp4", 18), ("mxfp4", 17), ("gptq", 16)])
def test_memory_of_experts_is_that_of_packed_numbers(tmp_path: Path, name: str, of_32: int) -> None:
    config = read_model(served(tmp_path, "qwen3_moe", name))
    wide, packed, exact = (
        weight_bytes(config, "bfloat16", device, exact)
        for device, exact in (("cpu", False), ("cuda", False), ("cuda", True))
    )
    assert packed.experts * 64 == wide.experts * of_32 and exact.experts == wide.experts > 0


@pytest.mark.parametrize(("name", "of_32"), [("w8a16", 32), ("mxfp4", 17), ("nvfp4", 18), ("gptq", 16)])
def test_memory_is_that_of_packed_numbers_on_a_gpu(tmp_path: Path, name: str, of_32: int) -> None:
    config = read_model(served(tmp_path, "llama", name))
    wide, packed = (weight_bytes(config, "bfloat16", device) for device in ("cpu", "cuda"))
    layers = load_file(tmp_path / "plain" / "model.safetensors")
    numbers = sum(weight.numel() for each, weight in layers.items() if each.endswith("_proj.weight"))
    assert (wide.rest - packed.rest) * 32 == numbers * (64 - of_32)
    assert torch.bfloat16.itemsize * numbers < wide.rest
