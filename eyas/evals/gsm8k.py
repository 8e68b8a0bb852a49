"""`eyas eval gsm8k`: grade-school word problems, in the official JSON lines (`question`, `answer`).

The prompt is the public one: worked examples, then the question, as text to be continued. An answer is judged
in three published ways: as lm-eval's gsm8k does by `flexible-extract` (the last number) and by `strict-match`
(the number after the first ####), and as SGLang's few-shot benchmark does (the last run of digits).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.evals.flags import add_asking
from eyas.evals.questions import EvalQuestion, EvalTask, read_json_lines
from eyas.evals.run import evaluate
from eyas.flags import whole

LONGEST_ANSWER = 512
STOP = ("Question:", "</s>", "<|im_end|>")
MARK = "#### "
END = re.compile(rf"{MARK}.*\d.*\s*\Z")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas eval gsm8k`."""
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="the official test.jsonl")
    text = "the official train.jsonl: the examples are its first lines (those of --data, then not asked)"
    parser.add_argument("--train", type=Path, metavar="FILE", help=text)
    parser.add_argument("--shots", type=whole, default=5, metavar="N", help="worked examples (5)")
    parser.add_argument("--chat", action="store_true", help="ask as one message of a chat")
    add_asking(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return evaluate(args, load(args))


def load(args: argparse.Namespace) -> EvalTask:
    """The problems of `--data` behind `--shots` worked examples. Raises ConfigError for unusable files."""
    problems = _problems(args.data)
    if args.train is None:
        examples, problems = problems[: args.shots], problems[args.shots :]
    else:
        examples = _problems(args.train)[: args.shots]
    if len(examples) < args.shots or not problems:
        message = f"--shots: {args.shots} worked examples and a question are more than the files hold"
        raise ConfigError(message, param="shots")
    shots = "".join(f"{_ask(question)} {answer}\n\n" for question, answer in examples)
    questions = [
        EvalQuestion(shots + _ask(question), answer.split(MARK)[-1].strip(), flexible_extract)
        for question, answer in problems[: args.limit]
    ]
    return EvalTask(
        name="gsm8k",
        questions=tuple(questions),
        max_tokens=LONGEST_ANSWER,
        chat=args.chat,
        stop=STOP,
        metric="flexible-extract",
        also={"strict-match": strict_match, "last-number": last_number},
    )


def _problems(path: Path) -> list[tuple[str, str]]:
    """Questions and their solutions, each of which ends in a line `#### NUMBER`."""
    rows = read_json_lines(path, ("question", "answer"))
    for number, row in rows.items():
        if not END.search(row["answer"]):
            raise ConfigError(f'{path}:{number}: the answer does not end in "{MARK}NUMBER"')
    return [(row["question"], row["answer"]) for row in rows.values()]


def _ask(question: str) -> str:
    return f"Question: {question}\nAnswer:"


# --- judges ------------------------------------------------------------------------------------------------


def strict_match(answer: str, expected: str) -> bool:
    """True if the number after the first #### is the expected one."""
    match = re.search(rf"{MARK}(-?[0-9.,]+)", answer)
    return match is not None and _plain(match[1]) == _plain(expected)


def flexible_extract(answer: str, expected: str) -> bool:
    """True if the last number is the expected one; signs, points, commas and $ belong to a number."""
    numbers = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", answer)
    return bool(numbers) and _plain(numbers[-1]) == _plain(expected)


def last_number(answer: str, expected: str) -> bool:
    """True if the last run of digits, commas left out, is that of the expected number."""
    digits = [re.findall(r"\d+", text.replace(",", "")) for text in (answer, expected)]
    return all(digits) and digits[0][-1] == digits[1][-1]


def _plain(number: str) -> str:
    """A number without commas, $ and a full stop behind it."""
    return re.sub(r"\.$", "", re.sub(r"[,$]", "", number))
