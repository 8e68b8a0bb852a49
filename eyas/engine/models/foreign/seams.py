"""The two places where transformers lets others in: what a module attends by, and what makes its logits.

A module of a model attends by what stands in its attribute `attend_by`; it is registered under two names.
Under `PAGED` transformers makes no mask. Under `JUDGED` it makes those of `judged_mask`, which say what a
mask would have been, and hold no number.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

PAGED, JUDGED = "eyas_paged", "eyas_judged"


def register() -> None:
    """Makes both names known to transformers; once is as good as often."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for name in (PAGED, JUDGED):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(JUDGED, judged_mask)
    ALL_EXPERTS_FUNCTIONS.register(JUDGED, _unread_experts)


def attends_by(config: Any, name: str) -> None:
    """Lets a model of this configuration attend by that name from now on."""
    config._attn_implementation = name


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **said: Any,
) -> tuple[torch.Tensor, None]:
    """Queries [1, heads, m, dim], keys and values [1, KV heads, m, dim]; gives [1, m, heads, value dim]."""
    return module.attend_by(query, key, value, attention_mask, **said), None


def judged_mask(*_: Any, q_length: int, kv_length: int, mask_function: Any, **__: Any) -> torch.Tensor:
    """A mask without numbers, whose attribute `sees` is transformers' rule: (batch, head, query, key)."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask.sees = mask_function  # type: ignore[attr-defined]
    return mask


def _unread_experts(module: Any, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Experts whose rows are chosen by value cannot be computed without numbers."""
    return torch.empty_like(hidden)


class GivenRows(torch.nn.Module):
    """Stands where a model's layers were, and gives rows that are already there: what is left of the model
    are its logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> GivenOutput:
        """The rows, in the form of any model's output."""
        assert self.rows is not None
        return GivenOutput(self.rows)


class GivenOutput:
    """The output of a model's layers that has rows [1, r, hidden], and nothing else that may be asked for."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.last_hidden_state = rows

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]


class TwoParts:
    """A model of transformers as its layers, and the logits behind them."""

    def __init__(self, model: Any) -> None:
        """Raises ValueError if it has no such parts."""
        self.model = model
        self.layers: Any = getattr(model, model.base_model_prefix, None)
        if self.layers is None or self.layers is model:
            raise ValueError("its layers do not stand apart from its output head")
        named = inspect.signature(self.layers.forward).parameters
        if "position_ids" not in named:
            raise ValueError("its layers take no positions (position_ids)")
        self._more = {"use_cache": False} if "use_cache" in named else {}
        self._given = GivenRows()
        setattr(model, model.base_model_prefix, self._given)

    def rows(self, tokens: torch.Tensor, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        """tokens and positions [m] -> what leaves the last norm [m, hidden]."""
        made = self.layers(input_ids=tokens[None], position_ids=positions[None], **self._more, **more)
        rows: torch.Tensor = made.last_hidden_state[0]
        return rows

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [r, hidden] as `rows` gave them -> [r, vocab]."""
        self._given.rows = rows[None]
        made: torch.Tensor = self.model(input_ids=None, **self._more).logits[0]
        self._given.rows = None
        return made
