"""The `eyas` command: flags in, one call out.

It knows the name of every flag and takes every default from `eyas.common.config`; what a command does is
imported when it runs, so `eyas --help` is quick and loads no torch. A flag or folder that cannot work ends
the command with one line on standard error and a non-zero code.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import NoReturn

import eyas
from eyas.common.config import (
    NANO,
    NANO_HEAD,
    EngineConfig,
    GatewayConfig,
    ServeConfig,
    SpeculationConfig,
    WorkerConfig,
)
from eyas.common.errors import ConfigError, EyasError
from eyas.common.logging import FORMATS
from eyas.common.types import Role
from kv_transfer.route import Route

USAGE_ERROR = 2
INTERRUPTED = 130
REGISTRY = "redis://HOST:PORT/DB|static:HOST:PORT,..."


def main(argv: list[str] | None = None) -> int:
    """Runs one command; gives the process's exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except EyasError as error:
        print(f"eyas: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED


# --- flags ---------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="eyas", description="A disaggregated LLM server.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    serve = command("serve", _serve, "start a local cluster and its gateway")
    _gateway_flags(serve)
    _layout_flags(serve)
    _engine_flags(serve)
    worker = command("worker", _worker, "start one worker: a gRPC front and its engine")
    _worker_flags(worker)
    _engine_flags(worker)
    gateway = command("gateway", _gateway, "start a gateway for workers that run already")
    gateway.add_argument("--registry", required=True, metavar=REGISTRY)
    gateway.add_argument("--model", default=GatewayConfig.model, metavar="DIR", help="tokenizer and limits")
    _gateway_flags(gateway)
    gateway.add_argument("--log-format", choices=FORMATS, default=GatewayConfig.log_format)
    _supervised_flag(gateway)
    chat = command("chat", _chat, "talk to a running gateway")
    chat.add_argument("--gateway", default=_grpc_default(), metavar="HOST:PORT", help="its gRPC address")
    chat.add_argument("--api-key")
    chat.add_argument("--temperature", type=float, default=0.0, help="(0)")
    doctor = command("doctor", _doctor, "look at a running cluster through its gateway: 0 if all is well")
    _url_flag(doctor)
    doctor.add_argument("--api-key")
    demo = command("demo", _demo, "start split services, stream one answer, show figures, stop")
    _layout_flags(demo)
    _engine_flags(demo)
    bench = command("bench", _bench, "load a server and measure it (without --url: a cluster of its own)")
    _bench_flags(bench)
    _layout_flags(bench)
    _engine_flags(bench)
    _train_flags(command("train", _train, "train a model"))
    _evals_flags(command("evals", _evals, "score a running server"))
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"eyas {eyas.__version__}")
        parser.exit()


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    engine, spec = EngineConfig(), SpeculationConfig()
    add = parser.add_argument_group("engine").add_argument
    add("--model", default=engine.model, metavar="DIR", help="a Hugging Face folder (the embedded model)")
    add("--draft", metavar="DIR|none", help="its draft head (the embedded head for the embedded model)")
    add("--device", default=engine.device, help=f"({engine.device})")
    add("--load-format", default=engine.load_format, choices=["auto", "dummy"], help="dummy: random weights")
    add("--num-pages", type=_positive, default=engine.num_pages, help=f"KV pages ({engine.num_pages})")
    add("--max-running", type=_positive, default=engine.max_running, help=f"({engine.max_running})")
    add("--chunk-tokens", type=_positive, default=engine.chunk_tokens, help=f"({engine.chunk_tokens})")
    add("--lease-s", type=_positive, default=engine.lease_s, help=f"({engine.lease_s:g})")
    add("--transfer", default=engine.transfer, choices=["auto", *Route], help="how KV moves (auto)")
    add("--spec-steps", type=_positive, default=spec.steps, help=f"draft tokens in depth ({spec.steps})")
    add("--spec-topk", type=_positive, default=spec.topk, help=f"1: a chain; more: a tree ({spec.topk})")
    add("--spec-draft-tokens", type=_positive, help="nodes verified, the root too (steps + 1)")
    add("--log-format", choices=FORMATS, default=engine.log_format)


