"""What the console is told of the time before it opened: bounded, and no word of a caller."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from eyas.common.errors import InvalidRequest, Overloaded
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.recent import FAILURES, SAMPLES, GatewayTimeline
from tests.unit.console_node import needs_node, run


def test_samples_hold_the_totals_of_their_moment_and_are_bounded() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.timeline.sample()
    metrics.generation_tokens.inc(7)
    metrics.responses.labels("/v1/completions", 429).inc()
    for _ in range(SAMPLES):
        metrics.timeline.sample()
    told = msgspec.to_builtins(metrics.timeline.snapshot())
    assert len(told["samples"]) == SAMPLES
    names = [series["name"] for series in told["series"]]
    _, values = told["samples"][-1]
    assert values[names.index("eyas_generation_tokens_total")] == 7.0
    assert values[names.index("eyas_http_responses_total")] == 1.0
    assert len(msgspec.json.encode(told)) < 1 << 20


def test_failures_are_bounded_and_quote_no_request() -> None:
    timeline = GatewayTimeline(CollectorRegistry())
    for _ in range(FAILURES):
        timeline.failed("/v1/completions", 400, InvalidRequest("stop: Xylograph is bad"))
    timeline.failed("/v1/completions", 429, Overloaded("the queue is full"))
    assert len(timeline.failures) == FAILURES
    first, second = timeline.failures[:2]
    assert (first.status, first.code, first.reason) == (429, "overloaded", "the queue is full")
    assert (second.status, second.code, second.reason) == (400, "invalid_request", "")


@needs_node
def test_the_page_reads_samples_as_it_reads_metrics() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    for tokens in (3, 4):
        metrics.generation_tokens.inc(tokens)
        metrics.timeline.sample()
    program = """
      const { increase, pagesOf } = await use("metrics.js");
      const [first, last] = pagesOf(given);
      return [increase(first.page, last.page, "eyas_generation_tokens_total"), first.ago >= 0, last.ago];
    """
    assert run(program, msgspec.to_builtins(metrics.timeline.snapshot())) == [4, True, 0]


@needs_node
@pytest.mark.parametrize(
    ("values", "low", "high"), [([], 1, 10), ([0.4, 900], 0.1, 1000), ([5, 5], 1, 10), ([100], 100, 1000)]
)
def test_a_logarithmic_scale_ends_at_powers_of_ten(values: list[float], low: float, high: float) -> None:
    program = 'const { decades } = await use("chart.js"); return decades(given);'
    assert run(program, values) == {"low": pytest.approx(low), "high": pytest.approx(high)}
