"""Rounds that the devices of decode engines have posted into their mailboxes, and drafts that are left there.

No bell rings for a mailbox: it is looked into, all sequences of a peer by one array. It knows where each
one's next row will be, and makes of words the commits that a host would have sent. Whether a commit makes
sense for its sequence is checked where all commits are.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from eyas.engine.ipc.mailbox import HALF, NEWEST, Mailbox, Words, tags
from eyas.engine.ipc.messages import DraftCommit, Proposal
from eyas.engine.speculation.draft_sequences import DraftedSequence, DraftSequences, Key

BUSY_S = 0.05
"""For so long after the last word the next one is looked for without a pause: rounds take less."""
SPIN_S = 0.0002
"""So long at once; then the fronts and the lines have their turn."""
LAPS = 1 << 20
"""Positions by which a word can be ahead of the one that was looked for. Tags of other sequences are further
away, but by chance.
"""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Next:
    """What is looked for in one peer's mailbox, an entry per sequence: its next row."""

    keys: list[Key]
    posted: list[DraftCommit]
    places: Ints
    positions: Ints
    columns: Ints
    expected: Words

    @classmethod
    def of(cls, sequences: SequenceOf[tuple[Key, DraftedSequence, DraftCommit]], kept: int) -> _Next:
        posted = [commit for _, _, commit in sequences]
        positions = np.array([one.first + one.end for _, one, _ in sequences], np.int64)
        return cls(
            [key for key, _, _ in sequences],
            posted,
            np.array([commit.place for commit in posted], np.int64),
            positions,
            positions % kept,
            tags([commit.generation for commit in posted], positions),
        )


class PostedCommits:
    """`mailbox`: of a peer, if it has one. Who is followed there is known to `sequences`."""

    def __init__(self, sequences: DraftSequences, mailbox: Callable[[int], Mailbox | None]) -> None:
        self._sequences = sequences
        self._mailbox = mailbox
        self._next: dict[int, _Next] = {}  # by peer
        self._changes = sequences.changes
        self._came = 0.0  # monotonic seconds, when the last round did

    @property
    def any(self) -> bool:
        """Is there anything to look for?"""
        return bool(self._next) or self._changes != self._sequences.changes

    @property
    def busy(self) -> bool:
        """Is it likely to come soon?"""
        return self.any and time.monotonic() - self._came < BUSY_S

    def pass_on(self, *, patient: bool) -> None:
        """The sequences get the commits that have come. `patient`: while it is busy, waits for them.

        What a step has told of some sequences it tells of the others in the same moment, so it looks again
        until nothing more has come: they are drafted for together.
        """
        wait_s = SPIN_S if patient and self.busy else 0.0
        deadline = time.monotonic() + wait_s
        while not self._look() and time.monotonic() < deadline:
            pass
        deadline = time.monotonic() + wait_s
        while self._look() and time.monotonic() < deadline:
            pass

    def answer(self, key: Key, followed: DraftedSequence, proposal: Proposal) -> bool:
        """Leaves a proposal in the sequence's mailbox. False: it has none."""
        mailbox = None if followed.posted is None else self._mailbox(key[0])
        if mailbox is None or followed.posted is None:
            return False
        mailbox.propose(followed.posted.place, proposal)  # one that has no room there is dropped
        return True

    def _look(self) -> bool:
        """Has anything come?"""
        if self._changes != self._sequences.changes:
            self._gather()
        came = False
        for peer, there in self._next.items():
            mailbox = self._mailbox(peer)
            if mailbox is not None:
                came |= self._look_into(mailbox, there)
        if came:
            self._came = time.monotonic()
        return came

    def _look_into(self, mailbox: Mailbox, there: _Next) -> bool:
        words = mailbox.words[there.places, there.columns]
        ahead = ((words >> np.uint64(32)) - there.expected) & np.uint64(HALF)
        near = np.flatnonzero((ahead < LAPS) & (words != 0))
        came = False
        for i in near.tolist():
            key, posted = there.keys[i], there.posted[i]
            if ahead[i] % mailbox.place.kept:
                continue  # another sequence's, by chance
            commit = read_commit(mailbox, posted, int(there.positions[i])) if not ahead[i] else None
            if commit is not None:
                self._sequences.commit(key, commit)
                came = True
            elif ahead[i]:
                self._sequences.close(key, "its rounds were not in its mailbox any more")
        return came

    def _gather(self) -> None:
        """Anew, since something has changed."""
        by_peer: dict[int, list[tuple[Key, DraftedSequence, DraftCommit]]] = defaultdict(list)
        for key, followed in list(self._sequences.followed.items()):
            if (posted := followed.posted) is None:
                continue
            mailbox = self._mailbox(key[0])
            if mailbox is None or posted.place >= mailbox.places:
                self._sequences.close(key, "it has no place in a mailbox that is known here")
            else:
                by_peer[key[0]].append((key, followed, posted))
        self._next = {
            peer: _Next.of(some, mailbox.place.kept)
            for peer, some in by_peer.items()
            if (mailbox := self._mailbox(peer)) is not None
        }
        if self._changes != self._sequences.changes:
            self._changes = self._sequences.changes
            self._came = time.monotonic()


def read_commit(mailbox: Mailbox, posted: DraftCommit, first: int) -> DraftCommit | None:
    """All rows from position `first` on, up to one that was the newest; None: a round is not all there."""
    positions = np.arange(first, first + mailbox.place.kept)
    words = mailbox.words[posted.place, positions % mailbox.place.kept]
    there = (words >> np.uint64(32)) == tags([posted.generation], positions)
    run = len(there) if there.all() else int(there.argmin())
    halves = words[:run] & np.uint64(HALF)
    newest = np.flatnonzero(halves & np.uint64(NEWEST))
    if not len(newest):
        return None
    tokens = (halves[: newest[-1] + 1] & np.uint64(NEWEST - 1)).tolist()
    return msgspec.structs.replace(posted, base_len=first, tokens=tuple(tokens))
