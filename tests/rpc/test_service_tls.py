"""Mutual TLS between services, over real sockets: who is let in, and what is said to the others."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import certificates
import grpc
import pytest
from certificates import DAY, Certificates
from grpc_health.v1 import health_pb2, health_pb2_grpc
from real_worker import alone, decoding, prefill, real_worker, tiny_config

from eyas.cli import main
from eyas.common.cluster.listening import free_ports
from eyas.common.errors import ConfigError, Unavailable
from eyas.common.params import SamplingParams
from eyas.common.security.tls import NAME, ChannelTls, ServiceTls, explained
from eyas.common.types import GenerationRequest, Role
from eyas.common.wire import rpc

WAITS_S = 5.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make(tmp_path_factory.mktemp("ours") / "certs")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make(tmp_path_factory.mktemp("theirs") / "certs")


@contextlib.asynccontextmanager
async def service(tls: ServiceTls | None) -> AsyncIterator[str]:
    """The address of a server that says SERVING."""
    server = rpc.server()
    health = rpc.HealthService(server, [])
    port = rpc.bind(server, "127.0.0.1", 0, None if tls is None else tls.server)
    await server.start()
    await health.set(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def refusal(channel: grpc.aio.Channel) -> str:
    """Why a call over this channel ends without an answer; "" if it is answered."""
    async with channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAITS_S)
        except grpc.aio.AioRpcError as caught:
            error = rpc.map_rpc_error(caught)
            assert type(error) is Unavailable and "\n" not in error.message
            return error.message
    return ""


async def test_only_services_of_the_cluster_are_answered(ours: Certificates, theirs: Certificates) -> None:
    own, other = ServiceTls.load(ours.services), ServiceTls.load(theirs.services)
    strangers = {
        "expired": ServiceTls(own.authority, *ours.signed(valid=-DAY)),
        "of another cluster": ServiceTls(own.authority, other.certificate, other.key),
        "for servers only": ServiceTls(own.authority, *ours.signed(client=False)),
    }
    async with service(own) as address:
        assert await refusal(rpc.dialer(own)(address)) == ""
        bare = ChannelTls(grpc.ssl_channel_credentials(own.authority), NAME)
        for channel in (
            rpc.channel(address),  # in plain
            rpc.channel(address, bare),  # it trusts us, and shows nothing
            *(rpc.dialer(tls)(address) for tls in strangers.values()),
        ):
            said = await refusal(channel)
            assert address in said and "refuses the certificate" in said
        assert "certificate is refused: unable to get" in await refusal(rpc.dialer(other)(address))


async def test_a_service_answers_only_to_its_name(ours: Certificates) -> None:
    """What stands at an address is asked for its certificate: another process may have taken the port."""
    own = ServiceTls.load(ours.services)
    for tls, said in (
        (ServiceTls(own.authority, *ours.signed(valid=-DAY)), "refused: certificate has expired"),
        (ServiceTls(own.authority, *ours.signed("gateway.example")), "is not for eyas.internal"),
        (None, "does not speak TLS"),
    ):
        async with service(tls) as address:
            found = await refusal(rpc.dialer(own)(address))
            assert said in found and address in found


async def test_other_failures_keep_their_words() -> None:
    assert explained("the worker is draining") == "the worker is draining"
    refused = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    assert explained(refused) == refused


async def test_channels_that_are_shared_are_secured(ours: Certificates) -> None:
    own = ServiceTls.load(ours.services)
    async with service(own) as address:
        for channels, serves in ((rpc.ChannelPool(rpc.dialer(own)), True), (rpc.ChannelPool(), False)):
            assert await rpc.is_serving(channels.get(address), WAITS_S) is serves
            await channels.close()


async def test_pages_and_drafts_come_over_tls(
    ours: Certificates, theirs: Certificates, tmp_path: Path
) -> None:
    """From prefill and draft workers to a decode worker, each of another host; a stranger is in the list."""
    config, own = tiny_config(tmp_path), {"tls_dir": ours.services}
    asked = GenerationRequest("r", tuple(range(3, 100)), SamplingParams(max_tokens=8))
    (expected,) = await alone(config, tmp_path / "alone", asked)
    async with contextlib.AsyncExitStack() as stack:
        start = stack.enter_async_context
        a = await start(real_worker(config, Role.PREFILL, pool_dir=str(tmp_path / "a"), **own))
        d = await start(real_worker(config, Role.DRAFT, pool_dir=str(tmp_path / "d"), **own))
        stranger = await start(service(ServiceTls.load(theirs.services)))
        known = f"static:{a.address},{d.address},{stranger}"
        b = await start(real_worker(config, Role.DECODE, registry=known, pool_dir=str(tmp_path / "b"), **own))
        decode = await start(decoding(b))
        decode.attach(asked, await prefill(a, asked))
        assert await decode.tokens() == (expected, "grpc")
        members = b.front._membership
        assert members.addresses() == {a.address, d.address} and members.drafters() == [d.address]
        assert "unable to get local issuer" in members._members.silent()[stranger]
        async with asyncio.timeout(30):
            while b.front._drafts._streams[d.address]._down:
                await asyncio.sleep(0.05)


# --- the folder --------------------------------------------------------------------------------------------


def test_a_folder_that_no_peer_would_accept_is_refused_at_once(
    ours: Certificates, theirs: Certificates, tmp_path: Path
) -> None:
    good, other = ours.signed(), theirs.signed()
    for name, pair, said in (
        ("expired", ours.signed(valid=-DAY), "certificate has expired"),
        ("unnamed", ours.signed("gateway.example"), "mismatch"),
        ("stranger", other, "unable to get local issuer"),
        ("server", ours.signed(client=False), "unsupported certificate purpose|unsuitable"),
        ("mixed", (good[0], other[1]), "no certificate with the key"),
        ("empty", (b"", good[1]), "no certificate with the key"),
    ):
        folder = ours.service_folder(tmp_path / name, *pair)
        with pytest.raises(ConfigError, match=said) as caught:
            ServiceTls.load(folder)
        assert f"{folder}/tls.crt" in caught.value.message and "\n" not in caught.value.message
    folder = ours.service_folder(tmp_path / "good", *good)
    assert ServiceTls.load(folder).authority == (Path(folder) / "ca.crt").read_bytes()
    (Path(folder) / "ca.crt").write_text("none")
    with pytest.raises(ConfigError, match="ca.crt: it is no authority"):
        ServiceTls.load(folder)
    (Path(folder) / "tls.key").unlink()
    with pytest.raises(ConfigError, match="tls.key cannot be read"):
        ServiceTls.load(folder)


def test_a_process_refuses_such_a_folder_in_one_line(
    ours: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ours.service_folder(tmp_path / "expired", *ours.signed(valid=-DAY))
    ports = free_ports()
    door = [f"--port={next(ports)}", f"--grpc-port={next(ports)}"]
    for command in (["worker"], ["gateway", "--registry=static:127.0.0.1:1", *door], ["serve", *door]):
        assert main([*command, f"--tls-dir={folder}"]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "eyas:" in line]
        assert "certificate has expired" in line and folder in line


def test_an_authority_signs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    assert main(["certs", str(folder), "--names", "gateway.example,10.0.0.1"]) == 0
    assert str(folder / "services") in capsys.readouterr().out
    authority, before = (folder / "ca.crt").read_bytes(), ServiceTls.load(str(folder / "services"))
    assert main(["certs", str(folder), "--days", "1"]) == 0
    after = ServiceTls.load(str(folder / "services"))
    assert (folder / "ca.crt").read_bytes() == authority == after.authority == before.authority
    assert after.certificate != before.certificate
    for key in folder.rglob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    (folder / "ca.key").write_bytes((folder / "services" / "tls.key").read_bytes())
    assert main(["certs", str(folder)]) == 2
    assert "the key is not the certificate's" in capsys.readouterr().err


async def test_a_proxy_of_the_environment_is_not_used(
    ours: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As curl's users have one: no process of a cluster would reach another, and none would say why."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for tls in (None, ServiceTls.load(ours.services)):
        async with service(tls) as address, rpc.dialer(tls)(address) as channel:
            assert await rpc.is_serving(channel, WAITS_S)
