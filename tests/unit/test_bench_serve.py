"""`eyas bench serve` against a server with a script: what it asks, when, what it measures, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_stub import Script, serving

from eyas import cli
from tools.bench.overhead import StreamPace, measure_client

FEW = (
    *("--num-prompts", "4", "--random-range-ratio", "1"),
    *("--random-output-len", "4", "--random-input-len", "6"),
)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


def bench(url: str, *flags: str) -> int:
    return cli.main(["bench", "serve", "--url", url, *FEW, *flags])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- what is asked -----------------------------------------------------------------------------------------


def test_completions_get_token_ids(url: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(url, "--extra-request-body", '{"top_k": 3}', "--api-key", "k") == 0
    assert len(script.asked) == 5, "one of warm-up"
    path, body = script.asked[1]
    ids = body.pop("prompt")
    assert path == "/v1/completions"
    assert len(ids) == 6 and all(10 <= id < 4096 for id in ids)
    assert body == {
        "model": "stub",
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 3,
    }
    assert all("Authorization: Bearer k" in head for head in script.heads)
    assert "token ids are below 4096 (a guess" in capsys.readouterr().out


def test_the_server_tells_its_vocabulary_and_where_time_goes(
    url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.pages |= {"/get_model_info": {"vocab_size": 50}, "/cluster": {}}
    assert bench(url) == 0
    prompts = [body["prompt"] for _, body in script.asked[1:]]
    assert all(10 <= id < 50 for ids in prompts for id in ids)
    assert all(body["timings"] is True for _, body in script.asked)
    assert "below 50 (its vocabulary)" in capsys.readouterr().out
    script.asked.clear()
    assert bench(url, "--vocab-size", "2000000") == 0
    larger = [body["prompt"] for _, body in script.asked[1:]]
    assert [[10 + (id - 10) % 40 for id in ids] for ids in larger] == prompts, "the same draw"


def test_generate_gets_sampling_params(url: str, script: Script) -> None:
    assert bench(url, "--backend", "sglang", "--temperature", "0.5", "--disable-ignore-eos") == 0
    path, body = script.asked[1]
    assert path == "/generate" and len(body["input_ids"]) == 6 and body["stream"] is True
    assert body["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 4, "ignore_eos": False}


def test_a_conversation_goes_on_from_its_answers(url: str, script: Script) -> None:
    assert bench(url, "--dataset-name", "multi-turn", "--num-prompts", "1", "--turns", "3") == 0
    asked = [body["messages"] for _, body in script.asked[1:]]
    assert [len(messages) for messages in asked] == [1, 3, 5]
    assert asked[2][:3] == asked[1] and asked[1][:1] == asked[0]
    assert asked[2][1] == {"role": "assistant", "content": "0 1 2 3 "}


def test_a_schema_is_sent_where_the_backend_has_its_place(url: str, script: Script) -> None:
    for backend in ("sglang-oai-chat", "sglang"):
        assert bench(url, "--dataset-name", "schema", "--num-prompts", "1", "--backend", backend) == 0
    chat, generate = script.asked[1][1], script.asked[3][1]
    assert chat["response_format"]["json_schema"]["schema"]["required"] == ["name", "country", "population"]
    assert "ignore_eos" not in chat
    assert json.loads(generate["sampling_params"]["json_schema"])["type"] == "object"


# --- when --------------------------------------------------------------------------------------------------


def test_a_burst_runs_at_once_and_a_closed_loop_waits(url: str, script: Script, tmp_path: Path) -> None:
    script.first_s = 0.1
    out = tmp_path / "out.jsonl"
    assert bench(url, "--output-file", str(out), "--output-details") == 0
    assert script.most_running == 4
    script.most_running = 0
    assert bench(url, "--max-concurrency", "2", "--output-file", str(out), "--output-details") == 0
    assert script.most_running == 2
    burst, closed = lines(out)
    assert max(burst["waits"]) < 0.1
    assert sorted(closed["waits"])[1] < 0.1 < sorted(closed["waits"])[2], "two waited for a place"
    assert closed["mean_ttft_with_wait_ms"] > closed["mean_ttft_ms"] + 40


def test_requests_arrive_at_the_rate(url: str, script: Script) -> None:
    assert bench(url, "--request-rate", "20", "--seed", "3", "--num-prompts", "12") == 0
    took = script.asked_at[-1] - script.asked_at[1]
    assert 0.2 < took < 3.0, "eleven gaps of a twentieth of a second, on average"


def test_a_trace_sets_its_own_times(url: str, script: Script, tmp_path: Path) -> None:
    path, out = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    entry = {"input_length": 3, "output_length": 2, "hash_ids": [1]}
    path.write_text("".join(json.dumps({"timestamp": at, **entry}) + "\n" for at in (500, 0)))
    flags = ("--dataset-name", "trace", "--dataset-path", str(path), "--output-file", str(out))
    assert bench(url, *flags) == 0
    assert 0.4 < script.asked_at[2] - script.asked_at[1] < 2.0
    assert lines(out)[0]["request_rate"] == "trace"


# --- what is measured --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sglang-oai", "sglang"])
def test_times_are_those_of_the_script(
    url: str, script: Script, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.first_s, script.gap_s = 0.2, 0.1
    out = tmp_path / "out.jsonl"
    flags = ("--backend", backend, "--output-file", str(out), "--tag", "mine", "--slo", "ttft=60s")
    assert bench(url, *flags) == 0
    (line,) = lines(out)
    assert (line["tag"], line["backend"], line["completed"], line["failed"]) == ("mine", backend, 4, 0)
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (12, 16)
    assert 200 <= line["median_ttft_ms"] < 450  # a busy machine is late, but no time is another
    assert 90 <= line["median_tpot_ms"] < 190 and 90 <= line["median_itl_ms"] < 190
    assert 500 <= line["median_e2e_latency_ms"] < 1000
    assert line["goodput"] == line["request_throughput"] and "errors" not in line
    said = capsys.readouterr()
    assert "4 of 4" in said.out
    assert all(words.startswith("warning: ") for words in said.err.splitlines()), (
        "a file gets no progress bar"
    )


async def test_the_client_itself_costs_little() -> None:
    """On a busy machine it may be late, which it says; its work per event does not grow with that."""
    figures = await measure_client(StreamPace(streams=20, tokens_per_s=2000, seconds=1))
    assert figures["streams"] == 20
    assert figures["cpu_us_per_event"] < 300
    assert 0 < figures["ttft_late_ms_p50"] < 500 and 0 < figures["event_late_ms_p50"] < 500


# --- how it ends -------------------------------------------------------------------------------------------


def test_failures_midway_are_counted_and_shown(
    url: str, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.refuse, script.breaks = lambda number: number == 2, lambda number: number == 3
    out = tmp_path / "out.jsonl"
    assert bench(url, "--output-file", str(out), "--output-details") == 1
    (line,) = lines(out)
    assert (line["completed"], line["failed"], line["total_output_tokens"]) == (2, 2, 8)
    assert sum("HTTP 400: " in error for error in line["errors"]) == 1
    assert sum("ended the connection" in error for error in line["errors"]) == 1
    said = capsys.readouterr()
    assert "2 of 4" in said.out and "2 requests failed" in said.err


def test_a_conversation_ends_with_its_first_failure(url: str, script: Script, tmp_path: Path) -> None:
    script.refuse = lambda number: number == 2
    out = tmp_path / "out.jsonl"
    flags = ("--dataset-name", "multi-turn", "--num-prompts", "1", "--turns", "3", "--output-file", str(out))
    assert bench(url, *flags) == 1
    assert (lines(out)[0]["completed"], lines(out)[0]["failed"], len(script.asked)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("refuse", "says"),
    [(0, "no warm-up request succeeded: HTTP 400"), (1, "none of 4 requests succeeded: HTTP 400")],
)
def test_without_a_success_there_are_no_figures(
    url: str, script: Script, refuse: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script.refuse = lambda number: number >= refuse
    assert bench(url) == 1
    said = capsys.readouterr()
    assert says in said.err and "TTFT" not in said.out


def test_an_slo_that_no_request_meets_is_a_failure(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert bench(url, "--slo", "ttft=1us", "--output-file", str(out)) == 1
    assert "--slo: no request was within ttft=0.001ms" in capsys.readouterr().err
    assert (lines(out)[0]["goodput"], lines(out)[0]["completed"]) == (0.0, 4)


def test_a_server_that_is_down_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("http://127.0.0.1:1") == 1
    assert "nothing listens at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--dataset-name", "gsm8k"), "--dataset-name: 'gsm8k' is none of random, sharegpt,"),
        (("--dataset-name", "trace"), "--dataset-path: this dataset needs a file"),
        (("--slo", "fast"), "--slo: 'fast' is not like ttft=200ms"),
        (("--output-file", "/nowhere/x"), "--output-file: /nowhere/x cannot be written"),
        (("--output-file", "/proc/x"), "--output-file: /proc/x cannot be written"),
        (("--dataset-path", "talks.json"), "--dataset-path: random has no file"),
        (("--dataset-name", "trace", "--request-rate", "2"), "--request-rate: a trace has times of its own"),
        (("--backend", "sglang-oai-chat"), "--backend: sglang-oai-chat takes texts"),
        (("--backend", "sglang", "--dataset-name", "multi-turn"), "--backend: sglang has no conversations"),
    ],
)
def test_flags_that_cannot_work_are_told_before_anything_is_sent(
    url: str, script: Script, flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(url, *flags) == 2
    assert says in capsys.readouterr().err and script.heads == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--request-rate", "0"), "'0' is not a rate per second above 0, or inf"),
        (("--random-range-ratio", "2"), "'2' is not a number from 0 to 1"),
        (("--vocab-size", "9"), "'9' is not above 10"),
        (("--temperature", "nan"), "'nan' is not a number from 0 on"),
        (("--url", "http://127.0.0.1:99999"), "'http://127.0.0.1:99999' is not an address like"),
        (("--url", "http://[::1"), "'http://[::1' is not an address like"),
        (("--extra-request-body", "[]"), "'[]' is not a JSON object"),
        (("--backend", "trt"), "invalid choice: 'trt'"),
    ],
)
def test_values_that_are_none_are_refused(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench("http://127.0.0.1:1", *flags)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_ctrl_c_tells_what_was_measured(url: str, script: Script, tmp_path: Path) -> None:
    script.first_s = 0.2
    out = tmp_path / "out.jsonl"
    flags = ["--num-prompts", "500", "--max-concurrency", "1", "--output-file", str(out)]
    command = [sys.executable, "-m", "eyas.cli", "bench", "serve", "--url", url, *FEW, *flags]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(script.asked) < 4:
        assert child.poll() is None
        os.sched_yield()
    child.send_signal(signal.SIGINT)
    said, complained = child.communicate(timeout=30)
    assert child.returncode == 130, complained
    assert "INCOMPLETE" in said and "Traceback" not in complained
    (line,) = lines(out)
    assert line["complete"] is False and 1 <= line["completed"] <= 4 and line["failed"] == 0
