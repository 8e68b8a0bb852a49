"""The commands for four and eight GPUs: `eyas serve` takes their flags, and each has an end of its own."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psutil
import pytest

from eyas.commands import CommandParser
from eyas.configuration import own_config
from eyas.flags import add_engine
from eyas.layout_flags import add_layout
from tests.gpu.many_gpus import PARTS, SERVED, Command, Machine, commands, write_models


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "small"), [(8, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_a_server_takes_the_flags_of_every_command(tmp_path: Path, gpus: int, small: bool) -> None:
    machine = Machine(tmp_path, Path("client.py"), gpus, small)
    write_models(machine)
    found = commands(machine, list(PARTS))
    assert len({one.name for one in found}) == len(found) == (11 if small else 13)
    for one in found:
        if one.module == SERVED:
            parser = CommandParser(prog="eyas serve")
            add_layout(parser)
            add_engine(parser)
            flags = one.arguments[one.arguments.index("--model") :]
            args = parser.parse_args(["--device", "cuda", "--load-format", "dummy", *flags])
            ranks = own_config(args).engine.device_ranks
            assert ranks in (gpus, gpus // 2), one.name


def test_a_command_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    slow = Command("x", "slow", 0.5, "timeit", ("-n", "1", "-r", "1", "__import__('time').sleep(60)"))
    quick = Command("x", "quick", 60.0, "timeit", ("-n", "1", "-r", "1", "print('here')"))
    assert slow.run(tmp_path)["exit"] is None
    assert quick.run(tmp_path)["exit"] == 0
    assert "here" in (tmp_path / "quick.log").read_text(), sys.version


def test_nothing_that_a_slow_command_began_is_left(tmp_path: Path) -> None:
    """Its child has a session of its own, and stands still, as workers under chaos do."""
    child = "import os, signal; os.setsid(); print(os.getpid(), flush=True); os.kill(0, signal.SIGSTOP)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    slow = Command("x", "parent", 5.0, "timeit", ("-n", "1", "-r", "1", code))
    assert slow.run(tmp_path)["exit"] is None
    number = int((tmp_path / "parent.log").read_text().splitlines()[0])
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(number).wait(10)
