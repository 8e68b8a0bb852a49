"""The command line in a process of its own: status, output and errors."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import NamedTuple
from unittest import mock

import pytest

from eyas import cli


class Told(NamedTuple):
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


def eyas(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eyas.cli", *args], capture_output=True, text=True, timeout=60
    )


def told(capsys: pytest.CaptureFixture[str], *args: str) -> Told:
    """The same in this process, for what ends before it starts anything."""
    with mock.patch.dict(os.environ):  # `main` sets some for good
        try:
            code = cli.main(list(args))
        except SystemExit as ended:  # of argparse
            code = int(ended.code or 0)
    return Told(code, *capsys.readouterr())


def parse(*args: str) -> argparse.Namespace:
    return cli._parser().parse_args(args)
