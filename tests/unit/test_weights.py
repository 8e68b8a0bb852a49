"""Tensors from folders (one file or shards) and dummy tensors, whole or divided among ranks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.weights import (
    DummyWeights,
    FiniteCheck,
    FolderWeights,
    WeightPlacement,
    WeightSource,
)
from tests.unit.tiny import write_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path, layers=2)


def test_a_tensor_is_read_as_float32(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in stored.items()}, folder / "model.safetensors")
    with FolderWeights(folder) as weights:
        taken = weights.take("model.norm.weight", (64,))
    assert taken.dtype == torch.float32
    assert torch.equal(taken, stored["model.norm.weight"].bfloat16().float())


def test_shards_named_by_an_index(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    names = sorted(stored)
    (folder / "model.safetensors").unlink()
    home = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(home.values()):
        save_file({n: stored[n] for n in names if home[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    with FolderWeights(folder) as weights:
        assert all(torch.equal(weights.take(n, tuple(stored[n].shape)), stored[n]) for n in names)


def test_a_tensor_that_two_files_hold_is_refused(folder: Path) -> None:
    """An older model's shards beside a new file: which of them would answer depends on their names."""
    stored = load_file(folder / "model.safetensors")
    save_file({"model.norm.weight": stored["model.norm.weight"] + 1}, folder / "model-00001-of-2.safetensors")
    with pytest.raises(ConfigError, match=r"tensor model.norm.weight of .*model.safetensors is in another"):
        FolderWeights(folder)


def test_missing_and_misshapen_tensors_are_named(folder: Path) -> None:
    with FolderWeights(folder) as weights:
        assert "lm_head.weight" not in weights
        with pytest.raises(ConfigError, match="no tensor lm_head.weight"):
            weights.take("lm_head.weight", (256, 64))
        with pytest.raises(ConfigError, match=r"model.norm.weight .* is \(64,\), its config says \(65,\)"):
            weights.take("model.norm.weight", (65,))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_the_tensors_name(folder: Path, wrong: float) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"][7] = wrong
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tensor model\.norm\.weight of .* holds NaN or infinity"):
        with FolderWeights(folder) as weights:
            weights.take("model.embed_tokens.weight", (256, 64))
            weights.take("model.norm.weight", (64,))
    with pytest.raises(KeyError), FolderWeights(folder) as weights:  # an error of the model's comes first
        weights.take("model.norm.weight", (64,))
        raise KeyError