def _layout_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("layout").add_argument
    add("--layout", choices=["unified", "split"], help="(split on cpu, unified on a GPU)")
    add("--prefill", type=_positive, default=ServeConfig.prefill, metavar="N", help="prefill workers")
    add("--decode", type=_positive, default=ServeConfig.decode, metavar="N", help="decode workers")
    add("--draft-workers", type=_positive, default=ServeConfig.draft_workers, metavar="N")


def _gateway_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("gateway").add_argument
    add("--host", default=GatewayConfig.host, help=f"({GatewayConfig.host})")
    add("--port", type=_port, default=GatewayConfig.port, help=f"HTTP ({GatewayConfig.port})")
    add("--grpc-port", type=_port, default=GatewayConfig.grpc_port, help=f"({GatewayConfig.grpc_port})")
    add("--served-model", metavar="ID", help="the model's name in the API (its folder's)")
    add("--api-key", help="what callers must send as a bearer token (nothing)")
    add("--cors-origin", type=_list, default=(), metavar="URL,...", help="whose pages may call (nobody's)")


def _worker_flags(parser: argparse.ArgumentParser) -> None:
    worker = WorkerConfig()
    add = parser.add_argument
    add("--roles", type=_roles, default=worker.engine.roles, metavar="prefill,decode,draft")
    add("--host", default=worker.host, help="the address that other workers reach it by")
    add("--port", type=_port, default=worker.port, help="0: any free one")
    add("--metrics-port", type=_port, default=worker.metrics_port, help="0: any free one")
    add("--registry", default=worker.registry, metavar="redis://HOST:PORT/DB", help="where it is found")
    add("--draft-at", type=_list, default=(), metavar="HOST:PORT,...", help="who may draft for it")
    add("--threads", type=_positive, default=worker.engine.threads, help=f"({worker.engine.threads})")
    add("--pool-dir", default=worker.engine.pool_dir, metavar="DIR", help=f"({worker.engine.pool_dir})")
    _supervised_flag(parser)


def _supervised_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--supervised", action="store_true", help="end when standard input ends")


def _bench_flags(parser: argparse.ArgumentParser) -> None:
    from eyas.bench.cases import DEFAULT_CASES

    parser.add_argument("cases", nargs="*", default=list(DEFAULT_CASES), metavar="CASE")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--served-model", metavar="ID", help="the model's name there (the first it lists)")
    parser.add_argument("--api-key")
    parser.add_argument("--both", action="store_true", help="every case also without speculation")
    parser.add_argument("--vocab-size", type=_positive, default=4096, help="of random prompts (4096)")
    parser.add_argument("--out", metavar="FILE", help="append the JSON lines to this file")


def _train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["nano"])
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0, help="(0)")


def _evals_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["nano"])
    _url_flag(parser)
    parser.add_argument("--size", type=_positive, default=100, metavar="N", help="questions a set (100)")


