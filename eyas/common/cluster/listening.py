"""Listening sockets: a given port, or a clear error."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from eyas.common.cluster.address import join
from eyas.common.errors import ConfigError

BACKLOG = 1024  # connections that wait to be accepted; who makes a server of a socket says it again


def listen(host: str, port: int, flag: str, shared: bool = False) -> socket.socket:
    """A listening socket, which the caller owns. Raises ConfigError, which names `flag`, if that fails.

    `shared`: other processes that say so may listen there too. `::` is every address of IPv4 too.
    """
    with _naming(host, port, flag):
        family = _family(host)
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, reuse_port=shared, dualstack_ipv6=both
        )


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
    """IPv4 for a name that has both."""
    families = {family for family, *_ in socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6


@contextlib.contextmanager
def _naming(host: str, port: int, flag: str) -> Iterator[None]:
    """Reports errors of listening with the flag's name; of an address that is not here, as --host's."""
    try:
        yield
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            flag = "host"
        reason = str(error.strerror or error).partition(" (while")[0]  # without the address again
        raise ConfigError(f"--{flag}: cannot listen on {join(host, port)}: {reason}", param=flag) from error
