"""A Redis that speaks TLS: workers and gateways reach it with its authority, and with no other."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import certificates
import pytest
from redis_server import RedisServer, redis_server

from eyas.common.cluster.discovery import WorkerKeys
from eyas.common.errors import Unavailable
from eyas.common.types import Role, WorkerInfo

ME = WorkerInfo("127.0.0.1:1", (Role.DRAFT,), 1, "m", "f", "g", 128, 1000, 8)


@contextlib.asynccontextmanager
async def tls_before(redis: RedisServer, context: ssl.SSLContext) -> AsyncIterator[int]:
    """A port that speaks TLS and hands everything on to `redis`."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", redis.port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server


async def read(url: str, ca: str | None) -> set[str]:
    keys = WorkerKeys(url, "", ca)
    try:
        await keys.write(ME)
        return await keys.read()
    finally:
        await keys.aclose()


async def test_redis_is_reached_by_tls_with_its_own_authority_alone(
    redis: RedisServer, tmp_path: Path
) -> None:
    ours, other = certificates.make(tmp_path / "ours"), certificates.make(tmp_path / "other")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(ours.door.certfile, ours.door.keyfile)
    async with tls_before(redis, context) as port:
        for host in ("127.0.0.1", "localhost"):
            assert await read(f"rediss://{host}:{port}/0", ours.ca) == {ME.worker}
        assert await redis.workers() == {ME.worker}
        for ca in (other.ca, None):  # None: the system's authorities
            with pytest.raises(Unavailable, match="rediss localhost:.*certificate verify failed"):
                await read(f"rediss://localhost:{port}/0", ca)
        with pytest.raises(Unavailable, match="is away"):  # in plain
            await read(f"redis://localhost:{port}/0", None)


async def test_redis_must_show_a_certificate_for_its_host(redis: RedisServer, tmp_path: Path) -> None:
    ours = certificates.make(tmp_path / "ours")
    certificate, key = ours.signed("redis.example", client=False)
    (tmp_path / "pair.pem").write_bytes(certificate + key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "pair.pem")
    async with tls_before(redis, context) as port:
        with pytest.raises(Unavailable, match="(?i)hostname mismatch|not valid for"):
            await read(f"rediss://localhost:{port}/0", ours.ca)
    with pytest.raises(Unavailable, match="is away"):  # a server that speaks no TLS
        await read(f"rediss://localhost:{redis.port}/0", ours.ca)
