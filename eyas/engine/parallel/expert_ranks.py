"""Experts spread over ranks, whole: rows go where their experts are, and what these make of them comes back.

Every rank has rows of its own, attends with them alone, and has an equal share of each layer's experts, in
the order of their numbers, with replicas of others behind them if there are some. Back comes one row for each
choice of a row, not a sum: the rows' owner adds them up, in the order in which it would alone, so that the
bits are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from eyas.engine.parallel.expert_places import ExpertPlaces
from eyas.engine.parallel.expert_plan import ExpertSlots
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo


class ExpertRanks:
    """One rank's view. `own`: the numbers of its experts. Each rank says `begin` before each step.

    It is there before its group: ranks load for a long time, and a group's waits are short.
    """

    def __init__(self, rank_info: RankInfo, slots: ExpertSlots) -> None:
        """`slots`: of each layer's experts."""
        self._each = slots.each
        self.own = range(slots.homes * rank_info.rank, slots.homes * (rank_info.rank + 1))
        self._group = ProcessGroup(RankInfo(), "cpu")
        self._counts: Sequence[int] = ()

    def begin(self, group: ProcessGroup, counts: Sequence[int]) -> None:
        """Sets the number of rows of each rank in the step that follows, the same on every rank; not all are
        0.
        """
        self._group, self._counts = group, counts

    def placed(self, chosen: torch.Tensor, places: ExpertPlaces) -> torch.Tensor:
        """The slots to which the choices of a layer's rows go, which are counted: int64 [R, k] of experts ->
        of slots. Of rows of padding any.
        """
        rank, turns = self._group.rank, torch.arange(len(chosen))
        places.count(chosen[: self._counts[rank]])
        return places.placed(chosen, turns + rank)

    def made(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The results of the experts in the chosen slots, which without replicas have the experts' numbers:
        x [R, hidden], chosen int64 [R, k] -> [R, k, hidden].

        All ranks call it together, layer after layer. Rows beyond the rank's own count are padding, and
        become zeros. `compute`: the same of this rank's slots, numbered from 0, for one choice per row.
        """
        group, counts = self._group, self._counts
        own = counts[group.rank]
        everyone, choices = (group.gather_rows(each[:own], counts) for each in (x, chosen))
        rows, places = (choices // self._each == group.rank).nonzero(as_tuple=True)
        mine = compute(everyone[rows], choices[rows, places][:, None] % self._each)[:, 0]
        owners = torch.arange(group.ranks).repeat_interleave(torch.tensor(counts))[rows]
        homes = chosen[:own].flatten() // self._each
        came = group.exchange(mine, self._counted(owners), self._counted(homes))
        made = x.new_zeros(x.shape[0] * chosen.shape[1], x.shape[1])
        made[homes.argsort(stable=True)] = came  # each rank sends in the order of rows and of their choices
        return made.view(*chosen.shape, x.shape[1])

    def _counted(self, ranks: torch.Tensor) -> list[int]:
        """Counts how often each rank is named in int64 [n]."""
        counts: list[int] = ranks.bincount(minlength=self._group.ranks).tolist()
        return counts
