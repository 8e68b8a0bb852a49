"""`eyas plan`: answers for loads that it knows, one line for what cannot be, and a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.cli import main
from eyas.common.errors import ConfigError
from eyas.planning import command
from eyas.planning.command import demand, line, verdict
from eyas.planning.search import LayoutOption, PlanRequest, layouts, likely_splits, needed, parse_targets
from eyas.simulator.cluster import ClusterLayout
from eyas.simulator.goodput import GoodputKnee, SearchEffort
from eyas.simulator.hardware import EXAMPLE, example, parse_hardware
from eyas.simulator.workload import RandomTraffic
from gateway.routing.placement import LatencyTargets

QUICK = ("--seconds", "5")


def inquiry(targets: LatencyTargets, traffic: RandomTraffic | None = None) -> PlanRequest:
    return PlanRequest(
        example(), traffic or RandomTraffic(8192, 256), targets, SearchEffort(seconds=5.0, fewest=120)
    )


def fields(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EXAMPLE.read_text())
    return found | changes


@pytest.mark.slow
def test_the_table_says_that_splitting_wins_where_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--gpus", "2", "--input-len", "8192", "--output-len", "256", "--slo", "ttft=1s,tpot=8ms")
    assert main(["plan", *args, *QUICK]) == 0
    out = capsys.readouterr().out
    rows = {row.split()[0]: row.split() for row in out.splitlines() if row.startswith(("uni", "spl", "auto"))}
    assert rows["split"][1] == "1+1" and "Splitting wins" in out and "docs/experiments.md" in out
    assert float(rows["auto"][2]) >= 0.95 * float(rows["split"][2]) > 1.2 * float(rows["unified"][2])


def test_one_worker_has_one_answer() -> None:
    answers = layouts(inquiry(LatencyTargets(1.0, 0.02), RandomTraffic(512, 128)), 1)
    assert [answer.layout for answer in answers] == [ClusterLayout.UNIFIED] and answers[0].knee.rate > 1
    assert verdict(answers) == "One worker has nothing to split."


@pytest.mark.parametrize(
    ("unified", "split", "says"),
    [
        (4.0, 2.0, "Splitting loses: it bears 50% less."),
        (4.0, 5.0, "Splitting wins: it bears 25% more."),
        (4.0, 4.04, "Splitting changes nothing here."),
        (4.0, 0.0, "Splitting loses: it does not keep the targets at any rate."),
        (0.0, 4.0, "Only splitting keeps the targets."),
        (0.0, 0.0, "Neither layout keeps the targets: loosen them, or shorten the prompts."),
    ],
)
def test_the_verdict_follows_the_figures(unified: float, split: float, says: str) -> None:
    rates = {ClusterLayout.UNIFIED: unified, ClusterLayout.SPLIT: split}
    answers = [LayoutOption(layout, 2, 0, GoodputKnee(rate, None)) for layout, rate in rates.items()]
    assert verdict(answers) == says
    assert "not even at a low rate" in line(answers[0])


def test_a_rate_needs_as_many_workers_as_bear_it_and_no_fewer() -> None:
    asked = inquiry(LatencyTargets(1.0, 0.008))
    found = {layout: needed(asked, layout, 6.0) for layout in (ClusterLayout.UNIFIED, ClusterLayout.SPLIT)}
    unified, split = found[ClusterLayout.UNIFIED], found[ClusterLayout.SPLIT]
    assert unified is not None and split is not None and split[0] < unified[0]
    assert 0 < split[1] < split[0] and split[1] in likely_splits(asked, split[0])
    assert demand(asked, ClusterLayout.SPLIT, 6.0) == (
        f"{split[0]} workers ({split[1]} for prompts, {split[0] - split[1]} to decode)"
    )
    assert needed(asked, ClusterLayout.UNIFIED, 1e6) is None


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["--slo", "ttft=1s,tpot=3ms"],
            "no number of workers meets tpot=3ms: one sequence alone takes 4.17 ms",
        ),
        (["--slo", "ttft=10ms,tpot=20ms"], "no number of workers meets ttft=10ms: a prompt of 1024"),
        (["--slo", "ttft=1s"], "--slo: tpot is missing"),
        (["--slo", "ttft=1s,tpot=8ms,e2e=1s"], "not e2e"),
        (["--slo", "fast"], "--slo: 'fast' is not like ttft=200ms"),
        (["--input-len", "900000"], "--input-len: 900000 tokens and an answer of 512 do not fit"),
        (["--rates", "/nowhere.json"], "--rates: /nowhere.json"),
        (["--plot", "plan.gif"], "--plot: plan.gif does not end in"),
    ],
)
def test_what_cannot_be_is_one_line(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *args]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    "args",
    [
        ["--gpus", "0"],
        ["--prefix-share", "1"],
        ["--request-rate", "-1"],
        ["--range-ratio", "2"],
        ["--sloo", "x"],
    ],
)
def test_wrong_flags_are_named(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *args])
    assert ended.value.code == 2 and args[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows_ms": [[1, 2.0]]}, "rows_ms is not a list of two points"),
        ({"rows_ms": [[2, 2.0], [1, 3.0]]}, "the points of rows_ms do not rise"),
        ({"context_ms": [[0, 2.0], [9, 1.0]]}, "context_ms falls at its end"),
        ({"rows_ms": [[1, "x"], [2, 3.0]]}, "rows_ms is 'x', not a number"),
        ({"pairs_ms": -1}, "pairs_ms is -1, not a number from 0"),
        ({"link_gb_per_s": 0}, "link_gb_per_s is 0"),
        ({"pool_tokens": 1.5}, "pool_tokens is 1.5, not a positive whole number"),
        ({"mixed_tokens": 9000}, "mixed_tokens is more than chunk_tokens"),
        ({"speed": 1}, "speed is no field"),
    ],
)
def test_a_bad_table_is_refused_by_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match="--rates") as refused:
        parse_hardware(fields(**changes))
    assert says in refused.value.message


def test_a_missing_field_is_named() -> None:
    left = {name: value for name, value in fields().items() if name != "pairs_ms"}
    with pytest.raises(ConfigError, match="pairs_ms is missing"):
        parse_hardware(left)


def test_a_faster_machine_needs_a_table_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = [[x, y / 2] for x, y in fields()["rows_ms"]]
    table = tmp_path / "rates.json"
    table.write_text(json.dumps(fields(name="twice as fast", rows_ms=quick)))
    args = ["plan", "--gpus", "1", "--slo", "ttft=1s,tpot=3ms", "--rates", str(table), *QUICK]
    assert main(args) == 0 and "twice as fast" in capsys.readouterr().out


def test_targets_are_seconds() -> None:
    assert parse_targets("tpot=8ms,ttft=1.5s") == LatencyTargets(1.5, 0.008)


def test_the_figure_has_a_panel_per_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def layouts_by_bound(asked: PlanRequest, workers: int) -> list[LayoutOption]:
        return [
            LayoutOption(layout, workers, 0, GoodputKnee(1e3 * asked.targets.tpot_s, None))
            for layout in ClusterLayout
        ]

    monkeypatch.setattr(command, "layouts", layouts_by_bound)
    asked = inquiry(LatencyTargets(1.0, 0.010), RandomTraffic(512, 64))
    known = {workers: layouts_by_bound(asked, workers) for workers in (2, 3)}
    curves = command.sweep(asked, 2, known[2])
    bounds, rates = zip(*curves[ClusterLayout.AUTO], strict=True)
    assert bounds == pytest.approx((5.0, 7.0, 10.0, 14.0)) and rates == pytest.approx((2.5, 3.5, 5.0, 7.0))
    path = tmp_path / "plan.svg"
    command.plot_plan(asked, known, path)
    text = path.read_text()
    assert all(words in text for words in ("2 GPUs", "3 GPUs", "unified", "split", "auto", "512 tokens in"))
