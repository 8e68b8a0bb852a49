"""docker/secure.yaml without Docker: it locks every service of compose.yaml; health checks still get in."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import certificates
import pytest
import yaml
from certificates import Certificates

from eyas import cli, configuration
from eyas.common.machine import folders
from eyas.common.security import api_keys
from eyas.common.security.tls import ServiceTls, caller_context, service_tls
from eyas.common.wire import rpc
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer

DOCKER = Path(__file__).resolve().parents[2] / "docker"
REGISTRY = ("--registry", "redis://redis:6379/0")
BY_ENTRYPOINT = {
    "gateway": ["gateway", *REGISTRY],
    "worker": ["worker", *REGISTRY, "--advertise", "10.0.0.1"],
}


def services(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())["services"]
    return found


@pytest.fixture
def ours(tmp_path: Path) -> Certificates:
    return certificates.make(tmp_path / "certs")


def test_every_service_has_the_certificates(ours: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, secure = services("compose.yaml"), services("secure.yaml")
    assert secure.keys() == plain.keys() - {"redis", "init"}
    api_keys.add(str(ours.folder / "keys"), "alice", api_keys.new_key())
    for name, service in secure.items():
        (volume,) = service["volumes"]
        assert volume.endswith((":/certs:ro", ":/certs/services:ro"))
        folder = service["environment"][folders.TLS_VARIABLE].replace("/certs", str(ours.folder))
        assert service_tls(folder) is not None
        monkeypatch.setenv(folders.TLS_VARIABLE, folder)
        command = plain[name]["entrypoint"][-1]
        words = [*BY_ENTRYPOINT[command], *service.get("command", plain[name]["command"])]
        args = cli._parser().parse_args([word.replace("/certs", str(ours.folder)) for word in words])
        if name != "gateway":
            assert configuration.worker_config(args).tls_dir == folder
            continue
        config = configuration.gateway_alone(args)
        assert config.tls_dir == folder and config.api_key_file == str(ours.folder / "keys")
        assert config.certificate is not None and caller_context(config.certificate)
        before = [*BY_ENTRYPOINT[command], *plain[name]["command"]]
        assert words[: len(before)] == before


async def app(scope: object, receive: object, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_the_health_check_gets_in(ours: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    serves: Callable[[str], bool] = runpy.run_path(str(DOCKER / "healthy.py"))["serves"]
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server = rpc.server()
    health = rpc.HealthService(server, [])
    port = rpc.bind(server, "127.0.0.1", 0, ServiceTls.load(ours.services).server)
    await server.start()
    await health.set(True)
    http = HttpServer(app, "127.0.0.1", 0, HttpLimits(), tls=caller_context(ours.door))
    await http.start()
    try:
        assert not await asyncio.to_thread(serves, f"127.0.0.1:{port}")
        monkeypatch.setenv(folders.TLS_VARIABLE, ours.services)
        assert await asyncio.to_thread(serves, f"127.0.0.1:{port}")
        assert await asyncio.to_thread(serves, f"https://127.0.0.1:{http.port}/health")
        assert not await asyncio.to_thread(serves, f"http://127.0.0.1:{http.port}/health")
        await health.set(False)
        assert not await asyncio.to_thread(serves, f"127.0.0.1:{port}")
    finally:
        await http.aclose()
        await server.stop(0)
