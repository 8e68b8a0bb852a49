"""Tensors from folders (one file or shards) and dummy tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.weights import DummyWeights, FolderWeights
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


def test_missing_and_misshapen_tensors_are_named(folder: Path) -> None:
    with FolderWeights(folder) as weights:
        assert "lm_head.weight" not in weights
        with pytest.raises(ConfigError, match="no tensor lm_head.weight"):
            weights.take("lm_head.weight", (256, 64))
        with pytest.raises(ConfigError, match=r"model.norm.weight .* is \(64,\), its config says \(65,\)"):
            weights.take("model.norm.weight", (65,))


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
