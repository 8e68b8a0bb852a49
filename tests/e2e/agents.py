"""The long comparison for agents: whatever way they are answered, the tokens are the same, and valid.

`python -m tests.e2e.agents --count N` asks N schemas and N dialogues with tools: without drafts, by chains
and by trees, unified and split. An answer is valid unless `max_tokens` cuts it. The 1,000 that it asks by
itself take about four hours on a busy core; `test_agents.py` runs a part.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console

from tests.e2e.agent_requests import Asked, dialogues, schemas
from tests.e2e.lossless import (
    CHAIN,
    NGRAM,
    PLAIN,
    SHORT_TREE,
    TREE,
    Finding,
    Variant,
    report,
    run,
)
from tests.e2e.lossless_ways import InProcess, Tokens
from tests.unit.grammar_cases import text_of
from tests.unit.loopback import split_configs

SEED = 22
COUNT = 1000
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
        self.seconds = 0.0

    def refer(self) -> Finding:
        """The reference answers. Its `problem` says if one could not be given."""
        first = self._refer(self.asked)
        later = [one for asked in self.asked if (one := self._later(asked)) is not None]
        self.asked += later
        if first.problem or not later:
            return first
        return self._refer(later)

    def verdicts(self) -> dict[str, str]:
        """By request, what is wrong with its answer."""
        return {one.request.id: one.verdict(self.expected[one.request.id]) for one in self.asked}

    def run(self, variant: Variant) -> Finding:
        """Another way to answer all of it."""
        requests = tuple(one.request for one in self.asked)
        return run(variant, requests, self.expected, lambda: None)

    def _refer(self, asked: Sequence[Asked]) -> Finding:
        finding = run(REFERENCE, tuple(one.request for one in asked), None, lambda: None)
        self.expected = {**self.expected, **finding.answers.tokens}
        self.seconds += finding.seconds
        return finding

    def _later(self, asked: Asked) -> Asked | None:
        tokens = self.expected.get(asked.request.id, ())
        if asked.dialogue is None or asked.verdict(tokens):
            return None
        return asked.dialogue.second(text_of(list(tokens)))


def main() -> int:
    """0 if every answer is valid or cut, and the same whatever the way."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.agents", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 140)
    questions = Questions(given.count, given.seed)
    reference = questions.refer()
    verdicts = questions.verdicts()
    counts = Counter(said if said in ("", "cut") else "invalid" for said in verdicts.values())
    console.print(
        f"{len(verdicts)} answers in {questions.seconds:.0f} s: {counts['']} valid, "
        f"{counts['cut']} cut, {counts['invalid']} invalid"
    )
    for name, said in verdicts.items():
        if said not in ("", "cut"):
            console.print(f"{name}: {said}", markup=False)
    findings = list[Finding]()
    for variant in VARIANTS if not reference.problem else ():
        findings.append(questions.run(variant))
        console.print(f"{variant.name}: {findings[-1].seconds:.0f} s, {len(findings[-1].differing)} differ")
    console.print(report(findings))
    problems = [finding for finding in (reference, *findings) if finding.problem]
    return int(bool(problems or counts["invalid"]))


if __name__ == "__main__":
    sys.exit(main())
