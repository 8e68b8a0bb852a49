"""The commands of `eyas bench`: a table of names. The module of each has its flags and its work."""

from __future__ import annotations

from eyas.commands import Command, Parser

COMMANDS = {
    "serve": Command("load a server and measure it", "eyas.bench.serve"),
    "sweep": Command("load servers more and more, to the knee of their goodput", "eyas.bench.sweep"),
    "compare": Command("which of two runs is faster, with confidence intervals", "eyas.bench.compare"),
    "suite": Command(
        "the named cases, and a report of them (without --url: on clusters of its own)", "eyas.bench.suite"
    ),
    "one-batch": Command("run static batches through an engine, without a server", "eyas.bench.one_batch"),
    "speculative": Command("which drafts pay at which batch size", "eyas.bench.speculative"),
    "kernels": Command("time kernels beside what memory and arithmetic allow", "eyas.bench.kernels.command"),
}


def add_bench(parser: Parser) -> None:
    """The commands of `eyas bench`."""
    parser.add_commands(COMMANDS)
