"""Replicas of experts on all ranks: rank 0 says which, and every rank copies and goes by them from the same
step on.

Replicas come from their experts' homes, from rank to rank. On GPUs all of it is in the order of the steps, so
nobody waits for a device: the steps that were launched before go by the old places, those after by the new.
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
    """The experts of one rank: their loads, and the replicas that it has. All ranks do the same together."""

    def __init__(self, spread: SpreadExperts, parts: Sequence[ExpertsPart[Any]]) -> None:
        """`parts`: of the layers of `spread`, in its order."""
        self.spread, self._parts = spread, parts

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """The spread of a model; None: its experts have no replicas."""
        if not isinstance(model, Decoder) or model.machine.spread is None:
            return None
        parts = [layer.experts for layer in model.layers]
        return cls(model.machine.spread, [part for part in parts if part is not None])

    @torch.inference_mode()
    def summed(self, group: ProcessGroup) -> torch.Tensor:
        """How often rows of all ranks chose each expert, modulo 2^32: int32 [layers, experts]."""
        loads = self.spread.loads.clone()
        group.all_reduce(loads)
        return loads

    @torch.inference_mode()
    def replicate(self, group: ProcessGroup, layer: int, replicas: Replicas) -> None:
        """Fills this rank's spare slots of a layer, and goes by them from the next forward on."""
        part, each = self._parts[layer], self.spread.slots.each
        for moves in self.spread.moves(layer, replicas):
            out = [move for move in moves if move.home // each == group.rank]
            sent = [(one, to // each) for home, to in out for one in part.expert(home % each)]
            came = [move for move in moves if move.spare // each == group.rank]  # one at most
            room = [[torch.empty_like(one) for one in part.expert(spare % each)] for _, spare in came]
            received = [(one, home // each) for (home, _), own in zip(came, room, strict=True) for one in own]
            group.hand_over(sent, received)
            for (_, spare), own in zip(came, room, strict=True):
                part.put_expert(spare % each, own)
        self.spread.layers[layer].set(replicas)


class LeaderSpread:
    """The same of all ranks, as rank 0 has it done between two steps. None of it waits for a GPU."""

    def __init__(self, own: RankSpread, leader: RankLeader) -> None:
        self._own, self._leader = own, leader
        self._loads: torch.Tensor | None = None  # on the host, once ..
        self._summed: torch.cuda.Event | None = None  # .. this has passed, if there is one

    @property
    def slots(self) -> ExpertSlots:
        """The slots of a layer's experts."""
        return self._own.spread.slots

    @property
    def replicas(self) -> list[Replicas]:
        """The replicas of each layer, as they are now."""
        return [places.replicas for places in self._own.spread.layers]

    def begin_loads(self) -> None:
        """Has the ranks' loads added up."""
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
        """How often each layer's experts were chosen, modulo 2^32, [layers, experts], until the loads are
        begun again; None: it is not known yet.
        """
        if self._loads is None or (self._summed is not None and not self._summed.query()):
            return None
        return self._loads.numpy().view(np.uint32)

    def replicate(self, layer: int, replicas: Replicas) -> None:
        """Has all ranks go by these replicas of a layer. Raises EngineError if one is gone."""
        with self._leader.together():
            self._leader.tell(RankCall(REPLICATE, (layer, *replicas)))
            self._own.replicate(self._leader.group, layer, replicas)


def spread_calls(own: RankSpread | None, group: ProcessGroup) -> RankCalls:
    """The calls by which a rank above 0 moves its experts, by kind."""
    if own is None:
        return {}

    def sum_loads(_: RankCall) -> None:
        own.summed(group)

    def replicate(call: RankCall) -> None:
        layer, *replicas = call.numbers
        own.replicate(group, layer, tuple(replicas))

    return {SUM_LOADS: sum_loads, REPLICATE: replicate}
