"""The search for tiles at a first start: what it is for, that it happens once, and what it leaves."""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import eyas
from eyas.bench import fastest, first_start
from eyas.bench.shapes import SHAPES, write_model
from eyas.common.config import EngineConfig
from eyas.common.machine import gpus
from eyas.engine.kernels.experts.grouped_tiles import TILES, GroupedShape
from eyas.engine.kernels.launch import tile_table
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.skinny_tiles import (
    MEASURED,
    PACKED_TILES,
    ProductShape,
    exact_tile_for,
    stretches_of,
    tile_for,
)
from eyas.engine.loading.first_tiles import keep_tiles, search_first
from eyas.engine.loading.product_shapes import DenseProduct, ExpertProducts, SearchedProducts
from eyas.engine.loading.startup import StartPhases
from eyas.engine.models.table import read_model

GPU = "NVIDIA H200"
NARROW = replace(SHAPES["llama-3.1-8b"], hidden=2560, intermediate=9728, layers=2)
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpus, "model", lambda device: GPU)


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    usual = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton", "tune_seconds": 20.0}
    return EngineConfig(model=str(folder), draft=None, load_format="dummy", **(usual | changes))


def written(folder: Path, **changes: Any) -> Path:
    """A model's folder, whose tokenizer has few entries: to invent 128,256 takes most of a second."""
    write_model(replace(NARROW, vocab=1024), folder)
    told = json.loads((folder / "config.json").read_text()) | {"vocab_size": NARROW.vocab} | changes
    (folder / "config.json").write_text(json.dumps(told))
    return folder


class Searches:
    """In place of the process: the commands, and what they find."""

    def __init__(self, error: Exception | None = None) -> None:
        self.commands: list[tuple[str, ...]] = []
        self._error = error

    def __call__(self, command: tuple[str, ...], **_: object) -> None:
        self.commands.append(command)
        if self._error:
            raise self._error


def products_of(folder: Path, ranks: int = 1) -> SearchedProducts:
    return SearchedProducts.of(read_model(folder, "dummy"), ranks)


def test_a_model_whose_shapes_are_in_the_tables_is_not_searched(tmp_path: Path) -> None:
    write_model(SHAPES["llama-3.1-8b"], tmp_path / "8b")
    every = products_of(tmp_path / "8b")
    assert {each.shape.kind for each in every.dense} == {"qkv", "gated", "linear"} and not every.experts
    assert not len(every.untuned("cuda"))
    search_first(config_of(tmp_path / "8b"), StartPhases(), searches := Searches())
    assert not searches.commands


def test_the_products_of_a_rank_and_of_experts(tmp_path: Path) -> None:
    dense = {
        (each.shape.kind, each.shape.n, each.shape.k) for each in products_of(written(tmp_path / "a")).dense
    }
    assert {("gated", 19456, 2560), ("linear", 2560, 9728), ("qkv", 6144, 2560)} < dense
    halves = {(each.shape.kind, each.shape.n, each.shape.k) for each in products_of(tmp_path / "a", 2).dense}
    assert {("gated", 9728, 2560), ("linear", 2560, 4864)} < halves
    found = products_of(written(tmp_path / "b", **EXPERTS))
    assert {each.shape.kind for each in found.dense} == {"heads", "linear"}
    assert {each.shapes[0] for each in found.experts} == {GroupedShape(64, 1536, 2560, True, 2)}
    assert [each.rows for each in found.experts] == [1, 8, 32]


def test_states_and_gates_have_products_of_their_own(tmp_path: Path) -> None:
    """q, k and v, a gate and two numbers per value head; and queries with gates."""
    states = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "head_dim": 256}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2}
    kind: dict[str, Any] = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5"}
    kind["layer_types"] = ["linear_attention", "full_attention"]
    found = products_of(written(tmp_path / "m", **kind | states | heads))
    dense = {(each.shape.kind, each.shape.n, each.shape.k) for each in found.dense}
    assert {("linear", 2 * 2048 + 2 * 4096 + 2 * 32, 2560), ("linear", 2560, 4096)} < dense
    assert ("linear", 2 * 256 * (16 + 2), 2560) in dense


def test_a_first_start_searches_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it does not find has the rule's tile from then on."""
    config, searches, phases = config_of(written(tmp_path / "m", **EXPERTS)), Searches(), StartPhases()
    with caplog.at_level("INFO", "eyas.engine"):
        search_first(config, phases, searches)
        search_first(config, phases, searches)
    (command,) = searches.commands
    assert command[-8:-6] == ("--model", config.model) and command[-2:] == ("--seconds", "20.0")
    assert [record.message[:6] for record in caplog.records] == ["tiles:"] and "tiles" in phases.summary()
    found = products_of(tmp_path / "m")
    assert not len(found.untuned("cuda"))
    tables = PACKED_TILES.measured("cuda"), TILES.measured("cuda")
    assert all(tables[0][each.key] == tile_for(each.shape, 2, {}) for each in found.dense)
    assert all(key in tables[1] for each in found.experts for key in each.keys)


def test_a_search_that_fails_is_said_and_not_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = subprocess.TimeoutExpired("search", 35.0)
    broken = subprocess.CalledProcessError(1, "search", stderr=b"no such kernel")
    for number, (error, why) in enumerate(((late, "35.0 seconds"), (broken, "no such kernel"))):
        config, searches = (
            config_of(written(tmp_path / f"{number}", hidden_size=2560 + 128 * number)),
            Searches(error),
        )
        search_first(config, StartPhases(), searches)
        search_first(config, StartPhases(), searches)
        assert len(searches.commands) == 1 and why in caplog.records[-1].message


