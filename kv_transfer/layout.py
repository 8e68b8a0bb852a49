"""The layout of a page: the handshake's hash of meaning, and the maths of whole pages and of shares of heads.

Two workers may exchange pages if their bytes mean the same (`PageMeaning`) and lie the same way
(`PoolGeometry`). Rank r of n has heads r * heads / n to (r + 1) * heads / n; or each has everything, as of
latents. It works on sizes and names only, and never touches a pool.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from eyas.common.errors import ConfigError
from eyas.common.types import ALL_OF_RANK_0, KvKind, PageShare
from eyas.common.wire.pool import PoolGeometry, PoolInfo

PROTOCOL = 7  # raised whenever pages, handles or the rules of a lease change their meaning

WINDOW_BYTES = 64 << 20
"""The bytes of a window of staged pages: enough that a step between two windows does not show."""


PROBE_WINDOWS = 8
"""Of proof pages, at most, in a copy that measures a way: some are on their way at once, see `windows`."""


class PageMeaning(msgspec.Struct, frozen=True):
    """Everything that gives a page's bytes their meaning.

    `fingerprint` names the weights; `rope` spells every parameter of the rotary embedding, since keys are
    stored rotated; `latent`: elements of a key that are its value as well (0: values have rows of their own).
    `arithmetic`: how they are computed; "": in any way, as a draft head's, whose tokens are advice.
    """

    fingerprint: str
    group: KvKind
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    rope: str
    latent: int = 0
    arithmetic: str = ""

    def hash(self) -> str:
        """32 hexadecimal digits, equal on two workers exactly if every field and the protocol are."""
        text = msgspec.json.encode((PROTOCOL, self))
        return hashlib.blake2b(text, digest_size=16).hexdigest()


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold `tokens` rows, the last one perhaps in part."""
    return -(-tokens // page_size)


class HandlePages(NamedTuple):
    """How the pages of a handle follow each other. `ordered` ones hold its rows in order, and are final as
    these are; `loose` ones, of layers with windows, stand behind them and are final with the last row.
    """

    ordered: int
    loose: int = 0


def parts_per_slot(page_bytes: int, width: int) -> int:
    """How many parts of pages stand one behind the other in a slot of a device's memory."""
    return page_bytes // width if page_bytes % width == 0 else 1


def parts_in_slot(geometry: PoolGeometry, share: PageShare) -> int:
    """How many parts of pages, each that share of one, a slot beside such a pool takes."""
    if not share.on_device:
        return 1
    return parts_per_slot(geometry.page_bytes, geometry.part_bytes(share.heads))


def slots_for(parts: int, each: int) -> int:
    """The number of slots that `parts` take, `each` to a slot."""
    return -(-parts // each)


def part_places(slots: Sequence[int], each: int, parts: int) -> tuple[int, ...]:
    """The places of `parts`, `each` to a slot."""
    return tuple(slots[i // each] * each + i % each for i in range(parts))


def window_pages(page_bytes: int) -> int:
    """How many pages pass through staging together."""
    return max(1, WINDOW_BYTES // page_bytes)


def check_compatible(mine: PoolInfo, theirs: PoolInfo) -> None:
    """Raise a `ConfigError` that names the first difference, unless pages of `theirs` can become `mine`.

    Pools may differ in length: page numbers are mapped one by one; and in ranks, which share the heads, or
    have them all.
    """
    ours, peers = mine.geometry, theirs.geometry
    heads = (ours.kv_heads, peers.kv_heads)
    if not ours.replicated:
        heads = (ours.kv_heads * len(mine.ranks), peers.kv_heads * len(theirs.ranks))
    rest = ("dtype", "layers", "fields", "head_dim", "page_size", "state_pages")
    fields = [(field, getattr(ours, field), getattr(peers, field)) for field in rest]
    arithmetic = ("arithmetic", mine.arithmetic, theirs.arithmetic)
    for field, here, there in [*fields[:2], ("kv_heads", *heads), *fields[2:], arithmetic]:
        if here != there:
            raise ConfigError(
                f"KV pages cannot be exchanged: {field} is {here} here and {there} at the peer."
            )
    few, many = sorted((len(mine.ranks), len(theirs.ranks)))
    if ours.state_pages and (many % few or (ours.replicated and many > few)):
        beside = " beside KV that each rank has whole" if ours.replicated else ""
        text = f"recurrent states of {many} ranks{beside} cannot be divided among {few}"
        raise ConfigError(f"KV pages cannot be exchanged: {text}.")
    if mine.layout_hash != theirs.layout_hash:
        raise ConfigError(
            "KV pages cannot be exchanged: the peer's hash of meaning differs "
            f"({theirs.layout_hash}, here {mine.layout_hash}): its weights, RoPE form or protocol version do."
        )


@dataclass(frozen=True)
class HeadShare:
    """`heads` of them lie from head `theirs` on at the peer's rank, and from head `ours` on at our `rank`."""

    rank: int
    theirs: int
    ours: int
    heads: int


def shares(peer_rank: int, peer_heads: int, our_heads: int, our_ranks: int) -> list[HeadShare]:
    """Returns our ranks' shares of one peer's rank; heads are per rank of each side."""
    first = peer_rank * peer_heads
    parts = []
    for rank in range(our_ranks):
        start = max(first, rank * our_heads)
        end = min(first + peer_heads, (rank + 1) * our_heads)
        if start < end:
            parts.append(HeadShare(rank, start - first, start - rank * our_heads, end - start))
    return parts


def replicas(peer_rank: int, peer_ranks: int, heads: int, our_ranks: int) -> list[HeadShare]:
    """Returns our ranks that take all `heads` of one peer's rank, where every rank has them all: each takes
    them of one, and the peer's ranks take turns. There may be none.
    """
    return [
        HeadShare(rank, 0, 0, heads) for rank in range(our_ranks) if rank % max(peer_ranks, 1) == peer_rank
    ]


@dataclass(frozen=True)
class PagePart:
    """The part of every page of a peer's rank that one of our ranks takes: `source` there, `target` here.

    `width`: bytes of each page that come; 0: whole pages do. `window`: the most pages that pass through
    staging together, at both ends. `there`, `here`: how many parts a slot takes.
    """

    source: PageShare = ALL_OF_RANK_0
    target: PageShare = ALL_OF_RANK_0
    width: int = 0
    window: int = sys.maxsize
    there: int = 1
    here: int = 1


WHOLE = PagePart()
"""Pages of one rank, as they are."""


@dataclass(frozen=True)
class RankPools:
    """Our pools of a group: `ranks` of one `geometry`. `divides`: some heads of a page can come alone."""

    geometry: PoolGeometry
    ranks: int = 1
    divides: bool = False

    def parts(self, theirs: PoolInfo, rank: int, on_device: bool = False) -> tuple[PagePart, ...]:
        """Returns what our ranks take of one rank of a peer that is compatible. There may be nothing.

        `on_device`: through slots in the devices' memory.
        """
        peer, ours = theirs.geometry, self.geometry
        if ours.replicated:
            taken = replicas(rank, len(theirs.ranks), ours.kv_heads, self.ranks)
        else:
            taken = shares(rank, peer.kv_heads, ours.kv_heads, self.ranks)
        return tuple(self._part(peer, rank, share, on_device) for share in taken)

    def _part(self, peer: PoolGeometry, rank: int, share: HeadShare, on_device: bool) -> PagePart:
        ours = self.geometry
        whole = share.heads == peer.kv_heads == ours.kv_heads
        heads, width = (0, 0) if whole else (share.heads, ours.part_bytes(share.heads))
        source = PageShare(rank, share.theirs, heads, on_device)
        target = PageShare(share.rank, share.ours, heads, on_device)
        there, here = parts_in_slot(peer, source), parts_in_slot(ours, target)
        window = min(window_pages(peer.page_bytes) * there, window_pages(ours.page_bytes) * here)
        return PagePart(source, target, width, window, there, here)
