"""One run as a table for people, and what may have distorted it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from eyas.bench.records import RunRecord

CPU_BOUND = 0.7  # of a core
LAG_BOUND_MS = 5.0
COLUMNS = ("mean", "median", "p90", "p95", "p99")
ROWS = {
    "TTFT": "ttft",
    "TTFT with waiting": "ttft_with_wait",
    "TPOT": "tpot",
    "ITL": "itl",
    "end to end": "e2e_latency",
}


def summary(figures: dict[str, Any]) -> str:
    """A plain-text summary of `eyas.bench.figures.figures`."""
    facts = [(name, value) for name, value in _facts(figures) if value is not None]
    width = max(len(name) for name, _ in facts)
    lines = [] if figures["complete"] else ["INCOMPLETE: interrupted; the figures are of what had ended"]
    lines += [f"{name:<{width}}  {value}" for name, value in facts]
    return "\n".join([*lines, "", *_table(figures)])


def warn(run: RunRecord) -> None:
    """Says on standard error what may have distorted the run: the client at its limit."""
    warnings = []
    if run.client_cpu > CPU_BOUND:
        warnings.append(f"the client used {run.client_cpu:.0%} of a core: it may have been the slower side")
    if run.client_lag_ms > LAG_BOUND_MS:
        warnings.append(f"the client was up to {run.client_lag_ms:.1f} ms late (p99): latencies include that")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _facts(figures: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    yield "backend", figures["backend"]
    yield "dataset", f"{figures['dataset_name']}, seed {figures['seed']}"
    yield "request rate", said_rate(figures["request_rate"])
    yield "at most at a time", _or_none(figures["max_concurrency"], "d")
    yield "succeeded", f"{figures['completed']:,} of {figures['completed'] + figures['failed']:,}"
    yield "first error", figures["first_error"]
    yield "seconds", f"{figures['duration']:.2f}"
    yield "tokens in", f"{figures['total_input_tokens']:,}  ({figures['input_throughput']:,.1f} per second)"
    peak = f"{figures['output_throughput']:,.1f} per second, peak {figures['max_output_tokens_per_s']:,.0f}"
    yield "tokens out", f"{figures['total_output_tokens']:,}  ({peak})"
    yield "requests", f"{figures['request_throughput']:.2f} per second"
    most = figures["max_concurrent_requests"]
    yield "under way", f"{figures['concurrency']:.1f} on average, at most {most} in the same second"
    yield "acceptance length", _or_none(figures["accept_length"], ".2f")
    if "slo" in figures:
        met = f"{figures['goodput']:.2f} good requests per second, {figures['slo_attainment']:.1%} of all"
        yield f"under {figures['slo']}", met
    yield "client", f"{figures['client_cpu']:.0%} of a core, {figures['client_lag_ms']:.1f} ms late (p99)"


def said_rate(rate: float | str) -> str:
    """The times of requests, in words; `rate` per second, infinite, or a name."""
    if rate == float("inf"):
        return "all at once"
    return f"{rate:g} per second" if isinstance(rate, float) else rate


def _or_none(value: float | None, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"


def _table(figures: dict[str, Any]) -> Iterator[str]:
    yield f"{'ms':<20}" + "".join(f"{column:>11}" for column in COLUMNS)
    phases = [key[5:-3] for key in figures if key.startswith("mean_") and key.endswith("_ms")]
    known = set(ROWS.values())
    rows = ROWS | {name.replace("_", " "): name for name in phases if name not in known}
    for title, name in rows.items():
        cells = (figures.get(f"{column}_{name}_ms") for column in COLUMNS)
        yield f"{title:<20}" + "".join(f"{'-' if cell is None else f'{cell:,.2f}':>11}" for cell in cells)
