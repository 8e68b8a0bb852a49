"""Which experts the rows of a forward took: heard where a layer routes, whatever ops compute it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.layers.routing import Routes
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.parts import ExpertsPart, RouterPart

NONE = -1  # in the place of an expert, of a layer that has none


def most_taken(config: ModelConfig) -> int:
    """The most experts that a row takes in a layer; 0: none is known."""
    if config.foreign is not None:
        return 0
    return max((spec.per_row for spec in config.experts), default=0)


class ExpertRecorder:
    """Hears of one forward at a time, and knows of it until the next."""

    def __init__(self, config: ModelConfig) -> None:
        layers = config.layers
        self._mixed = [i for i, layer in enumerate(layers) if isinstance(layer.feed_forward, ExpertsSpec)]
        self._layers, self._most = len(layers), most_taken(config)
        self._taken: list[torch.Tensor] = []

    @contextlib.contextmanager
    def hearing(self, model: Any) -> Iterator[None]:
        """Hears of the forwards of a `Decoder` meanwhile."""
        model.recorder = self
        try:
            yield
        finally:
            model.recorder = None

    def begin(self) -> None:
        """A forward begins."""
        self._taken = []

    def add(self, experts: torch.Tensor, count: int) -> None:
        """The next layer with experts: those of its rows [R, at least count], best first."""
        self._taken.append(experts[:, :count])

    def rows(self, places: torch.Tensor) -> torch.Tensor:
        """The experts of the forward's rows at `places` [N]: int16 [N, layers, most experts of a row], NONE
        where a layer takes no more.
        """
        taken = torch.full((len(places), self._layers, self._most), NONE, device=places.device)
        for layer, experts in zip(self._mixed, self._taken, strict=True):
            taken[:, layer, : experts.shape[1]] = experts.index_select(0, places).to(taken.dtype)
        return taken.to(torch.int16)


class RecordingOps:
    """Other ops, of which a recorder hears each route. Rows pass no fused way around it."""

    def __init__(self, ops: Ops[Any, Any, Any], recorder: ExpertRecorder) -> None:
        self._ops = ops
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def chosen(self, read: Any, router: RouterPart, part: ExpertsPart[Any]) -> tuple[Any, Any]:
        """See `Ops.chosen`."""
        rows = self._ops.normed(read)
        return rows, self.route(rows, router)

    def route(self, rows: Any, part: RouterPart, judged: Any = None) -> Any:
        """See `Ops.route`."""
        routed = self._ops.route(rows, part, judged)
        experts = routed.experts if isinstance(routed, Routes) else routed.chosen.experts
        self._recorder.add(experts, part.spec.per_row)
        return routed
