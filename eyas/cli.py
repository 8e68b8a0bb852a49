"""The `eyas` command: it turns flags into configurations, and runs one command.

It knows the commands and what their flags (`eyas.flags`) mean together. The code of a command is imported
when the command runs, so `eyas --help` is quick and loads no torch. A flag or folder that cannot work ends
the command with one line on standard error and a non-zero exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import NoReturn

import eyas
from eyas import flags
from eyas.common import api_keys
from eyas.common.address import is_unspecified
from eyas.common.config import (
    NANO,
    NANO_HEAD,
    EngineConfig,
    GatewayConfig,
    ServeConfig,
    SpeculationConfig,
    WorkerConfig,
    resolve_engine,
)
from eyas.common.errors import ConfigError, EyasError

USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the process's exit code. `argv` None: the process's own arguments."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unknown: {' '.join(unknown)}")
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
        added.set_defaults(run=run, parser=added)
        return added

    serve = command("serve", _serve, "start a local cluster and its gateway")
    flags.add_gateway(serve)
    flags.add_layout(serve)
    flags.add_engine(serve)
    worker = command("worker", _worker, "start one worker: a gRPC front and its engine")
    flags.add_worker(worker)
    flags.add_engine(worker)
    flags.add_gateway_alone(command("gateway", _gateway, "start a gateway for workers that run already"))
    flags.add_chat(command("chat", _chat, "talk to a running gateway"))
    doctor = "look at a running cluster through its gateway: 0 if all is well"
    flags.add_server(command("doctor", _doctor, doctor))
    demo = command("demo", _demo, "start split services, stream one answer, show figures, stop")
    flags.add_layout(demo)
    flags.add_engine(demo)
    bench = command("bench", _bench, "load a server and measure it (without --url: a cluster of its own)")
    flags.add_bench(bench)
    flags.add_layout(bench)
    flags.add_engine(bench)
    flags.add_train(command("train", _train, "train a model"))
    flags.add_evals(command("evals", _evals, "score a running server"))
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"eyas {eyas.__version__}")
        parser.exit()


# --- flags to configuration ----------------------------------------------------------------------------


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration from the engine's flags. Without --draft, only the embedded model has a head."""
    draft = args.draft or (str(NANO_HEAD) if is_nano(args.model) else "none")
    return resolve_engine(
        args.device,
        model=args.model,
        draft=None if draft == "none" else draft,
        tensor_parallel_size=args.tensor_parallel_size,
        load_format=args.load_format,
        dtype=args.dtype,
        attention_backend=args.attention_backend,
        prefill_attention_backend=args.prefill_attention_backend,
        num_pages=args.num_pages,
        mem_fraction_static=args.mem_fraction_static,
        context_length=args.context_length,
        max_running=args.max_running,
        max_waiting=args.max_waiting,
        chunk_tokens=args.chunk_tokens,
        mixed_tokens=args.mixed_tokens,
        cuda_graph_max_bs=0 if args.disable_cuda_graph else args.cuda_graph_max_bs,
        cuda_graph_bs=args.cuda_graph_bs,
        overlap_schedule=False if args.disable_overlap_schedule else None,
        lease_s=args.lease_s,
        transfer=args.transfer,
        log_format=args.log_format,
        speculation=_speculation_config(args),
    )


def _speculation_config(args: argparse.Namespace) -> SpeculationConfig:
    rates, length = args.synthetic_acceptance_rates, args.synthetic_acceptance_length
    if args.rejection_sample_method == "synthetic":
        from eyas.engine.speculation.synthetic import resolve

        rates = resolve(args.spec_steps, rates, length)
    elif rates or length is not None:
        flag = "synthetic-acceptance-rates" if rates else "synthetic-acceptance-length"
        raise ConfigError(f"--{flag}: needs --rejection-sample-method synthetic", param=flag)
    return SpeculationConfig(
        steps=args.spec_steps,
        topk=args.spec_topk,
        draft_tokens=args.spec_draft_tokens or args.spec_steps + 1,
        synthetic_rates=tuple(rates),
    )


def is_nano(model: str) -> bool:
    """Whether the folder is that of the embedded model."""
    return Path(model).resolve() == NANO


