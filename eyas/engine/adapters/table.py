"""The adapters of an engine: which are in the host's memory, and which of them have a slot on the device.

A slot is taken from the adapter that was used least recently of those that no sequence runs with and that are
not pinned. Folders are read, and slots filled, beside steps: nothing here waits for either.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from eyas.common.errors import EngineError, EyasError, InvalidRequest, NotFound, Overloaded
from eyas.common.wire.message import WireFailure
from eyas.engine.ipc.adapter_messages import (
    LORA_PATH,
    AdapterCounts,
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from eyas.engine.ipc.pulse import Beat, no_pulse

_log = logging.getLogger("eyas.engine")


class StoredAdapter(Protocol):
    """An adapter in the host's memory, as the memory of slots has read it."""

    @property
    def id(self) -> str:
        """As of `eyas.common.types.Adapter`."""

    @property
    def rank(self) -> int:
        """The largest of its updates."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory."""


class AdapterMemory(Protocol):
    """The slots of a device, numbered from 1 on: 0 is that of rows without an adapter."""

    @property
    def slots(self) -> int:
        """The number of them."""

    def read(self, folder: Path) -> StoredAdapter:
        """The adapter in a folder, in the host's memory; called by a thread of its own.

        Raises an EyasError for what cannot be served.
        """

    def renew(self, adapter: Any) -> None:
        """The model's weights have changed: makes an adapter, as `read` gave it, what it would read now. No
        step runs, and no copy. Raises an EyasError for what cannot be served any more.
        """

    def forget(self, adapter: Any) -> None:
        """An adapter, as `read` gave it, is not needed any more."""

    def fill(self, slot: int, adapter: Any) -> Callable[[], bool]:
        """Begins to copy an adapter, as `read` gave it, into a slot, behind the steps that were launched.
        True of what it returns: steps that are launched now may read it.
        """


@dataclass
class HostAdapter:
    """An adapter in the host's memory. `slot`: on the device; 0: none. `filled`: says whether that is there;
    None: it is. `users`: sequences that run with it, or will.
    """

    stored: StoredAdapter
    pinned: bool = False
    leaving: bool = False
    slot: int = 0
    filled: Callable[[], bool] | None = None
    began: float = 0.0
    users: int = 0

    @property
    def ready(self) -> bool:
        """True if steps that are launched now may read it."""
        return self.slot > 0 and self.filled is None


