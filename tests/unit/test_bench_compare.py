"""Two files of runs: known effects are told, chance is not, and what cannot be compared is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.bench import compare
from eyas.bench.saved import SavedRun, from_figures, read_runs
from eyas.cli import main
from eyas.common.errors import ConfigError

REQUESTS = 200


def line(noise: int, slower: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A run of REQUESTS requests: the same lengths each time; `noise` is the seed of the rest."""
    lengths = np.random.default_rng(0).integers(2, 60, REQUESTS)
    rng = np.random.default_rng(noise)
    ttfts = 0.03 * slower * rng.lognormal(0, 0.3, REQUESTS)
    itls = [(0.006 * slower * rng.gamma(9, 1 / 9, tokens - 1)).tolist() for tokens in lengths]
    return {
        "dataset_name": "random",
        "request_rate": 16.0,
        "seed": 1,
        "duration": 14.0,
        "output_throughput": 500.0,
        "input_lens": [8] * REQUESTS,
        "output_lens": lengths.tolist(),
        "ttfts": ttfts.tolist(),
        "itls": itls,
        "errors": [""] * REQUESTS,
        "start_times": np.linspace(0, 12, REQUESTS).tolist(),
    } | changes


def saved(*args: Any, **changes: Any) -> SavedRun:
    return from_figures(line(*args, **changes), "here:1", "run")


def written(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(figures) + "\n" for figures in lines))
    return str(path)


def verdicts(first: list[SavedRun], second: list[SavedRun]) -> dict[str, str]:
    (comparison,) = compare.compare(first, second)
    return {ratio.name: compare.verdict(ratio) for ratio in comparison.ratios}


def test_a_line_gives_every_request_its_times() -> None:
    run = from_figures(
        {
            "input_lens": [1, 1, 1],
            "output_lens": [3, 1, 0],
            "ttfts": [0.5, 0.25, 0.0],
            "itls": [[0.1, 0.3], [], []],
            "errors": ["", "", "HTTP 500"],
        },
        "here:1",
        "run",
    )
    assert (run.requests, run.failed, run.starts_s) == (3, 1, None)
    np.testing.assert_allclose(run.ttfts_s, [0.5, 0.25, np.nan])
    np.testing.assert_allclose(run.tpots_s, [0.2, np.nan, np.nan])
    np.testing.assert_allclose(run.latencies_s, [0.9, 0.25, np.nan])


def test_a_known_effect_is_told() -> None:
    found = verdicts([saved(1)], [saved(2, 1.1)])
    sure = ("ttft mean", "tpot mean", "tpot median", "e2e mean")
    assert {found[name] for name in sure} == {"B is slower"}
    found = verdicts([saved(2, 1.1)], [saved(1)])
    assert {found[name] for name in sure} == {"B is faster"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESAMPLES", 800)


@pytest.mark.slow
def test_small_effects_are_mostly_found_and_chance_is_mostly_silent() -> None:
    """The power check: of 10 pairs of runs 5 % apart nearly all are told, of 10 equal ones nearly none."""
    told = [verdicts([saved(2 * i)], [saved(2 * i + 1, 1.05)])["tpot mean"] for i in range(10)]
    assert told.count("B is slower") >= 9
    equal = [verdicts([saved(1000 + 2 * i)], [saved(1001 + 2 * i)]) for i in range(10)]
    assert sum(any(word.startswith("B is") for word in found.values()) for found in equal) <= 1


def test_too_few_requests_have_ratios_and_no_verdict() -> None:
    found = verdicts([saved(1)], [saved(2, 2.0)])
    assert found["ttft p99"] == "too few requests to tell"
    assert found["ttft p90"] == "B is slower"


@pytest.mark.parametrize(("requests", "share"), [(100, 0.9), (1000, 0.99), (20, 0.5)])
def test_ten_requests_beyond_a_percentile_are_enough(requests: int, share: float) -> None:
    assert compare.enough(requests, share) and not compare.enough(requests - 10, share)


def test_an_interrupted_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="run: a run was interrupted"):
        compare.compare([saved(1)], [saved(2, complete=False)])


def test_runs_that_vary_hide_a_difference_that_one_run_each_would_show() -> None:
    """One run of each is 8 % apart; three of each show that runs of one server are further apart."""
    first = [saved(seed, slower) for seed, slower in ((1, 1.0), (2, 1.25), (3, 0.85))]
    second = [saved(seed, slower) for seed, slower in ((4, 1.08), (5, 0.9), (6, 1.2))]
    assert verdicts(first[:1], second[:1])["tpot mean"] == "B is slower"
    assert verdicts(first, second)["tpot mean"] == "no difference shown"


def test_the_same_files_give_the_same_intervals() -> None:
    def once() -> list[compare.RatioInterval]:
        return compare.compare([saved(1)], [saved(2)])[0].ratios

    assert once() == once()


def test_lines_meet_by_their_settings(tmp_path: Path) -> None:
    first = [saved(1), saved(2, request_rate=4.0)]
    second = [saved(3, request_rate=4.0), saved(4, request_rate=8.0)]
    (comparison,) = compare.compare(first, second)
    assert comparison.settings["request_rate"] == 4.0


def test_failed_requests_are_counted_and_left_out() -> None:
    errors = ["refused"] + [""] * (REQUESTS - 1)
    (comparison,) = compare.compare([saved(1, errors=errors)], [saved(2)])
    assert comparison.requests == REQUESTS - 1
    assert "A: a, 1 run, 1 failed requests" in compare.table(comparison, ("a", "b"))


def test_a_time_of_zero_has_no_ratio() -> None:
    zeros = [0.0] * REQUESTS
    (comparison,) = compare.compare([saved(1, ttfts=zeros)], [saved(2)])
    assert {compare.verdict(r) for r in comparison.ratios if r.name.startswith("ttft")} == {
        "too few requests to tell"
    }


@pytest.mark.slow
def test_the_command_prints_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = written(tmp_path / "a.jsonl", line(1)), written(tmp_path / "b.jsonl", line(2, 1.2))
    assert main(["bench", "compare", first, second, "--plot", str(tmp_path / "c.svg")]) == 0
    out = capsys.readouterr().out
    assert "tpot mean" in out and "B is slower" in out and "request_rate 16.0" in out
    assert "Time per output token" in (tmp_path / "c.svg").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no line"),
        ("{", "bad.jsonl:1: is not JSON"),
        ("[1]", "bad.jsonl:1: is not a JSON object"),
        ('{"ttfts": [0.1]}', r"bad.jsonl:1: has no details \(input_lens, output_lens, itls, errors\)"),
        (json.dumps(line(1, itls=[])), "bad.jsonl:1: itls and ttfts have different lengths"),
        (json.dumps(line(1, itls=[["x"]] * REQUESTS)), "itls holds something that is no list of numbers"),
        (json.dumps(line(1, errors=["no"] * REQUESTS)), "bad.jsonl:1: no request of this run succeeded"),
        (json.dumps(line(1, ttfts=["x"] * REQUESTS)), "ttfts holds something that is no number"),
    ],
)
def test_what_holds_no_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_runs(path)


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", str(tmp_path / "none.jsonl"), str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: cannot be read" in capsys.readouterr().err


def test_other_settings_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(tmp_path / "a.jsonl", line(1))
    second = written(tmp_path / "b.jsonl", line(1, request_rate=8.0, seed=2))
    assert main(["bench", "compare", first, second]) == 2
    assert "no run of the same settings: request_rate 16.0 and 8.0, seed 1 and 2" in capsys.readouterr().err
