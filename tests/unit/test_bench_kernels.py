"""Kernels beside their floors: floors by hand, every family on a tiny model, the fast kernels interpreted."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch

from eyas import cli
from eyas.bench import shapes
from eyas.bench.kernels import attention, command, products, sampling, timing, transfer
from eyas.bench.kernels.case import Call, KernelCalls, KernelCase, KernelSetting, cache_bytes
from eyas.bench.kernels.timing import MachineLimits
from eyas.bench.parts import Line
from eyas.common.config import EngineConfig, SpeculationConfig
from kv_transfer.host_files import LOCK

FLOORS = MachineLimits({"memory": 100e9, "host": 10e9}, flops=1e12)
TREE = SpeculationConfig(steps=2, topk=2, draft_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    shapes.write_model(shapes.SHAPES["tiny"], path)
    return path


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), draft=None, chunk_tokens=24, pool_dir=str(tmp_path))


@pytest.fixture
def setting(config: EngineConfig) -> KernelSetting:
    return dataclasses.replace(KernelSetting.of(config), cache=1 << 14)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "DECODE", ((1, 40), (3, 70)))
    monkeypatch.setattr(attention, "PREFILL", ((0, 24), (40, 24)))
    monkeypatch.setattr(products, "ROWS", (1, 9))
    monkeypatch.setattr(sampling, "ROWS", (1, 3))
    monkeypatch.setattr("eyas.bench.kernels.timing.HOST_S", 0.0)


def fast(setting: KernelSetting, **changes: object) -> KernelSetting:
    """On the kernels of a GPU, which Triton's interpreter runs here."""
    config = dataclasses.replace(setting.config, attention_backend="triton", **changes)  # type: ignore[arg-type]
    return dataclasses.replace(setting, config=config)


# --- floors --------------------------------------------------------------------------------------------


def test_a_floor_is_the_longer_of_bytes_and_operations() -> None:
    read = KernelCalls([], nbytes=1_000_000, flops=1_000_000)
    computed = KernelCalls([], nbytes=1_000_000, flops=50_000_000)
    copied = KernelCalls([], nbytes=1_000_000, road="host")
    assert (FLOORS.us(read), FLOORS.bound(read)) == (pytest.approx(10.0), "bytes")
    assert (FLOORS.us(computed), FLOORS.bound(computed)) == (pytest.approx(50.0), "flops")
    assert FLOORS.us(copied) == pytest.approx(100.0)


def test_floors_are_measured_here(setting: KernelSetting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SIDE_CPU", 64)
    found = MachineLimits.measure(setting)
    assert set(found.bandwidth) == {"memory", "host"}
    assert min(found.flops, *found.bandwidth.values()) > 0
    assert "GB/s" in str(found)


def test_what_attention_must_do_at_least(setting: KernelSetting) -> None:
    """tiny: 4 heads and 2 key heads of 16, in float32."""
    decode = attention.AttentionShape("", batch=3, below=70, width=1)
    keys, rows = 2 * 71 * 2 * 16, 2 * 1 * 4 * 16
    assert attention.least(setting, decode) == (3 * 4 * (keys + rows), 3 * 4 * 4 * 16 * 71)
    chain = attention.AttentionShape("", batch=1, below=10, width=3)
    assert attention.least(setting, chain)[1] == 4 * 4 * 16 * (11 + 12 + 13)
    layer = setting.model.layers[0]
    narrow = dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=8))
    windowed = dataclasses.replace(setting, model=dataclasses.replace(setting.model, layers=(narrow,) * 8))
    assert attention.least(windowed, decode) == (3 * 4 * (2 * 8 * 2 * 16 + rows), 3 * 4 * 4 * 16 * 8)


def test_the_products_are_the_models_own(setting: KernelSetting) -> None:
    found = {p.name: (p.n, p.k) for p in products.products_of(setting)}
    assert found == {
        "qkv": (128, 64),
        "o": (64, 64),
        "gate_up": (256, 64),
        "down": (64, 128),
        "lm_head": (2048, 64),
    }
    gate_up = next(p for p in products.products_of(setting) if p.kind == "gated")
    assert gate_up.nbytes(3, 2) == 2 * (256 * 64 + 3 * 64 + 3 * 128)
    assert gate_up.flops(3) == 2 * 3 * 256 * 64


def test_every_call_has_memory_that_no_cache_holds(setting: KernelSetting) -> None:
    assert setting.calls(1 << 14) == 4
    assert setting.calls(1 << 12) == 16
    assert setting.calls(1) == 256
    assert not setting.cached(KernelCalls([int] * 16, 1 << 12))
    assert setting.cached(KernelCalls([int] * 256, 1))
    assert cache_bytes("cpu") >= 1 << 20
    rows = attention.PoolRows(setting, attention.AttentionShape("", 3, 70, 1))
    used = rows.pages.flatten().tolist()
    assert len(set(used)) == len(used)
    assert len(rows.calls(lambda chosen, layer: None)) == rows.sets * rows.layers


