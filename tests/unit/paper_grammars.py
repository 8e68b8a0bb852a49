"""A grammar in plain Python for a `PaperDevice`: what may come next is made of all that came before."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
from paper_device import VOCAB

from eyas.common.grammars.notations import Grammar
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.tree import ROOT, DraftTree
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.grammar.state import ForcedDrafts, MaskRoom

EOS = (23,)
GRAMMAR = Grammar.regex("paper")


def allowed_after(output: SequenceOf[int]) -> np.ndarray:
    """Bits, int32 [1]: one id, or half of them."""
    pick = random.Random(zlib.crc32(bytes(output)))
    count = pick.choice((1, VOCAB // 2))
    return np.array([sum(1 << id for id in pick.sample(range(VOCAB), count))], np.int32)


class PaperState:
    """Twin of `GrammarState`, of one output."""

    def __init__(self, output: SequenceOf[int]) -> None:
        self._output = tuple(output)
        for at, token in enumerate(self._output):
            assert _allows(self._output[:at], token), "a token that its grammar forbids"

    def masks(self, tree: DraftTree | None, room: MaskRoom | None = None) -> list[np.ndarray | None]:
        found: list[np.ndarray | None] = [allowed_after(self._output)]
        for node in range(len(tree or ())):
            assert tree is not None
            path = [tree.tokens[i] for i in tree.path(node)]
            fits = all(_allows((*self._output, *path[:at]), token) for at, token in enumerate(path))
            found.append(allowed_after((*self._output, *path)) if fits else None)
        return [mask if room is None or mask is None else _stored(mask, room) for mask in found]

    def cut(self, tree: DraftTree) -> DraftTree:
        masks = self.masks(tree)[1:]
        return tree.keep([node for node, mask in enumerate(masks) if mask is not None])

    def forced(self, most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and (bits := int(allowed_after((*self._output, *found))[0])).bit_count() == 1:
            found.append(bits.bit_length() - 1)
        return found

    def forced_after(self, tree: DraftTree, most: int) -> list[ForcedDrafts]:
        found = []
        for node in range(ROOT, len(tree)):
            path = [tree.tokens[i] for i in tree.path(node)]
            if not all(_allows((*self._output, *path[:at]), token) for at, token in enumerate(path)):
                continue
            here = (*self._output, *path)
            if (bits := int(allowed_after(here)[0])).bit_count() == 1:
                token = bits.bit_length() - 1
                found.append(ForcedDrafts(len(path), token, PaperState((*here, token)).forced(most)))
        return [one for one in found if one.drafts]


class PaperGrammars(GrammarManager):
    """Every sequence with a grammar is held to the same rule; the first look at one finds it not compiled."""

    def __init__(self) -> None:
        super().__init__(Path(), VOCAB, EOS)
        self._seen: set[int] = set()

    def _state(self, seq: Sequence, *, now: bool = False) -> Any:
        if seq.uid not in self._seen:
            self._seen.add(seq.uid)
            return None
        return PaperState(seq.output)


def _stored(mask: np.ndarray, room: MaskRoom) -> np.ndarray:
    row = room.take()
    row[:] = mask
    return row


def _allows(output: SequenceOf[int], token: int) -> bool:
    return bool(allowed_after(output)[0] >> token & 1)
