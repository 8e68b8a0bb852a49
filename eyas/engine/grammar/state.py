"""The state of one sequence in its grammar: a function of the grammar and of the sequence's tokens.

`follow` is the only place where a state advances, so a sequence that was preempted, migrated or forked is
where it would be if nothing had happened. Drafts are looked at and taken back.

A mask is int32 [ceil(vocab / 32)]: bit id % 32 of word id // 32 (the least significant first) is 1 where the
id may stand next.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np

from eyas.common.errors import GrammarTooSlow, InvalidRequest
from eyas.common.grammars.compiler import library
from eyas.common.params import SamplingParams
from eyas.engine.batch.tree import ROOT, DraftTree

WALK_S = 0.5
"""Seconds of a processor for the drafts of one step: one grammar must not hold up what shares it."""

MOST_WALK_S = 2.0
"""As `WALK_S`, where the library walks: of the wall's clock, so that a busy machine fails nothing."""

MOST_BEGINNINGS = 32
"""Where more tokens are allowed, they are not looked at: they are hardly beginnings of one text."""

FEW_ENDS = 4
"""Where more tokens may end a round, it is not looked at what each of them forces."""


class ForcedDrafts(NamedTuple):
    """Tokens that a grammar forces behind a round that accepts some drafts and gives `token` after them."""

    accepted: int
    token: int
    drafts: list[int]


