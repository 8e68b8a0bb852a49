"""P-EAGLE heads: EAGLE-3 heads that draft all depths in one pass.

Certain rows are those of EAGLE-3, the newest of which gives the first draft. A row of a deeper draft has
neither its token nor its feature yet: it has the embedding of a mask token, and instead of the target's
streams learnt ones, `mask_hidden`, which pass `fc` as the target's do. It sees the certain rows and those of
the block before it (P-EAGLE, arXiv 2602.01469, section 3).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from eyas.common.config import MOST_STEPS
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import DraftBlock, DraftConfig, ModelConfig
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.kv.pool import KvPool
from eyas.engine.models import eagle3
from eyas.engine.models.base import Drafted
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.heads import flat, stored_shapes
from eyas.engine.models.keys import Fit
from eyas.engine.models.ops.machine import Machine

NAME = "a P-EAGLE head"
MASK = "mask_hidden"
MASK_IDS = ("ptd_token_id", "pard_token", "mask_token_id")
"""The keys under which exports name the mask token."""
USUAL_DEPTHS, MOST_DEPTHS = 16, MOST_STEPS
FLAT_MASK = "a flat mask"
"""A variant: the mask is stored with one dimension of size 1 before it, else with two."""


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    """The head of these tensors; None if they are another kind's. ConfigError if it does not fit `target`.

    A "dummy" one has no tensors yet: its config.json says `parallel_drafting`.
    """
    raw, dummy = flat(raw), load_format == "dummy"
    shapes = {} if dummy else stored_shapes(raw, folder, spelling)
    if not (values.switch(raw, "parallel_drafting", False) if dummy else MASK in shapes):
        return None
    config = eagle3.describe_head(raw, folder, target, load_format)
    if config is None:
        return None
    fit, stored = Fit(folder), shapes.get(MASK, (1, config.captured_width))
    named = next((key for key in MASK_IDS if raw.get(key) is not None), "")
    fit.wants(stored[-1] == config.captured_width, f"its {MASK} is not as wide as what it captures")
    fit.wants(bool(named), f"it names no mask token ({', '.join(MASK_IDS)})")
    fit.settle()
    mask_token = values.whole(raw, named, most=target.vocab_size - 1)
    return dataclasses.replace(
        config,
        algorithm="peagle",
        variants=config.variants | ({FLAT_MASK} if len(stored) == 2 else set()),
        block=DraftBlock(most=_depths(raw), mask_token=mask_token, rooted=False, first=-1, causal=True),
    )


spelling, load_tap = eagle3.spelling, eagle3.load_tap


class PEagleDraft(eagle3.Eagle3Draft[ProjectionT]):
    """An EAGLE-3 head, whose rows below the certain ones have the learnt feature."""

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[ProjectionT]
    ) -> None:
        """`ends`: as of EAGLE-3. The learnt streams pass `fc` here, once."""
        super().__init__(config, weights, ends, machine)
        self.block = config.block
        shape = (1, config.captured_width) if FLAT_MASK in config.variants else (1, 1, config.captured_width)
        mask = weights.take(MASK, shape).view(1, -1)
        if "last_hidden" not in config.variants:
            mask = eagle3.Eagle3Tap(config, weights, machine).features(mask, mask)
        self.masked = mask

    @torch.inference_mode()
    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> Drafted:
        """features [R, hidden] of certain rows joined with tokens [R]; a block's have the learnt one."""
        if rows.depth:
            features = self.masked.expand(tokens.shape[0], -1).contiguous()
        return super().forward(features, tokens, rows, pool)


load_draft = PEagleDraft


def _depths(raw: Raw) -> int:
    """The drafts that it was trained for; where no key says how many, as many as any head has."""
    ways = values.section(raw, "speculators_config").get("proposal_methods")
    way = ways[0] if isinstance(ways, list) and ways and isinstance(ways[0], dict) else {}
    named = {"num_depths": way.get("speculative_tokens", raw.get("num_depths"))}
    return values.whole(named, "num_depths", USUAL_DEPTHS, least=1, most=MOST_DEPTHS)
