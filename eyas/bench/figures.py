"""A run as one flat JSON object, with the names and definitions of SGLang's `bench_serving`.

Where no sample exists the figure is null. Failed requests are counted, and enter no latency and no
throughput.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eyas.bench.records import RequestRecord, RunRecord
from eyas.bench.slo import LatencySlo

LATENCIES = ("e2e_latency", "ttft", "tpot", "itl")


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
