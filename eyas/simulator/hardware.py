"""The speed of one worker: measured step times, memory, queue and link, from a file or built in."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError
from eyas.common.prompt_room import StepBudget
from eyas.common.step_times import PiecewiseCurve, StepTimes

EXAMPLE = Path(__file__).parent / "llama-3.1-8b-h200.json"
CURVES = ("rows_ms", "context_ms")
TIMES = ("pairs_ms", "mixed_ms", "front_ms", "link_ms")
SIZES = (
    "grain",
    "chunk_tokens",
    "mixed_tokens",
    "pool_tokens",
    "max_running",
    "max_waiting",
    "kv_bytes_per_token",
)
TEXTS = ("name", "source")


@dataclass(frozen=True)
class WindowedKv:
    """Layers whose pages are freed behind their window: their part of a token's bytes, and the most tokens
    of which a sequence holds it.
    """

    share: float
    tokens: int


@dataclass(frozen=True)
class WorkerHardware:
    """A worker. `front_s`: what a first token takes outside the engine. `pool_tokens`: KV that fits.

    `link_bytes_per_s`, `link_s`: pages leave a worker at this rate, after this delay. `state_bytes`: of a
    sequence, which leave behind its pages.
    """

    name: str
    source: str
    times: StepTimes
    budget: StepBudget
    pool_tokens: int
    max_running: int
    max_waiting: int
    kv_bytes_per_token: int
    link_bytes_per_s: float
    link_s: float
    front_s: float
    windows: tuple[WindowedKv, ...] = ()
    state_bytes: int = 0

    @property
    def lasting(self) -> float:
        """The part of a token's bytes that a sequence holds to its end."""
        return 1 - sum(each.share for each in self.windows)

    def held(self, tokens: int) -> int:
        """Tokens of KV in all layers that take as much room as a sequence of `tokens` tokens does."""
        windowed = sum(each.share * min(tokens, each.tokens) for each in self.windows)
        return math.ceil(tokens * self.lasting + windowed)


def example() -> WorkerHardware:
    """Llama-3.1-8B on one H200, as docs/experiments.md measured it."""
    return read_hardware(EXAMPLE)


def read_hardware(path: Path) -> WorkerHardware:
    """The worker that a file of rates describes. Raises ConfigError that names the field."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--rates: {path} cannot be read: {error.strerror}", param="rates") from error
    except ValueError as error:
        raise ConfigError(f"--rates: {path} is not JSON: {error}", param="rates") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--rates: {path} is not a JSON object", param="rates")
    return parse_hardware(fields)


def parse_hardware(fields: Mapping[str, Any]) -> WorkerHardware:
    """Reads the hardware from a file's fields. Raises ConfigError, which names the field."""
    known = {*CURVES, *TIMES, *SIZES, *TEXTS, "link_gb_per_s"}
    for name in sorted(known - fields.keys()):
        raise ConfigError(f"--rates: {name} is missing", param="rates")
    for name in sorted(fields.keys() - known):
        raise ConfigError(f"--rates: {name} is no field of a table of rates", param="rates")
    curves = {name: _curve(name, fields[name]) for name in CURVES}
    times = {name: _number(name, fields[name], 0.0) for name in TIMES}
    sizes = {name: _size(name, fields[name]) for name in SIZES}
    if sizes["mixed_tokens"] > sizes["chunk_tokens"]:
        raise ConfigError("--rates: mixed_tokens is more than chunk_tokens", param="rates")
    return WorkerHardware(
        name=str(fields["name"]),
        source=str(fields["source"]),
        times=StepTimes(
            rows_ms=curves["rows_ms"],
            context_ms=curves["context_ms"],
            pairs_ms=times["pairs_ms"],
            mixed_ms=times["mixed_ms"],
            grain=sizes["grain"],
        ),
        budget=StepBudget(sizes["chunk_tokens"], sizes["mixed_tokens"]),
        pool_tokens=sizes["pool_tokens"],
        max_running=sizes["max_running"],
        max_waiting=sizes["max_waiting"],
        kv_bytes_per_token=sizes["kv_bytes_per_token"],
        link_bytes_per_s=1e9 * _number("link_gb_per_s", fields["link_gb_per_s"], 1e-6),
        link_s=1e-3 * times["link_ms"],
        front_s=1e-3 * times["front_ms"],
    )


def _number(name: str, value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise ConfigError(f"--rates: {name} is {value!r}, not a number from {least:g}", param="rates")
    return float(value)


def _size(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"--rates: {name} is {value!r}, not a positive whole number", param="rates")
    return value


def _curve(name: str, value: object) -> PiecewiseCurve:
    """Checks a curve: at least two points [x, ms], x rising, and no time that falls to 0."""
    pairs = value if isinstance(value, list) else []
    if len(pairs) < 2 or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ConfigError(f"--rates: {name} is not a list of two points [x, ms] or more", param="rates")
    points = tuple((_number(name, x, 0.0), _number(name, y, 0.0)) for x, y in pairs)
    if any(left[0] >= right[0] for left, right in zip(points, points[1:], strict=False)):
        raise ConfigError(f"--rates: the points of {name} do not rise in x", param="rates")
    if points[-1][1] < points[-2][1]:
        raise ConfigError(f"--rates: {name} falls at its end: it would reach 0", param="rates")
    return PiecewiseCurve(points)
