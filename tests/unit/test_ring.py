"""The ring of records against a plain queue: order, wraparound, drops, and writers that die in the middle."""

from __future__ import annotations

import mmap
import os
import random
import zlib
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_child import Child

from eyas.engine.ipc.ring import BLOCK, RingReader, RingShape, RingWriter

SIZE = 5  # bytes of a record: no multiple of anything
PUT, TORN, LOOK, TAKE = "put", "torn", "look", "take"
OPS = st.lists(st.sampled_from((PUT, PUT, PUT, TORN, LOOK, TAKE, TAKE)), max_size=60)


@dataclass
class Twin:
    """What the ring is meant to be: a queue that takes no more than `records`."""

    records: int
    queue: deque[bytes] = field(default_factory=deque)

    def put(self, record: bytes) -> bool:
        if len(self.queue) == self.records:
            return False
        self.queue.append(record)
        return True

    def take(self) -> bytes | None:
        return self.queue.popleft() if self.queue else None


class Rig:
    """Both ends of one ring in plain memory."""

    def __init__(self, records: int, writer: type = RingWriter, reader: type = RingReader) -> None:
        shape = RingShape(records, SIZE)
        self.memory = memoryview(bytearray(shape.nbytes))
        self.writer, self.reader = writer(self.memory, shape), reader(self.memory, shape)

    def put(self, record: bytes, *, torn: bool = False) -> bool:
        """`torn`: the writer stops before it publishes, and begins anew later."""
        payload = self.writer.begin()
        if payload is None:
            return False
        payload[: SIZE // 2 if torn else SIZE] = record[: SIZE // 2] if torn else record
        if not torn:
            self.writer.publish()
        return True

    def take(self) -> bytes | None:
        payload = self.reader.look()
        if payload is None:
            return None
        record = bytes(payload)
        assert self.reader.release()
        return record


def play(rig: Rig, twin: Twin, ops: list[str]) -> None:
    """Raises AssertionError where the ring and its twin differ."""
    for number, op in enumerate(ops):
        record = number.to_bytes(SIZE, "little")
        if op == PUT:
            assert rig.put(record) == twin.put(record)
        elif op == TORN:
            assert rig.put(record, torn=True) == (len(twin.queue) < twin.records)
        elif op == LOOK:
            seen = rig.reader.look()
            assert (bytes(seen) if seen is not None else None) == (twin.queue[0] if twin.queue else None)
        else:
            assert rig.take() == twin.take()


@given(st.integers(1, 5), OPS)
@settings(max_examples=200)
def test_it_is_a_bounded_queue_whatever_is_torn(records: int, ops: list[str]) -> None:
    play(Rig(records), Twin(records), ops)


class ForgetsItsCredit(RingWriter):
    """Writes over what has not been taken."""

    def begin(self) -> memoryview | None:
        self._words[0] = self._written
        return super().begin()


class PublishesFirst(RingWriter):
    """The number stands before the bytes do."""

    def begin(self) -> memoryview | None:
        payload = super().begin()
        if payload is not None:
            self._words[self._number_at[self._written % self._records]] = self._written + 1
        return payload


class TakesAnyNumber(RingReader):
    """Does not know this lap's records from the last one's."""

    def _is_next(self, place: int) -> bool:
        return self._words[self._number_at[place]] != 0


@pytest.mark.parametrize(
    "ends",
    [
        (ForgetsItsCredit, RingReader),
        (PublishesFirst, RingReader),
        (RingWriter, TakesAnyNumber),
    ],
)
def test_the_twin_notices_a_ring_that_is_wrong(ends: tuple[type, type]) -> None:
    draws = random.Random(3)
    noticed = 0
    for _ in range(100):
        ops = draws.choices((PUT, TORN, LOOK, TAKE), (4, 1, 1, 3), k=40)
        try:
            play(Rig(3, *ends), Twin(3), ops)
        except AssertionError:
            noticed += 1
    assert noticed > 20


def test_a_record_that_was_written_over_while_it_was_copied_is_not_believed() -> None:
    rig = Rig(2)
    rig.put(b"first")
    assert rig.reader.look() is not None
    rig.memory[:8] = (1).to_bytes(8, "little")  # a credit that no reader gave: the writer goes round
    for _ in range(2):
        assert rig.put(b"later")
    assert not rig.reader.release()


@pytest.mark.parametrize("credit", [3, 2**40, 2**64 - 1])
def test_a_credit_that_makes_no_sense_is_no_room(credit: int) -> None:
    rig = Rig(2)
    rig.put(b"first")
    rig.memory[:8] = credit.to_bytes(8, "little")
    assert rig.writer.begin() is None


def test_records_share_no_cache_line() -> None:
    shape = RingShape(3, BLOCK + 1)
    assert shape.stride == 3 * BLOCK and shape.nbytes == BLOCK + 3 * shape.stride


WRITE = """
import mmap, zlib
from eyas.engine.ipc.ring import RingShape, RingWriter
memory = mmap.mmap(int(sys.argv[1]), 0)
ring = RingWriter(memoryview(memory), RingShape(7, 64))
number = 0
while number != int(sys.argv[2]):
    payload = ring.begin()
    if payload is not None:
        body = number.to_bytes(4, "little") * 15
        payload[:60] = body
        payload[60:] = zlib.crc32(body).to_bytes(4, "little")
        ring.publish()
        number += 1
"""


@pytest.mark.parametrize("killed", [False, True])
def test_another_process_writes_and_every_record_is_whole(killed: bool) -> None:
    """Laps of 7 records; `killed`: in the middle of one, for what the reader can tell."""
    shape, count = RingShape(7, 64), -1 if killed else 1000
    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, shape.nbytes)
    reader = RingReader(memoryview(mmap.mmap(descriptor, shape.nbytes)), shape)
    with Child(WRITE, descriptor, str(count)) as child:
        os.close(descriptor)
        expected = 0
        while expected != count:
            payload = reader.look()
            if payload is None:
                if child.ended and reader.look() is None:
                    break
                continue
            body, crc = bytes(payload[:60]), bytes(payload[60:])
            assert reader.release()
            assert zlib.crc32(body).to_bytes(4, "little") == crc
            assert body == expected.to_bytes(4, "little") * 15
            expected += 1
            if killed and expected == 500:
                child.kill()
    assert expected >= 500 if killed else expected == count
