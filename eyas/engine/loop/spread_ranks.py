"""Replicas of experts on all ranks: rank 0 chooses them, and every rank uses them from the same step on.

Replicas are copied from their experts' home ranks. On GPUs the copies are ordered with the steps, so no host
waits for a device: steps launched before use the old placement, those after the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.parts import ExpertsPart
from eyas.engine.parallel.expert_places import SpreadExperts
from eyas.engine.parallel.expert_plan import ExpertSlots, Replicas
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.leader import RankLeader
from eyas.engine.parallel.ranks import RankCall, RankCalls

SUM_LOADS, REPLICATE = "sum loads of experts", "replicate experts"


class RankSpread:
    """The experts of one rank: their loads and replicas. Methods are collective: all ranks call them
    together.
    """

    def __init__(self, spread: SpreadExperts, parts: Sequence[ExpertsPart[Any]]) -> None:
        """`parts`: of the layers of `spread`, in its order."""
        self.spread, self._parts = spread, parts

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """The experts of a model; None if they have no replicas."""
        if not isinstance(model, Decoder) or model.machine.spread is None:
            return None
        parts = [layer.experts for layer in model.layers]
        return cls(model.machine.spread, [part for part in parts if part is not None])

    @torch.inference_mode()
    def summed(self, group: ProcessGroup) -> torch.Tensor:
        """The number of rows of all ranks that chose each expert, modulo 2^32: int32 [layers, experts]."""
        loads = self.spread.loads.clone()
        group.all_reduce(loads)
        return loads

    @torch.inference_mode()
    def replicate(self, group: ProcessGroup, layer: int, replicas: Replicas) -> None:
        """Copies experts into this rank's spare slots of a layer, which the next forward uses."""
        part, each = self._parts[layer], self.spread.slots.each
        for moves in self.spread.moves(layer, replicas):
            out = [move for move in moves if move.home // each == group.rank]
            sent = [(weight, to // each) for home, to in out for weight in part.expert(home % each)]
            into = [move for move in moves if move.spare // each == group.rank]  # one at most
            copies = [[torch.empty_like(w) for w in part.expert(spare % each)] for _, spare in into]
            received = [(w, home // each) for (home, _), own in zip(into, copies, strict=True) for w in own]
            group.hand_over(sent, received)
            for (_, spare), own in zip(into, copies, strict=True):
                part.put_expert(spare % each, own)
        self.spread.layers[layer].set(replicas)


class LeaderSpread:
    """The experts of all ranks, as rank 0 controls them between two steps. No method waits for a GPU."""

    def __init__(self, own: RankSpread, leader: RankLeader) -> None:
        self._own, self._leader = own, leader
        self._loads: torch.Tensor | None = None  # on the host, valid once `_summed` has passed
        self._summed: torch.cuda.Event | None = None  # None on a CPU

    @property
    def slots(self) -> ExpertSlots:
        """The slots of a layer's experts."""
        return self._own.spread.slots

    @property
    def replicas(self) -> list[Replicas]:
        """The current replicas of each layer."""
        return [places.replicas for places in self._own.spread.layers]

    def begin_loads(self) -> None:
        """Begins to sum the ranks' loads."""
        with self._leader.together():
            self._leader.tell(RankCall(SUM_LOADS))
            loads = self._own.summed(self._leader.group)
        if self._loads is None:
            self._loads = torch.empty(loads.shape, dtype=loads.dtype, pin_memory=loads.is_cuda)
        self._loads.copy_(loads, non_blocking=True)
        if loads.is_cuda:
            self._summed = torch.cuda.Event()
            self._summed.record()

    def loads(self) -> npt.NDArray[np.uint32] | None:
        """The number of choices of each layer's experts, modulo 2^32: [layers, experts]; valid until the next
        `begin_loads`. None while the sums are computed.
        """
        if self._loads is None or (self._summed is not None and not self._summed.query()):
            return None
        return self._loads.numpy().view(np.uint32)

    def replicate(self, layer: int, replicas: Replicas) -> None:
        """Sets a layer's replicas on all ranks. Raises EngineError if a rank is lost."""
        with self._leader.together():
            self._leader.tell(RankCall(REPLICATE, (layer, *replicas)))
            self._own.replicate(self._leader.group, layer, replicas)


def spread_calls(own: RankSpread | None, group: ProcessGroup) -> RankCalls:
    """The handlers of rank 0's calls on a rank above 0, by kind."""
    if own is None:
        return {}

    def sum_loads(_: RankCall) -> None:
        own.summed(group)

    def replicate(call: RankCall) -> None:
        layer, *replicas = call.numbers
        own.replicate(group, layer, tuple(replicas))

    return {SUM_LOADS: sum_loads, REPLICATE: replicate}