def test_a_number_that_the_dtype_cannot_hold_is_not_finite(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"][7] = 1e6
    save_file(stored, folder / "model.safetensors")
    for dtype, refused in ((torch.float32, False), (torch.bfloat16, False), (torch.float16, True)):
        with pytest.raises(ConfigError, match=r"norm") if refused else contextlib.nullcontext():
            with FolderWeights(folder, placement=WeightPlacement(dtype=dtype)) as weights:
                weights.take("model.norm.weight", (64,))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_found_whatever_the_dtypes(
    folder: Path, kept: torch.dtype, asked: torch.dtype
) -> None:
    stored = {k: v.to(kept) for k, v in load_file(folder / "model.safetensors").items()}
    for wrong in (float("nan"), -float("inf")):
        stored["model.norm.weight"][7] = wrong
        save_file(stored, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=r"model\.norm"):
            with FolderWeights(folder, placement=WeightPlacement(dtype=asked)) as weights:
                weights.take("model.norm.weight", (64,))


def test_every_nan_of_fp8_is_found_and_no_other_number() -> None:
    for byte in range(256):
        check = FiniteCheck()
        check.see("w", torch.tensor([3, byte], dtype=torch.uint8).view(torch.float8_e4m3fn))
        assert check.broken() == (["w"] if byte in (0x7F, 0xFF) else []), byte


class _Reads(TorchDispatchMode):
    """Counts what a device would be waited for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "equal")
        return func(*args, **kwargs or {})


def test_no_tensor_is_waited_for_until_all_are_seen() -> None:
    check = FiniteCheck()
    with _Reads() as reads:
        for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            check.see(f"w{i}", torch.full((4, 4), float("nan") if i == 1 else 1.0, dtype=dtype))
        check.see("ids", torch.tensor([1]))
        check.see("empty", torch.empty(0))
        assert reads.count == 0
    assert check.broken() == ["w1"] and FiniteCheck().broken() == []


def test_a_broken_file_is_one_sentence(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        FolderWeights(folder)


def test_dummy_tensors_depend_on_name_and_seed_alone() -> None:
    one, other = DummyWeights(seed=1), DummyWeights(seed=1)
    other.take("first", (4, 4))
    assert torch.equal(one.take("a", (32, 64)), other.take("a", (32, 64)))
    assert not torch.equal(one.take("a", (32, 64)), one.take("b", (32, 64)))
    assert not torch.equal(one.take("a", (32, 64)), DummyWeights(seed=2).take("a", (32, 64)))


def test_dummy_tensors_are_gains_of_one_and_integers_of_zero() -> None:
    weights = DummyWeights(optional=frozenset({"d2t"}))
    assert "d2t" in weights and "fc_norm.0.weight" not in weights
    assert torch.equal(weights.take("norm.weight", (8,)), torch.ones(8))
    assert torch.equal(weights.take("d2t", (8,), torch.int64), torch.zeros(8, dtype=torch.int64))
    noise = weights.take("fc.weight", (64, 256))
    assert abs(float(noise.std()) * 16 - 1) < 0.1, "a product keeps the scale of its input"


# --- ranks ---------------------------------------------------------------------------------------------

QUERIES, KEYS = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
Source = Callable[[WeightPlacement], WeightSource]


@pytest.fixture(params=["folder", "dummy"])
def source(request: pytest.FixtureRequest, folder: Path) -> Source:
    """Weights of the same tensors for any placement."""
    if request.param == "dummy":
        return lambda placement: DummyWeights(placement=placement)
    return lambda placement: FolderWeights(folder, placement=placement)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shares_of_all_ranks_are_the_whole(source: Source, ranks: int) -> None:
    whole = source(WeightPlacement())
    shares = [source(WeightPlacement(rank=rank, ranks=ranks)) for rank in range(ranks)]
    rows = [weights.take_rows(QUERIES, (64, 64)) for weights in shares]
    columns = [weights.take_columns(KEYS, (32, 64)) for weights in shares]
    gains = [weights.take_rows("model.norm.weight", (64,)) for weights in shares]
    assert all(part.is_contiguous() for part in (*rows, *columns, *gains))
    assert columns[0].shape == (32, 64 // ranks)
    assert torch.equal(torch.cat(rows), whole.take(QUERIES, (64, 64)))
    assert torch.equal(torch.cat(columns, 1), whole.take(KEYS, (32, 64)))
    assert torch.equal(torch.cat(gains), whole.take("model.norm.weight", (64,)))
    assert torch.equal(shares[-1].take(KEYS, (32, 64)), whole.take(KEYS, (32, 64)))


def test_stacked_rows_are_each_matrix_own_share(source: Source) -> None:
    whole, second = source(WeightPlacement()), source(WeightPlacement(rank=1, ranks=2))
    fused = second.stack_rows([QUERIES, KEYS], [64, 32], 64)
    expected = torch.cat([whole.take(QUERIES, (64, 64))[32:], whole.take(KEYS, (32, 64))[16:]])
    assert torch.equal(fused, expected)
    assert torch.equal(
        whole.stack_rows([QUERIES, KEYS], [64, 32], 64), whole.stack([QUERIES, KEYS], [64, 32], 64)
    )


def test_ranks_that_do_not_divide_are_an_error(source: Source) -> None:
    weights = source(WeightPlacement(rank=0, ranks=3))
    for take in (weights.take_rows, weights.take_columns):
        with pytest.raises(ConfigError, match=f"{QUERIES}: its 64 .* by 3 ranks"):
            take(QUERIES, (64, 64))
