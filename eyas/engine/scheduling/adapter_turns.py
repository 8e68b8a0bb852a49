"""Sequences whose adapter has no slot on the device: they wait here, outside the queue, and hold up no other.

A sequence enters its adapter before it is admitted, and leaves when it goes, or is preempted; as long as one
is in, the slot stays. Where all slots are in use, the adapter that was used least recently of those that may
move takes no more sequences: once the ones that are in have left, its slot goes to the sequence that has
waited longest. Long answers are not waited for: after `TURN_S` they are sent back, and wait in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from eyas.engine.adapters.table import AdapterTable
from eyas.engine.batch.sequence import Sequence

TURN_S = 5.0
"""For how long an adapter still computes that takes no more sequences. What of their KV is not cached any
more is computed again, so shorter turns may cost more than they give.
"""


class AdapterTurns:
    """Whose turn it is, for the scheduler of one engine."""

    def __init__(self, table: AdapterTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._table, self._clock = table, clock
        self._waiting: list[Sequence] = []  # the one that has waited longest first
        self._closing: str = ""  # an adapter that takes no more sequences; "": none
        self._closed_at = 0.0
        self._entered: dict[int, int] = {}  # by the uid of each that is in: its tokens when it entered

    @property
    def waiting(self) -> int:
        """The number of sequences that wait."""
        return len(self._waiting)

    @property
    def copied(self) -> list[Sequence]:
        """Those of them whose prompt was computed elsewhere."""
        return [seq for seq in self._waiting if seq.pages]

    @property
    def overdue(self) -> str:
        """An adapter whose slot others have waited for long enough: its sequences are to leave. "": none."""
        late = self._closing and self._clock() - self._closed_at >= TURN_S
        return self._closing if late else ""

    def has_had_its_turn(self, seq: Sequence) -> bool:
        """Whether a sequence has a token more than when it entered: else turns might come to nothing."""
        return len(seq.output) > self._entered[seq.uid]

    def enter(self, seq: Sequence) -> bool:
        """True if the sequence may be computed by now; False: it waits, until `poll` gives it back."""
        if not seq.adapter or seq.adapter_slot:
            return True
        if seq.adapter == self._closing or not self._table.ready(seq.adapter):
            self._waiting.append(seq)
            return False
        self.let_in(seq)
        return True

    def let_in(self, seq: Sequence) -> None:
        """The sequence is computed from now on: its adapter is ready, or it forks from one that is in."""
        if seq.adapter and not seq.adapter_slot:
            seq.adapter_slot = self._table.enter(seq.adapter)
            self._entered[seq.uid] = len(seq.output)

    def leave(self, seq: Sequence) -> None:
        """The sequence is not computed any more, or waits no longer."""
        if seq in self._waiting:
            self._waiting.remove(seq)
        if seq.adapter_slot:
            self._table.leave(seq.adapter)
            seq.adapter_slot = 0
            del self._entered[seq.uid]

    def poll(self) -> list[Sequence]:
        """Fills slots as far as it can; the sequences whose adapter has one now."""
        if not self._waiting:
            self._closing = ""
            return []
        ready: list[Sequence] = []
        for seq in self._waiting:
            if seq.adapter != self._closing and self._is_seated(seq):
                self.let_in(seq)  # at once: the slot of an adapter that nobody is in may be taken
                ready.append(seq)
        self._waiting = [seq for seq in self._waiting if not seq.adapter_slot]
        if all(seq.adapter == self._closing for seq in self._waiting):
            self._closing = ""  # nobody waits for its slot: another's came free, or who waited has left
        return ready

    def _is_seated(self, seq: Sequence) -> bool:
        """Whether its adapter is ready; begins to fill a slot for it, or to free one."""
        if not self._table.seat(seq.adapter):
            if not self._closing:
                self._closing, self._closed_at = next(iter(self._table.movable), ""), self._clock()
            return False
        if self._closing not in self._table.on_device:
            self._closing = ""  # its slot has been taken
        return self._table.ready(seq.adapter)
