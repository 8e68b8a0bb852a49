"""The flags of the `eyas` command: their names, their defaults and which values they take.

Every default is read from `eyas.common.config`; a flag that another server's users know by another name
takes that name too. What flags mean together is said where they become a configuration.
"""

from __future__ import annotations

import argparse

from eyas.common.config import (
    ATTENTION_BACKENDS,
    DTYPES,
    GPU_DEFAULTS,
    GRAPH_ROWS,
    EngineConfig,
    GatewayConfig,
    ServeConfig,
    SpeculationConfig,
    WorkerConfig,
)
from eyas.common.logging import FORMATS
from eyas.common.types import Role
from kv_transfer.route import Route

REGISTRY = "redis://HOST:PORT/DB|static:HOST:PORT,..."


# --- the engine ----------------------------------------------------------------------------------------


def add_engine(parser: argparse.ArgumentParser) -> None:
    """What an engine loads, how much it may hold, how it computes, how far it looks ahead."""
    _add_model(parser)
    _add_limits(parser)
    _add_computing(parser)
    _add_speculation(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    engine = EngineConfig()
    add = parser.add_argument_group("model and device").add_argument
    add("--model", default=engine.model, metavar="DIR", help="a Hugging Face folder (the embedded model)")
    add("--draft", metavar="DIR|none", help="its draft head (the embedded head for the embedded model)")
    add("--load-format", default=engine.load_format, choices=["auto", "dummy"], help="dummy: random weights")
    add("--device", default=engine.device, help=f"cpu or cuda ({engine.device})")
    add(
        "--tensor-parallel-size",
        "--tp",
        type=positive,
        default=engine.tensor_parallel_size,
        metavar="N",
        help=f"GPUs that share the model ({engine.tensor_parallel_size})",
    )
    add("--dtype", choices=["auto", *DTYPES], help=f"of weights and KV ({_either('dtype')})")
    add("--context-length", type=positive, metavar="N", help="tokens a request may have (the model's)")
    add("--log-format", choices=FORMATS, default=engine.log_format, help=f"({engine.log_format})")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    engine = EngineConfig()
    add = parser.add_argument_group("memory and steps").add_argument
    add("--num-pages", type=positive, metavar="N", help=f"KV pages ({engine.num_pages}; on a GPU what fits)")
    add(
        "--mem-fraction-static",
        type=fraction,
        default=engine.mem_fraction_static,
        metavar="F",
        help=f"of a GPU's memory, for weights and KV pages ({engine.mem_fraction_static})",
    )
    add(
        "--max-running-requests",
        "--max-running",
        dest="max_running",
        type=positive,
        metavar="N",
        help=f"sequences in a step ({_either('max_running')})",
    )
    add(
        "--max-queued-requests",
        "--max-waiting",
        dest="max_waiting",
        type=positive,
        default=engine.max_waiting,
        metavar="N",
        help=f"requests that may wait in a worker; one more is refused with 429 ({engine.max_waiting})",
    )
    add(
        "--chunked-prefill-size",
        "--chunk-tokens",
        dest="chunk_tokens",
        type=positive,
        metavar="N",
        help=f"tokens of a step that computes prompts ({_either('chunk_tokens')})",
    )
    add(
        "--mixed-step-tokens",
        dest="mixed_tokens",
        type=whole,
        metavar="N",
        help=f"tokens of a step that computes prompts and decodes; 0: as in any ({_either('mixed_tokens')})",
    )
    add("--lease-s", type=positive, default=engine.lease_s, help=f"({engine.lease_s:g})")
    add("--transfer", default=engine.transfer, choices=["auto", *Route], help="how KV moves (auto)")


def _add_computing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on a GPU")
    for name, rows in (("attention", "decoding and verifying"), ("prefill-attention", "prompts")):
        group.add_argument(
            f"--{name}-backend",
            choices=["auto", *ATTENTION_BACKENDS],
            help=f"of {rows} ({_either(f'{name}_backend'.replace('-', '_'))})",
        )
    graphs = group.add_mutually_exclusive_group()
    graphs.add_argument(
        "--cuda-graph-max-bs",
        type=positive,
        metavar="N",
        help=f"the largest batch with a CUDA graph ({GPU_DEFAULTS.cuda_graph_max_bs}, or {GRAPH_ROWS} rows)",
    )
    graphs.add_argument(
        "--cuda-graph-bs",
        type=positive,
        nargs="+",
        default=(),
        metavar="N",
        help="the batches with a CUDA graph",
    )
    graphs.add_argument("--disable-cuda-graph", action="store_true", help="launch every kernel by itself")
    group.add_argument(
        "--disable-overlap-schedule", action="store_true", help="plan a step after the one before it"
    )


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    spec = SpeculationConfig()
    add = parser.add_argument_group("speculation").add_argument
    add(
        "--spec-steps",
        "--speculative-num-steps",
        type=positive,
        default=spec.steps,
        metavar="N",
        help=f"draft tokens in depth ({spec.steps})",
    )
    add(
        "--spec-topk",
        "--speculative-eagle-topk",
        type=positive,
        default=spec.topk,
        metavar="N",
        help=f"1: a chain; more: a tree ({spec.topk})",
    )
    add(
        "--spec-draft-tokens",
        "--speculative-num-draft-tokens",
        type=positive,
        metavar="N",
        help="nodes verified, the root too (steps + 1)",
    )
    add(
        "--rejection-sample-method",
        choices=["standard", "synthetic"],
        default="standard",
        help="synthetic: drafts count as accepted by chance, for benchmarks (standard)",
    )
    add(
        "--synthetic-acceptance-rates",
        type=float,
        nargs="+",
        default=(),
        metavar="P",
        help="for each step, the chance that drafts are accepted as far as there",
    )
    add("--synthetic-acceptance-length", type=float, metavar="L", help="or: tokens a round in the mean")


def _either(field: str) -> str:
    """A field's two defaults, as a help text says them."""
    return f"{getattr(EngineConfig(), field)}; on a GPU {getattr(GPU_DEFAULTS, field)}"


# --- processes -----------------------------------------------------------------------------------------


def add_layout(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("layout").add_argument
    add("--layout", choices=["unified", "split"], help="(split on cpu, unified on a GPU)")
    add("--prefill", type=positive, default=ServeConfig.prefill, metavar="N", help="prefill workers")
    add("--decode", type=positive, default=ServeConfig.decode, metavar="N", help="decode workers")
    add("--draft-workers", type=positive, default=ServeConfig.draft_workers, metavar="N")


def add_gateway(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("gateway").add_argument
    add("--host", default=GatewayConfig.host, help=f"({GatewayConfig.host})")
    add("--port", type=port, default=GatewayConfig.port, help=f"HTTP ({GatewayConfig.port})")
    add("--grpc-port", type=port, default=GatewayConfig.grpc_port, help=f"({GatewayConfig.grpc_port})")
    add("--served-model", metavar="ID", help="the model's name in the API (its folder's)")
    add("--api-key", help="what callers must send as a bearer token (nothing)")
    add("--cors-origin", type=names, default=(), metavar="URL,...", help="whose pages may call (nobody's)")


def add_gateway_alone(parser: argparse.ArgumentParser) -> None:
    """What a gateway must be told that has no engine's flags beside its own."""
    parser.add_argument("--registry", required=True, metavar=REGISTRY)
    parser.add_argument("--model", default=GatewayConfig.model, metavar="DIR", help="tokenizer and limits")
    add_gateway(parser)
    parser.add_argument("--log-format", choices=FORMATS, default=GatewayConfig.log_format)
    _add_supervised(parser)


def add_worker(parser: argparse.ArgumentParser) -> None:
    worker = WorkerConfig()
    add = parser.add_argument
    add("--roles", type=roles, default=worker.engine.roles, metavar="prefill,decode,draft")
    add("--host", default=worker.host, help="the address that other workers reach it by")
    add("--port", type=port, default=worker.port, help="0: any free one")
    add("--metrics-port", type=port, default=worker.metrics_port, help="0: any free one")
    add("--registry", default=worker.registry, metavar="redis://HOST:PORT/DB", help="where it is found")
    add("--draft-at", type=names, default=(), metavar="HOST:PORT,...", help="who may draft for it")
    add("--threads", type=positive, default=worker.engine.threads, help=f"({worker.engine.threads})")
    add("--pool-dir", default=worker.engine.pool_dir, metavar="DIR", help=f"({worker.engine.pool_dir})")
    _add_supervised(parser)


def _add_supervised(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--supervised", action="store_true", help="end when standard input ends")


# --- tools ---------------------------------------------------------------------------------------------


def add_chat(parser: argparse.ArgumentParser) -> None:
    default = f"{GatewayConfig.host}:{GatewayConfig.grpc_port}"
    parser.add_argument("--gateway", default=default, metavar="HOST:PORT", help="its gRPC address")
    parser.add_argument("--api-key")
    parser.add_argument("--temperature", type=float, default=0.0, help="(0)")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    parser.add_argument("--api-key")


def add_bench(parser: argparse.ArgumentParser) -> None:
    from eyas.bench.cases import DEFAULT_CASES

    parser.add_argument("cases", nargs="*", default=list(DEFAULT_CASES), metavar="CASE")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--served-model", metavar="ID", help="the model's name there (the first it lists)")
    parser.add_argument("--api-key")
    parser.add_argument("--both", action="store_true", help="every case also without speculation")
    parser.add_argument("--vocab-size", type=positive, default=4096, help="of random prompts (4096)")
    parser.add_argument("--out", metavar="FILE", help="append the JSON lines to this file")


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["nano"])
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0, help="(0)")


def add_evals(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["nano"])
    _add_url(parser)
    parser.add_argument("--size", type=positive, default=100, metavar="N", help="questions a set (100)")


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=f"http://{GatewayConfig.host}:{GatewayConfig.port}")


# --- values --------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction, above 0 and at most 1")
    return value


def port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def roles(text: str) -> tuple[Role, ...]:
    try:
        return tuple(dict.fromkeys(Role(name) for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(Role)}") from error


def names(text: str) -> tuple[str, ...]:
    return tuple(item for part in text.split(",") if (item := part.strip()))
