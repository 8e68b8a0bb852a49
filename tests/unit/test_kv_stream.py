"""Pages as bytes on a wire."""

from __future__ import annotations

import random

import numpy as np
import pytest

from eyas.common.errors import TransferFailed
from eyas.common.wire import transfer
from kv_transfer.area import Pages
from kv_transfer.backends.stream import CHUNK_BYTES, PageWriter, chunks
from protos import transfer_pb2


def random_pages(pages: int, page_bytes: int) -> Pages:
    return np.random.default_rng(pages).integers(0, 256, (pages, page_bytes), np.uint8)


@pytest.mark.parametrize("page_bytes", [40_000, 65_536, CHUNK_BYTES, CHUNK_BYTES + 7, 3 * CHUNK_BYTES])
def test_pages_come_in_order_in_whole_chunks(page_bytes: int) -> None:
    source = random_pages(40 if page_bytes < CHUNK_BYTES else 4, page_bytes)
    wanted = random.Random(1).sample(range(len(source)), len(source) - 1)
    cut = list(chunks(source, wanted))
    assert b"".join(cut) == source[wanted].tobytes()
    assert {len(piece) for piece in cut[:-1]} <= {CHUNK_BYTES} and 0 < len(cut[-1]) <= CHUNK_BYTES


def test_no_pages_are_no_chunks() -> None:
    assert list(chunks(random_pages(2, 8), [])) == []


@pytest.mark.parametrize("page", [-1, 4])
def test_pages_that_are_not_there_are_refused(page: int) -> None:
    with pytest.raises(TransferFailed, match="which has 4 of them"):
        next(chunks(random_pages(4, 8), [0, page]))


def test_a_writer_fills_its_pages_and_no_other() -> None:
    source, rng = random_pages(6, 1000), random.Random(2)
    destination = np.zeros((9, 1000), np.uint8)
    writer = PageWriter(destination, [7, 2, 3])
    data = source[[0, 4, 5]].tobytes()
    while data:
        size = rng.randrange(1, 1700)
        writer.write(data[:size])
        data = data[size:]
    writer.finish()
    expected = np.zeros_like(destination)
    expected[[7, 2, 3]] = source[[0, 4, 5]]
    assert np.array_equal(destination, expected) and writer.bytes == 3000


def test_too_many_or_too_few_bytes_are_an_error() -> None:
    destination = np.zeros((3, 10), np.uint8)
    writer = PageWriter(destination, [1])
    with pytest.raises(TransferFailed, match="more bytes"):
        writer.write(b"x" * 11)
    assert not destination[[0, 2]].any()
    writer = PageWriter(destination, [0, 1])
    writer.write(b"x" * 13)
    with pytest.raises(TransferFailed, match="7 bytes too early"):
        writer.finish()


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, CHUNK_BYTES])
def test_a_chunk_on_the_wire_is_protobufs(size: int) -> None:
    data = random.Random(size).randbytes(size)
    message = transfer_pb2.FetchResponse(data=data).SerializeToString()
    assert transfer.encode(data) == message and transfer.decode(message) == data


@pytest.mark.parametrize(
    "message", [b"", b"\x0a", b"\x0a\x05abcd", b"\x0a\x03abcd", b"\x12\x01a", b"\x0a" + b"\xff" * 9]
)
def test_what_is_no_chunk_is_refused(message: bytes) -> None:
    with pytest.raises(TransferFailed, match="no chunk"):
        transfer.decode(message)
