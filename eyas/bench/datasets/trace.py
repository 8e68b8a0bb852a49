"""A trace of arrivals in Mooncake's format: lines of timestamp (ms), input_length, output_length, hash_ids.

The same hash id is the same block of 512 tokens, so that prompts share prefixes as the traced ones did. The
last block of a prompt may be cut.
"""

from __future__ import annotations

import math
from typing import Any

from eyas.bench.datasets.draw import DatasetOptions
from eyas.bench.jobs import LoadJob, draw_ids, generator
from eyas.common.errors import ConfigError
from eyas.simulator.workload import BLOCK_TOKENS


def jobs(draw: DatasetOptions) -> list[LoadJob]:
    """The file's first `draw.count` requests, due by their timestamps. Raises ConfigError."""
    lines = list(draw.json_lines())[: draw.count]
    if not lines:
        raise ConfigError(f"--dataset-path: {draw.path} has no request", param="dataset-path")
    blocks: dict[int, tuple[int, ...]] = {}
    entries = [_TraceEntry(draw, number, line) for number, line in lines]
    first_ms = min(entry.timestamp for entry in entries)
    requests = []
    for entry in entries:
        for id in entry.hash_ids:
            if id not in blocks:
                blocks[id] = draw_ids(generator(draw.seed, f"block {id}"), BLOCK_TOKENS)
        ids = tuple(token for id in entry.hash_ids for token in blocks[id])[: entry.input_length]
        due_s = 1e-3 * (entry.timestamp - first_ms) * draw.slowdown
        requests.append(LoadJob.single(ids, entry.output_length, due_s))
    return requests


class _TraceEntry:
    """One line, whose fields have been checked."""

    def __init__(self, draw: DatasetOptions, number: int, line: dict[str, Any]) -> None:
        timestamp = line.get("timestamp")
        if (
            isinstance(timestamp, bool)
            or not isinstance(timestamp, int | float)
            or not math.isfinite(timestamp)
        ):
            draw.refuse(number, "timestamp is not a number")
        self.timestamp: float = timestamp
        self.input_length = self._positive(draw, number, line, "input_length")
        self.output_length = self._positive(draw, number, line, "output_length")
        hash_ids = line.get("hash_ids")
        if not isinstance(hash_ids, list) or not all(type(id) is int for id in hash_ids):
            draw.refuse(number, "hash_ids is not a list of whole numbers")
        needed = -(-self.input_length // BLOCK_TOKENS)
        if len(hash_ids) != needed:
            problem = f"input_length {self.input_length} needs {needed} hash_ids, not {len(hash_ids)}"
            draw.refuse(number, problem)
        self.hash_ids: list[int] = hash_ids

    @staticmethod
    def _positive(draw: DatasetOptions, number: int, line: dict[str, Any], name: str) -> int:
        value = line.get(name)
        if type(value) is not int or value < 1:
            draw.refuse(number, f"{name} is not a positive whole number")
        return value
