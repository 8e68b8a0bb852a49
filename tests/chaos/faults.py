"""The faults that a worker may suffer, in which order they come, and how each is caused.

A schedule is a function of its seed alone. Causing a fault needs process ids only. This module refuses to
know what a fault means for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from eyas.common.types import Role


class Kind(enum.StrEnum):
    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP, and SIGCONT later
    DRAIN = "drain"  # SIGTERM


class Phase(enum.StrEnum):
    """Where some request that the struck worker serves stands, as its gateway sees it."""

    IDLE = "idle"  # there are no requests
    SUBMITTED = "before admission"
    PREFILLING = "during prefill"
    STARTED = "after Started"
    TRANSFER = "during transfer"
    DECODING = "while decoding"


class Part(enum.StrEnum):
    """Which of a worker's processes is struck."""

    WHOLE = "worker"
    FRONT = "front"
    ENGINE = "engine"


@dataclass(frozen=True)
class Fault:
    kind: Kind
    role: str
    phase: Phase
    part: Part
    index: int  # which worker of the role; "worker": one that has all roles
    pause_s: float  # before the phase is waited for

    @property
    def worker(self) -> str:
        return f"{self.role}-{self.index}"


def schedule(seed: int, workers: int) -> Iterator[Fault]:
    """Rounds without end: each has every kind x role x phase once, in an order of its own."""
    rng = random.Random(f"faults/{seed}")
    while True:
        combinations = list(itertools.product((Kind.KILL, Kind.STOP), Role, Phase))
        combinations += [(Kind.DRAIN, role, rng.choice(list(Phase))) for role in Role]
        rng.shuffle(combinations)
        for kind, role, phase in combinations:
            part = Part.WHOLE if kind is Kind.DRAIN else rng.choice((Part.WHOLE, Part.WHOLE, *Part))
            yield Fault(kind, role, phase, part, rng.randrange(workers), rng.uniform(0.0, 2.0))


def each_worker(seed: int, kinds: Sequence[str], workers: int, phases: Sequence[Phase]) -> Iterator[Fault]:
    """Rounds without end, for a short campaign: each kills every worker once and stops every worker once.

    Kinds take turns: while a worker of one starts again, which takes long on a GPU, another is struck.
    """
    rng = random.Random(f"workers/{seed}")
    while True:
        turns = [list(itertools.product((Kind.KILL, Kind.STOP), range(workers))) for _ in kinds]
        for turn in turns:
            rng.shuffle(turn)
        for turn in zip(*turns, strict=True):
            for role, (kind, index) in zip(kinds, turn, strict=True):
                yield Fault(kind, role, rng.choice(phases), Part.WHOLE, index, rng.uniform(0.0, 2.0))


def strike(fault: Fault, front: int) -> list[int]:
    """Sends the signal now; gives the ids of the processes that got it. `front` leads the worker's group."""
    number = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGSTOP, Kind.DRAIN: signal.SIGTERM}[fault.kind]
    targets = {
        Part.WHOLE: [front] if fault.kind is Kind.DRAIN else [front, *engines(front)],
        Part.FRONT: [front],
        Part.ENGINE: engines(front),
    }[fault.part]
    for pid in targets:
        os.kill(pid, number)
    return targets


async def resume(pids: list[int], after_s: float) -> None:
    """SIGCONT to processes that were stopped; one that ended meanwhile needs none."""
    try:
        await asyncio.sleep(after_s)
    finally:
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)


def engines(front: int) -> list[int]:
    """The engine processes of a worker's front."""
    return [child.pid for child in psutil.Process(front).children() if _is_engine(child)]


def _is_engine(child: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
        return any("spawn_main" in word for word in child.cmdline())
    return False
