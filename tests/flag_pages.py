"""The pages that are made of the command line: `python -m tests.flag_pages` writes what they show of it anew.

docs/configuration.md lists the flags of servers, from their parsers; docs/coming-from.md those of vLLM and
SGLang, from `eyas.peers.table`. What stands outside the marks in a page is written by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from eyas import cli
from eyas.common.config import NANO
from eyas.peers import table
from eyas.peers.meanings import BOTH, AliasFlag, FlagRow, SameFlag

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- generated: python -m tests.flag_pages -->\n", "<!-- end -->\n"
COMMANDS = ("serve", "worker", "gateway")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands that take flags of other servers, by name."""
    choices = next(
        action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return {name: choices.choices[name] for name in COMMANDS}


# --- docs/configuration.md -----------------------------------------------------------------------------


def configuration() -> str:
    """The flags of all servers: those of `eyas serve`, and what the others have beside them."""
    known = parsers()
    told = {flag for action in known["serve"]._actions for flag in action.option_strings}
    parts = [_command("serve", known["serve"], set())]
    parts += [_command(name, known[name], told) for name in COMMANDS[1:]]
    return "\n".join(parts)


def _command(name: str, parser: argparse.ArgumentParser, elsewhere: set[str]) -> str:
    lines = [f"## `eyas {name}`", ""]
    if elsewhere:
        shared = [action for action in parser._actions if elsewhere.intersection(action.option_strings)]
        flags = ", ".join(f"`{action.option_strings[0]}`" for action in shared if action.dest != "help")
        lines += [f"As `eyas serve`: {flags}.", ""]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if _is_shown(action, elsewhere)]
        if actions:
            if group.title not in (None, "options", "positional arguments"):
                lines += [f"**{_capital(str(group.title))}**", ""]
            lines += ["| flag | default | |", "|---|---|---|", *map(_row, actions), ""]
    return "\n".join(lines)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_shown(action: argparse.Action, elsewhere: set[str]) -> bool:
    return action.dest != "help" and not elsewhere.intersection(action.option_strings)


def _row(action: argparse.Action) -> str:
    names = action.option_strings or [action.dest]
    first = f"`{names[0]} {_takes(action)}`" if _takes(action) and action.option_strings else f"`{names[0]}`"
    others = "".join(f", `{name}`" for name in names[1:])
    return f"| {_cell(first + others)} | {_cell(_default(action))} | {_cell(_plain(action.help or ''))} |"


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    metavar = str(action.metavar or action.dest.upper())
    return f"{metavar} ..." if action.nargs == "+" else metavar


def _default(action: argparse.Action) -> str:
    """As the help says it in brackets at its end, else as the parser has it."""
    text = action.help or ""
    if text.endswith(")"):
        return text[text.rindex("(") + 1 : -1]
    value = action.default
    if action.nargs == 0 or value in (None, "", (), []):
        return ""
    return "the embedded model" if value == str(NANO) else str(value)


def _plain(text: str) -> str:
    """A help text without its default."""
    return text[: text.rindex("(")].rstrip() if text.endswith(")") else text


# --- docs/coming-from.md -------------------------------------------------------------------------------


def coming_from() -> str:
    """The flags of other servers, by topic, and what each means here."""
    own = {flag for parser in parsers().values() for flag in parser._option_string_actions}
    parts = []
    for topic, rows in table.TOPICS.items():
        parts += [f"## {topic}", "", "| flag | of | here |", "|---|---|---|"]
        parts += [f"| {_names(row)} | {_servers(row)} | {_cell(_here(row, own))} |" for row in rows]
        parts.append("")
    return "\n".join(parts)


def _names(row: FlagRow) -> str:
    return ", ".join(f"`{name}`" for name in row.names)


def _servers(row: FlagRow) -> str:
    return "vLLM, SGLang" if row.servers == BOTH else row.servers


def _here(row: FlagRow, own: set[str]) -> str:
    """A flag that Eyas has by now is the same, whatever the table says of those that it has not."""
    if not isinstance(row.meaning, AliasFlag) and own.issuperset(row.names):
        return (row.meaning if isinstance(row.meaning, SameFlag) else SameFlag()).sentence()
    return row.meaning.sentence()


# --- pages ---------------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {"configuration.md": configuration, "coming-from.md": coming_from}


def renewed(page: str) -> str:
    """The page as it should be."""
    before, _, rest = (DOCS / page).read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{PAGES[page]()}\n{END}{after}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(renewed(page))
