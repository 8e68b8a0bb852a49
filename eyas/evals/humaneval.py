"""`eyas eval humaneval`: functions to be written, judged by running their tests, in the official JSON lines.

The model continues the function's head up to the next thing at the left margin, as in the public harness; in
a chat it is asked for the whole function in a code block. There is one answer per problem: pass@1. Programs
are held back by `eyas.evals.guarded`.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.evals import guarded
from eyas.evals.flags import add_asking
from eyas.evals.questions import EvalQuestion, EvalTask, read_json_lines
from eyas.evals.run import evaluate

LONGEST_ANSWER = 1024
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
FIELDS = ("prompt", "entry_point", "test")
REQUEST = "Complete this Python function. Answer with all of it in one code block.\n\n```python\n{}```"
Problem = dict[str, str]


WALL_S = 20.0  # more than the processor's time, so that a busy machine changes no verdict


# Runs a program that a model wrote, held back from most accidents, and tells whether it ended well. The
# program gets a process of its own, which may compute and read (`eyas.evals.guarded`). This is no wall
# against a program that means harm: where you expect one, run the whole command in a container.
def succeeds(program: str) -> bool:
    """True if the program reaches its end, within its limits and without an error."""
    command = [sys.executable, "-I", "-B", guarded.__file__]
    try:
        done = subprocess.run(
            command,
            input=program.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            timeout=WALL_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == guarded.SUCCESS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas eval humaneval`."""
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="the official HumanEval.jsonl, or .jsonl.gz"
    )
    parser.add_argument(
        "--allow-code-execution", action="store_true", help="run what the model writes, in limited processes"
    )
    parser.add_argument("--chat", action="store_true", help="ask as one message of a chat")
    add_asking(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return evaluate(args, load(args))


def load(args: argparse.Namespace) -> EvalTask:
    """The problems of `--data`. Raises ConfigError for an unusable file, or if no code may be run."""
    if not args.allow_code_execution:
        message = "--allow-code-execution: without it the answers, which are programs, cannot be judged"
        raise ConfigError(message, param="allow-code-execution")
    problems = [*read_json_lines(args.data, FIELDS).values()][: args.limit]
    return EvalTask(
        name="humaneval",
        questions=tuple(_question(problem, args.chat) for problem in problems),
        max_tokens=LONGEST_ANSWER,
        chat=args.chat,
        stop=() if args.chat else STOP,
        metric="pass@1",
    )


def _question(problem: Problem, chat: bool) -> EvalQuestion:
    judge = functools.partial(passes, problem)
    if chat:
        return EvalQuestion(REQUEST.replace("{}", problem["prompt"]), problem["entry_point"], judge)
    return EvalQuestion(problem["prompt"], problem["entry_point"], judge)


def passes(problem: Problem, answer: str, entry_point: str) -> bool:
    """True if the function passes the problem's tests."""
    return succeeds(f"{program(problem, answer)}\n{problem['test']}\ncheck({entry_point})\n")


def program(problem: Problem, answer: str) -> str:
    """The head and what follows it: the rest of its body, or, from a code block, the whole function again.

    A head that ends in its docstring is a function already, which the second definition replaces.
    """
    block = re.search(r"```[\w+-]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    return problem["prompt"] + (f"\n{block[1]}" if block else answer)
