"""Scores a model folder in this process, without a server: held-out sets and acceptance length.

Uses the plain generation of `eyas.train`; for machines where training runs. Knows no HTTP.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from eyas.evals.heldout import QuestionSet
from eyas.evals.scores import GroupScore, score_table, unbroken
from eyas.train.heads.base import DraftHead
from tools.nano.files import STOP, load_head, load_target
from tools.nano.generate import AcceptanceCounts, SamplingOptions, generate, speculate
from tools.nano.heldout import heldout_prompts, question_sets
from tools.nano.model import NanoModel
from tools.nano.text.core import Message
from tools.nano.tokenizer import load_tokenizer, render

LONGEST_ANSWER = 512


@dataclass(frozen=True)
class ChatScorer:
    """A loaded model that answers chats greedily."""

    target: NanoModel
    tokenizer: Tokenizer

    def prompt(self, chat: list[Message]) -> list[int]:
        """The chat as ids, up to where the assistant begins to speak."""
        return self.tokenizer.encode(render(chat, True), add_special_tokens=False).ids

    def answers(self, chats: list[list[Message]]) -> list[tuple[str, bool]]:
        """Each chat's answer, and whether it ended its turn."""
        made = generate(
            self.target, [self.prompt(chat) for chat in chats], SamplingOptions(STOP, LONGEST_ANSWER)
        )
        return [(self.tokenizer.decode(row), row[-1] in STOP) for row in made]

    def score(self, questions: QuestionSet) -> tuple[GroupScore, list[str]]:
        """One set's score, and the wrong answers."""
        answers = self.answers([[{"role": "user", "content": q.prompt}] for q in questions.questions])
        score, wrong = GroupScore(questions.name, questions.bar), []
        for question, (answer, ended) in zip(questions.questions, answers, strict=True):
            right = question.judge(answer, question.expected)
            score.add(right, ended, unbroken(answer))
            if not right:
                wrong.append(f"{question.prompt!r} -> {answer!r}, expected {question.expected!r}")
        return score, wrong

    def acceptance(self, head: DraftHead, chats: list[list[Message]]) -> AcceptanceCounts:
        """Greedy chains over these chats."""
        counts = AcceptanceCounts()
        for chat in track(chats, description="acceptance"):
            speculate(self.target, head, self.prompt(chat), SamplingOptions(STOP, LONGEST_ANSWER), counts)
        return counts


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.nano.local", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--size", type=int, default=400, help="questions per set")
    parser.add_argument("--chats", type=int, default=100, help="chats for the acceptance length")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    console = Console(width=160)
    scorer = ChatScorer(load_target(given.model, given.device), load_tokenizer(given.model))
    scores = [scorer.score(questions) for questions in question_sets(given.size, given.seed)]
    for score, wrong in scores:
        for line in wrong[:6]:
            console.print(f"{score.name}: {line}", markup=False)
    console.print(score_table([score for score, _ in scores], "held-out questions"))
    if given.head:
        head = load_head(given.head, scorer.target)
        counts = scorer.acceptance(head, heldout_prompts(given.chats, given.seed))
        shares = ", ".join(f"{accepted / counts.rounds:.2f}" for accepted in counts.by_depth)
        console.print(f"acceptance length {counts.length:.2f} over {counts.rounds} rounds; by depth {shares}")


if __name__ == "__main__":
    main()