def test_a_checkout_that_is_not_installed_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed packages do not name it."""
    monkeypatch.setattr(tile_table, "version", {"triton": "3.6"}.__getitem__)
    assert f"{eyas.__version__}-3.6" in PACKED_TILES.in_cache(GPU).name


@pytest.mark.parametrize("text", ["", "[]", '{"tiles": [{"kind": 1}]}', '{"tiles": [7]}'])
def test_a_damaged_cache_is_none(tmp_path: Path, text: str) -> None:
    for table in (PACKED_TILES, TILES):
        without = table.measured("cuda")
        table.in_cache(GPU).parent.mkdir(parents=True, exist_ok=True)
        table.in_cache(GPU).write_text(text)
        assert table.measured("cuda") == without
    config = config_of(written(tmp_path / "m"))
    search_first(config, StartPhases(), searches := Searches())
    assert searches.commands and not len(products_of(tmp_path / "m").untuned("cuda"))


def test_a_cache_that_cannot_be_written_ends_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("no folder")
    search_first(config_of(written(tmp_path / "m")), StartPhases(), searches := Searches())
    assert not searches.commands and "cannot be written" in caplog.records[-1].message


@pytest.mark.parametrize(
    "changes",
    [
        {"tune_seconds": 0.0},
        {"device": "cpu"},
        {"dtype": "float32"},
        {"attention_backend": "torch"},
        {"dp_attention": 2},
    ],
)
def test_no_search_is_asked_for(tmp_path: Path, changes: dict[str, Any]) -> None:
    search_first(config_of(written(tmp_path / "m"), **changes), StartPhases(), searches := Searches())
    assert not searches.commands and not (tmp_path / "cache").exists()


def test_exact_products_have_searched_tiles_too_but_for_what_decides_bits() -> None:
    """Bits do not follow what a machine has in its cache; and what the package measured stands above it."""
    new, known = ("linear", 16, 2560, 2560), ("linear", 16, 4096, 4096)
    shape = ProductShape("linear", 16, 2560, 2560, 2560)
    for split in (1, 4, 8):
        tile = replace(tile_for(shape, 2, {}), split=split, warps=2, folds=1)
        keep_tiles(GPU, {new: tile, known: tile}, {}, {new: 1.0, known: 1.0})
        tiles = skinny.tiles_of("cuda")
        assert tiles[new] == tile and tiles[known] == MEASURED[known]
        exact = exact_tile_for(shape, 2, tiles)
        assert (exact.split * exact.folds, exact.warps) == (stretches_of(shape), 2)


def test_the_search_fits_its_time() -> None:
    shape = ProductShape("linear", 16, 4096, 4096, 4096)
    dense = tuple(DenseProduct(replace(shape, n=4096 + 16 * i)) for i in range(12))
    pair = GroupedShape(8, 512, 256, True, 2), GroupedShape(8, 256, 256, False, 2)
    products = SearchedProducts(dense, tuple(ExpertProducts(pair, 2, rows) for rows in (1, 8, 32)))
    for seconds, cores in ((20.0, 16), (20.0, 2), (1.0, 1), (600.0, 64)):
        some, most = first_start.within(products, seconds, cores)
        kernels = most * (len(some.dense) + 2 * len(some.experts))
        assert some.dense and kernels <= max(cores * seconds * 0.2, most)
    assert (some, most) == (products, first_start.MOST_TILES)


def test_the_search_finds_tiles_that_compute_the_same() -> None:
    """On a CPU, interpreted: two tiles of a dense product, of q, k and v, and of a pair of experts'."""
    torch.set_num_threads(1)
    shapes = ("linear", 128, (0, 0, 0)), ("gated", 256, (0, 0, 0)), ("heads", 128, (4, 2, 16))
    dense = tuple(
        DenseProduct(ProductShape(kind, 16, n, 64, heads[2] or n), heads) for kind, n, heads in shapes
    )
    pair = ExpertProducts((GroupedShape(4, 64, 32, True, 2), GroupedShape(4, 32, 32, False, 2)), 2, 1)
    found = first_start.search(SearchedProducts(dense, (pair,)), "cpu", float("inf"), 2)
    assert set(found[0]) == {each.key for each in dense} and set(found[1]) == set(pair.keys)
    assert set(found[2]) == {*found[0], *found[1]} and min(found[2].values()) > 0.0


def test_the_search_as_a_process_names_a_recipe_that_the_compiler_can_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipes: list[str] = []

    def compiled(recipe: str, *_: object) -> None:
        recipes.append(recipe)
        sys.exit(7)

    monkeypatch.setattr(fastest, "compiled", compiled)
    monkeypatch.setattr(gpus, "number_of", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        sys, "argv", ["first_start", "--model", str(written(tmp_path / "m")), "--seconds", "5"]
    )
    monkeypatch.delitem(sys.modules, first_start.__name__)
    with pytest.raises(SystemExit, match="7"):
        runpy.run_module(first_start.__name__, run_name="__main__")
    module, _, function = recipes[0].partition(":")
    assert getattr(importlib.import_module(module), function).__name__ == first_start.launches.__name__
    assert module != "__main__"
