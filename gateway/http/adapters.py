"""Routes that load and unload adapters, by the names of vLLM and of SGLang."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from eyas.common.config import GatewayConfig
from eyas.common.types import Adapter
from gateway.backends.admission import new_adapter
from gateway.backends.base import GenerationBackend
from gateway.formats.schema import LoadAdapterBody, UnloadAdapterBody
from gateway.http.openapi import HttpEndpoint
from gateway.http.operators import EndpointBodies
from gateway.http.pages import json_response

MOST_BYTES = 1 << 16


class AdapterEndpoints:
    """The endpoints. Each turns a request into a response; `wire` handles their errors."""

    def __init__(self, config: GatewayConfig, backend: GenerationBackend) -> None:
        self._config = config
        self._backend = backend
        self._bodies = EndpointBodies(MOST_BYTES)

    def endpoints(self) -> list[HttpEndpoint]:
        """The rows of the route table that this class answers."""
        rows = (
            ("load_lora_adapter", self.load, "Loads an adapter on every worker", LoadAdapterBody),
            ("unload_lora_adapter", self.unload, "Unloads an adapter on every worker", UnloadAdapterBody),
        )
        return [
            HttpEndpoint("POST", f"{prefix}/{path}", answer, f"{summary}, as {server}", body)
            for path, answer, summary, body in rows
            for prefix, server in (("/v1", "vLLM"), ("", "SGLang"))
        ]

    async def load(self, request: Request) -> Response:
        """Loads an adapter on every worker, or on none. Raises an error for an unusable name or folder."""
        body = await self._bodies.read(LoadAdapterBody, request)
        adapter = new_adapter(self._config, body.lora_name, body.lora_path, pinned=body.pinned)
        return self._answer(await self._backend.adapters.load(adapter, replace=body.load_inplace))

    async def unload(self, request: Request) -> Response:
        """Unloads an adapter on every worker. Raises ModelNotFound if no adapter has the name."""
        body = await self._bodies.read(UnloadAdapterBody, request)
        return self._answer(await self._backend.adapters.unload(body.lora_name, body.lora_id or ""))

    def _answer(self, adapter: Adapter) -> Response:
        """The changed adapter and all loaded ones, in SGLang's fields."""
        loaded = {known.name: known.path for known in self._backend.adapters.roster.adapters}
        changed = {"lora_name": adapter.name, "lora_id": adapter.id, "rank": adapter.rank}
        return json_response({"success": True, "error_message": "", **changed, "loaded_adapters": loaded})
