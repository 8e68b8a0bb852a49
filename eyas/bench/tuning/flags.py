"""The commands of `eyas tune`: a table of names."""

from __future__ import annotations

from eyas.commands import CommandEntry, CommandParser

COMMANDS = {
    "moe": CommandEntry(
        "the products of a model's experts", "eyas.bench.tuning.command", given={"products": "moe"}
    ),
    "gemm": CommandEntry(
        "a model's products in FP8 blocks", "eyas.bench.tuning.command", given={"products": "gemm"}
    ),
}


def add_tune(parser: CommandParser) -> None:
    """The commands of `eyas tune`."""
    parser.add_commands(COMMANDS)
