"""Latencies and figures, from events at known times: what SGLang's `bench_serving` would say of them."""

from __future__ import annotations

import json
import math

import pytest

from eyas.bench.backends import CHATS, COMPLETIONS, GENERATE, ServerBackend
from eyas.bench.figures import figures, summary, warn, without_details
from eyas.bench.measure import acceptance_length
from eyas.bench.records import LatencySlo, RequestRecord, RunRecord
from eyas.bench.runner import DONE, AnswerReader
from eyas.common.errors import ConfigError, EyasError

SETTINGS = {
    "backend": "sglang-oai",
    "dataset_name": "random",
    "request_rate": float("inf"),
    "max_concurrency": None,
    "sharegpt_output_len": None,
    "random_input_len": 8,
    "random_output_len": 8,
    "random_range_ratio": 0.0,
    "seed": 1,
}
# Every name that a line of SGLang's bench_serving has, but for the tag.
SGLANG_NAMES = {
    *(
        "backend",
        "dataset_name",
        "request_rate",
        "max_concurrency",
        "sharegpt_output_len",
        "random_input_len",
    ),
    *(
        "random_output_len",
        "random_range_ratio",
        "server_info",
        "duration",
        "completed",
        "total_input_tokens",
    ),
    *("total_input_text_tokens", "total_input_vision_tokens", "total_output_tokens", "concurrency"),
    *("total_output_tokens_retokenized", "request_throughput", "input_throughput", "output_throughput"),
    *("total_throughput", "accept_length", "max_output_tokens_per_s", "max_concurrent_requests"),
    *(
        f"{part}_{name}_ms"
        for part in ("mean", "median", "std", "p90", "p95", "p99")
        for name in ("e2e_latency", "ttft", "tpot", "itl")
    ),
}
SGLANG_DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}


def read(backend: ServerBackend, *events: tuple[float, object], max_tokens: int = 99) -> RequestRecord:
    """The record of an answer that was asked for at 100.0, of events at times after that."""
    reading = AnswerReader(backend, began=100.0)
    for at, event in events:
        reading.event(event if isinstance(event, bytes) else json.dumps(event).encode(), 100.0 + at)
    reading.close(0, max_tokens)
    return reading.record


def text(said: str, **more: object) -> dict[str, object]:
    return {"choices": [{"text": said}], **more}


def generated(said: str, tokens: int, **meta: object) -> dict[str, object]:
    return {"text": said, "meta_info": {"completion_tokens": tokens, "prompt_tokens": 4, **meta}}


# --- one request -------------------------------------------------------------------------------------------


def test_completions_time_chunks_with_text() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    details = {
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
    }
    record = read(
        COMPLETIONS,
        (0.2, text("")),  # no text yet: not the first token
        (0.3, text("a")),
        (0.4, text("bc", usage=None)),
        (0.5, text("")),
        (0.8, text("d")),
        (0.9, {"choices": [], "usage": usage | details, "timings": {"verify_steps": 2, "legs": []}}),
        (1.1, DONE),
    )
    assert (record.error, record.text) == ("", "abcd")
    assert (record.prompt_tokens, record.output_tokens) == (7, 5)
    assert (record.accepted, record.rejected, record.verify_steps) == (3, 1, 2)
    assert record.ttft_s == pytest.approx(0.3)
    assert record.itls_s == pytest.approx([0.1, 0.4])
    assert record.latency_s == pytest.approx(1.1), "SGLang's latency ends with the last line of the stream"
    assert record.tpot_s == pytest.approx((1.1 - 0.3) / 4)


def test_a_chats_role_and_reasoning() -> None:
    record = read(
        CHATS,
        (0.1, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        (0.2, {"choices": [{"delta": {"reasoning_content": "hm "}}]}),
        (0.3, {"choices": [{"delta": {"content": "yes"}}]}),
        (0.4, {"choices": [{"delta": {}}]}),
    )
    assert record.text == "hm yes" and record.ttft_s == pytest.approx(0.2)
    assert record.itls_s == pytest.approx([0.1])


def test_generate_shares_a_gap_among_its_tokens() -> None:
    spec = {"spec_accept_token_num": 2, "spec_draft_token_num": 6, "spec_verify_ct": 3}
    record = read(
        GENERATE,
        (0.5, generated("a", 2)),
        (0.9, generated("abcde", 6)),
        (1.0, generated("abcde", 6)),  # nothing new: the next gap reaches back over it
        (1.3, generated("abcdef", 7, **spec)),
        (1.4, DONE),
    )
    assert (record.text, record.output_tokens, record.prompt_tokens) == ("abcdef", 7, 4)
    assert record.ttft_s == pytest.approx(0.5)
    assert record.itls_s == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.4])
    assert (record.accepted, record.rejected, record.verify_steps) == (2, 4, 3)


