"""Sequences whose adapter has no slot on the device: they wait here, outside the queue, and hold up no other.

A sequence enters its adapter before it is admitted, and leaves when it goes; as long as one is in, the slot
stays. Where all slots are in use, the adapter that was used least recently of those that may move takes no
more sequences: once the ones that are in have left, its slot goes to the sequence that has waited longest.
"""

from __future__ import annotations

from eyas.engine.adapters.table import AdapterTable
from eyas.engine.batch.sequence import Sequence


class AdapterTurns:
    """Whose turn it is, for the scheduler of one engine."""

    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        self._waiting: list[Sequence] = []  # the one that has waited longest first
        self._closing: str = ""  # an adapter that takes no more sequences; "": none

    @property
    def waiting(self) -> int:
        """The number of sequences that wait."""
        return len(self._waiting)

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

    def leave(self, seq: Sequence) -> None:
        """The sequence is not computed any more, or waits no longer."""
        if seq in self._waiting:
            self._waiting.remove(seq)
        if seq.adapter_slot:
            self._table.leave(seq.adapter)
            seq.adapter_slot = 0

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
                self._closing = next(iter(self._table.movable), "")
            return False
        if self._closing not in self._table.on_device:
            self._closing = ""  # its slot has been taken
        return self._table.ready(seq.adapter)
