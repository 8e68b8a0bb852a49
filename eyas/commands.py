"""The parser of a command line with commands, and commands of commands.

A wrong flag gives one line, which names the command's help. A command's own module adds its flags only when
that command is parsed, so that `eyas --help` stays quick.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from eyas.common.nearest import nearest

USAGE_ERROR = 2  # exit codes
INTERRUPTED = 130


@dataclass(frozen=True)
class CommandEntry:
    """One command: its help text, and the module that has its `add_flags(parser)` and `run(args) -> int`.

    `given`: values that `args` has, and the parser as defaults, where several commands share a module.
    """

    text: str
    module: str
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadLine:
    """A command line in the parser's own flags, and what is to be said of words that change nothing."""

    words: list[str]
    notes: tuple[str, ...] = ()


class CommandParser(argparse.ArgumentParser):
    """A parser that never abbreviates flags, and that may belong to a command of `add_commands`.

    `reader`, if there is one, makes its command line of what was typed; its notes are `args.notes`.
    """

    reader: Callable[[argparse.ArgumentParser, Sequence[str]], ReadLine] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allow_abbrev = False
        self._module: str | None = None

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.splitlines())
        self.exit(USAGE_ERROR, f"{self.prog}: {line} (see {self.prog} --help)\n")

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Ends the command, whose line has unknown `words`."""
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        self.error(f"unknown: {' '.join(words)}{nearest(words[0].partition('=')[0], flags)}")

    def add_commands(self, commands: Mapping[str, CommandEntry]) -> None:
        """Adds commands, whose modules are imported when they are used; without one, prints the help."""
        self.set_defaults(run=self._show_help)
        choices = self.add_subparsers(metavar="COMMAND", title="commands", parser_class=CommandParser)
        for name, command in commands.items():
            added = choices.add_parser(name, help=command.text, description=command.text)
            added.set_defaults(parser=added, **command.given)
            added._module = command.module

    def complete(self) -> None:
        """Adds the flags of the parser's command, if they are missing yet."""
        if self._module is not None:
            module = importlib.import_module(self._module)
            self._module = None
            self.set_defaults(run=module.run)
            module.add_flags(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, once the command's flags are there."""
        self.complete()
        if self.reader is not None and args is not None:
            reading = self.reader(self, args)
            self.set_defaults(notes=reading.notes)
            args = reading.words
        return super().parse_known_args(args, namespace)

    def _show_help(self, _: argparse.Namespace) -> int:
        self.print_help()
        return 0