def test_usage_in_every_chunk_shares_gaps_too_but_in_the_last_alone_it_does_not() -> None:
    every = read(
        COMPLETIONS, *((at, text("x", usage={"completion_tokens": n})) for at, n in ((0.1, 1), (0.4, 4)))
    )
    assert every.itls_s == pytest.approx([0.1] * 3)
    last = read(COMPLETIONS, (0.1, text("x")), (0.4, text("x", usage={"completion_tokens": 9})))
    assert last.itls_s == pytest.approx([0.3]) and last.output_tokens == 9


def test_a_server_without_usage_is_taken_at_its_length() -> None:
    assert read(COMPLETIONS, (0.1, text("x")), max_tokens=12).output_tokens == 12


def test_tokens_without_a_text_are_seen_at_the_end() -> None:
    record = read(COMPLETIONS, (0.1, {"choices": [], "usage": {"completion_tokens": 4}}), (0.2, DONE))
    assert record.error == "" and record.itls_s == []
    assert record.ttft_s == record.latency_s == pytest.approx(0.2)


def test_an_answer_without_a_token_is_a_failure() -> None:
    assert read(COMPLETIONS, (0.1, text("")), (0.2, DONE)).error == "no token came"


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"error": {"message": "worn out"}}, "broke off: .*worn out"),
        (b"{", "malformed"),
        ({"choices": 3}, "malformed"),
    ],
)
@pytest.mark.parametrize("backend", [COMPLETIONS, GENERATE])
def test_an_event_that_is_an_error_or_malformed_is_told(
    backend: ServerBackend, event: object, says: str
) -> None:
    if backend is GENERATE and event == {"choices": 3}:
        event = {"text": 3}
    with pytest.raises(EyasError, match=says):
        read(backend, (0.1, event))


def test_phases_are_named_by_role() -> None:
    legs = [
        {"role": "decode", "queue_ms": 2.0, "transfer_ms": 3.5, "transfer_path": "shm", "cached_tokens": 1}
    ]
    timings = {"first_token_ms": 8.5, "first_decode_ms": None, "verify_steps": 4, "legs": legs}
    record = read(COMPLETIONS, (0.1, text("x", timings=timings)))
    assert record.phases_ms == {"server_first_token": 8.5, "decode_queue": 2.0, "decode_transfer": 3.5}


def test_the_acceptance_length_is_that_of_the_run_where_requests_tell() -> None:
    info = {"internal_states": [{"avg_spec_accept_length": 2.25}]}
    drafted = [RequestRecord(accepted=3, verify_steps=2), RequestRecord(accepted=1, verify_steps=2)]
    failed = RequestRecord(accepted=90, verify_steps=1, error="broke off")
    assert acceptance_length([*drafted, failed], info) == 2.0
    assert acceptance_length([RequestRecord(verify_steps=0)], info) is None, "none of these was drafted"
    assert acceptance_length([RequestRecord()], info) == 2.25
    assert acceptance_length([RequestRecord()], None) is None
    assert acceptance_length([RequestRecord()], {"internal_states": []}) is None


# --- a run -------------------------------------------------------------------------------------------------


def good(start_s: float, ttft_s: float, itls_s: list[float], waited_s: float = 0.0) -> RequestRecord:
    tokens, latency_s = len(itls_s) + 1, ttft_s + sum(itls_s)
    return RequestRecord(
        10, tokens, start_s, waited_s, ttft_s, latency_s, itls_s, phases_ms={"prefill_queue": 2.0}
    )


@pytest.fixture
def run() -> RunRecord:
    """Two that succeeded, one that failed; tokens at 0.1 .. 0.5, and at 1.2, 1.4 seconds."""
    records = [good(0.0, 0.1, [0.1] * 4), RequestRecord(error="refused"), good(1.0, 0.2, [0.2], waited_s=0.5)]
    return RunRecord(dict(SETTINGS), 2.0, records, client_cpu=0.2, client_lag_ms=1.0)


def test_a_line_has_every_name_of_sglang(run: RunRecord) -> None:
    line = figures(run)
    assert SGLANG_NAMES - set(line) == set()
    detailed = figures(run, details=True)
    assert SGLANG_DETAILS - set(detailed) == set()
    assert without_details(detailed) == line
    assert json.loads(json.dumps(detailed)) == detailed


