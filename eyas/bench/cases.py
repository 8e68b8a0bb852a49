"""The named cases of `eyas bench suite`: what is sent in each measurement.

Pure values from a seed, so that two servers are measured with the same requests: token ids are of no
vocabulary yet.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass

from eyas.bench.jobs import JobTurn, LoadJob, draw_ids, poisson
from eyas.common.errors import ConfigError

CLOSED = {"bs1": (1, 256, 512, 2), "bs8": (8, 256, 512, 8), "bs32": (32, 256, 512, 32)}
POISSON = {"s1k": 1024, "s8k": 8192}  # longest prompt
POISSON_RATE = 16.0  # requests per second
OPEN_REQUESTS = 200
LONGEST_ANSWER = 1024
FEWEST_CHATS = 32
CASES = {
    "bs1 bs8 bs32": "1, 8 or 32 requests at once; 256 tokens in, 512 out",
    "s1k s8k": f"{OPEN_REQUESTS} requests, {POISSON_RATE:g} per second; at most 1,024 or 8,192 tokens in",
    "inf1k": "the requests of s1k, all at once",
    "chatC": "C chats at once, temperature 0, to their end: chat1 chat8 ...",
    "CxIxOxN": "C at once, I tokens in, O out, N requests: 4x128x64x16 ...",
}
CHATS = (
    "What is the capital of France?",
    "Tom has 12 apples and buys 7 more. How many apples does Tom have?",
    "List three fruits.",
    "How many centimeters are there in 3 meters?",
    "Which country has Tokyo as its capital?",
    "A box holds 8 pens. How many pens are in 6 boxes?",
    "Hello! How are you today?",
    "Write a Python function that adds two numbers.",
)


@dataclass(frozen=True)
class LoadCase:
    """A named set of jobs, at most `concurrency` at once; `rate`: Poisson arrivals per second, if any."""

    name: str
    jobs: tuple[LoadJob, ...]
    concurrency: int
    rate: float | None = None


def make_case(name: str, seed: int = 1) -> LoadCase:
    """One of CASES, by name. Raises ConfigError for anything else."""
    rng = random.Random(seed)
    if name in POISSON or name == "inf1k":
        return _open(name, rng)
    if chat := re.fullmatch(r"chat([1-9]\d*)", name):
        concurrency = int(chat[1])
        prompts = itertools.islice(itertools.cycle(CHATS), max(concurrency * 4, FEWEST_CHATS))
        return LoadCase(
            name, tuple(LoadJob((JobTurn(prompt, 128),), may_stop=True) for prompt in prompts), concurrency
        )
    if shape := re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", name):
        concurrency, prompt, answer, count = map(int, shape.groups())
    elif name in CLOSED:
        concurrency, prompt, answer, count = CLOSED[name]
    else:
        raise ConfigError(f"CASE: {name!r} is none of {' '.join(CASES)}", param="CASE")
    if 0 in (concurrency, prompt, answer, count):
        raise ConfigError(f"CASE: {name!r} has a zero", param="CASE")
    jobs = (LoadJob.single(draw_ids(rng, prompt), answer) for _ in range(count))
    return LoadCase(name, tuple(jobs), concurrency)


def _open(name: str, rng: random.Random) -> LoadCase:
    """Draws a prompt's length, its ids, the answer's length, and again; then every arrival.

    This order is part of the case: figures of other servers were measured with it.
    """
    longest = POISSON.get(name, 1024)
    turns = [
        (draw_ids(rng, rng.randint(1, longest)), rng.randint(1, LONGEST_ANSWER)) for _ in range(OPEN_REQUESTS)
    ]
    rate = None if name == "inf1k" else POISSON_RATE
    dues = poisson(rng, rate or float("inf"))
    jobs = (LoadJob.single(ids, answer, due) for (ids, answer), due in zip(turns, dues, strict=False))
    return LoadCase(name, tuple(jobs), OPEN_REQUESTS, rate)
