"""Rounds that decode engines have posted into their mailboxes, and drafts that are left there.

For what a device posts nothing wakes this worker, so mailboxes are looked into. Words become the commits that
would have come by the fronts. Whether a commit makes sense for its sequence is checked where all commits are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from eyas.engine.ipc.mailbox import DraftMailbox
from eyas.engine.ipc.messages import DraftProposal
from eyas.engine.speculation.draft_worker.draft_sequences import DraftedSequence, DraftSequences, Key

BUSY_S = 0.05
"""For so long after a round or its answer the next one is looked for without a pause: rounds take less."""
SPIN_S = 0.0002
"""So long at once; then the fronts have their turn."""

NO_PLACE = "it has no place in a mailbox that is known here"
LOST = "its rounds were not in its mailbox any more"


class PostedCommits:
    """`mailbox`: of a peer, if it has one. Who is followed there is known to `sequences`."""

    def __init__(self, sequences: DraftSequences, mailbox: Callable[[int], DraftMailbox | None]) -> None:
        self._sequences = sequences
        self._mailbox = mailbox
        self._came = 0.0  # monotonic seconds, when the last round or answer did

    @property
    def any(self) -> bool:
        """Is there anything to look for that nothing wakes this worker for?"""
        boxes = [self._mailbox(key[0]) for key, _ in self._expected]
        return any(box is None or not box.place.width for box in boxes)

    @property
    def busy(self) -> bool:
        """Is it likely to come soon?"""
        return time.monotonic() - self._came < BUSY_S and self.any

    def pass_on(self) -> bool:
        """The sequences get the commits that have come, if any; while it is busy, waits a little for them.

        What a step has posted for some sequences it posts for the others in the same moment, so it looks
        again until nothing more has come, or all have: they are drafted for together.
        """
        wait_s = SPIN_S if self.busy else 0.0
        deadline = time.monotonic() + wait_s
        while not (came := self._look()) and time.monotonic() < deadline:
            pass
        some, more = came > 0, came
        deadline = time.monotonic() + wait_s
        while more and came < len(self._expected) and time.monotonic() < deadline:
            more = self._look()
            came += more
        return some

    def answer(self, key: Key, followed: DraftedSequence, proposal: DraftProposal) -> bool:
        """Leaves a proposal in the sequence's mailbox. False: it has none."""
        mailbox = self._mailbox(key[0]) if followed.mailed else None
        if mailbox is None:
            return False
        mailbox.propose(followed.open.place, proposal)  # one that has no room there is dropped
        self._came = time.monotonic()
        return True

    @property
    def _expected(self) -> list[tuple[Key, DraftedSequence]]:
        """Sequences whose next rows are to be in a mailbox: the first have come by the front."""
        followed = self._sequences.followed.items()
        return [(key, one) for key, one in followed if one.mailed and one.latest is not None]

    def _look(self) -> int:
        """How many sequences' rounds have come."""
        came = sum(self._look_for(key, followed) for key, followed in self._expected)
        if came:
            self._came = time.monotonic()
        return came

    def _look_for(self, key: Key, followed: DraftedSequence) -> bool:
        """One commit, if it has come."""
        opened, mailbox = followed.open, self._mailbox(key[0])
        if mailbox is None or opened.place >= mailbox.places:
            self._sequences.close(key, NO_PLACE)
            return False
        position = followed.first + followed.end
        tokens = mailbox.rounds(opened.place, opened.generation, position)
        features: bytes | None = b""
        if tokens and mailbox.place.width:  # they were left beside the words
            features = mailbox.features(opened.place, opened.generation, position, len(tokens))
        if tokens is None or features is None:
            self._sequences.close(key, LOST)
            return False
        if tokens:
            place = -1 if mailbox.place.width else opened.place
            assert followed.latest is not None
            commit = msgspec.structs.replace(
                followed.latest, base_len=position, tokens=tokens, features=features, place=place
            )
            self._sequences.commit(key, commit)
        return bool(tokens)
