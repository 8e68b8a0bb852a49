"""A head's acceptance as it is served: chains through an engine, on prompts that it answers greedily."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from eyas.bench.answering import Answer, Prompt, answer
from eyas.bench.parts import Line, Part, Tell, run_parts
from eyas.common.config import EngineConfig
from eyas.common.errors import EyasError
from eyas.common.params import SamplingParams
from eyas.train.acceptance import ByDepth


def served_acceptance(config: EngineConfig, prompts: Sequence[Prompt]) -> ByDepth:
    """Of `config`'s head, in a process of its own. Raises EyasError if the engine gives up."""
    lines: list[Line] = []
    if run_parts([Part("acceptance", partial(_in_part, config, prompts))], lines.append):
        raise EyasError(f"the acceptance of {config.draft} could not be measured")
    return ByDepth(**lines[-1])


def count_rounds(config: EngineConfig, prompts: Sequence[Prompt]) -> ByDepth:
    """The same in this process."""
    counts = ByDepth()

    def add(one: Answer) -> None:
        for accepted, offered in one.rounds:
            for depth in range(offered):
                counts.add(depth, 1, int(accepted > depth))

    answer(config, prompts, SamplingParams(temperature=0.0), add)
    return counts


def _in_part(config: EngineConfig, prompts: Sequence[Prompt], tell: Tell) -> None:
    counts = count_rounds(config, prompts)
    tell({"offered": counts.offered, "accepted": counts.accepted})
