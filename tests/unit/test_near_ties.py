"""Tokens by a bfloat16 that took another expert of a near tie are judged as right, and others are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import near_ties


class Lfm2MoeTopKRouter(torch.nn.Module):
    """Row 1 hesitates between experts 0 and 2."""

    top_k, routed_scaling_factor = 2, 1.0
    logits = torch.tensor([[2.0, 1.0, -1.0], [0.5, 2.0, 0.4999], [2.0, 1.0, -1.0]])

    def forward(self, rows: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shares, experts = self.logits.sigmoid().topk(2)
        return self.logits, shares / shares.sum(1, keepdim=True), experts


class Model(torch.nn.Module):
    """The logits of a row are its weights by expert, times ten; of four ids the last is nothing."""

    device = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.router = Lfm2MoeTopKRouter()

    def forward(self, ids: torch.Tensor) -> Any:
        _, weights, experts = self.router(ids, torch.zeros(3))
        return SimpleNamespace(logits=10.0 * torch.zeros(3, 4).scatter(1, experts, weights)[None])


@pytest.mark.parametrize("tokens", [(0, 1), (0, 2), (3, 1)])
def test_a_near_tie_may_go_either_way(tokens: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second token stands behind row 1; SLACK is so wide that its experts' shares differ by less."""
    model = Model()
    monkeypatch.setattr(near_ties, "SLACK", 0.8)
    with near_ties.ties_seen(model) as ties:
        logits = model(torch.tensor([[5, *tokens]])).logits[0]
    assert [tie.row for tie in ties] == [1]
    assert logits[1, 2] == 0
    with near_ties.turned(ties):
        turned = model(torch.tensor([[5, *tokens]])).logits[0]
    assert turned[1, 2] == pytest.approx(float(logits[1, 0]), abs=0.01)
    assert torch.equal(turned[0], logits[0])
    if tokens[0] == 3:
        with pytest.raises(AssertionError):
            near_ties.judge(model, [5], tokens)
    else:
        near_ties.judge(model, [5], tokens)