def _url_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=f"http://{GatewayConfig.host}:{GatewayConfig.port}")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _roles(text: str) -> tuple[Role, ...]:
    try:
        return tuple(dict.fromkeys(Role(name) for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(Role)}") from error


def _list(text: str) -> tuple[str, ...]:
    return tuple(item for part in text.split(",") if (item := part.strip()))


def _grpc_default() -> str:
    return f"{GatewayConfig.host}:{GatewayConfig.grpc_port}"


# --- flags to configuration ----------------------------------------------------------------------------


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """What the engine flags say. Without --draft, the embedded model has its head and no other has one."""
    draft = args.draft or (str(NANO_HEAD) if is_nano(args.model) else "none")
    return EngineConfig(
        model=args.model,
        draft=None if draft == "none" else draft,
        device=args.device,
        load_format=args.load_format,
        num_pages=args.num_pages,
        max_running=args.max_running,
        chunk_tokens=args.chunk_tokens,
        lease_s=args.lease_s,
        transfer=args.transfer,
        log_format=args.log_format,
        speculation=SpeculationConfig(
            steps=args.spec_steps,
            topk=args.spec_topk,
            draft_tokens=args.spec_draft_tokens or args.spec_steps + 1,
        ),
    )


def is_nano(model: str) -> bool:
    return Path(model).resolve() == NANO


def served_model(model: str) -> str:
    """What a folder is called in the API."""
    return GatewayConfig.served_model if is_nano(model) else Path(model).resolve().name


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    worker = WorkerConfig(
        host=args.host, port=args.port, metrics_port=args.metrics_port, registry=args.registry
    )
    engine = dataclasses.replace(
        engine_config(args),
        roles=args.roles,
        worker=worker.address,
        threads=args.threads,
        pool_dir=args.pool_dir,
        draft_workers=args.draft_at,
    )
    return dataclasses.replace(worker, engine=engine)


def gateway_config(args: argparse.Namespace, registry: str = "static:") -> GatewayConfig:
    return GatewayConfig(
        host=args.host,
        port=args.port,
        grpc_port=args.grpc_port,
        registry=registry,
        model=args.model,
        served_model=args.served_model or served_model(args.model),
        api_key=args.api_key,
        cors_origins=args.cors_origin,
        log_format=args.log_format,
    )


def serve_config(args: argparse.Namespace, gateway: GatewayConfig) -> ServeConfig:
    engine = engine_config(args)
    return ServeConfig(
        gateway=gateway,
        engine=engine,
        layout=args.layout or ("split" if engine.device == "cpu" else "unified"),
        prefill=args.prefill,
        decode=args.decode,
        draft_workers=args.draft_workers,
    )


def own_config(args: argparse.Namespace) -> ServeConfig:
    """A cluster for one command, on ports that nobody uses."""
    from eyas.worker.ports import free_ports

    with contextlib.closing(free_ports()) as ports:
        gateway = GatewayConfig(
            port=next(ports),
            grpc_port=next(ports),
            model=args.model,
            served_model=served_model(args.model),
        )
    return serve_config(args, gateway)


# --- commands ------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    import asyncio

    from eyas.worker.screen import run_on_screen
    from eyas.worker.serve import Cluster

    async def until_stopped(cluster: Cluster) -> int:
        print("Ctrl-C stops it.", flush=True)
        await asyncio.Event().wait()
        return 0

    try:
        return run_on_screen(serve_config(args, gateway_config(args)), until_stopped)
    except KeyboardInterrupt:
        return 0  # how a server is meant to end


def _worker(args: argparse.Namespace) -> int:
    from eyas.worker.folder import check_draft, check_model
    from eyas.worker.lifeline import die_with_parent

    if args.supervised:
        die_with_parent()
    config = worker_config(args)
    check_model(config.engine.model, config.engine.load_format)
    check_draft(config.engine.draft, config.engine.load_format)
    from eyas.worker.worker import run_worker

    run_worker(config)
    return 0


def _gateway(args: argparse.Namespace) -> int:
    from eyas.worker.folder import check_model
    from eyas.worker.gateway_main import run_gateway
    from eyas.worker.lifeline import die_with_parent

    if args.supervised:
        die_with_parent()
    config = gateway_config(args, args.registry)
    check_model(config.model, "dummy")  # the gateway reads the tokenizer, never the weights
    run_gateway(config)
    return 0


def _chat(args: argparse.Namespace) -> int:
    from eyas.client.terminal import chat

    return chat(args.gateway, args.api_key, args.temperature)


def _doctor(args: argparse.Namespace) -> int:
    from eyas.worker.doctor import examine

    return examine(args.url, args.api_key)


def _demo(args: argparse.Namespace) -> int:
    from eyas.worker.demo import demo

    return demo(own_config(args))


def _bench(args: argparse.Namespace) -> int:
    import asyncio

    from eyas.bench.http import Server
    from eyas.bench.run import bench_own, bench_server, make_plan

    plan = make_plan(args.cases, args.vocab_size, args.both, args.out)
    if args.url:
        return asyncio.run(bench_server(Server(args.url, args.api_key), args.served_model, plan))
    return bench_own(own_config(args), plan)


def _train(args: argparse.Namespace) -> int:
    import logging

    import torch

    from eyas.train.nano import train_nano

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train_nano(Path(args.out), device="cuda" if torch.cuda.is_available() else "cpu", seed=args.seed)
    return 0


def _evals(args: argparse.Namespace) -> int:
    from eyas.evals.nano import evaluate

    return evaluate(args.url, args.size)


if __name__ == "__main__":
    sys.exit(main())
