"""Static batches without a server: the figures by hand, the embedded model in this process, bad flags."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from eyas import cli
from eyas.bench import fits, one_batch, shapes
from eyas.bench.one_batch import BatchPlan, BatchTrace, StaticBatch, figures
from eyas.bench.parts import Line
from eyas.common.config import GPU_DEFAULTS, EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.types import FinishCause, TokenEntry
from eyas.engine.checkpoint.sizes import parameters
from eyas.engine.models.table import read_model
from tests.unit.unwarmed import unwarmed

# The names that SGLang's bench_one_batch writes.
FIELDS = {
    *("run_name", "batch_size", "input_len", "output_len"),
    *("prefill_latency", "prefill_throughput", "median_decode_latency", "median_decode_throughput"),
    *("total_latency", "overall_throughput"),
}


def entry(i: int, index: int, count: int = 1, end: bool = False) -> TokenEntry:
    finish = FinishCause("length") if end else None
    return TokenEntry(str(i), 1, 0, index, tuple(range(count)), finish=finish)


def test_figures_by_hand() -> None:
    """Two requests, whose prompts end at 0.5 s and 1.0 s; three steps have both; the last one ends them."""
    trace = BatchTrace(2, began=10.0)
    trace.add(10.5, (entry(0, 0),))
    trace.add(11.0, (entry(0, 1), entry(1, 0)))
    trace.add(11.2, (entry(0, 2, 3), entry(1, 1, 1)))
    trace.add(11.3, (entry(0, 5, 2), entry(1, 2, 2)))
    trace.add(11.9, (entry(0, 7, 1, end=True), entry(1, 4, 4, end=True)))
    assert trace.over
    assert trace.rounds() == [(pytest.approx(0.2), 2.0), (pytest.approx(0.1), 2.0)]
    found = figures(StaticBatch(2, 100, 8), [trace])
    assert found == {
        "batch_size": 2,
        "input_len": 100,
        "output_len": 8,
        "prefill_latency": pytest.approx(1.0),
        "prefill_throughput": pytest.approx(200.0),
        "median_decode_latency": pytest.approx(0.15),
        "p90_decode_latency": pytest.approx(0.2),
        "median_decode_throughput": pytest.approx(2 * 2.0 / 0.15),
        "accept_length": 2.0,
        "decode_steps": 2,
        "total_latency": pytest.approx(1.9),
        "overall_throughput": pytest.approx(216 / 1.9),
        "runs": 1,
    }


def test_answers_of_one_token_have_no_decode_step() -> None:
    trace = BatchTrace(1, began=0.0)
    trace.add(0.5, (entry(0, 0, end=True),))
    found = figures(StaticBatch(1, 10, 1), [trace])
    assert "median_decode_latency" not in found
    assert found["overall_throughput"] == pytest.approx(22.0)


def measured(config: EngineConfig, *batches: StaticBatch) -> list[Line]:
    lines: list[Line] = []
    with unwarmed():
        one_batch.measure(config, BatchPlan(batches, "test"), "eager", lines.append)
    return lines


def test_the_embedded_model_runs_and_a_failed_batch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.bench.one_batch.RUNS", 2)
    plain = EngineConfig(draft=None, worker="one-batch")
    lines = measured(plain, StaticBatch(2, 20, 6), StaticBatch(1, 4000, 4), StaticBatch(1, 20, 1))
    assert FIELDS <= set(lines[0])
    assert (lines[0]["batch_size"], lines[0]["accept_length"], lines[0]["draft"]) == (2, 1.0, None)
    assert lines[0]["decode_steps"] == 4  # of one run: 5 tokens after the first, the last one ends both
    assert lines[0]["total_latency"] > lines[0]["prefill_latency"] > 0
    assert lines[1]["batch"] == "batch of 1 x 4000 + 4"
    assert "context" in lines[1]["error"]
    assert lines[2]["output_len"] == 1


def test_drafts_have_an_acceptance_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.bench.one_batch.RUNS", 1)
    (line,) = measured(EngineConfig(worker="one-batch"), StaticBatch(1, 20, 24))
    assert line["accept_length"] >= 1.0
    assert (line["draft"], line["spec_steps"], line["synthetic"]) == ("nano-eagle3", 5, False)


def test_a_batch_that_the_pages_do_not_hold_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.bench.one_batch.RUNS", 1)
    config = EngineConfig(draft=None, worker="one-batch", num_pages=10)
    (line,) = measured(config, StaticBatch(4, 64, 8))
    assert "never decoded all at once" in line["error"]
    assert "--num-pages" in line["error"]


@pytest.mark.slow
def test_a_profile_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.bench.one_batch.RUNS", 1)
    trace = tmp_path / "trace.json"
    plan = BatchPlan((StaticBatch(1, 8, 3),), "test", trace)
    one_batch.measure(EngineConfig(draft=None, worker="one-batch"), plan, "eager", lambda _: None)
    assert any(
        event.get("name", "").startswith("aten::") for event in json.loads(trace.read_text())["traceEvents"]
    )


@pytest.mark.slow
def test_the_command_writes_a_line_per_batch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    flags = ["--batch-size", "1", "2", "--input-len", "8", "--output-len", "4", "--draft", "none"]
    assert cli.main(["bench", "one-batch", *flags, "--run-name", "here", "--output-file", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["batch_size"], line["run_name"], line["mode"]) for line in lines] == [
        (1, "here", "eager"),
        (2, "here", "eager"),
    ]
    assert "prefill ms" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--device", "cuda"], "--device: cuda is not available"),
        (["--batch-size", "8", "--max-running", "4"], "--max-running: 4 sequences per step are fewer"),
        (["--batch-size", "0"], "'0' is not a positive number"),
        (["--output-file", "/nowhere/out.jsonl"], "--output-file: /nowhere/out.jsonl cannot be written"),
        (["--profile", "/nowhere/trace.json"], "--profile: /nowhere/trace.json cannot be written"),
        (["--cuda-graph-max-bs", "8"], "--cuda-graph-max-bs: 8 needs a GPU"),
    ],
)
def test_bad_flags_end_it(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["bench", "one-batch", *flags])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert told in capsys.readouterr().err


def test_a_gpu_runs_both_ways_and_a_cpu_one() -> None:
    assert [mode for mode, _ in one_batch.modes_of(EngineConfig())] == ["eager"]
    modes = dict(one_batch.modes_of(GPU_DEFAULTS))
    assert (modes["eager"].cuda_graph_max_bs, modes["graphs"]) == (0, GPU_DEFAULTS)
    assert list(modes) == ["eager", "graphs"]
    assert len(dict(one_batch.modes_of(dataclasses.replace(GPU_DEFAULTS, cuda_graph_max_bs=0)))) == 1


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    shapes.write_model(shapes.SHAPES["tiny"], tmp_path)
    config = EngineConfig(model=str(tmp_path), load_format="dummy")
    layer = 64 * (4 + 2 + 2 + 4) * 16 + 3 * 64 * 128
    assert parameters(read_model(tmp_path, "dummy")).total == 8 * layer + 2 * 2048 * 64
    needed = 4 * (8 * layer + 2 * 2048 * 64)
    fits.check_memory(config, free=needed)
    with pytest.raises(ConfigError, match=r"takes 0\.0 GiB of float32 weights, and 0\.0 GiB of cpu memory"):
        fits.check_memory(config, free=needed - 1)
