"""What a draft line's records say: commits one way, proposals the other, as bytes of a fixed layout.

It knows two messages and their bounds. Whether a message makes sense for its sequence is checked where all
messages are, whichever way they came. A record of another incarnation of the line, or with counts that it has
no room for, is no message.

Layout, little-endian: the head as packed below, from `ROWS_AT` on int32 arrays, then float32 features.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct, pack_into, unpack_from
from typing import Protocol, TypeVar

from eyas.engine.ipc.messages import DraftCommit, DraftLine, Proposal

ROWS_AT = 48  # bytes: behind the heads, and a multiple of a word
_COMMIT = Struct("<IIQiiiiii")  # epoch, generation, seq, base_len, rows, steps, topk, draft_tokens, place
_PROPOSAL = Struct("<IIQii")  # epoch, generation, seq, base_len, nodes

Said = TypeVar("Said")


class Records(Protocol[Said]):
    """Messages of one kind as records of `size` bytes."""

    @property
    def size(self) -> int:
        """Bytes of a record."""
        ...

    def fits(self, message: Said) -> bool:
        """Has a record room for it?"""
        ...

    def write(self, record: memoryview, message: Said) -> None:
        """`message`: one that fits."""
        ...

    def read(self, record: memoryview) -> Said | None:
        """A copy; None: it is no message of this line."""
        ...


@dataclass(frozen=True)
class CommitRecords(Records[DraftCommit]):
    """Of up to `line.rows` rows, each a token and a feature of `line.width` values, if that is in no ring."""

    line: DraftLine

    @property
    def size(self) -> int:
        return ROWS_AT + 4 * self.line.rows * (1 + self.line.width)

    def fits(self, message: DraftCommit) -> bool:
        rows = len(message.tokens)
        values = rows * self.line.width if message.place < 0 else 0
        return rows <= self.line.rows and len(message.features) == 4 * values

    def write(self, record: memoryview, message: DraftCommit) -> None:
        rows = len(message.tokens)
        rest = message.steps, message.topk, message.draft_tokens, message.place
        whose = message.generation, message.seq, message.base_len
        _COMMIT.pack_into(record, 0, self.line.epoch, *whose, rows, *rest)
        pack_into(f"<{rows}i", record, ROWS_AT, *message.tokens)
        features_at = ROWS_AT + 4 * self.line.rows
        record[features_at : features_at + len(message.features)] = message.features

    def read(self, record: memoryview) -> DraftCommit | None:
        epoch, generation, seq, base, rows, steps, topk, nodes, place = _COMMIT.unpack_from(record)
        if epoch != self.line.epoch or not 0 <= rows <= self.line.rows:
            return None
        tokens = unpack_from(f"<{rows}i", record, ROWS_AT)
        features_at = ROWS_AT + 4 * self.line.rows
        values = rows * self.line.width if place < 0 else 0
        features = bytes(record[features_at : features_at + 4 * values])
        return DraftCommit(seq, generation, base, tokens, features, steps, topk, nodes, place)


@dataclass(frozen=True)
class ProposalRecords(Records[Proposal]):
    """Of up to `line.nodes` nodes, each a token and its parent."""

    line: DraftLine

    @property
    def size(self) -> int:
        return ROWS_AT + 8 * self.line.nodes

    def fits(self, message: Proposal) -> bool:
        return len(message.tokens) == len(message.parents) <= self.line.nodes

    def write(self, record: memoryview, message: Proposal) -> None:
        nodes = len(message.tokens)
        _PROPOSAL.pack_into(
            record, 0, self.line.epoch, message.generation, message.seq, message.base_len, nodes
        )
        pack_into(f"<{2 * nodes}i", record, ROWS_AT, *message.tokens, *message.parents)

    def read(self, record: memoryview) -> Proposal | None:
        epoch, generation, seq, base, nodes = _PROPOSAL.unpack_from(record)
        if epoch != self.line.epoch or not 0 <= nodes <= self.line.nodes:
            return None
        both = unpack_from(f"<{2 * nodes}i", record, ROWS_AT)
        return Proposal(seq, generation, base, both[:nodes], both[nodes:])
