"""Flags of vLLM and SGLang that concern a gateway, logs, and servers whose prefill and decode stand apart.

Rows of `eyas.peers.table`, which knows them all.
"""

from __future__ import annotations

from eyas.peers import values
from eyas.peers.meanings import (
    BOTH,
    MANY,
    NONE,
    SGLANG,
    VLLM,
    Alias,
    Only,
    Refused,
    Row,
    Same,
    Translated,
    Usual,
    With,
)

_TOOLS = values.spelled(
    {
        "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v3_1",
        "deepseek_v31": "deepseek_v3_1",
        "glm": "glm45",
        "gpt-oss": "gpt_oss",
        "openai": "gpt_oss",
        "llama3": "llama3_json",
        "llama4_pythonic": "pythonic",
        "minimax-m2": "minimax_m2",
        "qwen": "hermes",
        "qwen25": "hermes",
        "qwen3_xml": "qwen3_coder",
    }
)
_REASONING = values.spelled({"deepseek-r1": "deepseek_r1", "glm45": "qwen3", "qwen3-thinking": "qwen3"})

_NO_CALL_LINES = (
    "calls have no line each in the log; they are counted at /metrics, and traced by `--otlp-endpoint`"
)
_AT_METRICS = "the figures are at /metrics"
_IN_LOGS = "texts of requests are never in the log: `--otlp-endpoint` traces calls"

GATEWAY = (
    Row(BOTH, ("--host",), Same(), example="127.0.0.1"),
    Row(BOTH, ("--port",), Same(), example="8000"),
    Row(SGLANG, ("--grpc-port",), Same(), example="8001"),
    Row(BOTH, ("--api-key",), Same(note="several: `--api-key-file`"), example="k"),
    Row(
        SGLANG,
        ("--admin-api-key",),
        Refused("take `--api-key-file`, and `--key-limits` for what each key may use"),
        example="k",
    ),
    Row(BOTH, ("--ssl-certfile",), Same(), example="c"),
    Row(BOTH, ("--ssl-keyfile",), Same(), example="c"),
    Row(
        BOTH,
        ("--ssl-ca-certs",),
        Refused("callers show keys (`--api-key-file`), no certificates"),
        example="c",
    ),
    Row(
        VLLM,
        ("--ssl-cert-reqs",),
        Only(("0",), "so it is", "callers show keys (`--api-key-file`), no certificates"),
        example="0",
    ),
    Row(
        BOTH,
        ("--enable-ssl-refresh",),
        Refused("restart the gateways one after the other (docs/security.md)"),
        NONE,
    ),
    Row(VLLM, ("--root-path",), Same(), example="/eyas"),
    Row(SGLANG, ("--fastapi-root-path",), Alias("--root-path"), example="/eyas"),
    Row(
        VLLM,
        ("--allowed-origins",),
        Alias("--cors-origin", values.listed, "a JSON list, as there"),
        example='["*"]',
    ),
    Row(
        VLLM,
        ("--allowed-methods", "--allowed-headers"),
        Only(('["*"]',), "so it is", "leave it out: `--cors-origin` allows what callers need"),
        example='["*"]',
    ),
    Row(
        VLLM, ("--allow-credentials",), Refused("leave it out: callers send a bearer token, no cookie"), NONE
    ),
    Row(VLLM, ("--api-server-count", "-asc"), Alias("--gateway-workers"), example="2"),
    Row(SGLANG, ("--tokenizer-worker-num",), Alias("--gateway-workers"), example="2"),
    Row(VLLM, ("--middleware",), Refused("stand a proxy before it"), example="m"),
    Row(
        BOTH,
        ("--tool-call-parser",),
        Same(_TOOLS, "the chat template says it, if nothing does"),
        example="qwen25",
    ),
    Row(
        BOTH,
        ("--reasoning-parser",),
        Same(_REASONING, "the chat template says it, if nothing does"),
        example="deepseek-r1",
    ),
    Row(VLLM, ("--enable-auto-tool-choice",), Usual("tools are called wherever a request has some"), NONE),
    Row(VLLM, ("--enable-reasoning",), Usual("reasoning is told apart where the chat template has it"), NONE),
    Row(
        VLLM,
        ("--tool-parser-plugin", "--reasoning-parser-plugin"),
        Refused("the formats that Eyas reads are in docs/tools.md"),
        example="p",
    ),
    Row(SGLANG, ("--tool-server",), Refused("the caller runs the tools: leave it out"), example="t"),
    Row(VLLM, ("--exclude-tools-when-tool-choice-none",), Refused("leave `tools` out of the request"), NONE),
    Row(SGLANG, ("--grammar-backend",), Only(("xgrammar",), "so it is", "leave it out"), example="xgrammar"),
    Row(
        VLLM,
        ("--guided-decoding-backend",),
        Only(("auto", "xgrammar"), "so it is", "leave it out"),
        example="auto",
    ),
    Row(
        VLLM,
        ("--structured-outputs-config",),
        Refused("leave it out: every model follows grammars (docs/structured-output.md)"),
        example="{}",
    ),
    Row(
        SGLANG,
        ("--constrained-json-whitespace-pattern",),
        Refused("leave it out (docs/structured-output.md says which white space comes)"),
        example="x",
    ),
    Row(
        SGLANG,
        ("--constrained-json-disable-any-whitespace",),
        Refused("leave it out (docs/structured-output.md says which white space comes)"),
        NONE,
    ),
    Row(VLLM, ("--enable-prompt-tokens-details",), Usual("`usage` counts cached tokens"), NONE),
    Row(SGLANG, ("--enable-cache-report",), Usual("`usage` counts cached tokens"), NONE),
    Row(VLLM, ("--enable-force-include-usage",), Refused("a request says it: `stream_options`"), NONE),
    Row(VLLM, ("--return-tokens-as-token-ids",), Refused("a request says it: `return_token_ids`"), NONE),
    Row(VLLM, ("--enable-request-id-headers",), Usual("every answer has an X-Request-Id"), NONE),
    Row(
        VLLM,
        ("--disable-frontend-multiprocessing",),
        Refused("leave it out: the gateway is a process of its own"),
        NONE,
    ),
    Row(VLLM, ("--disable-fastapi-docs",), Refused("leave it out: /docs shows what docs/api.md does"), NONE),
    Row(SGLANG, ("--file-storage-path",), Refused("leave it out: no files are stored"), example="d"),
    Row(
        SGLANG,
        ("--weight-version",),
        Refused("leave it out: a model is named by `--served-model-name`"),
        example="v",
    ),
)