class MaskRoom:
    """Memory for the masks of a step, `rows` int32 [n, words], which are filled one after the other."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._taken: list[np.ndarray] = []
        self._index: dict[int, int] = {}  # of a row that was taken, by its `id`

    @property
    def used(self) -> int:
        """The rows that were taken: the first ones."""
        return len(self._taken)

    def take(self) -> np.ndarray:
        """The next row."""
        row: np.ndarray = self.rows[len(self._taken)]
        self._index[id(row)] = len(self._taken)
        self._taken.append(row)
        return row

    def index(self, mask: np.ndarray) -> int:
        """The index of a mask in this room; one from elsewhere is copied."""
        if (index := self._index.get(id(mask))) is not None:
            return index
        self.take()[:] = mask
        return len(self._taken) - 1


class GrammarState:
    """One sequence's place in a compiled grammar. One thread uses it."""

    def __init__(
        self, compiled: Any, params: SamplingParams, eos_ids: SequenceOf[int], pieces: SequenceOf[bytes]
    ) -> None:
        """`pieces`: what each id writes. Raises InvalidRequest where nothing can end an output: it could not
        stop when the grammar does.
        """
        self._params = params
        self._pieces = pieces
        self._words = -(-len(pieces) // 32)
        self._ends = (*eos_ids, *params.stop_token_ids)
        ignored = set(eos_ids) - set(params.stop_token_ids) if params.ignore_eos else set[int]()
        if not self._ends:
            message = "grammar needs stop_token_ids: the model has no id that ends an answer"
            raise InvalidRequest(message, param="grammar")
        self._bits_of_ends, self._bits_of_ignored = (_words(ids) for ids in (self._ends, ignored))
        self._matcher = library().GrammarMatcher(compiled, override_stop_tokens=list(self._ends))
        self.followed = 0  # tokens of the output
        self._next: np.ndarray | None = None  # the mask after them, once it was asked for
        self._step: tuple[DraftTree, list[np.ndarray | None]] | None = None  # its drafts, and all its masks

    def follow(self, output: SequenceOf[int]) -> None:
        """Advances over what `output` has gained. Raises InvalidRequest for a token that is not allowed."""
        for token in output[self.followed :]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                message = f"grammar does not allow token {token} at place {self.followed} of the output"
                raise InvalidRequest(message, param="grammar")
            self.followed += 1
            self._next = self._step = None

    def knows(self, output: SequenceOf[int]) -> bool:
        """True if it stands after `output` and its next mask has been computed."""
        ready = self._next is not None or self._matcher.is_terminated()
        return self.followed == len(output) and bool(ready)

    def masks(self, tree: DraftTree | None, room: MaskRoom | None = None) -> list[np.ndarray | None]:
        """The mask of the next token, then of what follows each node of `tree`; in `room`, if there is some.

        None: nothing is sampled there that counts, because the node's own token, or one above it, is not
        allowed, or ends the output.
        """
        if not tree or self._matcher.is_terminated():
            root = None if self._matcher.is_terminated() else self._root(room)
            return [root, *[None] * len(tree or ())]
        if self._step is None or self._step[0] is not tree:
            if room is None:
                made = [self._root(), *(mask for _, mask in self._walk(tree))]
            else:
                made = self._filled(tree, room)
            self._step = tree, made
        return self._step[1]

    def cut(self, tree: DraftTree) -> DraftTree:
        """The tree without the nodes that are not allowed, and those below them."""
        return tree.keep([node for node, (allowed, _) in enumerate(self._walk(tree, masks=False)) if allowed])

    def forced(self, most: int) -> list[int]:
        """Finds at most `most` tokens that come next because nothing else can.

        Where one text must follow, each of its beginnings may be a token; the longest one is taken, as most
        tokenizers would. (Jump-forward decoding as a draft: SGLang, Zheng et al., 2023, section 3.)
        """
        return self._forced(0, most)

    def forced_after(self, tree: DraftTree, most: int) -> list[ForcedDrafts]:
        """Looks ahead of a round that verifies `tree`: finds what is forced, as by `forced`, behind each of
        its ends at which few tokens may stand.
        """
        matcher, path, drafts = self._matcher, list[int](), list[ForcedDrafts]()
        for node, mask in enumerate(self.masks(tree), ROOT):
            if mask is None or not (ends := _ids(mask, FEW_ENDS)):
                continue
            path = self._go(path, tree.path(node), tree.tokens)
            for token in ends:
                if matcher.accept_token(token):
                    if forced := self._forced(len(path) + 1, most):
                        drafts.append(ForcedDrafts(len(path), token, forced))
                    matcher.rollback(1)
        self._go(path, [], ())
        return drafts

    def _forced(self, depth: int, most: int) -> list[int]:
        """The tokens that are forced from where the matcher stands, `depth` tokens after the output; see
        `forced`.
        """
        tokens: list[int] = []
        until = time.thread_time() + WALK_S
        while len(tokens) < most and not self._matcher.is_terminated() and time.thread_time() < until:
            must = self._must()
            if not must and not self._matcher.is_completed():  # here the text may go on in several ways
                break
            mask = self._mask(depth + len(tokens)) if depth or tokens else self._root()
            token = self._only(mask, must)
            if token is None or not self._matcher.accept_token(token):
                break
            tokens.append(token)
        if tokens:
            self._matcher.rollback(len(tokens))
        return tokens

    def _only(self, mask: np.ndarray, must: bytes) -> int | None:
        """The longest of the allowed ids, if all others begin it, where the text goes on with `must`."""
        ids = _ids(mask, MOST_BEGINNINGS)
        if not ids:
            return None
        longest: int = max(ids, key=lambda id: len(self._pieces[id]))
        alike = all(self._pieces[longest].startswith(self._pieces[id]) for id in ids)
        # Else a shorter one could go on in another way.
        return longest if alike and (len(ids) == 1 or must.startswith(self._pieces[longest])) else None

    def _must(self) -> bytes:
        """The bytes that come next, in whatever tokens; none where there is a choice, or an end may be."""
        try:
            return str(self._matcher.find_jump_forward_string()).encode()
        except UnicodeDecodeError as error:  # it ends inside a character
            return bytes(error.object)

    def _root(self, room: MaskRoom | None = None) -> np.ndarray:
        if self._next is None and room is not None:  # it is another step's soon
            return self._mask(0, room)
        if self._next is None:
            self._next = self._mask(0)
        return self._next

    def _filled(self, tree: DraftTree, room: MaskRoom) -> list[np.ndarray | None]:
        """The masks of the root and of the tree, by one call of the library. Raises GrammarTooSlow."""
        first, nodes = room.used, [room.take() for _ in range(1 + len(tree))]
        rows, tokens = room.rows[first : room.used], np.array([0, *tree.tokens], np.int64)
        rows.fill(0)
        if not self._matcher.traverse_draft_tree(*_links(tuple(tree.parents)), tokens, rows, MOST_WALK_S):
            message = f"grammar takes too long to follow: over {MOST_WALK_S:g} s for one step"
            raise GrammarTooSlow(message, param="grammar")
        depths, masks = [0], list[np.ndarray | None]([self._settled(nodes[0], 0)])
        for token, parent, mask in zip(tree.tokens, tree.parents, nodes[1:], strict=True):
            above = masks[parent + 1]
            depths.append(depths[parent + 1] + 1)
            if above is None or token in self._ends or not int(above[token // 32]) >> token % 32 & 1:
                masks.append(None)
            else:
                masks.append(self._settled(mask, depths[-1]))
        return masks

    def _walk(self, tree: DraftTree, masks: bool = True) -> list[tuple[bool, np.ndarray | None]]:
        """Walks the tree: for each node, whether it is allowed, and the mask of what follows it.

        Raises GrammarTooSlow.
        """
        started, until = time.perf_counter(), time.thread_time() + WALK_S
        matcher, visited, path = self._matcher, list[tuple[bool, np.ndarray | None]](), list[int]()
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            if parent != ROOT and not visited[parent][0]:
                visited.append((False, None))
                continue
            # The system's answer takes as long as a mask: it is asked when it may say so.
            if time.perf_counter() > started + WALK_S and time.thread_time() > until:
                message = f"grammar takes too long to follow: over {WALK_S:g} s of a processor for one step"
                raise GrammarTooSlow(message, param="grammar")
            if parent != (path[-1] if path else ROOT):
                path = self._go(path, tree.path(parent), tree.tokens)
            if matcher.is_terminated() or not matcher.accept_token(token):
                visited.append((False, None))
                continue
            path.append(node)
            seen = masks and not matcher.is_terminated()
            visited.append((True, self._mask(len(path)) if seen else None))
        self._go(path, [], ())
        return visited

    def _go(self, path: list[int], target: list[int], tokens: SequenceOf[int]) -> list[int]:
        """Moves from the end of one path of nodes, all of them allowed, to that of another."""
        same = 0
        while same < min(len(path), len(target)) and path[same] == target[same]:
            same += 1
        if len(path) > same:
            self._matcher.rollback(len(path) - same)
        for node in target[same:]:
            self._matcher.accept_token(tokens[node])
        return list(target)

    def _mask(self, depth: int, room: MaskRoom | None = None) -> np.ndarray:
        """The mask where the matcher stands, `depth` tokens after the output."""
        room = room or MaskRoom(np.empty((1, self._words), np.int32))
        mask = room.take()
        mask.fill(0)
        self._matcher.fill_next_token_bitmask(room.rows, room.used - 1)
        return self._settled(mask, depth)

    def _settled(self, mask: np.ndarray, depth: int) -> np.ndarray:
        """The mask, as it was filled `depth` tokens after the output, with the ends that may stand there.

        An end that comes too early, or is to be ignored, is taken out, unless nothing else is left: what is
        complete ends. So does what cannot go on, because the vocabulary cannot write what must follow.
        """
        early = self.followed + depth < self._params.min_tokens
        banned = self._bits_of_ends if early else self._bits_of_ignored
        before = [(word, mask[word]) for word in banned]
        for word, bits in banned.items():
            mask[word] &= ~bits
        if np.count_nonzero(mask):
            return mask
        for word, bits in before:
            mask[word] = bits
        if not before or not np.count_nonzero(mask):
            for word, bits in self._bits_of_ends.items():
                mask[word] = bits
        return mask


@functools.lru_cache(64)
def _links(parents: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The first child and the next sibling of a root and of each node below it, int64; -1: none."""
    child, sibling = (np.full(1 + len(parents), -1, np.int64) for _ in range(2))
    for node in range(len(parents), 0, -1):
        above = parents[node - 1] + 1
        sibling[node], child[above] = child[above], node
    return child, sibling


def _words(ids: Collection[int]) -> dict[int, np.int32]:
    """The words of a mask that allows these ids alone, but for those that are 0."""
    words = dict[int, int]()
    for id in ids:
        words[id // 32] = words.get(id // 32, 0) | 1 << id % 32
    return {word: np.uint32(bits).view(np.int32) for word, bits in words.items()}


def _ids(mask: np.ndarray, most: int) -> list[int]:
    """The ids that a mask allows; none if there are more than `most`."""
    if np.count_nonzero(mask) > most:
        return []
    words, ids = (mask != 0).nonzero()[0], list[int]()  # of bools: a quarter of the time
    for word, bits in zip(words.tolist(), mask[words].view(np.uint32).tolist(), strict=True):
        while bits:
            ids.append(32 * word + (bits & -bits).bit_length() - 1)
            bits &= bits - 1
    return ids if len(ids) <= most else []
