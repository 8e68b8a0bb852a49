"""Listening sockets: free ports for workers, and a given port or a clear error."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator

from eyas.common.errors import ConfigError


def free_ports() -> Generator[int, None, None]:
    """Yields ports that are free now. They are held until the iterator is closed, so that none repeats."""
    with contextlib.ExitStack() as held:
        while True:
            listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            yield listener.getsockname()[1]


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket, which the caller owns. Raises ConfigError, which names `flag`, if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--{flag}: cannot listen on {host}:{port}: {reason}", param=flag) from error
