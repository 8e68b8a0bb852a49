"""What a draft worker's host does about rounds that its device drafts for by itself: it launches and counts.

While a batch waits on the device nothing may change what it was launched with, pages above all: whoever
changes sequences calls `stop` before. Everything that a device cannot see to is the host's own way, which
takes the same words: the first rows of a sequence, peers of another layout, a peer on this worker's own GPU,
whose steps a batch that waits would hold up, several peers at once, whose steps end at different times.
"""

from __future__ import annotations

from eyas.engine.batch.sequence import RingPlace
from eyas.engine.kernels.exchange.mail_rounds import WRONG
from eyas.engine.speculation.draft_worker.draft_sequences import (
    LOST_FEATURES,
    NO_SENSE,
    DraftedSequence,
    DraftSequences,
    Key,
)
from eyas.engine.speculation.draft_worker.mailed_rounds import MailedRounds, MailedSequence
from eyas.engine.speculation.drafters.channels import DraftChannels


class RoundsAhead:
    """`rounds`: None where no device takes rounds by itself; then nothing is ever launched."""

    def __init__(
        self, sequences: DraftSequences, channels: DraftChannels, rounds: MailedRounds | None = None
    ) -> None:
        self._sequences = sequences
        self._channels = channels
        self._rounds = rounds
        self._flight: list[tuple[Key, DraftedSequence]] = []

    @property
    def flying(self) -> bool:
        """Does a batch wait or draft?"""
        return bool(self._flight)

    def launch(self) -> None:
        """A batch for the next rounds of all sequences that have rows, if the device can take those of all;
        else none.
        """
        if self._rounds is None or self._flight:
            return
        followed = [(key, one) for key, one in self._sequences.followed.items() if one.started]
        if not 0 < len(followed) <= self._rounds.most or len({peer for (peer, _), _ in followed}) > 1:
            return
        if not all([self._can_take(key, one) for key, one in followed]):
            return
        sequences = []
        for key, one in followed:
            spec = one.next_request
            assert spec is not None
            if not self._sequences.reserve(key, spec, ahead=self._rounds.few):
                return  # it is closed
            sequences.append(self._mailed(key, one))
        self._flight = followed
        self._rounds.launch(sequences)

    def stop(self) -> bool:
        """Ends the batch in flight, if there is one, and counts what came for it. Did any round?"""
        if not self._flight:
            return False
        assert self._rounds is not None
        self._rounds.stop()
        return self.count(waiting=True)

    def count(self, *, waiting: bool = False) -> bool:
        """Counts what came for a batch that has landed. Did any round? `waiting`: waits until it has."""
        if not self._flight:
            return False
        assert self._rounds is not None
        landed = self._rounds.land(waiting=waiting)
        if landed is None:
            return False
        flight, self._flight = self._flight, []
        for (key, followed), (count, lost) in zip(flight, landed, strict=True):
            if self._sequences.followed.get(key) is not followed:
                continue  # its peer has gone
            followed.rows += max(count, 0)
            if lost:
                self._sequences.close(key, LOST_FEATURES)
            elif count == WRONG:
                self._sequences.close(key, NO_SENSE)
        return any(count for count, _ in landed)

    def _can_take(self, key: Key, followed: DraftedSequence) -> bool:
        """Can the device take its next round? All that is before it is on the device then."""
        rounds = self._rounds
        mailbox, rows = self._channels.mailbox(key[0]), self._channels.rows(key[0])
        if rounds is None or mailbox is None or rows is None or not followed.mailed:
            return False
        fits = mailbox.place == rounds.wait.place and rows.ring.row_bytes == rounds.wait.row_bytes
        there = (
            rows.apart and mailbox.on_device and followed.open.place < min(mailbox.places, rows.ring.places)
        )
        idle = followed.is_here and not followed.commits and followed.next_request is not None
        inside = followed.first + followed.end + rounds.few < self._sequences.context_length
        if not (fits and there and idle and inside and rounds.seated(followed.owner(key))):
            return False
        opened, position = followed.open, followed.first + followed.end
        return mailbox.rounds(opened.place, opened.generation, position) is not None  # else it has lost one

    def _mailed(self, key: Key, followed: DraftedSequence) -> MailedSequence:
        mailbox, rows, opened = self._channels.mailbox(key[0]), self._channels.rows(key[0]), followed.open
        assert mailbox is not None and rows is not None
        at = opened.place
        place = RingPlace(at, rows.address(at), opened.generation, mailbox.address(at))
        return MailedSequence(followed.owner(key), followed.pages, followed.first, place)
