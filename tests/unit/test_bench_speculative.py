"""`eyas bench speculative`: the grid, what is timed, and a short run on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from eyas import cli
from eyas.bench import answering, speculative
from eyas.bench.answering import BatchSteps
from eyas.bench.parts import ChildPart, Tell
from eyas.bench.plots import plot_speculative
from eyas.bench.speculative import DraftSetting, best, settings, with_speedup
from eyas.common.config import SpeculationConfig
from eyas.common.errors import ConfigError, EyasError
from eyas.common.types import FinishCause, TokenEntry
from tests.unit.unwarmed import unwarmed


def parsed(*flags: str) -> Any:
    return cli._parser().parse_args(["bench", "speculative", *flags])


def line(setting: str, size: int, rate: float) -> dict[str, Any]:
    return {"setting": setting, "flags": "", "batch_size": size, "output_throughput": rate}


def entry(index: int, tokens: int, end: bool = False) -> TokenEntry:
    return TokenEntry("a", 1, 0, index, (5,) * tokens, finish=FinishCause("stop") if end else None)


def test_the_grid_has_every_shape_that_there_can_be() -> None:
    found = settings(parsed("--steps", "2", "4", "--topk", "1", "2", "--draft-tokens", "4", "8", "99"))
    assert [setting.spec for setting in found] == [
        None,
        SpeculationConfig(2, 1, 3),
        SpeculationConfig(2, 2, 4),  # a tree of 2 levels with 2 children each has 7 nodes
        SpeculationConfig(4, 1, 5),
        SpeculationConfig(4, 2, 8),  # 4 nodes would be a chain without its last draft
    ]
    assert [setting.flags for setting in found[:3]] == [
        "--draft none",
        "--spec-steps 2 --spec-topk 1",
        "--spec-steps 2 --spec-topk 2 --spec-draft-tokens 4",
    ]
    with pytest.raises(ConfigError, match="no tree of --steps and --topk has as many"):
        settings(parsed("--steps", "2", "--topk", "4", "--draft-tokens", "99"))


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-token-map", "ids.txt"),
        ("--spec-ngram",),
        ("--rejection-sample-method", "synthetic", "--synthetic-acceptance-length", "2", "--device", "cuda"),
    ],
)
def test_flags_of_a_head_leave_the_model_without_drafts_as_it_is(flags: tuple[str, ...]) -> None:
    args = parsed("--steps", "2", "--topk", "1", *flags)
    plain, drafted = (speculative._config(args, setting) for setting in settings(args))
    assert not plain.speculates and plain.speculation == SpeculationConfig()
    asked = drafted.speculation
    assert drafted.speculative_token_map or asked.ngram or asked.synthetic_rates


def test_the_best_of_each_batch() -> None:
    lines: list[dict[str, Any]] = []
    for setting, size, rate in (
        ("no drafts", 1, 10.0),
        ("no drafts", 8, 60.0),
        ("a", 1, 25.0),
        ("a", 8, 50.0),
    ):
        lines.append(with_speedup(line(setting, size, rate), lines))
    assert [one["speedup"] for one in lines] == [1.0, 1.0, 2.5, pytest.approx(50 / 60)]
    assert [(one["batch_size"], one["setting"]) for one in best(lines)] == [(1, "a"), (8, "no drafts")]


def test_steps_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step starts the clock; last ones of answers count as tokens, not as rounds."""
    now = iter([10.0, 10.5, 11.5, 12.0])
    monkeypatch.setattr(answering.time, "perf_counter", lambda: next(now))
    steps = BatchSteps(2)
    steps.add((entry(3, 4), entry(0, 1)))
    steps.add((entry(7, 3), entry(1, 2)))
    steps.add((entry(10, 1, end=True), entry(3, 4)))
    steps.add((entry(0, 1), entry(7, 1)))
    found = steps.figures()
    assert found["output_throughput"] == pytest.approx((5 + 5 + 2) / 2.0)
    assert found["median_step_ms"] == pytest.approx(500.0)
    assert found["accept_length"] == pytest.approx((3 + 2 + 4 + 1) / 4)
    with pytest.raises(EyasError, match="a batch of 2 was never full"):
        BatchSteps(2).figures()


def run_here(parts: Iterable[ChildPart], tell: Tell) -> int:
    for part in parts:
        part.work(tell)
    return 0


@pytest.mark.slow
def test_a_short_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded model and its head; the engines live in this process."""
    monkeypatch.setattr("eyas.bench.parts.run_parts", run_here)
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.svg"
    flags = [
        "--batch-size",
        "1",
        "2",
        "--steps",
        "3",
        "--topk",
        "1",
        "--num-prompts",
        "2",
        "--max-answer",
        "12",
    ]
    files = ["--output-file", str(out), "--plot", str(plot)]
    with unwarmed():
        assert cli.main(["bench", "speculative", *flags, *files, "--num-pages", "128"]) == 0
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    found = [(one["setting"], one["batch_size"]) for one in lines]
    assert found == [("no drafts", 1), ("no drafts", 2), ("chain of 3", 1), ("chain of 3", 2)]
    assert [one["accept_length"] for one in lines[:2]] == [1.0, 1.0]
    assert all(1.5 < one["accept_length"] <= 4.0 for one in lines[2:])
    assert all(one["speedup"] > 0 for one in lines)
    said = capsys.readouterr().out
    assert "batch 1: --" in said and "batch 2: --" in said and "x plain)" in said
    assert "Against no drafts" in plot.read_text() and "chain of 3" in plot.read_text()


def test_a_plot_shows_the_largest_gains(tmp_path: Path) -> None:
    lines = []
    for i in range(8):
        name = "no drafts" if not i else f"setting {i}"
        lines.append({**line(name, 1, 10.0), "speedup": 1.0 + i / 10, "accept_length": 2.0})
    plot_speculative(lines, tmp_path / "plot.svg", "all")
    text = (tmp_path / "plot.svg").read_text()
    assert "no drafts" in text and "setting 7" in text and "setting 3" in text
    assert "setting 2" not in text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--spec-steps", "3"], "--spec-steps: a grid has many: give --steps"),
        (["--num-prompts", "4"], "--num-prompts: 4 cannot fill a batch of 32"),
        (["--draft", "none"], "--draft: a draft head is needed"),
        (["--prompts", "/nowhere"], "--prompts: /nowhere cannot be read"),
        (["--plot", "a.gif"], "--plot: a.gif does not end in .png or .svg"),
        (["--device", "cuda"], "--device: cuda is not available"),
    ],
)
def test_bad_flags_end_it(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "speculative", *flags]) == 2
    assert told in capsys.readouterr().err


def test_a_setting_is_named() -> None:
    assert DraftSetting(SpeculationConfig(4, 2, 8)).name == "tree 4 x 2, 8 nodes"
    assert DraftSetting(None).name == speculative.PLAIN
