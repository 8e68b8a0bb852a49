"""The places of experts of which some have replicas: on which ranks, in which slots, and how often rows chose
each.

Every rank knows all places, and changes its mind about them in the same step as the others. A row goes to one
copy of each expert that it chose, by the number of the row, of its rank and of the expert alone. So which
copy computes it follows from the step, and copies get equal shares. A rank counts what its own rows choose:
all ranks' counts together are the layer's loads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

import torch

from eyas.engine.parallel.expert_plan import NONE, ExpertSlots, Replicas


class ExpertPlaces:
    """One layer's, as a rank has them. `table` int32 [experts, 1 + ranks]: as `ExpertSlots.table`; `owners`
    int64 [slots]: the expert in each slot, 0 in an empty one; `loads` int32 [experts]: how often this rank's
    rows chose each, modulo 2^32. All stay where they are on the device, so graphs may read and write them.
    """

    def __init__(self, slots: ExpertSlots, rank: int, table: torch.Tensor, loads: torch.Tensor) -> None:
        self.slots, self.table, self.loads = slots, table, loads
        self.owners = torch.zeros(slots.ranks * slots.each, dtype=torch.int64, device=loads.device)
        self._rank = rank
        self.replicas = slots.empty
        self.set(slots.empty)

    @property
    def own(self) -> range:
        """The slots of this rank."""
        return range(self.slots.each * self._rank, self.slots.each * (self._rank + 1))

    @property
    def spares(self) -> Replicas:
        """The experts in this rank's spare slots."""
        first = self.slots.spares * self._rank
        return self.replicas[first : first + self.slots.spares]

    def set(self, replicas: Replicas) -> None:
        """From the next forward on rows go by these replicas, which are in their slots."""
        self.replicas = replicas
        table, owners = (
            torch.from_numpy(each) for each in (self.slots.table(replicas), self.slots.owners(replicas))
        )
        with torch.inference_mode():
            # copies of a host's memory that is not locked are made before it returns
            self.table.copy_(table, non_blocking=True)
            self.owners.copy_(owners, non_blocking=True)

    def count(self, chosen: torch.Tensor) -> None:
        """Counts the choices of rows, int64 [n, k]."""
        self.loads += chosen.flatten().bincount(minlength=self.slots.experts)

    def placed(self, chosen: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """The slot to which each choice goes: int64 [n, k] of experts -> of slots. `turns` int64 [n]: the
        number of each row among those of its rank, plus its rank's.
        """
        copies = self.table[chosen, 0]
        return self.table[chosen, 1 + (turns[:, None] + chosen) % copies].long()


class ReplicaMove(NamedTuple):
    """An expert that goes from its home to a spare slot of another rank: the slots, numbered through the
    ranks.
    """

    home: int
    spare: int


class SpreadExperts:
    """The places of all layers, on one rank. A layer has its own by the name of its tensors, so that parts
    which are made anew of other weights have them too.
    """

    def __init__(self, slots: ExpertSlots, rank: int, layers: int, device: str) -> None:
        """`layers`: how many have experts."""
        self.slots, self.rank = slots, rank
        self.loads = torch.zeros(layers, slots.experts, dtype=torch.int32, device=device)
        self._tables = self.loads.new_zeros(layers, slots.experts, 1 + slots.ranks)
        self._layers: dict[str, ExpertPlaces] = {}

    def of(self, layer: str) -> ExpertPlaces:
        """The places of a layer by its name; layers are numbered as they are named first."""
        if layer not in self._layers:
            number = len(self._layers)
            self._layers[layer] = ExpertPlaces(
                self.slots, self.rank, self._tables[number], self.loads[number]
            )
        return self._layers[layer]

    @property
    def layers(self) -> list[ExpertPlaces]:
        """The places of all layers, by number."""
        return [*self._layers.values()]

    def moves(self, layer: int, replicas: Replicas) -> list[list[ReplicaMove]]:
        """The copies to be made before a layer can have these replicas, turn by turn; in each a rank gets one
        at most.
        """
        turns = defaultdict[int, list[ReplicaMove]](list)
        counts = Counter[int]()
        for number, (expert, old) in enumerate(zip(replicas, self.layers[layer].replicas, strict=True)):
            if expert not in (NONE, old):
                rank = number // self.slots.spares
                turns[counts[rank]].append(ReplicaMove(self.slots.home(expert), self.slots.spare(number)))
                counts[rank] += 1
        return [*turns.values()]
