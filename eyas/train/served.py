"""A head's acceptance as it is served: chains through an engine, on prompts that it answers greedily."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from eyas.bench.answering import EngineAnswer, EnginePrompt, answer
from eyas.bench.parts import ChildPart, Line, Tell, run_parts
from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import EyasError
from eyas.common.params import SamplingParams
from eyas.train.acceptance import ByDepth
from eyas.train.answers import engine_of
from kv_transfer.layout import pages_for

AHEAD = 64  # rows that an engine reserves for rounds to come, at most


CHAIN = SpeculationConfig(steps=5, draft_tokens=6)


def served_acceptance(
    device: str, target: Path, head: Path, prompts: Sequence[EnginePrompt], captured: tuple[int, ...] = ()
) -> ByDepth:
    """Measures chains of five, in a process of its own that needs little memory beside the weights.

    `captured`: the target's layers that are fed to the head, instead of its own. Raises EyasError if the
    engine gives up.
    """
    lines: list[Line] = []
    length = max(len(prompt.ids) + prompt.longest for prompt in prompts)
    config = engine_of(
        device,
        str(target),
        str(head),
        speculation=CHAIN,
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
