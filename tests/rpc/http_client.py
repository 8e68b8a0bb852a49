"""The HTTP front in process over a scripted backend, and the one shape that every refusal has."""

from __future__ import annotations

import json
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend

from eyas.common.config import GatewayConfig
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics
from gateway.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"model": "eyas-nano", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "eyas-nano", "prompt": "Hi"}
GENERATE: dict[str, Any] = {"text": "Hi"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/generate": GENERATE,
}


def client_of(
    backend: ScriptedBackend, config: GatewayConfig | None = None, tokenizer: Tokenizer | None = None
) -> httpx.AsyncClient:
    """`tokenizer`: where the backend has none of its own."""
    config = config or GatewayConfig()
    app = create_app(config, backend, tokenizer or backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=10)


def events(response: httpx.Response) -> list[Any]:
    """What a stream told, after checking that it ended well."""
    assert response.status_code == 200, response.text
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def refused(response: httpx.Response, param: str | None) -> str:
    """The message of a 400 that names `param`, in OpenAI's shape."""
    assert response.status_code == 400, response.text
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("invalid_request", "context_length_exceeded")
    assert error["param"] == param
    assert param is None or param in error["message"] or "the prompt" in error["message"]
    return str(error["message"])
