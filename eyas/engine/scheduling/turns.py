"""Chooses the sequences that decode in a step that has no capacity for all: the least served request first.

Cost is counted in rows without context, so that several choices and a long context are comparable. A new
request starts with the smallest cost that another one has used. A step with capacity for all sequences resets
all counts to zero, so no request saves up turns.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from eyas.engine.batch.sequence import Sequence

Call = tuple[str, str]  # caller, call


@dataclass(frozen=True)
class StepRoom:
    """The capacity of a step on a device where its time grows with its rows: `rows` rows without context.
    A row that attends to `context_tokens` tokens costs twice as much as one without context.

    `drafting`: if plain rounds of all decoding sequences cost more than this, drafts would only lengthen the
    steps, and sequences may take turns. Below it all sequences decode with drafts.
    """

    rows: float
    drafting: float
    context_tokens: float

    def cost(self, rows: int, context: int) -> float:
        """The cost of `rows` rows after `context` tokens."""
        return rows * (1.0 + context / self.context_tokens)

    def rows_within(self, cost: int, context: int) -> int:
        """The number of rows after `context` tokens that cost `cost`; at least one if `cost` is positive."""
        return max(round(cost / (1.0 + context / self.context_tokens)), min(cost, 1))


class DecodeTurns:
    """Counts the cost that each call has used in steps without capacity for all."""

    def __init__(self, room: StepRoom) -> None:
        self.crowded = False
        """True if so many sequences decode that drafts would only lengthen the steps."""
        self.room = room
        self._given: dict[Call, float] = {}
        self._least = 0.0  # the smallest count among the calls that could decode in the last such step

    def choose(self, decoding: SequenceOf[Sequence], running: Iterable[Sequence]) -> SequenceOf[Sequence]:
        """Chooses the sequences of `decoding` that decode in the next step, at least one. `running`: all
        sequences with slots. Within a call, sequences with the shortest outputs come first.
        """
        self.crowded = sum(self.room.cost(1, seq.kv_len) for seq in decoding) > self.room.drafting
        if not self.crowded or sum(map(self._cost, decoding)) <= self.room.rows:
            self._given.clear()
            self._least = 0.0
            return decoding
        lines: dict[Call, list[Sequence]] = {}
        for seq in decoding:
            lines.setdefault(seq.generation.share, []).append(seq)
        for line in lines.values():
            line.sort(key=lambda seq: -len(seq.output) - seq.in_flight)
        calls = {seq.generation.share for seq in running}
        self._given = {call: max(self._given.get(call, 0.0), self._least) for call in calls}
        self._least = min(self._given[call] for call in lines)
        chosen = self._deal(lines)
        return [seq for seq in decoding if seq in chosen]

    def _deal(self, lines: dict[Call, list[Sequence]]) -> set[Sequence]:
        """Repeatedly takes the last sequence of the least served call, until the step is full."""
        heap = [(self._given[call], place, call) for place, call in enumerate(lines)]
        heapq.heapify(heap)
        chosen: set[Sequence] = set()
        taken = 0.0
        while heap:
            _, place, call = heap[0]
            cost = self._cost(lines[call][-1])
            if chosen and taken + cost > self.room.rows:
                break
            chosen.add(lines[call].pop())
            taken += cost
            self._given[call] += cost
            if lines[call]:
                heapq.heapreplace(heap, (self._given[call], place, call))
            else:
                heapq.heappop(heap)
        return chosen

    def _cost(self, seq: Sequence) -> float:
        """The cost of the sequence's next round."""
        drafts = 0 if seq.tree is None else len(seq.tree.tokens)
        return self.room.cost(1 + drafts, seq.kv_len)
