"""A row's near ties between experts of transformers' LFM2, decided the other way.

Of a tie that is closer than rounding each precision takes what its own prefers, and is right. So a token that
is none of the best by float32 may still be right: if it is by float32 with one or two near ties of its row,
or of the rows that convolutions read with it, decided the other way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

SLACK = 0.25  # of the standard deviation of logits
TIE = 0.1  # of the standard deviation of a row's merits: most of bfloat16's are below half of it
BEFORE = 4  # rows that a row's convolutions read


@dataclass(frozen=True)
class Tie:
    """A router, and a row of which the last expert that it takes is hardly better than the next one."""

    router: Any
    row: int


@contextmanager
def ties_seen(model: Any) -> Iterator[list[Tie]]:
    """Within it, what `model` computes fills the list."""
    found: list[Tie] = []

    def see(router: Any, given: Any, result: Any) -> None:
        merits = _merits(result[0], given)
        best = merits.topk(router.top_k + 1).values
        near = (best[:, -2] - best[:, -1]) / merits.std(1) <= TIE
        found.extend(Tie(router, row) for row in near.nonzero()[:, 0].tolist())

    hooks = [each.register_forward_hook(see) for each in routers(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def turned(ties: Sequence[Tie]) -> Iterator[None]:
    """Within it, the ties are decided the other way."""
    hooks = [tie.router.register_forward_hook(partial(_turn, tie.row)) for tie in ties]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def routers(model: Any) -> list[Any]:
    """Those of all layers that have experts."""
    return [each for each in model.modules() if type(each).__name__ == "Lfm2MoeTopKRouter"]


def near(ties: list[Tie], row: int) -> Iterator[tuple[Tie, ...]]:
    """Those that a row's logits may hang on, one by one and by twos."""
    own = [tie for tie in ties if row - BEFORE <= tie.row <= row]
    return itertools.chain(itertools.combinations(own, 1), itertools.combinations(own, 2))


def _merits(logits: torch.Tensor, given: Any) -> torch.Tensor:
    bias: torch.Tensor = given[1]
    return logits.sigmoid() + bias


def _turn(row: int, router: Any, given: Any, result: Any) -> Any:
    logits, weights, experts = (each.clone() for each in result)
    taken = _merits(logits, given)[row].topk(router.top_k + 1).indices
    experts[row] = torch.cat((taken[:-2], taken[-1:]))
    shares = logits[row].sigmoid()[experts[row]]
    weights[row] = shares / (shares.sum() + 1e-6) * router.routed_scaling_factor
    return logits, weights.to(result[1].dtype), experts


def judge(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Fails unless each token is right, perhaps after near ties of its row were decided the other way."""
    text = torch.tensor([[*prompt, *tokens]], device=model.device)
    with ties_seen(model) as ties:
        behind = _behind(model, text, len(prompt))
    for place in (behind > SLACK).nonzero()[:, 0].tolist():
        others = []
        for some in near(ties, len(prompt) - 1 + place):
            with turned(some):
                others.append(float(_behind(model, text, len(prompt))[place]))
        assert min(others, default=1.0) <= SLACK, (place, float(behind[place]), others)


@torch.inference_mode()
def _behind(model: Any, text: torch.Tensor, count: int) -> torch.Tensor:
    """How far each token behind the first `count` is from the best one, in deviations of the logits."""
    rows = model(text).logits[0, count - 1 : -1].float()
    told = rows.gather(1, text[0, count:, None])[:, 0]
    behind: torch.Tensor = (rows.amax(1) - told) / rows.std()
    return behind
