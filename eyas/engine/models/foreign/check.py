"""Sees that a row of a foreign model follows its own token and position alone, but for its attention.

Eyas gives a step's rows as one sequence of tokens, whatever sequences they are of. A convolution over
neighbours, a state that is passed on, or positions that the model counts by itself would mix them in silence.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models.foreign.products import row_by_row
from eyas.engine.models.unserved import ITSELF, OWN_FILE

ROWS, TOLERANCE = 6, 0.02
"""Rows that are compared, and by which part of the largest number they may differ."""


@torch.inference_mode()
def check_rows(target: ModelConfig, model: Any, device: str) -> None:
    """Raises ConfigError unless a row's results are the same in another place of a step, and others at
    another position.
    """
    assert target.foreign is not None
    modules, seen = dict(model.named_modules()), []

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **said: Any
    ) -> torch.Tensor:
        """A row sees itself alone."""
        seen.append(torch.cat([part[0].transpose(0, 1).flatten(1) for part in (query, key)], 1))
        own = value[0].transpose(0, 1).repeat_interleave(query.shape[1] // value.shape[1], 1)
        return own[None]

    for name in target.foreign.modules:
        modules[name].attend_by = attend

    def results(places: torch.Tensor, moved: int = 0) -> torch.Tensor:
        """Queries and keys of rows in that order, in all layers, and their logits."""
        seen.clear()
        tokens = (torch.arange(ROWS, device=device) * 7 + 1) % target.vocab_size
        positions = torch.arange(ROWS, device=device) * 3 % target.context_length
        positions = (positions + moved) % target.context_length
        with row_by_row(device):
            made = model(
                input_ids=tokens[places][None], position_ids=positions[places][None], use_cache=False
            )
        return torch.cat([*(part.float() for part in seen), made.logits[0].float()], 1)

    order = torch.arange(ROWS, device=device)
    turned = torch.tensor([3, 0, 5, 1, 4, 2], device=device)
    plain = results(order)
    if _alike(results(order, moved=1), plain, 1e-6):
        raise _refusal(target, "counts positions by itself")
    if not _alike(results(turned), plain[turned]):
        raise _refusal(target, "mixes neighbouring tokens outside its attention")
    if device == "cpu" and not torch.equal(results(order[2:3]), plain[2:3]):
        text = "%s multiplies in ways whose bits depend on what shares a step: near-ties may fall otherwise"
        logging.getLogger("eyas.engine").warning(text, target.architecture)


def _alike(one: torch.Tensor, other: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def _refusal(target: ModelConfig, why: str) -> ConfigError:
    text = f"architecture {target.architecture} of {target.folder} is not supported: its code in transformers"
    return ConfigError(f"{text} {why}: {ITSELF}, {OWN_FILE}")
