"""The commands of `eyas tune`: a table of names."""

from __future__ import annotations

from eyas.commands import Command, Parser

COMMANDS = {
    "moe": Command(
        "the products of a model's experts", "eyas.bench.tuning.command", given={"products": "moe"}
    ),
    "gemm": Command(
        "a model's products in FP8 blocks", "eyas.bench.tuning.command", given={"products": "gemm"}
    ),
}


def add_tune(parser: Parser) -> None:
    """The commands of `eyas tune`."""
    parser.add_commands(COMMANDS)
