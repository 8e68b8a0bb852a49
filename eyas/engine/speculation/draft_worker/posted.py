"""Rounds that decode engines have posted into their mailboxes, and drafts that are left there.

Mailboxes are looked into, at all of a peer's sequences at once: for what a device posts nothing wakes this
worker. Words become the commits that would have come by the fronts. Whether a commit makes sense for its
sequence is checked where all commits are.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import msgspec
import numpy as np

from eyas.engine.ipc.mailbox import HALF, NEWEST, DraftMailbox, tags
from eyas.engine.ipc.messages import DraftOpen, DraftProposal
from eyas.engine.speculation.draft_worker.draft_sequences import DraftedSequence, DraftSequences, Key

BUSY_S = 0.05
"""For so long after the last word the next one is looked for without a pause: rounds take less."""
SPIN_S = 0.0002
"""So long at once; then the fronts have their turn."""
LAPS = 1 << 20
"""Positions by which a word can be ahead of the one that was looked for. Tags of other sequences are further
away, but by chance.
"""

LOST = "its rounds were not in its mailbox any more"

_TAG, _HALF, _LAPS = np.uint64(32), np.uint64(HALF), np.uint64(LAPS)


class AwaitedRows:
    """What is looked for in one mailbox, an entry per sequence: its row of a position, and those after it.

    `whose`: of each sequence how it was opened, and the position of its next row.
    """

    def __init__(self, mailbox: DraftMailbox, whose: list[tuple[DraftOpen, int]]) -> None:
        self.mailbox = mailbox
        parts = [(opened.place, opened.generation, position) for opened, position in whose]
        places, generations, self.positions = np.array(parts, np.int64).reshape(-1, 3).T.copy()
        self._words = mailbox.words.reshape(-1)  # the same memory
        self._rows = [mailbox.words[place, : mailbox.place.rows] for place in places]
        self._firsts = places * mailbox.place.words
        self._tags = tags(generations, np.zeros_like(generations))
        self._aim()

    def _aim(self) -> None:
        """What `look` needs, which is all that it does while nothing comes."""
        self._at = self._firsts + self.positions % self.mailbox.place.rows
        self._expected = (self._tags + self.positions.view(np.uint64)) & _HALF

    def look(self) -> tuple[list[int], list[int]]:
        """The entries whose next row is there, and those whose row has given way to one of a later lap."""
        words = self._words[self._at]
        ahead = ((words >> _TAG) - self._expected) & _HALF
        near = np.flatnonzero(ahead < _LAPS)
        if not len(near):
            return [], []
        near = near[words[near] != 0]
        there = ahead[near] == 0
        later = ~there & (ahead[near] % np.uint64(self.mailbox.place.rows) == 0)
        return near[there].tolist(), near[later].tolist()

    def rounds(self, entries: list[int]) -> list[tuple[int, ...]]:
        """Of each of these entries the tokens of all whole rounds that are there; it awaits the next then."""
        found = [self._rounds(i) for i in entries]
        self.positions[entries] += np.array(list(map(len, found)), np.int64)
        self._aim()
        return found

    def _rounds(self, entry: int) -> tuple[int, ...]:
        words, kept = self._rows[entry].tolist(), self.mailbox.place.rows
        position, tag = int(self.positions[entry]), int(self._expected[entry])
        tokens: list[int] = []
        whole = 0
        for at in range(kept):
            word = words[(position + at) % kept]
            if word >> 32 != (tag + at) & HALF:
                break
            tokens.append(word & (NEWEST - 1))
            if word & NEWEST:
                whole = at + 1
        return tuple(tokens[:whole])


class PostedCommits:
    """`mailbox`: of a peer, if it has one. Who is followed there is known to `sequences`."""

    def __init__(self, sequences: DraftSequences, mailbox: Callable[[int], DraftMailbox | None]) -> None:
        self._sequences = sequences
        self._mailbox = mailbox
        self._keys: dict[int, list[Key]] = {}  # by peer, in the order of what is ..
        self._awaited: dict[int, AwaitedRows] = {}
        self._changes = sequences.changes
        self._came = 0.0  # monotonic seconds, when the last round did

    @property
    def any(self) -> bool:
        """Is there anything to look for that nothing wakes this worker for?"""
        return self._is_stale or any(not one.mailbox.place.width for one in self._awaited.values())

    @property
    def busy(self) -> bool:
        """Is it likely to come soon?"""
        return self.any and time.monotonic() - self._came < BUSY_S

    def pass_on(self) -> bool:
        """The sequences get the commits that have come, if any; while it is busy, waits a little for them.

        What a step has told of some sequences it tells of the others in the same moment, so it looks again
        until nothing more has come, or all have: they are drafted for together.
        """
        wait_s = SPIN_S if self.busy else 0.0
        deadline = time.monotonic() + wait_s
        while not (came := self._look()) and time.monotonic() < deadline:
            pass
        some, more = came > 0, came
        deadline = time.monotonic() + wait_s
        while more and came < self._count and time.monotonic() < deadline:
            more = self._look()
            came += more
        return some

    def leave(self) -> None:
        """Nothing is looked for any more: mailboxes that others close are let go of."""
        self._awaited.clear()

    def answer(self, key: Key, followed: DraftedSequence, proposal: DraftProposal) -> bool:
        """Leaves a proposal in the sequence's mailbox. False: it has none."""
        mailbox = self._mailbox(key[0]) if followed.mailed else None
        if mailbox is None:
            return False
        mailbox.propose(followed.open.place, proposal)  # one that has no room there is dropped
        return True

    @property
    def _is_stale(self) -> bool:
        others = (self._mailbox(peer) is not there.mailbox for peer, there in self._awaited.items())
        return self._changes != self._sequences.changes or any(others)

    @property
    def _count(self) -> int:
        """Sequences that are looked for."""
        return sum(map(len, self._keys.values()))

    def _look(self) -> int:
        """How many sequences' rounds have come."""
        if self._is_stale:
            self._gather()
        came = sum(self._look_for(peer, awaited) for peer, awaited in self._awaited.items())
        if came:
            self._came = time.monotonic()
        return came

    def _look_for(self, peer: int, awaited: AwaitedRows) -> int:
        here, lost = awaited.look()
        keys, came = self._keys[peer], 0
        for i in lost:
            self._sequences.close(keys[i], LOST)
        if not here:
            return 0
        firsts = awaited.positions[here].tolist()
        for i, first, tokens in zip(here, firsts, awaited.rounds(here), strict=True):
            if tokens:
                self._pass_on(keys[i], first, tokens)
                came += 1
        return came

    def _pass_on(self, key: Key, first: int, tokens: tuple[int, ...]) -> None:
        """One commit; if it is taken, what is looked for next is known already."""
        sequences = self._sequences
        followed, mailbox = sequences.followed[key], self._awaited[key[0]].mailbox
        place, features = followed.open.place, b""
        if mailbox.place.width:  # they were left beside the words
            copied = mailbox.features(place, followed.open.generation, first, len(tokens))
            if copied is None:
                sequences.close(key, LOST)
                return
            place, features = -1, copied
        assert followed.latest is not None
        commit = msgspec.structs.replace(
            followed.latest, base_len=first, tokens=tokens, features=features, place=place
        )
        known = self._changes == sequences.changes
        sequences.commit(key, commit)
        if known and followed.commits and followed.commits[-1] is commit:
            self._changes = sequences.changes

    def _gather(self) -> None:
        """All that is to be looked for, since something has changed."""
        found: dict[int, list[tuple[Key, DraftOpen, int]]] = defaultdict(list)
        for key, followed in list(self._sequences.followed.items()):
            if not followed.mailed or followed.latest is None:
                continue
            mailbox = self._mailbox(key[0])
            if mailbox is None or followed.open.place >= mailbox.places:
                self._sequences.close(key, "it has no place in a mailbox that is known here")
            else:
                found[key[0]].append((key, followed.open, followed.first + followed.end))
        self._keys = {peer: [key for key, _, _ in some] for peer, some in found.items()}
        self._awaited = {
            peer: AwaitedRows(mailbox, [(opened, position) for _, opened, position in some])
            for peer, some in found.items()
            if (mailbox := self._mailbox(peer)) is not None
        }
        self._changes, self._came = self._sequences.changes, time.monotonic()
