"""Several gateway processes on the same ports: starts them, restarts the ones that die, and ends them all.

The kernel assigns each new connection to one of them (SO_REUSEPORT). They share the registry's snapshot of
the workers, and a folder of sockets for queries between them (`gateway.http.siblings`). The limits of a
gateway apply to each process. Each one runs `eyas gateway`, as the single gateway of a local cluster does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial

from eyas.cluster.child import ChildProcess, LogLine, keep
from eyas.cluster.plan import gateway_argv
from eyas.common import logging as eyas_logging
from eyas.common.cluster.discovery import registry
from eyas.common.cluster.listening import claim
from eyas.common.config import SHARED_MEMORY, GatewayConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.folders import SharedFolder
from eyas.common.machine.leave import StopSignals
from eyas.common.machine.processes import python_module
from eyas.common.security import api_keys, secret_urls
from eyas.common.security.tls import caller_context, service_tls
from gateway.http.siblings import SUFFIX
from gateway.main import warn_if_open
from gateway.text.tokenizer import Tokenizer

PREFIX = "eyas-gateway-"
GRACE_S = 5.0  # after the drain time
_logger = logging.getLogger("eyas.gateway")


def run_group(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT; then open requests have `drain_s` seconds to finish.

    A second signal, or SIGHUP, ends it immediately. Raises ConfigError for a bad port, registry, tokenizer
    or certificate.
    """
    eyas_logging.setup("gateway", config.log_format, config.log_level)
    warn_if_open(config)
    if config.key_limits is not None:
        text = "each of %d gateway processes counts what keys use: a key may have up to %d times its limits"
        _logger.warning(text, config.processes, config.processes)
    # The configuration is checked here, so that an error is reported once, before any process starts.
    registry(config.registry, ca=config.registry_ca, cluster=config.cluster)
    Tokenizer.load(config.texts.folder, template=config.chat_template)
    service_tls(config.tls_dir)
    if config.certificate is not None:
        caller_context(config.certificate)
    asyncio.run(_run(config))


async def _run(config: GatewayConfig) -> None:
    leave = StopSignals()
    log = partial(_line, config.log_format == "json")
    with _members(config, log) as children:
        keepers = []
        try:
            for child in children:
                child.start()
                keepers.append(asyncio.create_task(keep(child, log)))
            await leave.requested.wait()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await _stop(children, leave, config.drain_s)


@contextlib.contextmanager
def _members(config: GatewayConfig, log: LogLine) -> Iterator[list[ChildProcess]]:
    """The processes, not yet started. Their ports and socket folder are reserved until the context ends."""
    with contextlib.ExitStack() as claims:
        http = claims.enter_context(claim(config.host, config.port, "port"))
        grpc = claims.enter_context(claim(config.host, config.grpc_port, "grpc-port"))
        folder = _socket_folder()
        claims.callback(folder.leave)
        config = dataclasses.replace(config, port=http.getsockname()[1], grpc_port=grpc.getsockname()[1])
        keys = api_keys.environment(config.api_keys)
        environment = secret_urls.environment(keys, {"registry": config.registry})
        children = []
        for number in range(config.processes):
            name = f"gateway-{number}"
            member = dataclasses.replace(config, processes=1, member=str(folder.path / f"{name}{SUFFIX}"))
            command = python_module("eyas.cli", *gateway_argv(member))
            children.append(ChildProcess(name, command, log, environment))
        yield children


def _socket_folder() -> SharedFolder:
    """A new folder for the sockets of the group; also removes the folders of killed groups."""
    try:
        return SharedFolder(SHARED_MEMORY, PREFIX)
    except OSError as error:
        raise ConfigError(f"no socket can be made in {SHARED_MEMORY}: {error.strerror}") from None


async def _stop(children: list[ChildProcess], leave: StopSignals, drain_s: float) -> None:
    """Stops all processes, and kills those that still run after their drain time."""

    async def forward_second_signal() -> None:
        await leave.now.wait()
        for child in children:
            if child.running and child.pid is not None:
                os.kill(child.pid, signal.SIGHUP)

    forwarding = asyncio.create_task(forward_second_signal())
    await asyncio.gather(*(child.stop(drain_s + GRACE_S) for child in children))
    forwarding.cancel()


def _line(json: bool, name: str, line: str) -> None:
    sys.stderr.write((eyas_logging.as_record(name, line) if json else line) + "\n")  # whole: threads share it
