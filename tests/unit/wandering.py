"""A policy of depth that wanders: every choice is another one, so that every change of depth is played."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.engine.loading import build, device_build
from eyas.engine.speculation.depth import AdaptiveDepth, DecodingBatch
from eyas.engine.speculation.depth_pacing import DepthPacing

SPEC = SpeculationConfig(adaptive=True)


class Wandering(AdaptiveDepth):
    """Follows `path`, if it has one; else it goes anywhere. `chosen`: where it was."""

    def __init__(self, spec: SpeculationConfig, slots: int, seed: int = 4, *, looks_up: bool = False) -> None:
        super().__init__(spec, slots, looks_up=looks_up)
        self._random = random.Random(seed)
        self.path: Iterator[int] | None = None
        self.chosen: list[int] = []

    @property
    def current(self) -> int:
        return self.chosen[-1] if self.chosen else self.spec.steps

    @property
    def beside_prompts(self) -> int:
        return self.spec.steps if self.current > 0 else 0

    def keep(self, size: int) -> bool:
        return not size

    def choose(self, batch: DecodingBatch) -> int:
        super().choose(batch)  # and forgets what it says
        if len(batch):
            self.chosen.append(self._random.choice(self.depths) if self.path is None else next(self.path))
        return self.current


def wander(patch: pytest.MonkeyPatch, path: list[int] | None = None) -> list[Wandering]:
    """Engines built from now on wander, along `path` again and again; lists their policies."""
    found: list[Wandering] = []

    def pacing_of(config: EngineConfig, *, looks_up: bool = False) -> Any:
        if not config.speculation.adaptive:
            return None
        found.append(Wandering(config.speculation, config.max_running, looks_up=looks_up))
        if path is not None:
            found[-1].path = itertools.cycle(path)
        return DepthPacing(found[-1])

    for module in (build, device_build):
        patch.setattr(module, "pacing_of", pacing_of)
    return found
