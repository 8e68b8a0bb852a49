"""The handshake's answer as protobuf, and back: what a worker says of its KV pages."""

from __future__ import annotations

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import PoolGeometry, PoolInfo, RankPool
from protos import transfer_pb2


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
