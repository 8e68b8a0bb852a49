"""The kinds of draft heads that can be trained, and the file of each."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from torch import Tensor

from eyas.engine.checkpoint.config import ModelConfig
from eyas.train.heads.base import DraftHead, TargetTensors

KINDS = ("eagle3", "eagle", "mtp", "peagle", "dflash")
"""Modules of `eyas.train.heads` that are a `HeadKind`."""

OWN_VOCABULARY = ("eagle3", "peagle")
"""Those whose heads have outputs of their own, for the ids that answers use most."""


class HeadKind(Protocol):
    """The interface of a kind's module. `UNROLL`: the usual number of steps in training."""

    UNROLL: int

    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """The target's layers whose inputs make the feature; (): its rows after the final norm do."""

    def head_for(self, target: ModelConfig, ends: TargetTensors, token_map: Tensor | None) -> DraftHead:
        """A new head for a target. `token_map`: the ids of its vocabulary, where a kind has one."""

    def described(self, head: DraftHead, unroll: int) -> dict[str, object]:
        """The fields of its config.json beside its sizes. `unroll`: the steps that it learnt."""


def head_kind(name: str) -> HeadKind:
    """The module of a kind."""
    return cast(HeadKind, importlib.import_module(f"eyas.train.heads.{name}"))
