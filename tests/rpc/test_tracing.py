"""One trace per call over HTTP and gRPC, from a real small cluster to an exporter in memory."""

from __future__ import annotations

import logging
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry
from real_cluster import RealCluster, real_cluster
from real_worker import tiny_config
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.config import GatewayConfig
from eyas.common.errors import ConfigError, Unavailable
from eyas.common.types import Role
from gateway.http.front import create_app
from gateway.observe import tracing
from gateway.observe.metrics import GatewayMetrics
from protos import eyas_pb2, eyas_pb2_grpc
from tests.rpc.log_lines import PROMPT, SPLIT, Lines

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="eyas[otel] is not installed")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, CALLER = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
SECRET = "xyzzy"


class Traced:
    """Metrics with a tracer, and the spans that it made."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        provider = sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.metrics.tracer = tracing.RequestTracer(provider)

    def take(self) -> tuple[Any, list[Any]]:
        """(the call's span, those below it by the time they began), of the only trace."""
        spans = self._spans.get_finished_spans()
        self._spans.clear()
        (root,) = [span for span in spans if span.kind.name == "SERVER"]
        below = sorted((s for s in spans if s is not root), key=lambda s: s.start_time)
        assert all(s.parent.span_id == root.context.span_id for s in below)
        assert {s.context.trace_id for s in spans} == {root.context.trace_id}
        assert SECRET not in "".join(s.to_json() for s in spans)
        return root, below


def check_split(cluster: RealCluster, root: Any, below: list[Any]) -> None:
    """The spans of a request that was computed on one worker and decoded on the other."""
    prefill, decode = (worker.address for worker in cluster.workers)
    where = {(s.name, s.attributes.get("eyas.worker")) for s in below}
    assert where == {
        ("queue", prefill),
        ("prefill", prefill),
        ("queue", decode),
        ("transfer", decode),
        ("decode", None),
    }
    one = {s.name: s for s in below}
    assert one["transfer"].attributes["eyas.transfer_bytes"] > 0
    assert one["transfer"].attributes["eyas.transfer_path"] == "shm"
    slack = 50_000_000  # ns: clocks of three processes would differ less
    for span in below:
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time + slack, span.name
    assert one["prefill"].end_time > one["prefill"].start_time
    assert one["prefill"].start_time <= one["transfer"].start_time <= one["decode"].end_time
    assert root.attributes["gen_ai.usage.output_tokens"] == 4


async def test_a_trace_over_http_tells_where_the_time_went(tmp_path: Path) -> None:
    traced = Traced()
    async with real_cluster(tiny_config(tmp_path), tmp_path, SPLIT, metrics=traced.metrics) as cluster:
        for stream in (False, True):
            prompt = [*PROMPT["prompt"], 50 + stream]  # type: ignore[misc]
            response = await cluster.http.post(
                "/v1/completions",
                json=PROMPT | {"prompt": prompt, "stream": stream, "user": SECRET},
                headers={"traceparent": PARENT, "x-request-id": "mine"},
            )
            assert response.status_code == 200
            root, below = traced.take()
            check_split(cluster, root, below)
            assert (root.context.trace_id, root.parent.span_id) == (TRACE, CALLER)
            assert root.name == "POST /v1/completions" and root.attributes["eyas.request_id"] == "mine"
            assert root.attributes["http.response.status_code"] == 200
            assert response.headers["traceparent"].split("-")[1:3] == [
                f"{TRACE:032x}",
                f"{root.context.span_id:016x}",
            ]


async def test_a_trace_over_grpc_is_the_same_and_workers_log_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lines, logger = Lines(), logging.getLogger("eyas.decode")
    logger.addHandler(lines)
    traced = Traced()
    try:
        async with real_cluster(tiny_config(tmp_path), tmp_path, SPLIT, metrics=traced.metrics) as cluster:
            async with grpc.aio.insecure_channel(cluster.grpc) as channel:
                ids = eyas_pb2.TokenIds(ids=PROMPT["prompt"])
                request = eyas_pb2.GenerateRequest(ids=ids)
                request.options.max_tokens = 4
                call = eyas_pb2_grpc.EyasStub(channel).Generate(request, metadata=(("traceparent", PARENT),))
                assert [message async for message in call]
                told = dict(await call.initial_metadata())["traceparent"]
            root, below = traced.take()
            check_split(cluster, root, below)
    finally:
        logger.removeHandler(lines)
    assert (root.context.trace_id, root.name) == (TRACE, "eyas.v1.Eyas/Generate")
    assert told.split("-")[2] == f"{root.context.span_id:016x}"
    assert lines.json[-1]["trace_id"] == f"{TRACE:032x}"


async def test_a_unified_worker_has_no_transfer(tmp_path: Path) -> None:
    traced = Traced()
    roles = ((Role.PREFILL, Role.DECODE),)
    async with real_cluster(tiny_config(tmp_path), tmp_path, roles, metrics=traced.metrics) as cluster:
        await cluster.http.post("/v1/completions", json=PROMPT)
        root, below = traced.take()
        assert [span.name for span in below] == ["queue", "prefill", "decode"]
        assert root.parent is None


async def test_failures_end_their_spans() -> None:
    traced = Traced()
    backend = ScriptedBackend(nano_tokenizer())
    app = create_app(GatewayConfig(), backend, backend.tokenizer, traced.metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:
        await client.get(f"/{SECRET}")  # a caller's words are no name of a span
        assert traced.take()[0].name == "GET other"
        await client.post("/v1/completions", json={"model": SECRET})
        root, _ = traced.take()
        assert root.attributes["http.response.status_code"] == 400 and root.status.is_unset
        backend.refusal = Unavailable("gone")
        await client.post("/v1/completions", json=PROMPT)
        assert traced.take()[0].attributes["error.type"] == "503"
        backend.refusal, backend.breaks_with = None, Unavailable("gone")
        await client.post("/v1/completions", json=PROMPT | {"stream": True})
        root, _ = traced.take()
        assert (root.attributes["error.type"], root.status.status_code.name) == ("unavailable", "ERROR")


async def test_a_caller_that_is_not_sampled_costs_no_spans() -> None:
    traced = Traced()
    backend = ScriptedBackend(nano_tokenizer())
    app = create_app(GatewayConfig(), backend, backend.tokenizer, traced.metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:
        unsampled = PARENT[:-1] + "0"
        response = await client.post("/v1/completions", json=PROMPT, headers={"traceparent": unsampled})
        assert response.headers["traceparent"].split("-")[1] == unsampled.split("-")[1]
        with pytest.raises(ValueError):
            traced.take()
        await client.post("/v1/completions", json=PROMPT, headers={"traceparent": "nonsense"})
        assert traced.take()[0].parent is None


def test_spans_leave_by_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    rpcs = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="eyas[otel] is not installed")
    came: list[Any] = []

    class Collector(rpcs.TraceServiceServicer):  # type: ignore[misc,name-defined]
        def Export(self, request: Any, context: Any) -> Any:
            came.append(request)
            return exporter.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    rpcs.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        for flag in (True, False):
            url = f"http://127.0.0.1:{port}"
            monkeypatch.delenv(tracing.ENDPOINTS[0], raising=False)
            if not flag:
                monkeypatch.setenv(tracing.ENDPOINTS[0], url)
            tracer = tracing.tracer(url if flag else None)
            assert tracer is not None
            with tracer.call("GET", {}):
                pass
            tracer.close()
            (resource,) = came.pop().resource_spans
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            assert names["service.name"] == "eyas-gateway"
            assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["GET"]
    finally:
        server.stop(0)


async def test_a_sdk_that_is_turned_off_is_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    traced = Traced()
    backend = ScriptedBackend(nano_tokenizer())
    app = create_app(GatewayConfig(), backend, backend.tokenizer, traced.metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:
        response = await client.post("/v1/completions", json=PROMPT)
        assert response.status_code == 200 and "traceparent" not in response.headers


def test_without_an_endpoint_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert tracing.tracer(None) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'eyas\[otel\]'"):
        tracing.tracer("http://127.0.0.1:4317")
