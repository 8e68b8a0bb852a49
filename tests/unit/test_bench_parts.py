"""Parts in processes of their own: what they tell arrives, and what breaks one leaves the others."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest

from eyas.bench.parts import ChildPart, Line, Tell, run_parts
from eyas.common.errors import ConfigError


def say(count: int, tell: Tell) -> None:
    for i in range(count):
        tell({"number": i, "pid": os.getpid()})


def refuse(tell: Tell) -> None:
    tell({"number": 7})
    raise ConfigError("there is no such thing")


def stumble(tell: Tell) -> None:
    raise RuntimeError("out of something\nand much more text")


def die(tell: Tell) -> None:
    os._exit(3)


def hang(tell: Tell) -> None:
    time.sleep(60)


def test_lines_arrive_in_order_from_another_process() -> None:
    lines: list[Line] = []
    assert run_parts([ChildPart("some", partial(say, 3))], lines.append) == 0
    assert [line["number"] for line in lines] == [0, 1, 2]
    assert os.getpid() not in {line["pid"] for line in lines}


@pytest.mark.slow
def test_a_broken_part_is_named_and_the_next_one_runs(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[Line] = []
    parts = [
        ChildPart("refused", refuse),
        ChildPart("fell", stumble),
        ChildPart("died", die),
        ChildPart("well", partial(say, 1)),
    ]
    assert run_parts(parts, lines.append) == 3
    assert [line["number"] for line in lines] == [7, 0]
    told = capfd.readouterr().err.splitlines()
    assert "eyas: refused failed: there is no such thing" in told
    assert "eyas: fell failed: RuntimeError: out of something" in told
    assert "eyas: died failed: its process ended with exit code 3 before it was done" in told


def test_a_silent_part_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert run_parts([ChildPart("silent", hang)], lambda _: None, silence_s=2.0) == 1
    assert "silent failed: it said nothing for 2 s" in capfd.readouterr().err
    assert time.monotonic() - began < 30
