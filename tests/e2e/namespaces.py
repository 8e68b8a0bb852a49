"""Two hosts on one machine: network namespaces with addresses of their own, joined by a cable.

It knows `ip`; the process that makes them moves into the second one. It needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000
FAR_ADDRESS, NEAR_ADDRESS = "10.77.0.1", "10.77.0.2"


@dataclass(frozen=True)
class TwoHosts:
    """`far` is the other host; this process is on the near one, with the devices in /sys of neither."""

    far: str
    near: str

    def on_far(self, *command: str) -> list[str]:
        """The command line that runs `command` on the far host."""
        return ["ip", "netns", "exec", self.far, *command]

    def on_near(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host, with its devices in /sys."""
        return ["ip", "netns", "exec", self.near, *command]

    def cable(self, state: str) -> None:
        """Pulls the plug of the far host (`down`), or puts it back (`up`)."""
        _ip("-n", self.far, "link", "set", "cable", state)

    def lose(self, percent: float) -> None:
        """Drops this part of the packets that reach either host over the cable, at random, each of at most a
        packet's size (a kernel without `netem` has `numgen`).
        """
        rule = f"iifname cable numgen random mod 10000 < {round(100 * percent)} drop"
        chain = "add chain inet lossy in { type filter hook input priority 0; }"
        for name in (self.far, self.near):
            _ip("-n", name, "link", "set", "cable", "gso_max_segs", "1")
            for command in ("add table inet lossy", chain, f"add rule inet lossy in {rule}"):
                subprocess.run(["ip", "netns", "exec", name, "nft", command], check=True)

    def slow_down(self, mbit: float) -> None:
        """Lets so many megabits per second over the cable, each way."""
        for name in (self.far, self.near):
            queue = f"qdisc add dev cable root tbf rate {mbit:g}mbit burst 64kb latency 200ms"
            subprocess.run(["tc", "-n", name, *queue.split()], check=True)


def problem() -> str:
    """Why there can be no two hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` is missing (package iproute2)"
    name = f"eyas-{os.getpid()}-try"
    for trial in (["netns", "add", name], ["-n", name, "link", "add", "x", "type", "veth", "peer", "y"]):
        done = subprocess.run(["ip", *trial], capture_output=True, text=True)
        if done.returncode != 0:
            break
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"ip {' '.join(trial)}: {done.stderr.strip()}" if done.returncode != 0 else ""


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Both hosts, and this process (it must have one thread still) on the near one until the end."""
    far, near = (f"eyas-{os.getpid()}-{name}" for name in ("far", "near"))
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, here)
        for name in (far, near):
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", far, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", near)
        for name, address in ((far, FAR_ADDRESS), (near, NEAR_ADDRESS)):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        _enter(f"/run/netns/{near}")
        undo.callback(_enter, f"/proc/self/fd/{here}")
        yield TwoHosts(far, near)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(handle)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
