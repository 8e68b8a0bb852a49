"""Prompts of random token ids, with lengths as SGLang's `random` draws them."""

from __future__ import annotations

from eyas.bench.datasets.draw import DatasetOptions
from eyas.bench.jobs import LoadJob, draw_ids, draw_lengths, generator
from eyas.common.errors import ConfigError

COUNT = 100


def jobs(draw: DatasetOptions) -> list[LoadJob]:
    """`draw.count` jobs; lengths are uniform from max(1, length * ratio) to length. Raises ConfigError."""
    if draw.path is not None:
        raise ConfigError("--dataset-path: random has no file: see --dataset-name", param="dataset-path")
    count = draw.count or COUNT
    inputs = draw_lengths(generator(draw.seed, "input lengths"), draw.input_len, draw.range_ratio, count)
    outputs = draw_lengths(generator(draw.seed, "output lengths"), draw.output_len, draw.range_ratio, count)
    ids = generator(draw.seed, "token ids")
    return [
        LoadJob.single(draw_ids(ids, length), answer) for length, answer in zip(inputs, outputs, strict=True)
    ]
