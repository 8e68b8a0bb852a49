"""Tells the policy of depth what became of each step, and asks it about the next: sequences become numbers.

A runner that drafts inside its steps asks as it composes one, and a step's flight says how deep it was. For a
drafter outside the steps the next depth is chosen when a step has landed: what is then asked of the drafter
is verified by the step after.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from eyas.common.config import EngineConfig
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.step_result import StepResult
from eyas.engine.speculation.depth import AdaptiveDepth, DecodingBatch, Ints


class DepthPacing:
    """`depths` learns from every step. `sparse`: drafts are looked up and no head proposes, so that a round
    may have none, and takes as long as one of many.
    """

    def __init__(self, depths: AdaptiveDepth, *, sparse: bool = False) -> None:
        self.depths = depths
        self._sparse = sparse
        self._before: int | None = None  # the depth of the step that landed last, if that had rounds alone

    @property
    def depth(self) -> int:
        """How deep rounds are drafted now; 0: they are plain; below 0: what is drafted is looked up alone."""
        return self.depths.current

    @property
    def beside_prompts(self) -> int:
        """How deep they are drafted in a step that has prompts too."""
        return self.depths.beside_prompts

    def choose(self, sequences: SequenceOf[Sequence], followed: SequenceOf[bool]) -> None:
        """Sets `depth` for the next round of these sequences; `followed`: those for which a head drafts.

        They are looked at one by one only where a choice is due.
        """
        if self.depths.keep(len(sequences)):
            return
        both = zip(sequences, followed, strict=True)
        rows = [(seq.slot, seq.occupancy, self._limit(seq) if drafted else 0) for seq, drafted in both]
        slots, occupancies, limits = _columns(rows)
        self.depths.choose(DecodingBatch(slots, occupancies, limits, sum(map(len, sequences))))

    def _limit(self, seq: Sequence) -> int:
        most, own = self.depths.spec.steps, seq.generation.request.draft_limits.deepest
        return min(own, most) if own else most

    def landed(self, landed: SequenceOf[StepResult], depth: int | None, seconds: float | None) -> None:
        """A step has landed. `depth`: of its rounds; None: as was chosen when the last one landed, and
        then the next is chosen now. `seconds`: since the last one landed; None: the loop rested between them.
        """
        rounds = [one for one in landed if one.work.round]
        requested = self.depth if depth is None else depth
        if rounds:
            self._learn(rounds, requested)
        alone = bool(rounds) and len(rounds) == len(landed)
        if alone and self._before is not None and seconds is not None:
            gave = sum(len(one.tokens) for one in rounds)
            self.depths.took(len(rounds), requested, seconds, gave, alike=requested == self._before)
        self._before = requested if alone else None
        if depth is None:
            here = [one.work.seq for one in rounds if one.work.seq.occupancy == one.work.occupancy]
            self.choose(here, [seq.generation.request.speculative for seq in here])

    def _learn(self, rounds: SequenceOf[StepResult], depth: int) -> None:
        """Only from those whose slot is still theirs, nothing from a plain round. `depth`: the round's."""
        if not depth and not any(one.drafts.offered for one in rounds):
            return
        if depth < 0:  # its drafts are those of the step before, which a head may have made
            if self._before is None:
                return
            depth = self._before or depth
        rows = [
            (one.work.seq.slot, one.work.occupancy, one.drafts.accepted, self._offered(one, depth))
            for one in rounds
            if one.work.seq.occupancy == one.work.occupancy
        ]
        if not rows:
            return
        slots, occupancies, accepted, offered = _columns(rows, 4)
        limits = np.full(len(rows), self.depths.spec.steps)
        self.depths.landed(DecodingBatch(slots, occupancies, limits), depth, accepted, offered)

    def _offered(self, one: StepResult, depth: int) -> int:
        """How deep its drafts were; one that was not found was as good as refused."""
        seq, drafts = one.work.seq, one.drafts
        if not ((self._sparse or depth < 0) and seq.generation.request.speculative):
            return drafts.offered
        return max(drafts.offered, min(drafts.accepted + 1, abs(depth), self._limit(seq)))


def _columns(rows: SequenceOf[tuple[int, ...]], count: int = 3) -> Ints:
    return np.array(rows, np.int64).reshape(-1, count).T


def pacing_of(config: EngineConfig, *, looks_up: bool = False) -> DepthPacing | None:
    """If the configuration wants depths to be adaptive. `looks_up`: as of `AdaptiveDepth`."""
    spec = config.speculation
    if not spec.adaptive:
        return None
    return DepthPacing(
        AdaptiveDepth(spec, config.max_running, looks_up=looks_up), sparse=config.draft is None
    )
