"""The route table, and the pages made of it: /openapi.json, and /docs, which needs no network."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import eyas
from gateway.formats.fields import RequestBody
from gateway.formats.openai_reply import ErrorBody

Answerer = Callable[[Request], Awaitable[Response]]
JSON = "application/json"
EVENTS = "text/event-stream"
HTML = "text/html; charset=utf-8"
_OF_BODIES = (400, 404, 408, 413)


@dataclass(frozen=True)
class HttpEndpoint:
    """One route. `keyed`: it needs an API key, if any is configured. `gives`: media types of answers; empty:
    it refuses every request. `query`: names of the numbers that its query may have.
    """

    method: str
    path: str  # as Starlette writes it
    answer: Answerer
    summary: str
    body: type[RequestBody] | None = None
    keyed: bool = True
    gives: tuple[str, ...] = (JSON,)
    query: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether the route generates tokens, which it can stream."""
        return EVENTS in self.gives


def described(endpoints: Sequence[HttpEndpoint], *, keys: bool, root: str = "") -> list[HttpEndpoint]:
    """Adds two endpoints: the OpenAPI document of all of them, and the page that shows it.

    `keys`: whether any API key is configured. `root`: the path under which a proxy shows them.
    """
    page = (files("gateway") / "static" / "docs.html").read_bytes()

    async def show(_: Request) -> Response:
        return Response(page, media_type=HTML)

    async def describe(_: Request) -> Response:
        return Response(text, media_type=JSON)

    every = [
        *endpoints,
        HttpEndpoint("GET", "/openapi.json", describe, "This API as OpenAPI describes it", keyed=False),
        HttpEndpoint("GET", "/docs", show, "This API as a page", keyed=False, gives=(HTML,)),
    ]
    whole = document(every if keys else [replace(endpoint, keyed=False) for endpoint in every])
    text = msgspec.json.encode(whole | ({"servers": [{"url": root}]} if root else {}))
    return every


def document(endpoints: Sequence[HttpEndpoint]) -> dict[str, Any]:
    """The OpenAPI document of these routes."""
    keyed = any(endpoint.keyed for endpoint in endpoints)
    bodies = frozenset(endpoint.body for endpoint in endpoints if endpoint.body)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Eyas", "version": eyas.__version__},
        "paths": paths,
        "components": {
            "schemas": _schemas(bodies),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}} if keyed else {},
        },
    }


@cache
def _schemas(bodies: frozenset[type[RequestBody]]) -> dict[str, Any]:
    """Returns the schemas of these bodies and of errors, by name. Cached: the slowest part of a front's
    start.
    """
    ordered = sorted(bodies, key=lambda body: body.__name__)
    _, schemas = models_json_schema(
        [(body, "validation") for body in ordered], ref_template="#/components/schemas/{model}"
    )
    _, errors = msgspec.json.schema_components([ErrorBody], ref_template="#/components/schemas/{name}")
    return {**schemas["$defs"], **errors}


def _operation(endpoint: HttpEndpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()} {endpoint.path}",
        "responses": _responses(endpoint),
    }
    if endpoint.keyed:
        operation["security"] = [{"key": []}]
    if parameters := _parameters(endpoint):
        operation["parameters"] = parameters
    if endpoint.body is not None:
        content = {JSON: {"schema": _ref(endpoint.body.__name__)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(endpoint: HttpEndpoint) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "required": False, "schema": {"type": "number"}}
        for name in endpoint.query
    ]
    if "{" in endpoint.path:
        name = endpoint.path.partition("{")[2].partition("}")[0].partition(":")[0]
        parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    return parameters


def _responses(endpoint: HttpEndpoint) -> dict[str, Any]:
    """The answers of a route by their statuses; `default`: any other error."""
    responses: dict[str, Any] = {}
    if endpoint.gives:
        responses["200"] = {"description": "The answer", "content": {kind: {} for kind in endpoint.gives}}
    statuses = [*_OF_BODIES] if endpoint.body or not endpoint.gives else [400] if endpoint.query else []
    statuses += [401] if endpoint.keyed else []
    statuses += [429] if endpoint.generates else []
    failed = {"content": {JSON: {"schema": _ref("ErrorBody")}}}
    for status in sorted(statuses):
        responses[str(status)] = {"description": HTTPStatus(status).phrase, **failed}
    return responses | {"default": {"description": "An error", **failed}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
