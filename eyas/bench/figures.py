"""A run as one flat JSON object, with the names and definitions of SGLang's `bench_serving`, and as a table.

Where no sample exists the figure is null. Failed requests are counted, and enter no latency and no
throughput. The table for people is followed by what may have distorted the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from eyas.bench.records import LatencySlo, RequestRecord, RunRecord
from eyas.bench.turns import by_turn, hit_rate, table

LATENCIES = ("e2e_latency", "ttft", "tpot", "itl")
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


def figures(run: RunRecord, slo: LatencySlo | None = None, details: bool = False) -> dict[str, Any]:
    """Everything that a line of a result file says. `details`: also a list per request for each quantity."""
    good = [record for record in run.records if not record.error]
    out = {**run.settings, "server_info": run.server_info, **_counts(run, good)}
    samples = latencies(good)
    for name in LATENCIES:
        out |= _spread(name, samples[name])
    out["max_itl_ms"] = 1e3 * max(samples["itl"]) if samples["itl"] else None
    out["concurrency"] = sum(samples["e2e_latency"]) / run.seconds
    out["accept_length"] = run.accept_length
    out |= _peaks(good)
    out |= _own(run, good, slo)
    return out | _details(run.records) if details else out


def latencies(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """The samples behind each of LATENCIES, in seconds."""
    return {
        "e2e_latency": [record.latency_s for record in records],
        "ttft": [record.ttft_s for record in records],
        "tpot": [record.tpot_s for record in records if record.tpot_s is not None],
        "itl": [gap for record in records for gap in record.itls_s],
    }


def _counts(run: RunRecord, good: list[RequestRecord]) -> dict[str, Any]:
    inputs = sum(record.prompt_tokens for record in good)
    outputs = sum(record.output_tokens for record in good)
    return {
        "duration": run.seconds,
        "completed": len(good),
        "total_input_tokens": inputs,
        "total_input_text_tokens": inputs,
        "total_input_vision_tokens": 0,
        "total_output_tokens": outputs,
        "total_output_tokens_retokenized": None,
        "request_throughput": len(good) / run.seconds,
        "input_throughput": inputs / run.seconds,
        "output_throughput": outputs / run.seconds,
        "total_throughput": (inputs + outputs) / run.seconds,
    }


def _spread(name: str, seconds: list[float]) -> dict[str, float | None]:
    keys = [f"{part}_{name}_ms" for part in ("mean", "median", "std", "p90", "p95", "p99")]
    if not seconds:
        return dict.fromkeys(keys)
    times = 1e3 * np.asarray(seconds)
    values = [times.mean(), np.median(times), times.std(), *np.percentile(times, (90, 95, 99))]
    return dict(zip(keys, map(float, values), strict=True))


def _peaks(good: list[RequestRecord]) -> dict[str, Any]:
    """The most tokens and the most requests within one second, counted from the first success's start.

    A chunk counts as the request's mean number of tokens per chunk.
    """
    if not good:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    zero = min(record.start_s for record in good)
    seconds = math.ceil(max(record.start_s + record.latency_s for record in good) - zero) + 1
    tokens, requests = np.zeros(seconds), np.zeros(seconds)
    for record in good:
        start = record.start_s - zero
        times = start + record.ttft_s + np.cumsum([0.0, *record.itls_s])
        np.add.at(tokens, np.minimum(times.astype(int), seconds - 1), record.output_tokens / len(times))
        requests[int(start) : int(start + record.latency_s) + 1] += 1
    return {"max_output_tokens_per_s": float(tokens.max()), "max_concurrent_requests": int(requests.max())}


def _own(run: RunRecord, good: list[RequestRecord], slo: LatencySlo | None) -> dict[str, Any]:
    """Fields that SGLang's object does not have."""
    out: dict[str, Any] = {
        "complete": run.complete,
        "failed": len(run.records) - len(good),
        "first_error": next((record.error for record in run.records if record.error), None),
        **_spread("ttft_with_wait", [record.waited_s + record.ttft_s for record in good]),
        "accepted_tokens": sum(record.accepted for record in good),
        "rejected_tokens": sum(record.rejected for record in good),
        "cache_hit_rate": hit_rate(good),
        "turns": by_turn(good),
        "client_cpu": run.client_cpu,
        "client_lag_ms": run.client_lag_ms,
    }
    if slo is not None:
        met = sum(slo.met(record) for record in run.records)
        out |= {
            "slo": str(slo),
            "goodput": met / run.seconds,
            "slo_attainment": met / max(1, len(run.records)),
        }
    names = dict.fromkeys(name for record in good for name in record.phases_ms)
    for name in names:
        out |= _spread(name, [1e-3 * record.phases_ms[name] for record in good if name in record.phases_ms])
    return out


def without_details(line: dict[str, Any]) -> dict[str, Any]:
    """`figures` with details, without them."""
    return {name: value for name, value in line.items() if name not in _details([])}


def _details(records: list[RequestRecord]) -> dict[str, Any]:
    """A list per quantity, with an entry per request; a failed one has no tokens."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [0 if record.error else record.output_tokens for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itls_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
        "start_times": [record.start_s for record in records],
        "e2e_latencies": [record.latency_s for record in records],
        "waits": [record.waited_s for record in records],
    }


def summary(figures: dict[str, Any]) -> str:
    """A plain-text summary of `eyas.bench.figures.figures`."""
    facts = [(name, value) for name, value in _facts(figures) if value is not None]
    width = max(len(name) for name, _ in facts)
    lines = [] if figures["complete"] else ["INCOMPLETE: interrupted; the figures are of what had ended"]
    lines += [f"{name:<{width}}  {value}" for name, value in facts]
    turns = ["", *table(figures["turns"])] if figures["turns"] else []
    return "\n".join([*lines, "", *_table(figures), *turns])


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
    yield "cached of prompts", _or_none(figures["cache_hit_rate"], ".1%")
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
