"""Runs read from JSONL, one per line, as `eyas bench serve --output-details` or SGLang's client writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.common.errors import ConfigError

Floats = npt.NDArray[np.float64]
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "errors")
REMEDY = "write it with `eyas bench serve --output-details --output-file FILE`"


@dataclass(frozen=True)
class SavedRun:
    """One run. Every array has an element per request; where a request has no such figure, it is NaN.

    All in seconds. `starts_s`: when each was sent, since the run's start; None if the line does not say.
    `tpots_s`: of those with two tokens or more. `latencies_s`: to the last token. `figures`: the whole line.
    """

    name: str
    figures: dict[str, Any]
    ttfts_s: Floats
    tpots_s: Floats
    latencies_s: Floats
    starts_s: Floats | None

    @property
    def requests(self) -> int:
        """The number of requests sent."""
        return len(self.ttfts_s)

    @property
    def failed(self) -> int:
        """The number of failed requests."""
        return int(np.isnan(self.ttfts_s).sum())

    def tokens_per_second(self, width_s: float) -> Floats:
        """Output tokens per second in each `width_s` of the run: [ceil(run / width_s)]. Needs `starts_s`.

        A chunk's tokens are not on record: each chunk of a request counts as its mean.
        """
        assert self.starts_s is not None
        gaps, tokens = self.figures["itls"], self.figures["output_lens"]
        times, weights = [], []
        for i in np.flatnonzero(~np.isnan(self.ttfts_s)):
            chunks = self.starts_s[i] + self.ttfts_s[i] + np.concatenate(([0.0], np.cumsum(gaps[i])))
            times.append(chunks)
            weights.append(np.full(len(chunks), tokens[i] / len(chunks)))
        where = (np.concatenate(times) / width_s).astype(int)
        return np.bincount(where, np.concatenate(weights)) / width_s


def read_runs(path: Path) -> list[SavedRun]:
    """The runs of a file, in order, each named after the file.

    Raises ConfigError, which names the line, for what is no JSON object or has no details.
    """
    try:
        lines = path.read_text().split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", param=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: it is not UTF-8", param=str(path)) from error
    runs = [parse_run(line, f"{path}:{i}", path.stem) for i, line in enumerate(lines, 1) if line.strip()]
    if not runs:
        raise ConfigError(f"{path}: has no line: {REMEDY}", param=str(path))
    return runs


def parse_run(line: str, where: str, name: str) -> SavedRun:
    """The run of one line; `where` is what errors name. Raises ConfigError as `read_runs`."""
    try:
        figures = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}", param=where) from error
    if not isinstance(figures, dict):
        raise ConfigError(f"{where}: is not a JSON object", param=where)
    return from_figures(figures, where, name)


def from_figures(figures: dict[str, Any], where: str, name: str) -> SavedRun:
    """The run that a line's object describes. Raises ConfigError as `read_runs`."""
    if missing := [field for field in DETAILS if not isinstance(figures.get(field), list)]:
        raise ConfigError(f"{where}: has no details ({', '.join(missing)}): {REMEDY}", param=where)
    count = len(figures["ttfts"])
    if uneven := [field for field in DETAILS if len(figures[field]) != count]:
        raise ConfigError(f"{where}: {uneven[0]} and ttfts have different lengths", param=where)
    if not all(_is_numbers(gaps) for gaps in figures["itls"]):
        raise ConfigError(f"{where}: itls holds something that is no list of numbers", param=where)
    good = np.array([not error for error in figures["errors"]], dtype=bool)
    if not good.any():
        raise ConfigError(f"{where}: no request of this run succeeded", param=where)
    ttfts, tokens = (
        np.where(good, _numbers(figures, name, where), np.nan) for name in ("ttfts", "output_lens")
    )
    if "e2e_latencies" in figures:
        latencies = np.where(good, _numbers(figures, "e2e_latencies", where), np.nan)
    else:  # SGLang's client: what the gaps between chunks add up to
        latencies = ttfts + [float(np.sum(gaps)) for gaps in figures["itls"]]
    tpots = np.where(tokens > 1, (latencies - ttfts) / np.maximum(tokens - 1, 1), np.nan)
    starts = _numbers(figures, "start_times", where) if "start_times" in figures else None
    return SavedRun(name, figures, ttfts, tpots, latencies, starts)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int | float) for one in value)


def _numbers(figures: dict[str, Any], field: str, where: str) -> Floats:
    """A field that has a number per request."""
    try:
        values = np.array(figures[field], dtype=float)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {field} holds something that is no number", param=where) from error
    if values.shape != (len(figures["ttfts"]),):
        raise ConfigError(f"{where}: {field} and ttfts have different lengths", param=where)
    return values