# --- families ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", command.FAMILIES)
def test_a_family_runs_on_a_cpu(family: str, setting: KernelSetting, tmp_path: Path) -> None:
    names = []
    for case in importlib.import_module(f"eyas.bench.kernels.{family}").cases(setting):
        line = command.figures(case, setting, FLOORS)
        assert "error" not in line, (case.name, line)
        assert line["us"] > 0 and line["share"] == pytest.approx(line["floor_us"] / line["us"])
        names.append(case.name)
    assert len(set(names)) == len(names) > 1
    left = [path for path in tmp_path.iterdir() if path.suffix != LOCK]  # which this process has till its end
    assert left == [], "files of shared memory are gone"


def test_a_case_that_cannot_be_made_is_an_error_line(setting: KernelSetting) -> None:
    def too_large() -> KernelCalls:
        raise RuntimeError("out of memory\ndetails")

    case = KernelCase("large", too_large)
    assert command.figures(case, setting, FLOORS) == {"error": "RuntimeError: out of memory"}


def test_copies_are_of_all_pages_and_come_as_they_were(setting: KernelSetting) -> None:
    shape = transfer._pages(setting)
    jobs = transfer._jobs(shape.pages, scattered=True)
    assert sorted(page for job in jobs for page in job) == list(range(shape.pages))
    assert transfer._jobs(shape.pages, scattered=False)[0] == tuple(range(shape.pages // 4))
    work = transfer._shm(setting, scattered=True)
    try:
        assert work.nbytes == 2 * shape.nbytes // 4
    finally:
        work.close()


# --- the fast kernels, interpreted -----------------------------------------------------------------------


def same(ours: Call, plain: Call) -> None:
    got, expected = ours(), plain()
    assert isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", [SpeculationConfig(steps=2, draft_tokens=3), TREE], ids=["chain", "tree"])
def test_rounds_and_chunks_attend_as_the_specification_does(
    setting: KernelSetting, spec: SpeculationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = fast(setting, speculation=spec)
    monkeypatch.setattr(KernelSetting, "calls", lambda *_: 2)
    shape = attention.AttentionShape("round", 2, 40, spec.width, tree=spec.topk > 1)
    rows = attention.PoolRows(setting, shape)
    fast_calls, plain_calls = (
        attention._attend_calls(setting, shape, rows),
        attention._torch_calls(setting, shape, rows),
    )
    for ours, plain in zip(fast_calls, plain_calls, strict=True):
        same(ours, plain)


def test_a_chunk_attends_as_the_specification_does(
    setting: KernelSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelSetting, "calls", lambda *_: 1)
    shape = attention.AttentionShape("chunk", 1, 20, 90)  # two tiles of 64 rows
    torch.manual_seed(0)
    (plain,) = attention._chunk(setting, shape).calls
    torch.manual_seed(0)
    (ours,) = attention._chunk(fast(setting), shape).calls
    same(ours, plain)


def test_sampling_gives_the_specifications_tokens(setting: KernelSetting) -> None:
    logits = [4 * torch.randn(2, 512, generator=torch.Generator().manual_seed(5))]
    for params in sampling.WAYS.values():
        (call,) = sampling._choose(fast(setting), params, logits)
        call()
        (plain,) = sampling._sample(params, logits)
        assert call.args[3].tolist() == plain().tokens  # type: ignore[attr-defined]


@pytest.mark.slow
def test_skinny_products_run(setting: KernelSetting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSetting, "calls", lambda *_: 1)
    for product in products.products_of(setting):
        (call,) = products._work(fast(setting), product, 3).calls
        call()


# --- the command ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_writes_a_line_per_case(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    flags = ["--model", str(folder), "--output-file", str(out)]
    assert cli.main(["bench", "kernels", "transfer", *flags]) == 0
    lines: list[Line] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kernel"] for line in lines] == ["shm, pages in a row", "shm, scattered pages"]
    assert {line["family"] for line in lines} == {"transfer"}
    told = capfd.readouterr().out
    assert "of floor" in told and "passes: memory" in told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["moe"], "'moe' is no family of kernels; there are attention, products, sampling, transfer"),
        (["--device", "cuda"], "--device: cuda is not available"),
    ],
)
def test_bad_flags_end_it(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", *flags]) == 2
    assert told in capsys.readouterr().err


def test_a_folder_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", "--model", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
