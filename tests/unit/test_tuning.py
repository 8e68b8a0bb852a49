"""`eyas tune`: products are those of a model, tiles that are found are kept, and an engine reads them."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pytest

from eyas import cli
from eyas.bench import fastest, packed_search, tile_search, tune
from eyas.bench.tile_search import TuningBench, TuningJob, candidates, gated_pair, jobs_of
from eyas.common.errors import ConfigError
from eyas.common.machine import gpus
from eyas.engine.kernels.experts import grouped_tiles
from eyas.engine.kernels.experts.grouped_tiles import (
    GroupedShape,
    GroupedTile,
    key_of,
    read_table,
    read_times,
    write_table,
)
from eyas.engine.kernels.products import packed_table, skinny
from eyas.engine.kernels.products.skinny_tiles import ProductShape, ProductTile
from tests.gpu.answer_latent import write_rank
from tests.unit.families import write_family
from tests.unit.packed_formats import PACKINGS, write_packed

R8 = gated_pair(256, 256, 7168, 1)


def test_tables_come_back_as_they_were_written(tmp_path: Path) -> None:
    tiles = {key_of(R8[0], choices): GroupedTile(16, 64, 128, 4, choices // 4) for choices in (8, 64)}
    times = dict(zip(tiles, (1.5, 2.5), strict=True))
    write_table(tmp_path / "new" / "table.json", "NVIDIA H200", tiles, times)
    assert read_table(tmp_path / "new" / "table.json") == tiles
    assert read_times(tmp_path / "new" / "table.json") == times


def test_an_engine_reads_the_table_of_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a start's recipe, whose device is none, that of the first one."""
    monkeypatch.setattr(grouped_tiles, "ASSETS", tmp_path)
    tiles = {key_of(R8[0], 8): GroupedTile(16, 32, 128, 4, 3)}
    write_table(grouped_tiles.table_of("NVIDIA H200"), "NVIDIA H200", tiles, dict.fromkeys(tiles, 1.0))
    monkeypatch.setattr(gpus, "model", lambda device: "NVIDIA H200" if device != "cuda:1" else "NVIDIA L4")
    for device, found in (("cuda", tiles), ("meta", tiles), ("cuda:1", {}), ("cpu", {})):
        assert grouped_tiles.measured(device) == found
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


def test_products_in_four_bits_are_a_dense_models(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", "llama", std=0.08, vocab_size=128, hidden_size=64, intermediate_size=96)
    write_packed(tmp_path / "packed", tmp_path / "plain", PACKINGS["gptq"])
    qkv, out, gate_up, down = packed_search.jobs_of(str(tmp_path / "packed"), 1, "int4")
    assert (qkv.kind, qkv.k, qkv.n) == ("qkv", 64, qkv.span * (qkv.n // qkv.span))
    assert (out.kind, gate_up, down) == (
        "linear",
        ProductShape("gated", 0, 192, 64, 192),
        ProductShape("linear", 0, 64, 96, 64),
    )
    assert packed_search.jobs_of(str(tmp_path / "plain"), 1, "int4") == ()


def test_an_engine_takes_the_tiles_of_four_bits_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_table, "ASSETS", tmp_path)
    monkeypatch.setattr(gpus, "model", lambda device: "NVIDIA H200")
    tiles = {("int4 gated", 8, 192, 64): ProductTile(64, 256, 4, 3)}
    packed_table.write_table(
        packed_table.table_of("NVIDIA H200"), "NVIDIA H200", tiles, {**dict.fromkeys(tiles, 1.5)}
    )
    assert packed_table.read_times(packed_table.table_of("NVIDIA H200")) == dict.fromkeys(tiles, 1.5)
    assert packed_table.measured("cpu") == {}
    assert tiles.items() <= skinny.ProductLaunch.on("meta", pdl=True).tiles.items()


def test_a_search_in_four_bits_finds_a_tile_that_gives_the_rules_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = packed_search.PackedBench(ProductShape("gated", 0, 128, 256, 128), "cpu")
    other, wrong = ProductTile(128, 256, 4, 3), ProductTile(48, 256, 4, 3)
    monkeypatch.setattr(packed_search, "candidates", lambda shape: [ProductTile(64, 256, 4, 3), other, wrong])
    turns = iter((3.0, 2.0, 1.0))
    monkeypatch.setattr(fastest, "host_us", lambda calls: next(turns))
    assert bench.best(8, time.monotonic() + 60) == fastest.FastestTile(other, 2.0, 3.0)


def test_candidates_in_four_bits_fit() -> None:
    for rows in packed_search.ROWS:
        found = packed_search.candidates(ProductShape("linear", rows, 4096, 4096, 4096))
        assert len(found) == len(set(found)) > 8


def test_without_a_gpu_there_is_nothing_to_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "model", lambda device: "")
    assert cli.main(["tune", "moe", "--model", str(tmp_path)]) == 2
    monkeypatch.setattr(gpus, "model", lambda device: "NVIDIA H200")
    write_family(tmp_path, "qwen3", vocab_size=128)
    with pytest.raises(ConfigError, match="has no products that `eyas tune gemm` is about"):
        tune.run(_args(tmp_path, "gemm"))


def _args(folder: Path, products: str) -> argparse.Namespace:
    return cli._parser().parse_args(["tune", products, "--model", str(folder)])
