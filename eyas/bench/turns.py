"""The figures of conversations turn by turn: how much of a prompt was cached, and how fast answers came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from eyas.bench.records import RequestRecord

FIRSTS = (1, 2, 6, 11, 21, 41)
"""The first turns of the rows."""
TITLES = ("turns", "requests", "tokens in", "cached", "TTFT p50", "TTFT p90", "tokens/s")


def hit_rate(records: Sequence[RequestRecord]) -> float | None:
    """The cached part of all prompts; None: the server does not say of any."""
    said = [record for record in records if record.cached_tokens is not None]
    prompts = sum(record.prompt_tokens for record in said)
    return sum(record.cached_tokens or 0 for record in said) / prompts if prompts else None


def by_turn(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """A row for each of FIRSTS that successful requests reached; none if all are first turns."""
    if all(record.turn == 1 for record in records):
        return []
    rows = []
    for first, behind in zip(FIRSTS, (*FIRSTS[1:], None), strict=True):
        part = [each for each in records if first <= each.turn and (behind is None or each.turn < behind)]
        if not part:
            continue
        tpots = [each.tpot_s for each in part if each.tpot_s]
        times = 1e3 * np.asarray([each.ttft_s for each in part])
        rows.append(
            {
                "first_turn": first,
                "last_turn": max(each.turn for each in part),
                "requests": len(part),
                "mean_input_tokens": sum(each.prompt_tokens for each in part) / len(part),
                "cache_hit_rate": hit_rate(part),
                "median_ttft_ms": float(np.median(times)),
                "p90_ttft_ms": float(np.percentile(times, 90)),
                "median_tokens_per_s": 1 / float(np.median(tpots)) if tpots else None,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows for people; tokens per second of one answer, behind its first token."""
    yield "".join(f"{title:>11}" for title in TITLES)
    for row in rows:
        first, last = row["first_turn"], row["last_turn"]
        cells = [
            f"{first}" if first == last else f"{first}-{last}",
            f"{row['requests']:,}",
            f"{row['mean_input_tokens']:,.0f}",
            "-" if row["cache_hit_rate"] is None else f"{row['cache_hit_rate']:.1%}",
            f"{row['median_ttft_ms']:,.1f}",
            f"{row['p90_ttft_ms']:,.1f}",
            "-" if row["median_tokens_per_s"] is None else f"{row['median_tokens_per_s']:,.1f}",
        ]
        yield "".join(f"{cell:>11}" for cell in cells)
