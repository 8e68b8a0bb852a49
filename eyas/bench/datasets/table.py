"""The datasets by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eyas.bench.datasets import multi_turn, random_ids, schema, sharegpt, trace
from eyas.bench.datasets.draw import DatasetOptions
from eyas.bench.jobs import LoadJob


@dataclass(frozen=True)
class Dataset:
    """A dataset: a few words about it, and the function that gives its jobs."""

    text: str
    jobs: Callable[[DatasetOptions], list[LoadJob]]


DATASETS = {
    "random": Dataset("token ids, lengths drawn", random_ids.jobs),
    "sharegpt": Dataset("first turns of a ShareGPT file", sharegpt.jobs),
    "multi-turn": Dataset("conversations: invented, or of a ShareGPT file", multi_turn.jobs),
    "trace": Dataset("a file in Mooncake's format, at its own times", trace.jobs),
    "schema": Dataset("JSON schemas: built-in, or of a file", schema.jobs),
}
