"""gpt-oss in MXFP4 on the device path: its experts are multiplied as they are packed, by ranks too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.checkpoint.sizes import weight_bytes
from eyas.engine.checkpoint.weights import DummyWeights, FolderWeights, WeightPlacement, WeightSource
from eyas.engine.formats.dense import DenseProjection
from eyas.engine.formats.fp4 import Fp4Projection
from eyas.engine.formats.projection import Projection
from eyas.engine.formats.table import loader_of
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.products.fp4 import Fp4Weight
from eyas.engine.kernels.products.skinny import ProductLaunch
from eyas.engine.loading.recipe import MetaWeights
from eyas.engine.models.table import read_model
from tests.unit.families import write_family
from tests.unit.fp4_formats import gpt_oss, mx_experts
from tests.unit.fused_models import FIRST, same_forwards
from tests.unit.tiny import edit

HIDDEN, WIDTH = 64, 64
NAME = "model.layers.1.mlp.experts.3"
GATE_UP = [f"{NAME}.gate_proj.weight", f"{NAME}.up_proj.weight"]
DOWN = f"{NAME}.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "packed"
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "vocab_size": 128, "num_hidden_layers": 2}
    write_family(folder, "gpt_oss", **sizes)
    change(folder, lambda name, stored: mx_experts(name, stored)[0])
    edit(folder, quantization_config=gpt_oss())
    return folder


def change(folder: Path, packed: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        stored |= packed(name, stored.pop(name))
    save_file(stored, folder / "model.safetensors")


def opened(folder: Path, **placement: Any) -> FolderWeights:
    config = read_model(folder)
    where = WeightPlacement(**placement)
    return FolderWeights(folder, config.spelling, where, quantized=config.quantized, fused=config.fused)


def pair(weights: WeightSource, width: int = WIDTH) -> tuple[Projection, Projection]:
    """Gate and up, and down, of one expert."""
    forth = loader_of(weights, GATE_UP, exact=False).rows(GATE_UP, [width] * 2, HIDDEN)
    return forth, loader_of(weights, [DOWN], exact=False).columns(DOWN, (HIDDEN, width))


def meant(part: Projection) -> torch.Tensor:
    """By products with the rows of a unit matrix."""
    if not isinstance(part, Fp4Projection):
        return part.weight.stored
    products = GroupedProducts(ProductLaunch.on("cpu", pdl=False))
    return products.dense(torch.eye(part.shape[1]), part.packed).t()


def stored(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with opened(folder) as weights:
        both = [weights.take(name, (WIDTH, HIDDEN)) for name in GATE_UP]
        return torch.cat(both), weights.take(DOWN, (HIDDEN, WIDTH))


def test_they_are_read_as_they_are_packed(folder: Path) -> None:
    forth, back = stored(folder)
    with opened(folder) as weights:
        found = pair(weights)
    for part, whole in zip(found, (forth, back), strict=True):
        assert isinstance(part.of_experts, Fp4Weight) and torch.equal(meant(part), whole)
    with opened(folder) as weights:  # exact arithmetic widens them
        loader = loader_of(weights, [DOWN], exact=True)
        assert torch.equal(loader.columns(DOWN, (HIDDEN, WIDTH)).weight.stored, back)


@pytest.mark.parametrize("ranks", [1, 4])
def test_kernels_compiled_ahead_are_those_of_packed_weights(folder: Path, ranks: int) -> None:
    """A start's list of kernels is made of weights without memory: of the same formats, shapes and types."""
    with opened(folder, rank=ranks - 1, ranks=ranks) as weights:
        real, listed = pair(weights), pair(MetaWeights(weights))
    for one, other in zip(real, listed, strict=True):
        assert type(one) is type(other) and one.shape == other.shape
        if isinstance(one, Fp4Projection) and isinstance(other, Fp4Projection):
            for mine, its in zip(_tensors(one.packed), _tensors(other.packed), strict=True):
                assert its.is_meta and (mine.shape, mine.dtype) == (its.shape, its.dtype)


def _tensors(weight: Fp4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.words, weight.scales


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ranks_share(folder: Path, ranks: int) -> None:
    """Rows of gate and of up, and columns of down: whole groups of 32, or they are widened."""
    forth, back = stored(folder)
    for rank in range(ranks):
        with opened(folder, rank=rank, ranks=ranks) as weights:
            found = pair(weights)
        assert isinstance(found[0], Fp4Projection)
        assert isinstance(found[1], Fp4Projection if ranks == 2 else DenseProjection)
        mine = slice(WIDTH // ranks * rank, WIDTH // ranks * (rank + 1))
        assert torch.equal(meant(found[0]), torch.cat([half[mine] for half in forth.chunk(2)]))
        assert torch.equal(meant(found[1]), back[:, mine])


def test_a_scale_that_no_kernel_has_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    large = load_file(folder / "model.safetensors")
    large["model.layers.1.mlp.experts.down_proj_scales"][3, 2, 0] = 129
    save_file(large, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with opened(tmp_path) as weights, pytest.raises(ConfigError, match=f"{DOWN} has a scale above 2"):
        pair(weights)


def test_dummy_weights_are_packed_as_wide_as_others(folder: Path) -> None:
    config = read_model(folder)
    found = [meant(part) for part in pair(DummyWeights(1, quantized=config.quantized))]
    for part, k in zip(found, (HIDDEN, WIDTH), strict=True):
        assert 0.4 < float(part.std()) * k**0.5 < 2.5
    rank = DummyWeights(1, WeightPlacement(rank=1, ranks=2), quantized=config.quantized)
    assert torch.equal(meant(pair(rank)[1]), found[1][:, WIDTH // 2 :])


def test_memory_is_that_of_four_bits_on_a_gpu_alone(folder: Path) -> None:
    config = read_model(folder)
    wide, fours = (weight_bytes(config, "bfloat16", device) for device in ("cpu", "cuda"))
    experts = config.layers[0].feed_forward
    assert isinstance(experts, ExpertsSpec)
    numbers = 3 * HIDDEN * WIDTH * experts.experts * config.num_layers
    assert (wide.experts - fours.experts) * 32 == numbers * (64 - 17) and fours.rest == wide.rest
    assert weight_bytes(config, "bfloat16", "cuda", exact=True) == wide


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_forwards_are_the_plain_models(folder: Path, first: int) -> None:
    same_forwards(folder, first)


@pytest.mark.slow
def test_a_neighbours_bias_is_noticed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = GroupedProducts.down
    monkeypatch.setattr(GroupedProducts, "down", lambda *args: plain(*args[:-1], args[-1].roll(1, 0)))
    with pytest.raises(AssertionError):
        same_forwards(folder, FIRST["narrow"])
