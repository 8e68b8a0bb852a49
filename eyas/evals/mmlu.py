"""`eyas eval mmlu`: questions with four choices, in the official folder of CSV files.

DIR/dev/SUBJECT_dev.csv has the worked examples, DIR/test/SUBJECT_test.csv the questions; a row is a question,
four choices and the right letter. The prompt is the public one, as text to be continued. The letter that the
model writes first is its answer; log-probabilities are not asked for.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.evals.flags import add_asking
from eyas.evals.questions import EvalQuestion, EvalTask, read_text
from eyas.evals.run import evaluate
from eyas.flags import names, whole

LETTERS = "ABCD"
LONGEST_CHAT_ANSWER = 16
Row = list[str]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas eval mmlu`."""
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="the folder of dev/ and test/"
    )
    parser.add_argument("--subjects", type=names, default=(), metavar="NAME,...", help="(all)")
    parser.add_argument("--shots", type=whole, default=5, metavar="N", help="worked examples, of dev/ (5)")
    parser.add_argument("--chat", action="store_true", help="ask as one message of a chat")
    add_asking(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return evaluate(args, load(args))


def load(args: argparse.Namespace) -> EvalTask:
    """The questions of all subjects, or of those named. Raises ConfigError for unusable files or names."""
    known = sorted(path.name.removesuffix("_test.csv") for path in (args.data / "test").glob("*_test.csv"))
    if not known:
        raise ConfigError(f"{args.data} holds no test/SUBJECT_test.csv")
    for name in args.subjects:
        if name not in known:
            raise ConfigError(f"--subjects: {name!r} is none of {', '.join(known)}", param="subjects")
    subjects = args.subjects or known
    return EvalTask(
        name="mmlu",
        questions=tuple(question for subject in subjects for question in _subject(args, subject)),
        max_tokens=LONGEST_CHAT_ANSWER if args.chat else 1,
        chat=args.chat,
    )


def _subject(args: argparse.Namespace, subject: str) -> list[EvalQuestion]:
    rows = _rows(args.data / "test" / f"{subject}_test.csv")[: args.limit]
    examples = _rows(args.data / "dev" / f"{subject}_dev.csv")[: args.shots] if args.shots else []
    if len(examples) < args.shots:
        raise ConfigError(f"--shots: {subject} has {len(examples)} worked examples", param="shots")
    topic = subject.replace("_", " ")
    intro = f"The following are multiple choice questions (with answers) about {topic}.\n\n"
    shots = "".join(f"{_ask(row)} {row[-1]}\n\n" for row in examples)
    return [EvalQuestion(intro + shots + _ask(row), row[-1], chooses, subject) for row in rows]


def _rows(path: Path) -> list[Row]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    rows = []
    try:
        for row in reader:
            if len(row) != len(LETTERS) + 2 or row[-1] not in tuple(LETTERS):
                message = f"{path}:{reader.line_num}: not a question, {len(LETTERS)} choices and a letter"
                raise ConfigError(message)
            rows.append(row)
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: {error}") from error
    if not rows:
        raise ConfigError(f"{path} holds no question")
    return rows


def _ask(row: Row) -> str:
    question, *choices, _ = row
    lettered = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return "\n".join([question, *lettered, "Answer:"])


def chooses(answer: str, expected: str) -> bool:
    """True if the answer begins with the letter as a word of its own; spaces, ( and * may stand before it."""
    return re.match(rf"[\s(*]*{expected}\b", answer) is not None
