"""The `eyas` command: it runs one command.

The table of commands has the function that runs each. The code of a command is imported when the command
runs, so `eyas --help` is quick and loads no torch. A flag or folder that cannot work ends the command with
one line on standard error and a non-zero exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import eyas
from eyas.commands import INTERRUPTED, USAGE_ERROR, CommandEntry, CommandParser
from eyas.common.errors import ConfigError, EyasError
from eyas.common.logging import announce, setup
from eyas.common.machine.processes import import_safely, open_standard_files

if TYPE_CHECKING:
    from eyas.common.config import EngineConfig
    from eyas.worker.engine_process import EngineProcess

_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of a disk, wherever a command writes."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the process's exit code. `argv` None: the process's own arguments."""
    # gRPC's own lines say of every peer that leaves that it does. gRPC reads this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if argv is None:
        import_safely()
        open_standard_files()
    try:
        args, unknown = _parser().parse_known_args(argv)
        if unknown:
            args.parser.refuse_unknown(unknown)
        if getattr(args, "log_format", "text") == "json":
            setup(args.command, "json")  # what fails before the command's own is JSON too
        return int(args.run(args))
    except EyasError as error:
        announce(f"eyas: {error}", logging.ERROR)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    except OSError as error:
        if error.errno not in _STORAGE:
            raise
        announce(f"eyas: {error}", logging.ERROR)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


# --- flags ---------------------------------------------------------------------------------------------


def _parser() -> CommandParser:
    # Imported here, where a Ctrl-C is reported as everywhere else.
    from eyas import flags, layout_flags, process_flags
    from eyas.evals.flags import add_eval
    from eyas.peers.reading import MODEL, read
    from eyas.quantize.flags import add_quantize
    from eyas.tool_commands import add_bench, add_certs, add_keys, add_plan, add_train, add_tune

    parser = CommandParser(prog="eyas", description="A disaggregated LLM server.")
    parser.add_argument("--version", action=_VersionAction, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str) -> CommandParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run, parser=added)
        return added

    serve = command("serve", _serve, "start a local cluster and its gateway")
    serve.add_argument(MODEL, nargs="?", help="as `--model`")
    process_flags.add_gateway(serve)
    layout_flags.add_layout(serve)
    layout_flags.add_targets(serve)
    process_flags.add_adapters(serve)
    flags.add_engine(serve)
    worker = command("worker", _worker, "start one worker: a gRPC front and its engine")
    process_flags.add_worker(worker)
    flags.add_engine(worker)
    gateway = command("gateway", _gateway, "start a gateway for workers that run already")
    process_flags.add_gateway_alone(gateway)
    layout_flags.add_gateway_layout(gateway)
    layout_flags.add_targets(gateway)
    flags.add_chat(command("chat", _chat, "talk to a running gateway"))
    _add_doctor(command("doctor", _doctor, "look at a running cluster through its gateway: 0 if all is well"))
    add_plan(command("plan", _plan, "how many workers a load needs, and whether splitting them pays"))
    demo = command("demo", _demo, "start split services, stream one answer, show figures, stop")
    layout_flags.add_layout(demo)
    flags.add_engine(demo)
    for engine in (serve, worker, demo):
        flags.add_tokenizer(engine)
    for server in (serve, worker, gateway, demo):  # their flags may be those of other servers, or in a file
        server.reader = read
        server.add_argument("--config", metavar="FILE", help="YAML: flags as keys; what is typed counts more")
    add_bench(command("bench", None, "measure a server, an engine or its kernels"))
    add_tune(command("tune", None, "find the fastest tiles of a model's products on this GPU"))
    add_quantize(command("quantize", _quantize, "write a model's folder in fewer bits"))
    add_train(command("train", None, "train a draft head, or the embedded model"))
    add_certs(command("certs", _certs, "make the certificates of a cluster"))
    add_keys(command("keys", None, "the file of API keys"))
    add_eval(command("eval", None, "score a running server, or compare two"))
    return parser


def _add_doctor(parser: CommandParser) -> None:
    from eyas import flags, process_flags

    flags.add_server(parser)
    process_flags.add_tls_dir(parser)
    parser.add_commands(
        {
            "head": CommandEntry("look at a draft head, and at how it fits", "eyas.train.doctor"),
            "determinism": CommandEntry("ask the same in different company", "eyas.evals.determinism"),
        }
    )
    parser.set_defaults(run=_doctor)


