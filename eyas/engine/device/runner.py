"""Launches the scheduler's steps on the device and keeps its tables true.

It turns works into a `StepInput`, and chooses on the host where a sequence asks for what only the host knows.
It does not decide what runs, nor what tokens mean; and it never waits for the device, except to sample.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from eyas.engine.device.buckets import Buckets
from eyas.engine.device.executor import Executor
from eyas.engine.device.flight import Flight
from eyas.engine.device.hostsample import HostSampler
from eyas.engine.device.step import Layout, StepInput, pack, tiles_for
from eyas.engine.device.tables import Pokes
from eyas.engine.sequence import Sequence, Work


class DeviceRunner:
    def __init__(self, executor: Executor, buckets: Buckets, layout: Layout, host: HostSampler) -> None:
        self._executor = executor
        self._buckets = buckets
        self._layout = layout
        self._host = host
        self._seated: dict[int, tuple[int, int]] = {}  # by slot: seat, and how many of its pages are told

    def launch(self, works: SequenceOf[Work], *, by_host: bool) -> Flight:
        rounds = [work.seq for work in works if work.round]
        chunks = [work for work in works if not work.round]
        ends = [work.seq for work in chunks if work.sample]
        tiles = tiles_for([len(work.tokens) for work in chunks], self._layout)
        shape = self._buckets.shape(len(rounds), sum(len(w.tokens) for w in chunks), tiles, len(ends))
        pokes = Pokes(self._executor.tables)
        for work in works:
            self._tell(work, pokes)
        step = StepInput(shape, pack(rounds, chunks, shape, self._layout), pokes.array(), by_host)
        self._executor.begin(step)
        sampling = self._host.sample(shape, rounds, ends) if by_host else None
        result, event = self._executor.finish(step, None if sampling is None else sampling.tokens)
        return Flight(shape, works, _seats(rounds), _seats(ends), result, event, sampling)

    def _tell(self, work: Work, pokes: Pokes) -> None:
        """What the tables do not yet know of the sequence: that it sits there, and its new pages."""
        seq = work.seq
        seat, told = self._seated.get(seq.slot, (-1, 0))
        if seat != seq.seat:
            generation = seq.generation
            pokes.seat(
                seq.slot, generation.request.params, seq.choice, speculative=generation.request.speculative
            )
            if work.round:
                pokes.put("length", seq.slot, (work.start,))
                pokes.put("root", slot=seq.slot, words=work.tokens[:1])
            told = 0
        if told < len(seq.pages):
            pokes.put("pages", seq.slot, seq.pages[told:], start=told)
        self._seated[seq.slot] = (seq.seat, len(seq.pages))


def _seats(sequences: SequenceOf[Sequence]) -> list[tuple[Sequence, int]]:
    return [(seq, seq.seat) for seq in sequences]
