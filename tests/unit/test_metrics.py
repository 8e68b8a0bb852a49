"""The figures of every process: docs/metrics.md lists exactly what is exported, and totals add up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from eyas.common.metrics import PlainHistogram, WorkerMetrics
from eyas.common.types import EngineTimings, FinishCause, Role, TokenEntry
from gateway.observe.metrics import GatewayMetrics
from gateway.text.entries import RequestTrace, TextDelta, UsageCounts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def rows(registry: CollectorRegistry) -> list[str]:
    """One row a metric, as the page shows it. Labels are told by the collectors that have any."""
    found = []
    for collector in registry._collector_to_names:
        labels = ", ".join(getattr(collector, "_labelnames", ()))
        for metric in collector.describe():
            name = metric.name + ("_total" if metric.type == "counter" else "")
            found.append(f"| `{name}` | {metric.type} | {labels} | {metric.documentation} |")
    return sorted(found)


@pytest.mark.parametrize(
    ("heading", "instruments"), [("Gateway", GatewayMetrics), ("Workers", WorkerMetrics)]
)
def test_the_page_lists_exactly_what_is_exported(heading: str, instruments: type) -> None:
    registry = CollectorRegistry()
    instruments(registry)
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    listed = [line for line in section.splitlines() if line.startswith("| `")]
    assert listed == rows(registry), "\n".join(rows(registry))


def test_a_worker_counts_what_its_engine_says() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.totals(
        prompt_tokens=10, cached_tokens=4, preemptions=0, pulls_failed=1, nodes_verified=7, drafts_late=2
    )
    metrics.totals(
        prompt_tokens=15, cached_tokens=4, preemptions=0, pulls_failed=1, nodes_verified=9, drafts_late=3
    )
    metrics.moved("shm", 1, 100, 0.5)
    metrics.moved("shm", 3, 300, 0.75)
    metrics.moved("grpc", 1, 7, 1.0)
    for total in (2, 3, 3):
        metrics.ways_refused("rdma", total)
    metrics.step([TokenEntry("r", 1, 0, 0, (5, 6, 7), finish=FinishCause.STOP, accepted=2, offered=5)])
    page = generate_latest(registry).decode()
    for line in (
        "eyas_prompt_tokens_total 15.0",
        "eyas_cached_prompt_tokens_total 4.0",
        "eyas_transfer_failures_total 1.0",
        "eyas_draft_rounds_late_total 3.0",
        'eyas_transfers_total{path="shm"} 3.0',
        'eyas_transfer_bytes_total{path="shm"} 300.0',
        'eyas_transfer_seconds_total{path="shm"} 0.75',
        'eyas_transfer_bytes_total{path="grpc"} 7.0',
        'eyas_transfer_ways_refused_total{path="rdma"} 3.0',
        "eyas_generation_tokens_total 3.0",
        "eyas_draft_tokens_accepted_total 2.0",
        "eyas_draft_tokens_offered_total 5.0",
        "eyas_draft_nodes_verified_total 9.0",
        "eyas_verify_steps_total 1.0",
    ):
        assert line in page.splitlines()


def test_a_call_is_measured_in_stages() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    trace = RequestTrace()
    prefill = EngineTimings(queue_ms=100.0, prefill_ms=200.0, role=Role.PREFILL)
    decode = EngineTimings(queue_ms=50.0, transfer_ms=300.0, transfer_path="shm", role=Role.DECODE)
    with metrics.meter() as meter:
        for index, timings in enumerate((prefill, decode)):
            trace.record(TokenEntry("r", 1, 0, index, (5,), timings=timings))
            meter.deltas([TextDelta(0, "a", (5,))])
            time.sleep(0.01)
        usage = UsageCounts(prompt_tokens=3, completion_tokens=2, accepted=3, verify_steps=2, cached_tokens=1)
        meter.ended(usage, [trace])

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    total = "eyas_request_stage_seconds_sum"
    assert value(total, stage="queue") == pytest.approx(0.1)  # the prefill's: decode's overlaps with it
    assert value(total, stage="prefill") == pytest.approx(0.2)
    assert value(total, stage="transfer") == pytest.approx(0.3)
    assert 0.01 <= (value(total, stage="first_decode") or 0.0) < 1.0
    assert value("eyas_acceptance_length_sum") == 2.5
    assert value("eyas_cached_prompt_tokens_total") == 1
    assert value("eyas_inter_token_latency_seconds_count") == 1
    assert value("eyas_time_to_first_token_seconds_count") == 1


def test_the_plain_histogram_shows_what_the_slow_one_does() -> None:
    bounds = (0.001, 0.01, 0.5)
    quick, slow = CollectorRegistry(), CollectorRegistry()
    histogram = PlainHistogram("gap_seconds", "Gaps", bounds, quick)
    reference = Histogram("gap_seconds", "Gaps", buckets=bounds, registry=slow)
    for value in (0.0005, 0.001, 0.0011, 0.25, 0.25, 7.0):
        histogram.observe(value)
        reference.observe(value)
    pages = [generate_latest(registry).decode().splitlines() for registry in (quick, slow)]
    assert pages[0] == [line for line in pages[1] if "_created" not in line]
