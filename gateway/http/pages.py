"""Routes about the gateway itself: models, health, workers and metrics."""

from __future__ import annotations

import time

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import eyas
from eyas.common.config import GatewayConfig
from eyas.common.errors import InvalidRequest, Unavailable
from gateway.backends.admission import ServedModel, arithmetic_of, called, serving
from gateway.backends.base import GenerationBackend
from gateway.http.openapi import JSON, HttpEndpoint
from gateway.http.operators import check_page
from gateway.observe.metrics import GatewayMetrics
from gateway.text.sampling_defaults import with_file_names

FLUSH_WAIT_S = 1.0  # for what has just been answered to leave the workers, and a canary to end
MOST_FLUSH_WAIT_S = 600.0


class AdminEndpoints:
    """The endpoints. Each turns a request into a response; `wire` maps what they raise."""

    def __init__(self, backend: GenerationBackend) -> None:
        self._backend = backend

    def endpoints(self) -> list[HttpEndpoint]:
        """The rows of the route table that this class answers."""
        summary = "Drops every worker's prefix cache, as SGLang; 400 while requests run"
        return [
            HttpEndpoint(method, "/flush_cache", self.flush, summary, query=("timeout",))
            for method in ("GET", "POST")
        ]

    async def flush(self, request: Request) -> Response:
        """Drops the prefix cache of every worker; the pages that each had. Raises Busy if something runs."""
        check_page(request, "flush the cache")
        return json_response({"flushed": await self._backend.flush(_wait_s(request))})


def _wait_s(request: Request) -> float:
    """How long to wait for what runs: `timeout` of the query, in seconds."""
    given = request.query_params.get("timeout")
    try:
        wait_s = FLUSH_WAIT_S if given is None else float(given)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MOST_FLUSH_WAIT_S:
        raise InvalidRequest(f"timeout must be seconds, 0 to {MOST_FLUSH_WAIT_S:g}", param="timeout")
    return wait_s


