"""Listening sockets: a given port, or a clear error."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from eyas.common.errors import ConfigError


def listen(host: str, port: int, flag: str, shared: bool = False) -> socket.socket:
    """A listening socket, which the caller owns. Raises ConfigError, which names `flag`, if that fails.

    `shared`: other processes that say so may listen there too.
    """
    with _naming(host, port, flag):
        return socket.create_server((host, port), family=_family(host), backlog=1024, reuse_port=shared)


def claim(host: str, port: int, flag: str) -> socket.socket:
    """A socket that keeps a port for processes that share it, and takes no connections; the caller owns it.

    Raises ConfigError, which names `flag`, if somebody listens there already.
    """
    listen(host, port, flag).close()
    with _naming(host, port, flag):
        claimed = socket.socket(_family(host))
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        claimed.bind((host, port))
        return claimed


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@contextlib.contextmanager
def _naming(host: str, port: int, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--{flag}: cannot listen on {host}:{port}: {reason}", param=flag) from error
