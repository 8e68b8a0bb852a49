"""Sampling where all history is known: penalties, bans, biases, logprobs, and the first tokens of forks.

The rules are those of `eyas.engine.sampling`, on the device's logits. It waits for the device: such a step is
neither run ahead of nor fast, and only steps with such a sequence are like that.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from eyas.common.types import TokenLogprob
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.stopping import banned_ids
from eyas.engine.batch.tree import DraftTree
from eyas.engine.device.executor import Executor
from eyas.engine.device.flight import Sampling
from eyas.engine.device.step import StepShape
from eyas.engine.sampling.row import Row
from eyas.engine.sampling.sampler import Sampled, sample
from eyas.engine.speculation.verify import walk


@dataclass
class _Asked:
    """The rows to sample: which of the step's sampled rows each one is, and its context."""

    places: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add(self, place: int, *rows: Row) -> range:
        first = len(self.rows)
        self.places += [place] * len(rows)
        self.rows += rows
        return range(first, len(self.rows))


class HostSampler:
    def __init__(self, executor: Executor, eos_ids: tuple[int, ...]) -> None:
        self._executor = executor
        self._eos_ids = eos_ids

    def sample(self, shape: StepShape, rounds: SequenceOf[Sequence], ends: SequenceOf[Sequence]) -> Sampling:
        """Tokens of the step's sampled rows; rows of drafts that are not there give token 0."""
        asked, trees = _Asked(), self._trees(shape, rounds)
        nodes = [
            self._nodes(asked, i * shape.width, *pair)
            for i, pair in enumerate(zip(rounds, trees, strict=True))
        ]
        last = [self._ends(asked, shape.round_rows + i, seq) for i, seq in enumerate(ends)]
        sampled = sample(self._executor.logits(asked.places), asked.rows)
        sampling = Sampling(np.zeros(shape.sampled, np.int32), {}, {})
        for i, (tree, mine) in enumerate(zip(trees, nodes, strict=True)):
            self._told(sampling, i * shape.width, mine[: 1 + len(tree)], sampled)
            self._forked(sampling, i * shape.width, mine[1 + len(tree) :], sampled)
            chosen = [sampled.tokens[r] for r in mine[: 1 + len(tree)]]
            path = [0, *(1 + node for node in walk(tree, chosen).path)]
            sampling.logprobs[i * shape.width] = [sampled.logprobs[mine[node]] for node in path]
        for i, mine in enumerate(last):
            row = shape.round_rows + i
            self._told(sampling, row, mine[:1], sampled)
            self._forked(sampling, row, mine[1:], sampled)
            sampling.logprobs[row] = [sampled.logprobs[mine[0]]]
        return sampling

    def _trees(self, shape: StepShape, rounds: SequenceOf[Sequence]) -> list[DraftTree]:
        """The drafts that each round verifies, as the device's tables hold them."""
        if shape.width == 1 or not rounds:
            return [DraftTree((), ())] * len(rounds)
        return [_tree(*found) for found in self._executor.drafts([seq.slot for seq in rounds])]

    def _nodes(self, asked: _Asked, place: int, seq: Sequence, tree: DraftTree) -> range:
        """A round's rows: the root, every draft, then the first tokens of forks at the root."""
        first = asked.add(place, self._row(seq, seq.choice, ())).start
        for node in range(len(tree)):
            asked.add(place + 1 + node, self._row(seq, seq.choice, [tree.tokens[i] for i in tree.path(node)]))
        forks = asked.add(place, *(self._row(seq, choice, ()) for choice in seq.forks))
        return range(first, forks.stop)

    def _ends(self, asked: _Asked, place: int, seq: Sequence) -> range:
        return asked.add(place, *(self._row(seq, choice, ()) for choice in (seq.choice, *seq.forks)))

    def _row(self, seq: Sequence, choice: int, ancestors: SequenceOf[int]) -> Row:
        params = seq.generation.request.params
        banned = banned_ids(params, self._eos_ids, len(seq.output) + len(ancestors))
        position = len(seq) + len(ancestors)
        return Row(params, choice, position, seq.prompt, seq.output, ancestors, banned)

    def _told(self, sampling: Sampling, place: int, mine: range, sampled: Sampled) -> None:
        sampling.tokens[place : place + len(mine)] = [sampled.tokens[r] for r in mine]

    def _forked(self, sampling: Sampling, place: int, mine: range, sampled: Sampled) -> None:
        found: list[tuple[int, TokenLogprob | None]] = [
            (sampled.tokens[r], sampled.logprobs[r]) for r in mine
        ]
        if found:
            sampling.extra[place] = found


def _tree(drafts: list[int], parents: list[int]) -> DraftTree:
    """Up to the first draft that is not there."""
    count = next((i for i, token in enumerate(drafts) if token < 0), len(drafts))
    return DraftTree(tuple(drafts[:count]), tuple(parents[:count]))
