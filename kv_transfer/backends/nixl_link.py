"""One agent's link to one peer: it counts once bytes have come over it, in time, into memory of its own.

    GREETING ──one page, then a probe, came──> OPEN ──a READ failed or was late──> BROKEN
        └────────────────failed, late─────────────────────────────────────────────────^

A greeting that hangs costs no page of the pool, so a copy that waits for it is told at its deadline. The
library does not say which path UCX took: the log gives the rate of the probe instead.
"""

from __future__ import annotations

import enum
import logging
import math
import weakref
from dataclasses import dataclass

from eyas.common.errors import EyasError, TransferFailed
from kv_transfer.backends.base import PeerSource
from kv_transfer.backends.nixl_agent import NixlAgent, ReadFate, RemotePages

GREET_S = 10.0  # from the first contact to the last byte of the probe
PROBE_BYTES = 16 * 2**20

_log = logging.getLogger("eyas.pulls")


class LinkPhase(enum.Enum):
    """The state of a link; the module's picture shows the ways between them."""

    GREETING = "greeting"
    OPEN = "open"
    BROKEN = "broken"


@dataclass(eq=False)
class NixlPeer(PeerSource):
    """An opened peer. Its link lives as long as this object, or a READ over it.

    `is_staging`: its pages are slots beside a device's pool, which hold nothing unless it is asked.
    """

    remote: RemotePages
    is_staging: bool = False
    gone: bool = False

    @property
    def current(self) -> bool:
        return not self.gone


class NixlLink:
    """A link to `remote`, by `agent`. Times are monotonic seconds.

    `reads`: the pulls' own READs over it that have not stopped. `at_fault`: it broke, and not because the
    peer was gone or late.
    """

    def __init__(self, agent: NixlAgent, remote: RemotePages, now: float) -> None:
        self.agent = agent
        self.remote = remote
        self.phase = LinkPhase.GREETING
        self.error: EyasError | None = None
        self.at_fault = False
        self.reads = 0
        self.peers: weakref.WeakSet[NixlPeer] = weakref.WeakSet()  # who may still ask for more
        self.pages: int | None = None  # the peer's, as `agent` calls them
        self._since = now
        self._posted = now
        self._greeting: int | None = None  # the READ of it that runs
        self._probed = 0  # pages; of the probe, once it has begun
        self._begin(now)

    @property
    def idle(self) -> bool:
        """Whether no READ of it runs."""
        return self.reads == 0 and self._greeting is None

    def step(self, now: float) -> None:
        """Follow the greeting."""
        if self._greeting is not None:
            fate, why = self.agent.fate(self._greeting)
            if fate is not ReadFate.RUNNING:
                self.agent.release(self._greeting)
                self._greeting = None
                self._greeted(fate, why, now)
        if self.phase is LinkPhase.GREETING and now >= self._since + GREET_S:
            self.broke(TransferFailed(f"the peer's NIXL agent has not answered within {GREET_S:g} s"))

    def stopped(self, fate: ReadFate, why: str) -> EyasError:
        """A READ over it failed: what to say of it."""
        if fate is ReadFate.PARTED:
            for peer in self.peers:
                peer.gone = True
        error = TransferFailed(f"a NIXL READ failed: {why}")
        self.broke(error, at_fault=fate is ReadFate.BROKEN)
        return error

    def broke(self, error: EyasError, *, at_fault: bool = False) -> None:
        """Breaks the link: nothing more begins over it."""
        if self.phase is not LinkPhase.BROKEN:
            self.phase, self.error, self.at_fault = LinkPhase.BROKEN, error, at_fault

    def close(self) -> None:
        """Forget the peer; only an idle link can."""
        assert self.idle, "the library would tell no more of READs that run"
        if self.pages is not None:
            self.agent.disconnect(self.remote, self.pages)

    def _begin(self, now: float) -> None:
        try:
            self.pages = self.agent.connect(self.remote)
            self._read(1, now)
        except EyasError as error:
            self.broke(error, at_fault=True)

    def _read(self, count: int, now: float) -> None:
        """Reads the last page `count` times: in a pool it is the proof page, which needs no lease."""
        assert self.pages is not None
        proof = self.remote.memory.pages - 1
        self._posted = now
        self._greeting = self.agent.read(self.pages, (proof,) * count, (self.agent.scratch,) * count)

    def _greeted(self, fate: ReadFate, why: str, now: float) -> None:
        if fate is not ReadFate.DONE:
            self.stopped(fate, why)
        elif self.phase is LinkPhase.GREETING and self._probed:
            self._open(now)
        elif self.phase is LinkPhase.GREETING:
            self._probed = max(1, PROBE_BYTES // self.remote.memory.page_bytes)
            try:
                self._read(self._probed, now)
            except EyasError as error:
                self.broke(error, at_fault=True)

    def _open(self, now: float) -> None:
        """(The probe may be over when its post returns, so its seconds begin before that.)"""
        self.phase = LinkPhase.OPEN
        seconds = now - self._posted
        rate = self._probed * self.remote.memory.page_bytes / seconds / 1e9 if seconds > 0 else math.inf
        _log.info("NIXL reads from %s at %.2f GB/s", self.remote.agent, rate)
