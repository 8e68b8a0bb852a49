"""`eyas keys add`, `list`, `remove`: the file that `--api-key-file` names, changed while gateways read it.

The format of the file is in `eyas.common.security.api_keys`.
"""

from __future__ import annotations

import argparse
import sys

from eyas.commands import CommandParser
from eyas.common.security import api_keys


def add_flags(parser: CommandParser) -> None:
    """The file, and whose key it is."""
    parser.add_argument("file", metavar="FILE", help="the file of --api-key-file")
    does = parser.get_default("does")
    if does != "list":
        parser.add_argument("name", metavar="NAME", help="the caller's: letters, digits and . _ -")
    if does == "add":
        text = "take the key that stands on standard input instead of making one"
        parser.add_argument("--stdin", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises ConfigError for a file or name that cannot be."""
    return {"add": _add, "list": _list, "remove": _remove}[args.does](args)


def _add(args: argparse.Namespace) -> int:
    key = sys.stdin.readline().strip() if args.stdin else api_keys.new_key()
    api_keys.add(args.file, args.name, key)
    if not args.stdin:
        print(key)
        print(f"eyas: {args.file} has its hash; the key itself stands nowhere else", file=sys.stderr)
    return 0


def _list(args: argparse.Namespace) -> int:
    for key in api_keys.read(args.file):
        print(key.name)
    return 0


def _remove(args: argparse.Namespace) -> int:
    api_keys.remove(args.file, args.name)
    return 0
