"""What pages show: the model's name on every series of ours, and vLLM's names for what means the same."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from eyas.common.metrics import ModelName, WorkerMetrics
from eyas.common.types import EngineTimings, FinishCause, Role, TokenEntry, WorkerInfo
from gateway.observe.metrics import PEERS, VLLM, GatewayMetrics, GatewayPage
from gateway.text.entries import RequestTrace, TextDelta, UsageCounts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
WORKER = WorkerInfo(
    worker="d:1",
    roles=(Role.DECODE,),
    epoch=1,
    model="m",
    fingerprint="f",
    draft_fingerprint="",
    context_length=9,
    vocab_size=9,
    pages_total=8,
    pages_used=2,
    running=3,
    waiting=4,
)
DRAFTER = msgspec.structs.replace(WORKER, worker="x:1", roles=(Role.DRAFT,))


def series(page: bytes) -> dict[str, float]:
    """By name and labels, without those that say when a series began."""
    samples = [
        sample for family in text_string_to_metric_families(page.decode()) for sample in family.samples
    ]
    return {
        sample.name
        + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for sample in samples
        if not sample.name.endswith("_created")
    }


def used() -> GatewayMetrics:
    """The figures of a gateway that has answered one call."""
    metrics = GatewayMetrics(CollectorRegistry())
    trace = RequestTrace()
    trace.record(
        TokenEntry(
            "r", 1, 0, 0, (5,), timings=EngineTimings(queue_ms=100.0, prefill_ms=200.0, role=Role.DECODE)
        )
    )
    with metrics.meter() as meter:
        meter.deltas([TextDelta(0, "a", (5,))])
        meter.deltas([TextDelta(0, "b", (6, 7), finish=FinishCause.LENGTH)])
        usage = UsageCounts(
            prompt_tokens=30, completion_tokens=3, accepted=1, rejected=1, verify_steps=1, cached_tokens=16
        )
        meter.ended(usage, [trace])
    return metrics


def test_every_series_of_a_model_names_it_and_nothing_else_changes() -> None:
    for registry in (used().registry, CollectorRegistry()):
        if not registry._collector_to_names:
            WorkerMetrics(registry)
        ProcessCollector(registry=registry)
        plain = series(generate_latest(registry))
        named = series(generate_latest(ModelName(registry, lambda: "m")))
        assert len(named) == len(plain)
        for key in named:
            assert ("model_name=m" in key) == (not key.startswith("process_")), key
        bare = {" ".join(part for part in key.split(" ") if part != "model_name=m") for key in named}
        assert bare == plain.keys()


def test_a_name_that_is_not_known_yet_is_left_out_and_a_registry_can_select() -> None:
    names = [""]
    registry, page = CollectorRegistry(), CollectorRegistry()
    WorkerMetrics(registry)
    page.register(ModelName(registry, lambda: names[0]))
    assert "model_name" not in generate_latest(page).decode()
    names[0] = "m"
    chosen = series(generate_latest(page.restricted_registry(["eyas_kv_pages"])))
    assert chosen == {"eyas_kv_pages model_name=m": 0.0}


def test_vllm_s_names_say_what_ours_say() -> None:
    metrics = used()
    page = GatewayPage(metrics.registry, "m", lambda: [WORKER, DRAFTER], vllm=True)
    found = series(generate_latest(page))
    m = "model_name=m"
    assert {key: value for key, value in found.items() if "engine=" in key} == {
        f"vllm:num_requests_running engine=d:1 {m}": 3.0,
        f"vllm:num_requests_waiting engine=d:1 {m}": 4.0,
        f"vllm:kv_cache_usage_perc engine=d:1 {m}": 0.25,
        f"vllm:gpu_cache_usage_perc engine=d:1 {m}": 0.25,
    }
    expected = {
        f"vllm:prompt_tokens_total {m}": 30.0,
        f"vllm:generation_tokens_total {m}": 3.0,
        f"vllm:request_prompt_tokens_bucket le=20.0 {m}": 0.0,
        f"vllm:request_prompt_tokens_bucket le=50.0 {m}": 1.0,
        f"vllm:request_generation_tokens_sum {m}": 3.0,
        f"vllm:request_success_total finished_reason=length {m}": 1.0,
        f"vllm:prefix_cache_queries_total {m}": 30.0,
        f"vllm:prefix_cache_hits_total {m}": 16.0,
        f"vllm:spec_decode_num_drafts_total {m}": 1.0,
        f"vllm:spec_decode_num_draft_tokens_total {m}": 2.0,
        f"vllm:spec_decode_num_accepted_tokens_total {m}": 1.0,
    }
    assert {key: found[key] for key in expected} == expected
    assert found[f"vllm:request_queue_time_seconds_sum {m}"] == pytest.approx(0.1)
    assert found[f"vllm:request_prefill_time_seconds_sum {m}"] == pytest.approx(0.2)
    for ours, theirs in [
        ("time_to_first_token_seconds",) * 2,
        ("e2e_request_latency_seconds",) * 2,
        ("inter_token_latency_seconds",) * 2,
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    ]:
        histogram = {key: value for key, value in found.items() if key.startswith(f"vllm:{theirs}_")}
        assert len(histogram) > 10 and found[f"vllm:{theirs}_count {m}"] == 1.0
        assert {
            key.replace(f"vllm:{theirs}", f"eyas_{ours}"): v for key, v in histogram.items()
        }.items() <= found.items()


def test_without_the_flag_there_is_none_of_them() -> None:
    page = generate_latest(GatewayPage(used().registry, "m", lambda: [WORKER], vllm=False))
    assert b"eyas_prompt_tokens_total{" in page and b"vllm:" not in page


def test_the_page_in_the_documentation_lists_them() -> None:
    section = PAGE.read_text().split("## vLLM's names\n")[1].split("\n## ")[0]
    listed = {name.removesuffix("_total") for name in re.findall(r"vllm:\w+", section)}
    assert listed == {*PEERS, *(renamed.theirs for renamed in VLLM)}
