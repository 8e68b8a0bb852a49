"""The jobs of one run: prompts, lengths, and when each job starts.

Pure values from a seed, so that two servers are measured with the same jobs: what is drawn never depends on a
vocabulary or a server.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST_PLAIN_ID = 10  # ids below it are special in most vocabularies
DRAWN_IDS = 128000  # ids are drawn below it and mapped into the vocabulary

Prompt = tuple[int, ...] | str


@dataclass(frozen=True)
class JobTurn:
    """One request of a job: token ids or a text, and the most tokens of its answer.

    `think_s`: it is sent so long after the answer before it. `subagents`: jobs that run to their ends before,
    all at once, and begin with the conversation so far. `messages`: what is said instead of the text; if
    `whole`, all of the conversation, with the answers that were recorded.
    """

    prompt: Prompt
    max_tokens: int
    think_s: float = 0.0
    subagents: tuple[LoadJob, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    whole: bool = False


@dataclass(frozen=True)
class LoadJob:
    """One request, or a conversation whose next turn waits for the answer to the one before.

    `due_s`: when it starts, in seconds since the run's zero; None: as the load's arrivals say. `may_stop`:
    answers may end before `max_tokens`. `schema`: a JSON schema that answers must follow. `system`: a text
    before a conversation.
    """

    turns: tuple[JobTurn, ...]
    due_s: float | None = None
    may_stop: bool = False
    schema: Mapping[str, Any] | None = None
    system: str = ""

    @property
    def requests(self) -> int:
        """Its requests, and those of its sub-agents."""
        return sum(1 + sum(each.requests for each in turn.subagents) for turn in self.turns)

    @classmethod
    def single(cls, prompt: Prompt, max_tokens: int, due_s: float | None = None) -> LoadJob:
        """A job of one request."""
        return cls((JobTurn(prompt, max_tokens),), due_s)


def generator(seed: int, what: str) -> random.Random:
    """A generator of its own for each thing that is drawn, so that none shifts another."""
    return random.Random(f"{what} {seed}")


def draw_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    """Token ids below DRAWN_IDS, of no vocabulary yet."""
    return tuple(rng.randrange(FIRST_PLAIN_ID, DRAWN_IDS) for _ in range(count))


def fit(jobs: Iterable[LoadJob], vocab_size: int) -> list[LoadJob]:
    """A copy of the jobs with token ids of a vocabulary that has `vocab_size` of them."""
    plain = vocab_size - FIRST_PLAIN_ID
    table = [FIRST_PLAIN_ID + (id - FIRST_PLAIN_ID) % plain for id in range(DRAWN_IDS)]

    def fitted(turn: JobTurn) -> JobTurn:
        if isinstance(turn.prompt, str):
            return turn
        return dataclasses.replace(turn, prompt=tuple(table[id] for id in turn.prompt))

    return [dataclasses.replace(job, turns=tuple(map(fitted, job.turns))) for job in jobs]


def draw_lengths(rng: random.Random, longest: int, ratio: float, count: int) -> list[int]:
    """Whole numbers, each as likely as any other from `longest` * `ratio` (at least 1) to `longest`."""
    return [rng.randint(max(1, int(longest * ratio)), longest) for _ in range(count)]


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Endless arrival times in seconds, from 0 on; `rate` per second, or infinite: all at 0."""
    due_s = 0.0
    while True:
        yield due_s
        due_s += rng.expovariate(rate) if rate != float("inf") else 0.0


def arrivals(jobs: Sequence[LoadJob], rate: float, seed: int) -> list[float]:
    """The due time of each job, in seconds since the run's zero: as it says itself, else Poisson by
    `rate`.
    """
    drawn = poisson(generator(seed, "arrivals"), rate)
    return [due if job.due_s is None else job.due_s for job, due in zip(jobs, drawn, strict=False)]


def unlike(prompt: Prompt) -> Prompt:
    """A prompt of the same length without a common prefix, for warm-up: no prefix cache learns the first."""
    return prompt[::-1] if isinstance(prompt, tuple) else " ".join(reversed(prompt.split()))