class _VersionAction(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"eyas {eyas.__version__}")
        parser.exit()


# --- commands ------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    import asyncio

    from eyas.configuration import gateway_config, serve_config

    config = serve_config(args, gateway_config(args))  # flags fail before what runs them is imported
    from eyas.cluster.screen import run_on_screen
    from eyas.cluster.serve import LocalCluster

    async def until_stopped(cluster: LocalCluster) -> int:
        with contextlib.suppress(OSError):  # as all that is printed of a cluster
            print("Ctrl-C stops it.", flush=True)
        await asyncio.Event().wait()
        return 0

    try:
        return run_on_screen(config, until_stopped, notes=args.notes)
    except KeyboardInterrupt:
        return 0  # the normal end of a server


def _worker(args: argparse.Namespace) -> int:
    from eyas.common.machine.processes import die_with_parent
    from eyas.worker.engine_process import EngineProcess

    if args.supervised:
        die_with_parent()
    process = EngineProcess("torch")
    try:
        return _serve_worker(args, process)
    finally:
        process.kill(0.0)


def _serve_worker(args: argparse.Namespace, process: EngineProcess) -> int:
    from eyas.configuration import worker_config

    config = worker_config(args)
    from eyas.cluster.checks import check_engine, check_vocabulary

    check_engine(config.engine)
    if config.engine.tokenizer is not None and not args.supervised:  # else its cluster has looked
        check_vocabulary(config.engine.tokenizer, config.engine.model)
    if not args.supervised:
        _check_room(config.engine)
    _tell(args.notes)
    from eyas.worker.worker import run_worker

    run_worker(config, process=process)
    return 0


def _check_room(engine: EngineConfig) -> None:
    """Raises ConfigError unless a worker alone has room here. (A cluster's launcher looks at its own.)"""
    from eyas.cluster.checks import check_room
    from eyas.common.machine import gpus
    from eyas.common.machine.memory import memory

    known: tuple[int | None, ...] = ()
    if engine.device != "cpu":
        with contextlib.suppress(ConfigError):  # a driver without its tool: the engine looks itself
            known = gpus.memory()
    check_room({"worker": engine}, known, memory())


def _gateway(args: argparse.Namespace) -> int:
    from eyas.common.machine.processes import die_with_parent
    from eyas.configuration import gateway_alone

    if args.supervised:
        die_with_parent()
    config = gateway_alone(args)
    from eyas.cluster.checks import check_gateway
    from eyas.cluster.gateway_group import run_group
    from gateway.main import run_gateway
    from gateway.text.sampling_defaults import chosen_defaults

    check_gateway(config)
    chosen_defaults(config)
    _tell(args.notes)
    if config.processes > 1:
        run_group(config)
    else:
        run_gateway(config)
    return 0


def _tell(notes: Sequence[str]) -> None:
    for note in notes:
        announce(f"eyas: {note}")


def _chat(args: argparse.Namespace) -> int:
    from eyas.client.reach import ServerAddress
    from eyas.client.terminal import chat
    from eyas.configuration import client_key

    return chat(ServerAddress(args.url, client_key(args), args.ca), args.temperature, args.model)


def _doctor(args: argparse.Namespace) -> int:
    from eyas.client.reach import ServerAddress
    from eyas.common.machine.folders import tls_folder
    from eyas.configuration import client_key
    from eyas.doctor import examine

    return examine(ServerAddress(args.url, client_key(args), args.ca), tls_folder(args.tls_dir))


def _plan(args: argparse.Namespace) -> int:
    from eyas.planning.command import plan

    return plan(args)


def _quantize(args: argparse.Namespace) -> int:
    from eyas.quantize.command import quantize

    return quantize(args)


def _certs(args: argparse.Namespace) -> int:
    from pathlib import Path

    from eyas.admin.certs import certs

    return certs(Path(args.folder), args.names, args.days)


def _demo(args: argparse.Namespace) -> int:
    from eyas.cluster.demo import demo
    from eyas.configuration import own_config

    return demo(own_config(args))


if __name__ == "__main__":
    sys.exit(main())
