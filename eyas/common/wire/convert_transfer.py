"""The messages of `TransferService`: what a worker says of its KV pages, and `FetchResponse` by hand.

Protobuf would copy every byte of a page twice more at each end. The bytes are those of the message in
protos/transfer.proto; any gRPC client can read them.
"""

from __future__ import annotations

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.wire.pool import PoolGeometry, PoolInfo, RankPool
from protos import transfer_pb2

_TAG = b"\x0a"  # field 1, length-delimited


def pool_to_pb(pool: PoolInfo) -> transfer_pb2.HandshakeResponse:
    """Writes a pool's description for a puller: the answer to its handshake."""
    names = pool.geometry.__struct_fields__
    return transfer_pb2.HandshakeResponse(
        layout_hash=pool.layout_hash,
        epoch=pool.epoch,
        geometry=transfer_pb2.Geometry(**{name: getattr(pool.geometry, name) for name in names}),
        ranks=[
            transfer_pb2.RankPool(
                rank=rank.rank,
                checksum=rank.checksum,
                exports=[transfer_pb2.PoolExport(backend=b, fields=f) for b, f in rank.exports.items()],
            )
            for rank in pool.ranks
        ],
        board=pool.board,
        arithmetic=pool.arithmetic,
    )


def pool_from_pb(pb: transfer_pb2.HandshakeResponse) -> PoolInfo:
    """Raises ConfigError for a geometry that no pool has."""
    try:
        geometry = PoolGeometry(
            **{name: getattr(pb.geometry, name) for name in PoolGeometry.__struct_fields__}
        )
    except ValueError as error:
        raise ConfigError(f"the peer's KV geometry makes no sense: {error}") from error
    ranks = tuple(
        RankPool(rank.rank, rank.checksum, {export.backend: dict(export.fields) for export in rank.exports})
        for rank in pb.ranks
    )
    return PoolInfo(pb.epoch, pb.layout_hash, geometry, ranks, dict(pb.board), pb.arithmetic)


def encode(data: bytes) -> bytes:
    """FetchResponse(data=data), serialized. `data` is not empty."""
    size, length = len(data), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return b"".join((_TAG, length, data))


def decode(message: bytes) -> memoryview:
    """The data of a serialized FetchResponse, not copied. Raises TransferFailed for any other message."""
    size, at, more = 0, 1, message[:1] == _TAG
    while more and at < min(len(message), 6):
        byte = message[at]
        size |= (byte & 0x7F) << 7 * (at - 1)
        at, more = at + 1, byte > 0x7F
    if more or at + size != len(message):
        raise TransferFailed("the owner of the pages sent something that is no chunk of them")
    return memoryview(message)[at:]
