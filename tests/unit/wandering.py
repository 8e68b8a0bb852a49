"""A policy of depth that wanders: every choice is another one, so that every change of depth is played."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from eyas.common.config import EngineConfig
from eyas.engine.loading import build, device_build
from eyas.engine.speculation.depth import AdaptiveDepth, Batch
from eyas.engine.speculation.pacing import Pacing


class Wandering(AdaptiveDepth):
    """Follows `path`, if it has one; else it goes anywhere. `chosen`: where it was."""

    def __init__(self, config: EngineConfig, path: Iterator[int] | None) -> None:
        super().__init__(config.speculation, config.max_running)
        self._random = random.Random(4)
        self._path = path
        self.chosen: list[int] = []

    @property
    def current(self) -> int:
        return self.chosen[-1] if self.chosen else self.spec.steps

    def choose(self, batch: Batch) -> int:
        super().choose(batch)  # and forgets what it says
        if len(batch):
            self.chosen.append(self._random.choice(self.depths) if self._path is None else next(self._path))
        return self.current


def wander(patch: pytest.MonkeyPatch, path: list[int] | None = None) -> list[Wandering]:
    """Engines built from now on wander, along `path` again and again; lists their policies."""
    found: list[Wandering] = []

    def pacing_of(config: EngineConfig) -> Any:
        if not config.speculation.adaptive:
            return None
        found.append(Wandering(config, None if path is None else itertools.cycle(path)))
        return Pacing(found[-1])

    for module in (build, device_build):
        patch.setattr(module, "pacing_of", pacing_of, raising=False)
    return found
