"""The experts that the rows of a run took, for a run in another precision to follow.

Of a near tie each precision takes what its own rounding prefers, and then everything behind it differs,
though nothing is wrong. So a second run takes the first one's experts in such rows. It must have chosen the
same itself but for near ties, and those in few rows: a wrong router is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.experts.route import ChosenExperts
from eyas.engine.kernels.products.blocks import NormedRows
from eyas.engine.layers import routing
from eyas.engine.models.ops import expert_products
from eyas.engine.models.ops.parts import Routed, RouterPart

TIE = 0.4  # of the standard deviation of a row's merits: a nearer one may go either way
WEIGHT = 0.05  # of the sizes of a row's weights together: one that is further off is followed too
FEW = 0.15  # of a run's rows, over all layers, that may follow
WAYS = "routed", "routed_at_once", "routed_row"


@dataclass(frozen=True)
class TakenRows:
    """A layer's choice for the rows of a forward, as `spec` says. `merits` float32 [m, experts]: what experts
    are chosen by.
    """

    chosen: ChosenExperts
    merits: torch.Tensor
    spec: ExpertsSpec


class TakenExperts:
    """Every layer's of every forward of a run."""

    def __init__(self) -> None:
        self._taken: list[TakenRows] = []

    def recorded(self) -> AbstractContextManager[Any]:
        """Within it, a run is recorded."""

        def seen(made: Routed, part: RouterPart, judged: NormedRows | None) -> Routed:
            self._taken.append(TakenRows(made.chosen, merits(judged or made.rows, part), part.spec))
            return made

        return _routing_through(seen)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within it, a run of the same forwards follows. Raises AssertionError for more than near ties."""
        left, counts = iter(self._taken), [0, 0]

        def seen(made: Routed, part: RouterPart, judged: NormedRows | None) -> Routed:
            chosen, changed = followed(made.chosen, next(left))
            counts[0] += changed
            counts[1] += len(chosen.experts)
            return replace(made, chosen=chosen)

        with _routing_through(seen):
            yield
        assert next(left, None) is None, "the run had fewer forwards"
        assert counts[0] <= FEW * counts[1], f"{counts[0]} of {counts[1]} rows took other experts"


def merits(rows: NormedRows, part: RouterPart) -> torch.Tensor:
    """The numbers that experts of rows are chosen by, float32 [m, experts]."""
    logits = torch.nn.functional.linear(rows.plain.float(), part.weight.float())
    if part.bias is not None:
        logits = logits + part.bias
    logits = logits[:, : part.spec.experts]
    if part.spec.scores != "sigmoid" and part.correction is None:
        return logits
    scores = routing.SCORES[part.spec.scores](logits)
    return scores if part.correction is None else scores + part.correction


def groups_tie(merit: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    """Whether rows' last group is hardly better than the next one, bool [m]: each has other experts."""
    if spec.groups == spec.topk_groups:
        return torch.zeros(len(merit), dtype=torch.bool, device=merit.device)
    best = merit.view(len(merit), spec.groups, -1).topk(spec.group_best, -1).values.sum(-1)
    ordered = best.sort(1, descending=True).values
    return ordered[:, spec.topk_groups - 1] - ordered[:, spec.topk_groups] <= TIE * merit.std(1)


def followed(own: ChosenExperts, taken: TakenRows) -> tuple[ChosenExperts, int]:
    """A run's own choice, but for rows that differ from what was taken; and how many do.

    Raises AssertionError where the difference is no near tie.
    """
    before, merit = taken.chosen, taken.merits
    count = merit.shape[1]
    found, expected = (_by_expert(each.experts, each.weights, count) for each in (own, before))
    mine, theirs = (
        _by_expert(each.experts, torch.ones_like(each.weights), count)[:, :count] > 0
        for each in (own, before)
    )
    left = merit.masked_fill(~theirs | mine, -torch.inf).amax(1)
    instead = merit.masked_fill(~mine | theirs, torch.inf).amin(1)
    gaps = (left - instead).clamp(min=0) / merit.std(1)
    gaps = gaps.masked_fill(groups_tie(merit, taken.spec), 0.0)
    assert float(gaps.max()) <= TIE, f"a row left an expert that was better by {float(gaps.max()):.2f}"
    off = (found - expected).abs().amax(1) > WEIGHT * expected.abs().sum(1)
    experts = torch.where(off[:, None], before.experts, own.experts)
    return ChosenExperts(experts, torch.where(off[:, None], before.weights, own.weights)), int(off.sum())


def _by_expert(chosen: torch.Tensor, numbers: torch.Tensor, experts: int) -> torch.Tensor:
    """Numbers of choices [m, n] -> [m, experts + 1], of all experts and of the shared one behind them."""
    room = numbers.new_zeros(len(numbers), experts + 1)
    return room.scatter(1, chosen.long(), numbers)


@contextmanager
def _routing_through(seen: Callable[[Routed, RouterPart, NormedRows | None], Routed]) -> Iterator[None]:
    """All ways by which rows come to their experts, and then `seen`."""
    one_by_one, few, alone = (getattr(expert_products, name) for name in WAYS)

    def routed(
        rows: NormedRows, part: RouterPart, step: Any, judged: NormedRows | None = None, **options: Any
    ) -> Routed:
        return seen(one_by_one(rows, part, step, judged, **options), part, judged)

    def at_once(made: Routed | None, part: RouterPart) -> Routed | None:
        return None if made is None else seen(made, part, None)

    def routed_at_once(source: Any, norm: Any, part: RouterPart, *rest: Any) -> Routed | None:
        return at_once(few(source, norm, part, *rest), part)

    def routed_row(x: torch.Tensor, norm: Any, part: RouterPart, step: Any) -> Routed | None:
        return at_once(alone(x, norm, part, step), part)

    ways: dict[str, Any] = dict(zip(WAYS, (routed, routed_at_once, routed_row), strict=True))
    with patch.multiple(expert_products, **ways):
        yield
