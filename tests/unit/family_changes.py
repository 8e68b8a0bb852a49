"""Tiny models of each family beside transformers, and changes of a configuration that must show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.models.table import read_model
from tests.unit.families import VOCAB
from tests.unit.model_rig import Rig

LENGTH = 150
CLOSE = 1e-4
"""Logits are a few units wide and both sides add up in float32, in other orders."""


def prompt(length: int = LENGTH) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(5)).tolist()


def wanted(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def whole(rig: Rig, tokens: list[int]) -> torch.Tensor:
    return rig.logits([QuerySpan(rig.table(len(tokens)), 0, len(tokens))], tokens)


def edit(folder: Path, **changes: Any) -> None:
    """Changes keys of its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


Change = Callable[[ModelConfig], ModelConfig]


def attention(**fields: Any) -> Change:
    def layer(spec: LayerSpec) -> LayerSpec:
        return dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, **fields))

    return lambda config: dataclasses.replace(config, layers=tuple(layer(spec) for spec in config.layers))


def feed_forward(**fields: Any) -> Change:
    """Of all layers; what only experts have, of the layers with experts."""

    def layer(spec: LayerSpec) -> LayerSpec:
        if not all(hasattr(spec.feed_forward, name) for name in fields):
            return spec
        return dataclasses.replace(spec, feed_forward=dataclasses.replace(spec.feed_forward, **fields))

    return lambda config: dataclasses.replace(config, layers=tuple(layer(spec) for spec in config.layers))


def norms(**fields: Any) -> Change:
    def layer(spec: LayerSpec) -> LayerSpec:
        return dataclasses.replace(spec, norms=dataclasses.replace(spec.norms, **fields))

    return lambda config: dataclasses.replace(config, layers=tuple(layer(spec) for spec in config.layers))


def common(**fields: Any) -> Change:
    return lambda config: dataclasses.replace(config, **fields)


ROPE = RopeConfig(10000.0)


def layers(change: Callable[[int, LayerSpec], LayerSpec]) -> Change:
    """By a layer's number."""

    def changed(config: ModelConfig) -> ModelConfig:
        return dataclasses.replace(config, layers=tuple(change(i, x) for i, x in enumerate(config.layers)))

    return changed


def every(**fields: Any) -> Change:
    """Fields of every layer itself."""
    return layers(lambda _, layer: dataclasses.replace(layer, **fields))


def unnoticed(
    folder: Path, specials: dict[str, Change], expected: torch.Tensor, tokens: list[int]
) -> list[str]:
    """The specials without which the logits are as expected. A decoder that leaves out tensors does not even
    start.
    """
    config, found = read_model(folder), []
    for special, change in specials.items():
        other = change(config)
        assert other != config, special
        try:
            error = (whole(Rig(folder, other), tokens) - expected).abs().max()
        except ConfigError as refused:
            assert "does not read" in str(refused) or "has no tensor" in str(refused)
        else:
            found += [special] * bool(error < 100 * CLOSE)
    return found
