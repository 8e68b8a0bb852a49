"""Estimates the highest request rate at which a cluster meets its latency targets, by queueing theory.

The estimate is closed-form and assumes a steady state with Poisson arrivals and evenly spread load.
`eyas.simulator` simulates single requests instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eyas.common.prompt_room import room_behind
from gateway.routing.placement import LatencyTargets, MeasuredRates

TAIL = 0.1
"""The part of the requests that may miss a target."""

LONG = 1.28
"""Standard deviations from the mean of a normal distribution to its TAIL."""

BUNCH = 1.945
"""The number of requests that arrive together with a request at the TAIL, over that of the mean request.
Bunches have geometric sizes, and a request at the TAIL is in the middle of a large one.
"""

IDLE = 1e-9
"""A request rate, as a part of the rate of steps, at which no two requests overlap."""

TTFT_SLACK, TPOT_SLACK = 4.0, 1.5
"""The target that replaces an unattainable one, as a multiple of the latency of a request alone: a prompt
waits for other prompts, and a step computes other sequences.
"""

UNBOUNDED = 1e5
"""More sequences than any worker decodes."""

HALVINGS = 24
"""The halvings of the gap between a rate that the workers bear and one that they do not."""

ROUNDS = 40
"""The rounds of the iteration to the steady state."""


@dataclass(frozen=True)
class RequestMix:
    """The mean request, in tokens: of the prompt, those of it that are not cached (`missing`), of the answer.

    `spread`: the mean square of the uncached tokens over the square of their mean; 1: all alike. `burst`: the
    variance of the number of requests per second over its mean; 1: Poisson.
    """

    prompt: float
    missing: float
    output: float
    spread: float = 1.0
    burst: float = 1.0


@dataclass(frozen=True)
class SteadyLatency:
    """Seconds to the first token, which at most TAIL of the requests exceed, and per output token."""

    ttft_s: float
    tpot_s: float


OVERLOADED = SteadyLatency(math.inf, math.inf)


def within_reach(mix: RequestMix, workers: int, rates: MeasuredRates) -> LatencyTargets:
    """The targets. One that even a request alone misses is replaced by a multiple of that request's latency,
    so that the other target still distinguishes layouts.
    """
    rate = IDLE * workers / rates.times.step_s(1, 0)
    alone = [steady(mix, rate, workers, prefilling, rates) for prefilling in range(workers)]
    best = LatencyTargets(min(latency.ttft_s for latency in alone), min(latency.tpot_s for latency in alone))
    ttft, tpot = rates.targets.ttft_s, rates.targets.tpot_s
    return LatencyTargets(
        ttft if best.ttft_s <= ttft else TTFT_SLACK * best.ttft_s,
        tpot if best.tpot_s <= tpot else TPOT_SLACK * best.tpot_s,
    )


def capacity(mix: RequestMix, workers: int, prefilling: int, rates: MeasuredRates) -> float:
    """The highest rate (requests per second) within the targets, with `prefilling` workers for prompts only.

    With 0 of them every worker does both. 0.0 if not even one request meets the targets.
    """

    def good(rate: float) -> bool:
        outcome = steady(mix, rate, workers, prefilling, rates)
        return outcome.ttft_s <= rates.targets.ttft_s and outcome.tpot_s <= rates.targets.tpot_s

    low, high = 0.0, workers / rates.times.step_s(1, 0)
    if not good(high * IDLE):
        return 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def steady(
    mix: RequestMix, rate: float, workers: int, prefilling: int, rates: MeasuredRates
) -> SteadyLatency:
    """The steady state under `rate` requests per second; OVERLOADED if there is none."""
    if prefilling:
        tpot = _decoding(mix, rate, workers - prefilling, 0.0, rates)
        return SteadyLatency(_first(mix, _prompt_s(mix, rates, 0), rate, prefilling), tpot)
    tpot = _decoding(mix, rate, workers, mix.missing, rates)
    if math.isinf(tpot):
        return OVERLOADED
    sequences = rate / workers * mix.output * tpot
    return SteadyLatency(_first(mix, _prompt_s(mix, rates, sequences), rate, workers), tpot)


def _context(mix: RequestMix) -> float:
    return mix.prompt + mix.output / 2


def _prompt_s(mix: RequestMix, rates: MeasuredRates, sequences: float) -> tuple[float, float]:
    """Seconds to compute a mean prompt in steps with `sequences`, for a prompt alone and for a queue of
    prompts: a long prompt alone gets only some rows of each step, a queue all of them.
    """
    decoding, missing = round(sequences), max(round(mix.missing), 1)
    room = room_behind(rates.budget, decoding, missing, 0)

    def seconds(most: int) -> float:
        rows = min(most, missing)
        pairs = rows * (mix.prompt - mix.missing / 2)
        return missing / rows * rates.times.step_s(decoding, decoding * _context(mix), rows, pairs)

    return seconds(room.of(missing)), seconds(room.rows)


def _first(mix: RequestMix, prompt_s: tuple[float, float], rate: float, servers: int) -> float:
    """The TAIL of the TTFT in one queue for `servers`, after Pollaczek, Khinchine and Sakasegawa. `prompt_s`:
    see `_prompt_s`.

    The last of the requests that arrive together wait for the others.
    """
    alone_s, service_s = prompt_s
    busy = rate * service_s / servers
    if busy >= 1.0:
        return math.inf
    wait = service_s * mix.spread * mix.burst / (2 * servers * (1 - busy))  # the mean of requests that wait
    waiters = busy ** (math.sqrt(2 * (servers + 1)) - 1)
    waiting = wait * math.log(waiters / TAIL) if waiters > TAIL else 0.0
    longest = alone_s * (1 + LONG * math.sqrt(mix.spread - 1))
    before = max(mix.burst / servers - 1, 0.0) * service_s
    return longest + (1 - TAIL) * before + waiting


def _decoding(mix: RequestMix, all_rate: float, workers: int, prompts: float, rates: MeasuredRates) -> float:
    """Seconds per output token on `workers` that share the rate and compute `prompts` tokens per request.

    While a request decodes, a Poisson number of prompts arrives. Each makes some steps longer, as do the
    prompts that arrived with the request. Requests of a bunch are computed in large steps and decode
    concurrently.
    """
    rate, burst = all_rate / workers, 1.0 + (mix.burst - 1.0) / workers
    plain = mean = rates.times.step_s(1, _context(mix))
    for _ in range(ROUNDS):
        sequences = rate * mix.output * mean  # by Little's law
        if sequences > UNBOUNDED:
            return math.inf
        decoding, context = max(round(sequences), 1), max(sequences, 1.0) * _context(mix)
        plain, slower, estimate = rates.times.step_s(decoding, context), 0.0, 0.0
        if prompts:
            tokens = max(round(prompts), 1)
            # All rows, also of a long prompt: what a prompt adds does not depend on how it is cut.
            together = max(round(prompts * burst), tokens)
            rows = min(room_behind(rates.budget, decoding, tokens, together - tokens).rows, together)
            mixed = rates.times.step_s(decoding, context, rows, rows * mix.prompt / 2)
            slower = prompts / rows * (mixed - plain)
            if rate * prompts / rows * mixed >= 1.0 or rate * slower >= 1.0:
                return math.inf
        estimate = plain / (1.0 - rate * slower)
        if abs(estimate - mean) <= 1e-6 * mean:
            break
        mean = (mean + estimate) / 2
    coming, own = rate * mix.output * mean, BUNCH * (burst - 1)
    chance = LONG * math.sqrt(coming * burst) / (1.0 - rate * slower)
    beside = coming + own + chance
    crowded = rates.times.step_s(max(round(beside), 1), beside * _context(mix))
    more = own + chance * math.sqrt(mix.spread)
    return mean + crowded - plain + slower * more / mix.output
