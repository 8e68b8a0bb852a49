"""One trace per call: its span, and below it the stages of its requests on each worker.

Durations come from the workers and start times from the gateway, so no worker makes spans. A
span says names, numbers and times, and never text of a prompt or an answer. OpenTelemetry's API is imported
only where tracing is on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from eyas.common.errors import ConfigError, EyasError
from eyas.common.logging import request_id, traceparent
from gateway.observe.timings import TimedPart, parts
from gateway.text.entries import RequestTrace, UsageCounts

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")  # the standard variables
NAME = "eyas-gateway"  # of the service, unless OTEL_SERVICE_NAME says another

# The span of the call that this code serves; tasks inherit it from the code that starts them.
current: ContextVar[CallSpan | None] = ContextVar("span", default=None)


def tracer(endpoint: str | None) -> RequestTracer | None:
    """Sends spans by OTLP (gRPC) to `endpoint`, or to that of the environment; None if there is neither.

    All else is as OpenTelemetry's own variables say: OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...
    Raises ConfigError where OpenTelemetry is not installed.
    """
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    if importlib.util.find_spec("opentelemetry") is None:
        advice = "it needs OpenTelemetry: pip install 'eyas[otel]'"
        raise ConfigError(f"--otlp-endpoint: {advice}", param="otlp-endpoint")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", NAME)
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestTracer(provider)


def failed(error: EyasError) -> None:
    """The traced call that this code serves, if it is one, failed."""
    if (span := current.get()) is not None:
        span.failed(error.code)


class RequestTracer:
    """Makes spans with a provider of OpenTelemetry's SDK, which it shuts down at its own end."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("eyas")
        self._propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def call(self, name: str, headers: Mapping[str, str]) -> Iterator[CallSpan]:
        """The span of one call, below the caller's own if `headers` have a traceparent. Logs then name it."""
        from opentelemetry.trace import SpanKind

        given = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        context = self._propagator.extract(given)
        attributes = {"eyas.request_id": request_id.get()}
        span = self._tracer.start_span(name, context, SpanKind.SERVER, attributes)
        call = CallSpan(self._tracer, span)
        outgoing: dict[str, str] = {}
        self._propagator.inject(outgoing, call.context)
        tokens = (
            current.set(call),
            traceparent.set(outgoing.get("traceparent", "")),
        )  # none where the SDK is turned off
        try:
            yield call
        finally:
            current.reset(tokens[0])
            traceparent.reset(tokens[1])
            span.end()

    def close(self) -> None:
        """Sends what has not left. It may take seconds."""
        self._provider.shutdown()


class CallSpan:
    """The span of one call."""

    def __init__(self, tracer: Any, span: Any) -> None:
        from opentelemetry.trace import set_span_in_context

        self.context = set_span_in_context(span, {})
        self._tracer = tracer
        self._span = span

    def answered(self, usage: UsageCounts, traces: Sequence[RequestTrace]) -> None:
        """Tells where the call's time went; called once, at its end. `traces`: one per prompt."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(_counts(usage))
        now, offset = time.monotonic(), time.time() - time.monotonic()
        for trace in traces:
            for part in parts(trace, now):
                attributes = _where(part) or {"eyas.verify_steps": usage.verify_steps}
                self._part(part.name, (part.began + offset, part.ended + offset), attributes)

    def responds(self, method: str, route: str, status: int) -> None:
        """The status line of an HTTP call is written."""
        self._span.update_name(f"{method} {route}")
        self._span.set_attributes(
            {"http.request.method": method, "http.route": route, "http.response.status_code": status}
        )
        if status >= 500:
            self.failed(str(status))

    def is_rpc(self, method: str) -> None:
        """Marks the span as a gRPC call of this method."""
        self._span.set_attributes({"rpc.system": "grpc", "rpc.method": method})

    def failed(self, error: str) -> None:
        """The call failed, for a reason of this name."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", error)
        self._span.set_status(StatusCode.ERROR)

    def _part(self, name: str, times: tuple[float, float], attributes: Mapping[str, str | int]) -> None:
        """A span below the call's. `times`: seconds since 1970."""
        began, ended = (int(1e9 * seconds) for seconds in times)
        span = self._tracer.start_span(name, self.context, attributes=attributes, start_time=began)
        span.end(ended)


def _where(part: TimedPart) -> dict[str, str | int]:
    """Returns a part's attributes of its worker; empty for a part that may have been on several."""
    leg = part.leg
    if leg is None:
        return {}
    where: dict[str, str | int] = {
        "eyas.worker": leg.worker,
        "eyas.role": "" if leg.role is None else leg.role.value,
    }
    if part.name == "prefill":
        where["eyas.cached_tokens"] = leg.cached_tokens
    if part.name == "transfer":
        where |= {"eyas.transfer_bytes": leg.transfer_bytes, "eyas.transfer_path": leg.transfer_path}
    return where


def _counts(usage: UsageCounts) -> dict[str, int | float]:
    counts: dict[str, int | float] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "eyas.cached_tokens": usage.cached_tokens,
    }
    if usage.acceptance_length is not None:
        counts["eyas.acceptance_length"] = round(usage.acceptance_length, 3)
    return counts
