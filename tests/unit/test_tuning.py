"""`eyas tune`: products are those of a model, tiles that are found are kept, and an engine reads them."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas import cli
from eyas.bench import fastest, packed_layers, packed_search, tile_search, tune
from eyas.bench.tile_search import TuningBench, TuningJob, candidates, gated_pair, jobs_of
from eyas.common.errors import ConfigError
from eyas.common.machine import gpus
from eyas.engine.kernels.experts import grouped_tiles
from eyas.engine.kernels.experts.grouped_tiles import TILES, GroupedShape, GroupedTile, key_of
from eyas.engine.kernels.launch import tile_table
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.skinny_tiles import PACKED_TILES, ProductShape, ProductTile
from tests.gpu.answer_latent import write_rank
from tests.unit.families import write_family
from tests.unit.packed_formats import PACKINGS, write_packed

R8 = gated_pair(256, 256, 7168, 1)


def test_tables_come_back_as_they_were_written(tmp_path: Path) -> None:
    tiles = {key_of(R8[0], choices): GroupedTile(16, 64, 128, 4, choices // 4) for choices in (8, 64)}
    times = dict(zip(tiles, (1.5, 2.5), strict=True))
    TILES.write(tmp_path / "new" / "table.json", "NVIDIA H200", tiles, times)
    assert TILES.read(tmp_path / "new" / "table.json") == (tiles, times)


def test_an_engine_reads_the_table_of_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a start's recipe, whose device is none, that of the first one."""
    monkeypatch.setattr(tile_table, "ASSETS", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiles = {key_of(R8[0], 8): GroupedTile(16, 32, 128, 4, 3)}
    TILES.write(TILES.in_package("NVIDIA H200"), "NVIDIA H200", tiles, dict.fromkeys(tiles, 1.0))
    monkeypatch.setattr(gpus, "model", lambda device: "NVIDIA H200" if device != "cuda:1" else "NVIDIA L4")
    for device, found in (("cuda", tiles), ("meta", tiles), ("cuda:1", {}), ("cpu", {})):
        assert TILES.measured(device) == found
    assert grouped_tiles.tile_for(R8[0], 8, tiles).columns == 32
    assert grouped_tiles.tile_for(R8[0], 8, {}).columns != 32


def test_products_are_those_of_a_ranks_share(tmp_path: Path) -> None:
    write_family(tmp_path, "mixtral", vocab_size=128)
    (job,) = jobs_of(str(tmp_path), 2, "moe")
    assert job == TuningJob((GroupedShape(4, 96, 48, True, 2), GroupedShape(4, 48, 48, False, 2)), 2)
    assert jobs_of(str(tmp_path), 1, "gemm") == ()


def test_latent_attention_has_three_products_and_a_shared_expert_none_of_its_own(tmp_path: Path) -> None:
    write_rank(tmp_path, 4)
    latent = [GroupedShape(1, n, k, False, 1) for n, k in ((2112, 7168), (3072, 1536), (7168, 2048))]
    found = [job.shapes[0] for job in jobs_of(str(tmp_path), 1, "gemm")]
    assert found == [*latent, *gated_pair(1, 2304, 7168, 1)]


def test_every_candidate_fits() -> None:
    for shape in R8:
        for rows in (16, 128):
            found = candidates(shape, 4096, rows)
            assert len(found) == len(set(found)) > 3
            assert all(tile == grouped_tiles.fitted(tile, shape, 4096) for tile in found)


def test_a_search_finds_a_tile_that_gives_the_rules_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among right tiles the fastest wins: the clock here prefers wide ones."""
    job = TuningJob(gated_pair(4, 32, 64, 4), 2)
    bench = TuningBench(job, "cpu")
    asked: list[GroupedTile] = []

    def few(shape: GroupedShape, choices: int, rows: int) -> list[GroupedTile]:
        asked[:] = candidates(shape, choices, rows)[:3]
        return asked

    turns = iter(range(100, 0, -1))
    monkeypatch.setattr(tile_search, "candidates", few)
    monkeypatch.setattr(fastest, "host_us", lambda calls: float(next(turns)))
    found = dict(bench.best(3, time.monotonic() + 60))
    assert set(found) == {key_of(shape, 6) for shape in job.shapes}
    assert found[key_of(job.shapes[1], 6)].tile == asked[-1]
    assert all(each.us < each.ruled_us for each in found.values())


def test_products_in_four_bits_are_those_of_a_dense_layer(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", "llama", std=0.08, vocab_size=128, hidden_size=64, intermediate_size=96)
    write_packed(tmp_path / "packed", tmp_path / "plain", PACKINGS["gptq"])
    (job,) = packed_search.jobs_of(str(tmp_path / "packed"), 1, "int4")
    qkv, out, gate_up, down = job.products
    assert (qkv.kind, qkv.k, qkv.n) == ("qkv", 64, (job.heads + 2 * job.kv_heads) * job.dim)
    assert (out.kind, gate_up, down) == (
        "linear",
        ProductShape("gated", 0, 192, 64, 192),
        ProductShape("linear", 0, 64, 96, 64),
    )
    assert packed_search.jobs_of(str(tmp_path / "plain"), 1, "int4") == ()


def test_an_engine_takes_the_tiles_of_four_bits_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_table, "ASSETS", tmp_path)
    monkeypatch.setattr(gpus, "model", lambda device: "NVIDIA H200")
    tiles = {("int4 gated", 8, 192, 64): ProductTile(64, 256, 4, 3)}
    path, times = PACKED_TILES.in_package("NVIDIA H200"), dict.fromkeys(tiles, 1.5)
    PACKED_TILES.write(path, "NVIDIA H200", tiles, times)
    assert PACKED_TILES.read(path) == (tiles, times)
    assert PACKED_TILES.measured("cpu") == {}
    assert tiles.items() <= skinny.ProductLaunch.on("meta", pdl=True).tiles.items()


def test_a_search_in_four_bits_takes_the_tiles_by_which_a_layer_is_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock for which split products are slow, and those with fewer columns fast."""
    monkeypatch.setattr(packed_layers.PackedLayers, "result", lambda layers, call: torch.ones(1))
    monkeypatch.setattr(packed_search, "ROWS", (8,))
    monkeypatch.setattr(
        packed_search, "cuts", lambda shape: [ProductTile(32, 256, 2, 4), ProductTile(64, 256, 4, 4, 2)]
    )
    monkeypatch.setattr(packed_search, "finer", lambda shape, ranked: ranked[:1])
    monkeypatch.setattr(fastest, "host_us", _by_tiles)
    found = dict(packed_search.search((LAYER,), "cpu", time.monotonic() + 60))
    assert {key[0] for key in found} == {"int4 qkv", "int4 linear", "int4 gated"}
    assert {each.tile for each in found.values()} == {ProductTile(32, 256, 2, 4)}


LAYER = packed_layers.LayerJob(
    *(2, 1, 64),
    (
        ProductShape("qkv", 0, 256, 256, 64),
        ProductShape("linear", 0, 256, 128, 256),
        ProductShape("gated", 0, 512, 256, 512),
        ProductShape("linear", 0, 256, 256, 256),
    ),
)


def _by_tiles(calls: list[Any]) -> float:
    return sum(tile.columns * tile.split for tile in calls[0].args[1].tiles.values())


def test_a_layer_gives_the_same_rows_by_any_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_layers, "CONTEXT", 16)
    layers = packed_layers.PackedLayers(packed_layers.LayerWeights(LAYER, "cpu"), 8)
    tables = [
        {layers.key(shape): packed_search.ruled(shape, {layers.key(shape): tile}) for shape in layers.shapes}
        for tile in (ProductTile(64, 256, 4, 4), ProductTile(32, 256, 2, 2))
    ]
    first, second = (layers.result(layers.calls(tiles)[0]).clone() for tiles in tables)
    torch.testing.assert_close(first, second)


def test_cuts_in_four_bits_fit_as_they_are() -> None:
    for rows in packed_search.ROWS:
        shape = ProductShape("linear", rows, 4096, 4096, 4096)
        found = packed_search.cuts(shape)
        assert len(found) == len(set(found)) > 3
        more = packed_search.finer(shape, found)
        assert len(more) > 12 and {tile.columns for tile in more[:4]} == {found[0].columns}
        for tile in (*found, *more):
            assert packed_search.ruled(shape, {("int4 linear", rows, 4096, 4096): tile}) == tile


def test_without_a_gpu_there_is_nothing_to_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "model", lambda device: "")
    assert cli.main(["tune", "moe", "--model", str(tmp_path)]) == 2
    monkeypatch.setattr(gpus, "model", lambda device: "NVIDIA H200")
    write_family(tmp_path, "qwen3", vocab_size=128)
    with pytest.raises(ConfigError, match="has no products that `eyas tune gemm` is about"):
        tune.run(_args(tmp_path, "gemm"))


def _args(folder: Path, products: str) -> argparse.Namespace:
    return cli._parser().parse_args(["tune", products, "--model", str(folder)])
