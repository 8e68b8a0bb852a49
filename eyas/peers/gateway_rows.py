"""Flags of vLLM and SGLang that concern a gateway, logs, and servers whose prefill and decode stand apart.

Rows of `eyas.peers.table`, which lists them all.
"""

from __future__ import annotations

from eyas.peers import values
from eyas.peers.meanings import (
    BOTH,
    MANY,
    NONE,
    SGLANG,
    VLLM,
    AcceptedFlag,
    AcceptedValues,
    AcceptedWith,
    AliasFlag,
    FlagRow,
    RefusedFlag,
    SameFlag,
    TranslatedFlag,
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
    FlagRow(BOTH, ("--host",), SameFlag(), example="127.0.0.1"),
    FlagRow(BOTH, ("--port",), SameFlag(), example="8000"),
    FlagRow(SGLANG, ("--grpc-port",), SameFlag(), example="8001"),
    FlagRow(BOTH, ("--api-key",), SameFlag(note="several: `--api-key-file`"), example="k"),
    FlagRow(
        SGLANG,
        ("--admin-api-key",),
        RefusedFlag("take `--api-key-file`, and `--key-limits` for what each key may use"),
        example="k",
    ),
    FlagRow(BOTH, ("--ssl-certfile",), SameFlag(), example="c"),
    FlagRow(BOTH, ("--ssl-keyfile",), SameFlag(), example="c"),
    FlagRow(
        BOTH,
        ("--ssl-ca-certs",),
        RefusedFlag("callers show keys (`--api-key-file`), no certificates"),
        example="c",
    ),
    FlagRow(
        VLLM,
        ("--ssl-cert-reqs",),
        AcceptedValues(("0",), "so it is", "callers show keys (`--api-key-file`), no certificates"),
        example="0",
    ),
    FlagRow(
        BOTH,
        ("--enable-ssl-refresh",),
        RefusedFlag("restart the gateways one after the other (docs/security.md)"),
        NONE,
    ),
    FlagRow(VLLM, ("--root-path",), SameFlag(), example="/eyas"),
    FlagRow(SGLANG, ("--fastapi-root-path",), AliasFlag("--root-path"), example="/eyas"),
    FlagRow(
        VLLM,
        ("--allowed-origins",),
        AliasFlag("--cors-origin", values.listed, "a JSON list, as there"),
        example='["*"]',
    ),
    FlagRow(
        VLLM,
        ("--allowed-methods", "--allowed-headers"),
        AcceptedValues(('["*"]',), "so it is", "leave it out: `--cors-origin` allows what callers need"),
        example='["*"]',
    ),
    FlagRow(
        VLLM,
        ("--allow-credentials",),
        RefusedFlag("leave it out: callers send a bearer token, no cookie"),
        NONE,
    ),
    FlagRow(VLLM, ("--api-server-count", "-asc"), AliasFlag("--gateway-workers"), example="2"),
    FlagRow(SGLANG, ("--tokenizer-worker-num",), AliasFlag("--gateway-workers"), example="2"),
    FlagRow(VLLM, ("--middleware",), RefusedFlag("stand a proxy before it"), example="m"),
    FlagRow(
        BOTH,
        ("--tool-call-parser",),
        SameFlag(_TOOLS, "the chat template says it, if nothing does"),
        example="qwen25",
    ),
    FlagRow(
        BOTH,
        ("--reasoning-parser",),
        SameFlag(_REASONING, "the chat template says it, if nothing does"),
        example="deepseek-r1",
    ),
    FlagRow(
        VLLM,
        ("--enable-auto-tool-choice",),
        AcceptedFlag("tools are called wherever a request has some"),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--enable-reasoning",),
        AcceptedFlag("reasoning is separated where the chat template has it"),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--tool-parser-plugin", "--reasoning-parser-plugin"),
        RefusedFlag("the formats that Eyas reads are in docs/tools.md"),
        example="p",
    ),
    FlagRow(SGLANG, ("--tool-server",), RefusedFlag("the caller runs the tools: leave it out"), example="t"),
    FlagRow(
        VLLM,
        ("--exclude-tools-when-tool-choice-none",),
        RefusedFlag("leave `tools` out of the request"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--grammar-backend",),
        AcceptedValues(("xgrammar",), "so it is", "leave it out"),
        example="xgrammar",
    ),
    FlagRow(
        VLLM,
        ("--guided-decoding-backend",),
        AcceptedValues(("auto", "xgrammar"), "so it is", "leave it out"),
        example="auto",
    ),
    FlagRow(
        VLLM,
        ("--structured-outputs-config",),
        RefusedFlag("leave it out: every model follows grammars (docs/structured-output.md)"),
        example="{}",
    ),
    FlagRow(
        SGLANG,
        ("--constrained-json-whitespace-pattern",),
        RefusedFlag("leave it out (docs/structured-output.md says which white space comes)"),
        example="x",
    ),
    FlagRow(
        SGLANG,
        ("--constrained-json-disable-any-whitespace",),
        RefusedFlag("leave it out (docs/structured-output.md says which white space comes)"),
        NONE,
    ),
    FlagRow(VLLM, ("--enable-prompt-tokens-details",), AcceptedFlag("`usage` counts cached tokens"), NONE),
    FlagRow(SGLANG, ("--enable-cache-report",), AcceptedFlag("`usage` counts cached tokens"), NONE),
    FlagRow(
        VLLM, ("--enable-force-include-usage",), RefusedFlag("a request says it: `stream_options`"), NONE
    ),
    FlagRow(
        VLLM, ("--return-tokens-as-token-ids",), RefusedFlag("a request says it: `return_token_ids`"), NONE
    ),
    FlagRow(VLLM, ("--enable-request-id-headers",), AcceptedFlag("every answer has an X-Request-Id"), NONE),
    FlagRow(
        VLLM,
        ("--disable-frontend-multiprocessing",),
        RefusedFlag("leave it out: the gateway is a process of its own"),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--disable-fastapi-docs",),
        RefusedFlag("leave it out: /docs shows what docs/api.md does"),
        NONE,
    ),
    FlagRow(SGLANG, ("--file-storage-path",), RefusedFlag("leave it out: no files are stored"), example="d"),
    FlagRow(
        SGLANG,
        ("--weight-version",),
        RefusedFlag("leave it out: weights are `default` until an update names new ones (docs/weights.md)"),
        example="v",
    ),
)

LOGS = (
    FlagRow(BOTH, ("--config",), SameFlag(note="YAML, with flags as keys"), example="/dev/null"),
    FlagRow(SGLANG, ("--log-level",), SameFlag(), example="info"),
    FlagRow(VLLM, ("--uvicorn-log-level",), AcceptedFlag(_NO_CALL_LINES), example="warning"),
    FlagRow(SGLANG, ("--log-level-http",), AcceptedFlag(_NO_CALL_LINES), example="warning"),
    FlagRow(VLLM, ("--disable-uvicorn-access-log",), AcceptedFlag(_NO_CALL_LINES), NONE),
    FlagRow(SGLANG, ("--uvicorn-access-log-exclude-prefixes",), AcceptedFlag(_NO_CALL_LINES), MANY),
    FlagRow(VLLM, ("--disable-access-log-for-endpoints",), AcceptedFlag(_NO_CALL_LINES), example="/health"),
    FlagRow(
        VLLM,
        ("--disable-log-requests", "--no-enable-log-requests"),
        AcceptedFlag("texts of requests are never in the log"),
        NONE,
    ),
    FlagRow(VLLM, ("--enable-log-requests", "--enable-log-outputs"), RefusedFlag(_IN_LOGS), NONE),
    FlagRow(VLLM, ("--max-log-len",), AcceptedFlag("texts of requests are never in the log"), example="10"),
    FlagRow(SGLANG, ("--log-requests",), RefusedFlag(_IN_LOGS), NONE),
    FlagRow(SGLANG, ("--log-requests-level",), RefusedFlag(_IN_LOGS)),
    FlagRow(VLLM, ("--disable-log-stats",), AcceptedFlag(_AT_METRICS), NONE),
    FlagRow(SGLANG, ("--enable-metrics",), AcceptedFlag(_AT_METRICS), NONE),
    FlagRow(
        SGLANG,
        ("--enable-metrics-for-all-schedulers",),
        AcceptedFlag("every worker has its own /metrics"),
        NONE,
    ),
    FlagRow(SGLANG, ("--decode-log-interval",), RefusedFlag(f"leave it out: {_AT_METRICS}"), example="40"),
    FlagRow(SGLANG, ("--show-time-cost",), RefusedFlag(f"leave it out: {_AT_METRICS}"), NONE),
    FlagRow(
        SGLANG,
        ("--bucket-time-to-first-token", "--bucket-inter-token-latency", "--bucket-e2e-request-latency"),
        RefusedFlag("leave it out: buckets are fixed"),
        MANY,
    ),
    FlagRow(
        VLLM,
        ("--show-hidden-metrics-for-version",),
        RefusedFlag("leave it out: docs/metrics.md lists all"),
        example="0.9",
    ),
    FlagRow(VLLM, ("--kv-cache-metrics", "--enable-server-load-tracking"), AcceptedFlag(_AT_METRICS), NONE),
    FlagRow(
        BOTH, ("--otlp-traces-endpoint",), AliasFlag("--otlp-endpoint", values.address), example="h:4317"
    ),
    FlagRow(
        SGLANG,
        ("--enable-trace",),
        AcceptedWith(
            ("--otlp-endpoint",), "calls are traced where an endpoint takes them", "set `--otlp-endpoint URL`"
        ),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--collect-detailed-traces",),
        RefusedFlag("leave it out: a trace has all parts of a call (docs/tracing.md)"),
        example="all",
    ),
    FlagRow(
        SGLANG,
        ("--crash-dump-folder",),
        RefusedFlag("leave it out: nothing of a request is written to a disk"),
        example="d",
    ),
    FlagRow(
        BOTH,
        ("--kv-events-config",),
        RefusedFlag(
            "leave it out: the gateway knows its workers' caches; `eyas worker --kv-events` is for others"
        ),
        example="{}",
    ),
)

SPLIT = (
    FlagRow(
        SGLANG,
        ("--disaggregation-mode",),
        TranslatedFlag(
            values.role,
            "`eyas worker`: `--roles prefill` or `--roles decode`; `eyas serve`: `--layout split` has both",
        ),
        example="null",
    ),
    FlagRow(
        SGLANG,
        ("--disaggregation-transfer-backend",),
        AliasFlag("--transfer", note="nixl; others of ours too"),
        example="auto",
    ),
    FlagRow(
        SGLANG,
        ("--disaggregation-bootstrap-port",),
        RefusedFlag("leave it out: workers find each other by `--registry`"),
    ),
    FlagRow(
        SGLANG,
        ("--disaggregation-ib-device",),
        AliasFlag("--transfer-devices", note="cards of every GPU alike"),
        example="m",
    ),
    FlagRow(
        VLLM,
        ("--kv-transfer-config",),
        RefusedFlag(
            "take `--layout split`, or `eyas worker --roles prefill` and `--roles decode`, with `--transfer`"
        ),
        example="{}",
    ),
)
