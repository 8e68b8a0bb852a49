"""One NIXL agent: the calls of the library that the backend `nixl` needs, and the links to its peers.

A link counts once bytes have come over it, in time, into memory of its own.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import logging
import math
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from eyas.common.errors import ConfigError, EyasError, TransferFailed
from kv_transfer.area import DeviceSlots, PoolArea
from kv_transfer.backends.base import PeerSource
from kv_transfer.layout import part_places, parts_per_slot

_ONE_AT_A_TIME = threading.Lock()  # agents of one process that are made side by side may hang
_LISTEN_US = 100_000  # the most that the library's progress thread sleeps; bytes from a peer wake it before
_UCX = {"engine_config": "RCACHE_MAX_UNRELEASED=1024"}  # else its cache of registrations grows for ever
GREET_S = 10.0  # from the first contact to the last byte of the probe
PROBE_BYTES = 16 * 2**20
JUDGED_BYTES = 64 * 2**20  # of the probe of a link with a floor, and of READs that are held to it together
LONG_BYTES = 8 * 2**20  # of a READ that is held to the floor: shorter ones end sooner than they are looked at
OVERLAP = 8  # times as many bytes, where READs still run that brought some which are not counted yet
PROBES = 3  # of such a link, until one is fast enough: others may use it

_log = logging.getLogger("eyas.pulls")


class ReadFate(enum.Enum):
    """The state of a READ. In all but RUNNING it has stopped: it writes no more."""

    RUNNING = "running"
    DONE = "done"
    BROKEN = "broken"
    PARTED = "parted"  # broken, because the peer is gone


@dataclass(frozen=True)
class NixlMemory:
    """Pages as the library addresses them. `device`: the number of the GPU that has them; None: the host."""

    address: int
    page_bytes: int
    pages: int
    device: int | None = None

    def each(self, width: int) -> int:
        """Blocks of `width` bytes that a page has: in the host's memory its beginning alone."""
        return 1 if self.device is None else parts_per_slot(self.page_bytes, width)

    def places(self, pages: Sequence[int], width: int, parts: int) -> tuple[int, ...]:
        """The blocks of `pages` that this number of parts takes."""
        return part_places(pages, self.each(width), parts)

    def rows(self, width: int) -> list[list[int]]:
        """One row: address, bytes, device, stride and count of its blocks of `width` bytes."""
        each = self.each(width)
        return [[self.address, width, self.device or 0, self.page_bytes // each, self.pages * each]]

    @property
    def whole(self) -> tuple[int, int, int, str]:
        """Address, bytes and device of all of it, and no name."""
        return self.address, self.page_bytes * self.pages, self.device or 0, ""


@dataclass(frozen=True)
class OwnPages:
    """Pages of ours, and a page of `scratch` behind them, for bytes that mean nothing. `kept`: their owners,
    for as long as the library knows the addresses.
    """

    memory: NixlMemory
    scratch: NixlMemory
    kept: tuple[object, ...]

    @classmethod
    def in_host(cls, area: PoolArea) -> OwnPages:
        """An area in host memory."""
        count, size = area.pages.shape
        scratch = np.zeros(size, np.uint8)
        memory = NixlMemory(area.pages.ctypes.data, size, count)
        return cls(memory, NixlMemory(scratch.ctypes.data, size, 1), (area, scratch))

    @classmethod
    def on_device(cls, slots: DeviceSlots) -> OwnPages:
        """Slots of a GPU."""
        size, device = slots.page_bytes, slots.device
        memory = NixlMemory(slots.address, size, slots.slots, device)
        behind = NixlMemory(slots.address + slots.slots * size, size, 1, device)
        return cls(memory, behind, (slots.memory,))

    def rows(self, width: int) -> list[list[int]]:
        """The rows of the pages, and then of the scratch."""
        return self.memory.rows(width) + self.scratch.rows(width)


@dataclass(frozen=True)
class RemotePages:
    """A peer's pages, by what its export said. `agent` names one incarnation of the peer.

    `floor`: bytes per second under which READs have taken another way than they should; 0: any will do.
    """

    agent: str
    metadata: bytes
    memory: NixlMemory
    floor: float = 0.0


class RemoteBlocks(NamedTuple):
    """Blocks of a peer's pages, of `width` bytes each, by the library's `name` of them."""

    name: int
    width: int


def load() -> Any:
    """The library's bindings. Raises ConfigError without them."""
    try:
        importlib.import_module("nixl")
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise ConfigError(f"nixl cannot be imported: {error} (pip install eyas[nixl])") from error


class NixlAgent:
    """An agent over pages of `own`, as owner and as reader. One thread makes all calls; every error is an
    EyasError. `cards`: the network cards that the library may use; none: any.

    It is made of the bindings, because the library's Python class lets the progress thread spin: that
    takes a core per agent, and with a delay it waits for events instead.
    """

    def __init__(self, bindings: Any, own: Sequence[OwnPages], cards: Sequence[str] = ()) -> None:
        self.name = f"eyas-{secrets.token_hex(8)}"
        self.own = own
        self._nixl = bindings
        with _ONE_AT_A_TIME, _plain("no NIXL agent can be made", ConfigError):
            config = bindings.nixlAgentConfig()
            config.useProgThread, config.pthrDelay = True, _LISTEN_US
            config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
            self._agent = bindings.nixlAgent(self.name, config)
            chosen = {"device_list": ", ".join(cards)} if cards else {}
            self._agent.createBackend("UCX", _UCX | chosen)
            for pages in own:
                for memory in (pages.memory, pages.scratch):
                    rows = bindings.nixlRegDList(self._segment(memory), [memory.whole])
                    self._agent.registerMem(rows)
        self._places: dict[tuple[int, int], int] = {}  # the library's names of our pages, by whose and width

    def metadata(self) -> bytes:
        """The metadata with which a peer's agent reaches this one."""
        with _plain("the NIXL agent cannot describe itself"):
            return bytes(self._agent.getLocalMD())

    def connect(self, remote: RemotePages) -> None:
        """Make a peer known. Nothing is sent."""
        with _plain("NIXL does not know the peer"):
            name = self._agent.loadRemoteMD(remote.metadata)
            if name.decode() != remote.agent:
                self._agent.invalidateRemoteMD(name.decode())
                raise TransferFailed(f"the peer's NIXL metadata is that of {name!r}, not of {remote.agent}")

    def pages(self, remote: RemotePages, width: int) -> RemoteBlocks:
        """The name for `read` of the blocks of `width` bytes of a known peer's pages."""
        with _plain("NIXL does not know the peer's pages"):
            rows = np.array(remote.memory.rows(width), np.uint64)
            segment = self._segment(remote.memory)
            return RemoteBlocks(int(self._agent.prepXferDlist(remote.agent, segment, rows, [])), width)

    def disconnect(self, remote: RemotePages, pages: Iterable[RemoteBlocks]) -> None:
        """Forget a peer none of whose READs runs: those would be told of no more, and write all the same."""
        with contextlib.suppress(EyasError), _plain("NIXL cannot forget the peer"):
            for blocks in pages:
                self._agent.releasedDlistH(blocks.name)
            self._agent.invalidateRemoteMD(remote.agent)

    def read(self, pages: RemoteBlocks, src: tuple[int, ...], dst: tuple[int, ...], own: int = 0) -> int:
        """Begin a READ of pages `src` of a peer into `dst` of ours, of those numbered `own`; gives its name
        for `fate`.

        The library joins pages that follow each other on both sides. It may block as long as the copy takes.
        A failure to begin is its fate.
        """
        with _plain("NIXL cannot prepare a READ"):
            here, there = np.array(dst, np.int32), np.array(src, np.int32)
            mine = self._here(own, pages.width)
            handle = int(self._agent.makeXferReq(self._nixl.NIXL_READ, mine, here, pages.name, there))
        with contextlib.suppress(EyasError), _plain("NIXL cannot begin a READ"):
            self._agent.postXferReq(handle)
        return handle

    def fate(self, handle: int) -> tuple[ReadFate, str]:
        """Whether a READ runs, or how it stopped and why.

        An error that does not say that it stopped does not mean so: then it still runs.
        """
        nixl = self._nixl
        try:
            status = self._agent.getXferStatus(handle)
        except nixl.nixlRemoteDisconnectError:
            return ReadFate.PARTED, "the peer is gone"
        except (nixl.nixlBackendError, nixl.nixlCancelledError, nixl.nixlNotPostedError) as error:
            return ReadFate.BROKEN, f"{error}"
        except Exception as error:
            return ReadFate.RUNNING, f"{error}"
        if status == nixl.NIXL_SUCCESS:
            return ReadFate.DONE, ""
        return (
            (ReadFate.RUNNING, "") if status == nixl.NIXL_IN_PROG else (ReadFate.BROKEN, f"status {status}")
        )

    def _here(self, own: int, width: int) -> int:
        """The name of the blocks of `width` bytes of our pages."""
        if (own, width) not in self._places:
            pages, here = self.own[own], self._nixl.NIXL_INIT_AGENT
            rows, segment = np.array(pages.rows(width), np.uint64), self._segment(pages.memory)
            self._places[own, width] = self._agent.prepXferDlist(here, segment, rows, [])
        return self._places[own, width]

    def _segment(self, memory: NixlMemory) -> Any:
        return self._nixl.DRAM_SEG if memory.device is None else self._nixl.VRAM_SEG

    def release(self, handle: int) -> None:
        """Forget a READ that has stopped. (One that runs would write all its bytes nevertheless.)"""
        with contextlib.suppress(EyasError), _plain("NIXL cannot forget a READ"):
            self._agent.releaseXferReq(handle)


@contextlib.contextmanager
def _plain(what: str, kind: type[EyasError] = TransferFailed) -> Iterator[None]:
    """The library's errors in the project's own kind, which begin with `what`."""
    try:
        yield
    except EyasError:
        raise
    except Exception as error:
        raise kind(f"{what}: {error!r}") from error


class LinkPhase(enum.Enum):
    """The state of a link; the module's picture shows the ways between them."""

    GREETING = "greeting"
    OPEN = "open"
    BROKEN = "broken"


@dataclass(eq=False)
class NixlPeer(PeerSource):
    """An opened peer. Its link lives as long as this object, or a READ over it.

    `is_staging`: its pages are slots beside a device's pool, which hold nothing unless it is asked.
    `direct`: READs land in our device's pool itself.
    """

    remote: RemotePages
    is_staging: bool = False
    on_device: bool = False
    gone: bool = False
    direct: bool = False

    @property
    def current(self) -> bool:
        return not self.gone


@dataclass
class ReadPace:
    """Bytes of long READs that ended, and the seconds in which some ran. Times are monotonic seconds."""

    running: int = 0
    bytes: int = 0
    seconds: float = 0.0
    _since: float = 0.0  # of what `seconds` does not have yet

    def began(self, now: float) -> None:
        """One more runs."""
        self.count(now)
        self.running += 1

    def ended(self, size: int, now: float) -> None:
        """One has ended, of `size` bytes. (Where it failed, its link is broken, and judged no more.)"""
        self.count(now)
        self.running -= 1
        self.bytes += size

    def count(self, now: float) -> None:
        """`seconds` go up to now."""
        if self.running:
            self.seconds += now - self._since
        self._since = now


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
        self._pace = ReadPace()
        self.peers: weakref.WeakSet[NixlPeer] = weakref.WeakSet()  # who may still ask for more
        self._pages: dict[tuple[NixlMemory, int], RemoteBlocks] = {}  # the peer's, and how much of each
        self._known = False
        self._since = now
        self._posted = now
        self._greeting: int | None = None  # the READ of it that runs
        self._probed = 0  # pages; of the probe, once it has begun
        self._probes = 0
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

    def began(self, size: int, now: float) -> None:
        """A READ of a pull runs, of `size` bytes."""
        self.reads += 1
        if size >= LONG_BYTES:
            self._pace.began(now)

    def ended(self, size: int, now: float) -> None:
        """It has stopped."""
        self.reads -= 1
        if size >= LONG_BYTES:
            self._pace.ended(size, now)

    def hold(self) -> None:
        """Holds the link to its floor, by all that it carried since the last verdict, in windows or whole,
        and for whomever: its READs share it. A link that came below takes no more.
        """
        pace = self._pace
        if pace.bytes < JUDGED_BYTES * (OVERLAP if pace.running else 1):
            return
        slow = self.judge(pace.bytes, pace.seconds)
        pace.bytes, pace.seconds = 0, 0.0
        if slow is not None and self.phase is LinkPhase.OPEN:
            _log.warning("%s", slow.message)
            self.broke(slow)

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
        if self._known:
            self.agent.disconnect(self.remote, self._pages.values())

    def blocks(self, memory: NixlMemory, width: int) -> RemoteBlocks:
        """The blocks of `width` bytes of the peer's `memory`, for the agent."""
        if (memory, width) not in self._pages:
            self._pages[memory, width] = self.agent.pages(replace(self.remote, memory=memory), width)
        return self._pages[memory, width]

    def _begin(self, now: float) -> None:
        try:
            self.agent.connect(self.remote)
            self._known = True
            self._read(1, now)
        except EyasError as error:
            self.broke(error, at_fault=True)

    def _read(self, count: int, now: float) -> None:
        """Reads the last page `count` times: in a pool it is the proof page, which needs no lease."""
        memory, ours, width = self.remote.memory, self.agent.own[0].memory, self._probe_width
        last, scratch = memory.pages * memory.each(width) - 1, ours.pages * ours.each(width)
        self._posted = now
        self._greeting = self.agent.read(self.blocks(memory, width), (last,) * count, (scratch,) * count)

    @property
    def _probe_width(self) -> int:
        """Bytes of a page that there and here have."""
        return min(self.remote.memory.page_bytes, self.agent.own[0].memory.page_bytes)

    def _greeted(self, fate: ReadFate, why: str, now: float) -> None:
        if fate is not ReadFate.DONE:
            self.stopped(fate, why)
        elif self.phase is LinkPhase.GREETING and self._probed:
            self._measured(now)
        elif self.phase is LinkPhase.GREETING:
            self._probe(now)

    def _probe(self, now: float) -> None:
        size = JUDGED_BYTES if self.remote.floor else PROBE_BYTES
        self._probed = max(1, size // self._probe_width)
        self._probes += 1
        try:
            self._read(self._probed, now)
        except EyasError as error:
            self.broke(error, at_fault=True)

    def _measured(self, now: float) -> None:
        """(The probe may be over when its post returns, so its seconds begin before that.)"""
        size, seconds = self._probed * self._probe_width, now - self._posted
        slow = self.judge(size, seconds)
        if slow is None:
            self.phase = LinkPhase.OPEN
            _log.info("NIXL reads from %s at %.2f GB/s", self.remote.agent, _rate(size, seconds) / 1e9)
        elif self._probes < PROBES:
            self._probe(now)
        else:
            self.broke(slow)

    def judge(self, size: int, seconds: float) -> TransferFailed | None:
        """What is wrong with `size` bytes in as many seconds, if anything is."""
        rate = _rate(size, seconds)
        if rate >= self.remote.floor:
            return None
        least = f"{rate / 1e9:.2f} GB/s, where {self.remote.floor / 1e9:.2f} are the least that RDMA gives"
        return TransferFailed(f"READs come at {least}: the library takes another way, or the link is ill")


def _rate(size: int, seconds: float) -> float:
    """Bytes per second."""
    return size / seconds if seconds > 0 else math.inf
