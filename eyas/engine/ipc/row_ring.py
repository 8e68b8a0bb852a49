"""A ring of feature rows per sequence, in a draft worker's GPU, into which a decode engine's device writes.

`eyas.engine.kernels.exchange.row_ring` writes and reads the rows. The draft worker's GPU has the memory, and
the decode engine maps it there; it may write to it while it is mapped, even after the draft worker's death:
none reads then.

Every sequence that uses it has a place, and there a ring: its row of position p is row p mod `rows`. A row
consists of words of 8 bytes, each 4 bytes of the feature with a tag of its sequence, its position and where
its round began above them: rows leave before it is known which of them are certain, and a position that was
refused is written again by a later round.
A word is stored as one. So a reader that finds its tag in a word has those 4 bytes too, whatever else has
been written when: no flag, no fence and no wait (the idea of NCCL's protocol LL).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from eyas.common.errors import ConfigError
from eyas.engine.batch.window import FIRST_ROWS
from eyas.engine.ipc.messages import DraftChannel
from kv_transfer.gpu.driver import DriverError, GpuDriver, GpuMemory

WORD_BYTES = 8
GOLDEN = 0x9E3779B1  # odd: 2^32 over the golden ratio, so that generations lie far from each other
ROUND = 0x85EBCA6B  # odd, and not near a small multiple of the other
WAITING_ROWS = 16
"""Rows of a sequence that a draft worker may leave there until its head takes them: many at once cost hardly
more than one."""
MOST_BYTES = 1 << 31
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RowRing:
    """`places` sequences with `rows` rows each, a row of `words` words."""

    places: int
    rows: int
    words: int

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.places * self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, its tags too."""
        return self.words * WORD_BYTES

    def at(self, place: int, position: int) -> int:
        """The first byte of a sequence's row."""
        return (place * self.rows + position % self.rows) * self.row_bytes


class RingRow(NamedTuple):
    """A feature that another GPU has written into the memory of this one."""

    address: int
    tag: int


def tag(generation: int, position: int) -> int:
    """The int32 above the 4 bytes of a mailbox's word; it differs from those of all words that can lie in its
    stead.
    """
    word = (generation * GOLDEN + position + 1) & 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def row_tag(generation: int, position: int, base: int) -> int:
    """The int32 above every 4 bytes of the row of a round, or of a prompt, whose first row is `base`."""
    return tag(generation, position + base * ROUND)


def ring_rows(round_rows: int) -> int:
    """Rows that a ring keeps per sequence, if a round makes up to `round_rows` certain: a prompt's, or those
    that wait, and two rounds' behind them.
    """
    return 1 << (max(FIRST_ROWS, WAITING_ROWS) + 2 * round_rows - 1).bit_length()


@dataclass(frozen=True)
class LocalGpu:
    """The GPU of this engine. `dtype`: of features, as torch names it. `wait`: until all that was launched
    there has run. `shared`: a decode engine on this same GPU may write features here.
    """

    driver: GpuDriver
    dtype: str
    wait: Callable[[], None]
    shared: bool = False


class RowMemory:
    """A ring's memory as this process sees it, until `close`."""

    def __init__(self, ring: RowRing, gpu: LocalGpu, memory: GpuMemory, writer: bytes) -> None:
        """`writer`: the uuid of the GPU whose steps fill it."""
        self.ring = ring
        self._writer = writer
        self.gpu = gpu
        self._memory = memory

    @classmethod
    def new(cls, offer: DraftChannel, gpu: LocalGpu | None) -> RowMemory:
        """The draft worker's, in its GPU, with whatever is there. Raises ConfigError, saying why not."""
        if gpu is None:
            raise ConfigError("the draft worker has no GPU for them")
        if offer.dtype != gpu.dtype:
            raise ConfigError(f"they are {offer.dtype}, the draft worker's {gpu.dtype}")
        if (
            offer.gpu == gpu.driver.uuid and not gpu.shared
        ):  # a step that waits would hold up the drafter there
            raise ConfigError("both workers are on the same GPU; --transfer cuda_ipc of this one allows that")
        ring = _agreed(offer)
        if min(ring.places, ring.rows, ring.words) < 1 or ring.nbytes > MOST_BYTES:
            most = MOST_BYTES / 2**30
            raise ConfigError(f"{offer.places} x {offer.rows} rows are none, or take more than {most:g} GiB")
        if reason := gpu.driver.obstacle(offer.gpu):
            raise ConfigError(reason)
        try:
            return cls(ring, gpu, gpu.driver.allocate(ring.nbytes), offer.gpu)
        except DriverError as error:
            raise ConfigError(str(error)) from None

    @classmethod
    def mapped(cls, offer: DraftChannel, gpu: LocalGpu, descriptor: int, size: int) -> RowMemory:
        """The decode engine's, of what a draft worker has exported. Raises ConfigError, saying why not."""
        ring = _agreed(offer)
        if size < ring.nbytes:
            raise ConfigError("the draft worker's ring is not as large as was agreed")
        try:
            return cls(ring, gpu, gpu.driver.map(descriptor, size), offer.gpu)
        except DriverError as error:
            raise ConfigError(str(error)) from None

    @property
    def apart(self) -> bool:
        """Are its rows written by another GPU? One that two processes share gives its time to one of them."""
        return self._writer != self.gpu.driver.uuid

    @property
    def size(self) -> int:
        """Bytes that a peer maps."""
        return self._memory.size

    def export(self) -> int:
        """A descriptor for another process; the caller closes it."""
        return self.gpu.driver.export(self._memory)

    def address(self, place: int, position: int = 0) -> int:
        """The address of a sequence's row."""
        return self._memory.address + self.ring.at(place, position)

    def located(self, place: int, generation: int, positions: range) -> list[RingRow]:
        """The address and the tag of each of a sequence's rows, all of which are of one round."""
        first, rows, size, base = self.address(place), self.ring.rows, self.ring.row_bytes, positions.start
        return [RingRow(first + at % rows * size, row_tag(generation, at, base)) for at in positions]

    def close(self) -> None:
        """Lets go of the memory, once no kernel that was launched uses it."""
        self.gpu.wait()
        self.gpu.driver.unmap(self._memory)


def _agreed(offer: DraftChannel) -> RowRing:
    """The ring of an offer whose dtype has a size here."""
    return RowRing(offer.places, offer.rows, offer.width * VALUE_BYTES[offer.dtype] // 4)
