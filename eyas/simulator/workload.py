"""The load of a simulated cluster: arrivals, lengths and shared prefixes, as values from a seed.

Prefixes are hash ids of blocks, as traces have them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 512
"""Tokens per hash id, as in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request: when it comes, the tokens of its prompt and of its answer, and its blocks' ids.

    `blocks`: one id per whole block at the start of the prompt; the same id is the same tokens after the same
    tokens. Prompts without shared prefixes have none.
    """

    at_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RandomTraffic:
    """Lengths of independent requests: uniform from `shortest` times the length to the length.

    `shared`: the part of every prompt that is one of `prefixes` common texts, chosen at random. `burst`: so
    many requests come at the same moment.
    """

    input_len: int
    output_len: int
    shortest: float = 1.0
    shared: float = 0.0
    prefixes: int = 16
    burst: int = 1


@dataclass(frozen=True)
class ChatTraffic:
    """Conversations: each turn's prompt is everything said before and a new message.

    `pause_s`: the mean from one turn to the next. Turns come when they come, answered or not: the load does
    not slow down when the cluster does. A turn shares with the one before it the whole blocks of that one's
    prompt. The answer in between is the load's, not what was generated, so no cache holds it.
    """

    turns: int
    message: int
    output_len: int
    pause_s: float


def poisson(traffic: RandomTraffic, rate: float, count: int, seed: int) -> list[SimulatedRequest]:
    """`count` requests, `rate` per second in the mean. The same seed draws the same lengths at any rate."""
    lengths, gaps = random.Random(f"lengths {seed}"), random.Random(f"gaps {seed}")
    at_s, arrivals = 0.0, []
    for number in range(count):
        if number % traffic.burst == 0:
            at_s += gaps.expovariate(rate / traffic.burst)
        arrivals.append(_draw(traffic, at_s, lengths))
    return arrivals


def chats(load: ChatTraffic, rate: float, count: int, seed: int) -> list[SimulatedRequest]:
    """`count` requests in all, `rate` turns per second in the mean."""
    rng = random.Random(f"chats {seed}")
    started, arrivals, blocks = 0.0, list[SimulatedRequest](), itertools.count()
    while len(arrivals) < count:
        started += rng.expovariate(rate / load.turns)
        at_s, prompt, said = started, 0, list[int]()
        for _ in range(load.turns):
            prompt += load.message
            said += [next(blocks) for _ in range(prompt // BLOCK_TOKENS - len(said))]
            arrivals.append(SimulatedRequest(at_s, prompt, load.output_len, tuple(said)))
            prompt += load.output_len
            at_s += rng.expovariate(1 / load.pause_s)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)[:count]


def means(arrivals: Sequence[SimulatedRequest]) -> tuple[float, float, float]:
    """Mean tokens of a prompt and of an answer, and the spread of prompts (see
    `gateway.routing.capacity.RequestMix`)."""
    count = max(len(arrivals), 1)
    prompt = sum(a.prompt for a in arrivals) / count
    square = sum(a.prompt**2 for a in arrivals) / count
    return prompt, sum(a.output for a in arrivals) / count, square / max(prompt, 1.0) ** 2


def _draw(traffic: RandomTraffic, at_s: float, rng: random.Random) -> SimulatedRequest:
    prompt = rng.randint(max(1, int(traffic.input_len * traffic.shortest)), traffic.input_len)
    output = rng.randint(max(1, int(traffic.output_len * traffic.shortest)), traffic.output_len)
    common = rng.randrange(traffic.prefixes)
    shared = int(prompt * traffic.shared) // BLOCK_TOKENS
    if not shared:
        return SimulatedRequest(at_s, prompt, output)
    return SimulatedRequest(
        at_s, prompt, output, tuple(-1 - common - traffic.prefixes * i for i in range(shared))
    )
