"""Rounds that a draft worker's device takes from mailboxes by itself, launched before they are there.

A batch waits on the device for the next rounds of its sequences, takes their features, drafts, and leaves the
drafts in their mailboxes: no host is between a round and its drafts. The host has launched it while the
rounds before were verified, and counts afterwards what came. What a host makes of the same rounds is
`DeviceDraftRunner`'s; both have the same tables and seats, and never a batch at the same time.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch

from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.batch.sequence import RingPlace
from eyas.engine.batch.tables import TableWrites
from eyas.engine.ipc.mailbox import MailLayout
from eyas.engine.kernels.drafts.rounds import RoundBatch
from eyas.engine.kernels.exchange import mail_rounds, row_ring
from eyas.engine.kernels.exchange.mail_rounds import HeardRows, MailWait, TakenFeatures
from eyas.engine.kernels.exchange.mailbox import MOST_POLLS
from eyas.engine.kernels.launch.recording import GraphRecorder
from eyas.engine.models.base import Drafted
from eyas.engine.speculation.draft_worker.seats import DraftSeats, DraftState, padded_size

LOOKS_AHEAD = 64
"""Looks for a row beside one that is there: a round writes all of its rows at once, and may have fewer."""


@dataclass(frozen=True)
class MailedSequence:
    """A sequence whose next round is waited for: its pages have room for that, and for drafts below it.

    `offset`: the position of its row 0. `place`: of its mailbox and of its features, by their addresses here.
    """

    owner: Hashable
    pages: SequenceOf[int]
    offset: int
    place: RingPlace


class MailProgram:
    """The launches for a batch of `slots` int32 [B], on memory that stays where it is.

    `results` int32 [2, B]: how many rows came of each (`mail_rounds.WRONG`: what came makes no sense), and 1
    where a feature was lost.
    """

    def __init__(self, state: DraftState, slots: torch.Tensor, wait: MailWait) -> None:
        few, size, device = state.proposer.path_rows, slots.shape[0], slots.device
        self._state, self._wait, self._few = state, wait, few
        self._batch = RoundBatch(state.tables, slots, state.page_size)
        self._heard = HeardRows.empty(size, few, str(device))
        dtype = state.proposer.pool.shape.dtype
        self._features = torch.zeros(size * few, state.width, dtype=dtype, device=device)
        missing, self._lost = (torch.zeros(n, dtype=torch.int32, device=device) for n in (size * few, size))
        self._taken = TakenFeatures(missing, self._lost)
        self._each = torch.arange(size * few, device=device)
        self._owners = self._each // few
        self._coming = HeardRows.empty(size, few, str(device))
        self.results = torch.zeros(2, size, dtype=torch.int32, device=device)

    def run(self) -> None:
        """Waits, drafts and answers. The same calls run at once and into a graph."""
        heard, block = self._heard, self._state.proposer.head.block
        self._lost.zero_()
        if block is not None and block.rooted:
            self._ahead()
        else:
            self._behind()
        mail_rounds.answer(self._state.tables, heard.slots, self._lost, self._wait.place)
        torch.stack((heard.counts, self._lost), out=self.results)

    def _ahead(self) -> None:
        """A block that makes nothing of certain rows: their context is made while they are being verified, of
        all of them. Refused ones are written over before any row sees them.
        """
        coming, proposer, taken = self._coming, self._state.proposer, self._taken
        taken.missing.zero_()
        mail_rounds.watch(self._batch, self._wait, coming)
        row_ring.take(coming.rings, self._each, self._features, taken.missing, LOOKS_AHEAD)
        proposer.keep(self._features, coming.rows, DecodeRows(coming.slots, coming.rows.starts, self._few))
        batch = replace(self._batch, slots=coming.slots)
        mail_rounds.hear(batch, self._wait, self._heard, taken)
        newest = Drafted(self._features, self._features)  # not read
        proposer.propose(newest, self._heard.slots, proposer.spec)

    def _behind(self) -> None:
        """Certain rows go through the head, then the rows of drafts."""
        state, heard, rows = self._state, self._heard, self._heard.rows
        mail_rounds.hear(self._batch, self._wait, heard)
        row_ring.take(heard.rings, self._owners, self._features, self._lost)
        rounds = DecodeRows(heard.slots, rows.starts, heard.few)
        certain = ForwardRows(rows.tokens, rows.positions, rows.kv_rows, rounds, firsts=state.firsts)
        spec, size = state.proposer.spec, self._batch.size
        state.proposer.draft(self._features, certain, heard.last, heard.slots, spec, size)


class MailedRounds:
    """One batch at a time. `place`: of the mailboxes that it serves; `sizes`: as of `DeviceDraftRunner`."""

    def __init__(
        self, state: DraftState, seats: DraftSeats, place: MailLayout, sizes: SequenceOf[int]
    ) -> None:
        self._state, self._seats, self._sizes = state, seats, sizes
        self._on_host = state.device == "cpu"
        most, padding = seats.count, state.tables.padding_slot
        self._slots = torch.full((most,), padding, dtype=torch.int32, device=state.device)
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=not self._on_host)
        self._landed = torch.zeros(2, most, dtype=torch.int32, pin_memory=not self._on_host)
        self._done = None if self._on_host else torch.cuda.Event()
        self.wait = mail_wait(state, place, self._stop)
        self._programs: dict[int, tuple[MailProgram, torch.cuda.CUDAGraph | None]] = {}
        self.flying = 0  # sequences of the batch in flight

    @property
    def most(self) -> int:
        """Sequences that a batch has room for."""
        return len(self._slots)

    @property
    def few(self) -> int:
        """Rows that one batch can take of a sequence."""
        return self._state.proposer.path_rows

    @torch.inference_mode()
    def capture(self, recorder: GraphRecorder) -> None:
        """Records a graph for each size."""
        for size in reversed(self._sizes):
            program = self._program(size)
            program.run()  # loads what it needs
            graph = torch.cuda.CUDAGraph()
            with recorder.recording(graph):
                program.run()
            self._programs[size] = program, graph

    def seated(self, owner: Hashable) -> bool:
        """Has it a slot, whose tables know its rows?"""
        return owner in self._seats

    @torch.inference_mode()
    def launch(self, sequences: SequenceOf[MailedSequence]) -> None:
        """A batch of up to `most` sequences, which are `seated`. None is in flight."""
        writes, slots = TableWrites(self._state.tables), []
        for one in sequences:
            seat = self._seats.of(one.owner)
            seat.write_pages(writes, one.pages, one.offset // self._state.page_size)
            seat.write_place(writes, one.place)
            slots.append(seat.slot)
        size = padded_size(self._sizes, len(slots))
        padding = [self._state.tables.padding_slot] * (size - len(slots))
        self._slots[:size].copy_(torch.tensor(slots + padding, dtype=torch.int32))
        if (changes := writes.array()).size:
            self._state.tables.apply(torch.from_numpy(changes).to(self._state.device))
        self._stop[0] = 0
        program, graph = self._programs.get(size) or (self._program(size), None)
        program.run() if graph is None else graph.replay()
        self._landed[:, :size].copy_(program.results, non_blocking=True)
        if self._done is not None:
            self._done.record()
        self.flying = len(slots)

    def stop(self) -> None:
        """Ends the wait of the batch in flight: it drafts for what is there by then."""
        self._stop[0] = 1

    def land(self, *, waiting: bool) -> list[tuple[int, bool]] | None:
        """Of each sequence of the batch how many rows came (as `MailProgram` says) and whether a feature of
        them was lost. None: it has not landed. `waiting`: waits until it has.
        """
        if self._done is not None and not (waiting or self._done.query()):
            return None
        if self._done is not None:
            self._done.synchronize()
        counts, lost = self._landed[:, : self.flying].tolist()
        self.flying = 0
        return [(count, bool(gone)) for count, gone in zip(counts, lost, strict=True)]

    def _program(self, size: int) -> MailProgram:
        return MailProgram(self._state, self._slots[:size], self.wait)


def mail_wait(state: DraftState, place: MailLayout, stop: torch.Tensor) -> MailWait:
    """What batches of this worker wait for. `stop`: as of `MailWait`."""
    row_bytes = state.width * state.proposer.pool.shape.dtype.itemsize * 2  # each half of a word a tag
    return MailWait(place, row_bytes, state.vocab, MOST_POLLS, stop)
