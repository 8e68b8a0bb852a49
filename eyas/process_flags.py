"""The flags of a gateway and of a worker as processes; the engine's are in `eyas.flags`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from eyas.common.cluster.names import CLUSTER
from eyas.common.config import (
    LORA_SLOTS,
    AdapterConfig,
    EngineConfig,
    GatewayConfig,
    ServeConfig,
    WorkerConfig,
)
from eyas.common.machine import folders
from eyas.common.security import api_keys
from eyas.common.security.secret_urls import VARIABLES
from eyas.flags import (
    REGISTRY,
    absolute,
    adapter_rank,
    add_log,
    add_revision,
    add_tokenizer,
    amount,
    host,
    http_url,
    json_object,
    model_name,
    named_folder,
    names,
    path_prefix,
    port,
    positive,
    processes,
    reachable,
    roles,
    seed,
    whole,
)
from gateway.parsers.table import REASONING, TOOL_FORMATS
from kv_transfer.backends.table import AUTO, NONE


def add_gateway(parser: argparse.ArgumentParser, gateway: GatewayConfig = ServeConfig.gateway) -> None:
    """The flags of a gateway; `gateway` has the default drain time."""
    add = parser.add_argument_group("gateway").add_argument
    add("--host", type=host, default=GatewayConfig.host, help=f"where it listens ({GatewayConfig.host})")
    add(
        "--port",
        type=port,
        default=GatewayConfig.port,
        help=f"of HTTP ({GatewayConfig.port}; 0: any free one)",
    )
    add(
        "--grpc-port", type=port, default=GatewayConfig.grpc_port, help=f"of gRPC ({GatewayConfig.grpc_port})"
    )
    _add_answers(add)
    _add_keys(parser)
    add_tls_dir(parser)
    _add_certificate(parser)
    for flag, known in (("--tool-call-parser", TOOL_FORMATS), ("--reasoning-parser", REASONING)):
        add(flag, choices=[AUTO, *known, NONE], default=AUTO, help="the format (the chat template's)")
    _add_template(parser)
    text = "special tokens in the texts of chats count, as in other servers (they stay text)"
    add("--trust-special-tokens", action="store_true", help=text)
    add(
        "--cors-origin", type=origins, default=(), metavar="URL,...", help="sites whose pages may call (none)"
    )
    text = "the most time of a request, whatever its timeout (no limit while tokens come)"
    add("--request-timeout", type=amount, default=GatewayConfig.request_timeout_s, metavar="S", help=text)
    text = "without keys: another name that callers may call it by, or *; may be repeated (none)"
    add("--allowed-host", type=names, action="extend", default=[], metavar="NAME", help=text)
    text = "/metrics has vLLM's names beside its own, for dashboards that ask for them"
    add("--vllm-metrics", action="store_true", help=text)
    text = "takes traces by OTLP: http://HOST:4317 (OTEL_* variables)"
    add("--otlp-endpoint", type=http_url, metavar="URL", help=text)
    text = "what a proxy puts before every path, as /eyas (none)"
    add("--root-path", type=path_prefix, default=GatewayConfig.root_path, metavar="PATH", help=text)
    text = f"gateway processes on the same ports ({gateway.processes})"
    add("--gateway-workers", type=processes, default=gateway.processes, metavar="N", help=text)
    _add_drain(parser, gateway.drain_s)


def _add_template(parser: argparse.ArgumentParser) -> None:
    text = (
        "a Jinja template of chats: its file, or itself, with {{ or {%% in it (the one beside the tokenizer)"
    )
    parser.add_argument("--chat-template", metavar="FILE|TEXT", help=text)


def _add_answers(add: Callable[..., argparse.Action]) -> None:
    """The model's names, and what a request that says nothing gets."""
    text = "the model's names in the API; an answer has the one that its request gave (its folder's)"
    add(
        "--served-model-name",
        "--served-model",
        dest="served_model_names",
        type=model_name,
        nargs="+",
        default=(),
        metavar="NAME",
        help=text,
    )
    text = "where sampling defaults come from: auto: the model's folder; vllm: nowhere; or a folder"
    default = GatewayConfig.generation_config
    add("--generation-config", default=default, metavar="auto|vllm|DIR", help=f"{text} ({default})")
    text = "sampling defaults that count more, by generation_config.json's names"
    default = GatewayConfig.override_generation_config
    add("--override-generation-config", type=json_object, default=default, metavar="JSON", help=text)
    text = "of requests that give none: the same prompt then has the same answer (a random one for each)"
    add("--seed", type=seed, metavar="N", help=text)


def _add_keys(parser: argparse.ArgumentParser) -> None:
    text = f"what callers must send as a bearer token; without a flag, the keys in {api_keys.VARIABLE} (none)"
    group = parser.add_argument_group("keys", text)
    add = group.add_mutually_exclusive_group().add_argument
    add("--api-key-file", metavar="PATH", help="names and hashes of keys, as `eyas keys` writes them")
    group.add_argument("--key-limits", metavar="FILE", help="TOML: what each key may use (no limits)")
    add("--api-key", metavar="K", help="a single key, which other users of this machine can read")


def _add_certificate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "TLS for callers", "of HTTP and gRPC; without it both are plain"
    ).add_argument
    add(
        "--ssl-certfile",
        metavar="PATH",
        help="the gateway's certificate, and those that lead to its authority",
    )
    add("--ssl-keyfile", metavar="PATH", help="its key (in the same file)")


