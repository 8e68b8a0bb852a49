"""A server without keys and pages of other sites: no name leads them here, and their forms do nothing."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_client import CHAT
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer
from starlette.datastructures import Headers

from eyas.common.cluster.listening import free_ports
from eyas.common.config import GatewayConfig
from eyas.common.errors import Forbidden
from gateway.http.front import create_app
from gateway.http.middleware import WebGuard, guarded
from gateway.main import fronts
from gateway.observe.metrics import GatewayMetrics

FORM, TEXT, JSON = "application/x-www-form-urlencoded", "text/plain", "application/json"
EVIL = "https://evil.example"


def passes(config: GatewayConfig, method: str = "POST", **headers: str) -> bool:
    given = {name.replace("_", "-"): value for name, value in ({"host": "localhost"} | headers).items()}
    guard = WebGuard(create_app, config)  # type: ignore[arg-type]  # which is not called
    try:
        guard.check(method, "http", Headers(given))
    except Forbidden:
        return False
    return True


OWN = [
    "localhost:8000",
    "LOCALHOST.",
    "eyas.localhost:8000",
    "127.0.0.1:8000",
    "127.0.0.1",
    "[::1]:8000",
    "[::1]",
    "10.1.2.3:8000",  # as kubelet and Prometheus call a pod
    "[fe80::1]:8000",
    socket.gethostname(),
    socket.gethostname().upper() + ":8000",
    "",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.example:8000",
    "evillocalhost",
    "127.1.evil",
    "[evil.example]",
    "gateway",
    "127.0.0.1@evil.example",
]


@pytest.mark.parametrize("host", OWN)
def test_own_names_and_addresses_are_answered(host: str) -> None:
    for bound in ("127.0.0.1", "0.0.0.0", "::"):
        assert passes(GatewayConfig(host=bound), "GET", host=host)


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_not_unless_they_are_allowed(host: str) -> None:
    for method in ("GET", "POST"):
        assert not passes(GatewayConfig(host="0.0.0.0"), method, host=host)
        assert not passes(GatewayConfig(allowed_hosts=("other",)), method, host=host)
        assert passes(GatewayConfig(allowed_hosts=("other", "*")), method, host=host)


def test_the_name_that_it_listens_on_and_allowed_ones_are_its_own() -> None:
    config = GatewayConfig(host="Chat.example", allowed_hosts=("gateway", "eyas.default.svc"))
    for host in ("chat.example:80", "GATEWAY:8000", "eyas.default.svc.", "eyas.default.svc:8000"):
        assert passes(config, host=host)
    assert not passes(config, host="other.example")


@pytest.mark.parametrize(
    "kind", [FORM, TEXT, "multipart/form-data; boundary=x", "", "text/plain; application/json"]
)
@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost:1", "https://localhost:8000"])
def test_a_foreign_page_sends_json_or_nothing(kind: str, origin: str) -> None:
    headers = {"content_type": kind} if kind else {}
    own = {"host": "localhost:8000"}
    assert not passes(GatewayConfig(), origin=origin, **own, **headers)
    assert not passes(GatewayConfig(cors_origins=("https://chat.example",)), origin=origin, **own, **headers)
    assert passes(GatewayConfig(cors_origins=(origin,)), origin=origin, **own, **headers)
    assert passes(GatewayConfig(), origin="http://localhost:8000", **own, **headers)
    assert passes(GatewayConfig(), **own, **headers)  # curl -d
    assert passes(GatewayConfig(), "GET", origin=origin, **own, **headers)
    assert not passes(GatewayConfig(), sec_fetch_site="cross-site", **own, **headers)
    assert passes(GatewayConfig(), sec_fetch_site="same-origin", **own, **headers)


@pytest.mark.parametrize("kind", [JSON, "Application/JSON; charset=utf-8", "application/vnd.x+json"])
def test_json_is_what_a_browser_asks_about_first(kind: str) -> None:
    assert passes(GatewayConfig(), origin=EVIL, content_type=kind)


def test_with_keys_nothing_is_checked() -> None:
    app: Any = object()
    assert guarded(app, GatewayConfig(api_keys=("a-key-of-somebody",))) is app
    assert guarded(app, GatewayConfig()) is not app


@pytest.fixture
async def url() -> AsyncIterator[str]:
    ports = free_ports()
    config = GatewayConfig(port=next(ports), grpc_port=next(ports))
    backend = ScriptedBackend(nano_tokenizer())
    async with fronts(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry())):
        yield f"http://127.0.0.1:{config.port}"


async def test_a_running_server_is_guarded(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
        for path in ("/health", "/metrics", "/v1/models"):
            assert (await http.get(path)).status_code == 200
            refused = await http.get(path, headers={"host": "evil.example", "x-request-id": "mine"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
            assert "--allowed-host" in refused.json()["error"]["message"]
            assert refused.headers["x-request-id"] == "mine"
        path, body = "/v1/chat/completions", httpx.Request("POST", "http://x", json=CHAT).content
        for headers, status in (
            ({"content-type": FORM}, 200),
            ({"content-type": JSON, "origin": EVIL}, 200),
            ({"content-type": TEXT, "origin": EVIL}, 403),
            ({"content-type": TEXT, "origin": url}, 200),
            ({"origin": EVIL}, 403),
        ):
            assert (await http.post(path, content=body, headers=headers)).status_code == status
