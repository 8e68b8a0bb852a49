"""`eyas eval nano`: the embedded model's held-out questions. Nothing is downloaded."""

from __future__ import annotations

import argparse
import dataclasses

from eyas.evals.flags import add_asking
from eyas.evals.heldout import question_sets
from eyas.evals.questions import EvalTask
from eyas.evals.run import evaluate

LONGEST_ANSWER = 512


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas eval nano`."""
    add_asking(parser, limit=50)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return evaluate(args, load(args))


def load(args: argparse.Namespace) -> EvalTask:
    """`--limit` questions of each set, drawn by `--seed`, as chats."""
    sets = question_sets(args.limit, args.seed)
    return EvalTask(
        name="nano",
        questions=tuple(
            dataclasses.replace(question, group=one.name) for one in sets for question in one.questions
        ),
        max_tokens=LONGEST_ANSWER,
        chat=True,
        bars={one.name: one.bar for one in sets},
    )