def add_tls_dir(parser: argparse.ArgumentParser) -> None:
    """The certificates by which the services of a cluster trust each other."""
    text = (
        f"the service's ca.crt, tls.crt and tls.key (${folders.TLS_VARIABLE}; none: services talk in plain)"
    )
    parser.add_argument("--tls-dir", metavar="DIR", help=text)


def _add_redis(parser: argparse.ArgumentParser) -> None:
    text = f"the name of its cluster, among those that share a Redis database ({CLUSTER})"
    parser.add_argument("--cluster", metavar="NAME", default=CLUSTER, help=text)
    text = "authorities for the certificate of a registry rediss:// (the system's)"
    parser.add_argument("--registry-ca", metavar="FILE", help=text)


def add_gateway_alone(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas gateway`, which has no engine's flags next to its own."""
    text = f"the workers of its cluster (${VARIABLES['registry']}, which may have a password)"
    parser.add_argument("--registry", metavar=REGISTRY, help=text)
    _add_redis(parser)
    text = "its tokenizer and limits: a folder, or ORG/NAME on the hub (the embedded model)"
    parser.add_argument("--model", default=GatewayConfig.model, metavar="MODEL", help=text)
    add_tokenizer(parser)
    add_revision(parser)
    add_gateway(parser, GatewayConfig())
    add_log(parser.add_argument, GatewayConfig.log_format, GatewayConfig.log_level)
    parser.add_argument("--member", metavar="PATH", help="its socket, if --gateway-workers started it")
    _add_supervised(parser)


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """The adapters that workers load."""
    adapters, engine = AdapterConfig(), EngineConfig()
    add = parser.add_argument_group("adapters").add_argument
    text = (
        "LoRA adapters in folders as PEFT writes them, loaded at the start; requests name one as their model"
    )
    add(
        "--lora",
        dest="loras",
        type=named_folder,
        nargs="+",
        action="extend",
        default=list(adapters.loras),
        metavar="NAME=DIR",
        help=f"{text} (none)",
    )
    text = "folders below which callers may name adapters to load (none: callers load and unload nothing)"
    add(
        "--lora-dir",
        dest="lora_dirs",
        type=absolute,
        nargs="+",
        action="extend",
        default=list(adapters.dirs),
        metavar="DIR",
        help=text,
    )
    text = f"adapters that a step mixes; others wait in the host's memory ({LORA_SLOTS}, with adapters)"
    add("--max-loras", type=positive, metavar="N", help=text)
    text = f"the largest rank of an adapter ({engine.max_lora_rank}); every slot has room for it"
    add("--max-lora-rank", type=adapter_rank, default=engine.max_lora_rank, metavar="N", help=text)
    text = "adapters may update experts and their routers, too: every slot has room for all of that"
    add("--lora-experts", action="store_true", help=text)


def add_worker(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas worker`, except those of its engine."""
    worker = WorkerConfig()
    add = parser.add_argument
    add(
        "--roles",
        type=roles,
        default=worker.engine.roles,
        metavar="prefill,decode,draft",
        help="the kinds of work that it does (all)",
    )
    add("--host", type=host, default=worker.host, help=f"where it listens ({worker.host})")
    add("--port", type=port, default=worker.port, help=f"({worker.port}: any free one)")
    add(
        "--advertise",
        type=reachable,
        metavar="HOST[:PORT]",
        help="the address at which others reach it (where it listens)",
    )
    text = f"where it serves /metrics ({worker.metrics_port}: any free one)"
    add("--metrics-port", type=port, default=worker.metrics_port, help=text)
    _add_events(parser)
    text = f"the workers of its cluster (${VARIABLES['registry']}; none)"
    add("--registry", metavar=REGISTRY, help=text)
    _add_redis(parser)
    add_tls_dir(parser)
    _add_template(parser)
    add_adapters(parser)
    text = f"threads that compute on a CPU ({worker.engine.threads})"
    add("--threads", type=positive, default=worker.engine.threads, metavar="N", help=text)
    text = f"where KV pages lie that come and go by shm ({worker.engine.pool_dir})"
    add("--pool-dir", default=worker.engine.pool_dir, metavar="DIR", help=text)
    _add_drain(parser, worker.drain_s)
    _add_supervised(parser)


def _add_events(parser: argparse.ArgumentParser) -> None:
    """Where a worker publishes what its prefix cache gets and loses."""
    add = parser.add_argument
    text = (
        "publishes what its prefix cache gets and loses, as vLLM does: tcp://*:PORT, or where to dial (none)"
    )
    add("--kv-events", metavar="ADDRESS", help=text)
    text = "where subscribers ask for what they missed: tcp://*:PORT (none)"
    add("--kv-events-replay", metavar="ADDRESS", help=text)
    text = "the topic of what it publishes (kv@HOST:PORT@MODEL)"
    add("--kv-events-topic", metavar="TOPIC", help=text)


def _add_drain(parser: argparse.ArgumentParser, drain_s: float) -> None:
    text = f"seconds that open requests have to finish after the first Ctrl-C or SIGTERM ({drain_s:g})"
    parser.add_argument("--drain-s", type=whole, default=drain_s, metavar="S", help=text)


def _add_supervised(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--supervised", action="store_true", help="leave when standard input ends")


# --- values --------------------------------------------------------------------------------------------


def origins(text: str) -> tuple[str, ...]:
    """Parses the origins of sites, separated by commas, or "*"."""
    sites = names(text)
    for origin in sites:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            what = "is not * or an origin like https://chat.example, without a path"
            raise argparse.ArgumentTypeError(f"{origin!r} {what}")
    return sites
