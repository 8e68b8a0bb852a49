"""Measures acceptance by depth of a head's chains: on texts that the target wrote, or as it is served.

On texts without serving: from every pair of a text a chain is drafted, and fed the text: while its drafts are
the target's first choices, and the text is the target's greedy answer, that is what it would feed itself. For
other texts it is close. As it is served: chains through an engine, on prompts that it answers greedily.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eyas.bench.answering import EngineAnswer, EnginePrompt, answer
from eyas.bench.parts import ChildPart, Line, Tell, run_parts
from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import EyasError
from eyas.common.params import SamplingParams
from eyas.engine.checkpoint.config import DraftConfig
from eyas.train.answers import engine_of
from eyas.train.drafting import drafted
from eyas.train.heads.base import DraftHead
from eyas.train.unroll import UnrollBatch
from kv_transfer.layout import pages_for

AHEAD = 64  # rows that an engine reserves for rounds to come, at most
CHAIN = SpeculationConfig(steps=5, draft_tokens=6)


@dataclass
class ByDepth:
    """Counts, by depth, of chains with a draft there, and of chains whose drafts were right up to there."""

    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, depth: int, offered: int, accepted: int) -> None:
        """Counts chains at one depth, from 0 on."""
        while len(self.offered) <= depth:
            self.offered.append(0)
            self.accepted.append(0)
        self.offered[depth] += offered
        self.accepted[depth] += accepted

    @property
    def shares(self) -> list[float]:
        """The share of drafts accepted by depth, of chains as deep."""
        return [right / max(1, all) for right, all in zip(self.accepted, self.offered, strict=True)]

    @property
    def length(self) -> float:
        """Tokens per verify step, the target's own included."""
        return 1 + sum(self.shares)

    def figures(self) -> dict[str, object]:
        """Rounded, for a log."""
        return {
            "acceptance_length": round(self.length, 4),
            "acceptance_by_depth": [round(share, 4) for share in self.shares],
        }


@torch.no_grad()
def count_chains(head: DraftHead, course: UnrollBatch, best: Tensor, depth: int, counts: ByDepth) -> None:
    """Drafts chains of `depth` tokens from every pair whose answer goes on as long.

    `best` int64 [B, L]: the target's first choice after each token. The head's mode is the caller's business.
    """
    rows = course.rows(depth)
    counted = torch.ones_like(course.counted(0, rows))
    right = counted
    for step, (state, _) in enumerate(drafted(head, course, depth)):
        drafts = head.logits(state).argmax(-1)
        if head.token_map is not None:
            drafts = head.token_map[drafts]
        counted = counted & course.counted(step, rows)
        right = right & counted & (drafts == best[:, 1 + step : 1 + step + rows])
        counts.add(step, int(counted.sum()), int(right.sum()))


def whole_chain(head: DraftConfig) -> SpeculationConfig:
    """The chain by which a head is judged: CHAIN, or all of the block of one that drafts in one pass."""
    return CHAIN if head.block is None else SpeculationConfig(head.block.most, 1, head.block.most + 1)


def served_acceptance(
    device: str,
    target: Path,
    head: Path,
    prompts: Sequence[EnginePrompt],
    captured: tuple[int, ...] = (),
    chain: SpeculationConfig = CHAIN,
) -> ByDepth:
    """Measures a chain, in a process of its own that needs little memory beside the weights.

    `captured`: the target's layers that are fed to the head, instead of its own. Raises EyasError if the
    engine gives up.
    """
    lines: list[Line] = []
    length = max(len(prompt.ids) + prompt.longest for prompt in prompts)
    config = engine_of(
        device,
        str(target),
        str(head),
        speculation=chain,
        draft_capture_layers=captured,
        context_length=length,
        max_running=len(prompts),
        num_pages=len(prompts) * pages_for(length + AHEAD, EngineConfig.page_size),
    )
    if run_parts([ChildPart("acceptance", partial(_in_part, config, prompts))], lines.append):
        raise EyasError(f"the acceptance of {head} could not be measured")
    return ByDepth(**lines[-1])


def count_rounds(config: EngineConfig, prompts: Sequence[EnginePrompt]) -> ByDepth:
    """Measures in this process."""
    counts = ByDepth()

    def add(one: EngineAnswer) -> None:
        for accepted, offered in one.rounds:
            for depth in range(offered):
                counts.add(depth, 1, int(accepted > depth))

    answer(config, prompts, SamplingParams(temperature=0.0), add)
    return counts


def _in_part(config: EngineConfig, prompts: Sequence[EnginePrompt], tell: Tell) -> None:
    counts = count_rounds(config, prompts)
    tell({"offered": counts.offered, "accepted": counts.accepted})
