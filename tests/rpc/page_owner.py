"""A process that owns KV pages and offers them all; and what a puller in another process needs to read them.

Both ends are the real service and client; only the engines are missing.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Sequence

import numpy as np

from eyas.common.types import KvHandle, KvKind, RankPages
from eyas.common.wire import rpc
from eyas.common.wire.pool import PoolGeometry, PoolInfo, RankPool
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import Command, EngineReady, WatchOpened, WatchUpdate
from kv_transfer.area import Pages
from kv_transfer.host_files import HostFile
from prefill_svc.transfer import TransferServicer

GEOMETRY = PoolGeometry(
    pages=1024, page_size=16, layers=8, kv_heads=2, head_dim=32, dtype="float32"
)  # 64 MiB
EPOCH = 5


def ready(pool: str) -> EngineReady:
    """The description of an engine whose target pool is the file `pool`, its last page the proof page."""
    rank = RankPool(0, checksum(), {"shm": HostFile.at(pool).export(), "grpc": {}})
    return EngineReady(
        epoch=EPOCH,
        model="m",
        fingerprint="f",
        draft_fingerprint="",
        context_length=1,
        vocab_size=1,
        pages_total=GEOMETRY.pages,
        pools={"target": PoolInfo(EPOCH, "t", GEOMETRY, (rank,))},
        files={"target": pool},
        slowest_step_s=0.1,
    )


def handle(owner: str) -> KvHandle:
    """Of all pages."""
    shard = RankPages(0, tuple(range(GEOMETRY.pages)))
    return KvHandle(owner, EPOCH, 0, 1, KvKind.TARGET, "t", GEOMETRY.pages * GEOMETRY.page_size, (shard,))


def content() -> Pages:
    """All pages and the proof page."""
    return np.random.default_rng(7).integers(0, 256, (GEOMETRY.pages + 1, GEOMETRY.page_bytes), np.uint8)


def checksum() -> int:
    return zlib.crc32(content()[-1].data)


async def serve(pool: str) -> None:
    """Until this process is killed; says its address first."""

    def tell(commands: Sequence[Command]) -> None:
        opened = [command.watch for command in commands if isinstance(command, WatchOpened)]
        loop.call_soon(engine.dispatch, [WatchUpdate(watch, tokens=1) for watch in opened])

    loop = asyncio.get_running_loop()
    engine = EngineClient(tell)
    engine.ready = ready(pool)
    engine.accept()
    server = rpc.server()
    TransferServicer(engine).register(server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
