"""What parts of the long comparison for agents came to: kept in a file, and summed up by way and by format.

It knows counts. It refuses to know what is asked and how answers are judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from tests.e2e.lossless import Finding, Variant


class Tally(msgspec.Struct):
    """What one way did with some of the questions. The lists have a line per answer."""

    answers: int = 0
    tokens: int = 0
    valid: int = 0
    cut: int = 0
    invalid: list[str] = []
    differing: list[str] = []
    failures: list[str] = []
    verify_steps: int = 0
    accepted: int = 0
    preemptions: int = 0
    seconds: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(mine + theirs for mine, theirs in zip(_values(self), _values(other), strict=True)))

    def problem(self, variant: Variant) -> str:
        """What the way must not do, and did; empty: nothing."""
        if wrong := [*self.failures, *self.invalid, *(f"differs: {line}" for line in self.differing)]:
            return wrong[0]
        if variant.speculates and not self.accepted:
            return "no draft was ever accepted"
        if variant.preempts and not self.preemptions:
            return "nothing was preempted"
        return ""


class Part(msgspec.Struct):
    """`count` schemas and as many dialogues of this seed: by way, and the reference's verdicts by kind."""

    seed: int
    count: int
    ways: dict[str, Tally]
    kinds: dict[str, dict[str, int]]


class Results:
    """The parts that are done. `path`: the file that keeps them, a line each; None: nothing does."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.parts: list[Part] = []
        if path is not None and path.exists():
            self.parts = [msgspec.json.decode(line, type=Part) for line in path.read_bytes().splitlines()]

    def has(self, seed: int, count: int) -> bool:
        """Whether this part is done."""
        return any((part.seed, part.count) == (seed, count) for part in self.parts)

    def add(self, part: Part) -> None:
        """Keeps a part; the file has none in which a way failed, so that it is asked again."""
        self.parts.append(part)
        failed = any(way.failures for way in part.ways.values())
        if self._path is not None and not failed:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(part) + b"\n")

    def of(self, way: str) -> Tally:
        """What a way did with all parts."""
        return sum((part.ways.get(way, Tally()) for part in self.parts), Tally())


def tally(finding: Finding, verdicts: Mapping[str, str]) -> Tally:
    """What one way did with one part; `verdicts`: what is wrong with each answer (`Asked.verdict`)."""
    said = Counter(verdict if verdict in ("", "cut") else "invalid" for verdict in verdicts.values())
    answers = finding.answers
    return Tally(
        answers=len(answers.tokens),
        tokens=sum(map(len, answers.tokens.values())),
        valid=said[""],
        cut=said["cut"],
        invalid=[f"{name}: {verdict}" for name, verdict in verdicts.items() if verdict not in ("", "cut")],
        differing=finding.differing,
        failures=[finding.failure] if finding.failure else [],
        verify_steps=answers.verify_steps,
        accepted=answers.accepted,
        preemptions=answers.preemptions,
        seconds=finding.seconds,
    )


def of_ways(results: Results, variants: Iterable[Variant]) -> Table:
    """A row per way."""
    table = Table(title="The same tokens, and valid ones, whatever the way")
    table.add_column("way")
    for name in ("answers", "tokens", "valid", "cut", "invalid", "differ", "acceptance", "preempted"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for variant in variants:
        sums = results.of(variant.name)
        acceptance = f"{1 + sums.accepted / sums.verify_steps:.2f}" if sums.verify_steps else "-"
        counts = (sums.answers, sums.tokens, sums.valid, sums.cut, len(sums.invalid), len(sums.differing))
        preempted = str(sums.preemptions or "-")
        verdict = sums.problem(variant) or "as it must"
        table.add_row(variant.name, *map(str, counts), acceptance, preempted, verdict)
    return table


def of_kinds(results: Results) -> Table:
    """A row per kind of question: schemas, and each format of calls."""
    table = Table("asked for", "valid", "cut", "invalid", title="What the reference answered")
    for kind in sorted({kind for part in results.parts for kind in part.kinds}):
        sums = sum((Counter(part.kinds.get(kind, {})) for part in results.parts), Counter[str]())
        table.add_row(kind, *(str(sums[said]) for said in ("valid", "cut", "invalid")))
    return table


def _values(tally: Tally) -> tuple[Any, ...]:
    return msgspec.structs.astuple(tally)
