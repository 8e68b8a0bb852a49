"""The masks of one step's rows, filled on the host while the device computes the forward.

Only the device knows which drafts stand below a sequence's root. Where an output is held to a grammar, they
are read back before the forward begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.tree import ROOT, DraftTree
from eyas.engine.grammar.grammars import GrammarManager


@dataclass(frozen=True)
class DraftNodes:
    """The drafts below one root: `places[i]` says which node of the round's rows (0: the root) draft i is."""

    tree: DraftTree
    places: tuple[int, ...]

    @classmethod
    def of(cls, drafts: np.ndarray, width: int) -> DraftNodes:
        """`drafts` int32 [2, n]: drafts (-1: none) and their parents; the first width - 1 have rows."""
        tokens, parents = drafts[:, : width - 1].tolist()
        places = [place for place, token in enumerate(tokens) if token >= 0]
        node = {ROOT: ROOT} | {place: i for i, place in enumerate(places)}
        tree = DraftTree([tokens[place] for place in places], [node[parents[place]] for place in places])
        return cls(tree, tuple(1 + place for place in places))


class StepMasks:
    """`drafts`: by slot, those that the step verifies; a sequence that is not there has none."""

    def __init__(self, grammars: GrammarManager, drafts: Mapping[int, DraftNodes]) -> None:
        self._grammars = grammars
        self._drafts = drafts

    def of(self, work: SequenceWork) -> list[np.ndarray | None]:
        """The grammar masks by node of the work's rows, the root first: as `GrammarManager.masks`, which may
        be empty.
        """
        nodes = self._drafts.get(work.seq.slot)
        if nodes is None:
            return self._grammars.masks(work.seq, None)
        masks = self._grammars.masks(work.seq, nodes.tree)
        if not masks:
            return []
        root, *below = masks
        by_place: list[np.ndarray | None] = [root, *[None] * max(nodes.places, default=0)]
        for place, mask in zip(nodes.places, below, strict=True):
            by_place[place] = mask
        return by_place
