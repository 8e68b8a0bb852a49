"""The states of sequences: who gets a slot, where a sequence resumes, and which states outlive it.

A state is kept for others at the end of a prompt and of an answer, where other texts leave a prompt, and,
if there is room, every SPACING tokens of a long prompt: always at the last multiple of SPAN.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from eyas.engine.batch.sequence import Sequence, SequenceWork
from eyas.engine.kv.prefix_cache import CacheNode, PrefixCache
from eyas.engine.kv.states import NO_STATE, StateSlots
from eyas.engine.states.shape import SPAN

SPACING = 1024
"""Tokens between the states of a long prompt: an eighth of a second's work, of which others save a part."""


class SequenceStates:
    """Gives sequences slots, and takes them back."""

    def __init__(self, cache: PrefixCache, slots: StateSlots) -> None:
        self._cache = cache
        self.slots = slots

    def begin(self, pages: SequenceOf[int], *, pulled: bool) -> int | None:
        """A slot for a sequence that resumes behind these `pages` of the cache; None: there is no room.

        `pulled`: its state comes from elsewhere.
        """
        source = NO_STATE if pulled else self._cache.state_behind(pages)
        return self.slots.take(source, settled=pulled)

    def seat(self, seq: Sequence, slot: int, cached: int) -> None:
        """The sequence resumes in that slot behind `cached` rows. If the cache has pages of more, others have
        left that text there: its state will be kept for the next ones.
        """
        seq.state, seq.bound = slot, cached
        whole = self._cache.whole_rows(seq.all_tokens(), seq.pages, seq.salt)
        seq.branch = whole // SPAN * SPAN
        self.slots.hits += bool(cached)
        self.slots.resumed_tokens += cached
        self.slots.missed_tokens += whole - cached

    def fork(self, leader: Sequence, follower: Sequence) -> bool:
        """Gives the follower a copy of the leader's; False: there is no room."""
        slot = self.slots.fork(leader.state)
        if slot is not None:
            follower.state, follower.bound = slot, leader.bound
        return slot is not None

    def stop(self, seq: Sequence, stop: int) -> int:
        """Where a chunk that may go to `stop` ends: at a branch, if it has passed none yet."""
        return seq.branch if seq.kv_len < seq.branch < stop else stop

    def passed(self, work: SequenceWork) -> bool:
        """Whether a state is to be kept behind a chunk, which is no prompt's end."""
        start, end = work.start, work.start + len(work.tokens)
        return end == work.seq.branch or start // SPACING < work.fold // SPACING

    def snapshot(self, seq: Sequence, *, spaced: bool = False) -> None:
        """Keeps a copy of its state, as it stands now, if the pages before it are cached."""
        node = self._node(seq)
        if node is not None:
            self.slots.snapshot(node, seq.state, spaced=spaced)

    def give_back(self, seq: Sequence) -> None:
        """Keeps the state that a sequence leaves behind, as `snapshot` would, and takes its slot."""
        if seq.state == NO_STATE:
            return
        node = self._node(seq)
        if node is not None:
            self.slots.keep(node, seq.state)
        self.slots.pool.drop((seq.state,))
        seq.state, seq.bound, seq.branch = NO_STATE, 0, 0

    def _node(self, seq: Sequence) -> CacheNode | None:
        """The cached node at which its state stands; None: there is none."""
        if seq.state == NO_STATE or not 0 < seq.bound <= seq.kv_len:
            return None
        return self._cache.at(seq.all_tokens(), seq.bound, seq.pages, seq.salt)
