"""The bindings of NIXL, played: agents of one process, whose READs end when the test says so.

As in the library, a READ that runs writes all of its bytes, whatever is asked of it meanwhile. What must not
be asked (to forget one that runs, or its peer) is noted in `wrong`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np


class nixlRemoteDisconnectError(Exception): ...


class nixlBackendError(Exception): ...


class nixlCancelledError(Exception): ...


class nixlNotPostedError(Exception): ...


class nixlNotFoundError(Exception): ...


@dataclass
class Read:
    """`status`: None (not posted), "PROC", "DONE", "ERR", or an exception."""

    agent: FakeAgent
    peer: str
    pairs: list[tuple[int, int, int]]  # addresses: from, to; bytes
    status: Any = None

    def land(self) -> None:
        for src, dst, size in self.pairs:
            ctypes.memmove(dst, src, size)
        self.status = "DONE"


@dataclass
class FakeNixl:
    """`hold`: READs stay running until `let_go`. `faults`: how many posts fail from now on."""

    hold: bool = False
    faults: int = 0
    dead: set[str] = field(default_factory=set)
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # what the library must never be asked
    threads: dict[str, set[int]] = field(default_factory=dict)  # who called which agent

    NIXL_SUCCESS, NIXL_IN_PROG, NIXL_ERR = "DONE", "PROC", "ERR"
    NIXL_READ, DRAM_SEG, NIXL_INIT_AGENT, NIXL_THREAD_SYNC_NONE = "READ", "DRAM", "NIXL_INIT_AGENT", "NONE"
    VRAM_SEG = "VRAM"
    nixlRemoteDisconnectError = nixlRemoteDisconnectError
    nixlBackendError = nixlBackendError
    nixlCancelledError = nixlCancelledError
    nixlNotPostedError = nixlNotPostedError
    nixlAgentConfig = SimpleNamespace

    def nixlRegDList(self, segment: str, rows: list[tuple[int, int, int, str]]) -> list:
        return [(segment, *row) for row in rows]

    def nixlAgent(self, name: str, config: Any) -> FakeAgent:
        assert config.pthrDelay > 0, "the progress thread would spin"
        self.agents[name] = FakeAgent(self, name)
        return self.agents[name]

    @property
    def running(self) -> list[Read]:
        return [read for read in self.reads if read.status == "PROC"]

    def let_go(self) -> None:
        """All READs run to their ends, and so do later ones."""
        self.hold = False
        for read in self.running:
            read.land()

    def kill(self, name: str) -> None:
        """The agent's process dies: READs from it break."""
        self.dead.add(name)
        for read in self.running:
            if read.peer == name:
                read.status = nixlRemoteDisconnectError("REMOTE_DISCONNECT")


@dataclass(eq=False)
class FakeAgent:
    nixl: FakeNixl
    name: str
    options: dict[str, str] = field(default_factory=dict)  # of its backend
    ranges: list[tuple[str, int, int, int]] = field(default_factory=list)  # segment, from, to, device
    known: set[str] = field(default_factory=set)
    handles: dict[int, Any] = field(default_factory=dict)
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1))

    def _called(self) -> None:
        self.nixl.threads.setdefault(self.name, set()).add(threading.get_ident())

    def createBackend(self, name: str, options: dict[str, str]) -> int:
        assert name == "UCX"
        self.options = options
        return 1

    def registerMem(self, rows: list[tuple[str, int, int, int, str]]) -> None:
        self.ranges += [(kind, address, address + size, device) for kind, address, size, device, _ in rows]

    def getLocalMD(self) -> bytes:
        return self.name.encode()

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        self._called()
        if metadata.decode() in self.nixl.dead:
            raise nixlBackendError("BACKEND")
        assert metadata.decode() not in self.known, "NOT_ALLOWED: a name that is known"
        self.known.add(metadata.decode())
        return metadata

    def invalidateRemoteMD(self, name: str) -> None:
        self.known.remove(name)
        for read in self.nixl.running:
            if (read.agent, read.peer) == (self, name):
                self.nixl.wrong.append("a peer was forgotten while a READ from it ran")

    def prepXferDlist(self, peer: str, segment: str, rows: np.ndarray, backends: list) -> int:
        owner = self if peer == "NIXL_INIT_AGENT" else self.nixl.agents[peer]
        blocks = []
        for address, size, device, stride, count in rows.tolist():
            end = address + stride * count
            there = [(a, b) for kind, a, b, at in owner.ranges if (kind, at) == (segment, device)]
            assert any(a <= address and end <= b for a, b in there)
            blocks += [(address + stride * i, size) for i in range(count)]
        return self._handle((peer, blocks))

    def releasedDlistH(self, handle: int) -> None:
        del self.handles[handle]

    def makeXferReq(self, op: str, mine: int, dst: np.ndarray, theirs: int, src: np.ndarray) -> int:
        self._called()
        (_, here), (peer, there) = self.handles[mine], self.handles[theirs]
        pairs = [(there[s][0], here[d][0], here[d][1]) for s, d in zip(src, dst, strict=True)]
        assert (src >= 0).all() and (dst >= 0).all() and src.dtype == dst.dtype == np.int32
        return self._handle(Read(self, peer, pairs))

    def postXferReq(self, handle: int) -> None:
        read = self.handles[handle]
        self.nixl.reads.append(read)
        if read.peer in self.nixl.dead:
            read.status = nixlRemoteDisconnectError("REMOTE_DISCONNECT")
            raise read.status
        if self.nixl.faults > 0:
            self.nixl.faults -= 1
            read.status = nixlBackendError("BACKEND")
            raise read.status
        read.status = "PROC"
        if not self.nixl.hold:
            read.land()

    def getXferStatus(self, handle: int) -> str:
        self._called()
        status = self.handles[handle].status
        if isinstance(status, Exception):
            raise status
        return status

    def releaseXferReq(self, handle: int) -> None:
        if self.handles.pop(handle).status == "PROC":
            self.nixl.wrong.append("a READ that ran was forgotten")

    def _handle(self, what: Any) -> int:
        number = next(self.numbers)
        self.handles[number] = what
        return number