def test_figures_are_what_they_say(run: RunRecord) -> None:
    line = figures(run)
    assert (line["completed"], line["failed"], line["first_error"], line["complete"]) == (
        2,
        1,
        "refused",
        True,
    )
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (20, 7)
    assert (line["request_throughput"], line["output_throughput"], line["total_throughput"]) == (
        1.0,
        3.5,
        13.5,
    )
    assert line["mean_ttft_ms"] == pytest.approx(150) and line["std_ttft_ms"] == pytest.approx(50)
    assert line["p90_ttft_ms"] == pytest.approx(190), "between the samples, as numpy draws the line"
    assert line["mean_tpot_ms"] == pytest.approx(150)
    assert line["mean_itl_ms"] == pytest.approx(120) and line["median_itl_ms"] == pytest.approx(100)
    assert line["max_itl_ms"] == pytest.approx(200)
    assert line["mean_e2e_latency_ms"] == pytest.approx(450)
    assert line["concurrency"] == pytest.approx(0.45)
    assert (line["max_output_tokens_per_s"], line["max_concurrent_requests"]) == (5.0, 1)
    assert line["mean_ttft_with_wait_ms"] == pytest.approx(400)
    assert line["p99_prefill_queue_ms"] == line["p90_prefill_queue_ms"] == 2.0


def test_details_keep_the_order_and_the_failures(run: RunRecord) -> None:
    line = figures(run, details=True)
    assert line["errors"] == ["", "refused", ""]
    assert line["output_lens"] == [5, 0, 2]
    assert line["itls"][2] == [0.2] and line["waits"] == [0.0, 0.0, 0.5]


def test_a_chunk_of_several_tokens_counts_as_several(run: RunRecord) -> None:
    run.records[0].output_tokens = 10  # in five chunks
    assert figures(run)["max_output_tokens_per_s"] == 10.0


def test_without_a_sample_a_figure_is_null(run: RunRecord) -> None:
    run.records = [good(0.0, 0.1, [])]
    line = figures(run)
    assert line["mean_tpot_ms"] is None and line["p99_itl_ms"] is None and line["mean_ttft_ms"] is not None
    run.records = []
    assert figures(run, LatencySlo.parse("ttft=1s"))["slo_attainment"] == 0.0


@pytest.mark.parametrize(
    ("slo", "goodput", "share"),
    [
        ("ttft=150ms", 0.5, 1 / 3),
        ("ttft=0.2s,tpot=200ms,e2e=5s", 1.0, 2 / 3),
        ("e2e=450ms", 0.5, 1 / 3),
        ("ttft=10us", 0.0, 0.0),
    ],
)
def test_goodput_counts_requests_within_every_bound(
    run: RunRecord, slo: str, goodput: float, share: float
) -> None:
    line = figures(run, LatencySlo.parse(slo))
    assert (line["goodput"], line["slo_attainment"]) == (goodput, pytest.approx(share))


@pytest.mark.parametrize("slo", ["", "ttft", "ttft=5", "ttfb=5ms", "ttft=-1ms", "ttft=1ms,ttft=2ms"])
def test_what_is_no_slo_is_refused(slo: str) -> None:
    with pytest.raises(ConfigError, match="--slo: "):
        LatencySlo.parse(slo)


def test_the_summary_says_what_counts(run: RunRecord) -> None:
    said = summary(figures(run, LatencySlo.parse("ttft=150ms")))
    assert "2 of 3" in said and "refused" in said and "all at once" in said
    assert "under ttft=150ms" in said and "0.50 good requests per second" in said
    (row,) = (line for line in said.splitlines() if line.startswith("TTFT with waiting"))
    assert row.split()[3:5] == ["400.00", "400.00"]
    assert "INCOMPLETE" not in said and "prefill queue" in said
    run.complete = False
    assert "INCOMPLETE" in summary(figures(run))


def test_a_client_at_its_limit_is_told(run: RunRecord, capsys: pytest.CaptureFixture[str]) -> None:
    warn(run)
    assert capsys.readouterr().err == ""
    run.client_cpu, run.client_lag_ms = 0.9, 12.0
    warn(run)
    cpu, lag = capsys.readouterr().err.splitlines()
    assert "90% of a core" in cpu and "12.0 ms late" in lag


def test_infinity_is_written_as_sglang_writes_it(run: RunRecord) -> None:
    line = json.dumps(figures(run))
    assert '"request_rate": Infinity' in line and math.isinf(json.loads(line)["request_rate"])
