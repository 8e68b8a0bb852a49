"""The suite measures every case with the drafts that it should, and its report can be made again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from eyas.bench import suite
from eyas.bench.cases import ON_CPU, ON_GPU, cases_of, command_line, gpus, setups
from eyas.bench.measure import ServerFacts
from eyas.bench.plan import LoadPlan
from eyas.bench.records import RequestRecord, RunRecord
from eyas.cli import main
from eyas.commands import CommandParser
from eyas.common.config import NANO

URL = "http://127.0.0.1:1"


class Scripted:
    """In the place of Measurement: drafts halve the time per token; `bs1` fails where `failing` says so."""

    plans: list[LoadPlan] = []
    failing = ""

    def __init__(self, plan: LoadPlan, server: Any, facts: ServerFacts) -> None:
        self._plan = plan
        self.plans.append(plan)

    async def run(self, on_record: Any) -> RunRecord:
        drafts = "speculative" not in self._plan.extra
        gaps = [0.01 if drafts else 0.02] * 4
        records = [
            RequestRecord(
                8, 5, i / 9, ttft_s=0.1, latency_s=0.1 + sum(gaps), itls_s=gaps, accepted=3 * drafts
            )
            for i in range(len(self._plan.jobs))
        ]
        if self.failing == "all":
            records = [RequestRecord(error="refused") for _ in records]
        elif self.failing == "one":
            records[0].error = "refused"
        return RunRecord(self._plan.settings(), 2.0, records, accept_length=2.5 if drafts else None)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    async def facts(server: Any) -> ServerFacts:
        return ServerFacts("m", 100, tells_timings=True)

    monkeypatch.setattr(suite, "LoadMeasurement", Scripted)
    monkeypatch.setattr(suite, "look", facts)
    monkeypatch.setattr(Scripted, "plans", [])
    return Scripted


def parsed(*words: str) -> argparse.Namespace:
    parser = CommandParser(prog="eyas bench suite")
    parser.set_defaults(parser=parser)
    suite.add_flags(parser)
    return parser.parse_args(words)


def test_cases_run_with_drafts_and_without_on_other_prompts(server: type[Scripted]) -> None:
    assert main(["bench", "suite", "bs8", "--url", URL, "--both"]) == 0
    with_drafts, without = server.plans[-2:]
    assert (with_drafts.extra, without.extra) == ({}, {"speculative": False})
    assert with_drafts.jobs != without.jobs and len(with_drafts.jobs) == 8
    assert [plan.dataset for plan in server.plans[:-2]] == [suite.WARM_UP], "no chat, so none warms it up"
    assert with_drafts.settings()["seed"] != without.settings()["seed"]


def test_chats_are_measured_with_a_warm_cache(server: type[Scripted]) -> None:
    assert main(["bench", "suite", "chat8", "--url", URL]) == 0
    assert [plan.dataset for plan in server.plans] == [suite.WARM_UP, suite.WARM_UP_CHATS, "chat8"]


@pytest.mark.slow
def test_a_report_is_a_section_with_figures_and_lines(tmp_path: Path, server: type[Scripted]) -> None:
    page, out = tmp_path / "page.md", tmp_path / "suite.jsonl"
    flags = ["--report", str(page), "--output-file", str(out), "--commit", "abc1234", "--api-key", "secret"]
    words = ["bench", "suite", "bs1", "bs8", "--url", URL, "--both", *flags]
    assert main(words) == 0
    once = page.read_text()
    assert main(words) == 0
    assert page.read_text().count("<!-- begin") == 1 and once.count("| bs8 |") == 2
    assert f"`eyas bench suite bs1 bs8 --url {URL} --both`" in once and "commit abc1234" in once
    assert "secret" not in once
    (plot,) = (tmp_path / "plots").iterdir()
    assert plot.name.endswith("-bs8.svg") and f"(plots/{plot.name})" in once
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [(line["case"], line["speculative"]) for line in lines[:2]] == [("bs1", True), ("bs1", False)]
    assert len(lines) == 8 and len(lines[2]["ttfts"]) == 8


def test_a_failed_request_is_an_exit_code(server: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "failing", "one")
    assert main(["bench", "suite", "bs8", "--url", URL]) == 1


def test_a_case_without_a_success_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Scripted, "failing", "all")
    assert main(["bench", "suite", "bs8", "--url", URL]) == 1
    assert "no request succeeded: refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bs9"], "CASE: 'bs9' is none of"),
        (["bs8", "--report", "/none/page.md"], "--report: /none/page.md cannot be written"),
        (["bs8", "--output-file", "/none/x"], "--output-file: /none/x cannot be written"),
    ],
)
def test_bad_input_is_told_before_anything_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], server: type[Scripted]
) -> None:
    assert main(["bench", "suite", *words]) == 2
    assert message in capsys.readouterr().err and not server.plans


def test_on_a_cpu_it_is_the_embedded_model_with_drafts_and_without(tmp_path: Path) -> None:
    args = parsed()
    (setup,) = setups(args, tmp_path)
    assert cases_of(args) == ON_CPU
    assert (setup.config.engine.model, setup.config.layout, setup.drafts) == (
        str(NANO),
        "split",
        (True, False),
    )
    assert setup.command == "eyas bench suite"
    (setup,) = setups(parsed("chat1"), tmp_path)
    assert setup.drafts == (True,), "cases that are named run once"


def test_flags_of_drafts_are_for_the_part_that_drafts(tmp_path: Path) -> None:
    plain, chains = setups(parsed("--device", "cuda", "--spec-adaptive"), tmp_path)
    assert [setup.config.engine.speculation.adaptive for setup in (plain, chains)] == [False, True]


def test_on_a_gpu_it_is_a_large_shape_plain_and_with_chains(tmp_path: Path) -> None:
    args = parsed("--device", "cuda")
    plain, chains = setups(args, tmp_path)
    assert cases_of(args) == ON_GPU
    assert plain.config.engine.draft is None and plain.config.engine.load_format == "dummy"
    assert (tmp_path / "M8" / "config.json").exists() and (tmp_path / "H8" / "config.json").exists()
    speculation = chains.config.engine.speculation
    assert (speculation.steps, speculation.topk) == (3, 1)
    assert 1 + sum(speculation.synthetic_rates) == pytest.approx(3.0, rel=0.01)
    assert chains.command.startswith("eyas bench suite bs1 bs8 bs32 s1k s8k --device cuda --model M8")


def test_a_model_of_the_users_is_one_cluster(tmp_path: Path) -> None:
    (setup,) = setups(parsed("bs1", "--device", "cuda", "--model", "some dir/m"), tmp_path)
    assert setup.drafts == (True,) and setup.title.startswith("m, ")
    assert setup.command == "eyas bench suite bs1 --model 'some dir/m' --device cuda"


def test_the_command_is_told_again_without_its_secrets() -> None:
    args = parsed("bs1", "--both", "--url", URL, "--api-key", "secret", "--report", "x.md", "--commit", "1")
    assert command_line(args) == f"eyas bench suite bs1 --url {URL} --both"


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--tp 2", 2),
        pytest.param("--workers 2", 2, marks=pytest.mark.slow),
        ("--layout split --decode 2", 3),
        pytest.param("--layout split --gpus 1,1", 1, marks=pytest.mark.slow),
    ],
)
def test_a_shape_is_measured_on_the_gpus_that_were_named(flags: str, count: int, tmp_path: Path) -> None:
    args = parsed("bs1", "--device", "cuda", *flags.split())
    assert gpus(args) == count
    for setup in setups(args, tmp_path):
        said = setup.command.split()
        assert set(flags.split()) - {"--tp"} <= set(said) and "M8" in said, said
