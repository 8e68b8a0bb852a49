"""`eyas bench serve`: loads a server and measures it."""

from __future__ import annotations

import argparse

from eyas.common.errors import EyasError
from eyas.flags import add_engine, add_layout, add_server


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas bench serve`."""
    add_server(parser, url=None)
    add_layout(parser)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    raise EyasError("not there yet")
