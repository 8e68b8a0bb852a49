"""The commands of `eyas train`: a table of names. The module of each has its flags and its work."""

from __future__ import annotations

from eyas.commands import CommandEntry, CommandParser

HEADS = "eyas.train.head_command"
COMMANDS = {
    "eagle3": CommandEntry("an EAGLE-3 head for any target", HEADS, {"kind": "eagle3"}),
    "eagle": CommandEntry("an EAGLE-1/2 head for any target", HEADS, {"kind": "eagle"}),
    "mtp": CommandEntry("an MTP head for any target, with MiMo's names", HEADS, {"kind": "mtp"}),
}


def add_train(parser: CommandParser) -> None:
    """The commands of `eyas train`."""
    parser.add_commands(COMMANDS)
