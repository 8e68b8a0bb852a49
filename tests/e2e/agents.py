"""The long comparison for agents: whatever way they are answered, the tokens are the same, and valid.

`python -m tests.e2e.agents --count N` asks N schemas and N dialogues with tools: without drafts, by chains
and by trees, unified and split. An answer is valid unless `max_tokens` cuts it. The 1,000 that it asks by
itself take about four hours on a busy core, in parts of a few: `--processes` answers several at once,
`--results` keeps what each part came to in a file, and leaves out the parts that it has. `test_agents.py`
runs a part.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.e2e.agent_requests import Asked, dialogues, schemas
from tests.e2e.agent_results import Part, Results, of_kinds, of_ways, tally
from tests.e2e.lossless import (
    CHAIN,
    NGRAM,
    PLAIN,
    SHORT_TREE,
    TREE,
    Finding,
    Variant,
    run,
)
from tests.e2e.lossless_ways import InProcess, Tokens
from tests.unit.grammar_cases import text_of
from tests.unit.loopback import split_configs

SEED = 22
COUNT = 1000
PART = 10  # schemas, and dialogues, that are asked side by side
AT_ONCE = 8

REFERENCE = Variant("unified, off: the reference", InProcess((PLAIN,), AT_ONCE), speculates=False)
VARIANTS = (
    Variant("unified, chain", InProcess((CHAIN,), AT_ONCE)),
    Variant("unified, tree", InProcess((TREE,), AT_ONCE)),
    Variant("unified, looked up", InProcess((NGRAM,), AT_ONCE)),
    Variant("split, off", InProcess(split_configs(PLAIN)[:2], AT_ONCE), speculates=False),
    Variant("split, chain", InProcess(split_configs(CHAIN), AT_ONCE)),
    Variant("split, tree", InProcess(split_configs(SHORT_TREE), AT_ONCE)),
    Variant("few pages, chain", InProcess((replace(CHAIN, num_pages=100),), AT_ONCE), preempts=True),
)


class Questions:
    """All that is asked, and what the reference answered: later turns follow its answers."""

    def __init__(self, count: int, seed: int = SEED) -> None:
        self.asked: list[Asked] = [*schemas(count, seed), *dialogues(count, seed)]
        self.expected: Tokens = {}

    def refer(self) -> Finding:
        """The reference answers, first and later turns. Its `problem` says if one could not be given."""
        first = self._refer(self.asked)
        later = [one for asked in self.asked if (one := self._later(asked)) is not None]
        self.asked += later
        if first.problem or not later:
            return first
        second = self._refer(later)
        answers = replace(second.answers, tokens=self.expected)
        return replace(second, answers=answers, seconds=first.seconds + second.seconds)

    def verdicts(self, answers: Tokens) -> dict[str, str]:
        """What is wrong with each answer, by its request."""
        asked = (one for one in self.asked if one.request.id in answers)
        return {one.request.id: one.verdict(answers[one.request.id]) for one in asked}

    def kinds(self) -> dict[str, dict[str, int]]:
        """How many of the reference's answers are valid, cut and invalid, by what was asked for."""
        found: dict[str, dict[str, int]] = {}
        for one in self.asked:
            verdict = one.verdict(self.expected.get(one.request.id, ()))
            said = {"": "valid", "cut": "cut"}.get(verdict, "invalid")
            counts = found.setdefault(one.kind, {})
            counts[said] = counts.get(said, 0) + 1
        return found

    def run(self, variant: Variant) -> Finding:
        """Another way to answer all of it."""
        requests = tuple(one.request for one in self.asked)
        return run(variant, requests, self.expected, lambda: None)

    def _refer(self, asked: Sequence[Asked]) -> Finding:
        finding = run(REFERENCE, tuple(one.request for one in asked), None, lambda: None)
        self.expected = {**self.expected, **finding.answers.tokens}
        return finding

    def _later(self, asked: Asked) -> Asked | None:
        tokens = self.expected.get(asked.request.id, ())
        if asked.dialogue is None or asked.verdict(tokens):
            return None
        return asked.dialogue.second(text_of(list(tokens)))


def answered(seed: int, count: int) -> Part:
    """A part of the comparison: every way answers it."""
    torch.set_num_threads(1)
    questions = Questions(count, seed)
    findings = [questions.refer()]
    if not findings[0].problem:
        findings += map(questions.run, VARIANTS)
    tallies = {
        finding.variant.name: tally(finding, questions.verdicts(finding.answers.tokens))
        for finding in findings
    }
    return Part(seed, count, tallies, questions.kinds())


def _answered(part: tuple[int, int]) -> Part:
    return answered(*part)


def main() -> int:
    """0 if every answer is valid or cut, and the same whatever the way."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.agents", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED, help="of the first part; the second has the next")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--results", type=Path, help="a file: parts are added to it, those in it are not asked"
    )
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    results = Results(given.results)
    sizes = [min(PART, given.count - at) for at in range(0, given.count, PART)]
    parts = [(seed, size) for seed, size in enumerate(sizes, given.seed) if not results.has(seed, size)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    spawned = multiprocessing.get_context("spawn")  # torch's threads do not outlive a fork
    # engines give their memory back with their process
    pool = spawned.Pool(given.processes, maxtasksperchild=1)
    with pool, Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"parts of {PART}", total=len(sizes), completed=len(sizes) - len(parts))
        for part in pool.imap_unordered(_answered, parts):
            results.add(part)
            progress.advance(bar)
    ways = (REFERENCE, *VARIANTS)
    console.print(of_kinds(results), of_ways(results, ways))
    for line in sorted({line for way in ways for line in results.of(way.name).invalid}):
        console.print(line, markup=False)
    return int(any(results.of(way.name).problem(way) for way in ways))


if __name__ == "__main__":
    sys.exit(main())
