"""What the gateway says of itself, by the names that callers of other servers know; calls from web pages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from http_client import ROUTES, TEXT, client_of
from scripted_backend import ScriptedBackend, nano_tokenizer

import eyas
from eyas.common.config import GatewayConfig
from gateway.formats.schema import ChatBody, TextBody
from gateway.formats.sglang import GenerateBody

BODIES = {"/v1/chat/completions": ChatBody, "/v1/completions": TextBody, "/generate": GenerateBody}


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer())


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend) as client:
        yield client


OPEN_PAGES = ["/health", "/health_generate", "/ping", "/version", "/docs", "/openapi.json"]
KEYED_PAGES = [
    "/metrics",
    "/",
    "/console/markdown.js",
    "/requests",
    "/cluster",
    "/server_info",
    "/get_server_info",
    "/model_info",
]


async def test_pages_answer_by_every_name(backend: ScriptedBackend) -> None:
    async with client_of(backend, GatewayConfig(api_keys=("k",))) as client:
        for path in OPEN_PAGES:
            assert (await client.get(path)).status_code == 200, path
        assert (await client.post("/ping")).status_code == 200
        assert (await client.get("/version")).json() == {"version": eyas.__version__}
        for path in KEYED_PAGES:
            refused = await client.get(path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            asked = await client.get(path, headers={"accept": "text/html,*/*"})  # a browser asks its user
            assert asked.headers["www-authenticate"].startswith("Basic ")
            assert (await client.get(path, auth=("anyone", "k"))).status_code == 200
        key = {"authorization": "Bearer k"}
        info = (await client.get("/server_info", headers=key)).json()
        assert info == (await client.get("/get_server_info", headers=key)).json()
        assert (info["served_model_name"], info["context_length"]) == ("eyas-nano", 128)
        assert info["internal_states"] == [{"avg_spec_accept_length": None}]
        await client.post("/v1/completions", json=TEXT, headers=key)
        info = (await client.get("/server_info", headers=key)).json()
        assert info["internal_states"][0]["avg_spec_accept_length"] > 1
        assert "k" not in info.values()
        backend.is_healthy = False
        for path in ("/health", "/health_generate", "/ping"):
            assert (await client.get(path)).status_code == 503


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_need_no_font_of_pictures(client: httpx.AsyncClient, path: str) -> None:
    """Machines without such a font show an empty box for each."""
    page = (await client.get(path)).text
    assert not [sign for sign in page if sign > "\uffff"]


async def test_the_api_describes_itself(client: httpx.AsyncClient) -> None:
    api = (await client.get("/openapi.json")).json()
    routes = {
        (method.upper(), route.path.replace(":path}", "}"))
        for route in client._transport.app.routes  # type: ignore[attr-defined]
        for method in route.methods - {"HEAD"}
    }
    assert {(verb.upper(), path) for path, verbs in api["paths"].items() for verb in verbs} == routes
    assert len(routes) >= 21
    schemas = api["components"]["schemas"]
    for path, kind in BODIES.items():
        schema = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        described = schemas[schema["$ref"].rpartition("/")[2]]["properties"]
        assert described.keys() == kind.model_fields.keys() | kind.unsupported.keys()
        assert all(field.get("description") for field in described.values())
    assert schemas["TextBody"]["properties"]["suffix"]["enum"] == [None, ""]
    used = {ref.partition('"')[0] for ref in json.dumps(api).split("#/components/schemas/")[1:]}
    assert used <= schemas.keys()


async def test_the_page_of_the_api_needs_no_network(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "openapi.json" in page.text and "http://" not in page.text and "https://" not in page.text


async def test_a_preflight_needs_no_key_and_names_authorization(backend: ScriptedBackend) -> None:
    asks = {
        "origin": "https://chat.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    for origins in (("*",), ("https://chat.example",)):
        async with client_of(backend, GatewayConfig(cors_origins=origins, api_keys=("k",))) as client:
            for path in (*ROUTES, "/v1/models"):
                answer = await client.options(path, headers=asks)
                assert answer.status_code == 200
                allowed = answer.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
                assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed)
            bare = {name: value for name, value in asks.items() if not name.endswith("headers")}
            answer = await client.options("/v1/models", headers=bare)
            assert "authorization" in answer.headers["access-control-allow-headers"].lower()
            refusal = await client.get("/v1/models", headers={"origin": "https://chat.example"})
            assert refusal.status_code == 401
            assert "x-eyas-ignored" in refusal.headers["access-control-expose-headers"]