@dataclass
class AdapterTable:
    """Used by the engine's thread. `has_requests`: says whether the engine has requests for an id."""

    memory: AdapterMemory
    has_requests: Callable[[str], bool] = lambda _: False
    loads: int = 0  # copies into slots, ever ..
    seconds: float = 0.0  # .. and how long they took
    _adapters: dict[str, HostAdapter] = field(default_factory=dict)
    _seated: dict[str, HostAdapter] = field(default_factory=dict)  # with a slot, the last used one last
    _reading: list[tuple[LoadAdapter, Future[StoredAdapter]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = list(range(self.memory.slots, 0, -1))
        self._reader = ThreadPoolExecutor(1, "adapters")

    # --- the front's commands --------------------------------------------------------------------------

    def load(self, command: LoadAdapter) -> None:
        """Begins to read a folder; one `AdapterLoaded` follows, by `poll`."""
        self._reading.append((command, self._reader.submit(self.memory.read, Path(command.path))))

    def unload(self, command: UnloadAdapter) -> AdapterUnloaded:
        """Refuses new requests for it from now on, and frees it once there are no others."""
        if (adapter := self._adapters.get(command.id)) is not None:
            adapter.leaving = True
        return AdapterUnloaded(command.call)

    def poll(self) -> list[AdapterLoaded]:
        """Looks what has been read and copied, and frees what is not needed any more; the answers."""
        if not (self._adapters or self._reading):
            return []
        for adapter in self._seated.values():
            self._look(adapter)
        for name in [name for name, each in self._adapters.items() if each.leaving and not each.users]:
            if not self.has_requests(name):
                adapter = self._adapters.pop(name)
                self._vacate(adapter)
                self.memory.forget(adapter.stored)
        read = [(command, future) for command, future in self._reading if future.done()]
        self._reading = [pair for pair in self._reading if pair not in read]
        return [self._loaded(command, future) for command, future in read]

    @property
    def busy(self) -> bool:
        """True while something is being read or copied."""
        return bool(self._reading) or any(each.filled is not None for each in self._seated.values())

    def _loaded(self, command: LoadAdapter, future: Future[StoredAdapter]) -> AdapterLoaded:
        try:
            stored = future.result()
        except EngineError:  # a rank is lost, and the engine with it
            raise
        except EyasError as error:
            return AdapterLoaded(command.call, failure=WireFailure.of(error))
        except (MemoryError, RuntimeError) as error:  # RuntimeError: of pinned memory
            failure = Overloaded(f"no memory for the adapter in {command.path}: {error}")
            return AdapterLoaded(command.call, failure=WireFailure.of(failure))
        except Exception as error:  # nothing in a folder may end the engine
            _log.exception("the adapter in %s could not be read", command.path)
            unread = EyasError(f"{type(error).__name__}: {error}")
            return AdapterLoaded(command.call, failure=WireFailure.of(unread))
        return self._added(command, stored)

    def _added(self, command: LoadAdapter, stored: StoredAdapter) -> AdapterLoaded:
        """Takes what was read, unless it is refused or there already."""
        try:
            if command.id and command.id != stored.id:
                text = f"the adapter in {command.path} is {stored.id}, and {command.id} was to be loaded"
                raise InvalidRequest(text, param=LORA_PATH)
            self._check_pinned(stored.id, command)
        except InvalidRequest as error:
            self.memory.forget(stored)
            return AdapterLoaded(command.call, failure=WireFailure.of(error))
        adapter = self._adapters.setdefault(stored.id, HostAdapter(stored))
        if adapter.stored is not stored:
            self.memory.forget(stored)
        adapter.pinned, adapter.leaving = command.pinned, False
        return AdapterLoaded(command.call, stored.id, stored.rank, stored.host_bytes)

    def _check_pinned(self, name: str, command: LoadAdapter) -> None:
        """Raises InvalidRequest if pinned adapters would leave no slot for the others."""
        others = [one for known, one in self._adapters.items() if known != name and not one.leaving]
        pinned, slots = sum(one.pinned for one in others) + 1, self.memory.slots
        if command.pinned and pinned >= slots:
            text = f"{pinned} pinned adapters leave no slot of {slots} for the others (--max-loras)"
            raise InvalidRequest(text, param=LORA_PATH)

    def renew(self, beat: Beat = no_pulse) -> None:
        """The model's weights have changed: renews all adapters, and fills their slots again. Nothing is
        `busy`, and no sequence is in. `beat`: is called after each.
        """
        for name, adapter in self._adapters.items():
            try:
                self.memory.renew(adapter.stored)
            except EyasError as error:
                _log.warning("adapter %s is served no more, by the new weights: %s", name, error)
                adapter.leaving = True
            else:
                if adapter.slot:
                    self._fill(adapter)
            beat()

    # --- sequences -------------------------------------------------------------------------------------

    def check(self, name: str) -> None:
        """Raises NotFound if a new request for it is refused."""
        adapter = self._adapters.get(name)
        if name and (adapter is None or adapter.leaving):
            raise NotFound(f"no adapter {name} is loaded", param="model")

    def seat(self, name: str) -> bool:
        """Begins to fill a slot with an adapter that has none. False: none can be taken now."""
        adapter = self._adapters[name]
        if adapter.slot:
            return True
        if not self._free and not self._evict():
            return False
        adapter.slot = self._free.pop()
        self._seated[name] = adapter
        self._fill(adapter)
        return True

    def ready(self, name: str) -> bool:
        """True if steps that are launched now may read it."""
        return self._adapters[name].ready

    def enter(self, name: str) -> int:
        """A sequence more runs with it; its slot, which stays until that has left."""
        adapter = self._seated[name] = self._seated.pop(name)
        adapter.users += 1
        return adapter.slot

    def leave(self, name: str) -> None:
        """A sequence less runs with it."""
        self._adapters[name].users -= 1

    @property
    def on_device(self) -> list[str]:
        """Those that have a slot, the least recently used first."""
        return list(self._seated)

    @property
    def movable(self) -> list[str]:
        """Those of them whose slot may become another's, once their sequences have left."""
        return [name for name, adapter in self._seated.items() if not adapter.pinned]

    def counts(self, waiting: int) -> AdapterCounts:
        """What the engine says of them. `waiting`: sequences that wait for a slot."""
        running = {name: each.users for name, each in self._seated.items() if each.users}
        size = sum(each.stored.host_bytes for each in self._adapters.values())
        return AdapterCounts(tuple(sorted(self.on_device)), waiting, running, self.loads, self.seconds, size)

    def close(self) -> None:
        """Reads no more."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _fill(self, adapter: HostAdapter) -> None:
        """Begins to copy it into its slot."""
        adapter.began = time.monotonic()
        adapter.filled = self.memory.fill(adapter.slot, adapter.stored)
        self._look(adapter)

    def _look(self, adapter: HostAdapter) -> None:
        """Looks whether its copy has ended."""
        if adapter.filled is not None and adapter.filled():
            adapter.filled = None
            self.loads += 1
            self.seconds += time.monotonic() - adapter.began

    def _evict(self) -> bool:
        for name in self.movable:
            adapter = self._seated[name]
            if not adapter.users and adapter.filled is None:
                self._vacate(adapter)
                return True
        return False

    def _vacate(self, adapter: HostAdapter) -> None:
        if adapter.slot:
            del self._seated[adapter.stored.id]
            self._free.append(adapter.slot)
            adapter.slot, adapter.filled = 0, None
