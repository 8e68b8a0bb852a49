"""The gateway's door with TLS and a file of keys, over real sockets: HTTP, gRPC, and what calls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import certificates
import httpx
import pytest
import uvloop
from certificates import DAY, Certificates
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.bench.http import MeasuredServer
from eyas.client import AsyncClient
from eyas.client.reach import ServerAddress, grpc_target
from eyas.common.cluster.listening import free_ports
from eyas.common.config import CertificateFiles, GatewayConfig
from eyas.common.errors import ConfigError, EyasError, Unauthorized, Unavailable
from eyas.common.security import api_keys, tls
from eyas.common.security.tls import caller_context
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer
from gateway.limits import keys
from gateway.main import fronts
from gateway.observe.metrics import GatewayMetrics

ALICE, BOB = "a-key-that-alice-brings", "a-key-that-bob-brings-too"
ASKED = {"model": "eyas-nano", "prompt": "x", "max_tokens": 100}
SOON_S = 10.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make(tmp_path_factory.mktemp("door") / "certs")


@dataclasses.dataclass
class Door:
    """Both fronts of a scripted backend, with TLS and a key of alice."""

    config: GatewayConfig
    backend: ScriptedBackend
    keys: str

    def at(self, key: str | None = ALICE, ca: str | None = None) -> ServerAddress:
        return ServerAddress(f"https://127.0.0.1:{self.config.port}", key, ca)

    def grpc(self, key: str | None = ALICE, ca: str | None = None) -> AsyncClient:
        return AsyncClient(f"https://127.0.0.1:{self.config.grpc_port}", api_key=key, ca=ca, retries=0)


@pytest.fixture
async def door(ours: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Door]:
    monkeypatch.setattr(keys, "LOOK_S", 0.0)
    file, ports = str(tmp_path / "keys"), free_ports()
    api_keys.add(file, "alice", ALICE)
    config = GatewayConfig(port=next(ports), grpc_port=next(ports), certificate=ours.door, api_key_file=file)
    backend = ScriptedBackend(nano_tokenizer(), says=lambda *_: "word " * 20)
    async with fronts(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry())):
        yield Door(config, backend, file)


async def test_both_fronts_speak_tls_to_whom_trusts_them(door: Door, ours: Certificates) -> None:
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=ours.ca), trust_env=False) as http:
        for name in ("127.0.0.1", "localhost"):
            url = f"https://{name}:{door.config.port}"
            assert (await http.get(f"{url}/health")).json() == {"status": "ok", "arithmetic": "fast"}
            headers = {"authorization": f"Bearer {ALICE}"}
            reply = await http.post(f"{url}/v1/completions", json=ASKED, headers=headers)
            assert reply.json()["choices"][0]["text"] == "word " * 20
    async with door.grpc(ca=ours.ca) as client:
        assert (await client.generate("x")).text == "word " * 20
    assert [request.caller for request in door.backend.requests] == ["alice"] * 3


async def test_strangers_are_told_why(door: Door, ours: Certificates) -> None:
    """A client without our authority, one that speaks in plain, one whose file is none."""
    async with httpx.AsyncClient(trust_env=False) as http:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http.get(f"https://127.0.0.1:{door.config.port}/health")
        with pytest.raises(httpx.HTTPError):
            await http.get(f"http://127.0.0.1:{door.config.port}/health")
    for ca, said in ((None, "certificate is refused"), (__file__, "names no authorities")):
        with pytest.raises(EyasError, match=said):
            async with door.grpc(ca=ca) as client:
                await client.models()
        with pytest.raises(EyasError, match="--ca"):
            grpc_target(door.at(ca=ca)) if ca else await MeasuredServer(door.at().url, ALICE).get("/health")
    async with AsyncClient(f"127.0.0.1:{door.config.grpc_port}", api_key=ALICE, retries=0) as client:
        with pytest.raises(Unavailable, match=r"perhaps it wants TLS \(https:// in front .*ca=FILE") as said:
            await client.models()
        assert "--tls-dir" not in said.value.message
    assert (
        await MeasuredServer(door.at().url, ALICE, ours.ca).get("/health")
        == b'{"status":"ok","arithmetic":"fast"}'
    )


async def test_eyas_chat_comes_in_with_an_authority_and_a_key(door: Door, ours: Certificates) -> None:
    def chat(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "eyas.cli", "chat", "--url", door.at().url, *flags]
        environment = os.environ | {"EYAS_API_KEY": ALICE}
        return subprocess.run(
            command, input="Hi\n", capture_output=True, text=True, timeout=60, env=environment
        )

    answered, refused = await asyncio.gather(
        asyncio.to_thread(chat, "--ca", ours.ca), asyncio.to_thread(chat)
    )
    assert answered.returncode == 0 and answered.stdout.startswith("word word")
    assert refused.returncode == 1 and "--ca FILE names the authority" in refused.stderr
    assert "Traceback" not in refused.stderr


# --- keys that change --------------------------------------------------------------------------------------


async def test_keys_change_while_streams_run(door: Door, ours: Certificates) -> None:
    """A stream whose key is removed ends well; the next call is refused. New keys work at once."""
    door.backend.pause_s = 0.5
    verify = ssl.create_default_context(cafile=ours.ca)
    async with (
        httpx.AsyncClient(verify=verify, trust_env=False, base_url=door.at().url, timeout=20) as http,
        door.grpc(ca=ours.ca) as alice,
        door.grpc(BOB, ours.ca) as bob,
    ):

        async def status(key: str) -> int:
            return (await http.get("/v1/models", headers={"x-api-key": key})).status_code

        async def streamed() -> str:
            headers, body = {"authorization": f"Bearer {ALICE}"}, ASKED | {"stream": True}
            async with http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
                return (await reply.aread()).decode()

        streams = [asyncio.create_task(streamed()), asyncio.create_task(alice.generate("x"))]
        async with asyncio.timeout(SOON_S):
            while sum(stream.told > 0 for stream in door.backend.streams) < 2:
                await asyncio.sleep(0.01)
        assert (await status(ALICE), await status(BOB)) == (200, 401)
        api_keys.add(door.keys, "bob", BOB)
        api_keys.remove(door.keys, "alice")
        assert (await status(ALICE), await status(BOB)) == (401, 200)
        with pytest.raises(Unauthorized):
            await alice.models()
        assert (await bob.models())[0].id == "eyas-nano"
        assert not any(stream.done() for stream in streams)
        door.backend.pause_s = 0.0
        text, completion = await asyncio.gather(*streams)
        assert text.rstrip().endswith("data: [DONE]") and completion.text == "word " * 20


# --- handshakes --------------------------------------------------------------------------------------------


async def app(scope: object, receive: object, send: object) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def https(ours: Certificates, limits: HttpLimits) -> AsyncIterator[int]:
    server = HttpServer(app, "127.0.0.1", 0, limits, tls=caller_context(ours.door))
    await server.start()
    try:
        yield server.port
    finally:
        await server.aclose()


async def get(ours: Certificates, port: int, header: bytes = b"") -> bytes:
    """All that comes back for one request over a connection of its own."""
    context = ssl.create_default_context(cafile=ours.ca)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + header + b"\r\n")
    answer = await asyncio.wait_for(reader.read(), SOON_S)
    writer.close()
    return answer


async def test_silent_connections_are_bounded_in_number(
    ours: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_S", 60.0)
    async with https(ours, HttpLimits(connections=4)) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        async with asyncio.timeout(SOON_S):  # the oldest one goes before its time
            assert await silent[0][0].read() == b""
        assert (await get(ours, port)).endswith(b"ok")
        for _, writer in silent:
            writer.close()


async def test_silent_connections_are_bounded_in_time(
    ours: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_S", 0.3)
    async with https(ours, HttpLimits()) as port:
        for reader, writer in [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]:
            async with asyncio.timeout(SOON_S):
                assert await reader.read() == b""
            writer.close()
        monkeypatch.setattr(tls, "HANDSHAKE_S", SOON_S)
        assert (await get(ours, port)).endswith(b"ok")


async def test_what_is_no_tls_is_closed_and_others_are_served(ours: Certificates) -> None:
    async with https(ours, HttpLimits(rest_s=0.2)) as port:
        for said in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01", b"\x00" * 5000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):
                assert b"200" not in await asyncio.wait_for(reader.read(), SOON_S)
            writer.close()
        answers = await asyncio.gather(*(get(ours, port) for _ in range(40)))
        assert all(answer.endswith(b"ok") for answer in answers)
        huge = await get(ours, port, b"x: " + b"a" * 70_000 + b"\r\n")
        assert huge.startswith(b"HTTP/1.1 431")  # the limits of HTTP hold within TLS


async def test_a_server_that_leaves_ends_open_handshakes(ours: Certificates) -> None:
    async with https(ours, HttpLimits()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await get(ours, port)).endswith(b"ok")
    assert await asyncio.wait_for(reader.read(), SOON_S) == b""
    writer.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_an_expired_certificate_is_refused_by_clients(ours: Certificates, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("crt", "key")]
    for file, content in zip(files, ours.signed("127.0.0.1", -DAY, client=False), strict=True):
        Path(file).write_bytes(content)
    server = HttpServer(app, "127.0.0.1", 0, HttpLimits(), tls=caller_context(CertificateFiles(*files)))
    await server.start()
    try:
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            await get(ours, server.port)
    finally:
        await server.aclose()


def test_the_loop_that_serves_shakes_hands_too(ours: Certificates) -> None:
    """A gateway runs on uvloop, whose transports are others."""

    async def many() -> list[bytes]:
        async with https(ours, HttpLimits(connections=8)) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            answers = [await get(ours, port) for _ in range(40)]
            assert sum([reader.at_eof() for reader, _ in silent]) >= 12
            for _, writer in silent:
                writer.close()
            return answers

    assert all(answer.endswith(b"ok") for answer in uvloop.run(many()))


def test_bad_files_are_refused_at_start(ours: Certificates, tmp_path: Path) -> None:
    (tmp_path / "other.key").write_bytes(ours.signed()[1])
    for files in (
        CertificateFiles(ours.door.certfile, str(tmp_path / "other.key")),
        CertificateFiles(ours.door.certfile, ours.door.certfile),
        CertificateFiles(str(tmp_path / "none"), ours.door.keyfile),
    ):
        with pytest.raises(ConfigError, match="--ssl-certfile") as caught:
            caller_context(files)
        assert files.certfile in caught.value.message
