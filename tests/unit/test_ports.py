"""Ports: who gets which, and what is said of one that is taken."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.common.cluster import listening
from eyas.common.cluster.listening import BLOCK, free_ports, listen
from eyas.common.errors import ConfigError

TAKE_200 = """
import itertools, random, sys
from eyas.common.cluster.listening import free_ports
random.SystemRandom.shuffle = lambda *_: None
print("up", flush=True)
sys.stdin.readline()
print(*itertools.islice(free_ports(), 200), flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[Any]:
    """Killed at the end, if not before."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_no_two_processes_get_the_same_port() -> None:
    """They take them at once, begin at the same place, and listen on none; a third one comes later."""
    command, both = [sys.executable, "-c", TAKE_200], []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            both.append(stack.enter_context(ending(process)))
        for process in both:
            assert process.stdout.readline() == "up\n"
        for process in both:
            process.stdin.write("\n")
            process.stdin.flush()
        taken = [int(port) for process in both for port in process.stdout.readline().split()]
        taken += itertools.islice(free_ports(), 200)
    assert len(taken) == len(set(taken)) == 600


def test_connections_get_none_of_them() -> None:
    """Else one could have a server's port by the time that it starts, or starts again."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in itertools.islice(free_ports(), BLOCK) if first <= port <= last]


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_one_that_a_server_has_is_passed_over(host: str) -> None:
    port = next(free_ports())
    with socket.create_server((host, port + 1)):
        assert next(free_ports()) != port + 1


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="--port: cannot listen on 127.0.0.1:"):
            listen("127.0.0.1", taken.getsockname()[1], "port")


@pytest.mark.parametrize("host", ["300.1.1.1", "no-such-host.invalid", "[::1]", "192.0.2.1"])
def test_an_address_that_is_not_here_is_the_hosts_fault(host: str) -> None:
    with pytest.raises(ConfigError, match="--host: cannot listen on") as refused:
        listen(host, 0, "port")
    assert refused.value.param == "host"


def test_a_host_without_a_free_port_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "FIRST", 2**16)
    with pytest.raises(ConfigError, match="no port of this host is free"):
        next(listening._blocks())


def test_every_address_is_that_of_both_families() -> None:
    """As gRPC binds `::` of a worker."""
    with listen("::", 0, "port") as listener:
        port = listener.getsockname()[1]
        for family, host in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")):
            with socket.socket(family) as caller:
                caller.settimeout(5.0)
                caller.connect((host, port))
    for host in ("::1", "127.0.0.1"):
        with listen(host, 0, "port") as listener:
            assert listener.getsockname()[0] == host