class ReadEndpoints:
    """The endpoints that read. Each turns a request into a response; `wire` maps what they raise."""

    def __init__(self, config: GatewayConfig, backend: GenerationBackend, metrics: GatewayMetrics) -> None:
        self._config = config
        self._backend = backend
        self._metrics = metrics
        self._created = int(time.time())

    def endpoints(self) -> list[HttpEndpoint]:
        """The rows of the route table that this class answers."""
        metrics = (CONTENT_TYPE_LATEST,)
        healthy = "200 when a request would succeed, else 503"
        return [
            HttpEndpoint("GET", "/v1/models", self.models, "The served model, as a list"),
            HttpEndpoint("GET", "/v1/models/{name:path}", self.model, "The served model"),
            HttpEndpoint(
                "GET", "/get_model_info", self.model_info, "The served model, as SGLang describes one"
            ),
            HttpEndpoint("GET", "/model_info", self.model_info, "The newer name of /get_model_info"),
            HttpEndpoint("GET", "/server_info", self.server_info, "The server, as SGLang describes one"),
            HttpEndpoint("GET", "/get_server_info", self.server_info, "The older name of /server_info"),
            HttpEndpoint("GET", "/cluster", self.cluster, "Every worker, as `eyas doctor` shows it"),
            HttpEndpoint("GET", "/health", self.health, healthy, keyed=False),
            HttpEndpoint("GET", "/health_generate", self.health, "The same, by SGLang's name", keyed=False),
            HttpEndpoint("GET", "/ping", self.health, "The same", keyed=False),
            HttpEndpoint("POST", "/ping", self.health, "The same", keyed=False),
            HttpEndpoint("GET", "/version", self.version, "The server's version", keyed=False),
            HttpEndpoint("GET", "/metrics", self.metrics, "Metrics for Prometheus", gives=metrics),
        ]

    async def models(self, _: Request) -> Response:
        """The list of models: the one that is served, by all its names, and its adapters."""
        model = await self._served()
        names = [*self._config.names, *(adapter.name for adapter in model.adapters.adapters)]
        return json_response({"object": "list", "data": [self._describe(model, name) for name in names]})

    async def model(self, request: Request) -> Response:
        """The served model, or, of no name, the list. Raises ModelNotFound for another name."""
        if not request.path_params["name"]:  # /v1/models/: names may hold slashes, so it is no other path
            return await self.models(request)
        name = request.path_params["name"]
        model = await self._served(name)
        called(model, self._config, name)
        return json_response(self._describe(model, name))

    async def model_info(self, _: Request) -> Response:
        """The served model in SGLang's fields, with the model's own sampling defaults."""
        model = await self._served()
        return json_response(
            {
                "model_path": self._config.model,
                "tokenizer_path": str(self._config.texts.folder),
                "served_model_name": model.id,
                "is_generation": True,
                "preferred_sampling_params": with_file_names(model.sampling) or None,
                "max_model_len": model.context_length,
                "vocab_size": model.vocab_size,
                "arithmetic": model.arithmetic,
                "weight_version": self._backend.weights.newest.version,
                **_mark(model),
            }
        )

    async def server_info(self, _: Request) -> Response:
        """The server in SGLang's fields.

        `avg_spec_accept_length`: tokens per verify step, its own included; null before the first one.
        """
        model = await self._served()
        steps, accepted = (
            self._metrics.registry.get_sample_value(name) or 0.0
            for name in ("eyas_verify_steps_total", "eyas_draft_tokens_accepted_total")
        )
        return json_response(
            {
                "version": eyas.__version__,
                "model_path": self._config.model,
                "tokenizer_path": str(self._config.texts.folder),
                "served_model_name": model.id,
                "context_length": model.context_length,
                "internal_states": [{"avg_spec_accept_length": 1 + accepted / steps if steps else None}],
                **_mark(model),
            }
        )

    async def version(self, _: Request) -> Response:
        """The version of Eyas."""
        return json_response({"version": eyas.__version__})

    async def health(self, _: Request) -> Response:
        """Whether a request would succeed, perhaps degraded. Raises Unavailable if it would fail."""
        health = self._backend.health()
        if health.problem:
            raise Unavailable(health.problem)
        status = {"status": "degraded", "reason": health.degraded} if health.degraded else {"status": "ok"}
        if health.paused:
            status = {"status": "paused", "reason": health.paused}
        workers = (link.info for link in self._backend.links())
        return json_response(status | {"arithmetic": arithmetic_of(workers)})

    async def cluster(self, _: Request) -> Response:
        """Every worker known, its load, and the gateway's connection to it."""
        health = self._backend.health()
        workers = [
            {
                **msgspec.structs.asdict(link.info),
                "epoch": str(link.info.epoch),  # 64 bits are too many for some readers of JSON
                "connected": link.connected,
                "in_flight": link.in_flight,
            }
            for link in self._backend.links()
        ]
        return json_response(
            {
                "model": self._config.served_model,
                "grpc_port": self._config.grpc_port,
                "health": health,
                "workers": workers,
            }
        )

    async def metrics(self, _: Request) -> Response:
        """The metrics in Prometheus' text format."""
        return Response(await self._metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def _served(self, name: str = "") -> ServedModel:
        return await serving(self._config, self._backend, name)

    def _describe(self, model: ServedModel, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "eyas",
            "max_model_len": model.context_length,
            **_mark(model),
            **self._lineage(model, name),
        }

    def _lineage(self, model: ServedModel, name: str) -> dict[str, object]:
        """The fields of an adapter: the model that it is one of, its content, and its rank."""
        adapter = model.adapters.named(name)
        if adapter is None:
            return {}
        return {"parent": self._config.served_model, "adapter": adapter.id, "rank": adapter.rank}


def json_response(value: object) -> Response:
    """A 200 with `value` as JSON."""
    return Response(msgspec.json.encode(value), media_type=JSON)


def _mark(model: ServedModel) -> dict[str, bool]:
    """The field that marks a model whose answers mean nothing."""
    return {"synthetic": True} if model.synthetic else {}
