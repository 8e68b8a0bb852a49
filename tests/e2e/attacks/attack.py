"""What an attack is: a bounded number of calls to a server on this machine, and how they are answered.

It knows tallies and limits. It refuses to know what is sent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

HOST = "127.0.0.1"
SILENCE = "silence"
"""No answer and no end within the time that an attacker waits: never allowed."""


@dataclass(frozen=True)
class Target:
    """A server, and the key that attackers have there: theirs is the worst case."""

    port: int
    grpc_port: int
    key: str

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def address(self) -> str:
        return f"{HOST}:{self.grpc_port}"

    @property
    def authorization(self) -> str:
        return f"Bearer {self.key}"


@dataclass
class Tally:
    """By answer (an HTTP status, a gRPC code, `closed`): how often. `slowest_s`: until the latest came."""

    answers: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def note(self, answer: str, began: float) -> None:
        """An answer to what began at this monotonic time."""
        self.answers[answer] += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)


Run = Callable[[Target, Tally], Awaitable[None]]


@dataclass(frozen=True)
class Attack:
    """`allowed`: the answers that it may get. `within_s`: in what time each must come."""

    name: str
    run: Run
    allowed: frozenset[str]
    within_s: float

    def problems(self, tally: Tally) -> list[str]:
        """What is wrong with the answers that it got; an attack without any was none."""
        wrong = [
            f"{count} x {answer}" for answer, count in tally.answers.items() if answer not in self.allowed
        ]
        if not tally.answers:
            wrong.append("no answer was counted")
        if tally.slowest_s > self.within_s:
            wrong.append(f"an answer took {tally.slowest_s:.1f} s")
        return wrong


def attack(name: str, run: Run, allowed: str, within_s: float) -> Attack:
    """`allowed`: words."""
    return Attack(name, run, frozenset(allowed.split()), within_s)
