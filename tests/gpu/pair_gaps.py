"""Gaps between the tokens of running streams while long prompts arrive: two unified workers against a split.

    python -m tests.gpu.pair_gaps --out DIR [--rate 2] [SERVE FLAGS]

Steady streams start at once; after LEAD_S, prompts come at even intervals. Both layouts get the same
requests. A run takes 20 to 45 s beside the start. `--device cpu --streams 4 --prompt 200 --steady-answer 300
--count 8` tries it with the embedded model.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from eyas.bench.jobs import LoadJob
from eyas.bench.records import RequestRecord
from eyas.bench.saved import Floats
from tests.gpu.pair_load import Sent, send, token_ids
from tests.gpu.pair_rig import Served, Setting, Variant, add_setting, make_setting, rounded, served, step

LEAD_S = 4.0
STEADY_PROMPT, PROMPT_ANSWER = 256, 16
RUN_S, DRAIN_S = 110.0, 60.0
SHARE = 0.99
RESAMPLES, LEVEL, SEED = 1000, 0.95, 1
REACH = 0.5


@dataclass(frozen=True)
class Load:
    """`streams` of `answer` tokens each; `count` prompts of `prompt` tokens, `rate` per second."""

    streams: int
    answer: int
    prompt: int
    rate: float
    count: int

    def jobs(self, vocabulary: int) -> list[LoadJob]:
        """The steady streams, then the prompts, with their due times."""
        steady = [(STEADY_PROMPT, self.answer, 0.0)] * self.streams
        asked = [(self.prompt, PROMPT_ANSWER, LEAD_S + i / self.rate) for i in range(self.count)]
        return [
            LoadJob.single(token_ids(vocabulary, prompt, SEED, number), answer, due_s)
            for number, (prompt, answer, due_s) in enumerate([*steady, *asked])
        ]


@dataclass(frozen=True)
class Gaps:
    """Seconds, an array per stream: before the prompts, and from the first arrival to the last end of one.

    `whole`: streams that lasted until then. `counted`: the share of their tokens whose arrival was seen.
    """

    quiet: list[Floats]
    beside: list[Floats]
    whole: int
    counted: float


def main() -> int:
    """The command line; 1 if some step failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_setting(parser, ("unified", "split"))
    add = parser.add_argument
    add("--streams", type=int, default=32, help="steady ones (%(default)d)")
    add("--steady-answer", type=int, default=3200, help="their tokens (%(default)d)")
    add("--prompt", type=int, default=8192, help="tokens of a prompt that arrives (%(default)d)")
    add("--rate", type=float, default=2.0, help="prompts per second (%(default)g)")
    add("--count", type=int, default=24, help="prompts (%(default)d)")
    args, serve = parser.parse_known_args()
    load = Load(args.streams, args.steady_answer, args.prompt, args.rate, args.count)
    setting = make_setting(args, serve, "gaps")
    uvloop.run(_measure(setting, args.layouts, load))
    return int(setting.journal.failed > 0)


async def _measure(setting: Setting, variants: Sequence[Variant], load: Load) -> None:
    found: dict[str, Gaps] = {}
    for variant in variants:
        await step(setting, str(variant), setting.left_s, _layout(setting, variant, load, found))
    unified = [gaps for name, gaps in found.items() if name.startswith("unified")]
    split = found.get("split")
    if unified and split:
        best = min(unified, key=lambda gaps: float(np.quantile(_pooled(gaps.beside), SHARE)))
        value, low, high = ratio(best.beside, split.beside)
        setting.journal.write("ratio", p99=value, low=low, high=high)
        setting.journal.say(
            f"p99 of gaps, split over unified: {value:.3f} ({low:.3f} to {high:.3f}); reach: at most {REACH}"
        )


async def _layout(setting: Setting, variant: Variant, load: Load, found: dict[str, Gaps]) -> None:
    async with served(setting, variant) as cluster, asyncio.timeout(RUN_S):
        await _warm_up(cluster, load)
        sent = await send(cluster.target, load.jobs(cluster.vocabulary), DRAIN_S)
    steady, asked = sent.records[: load.streams], sent.records[load.streams :]
    firsts = [record.ttft_s + record.waited_s for record in asked if not record.error]
    if not firsts:
        raise RuntimeError(f"no prompt was answered: {asked[0].error}")
    found[str(variant)] = gaps = read_gaps(
        steady, LEAD_S, max(r.start_s + r.latency_s for r in asked if not r.error)
    )
    _tell(setting, str(variant), gaps, np.asarray(firsts), sent)


async def _warm_up(cluster: Served, load: Load) -> None:
    """As many prompts as workers, and some more."""
    ids = [token_ids(cluster.vocabulary, load.prompt, SEED + 1, number) for number in range(4)]
    await send(cluster.target, [LoadJob.single(one, PROMPT_ANSWER, 0.0) for one in ids], DRAIN_S)


def read_gaps(steady: Sequence[RequestRecord], begin_s: float, end_s: float) -> Gaps:
    """The gaps of streams that end before `begin_s`, and those that end between it and `end_s`."""
    quiet, beside, whole, seen, tokens = [], [], 0, 0, 0
    for record in steady:
        if record.error:
            continue
        gaps = np.asarray(record.itls_s)
        at = record.start_s + record.ttft_s + np.cumsum(gaps)
        quiet.append(gaps[at < begin_s])
        beside.append(gaps[(at >= begin_s) & (at < end_s)])
        whole += bool(len(at) and at[-1] >= end_s)
        seen, tokens = seen + len(gaps) + 1, tokens + record.output_tokens
    return Gaps(quiet, beside, whole, seen / max(tokens, 1))


def ratio(first: Sequence[Floats], second: Sequence[Floats]) -> tuple[float, float, float]:
    """p99 of the second's gaps over the first's, and an interval: the same streams are drawn for both."""
    rng, streams = np.random.default_rng(SEED), min(len(first), len(second))
    values = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(streams, size=streams)
        one, other = (np.quantile(_pooled([side[i] for i in drawn]), SHARE) for side in (first, second))
        values.append(other / one)
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = np.quantile(_pooled(second), SHARE) / np.quantile(_pooled(first), SHARE)
    return float(value), float(low), float(high)


def _pooled(gaps: Sequence[Floats]) -> Floats:
    return np.concatenate(gaps) if len(gaps) else np.zeros(0)


def _tell(setting: Setting, name: str, gaps: Gaps, firsts: Floats, sent: Sent) -> None:
    failed = [record.error for record in sent.records if record.error]
    lines = {"before": _pooled(gaps.quiet), "beside": _pooled(gaps.beside), "TTFT of prompts": firsts}
    spreads: dict[str, Any] = {}
    for what, seconds in lines.items():
        spread = 1e3 * np.array([*np.quantile(seconds, (0.5, 0.9, 0.99)), seconds.max()])
        spreads[what] = rounded(spread.tolist())
        shown = ", ".join(f"{value:.2f}" for value in spread)
        setting.journal.say(f"{name:<12} {what:<16} {len(seconds):>7}  p50, p90, p99, max ms: {shown}")
    setting.journal.say(
        f"{name:<12} {gaps.whole} streams lasted, {gaps.counted:.1%} of tokens seen, {len(failed)} failed, "
        f"client {sent.client_cpu:.2f} of a core, late by {sent.client_lag_ms:.1f} ms"
    )
    setting.journal.write(
        "gaps", layout=name, ms=spreads, lasted=gaps.whole, seen=gaps.counted, failed=failed,
        client_cpu=sent.client_cpu, client_lag_ms=sent.client_lag_ms,
        beside_s=[rounded(g.tolist()) for g in gaps.beside],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
