"""The commands of `eyas bench` and `eyas tune`: tables of names. The module of each has its flags and its
work.
"""

from __future__ import annotations

from eyas.commands import CommandEntry, CommandParser

COMMANDS = {
    "serve": CommandEntry("load a server and measure it", "eyas.bench.serve"),
    "sweep": CommandEntry("load servers more and more, to the knee of their goodput", "eyas.bench.sweep"),
    "compare": CommandEntry("which of two runs is faster, with confidence intervals", "eyas.bench.compare"),
    "suite": CommandEntry(
        "the named cases, and a report of them (without --url: on clusters of its own)", "eyas.bench.suite"
    ),
    "one-batch": CommandEntry(
        "run static batches through an engine, without a server", "eyas.bench.one_batch"
    ),
    "speculative": CommandEntry("which drafts pay at which batch size", "eyas.bench.speculative"),
    "kernels": CommandEntry(
        "time kernels beside what memory and arithmetic allow", "eyas.bench.kernels.command"
    ),
}
TUNE_COMMANDS = {
    "moe": CommandEntry("the products of a model's experts", "eyas.bench.tune", given={"products": "moe"}),
    "gemm": CommandEntry("a model's products in FP8 blocks", "eyas.bench.tune", given={"products": "gemm"}),
}


def add_bench(parser: CommandParser) -> None:
    """The commands of `eyas bench`."""
    parser.add_commands(COMMANDS)


def add_tune(parser: CommandParser) -> None:
    """The commands of `eyas tune`."""
    parser.add_commands(TUNE_COMMANDS)