LOGS = (
    Row(BOTH, ("--config",), Same(note="YAML, with flags as keys"), example="/dev/null"),
    Row(SGLANG, ("--log-level",), Same(), example="info"),
    Row(VLLM, ("--uvicorn-log-level",), Usual(_NO_CALL_LINES), example="warning"),
    Row(SGLANG, ("--log-level-http",), Usual(_NO_CALL_LINES), example="warning"),
    Row(VLLM, ("--disable-uvicorn-access-log",), Usual(_NO_CALL_LINES), NONE),
    Row(SGLANG, ("--uvicorn-access-log-exclude-prefixes",), Usual(_NO_CALL_LINES), MANY),
    Row(VLLM, ("--disable-access-log-for-endpoints",), Usual(_NO_CALL_LINES), example="/health"),
    Row(
        VLLM,
        ("--disable-log-requests", "--no-enable-log-requests"),
        Usual("texts of requests are never in the log"),
        NONE,
    ),
    Row(VLLM, ("--enable-log-requests", "--enable-log-outputs"), Refused(_IN_LOGS), NONE),
    Row(VLLM, ("--max-log-len",), Usual("texts of requests are never in the log"), example="10"),
    Row(SGLANG, ("--log-requests",), Refused(_IN_LOGS), NONE),
    Row(SGLANG, ("--log-requests-level",), Refused(_IN_LOGS)),
    Row(VLLM, ("--disable-log-stats",), Usual(_AT_METRICS), NONE),
    Row(SGLANG, ("--enable-metrics",), Usual(_AT_METRICS), NONE),
    Row(SGLANG, ("--enable-metrics-for-all-schedulers",), Usual("every worker has its own /metrics"), NONE),
    Row(SGLANG, ("--decode-log-interval",), Refused(f"leave it out: {_AT_METRICS}"), example="40"),
    Row(SGLANG, ("--show-time-cost",), Refused(f"leave it out: {_AT_METRICS}"), NONE),
    Row(
        SGLANG,
        ("--bucket-time-to-first-token", "--bucket-inter-token-latency", "--bucket-e2e-request-latency"),
        Refused("leave it out: buckets are fixed"),
        MANY,
    ),
    Row(
        VLLM,
        ("--show-hidden-metrics-for-version",),
        Refused("leave it out: docs/metrics.md lists all"),
        example="0.9",
    ),
    Row(VLLM, ("--kv-cache-metrics", "--enable-server-load-tracking"), Usual(_AT_METRICS), NONE),
    Row(BOTH, ("--otlp-traces-endpoint",), Alias("--otlp-endpoint", values.address), example="h:4317"),
    Row(
        SGLANG,
        ("--enable-trace",),
        With(
            ("--otlp-endpoint",), "calls are traced where an endpoint takes them", "set `--otlp-endpoint URL`"
        ),
        NONE,
    ),
    Row(
        VLLM,
        ("--collect-detailed-traces",),
        Refused("leave it out: a trace has all parts of a call (docs/tracing.md)"),
        example="all",
    ),
    Row(
        SGLANG,
        ("--crash-dump-folder",),
        Refused("leave it out: nothing of a request is written to a disk"),
        example="d",
    ),
    Row(
        BOTH,
        ("--kv-events-config",),
        Refused("leave it out: the gateway knows its workers' caches"),
        example="{}",
    ),
)

SPLIT = (
    Row(
        SGLANG,
        ("--disaggregation-mode",),
        Translated(
            values.role,
            "`eyas worker`: `--roles prefill` or `--roles decode`; `eyas serve`: `--layout split` has both",
        ),
        example="null",
    ),
    Row(
        SGLANG,
        ("--disaggregation-transfer-backend",),
        Alias("--transfer", note="nixl; others of ours too"),
        example="auto",
    ),
    Row(
        SGLANG,
        ("--disaggregation-bootstrap-port",),
        Refused("leave it out: workers find each other by `--registry`"),
    ),
    Row(
        SGLANG,
        ("--disaggregation-ib-device",),
        Refused("leave it out: UCX takes its devices from the environment (UCX_NET_DEVICES)"),
        example="m",
    ),
    Row(
        VLLM,
        ("--kv-transfer-config",),
        Refused(
            "take `--layout split`, or `eyas worker --roles prefill` and `--roles decode`, with `--transfer`"
        ),
        example="{}",
    ),
)
