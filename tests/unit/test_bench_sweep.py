"""A sweep finds every server's knee, writes each line as it ends, and says when an SLO is met by none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.bench import sweep
from eyas.bench.plan import LoadPlan
from eyas.bench.records import RequestRecord, RunRecord
from eyas.bench.sweep import RateSweep
from eyas.cli import main
from eyas.common.errors import Unavailable

LIMITS = {"http://127.0.0.1:1": 5.0, "http://127.0.0.1:2": 2.5, "http://127.0.0.1:3": 0.0}
LOADED = ["bench", "sweep", "--url", "fast=http://127.0.0.1:1", "--url", "slow=http://127.0.0.1:2"]


def line(rate: float, limit: float, complete: bool = True) -> dict[str, Any]:
    return {"request_rate": rate, "slo_attainment": 1.0 if rate <= limit else 0.5, "complete": complete}


def scripted(limits: dict[str, float], rates: tuple[float, ...] = ()) -> tuple[RateSweep, list[Any]]:
    told: list[Any] = []

    async def measure(name: str, rate: float) -> dict[str, Any]:
        return line(rate, limits[name])

    return RateSweep(measure, rates, told.append), told


async def test_every_server_is_searched_to_its_own_knee() -> None:
    swept, told = scripted({"fast": 5.0, "slow": 0.4})
    for name in ("fast", "slow"):
        await swept.server(name)
    assert swept.knee("fast") == 4.76 and swept.knee("slow") == pytest.approx(0.4, rel=0.1)
    assert [found["request_rate"] for found in told[:3]] == [1.0, 2.0, 4.0]
    assert len(told) == sum(map(len, swept.lines.values()))


async def test_rates_that_are_given_are_all_tried_once() -> None:
    swept, told = scripted({"one": 2.0}, rates=(1.0, 2.0, 8.0))
    await swept.server("one")
    assert [found["request_rate"] for found in told] == [1.0, 2.0, 8.0]
    assert swept.knee("one") == 2.0


async def test_an_interruption_ends_the_sweep() -> None:
    async def measure(name: str, rate: float) -> dict[str, Any]:
        return line(rate, 9.0, complete=rate < 2)

    swept = RateSweep(measure, (), lambda _: None)
    for name in ("one", "two"):
        await swept.server(name)
    assert not swept.complete and len(swept.lines["one"]) == 2 and swept.lines["two"] == []
    assert swept.knee("one") == 1.0, "the rate that was interrupted counts for nothing"


class Scripted:
    """In the place of Measurement: TTFT is 0.1 s up to the server's limit, 1 s above."""

    client_cpu = 0.0

    def __init__(self, plan: LoadPlan, url: str) -> None:
        self.plan, self.url = plan, url

    @classmethod
    async def begin(cls, plan: LoadPlan, server: Any) -> Scripted:
        if server.url not in LIMITS:
            raise Unavailable(f"nothing listens at {server.url}")
        return cls(plan, server.url)

    async def run(self, on_record: Any) -> RunRecord:
        ttft = 0.1 if self.plan.rate <= LIMITS[self.url] else 1.0
        records = [
            RequestRecord(
                8, 5, start_s=i / self.plan.rate, ttft_s=ttft, latency_s=ttft + 0.4, itls_s=[0.1] * 4
            )
            for i in range(len(self.plan.jobs))
        ]
        return RunRecord(
            self.plan.settings(), len(records) / self.plan.rate, records, client_cpu=self.client_cpu
        )


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "LoadMeasurement", Scripted)


@pytest.mark.slow
@pytest.mark.usefixtures("servers")
def test_the_command_tells_knees_writes_lines_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "sweep.jsonl", tmp_path / "sweep.png"
    flags = ["--slo", "ttft=200ms", "--output-file", str(out), "--plot", str(plot)]
    assert main([*LOADED, *flags]) == 0
    said = capsys.readouterr().out
    assert "fast bears 4.76 requests per second with 90% of the requests within ttft=200ms" in said
    assert "slow bears 2.38 requests per second" in said
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert {found["server"] for found in lines} == {"fast", "slow"} and "ttfts" not in lines[0]
    assert lines[0]["goodput"] == pytest.approx(1.0) and lines[0]["num_prompts"] == 30
    assert plot.stat().st_size > 10_000


@pytest.mark.usefixtures("servers")
def test_rates_have_their_own_prompts_and_servers_do_not(tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    assert main([*LOADED, "--rates", "2,1", "--num-prompts", "5", "--output-file", str(out)]) == 0
    found = [json.loads(text) for text in out.read_text().splitlines()]
    seeds = [(line["server"], line["request_rate"], line["seed"], line["num_prompts"]) for line in found]
    assert seeds == [("fast", 1, 1001, 5), ("fast", 2, 2001, 5), ("slow", 1, 1001, 5), ("slow", 2, 2001, 5)]


@pytest.mark.usefixtures("servers")
def test_a_client_at_its_limit_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Scripted, "client_cpu", 0.95)
    assert main([*LOADED[:4], "--rates", "1", "--num-prompts", "3"]) == 0
    assert "warning: the client used 95% of a core" in capsys.readouterr().err


@pytest.mark.usefixtures("servers")
def test_an_slo_that_no_rate_meets_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    url = "none=http://127.0.0.1:3"
    assert main(["bench", "sweep", "--url", url, "--slo", "ttft=200ms", "--num-prompts", "3"]) == 1
    error = capsys.readouterr().err
    assert "none bears no rate with 90% of the requests within ttft=200ms" in error
    assert "the lowest tried was 0.015625 per second" in error


@pytest.mark.usefixtures("servers")
def test_a_server_that_is_down_is_told_after_the_lines_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep.jsonl"
    down = ["--url", "down=http://127.0.0.1:9", "--rates", "1", "--output-file", str(out)]
    assert main([*LOADED[:4], *down]) == 1
    assert "nothing listens at http://127.0.0.1:9" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--slo: the knee is where it is missed"),
        (["--slo", "ttft=fast"], "--slo: 'ttft=fast' is not like"),
        (["--rates", "1,x"], "'1,x' is not a list like 1,2,4"),
        (["--rates", "0,1"], "'0,1' has a rate that is not a number above 0"),
        (["--rates", "1", "--request-rate", "3"], "--request-rate: a sweep tries many rates"),
        (["--rates", "1", "--dataset-name", "trace"], "--dataset-name: a trace has times of its own"),
        (["--rates", "1", "--dataset-name", "none"], "--dataset-name: 'none' is none of"),
        (["--rates", "1", "--url", "slow=http://127.0.0.1:4"], "--url: two servers have the same name"),
        (["--rates", "1", "--url", "ftp://x"], "'ftp://x' is not an address like"),
        (["--rates", "1", "--url", "=http://x"], "'=http://x' has no name before ="),
        (["--rates", "1", "--plot", "x.pdf"], "x.pdf does not end in"),
        (["--rates", "1", "--output-file", "/none/x"], "--output-file: /none/x cannot be written"),
    ],
)
def test_bad_flags_are_told_before_anything_is_measured(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*LOADED, *flags])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err
