"""Listening sockets, at a given port or with a clear error, and free ports for processes that start later."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from eyas.common.cluster.names import join
from eyas.common.errors import ConfigError

BACKLOG = 1024  # connections that wait to be accepted; a server made of the socket states it again
FIRST = 20000
BLOCK = 64
"""Ports that a process takes at a time."""

_KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")


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


@functools.cache
def free_ports() -> Iterator[int]:
    """Ports that are free now, each once: the same iterator for everything in this process.

    No other process gets one of them here before this one has ended. Nor does the kernel give them to
    connections, so a server may come late, and come again. Raises ConfigError when none is left.
    """
    return filter(_is_free, itertools.chain.from_iterable(_blocks()))


def _blocks() -> Iterator[range]:
    """Blocks of ports, of which each is held by a name in this process's network until the process ends.

    Blocks that the kernel takes ports from for connections come last.
    """
    first, last = map(int, _KERNELS.read_text().split())
    starts = list(range(FIRST, 2**16 - BLOCK, BLOCK))
    random.SystemRandom().shuffle(starts)  # a port that has just been another's may have late callers
    starts.sort(key=lambda start: first < start + BLOCK and start <= last)
    with contextlib.ExitStack() as stack:
        for start in starts:
            name = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                name.bind(f"\0eyas-ports-{start}")
            except OSError:
                name.close()
                continue
            yield range(start, start + BLOCK)
        raise ConfigError("no port of this host is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        return True
    return False
