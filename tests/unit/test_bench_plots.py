"""Figures are written with every name and unit on them, in styles that differ without colours."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from eyas.bench import plot_style
from eyas.bench.plots import plot_runs, plot_sweep
from eyas.bench.saved import SavedRun, from_figures
from eyas.common.errors import ConfigError


def a_run(name: str, requests: int = 30, **changes: Any) -> SavedRun:
    figures = {
        "duration": 4.0,
        "input_lens": [8] * requests,
        "output_lens": [5] * requests,
        "ttfts": np.linspace(0.01, 0.05, requests).tolist(),
        "itls": [[0.01] * 4] * requests,
        "errors": [""] * requests,
        "start_times": np.linspace(0, 3, requests).tolist(),
    }
    return from_figures(figures | changes, "here:1", name)


def a_line(rate: float) -> dict[str, Any]:
    times = {"median_ttft_ms": 20 * rate, "p99_ttft_ms": 40 * rate, "median_tpot_ms": 5.0, "p99_tpot_ms": 6.0}
    return {"request_rate": rate, "output_throughput": 100 * rate, "goodput": 0.9 * rate, **times}


def test_runs_are_drawn_with_names_and_units(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.svg"
    plot_runs([a_run("swift"), a_run("slow & steady", 3)], path, "the heading")
    text = path.read_text()
    assert text.count("swift") >= 5, "in every panel and in the legend"
    assert "slow &amp; steady (3 requests)" in text and "the heading" in text
    for words in ("Time to first token", "Time per output token", "End-to-end latency", ">ms per token<"):
        assert words in text
    assert "output tokens per second" in text and "steps of 0.1 s" in text


def test_runs_that_do_not_say_when_requests_began_have_no_panel_over_time(tmp_path: Path) -> None:
    figures = {key: value for key, value in a_run("x").figures.items() if key != "start_times"}
    plot_runs([from_figures(figures, "here:1", "x")], tmp_path / "runs.svg", "")
    assert "over time" not in (tmp_path / "runs.svg").read_text()


def test_runs_of_single_tokens_have_no_time_per_output_token(tmp_path: Path) -> None:
    run = a_run("x", 3, output_lens=[1, 1, 1], itls=[[], [], []])
    plot_runs([run], tmp_path / "runs.png", "")
    assert Image.open(tmp_path / "runs.png").size[0] > 1000


def test_tokens_over_time_add_up() -> None:
    rates = a_run("x").tokens_per_second(0.5)
    assert rates.sum() * 0.5 == pytest.approx(30 * 5)


def test_a_sweep_is_drawn_with_its_bounds(tmp_path: Path) -> None:
    servers = {
        "one": [a_line(2.0), a_line(1.0)],
        "two": [a_line(1.0), {**a_line(4.0), "median_ttft_ms": None}],
    }
    plot_sweep(servers, {"ttft": 200.0}, tmp_path / "sweep.svg", "rising load")
    text = (tmp_path / "sweep.svg").read_text()
    assert "SLO: 200 ms" in text and "rising load" in text and text.count(">two<") == 5
    assert "requests sent per second" in text and "Goodput" in text


def test_looks_differ_without_colours() -> None:
    assert len({look.marker for look in plot_style.LOOKS}) == len(plot_style.LOOKS)
    assert len({str(look.dashes) for look in plot_style.LOOKS}) == len(plot_style.LOOKS)


@pytest.mark.parametrize("name", ["plot.pdf", "plot", "plot.jsonl"])
def test_other_suffixes_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="does not end in .png or .svg"):
        plot_style.check_plot(Path(name))


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'eyas\[bench\]'"):
        plot_style.check_plot(Path("plot.png"))


def test_too_many_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="7 runs are too many"):
        plot_runs([a_run(str(i)) for i in range(7)], tmp_path / "runs.png", "")
