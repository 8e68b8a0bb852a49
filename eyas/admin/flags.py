"""The commands of `eyas keys`: a table of names. Their module has the flags and the work."""

from __future__ import annotations

from eyas.commands import Command, Parser

KEYS = "eyas.admin.keys"


def add_keys(parser: Parser) -> None:
    """The commands of `eyas keys`."""
    parser.add_commands(
        {
            "add": Command("make a key, print it once, and write its hash to a file", KEYS, {"does": "add"}),
            "list": Command("the names in a file", KEYS, {"does": "list"}),
            "remove": Command("take a key out of a file", KEYS, {"does": "remove"}),
        }
    )
