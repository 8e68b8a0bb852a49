"""Recorded sessions of agents: a file of lines in Mooncake's format with sessions, as AIPerf writes them.

A line is a request: `output_length`, a `timestamp` or, behind another of its `session_id`, a `delay`, both in
ms; and what is asked: `input_length` new tokens in blocks of `hash_ids`, of which the same id is the same
text, or `messages`, all of the conversation or (`message_mode` "delta") what is new. Lines without a
`session_id` are sessions of one request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from eyas.bench.agents import say
from eyas.bench.jobs import JobTurn, LoadJob, generator
from eyas.simulator.workload import BLOCK_TOKENS

MODES = ("history", "delta")
Refusal = Callable[[int, str], NoReturn]


class RecordedSessions:
    """The sessions of a file, line by line. `refuse`: raises the error of a line."""

    def __init__(self, seed: int, pace: float, refuse: Refusal) -> None:
        """`pace`: all times are multiplied by it."""
        self._seed, self._pace, self._refuse = seed, pace, refuse
        self._turns: dict[str, list[JobTurn]] = {}
        self._starts: dict[str, float] = {}
        self._last: dict[str, tuple[float, str]] = {}  # the last line's time, and its mode

    def add(self, number: int, line: Mapping[str, Any]) -> None:
        """Takes a line, counted from 1. Raises what `refuse` raises."""
        name = line.get("session_id")
        if name is not None and not isinstance(name, str):
            self._refuse(number, "session_id is not a text")
        session = f"line {number}" if name is None else f"session {name}"
        mode = self._mode(number, line)
        think_s = self._time(number, line, session, mode)
        answer = self._positive(number, line, "output_length")
        text, messages = self._prompt(number, line)
        turn = JobTurn(text, answer, think_s, messages=messages, whole=mode == "history")
        self._turns.setdefault(session, []).append(turn)

    def jobs(self) -> list[LoadJob]:
        """The sessions, due as they began."""
        first = min(self._starts.values(), default=0.0)
        return [
            LoadJob(tuple(turns), (self._starts[name] - first) * self._pace)
            for name, turns in self._turns.items()
        ]

    def _mode(self, number: int, line: Mapping[str, Any]) -> str:
        """How its messages are meant; "": it has none."""
        if "messages" not in line:
            return ""
        mode = line.get("message_mode", "history")
        if mode not in MODES:
            self._refuse(number, f"message_mode is none of {' and '.join(MODES)}")
        return str(mode)

    def _time(self, number: int, line: Mapping[str, Any], session: str, mode: str) -> float:
        """Seconds from the answer before it; of a session's first line its start is noted."""
        stamp, delay = self._ms(number, line, "timestamp"), self._ms(number, line, "delay")
        if session not in self._last:
            self._starts[session] = 1e-3 * (stamp or 0.0)
            self._last[session] = stamp or 0.0, mode
            return 0.0
        before, meant = self._last[session]
        if meant != mode:
            self._refuse(
                number, "its session mixes messages, message_mode or input_length with another of these"
            )
        if delay is None and stamp is None:
            self._refuse(
                number, "it has neither a delay nor a timestamp, and is not its session's first line"
            )
        waits = delay if delay is not None else max((stamp or 0.0) - before, 0.0)
        self._last[session] = before + waits if stamp is None else stamp, mode
        return 1e-3 * waits * self._pace

    def _ms(self, number: int, line: Mapping[str, Any], name: str) -> float | None:
        value = line.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            self._refuse(number, f"{name} is not a number from 0 on")
        return float(value)

    def _prompt(self, number: int, line: Mapping[str, Any]) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        """The text, and the messages if there are some."""
        if "messages" in line:
            messages = line["messages"]
            if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
                self._refuse(number, "messages is not a list of objects with a role")
            return str(messages[-1].get("content", "")), tuple(messages)
        length = self._positive(number, line, "input_length")
        ids = line.get("hash_ids", [])
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            self._refuse(number, "hash_ids is not a list of whole numbers")
        needed = -(-length // BLOCK_TOKENS)
        if ids and len(ids) != needed:
            self._refuse(number, f"input_length {length} needs {needed} hash_ids, not {len(ids)}")
        names = [f"block {each}" for each in ids] or [f"line {number}, block {i}" for i in range(needed)]
        texts = [say(generator(self._seed, name), BLOCK_TOKENS) for name in names]
        return " ".join(" ".join(texts).split()[:length]), ()

    def _positive(self, number: int, line: Mapping[str, Any], name: str) -> int:
        value = line.get(name)
        if type(value) is not int or value < 1:
            self._refuse(number, f"{name} is not a positive whole number")
        return int(value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)
