"""The commands of `eyas eval`, and the flags that all of them share."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyas.commands import CommandEntry, CommandParser
from eyas.flags import add_server, positive

COMMANDS = {
    "gsm8k": CommandEntry("grade-school word problems, from a local file", "eyas.evals.gsm8k"),
    "mmlu": CommandEntry("questions with four choices, from a local folder", "eyas.evals.mmlu"),
    "humaneval": CommandEntry(
        "Python functions, from a local file; runs what is written", "eyas.evals.humaneval"
    ),
    "nano": CommandEntry("held-out questions of the embedded model; no file needed", "eyas.evals.nano"),
}


def add_eval(parser: CommandParser) -> None:
    """The commands of `eyas eval`."""
    parser.add_commands(COMMANDS)


def add_asking(parser: argparse.ArgumentParser, limit: int | None = None) -> None:
    """Adds the flags of a task: the server, the options, the output.

    `limit`: the questions of each group without `--limit`.
    """
    add_server(parser)
    add = parser.add_argument
    add("--model", metavar="ID", help="the model's name there (the first that it lists)")
    add("--no-speculative", action="store_true", help="turn drafting off: Eyas alone knows how")
    add(
        "--against", metavar="SIDE", help="ask a second side the same and compare: URL, model=ID, api-key=K,"
        " ca=FILE, speculative, no-speculative, separated by commas; the rest is as on the first side",
    )  # fmt: skip
    add("--require-identical", action="store_true", help="fail unless both sides answer the same")
    default = "all" if limit is None else limit
    add("--limit", type=positive, default=limit, metavar="N", help=f"questions of each group ({default})")
    add("--parallel", type=positive, default=8, metavar="N", help="requests at a time (8)")
    add("--temperature", type=float, default=0.0, help="(0)")
    add("--max-tokens", type=positive, metavar="N", help="the longest answer (the task's own)")
    add("--seed", type=int, default=1, help="of drawn questions, and of sampling above temperature 0 (1)")
    add("--output-file", type=Path, metavar="FILE", help="append a JSON line for each side")
    add("--output-details", action="store_true", help="with every question and answer in that line")
