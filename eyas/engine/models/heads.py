"""The draft heads that there are: one line per kind, naming the file that knows it.

Which kind a folder holds is seen by its tensors, never by what its config.json calls itself.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import DraftConfig, ModelConfig
from eyas.engine.checkpoint.folder import read_config
from eyas.engine.checkpoint.token_map import read_token_map, refused
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.models import llama
from eyas.engine.models.base import DraftModel, FeatureTap, FinalNorm
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.keys import reading
from eyas.engine.models.ops.machine import Machine

HEADS = ("mtp", "eagle", "eagle3")
"""The modules of `eyas.engine.models` that are a `HeadFamily`, in the order in which they see a folder."""

MOST_LAYERS = 128


class HeadFamily(Protocol):
    """What the module of a kind of head holds. `NAME`: with its article, for errors."""

    NAME: str

    def describe_head(
        self, raw: Raw, folder: Path, target: ModelConfig, load_format: str
    ) -> DraftConfig | None:
        """The head of a folder whose config.json is `raw`; None if its tensors are another kind's.

        With `load_format` "dummy" there are no tensors, and a kind says yes to any config.json that it could
        be. Raises what `reading` makes sentences of, and ConfigError if the head does not fit `target`.
        """

    def spelling(self, name: str) -> str:
        """The name by which the head's classes ask for the tensor that is stored as `name`."""

    def load_tap(
        self, config: DraftConfig, weights: WeightSource, final_norm: FinalNorm, machine: Machine[Any]
    ) -> FeatureTap:
        """The half beside the target, whose `final_norm` some heads' features have passed."""

    def load_draft(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[Any]
    ) -> DraftModel[Any]:
        """The half that drafts. `ends`: the target's, for a head without its own."""


def read_head(
    folder: Path | str, target: ModelConfig, load_format: str = "auto", capture_layers: tuple[int, ...] = ()
) -> DraftConfig:
    """The draft head that a folder holds. Raises ConfigError if it is none, or does not fit `target`.

    `capture_layers`: instead of the layers in its config.json (--draft-capture-layers).
    """
    folder = Path(folder)
    raw = read_config(folder)
    kinds = [head_family(name) for name in HEADS]
    for family in kinds:
        with reading(folder):
            config = family.describe_head(raw, folder, target, load_format)
        if config is not None:
            return _capturing(config, target, capture_layers)
    if folder.resolve() == target.folder.resolve():
        raise ConfigError(f"draft head {folder}: it is the model's own folder, and has no MTP layer")
    names = " nor ".join(family.NAME for family in kinds)
    raise ConfigError(f"draft head {folder}: it is not {names} (another kind: docs/adding-a-draft-head.md)")


def target_alike(folder: Path) -> ModelConfig:
    """A target of the sizes in a head's own config.json, with as many layers as the largest models have.

    For who asks what a head is, and has no target. Raises ConfigError if config.json does not say.
    """
    raw = read_config(folder)
    with reading(folder):
        alike = llama.describe({"num_hidden_layers": 1, **raw}, folder)
    return dataclasses.replace(alike, layers=alike.layers[:1] * MOST_LAYERS)


def _capturing(config: DraftConfig, target: ModelConfig, asked: tuple[int, ...]) -> DraftConfig:
    """The head with the captured layers that are `asked` for, or its own. ConfigError if there are none."""
    flag, last = "draft-capture-layers", target.num_layers
    if asked and config.capture_layers == (last,):
        what = f"draft head {config.folder} is fed with what leaves the last layer, and with no other"
        raise ConfigError(f"--{flag}: {what}", param=flag)
    layers = asked or config.capture_layers
    named = ", ".join(map(str, layers))
    if asked and config.captures not in (0, len(asked)):
        what = f"draft head {config.folder} is fed with {config.captures} layers"
        raise ConfigError(f"--{flag}: {what}, and {named} are {len(asked)}", param=flag)
    if not all(0 <= layer <= last for layer in layers):
        text = f"the target of draft head {config.folder} has the layers 0 to {last}"
        if asked:
            raise ConfigError(f"--{flag}: {named}: {text}", param=flag)
        text = f"draft head {config.folder} captures the layers {named}, and the target has 0 to {last}"
        raise ConfigError(f"{text} (--{flag} names others)", param=flag)
    return dataclasses.replace(config, capture_layers=layers)


def with_token_map(head: DraftConfig, target: ModelConfig, config: EngineConfig) -> DraftConfig:
    """The head that proposes the ids in the file of --speculative-token-map alone; `head`, if there is none.

    Raises ConfigError, which names the flag, for a head whose outputs are not the target's, and for a file
    that does not fit.
    """
    if config.speculative_token_map is None:
        return head
    if head.own_outputs:
        name = head_family(head.algorithm).NAME
        raise refused(f"{name} with an output head of its own ({head.folder}) proposes what that knows")
    ids = read_token_map(Path(config.speculative_token_map), target.vocab_size)
    if len(ids) < config.speculation.topk:
        raise refused(f"{config.speculative_token_map} has {len(ids)} ids, fewer than --spec-topk")
    if len(ids) % (ranks := config.tensor_parallel_size):
        text = f"{config.speculative_token_map} has {len(ids)} ids, which {ranks} ranks cannot divide"
        raise refused(f"{text} (--tensor-parallel-size)")
    return dataclasses.replace(head, token_ids=ids)


def head_family(algorithm: str) -> HeadFamily:
    """The module that knows a kind of head, by its line in `HEADS`, which is `DraftConfig.algorithm`."""
    return cast(HeadFamily, importlib.import_module(f"eyas.engine.models.{algorithm}"))


def load_draft(
    config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[Any]
) -> DraftModel[Any]:
    """The half that drafts, of any kind of head; the parameters are those of `HeadFamily.load_draft`.

    One that drafts with some rows of the target's output head has their ids for its map.
    """
    ends = ends.limited_to(config.token_ids, machine)
    draft = head_family(config.algorithm).load_draft(config, weights, ends, machine)
    if config.token_ids:
        draft.token_map = torch.tensor(config.token_ids, device=weights.placement.device)
    return draft