def served_model(model: str) -> str:
    """The name in the API of the model in a folder."""
    return GatewayConfig.served_model if is_nano(model) else Path(model).resolve().name


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """The configuration from the flags of `eyas worker`. Raises ConfigError for flags that do not fit."""
    if is_unspecified(args.host) and not args.advertise:
        message = f"--host: {args.host} is no address that others can dial: name one with --advertise HOST"
        raise ConfigError(message, param="host")
    worker = WorkerConfig(
        host=args.host,
        port=args.port,
        advertise=args.advertise,
        metrics_port=args.metrics_port,
        registry=args.registry,
        drain_s=args.drain_s,
    )
    engine = dataclasses.replace(
        engine_config(args),
        roles=args.roles,
        worker=worker.address,
        threads=args.threads,
        pool_dir=args.pool_dir,
    )
    return dataclasses.replace(worker, engine=engine)


def gateway_config(args: argparse.Namespace, registry: str = "static:") -> GatewayConfig:
    """The configuration from the gateway's flags, with the members of `registry`."""
    return GatewayConfig(
        host=args.host,
        port=args.port,
        grpc_port=args.grpc_port,
        registry=registry,
        model=args.model,
        served_model=args.served_model or served_model(args.model),
        api_keys=_api_keys(args),
        cors_origins=args.cors_origin,
        drain_s=args.drain_s,
        log_format=args.log_format,
    )


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys from a flag, else those from the environment."""
    if args.api_key_file is not None:
        return api_keys.from_file(args.api_key_file)
    if args.api_key is not None:
        return api_keys.parse(args.api_key, "--api-key")
    return api_keys.from_environment()


def _key(args: argparse.Namespace) -> str | None:
    """The key that a client command sends: the one from the flag, else the first one of the environment."""
    return args.api_key or next(iter(api_keys.from_environment()), None)


def serve_config(args: argparse.Namespace, gateway: GatewayConfig) -> ServeConfig:
    """The configuration of a local cluster, from the flags of its engines and its layout."""
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
    """The configuration of a cluster for one command, on free ports."""
    from eyas.worker.ports import free_ports

    with contextlib.closing(free_ports()) as ports:
        gateway = GatewayConfig(
            port=next(ports),
            grpc_port=next(ports),
            model=args.model,
            served_model=served_model(args.model),
            drain_s=0.0,  # its only client is the command
        )
    return serve_config(args, gateway)


# --- commands ------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    import asyncio

    from eyas.worker.screen import run_on_screen
    from eyas.worker.serve import LocalCluster

    async def until_stopped(cluster: LocalCluster) -> int:
        print("Ctrl-C stops it.", flush=True)
        await asyncio.Event().wait()
        return 0

    try:
        return run_on_screen(serve_config(args, gateway_config(args)), until_stopped)
    except KeyboardInterrupt:
        return 0  # the normal end of a server


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

    return chat(args.url, _key(args), args.temperature)


def _doctor(args: argparse.Namespace) -> int:
    from eyas.worker.doctor import examine

    return examine(args.url, _key(args))


def _demo(args: argparse.Namespace) -> int:
    from eyas.worker.demo import demo

    return demo(own_config(args))


def _bench(args: argparse.Namespace) -> int:
    import asyncio

    from eyas.bench.http import Server
    from eyas.bench.run import bench_own, bench_server, make_plan

    plan = make_plan(args.cases, args.vocab_size, args.both, args.out)
    if args.url:
        return asyncio.run(bench_server(Server(args.url, _key(args)), args.served_model, plan))
    return bench_own(own_config(args), plan)


def _train(args: argparse.Namespace) -> int:
    import logging

    import torch

    from eyas.train.nano import train_nano

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train_nano(Path(args.out), device="cuda" if torch.cuda.is_available() else "cpu", seed=args.seed)
    return 0


def _evals(args: argparse.Namespace) -> int:
    from eyas.evals.nano import Evaluation, evaluate

    return evaluate(Evaluation(args.url, _key(args), args.served_model, args.size, args.parallel, args.seed))


if __name__ == "__main__":
    sys.exit(main())
