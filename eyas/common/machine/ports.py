"""Free ports for processes that start later."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from eyas.common.errors import ConfigError

FIRST = 20000
BLOCK = 64
"""Ports that a process takes at a time."""

_KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
