"""The engine as its front sees it: commands go down, and every event goes to its one owner.

Each stream or call that the front serves gets a number, and every event about it carries that number. A
request's id inside the engine is `number:id`. So two gateways may use the same id, and a stream that ends
cancels its own requests only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from eyas.common.errors import EyasError, Unavailable
from eyas.common.types import KvKind, TokenEntry
from eyas.engine.ipc.adapter_messages import AdapterLoaded, AdapterUnloaded
from eyas.engine.ipc.messages import (
    CacheFlushed,
    Command,
    DraftDown,
    EngineControlled,
    EngineReady,
    EngineStopped,
    Event,
    LeaseReleased,
    LinkProbed,
    PagesLost,
    PagesStaged,
    PrefillDone,
    PrefillStarted,
    RequestAdmitted,
    RequestFailed,
    RequestRejected,
    StepReply,
    WatchUpdate,
    WeightsAnswer,
    WireFailure,
)
from kv_transfer.area import Pages
from kv_transfer.backends.shm import map_file

LOADING = "the worker is still loading"

Sink = Callable[[Any], None]  # takes an event; never blocks, never raises


def engine_id(number: int, request_id: str) -> str:
    """A request's id inside the engine."""
    return f"{number}:{request_id}"


def wire_id(engine_id: str) -> str:
    """The id that the request's sender chose."""
    return engine_id.partition(":")[2]


class EngineClient:
    """Sends commands and dispatches events. Only the front's event loop uses it.

    `open` refuses streams until `accept` is called, and again after `fail`; `defer` refuses new requests.
    """

    def __init__(self, send: Callable[[Sequence[Command]], None]) -> None:
        self._deliver = send
        self._numbers = itertools.count(1)
        self._owners: dict[int, Sink] = {}
        self._handlers: dict[type, Sink] = {}
        self._refusal: EyasError | None = Unavailable(LOADING)
        self._deferral: EyasError | None = None
        self._ready: EngineReady | None = None
        self._pages: dict[KvKind, Pages] = {}

    @property
    def is_loaded(self) -> bool:
        """True if the engine has described itself."""
        return self._ready is not None

    @property
    def ready(self) -> EngineReady:
        """The engine's description. Raises Unavailable until it is loaded."""
        if self._ready is None:
            raise Unavailable(LOADING)
        return self._ready

    @ready.setter
    def ready(self, ready: EngineReady) -> None:
        """Takes the description of the engine, which is loaded from now on."""
        self._ready = ready

    def pages(self, group: KvKind) -> Pages:
        """The pool of a group, or the staging beside it, mapped into this process when first needed.

        Raises Unavailable until the engine is loaded, TransferFailed if the file is gone.
        """
        if group not in self._pages:
            path, geometry = self.ready.files[group], self.ready.pools[group].geometry
            self._pages[group] = map_file(path, geometry.page_bytes, writable=True).pages
        return self._pages[group]

    def send(self, *commands: Command) -> None:
        """Sends commands to the engine; never waits."""
        self._deliver(commands)

    def check(self) -> None:
        """Raises Unavailable while the engine cannot serve."""
        if self._refusal is not None:
            raise self._refusal

    @property
    def context_length(self) -> int:
        """The most tokens that a new request may have. Raises Unavailable while the engine takes none."""
        self.check()
        if self._deferral is not None:
            raise self._deferral
        return self.ready.context_length

    def open(self, owner: Sink) -> int:
        """A new number; events with it go to `owner`. Raises Unavailable while the engine cannot serve."""
        self.check()
        return self.adopt(owner)

    def adopt(self, owner: Sink) -> int:
        """A new number as `open` gives, also before the engine serves."""
        number = next(self._numbers)
        self._owners[number] = owner
        return number

    def close(self, number: int) -> None:
        """Drops all further events with this number."""
        self._owners.pop(number, None)

    def on(self, kind: type, handler: Sink) -> None:
        """Sends events of `kind` that belong to no stream to `handler`."""
        self._handlers[kind] = handler

    def accept(self) -> None:
        """Lets streams in from now on."""
        self._refusal = None

    def defer(self, error: EyasError | None) -> None:
        """Refuses new requests with `error` from now on, and touches no stream; None: takes them again."""
        self._deferral = error

    def fail(self, error: EyasError) -> None:
        """Tells every owner that the engine is gone, and refuses new streams with `error`."""
        self._refusal = error
        for owner in list(self._owners.values()):
            owner(EngineStopped(WireFailure.of(error)))

    def dispatch(self, events: Sequence[Event]) -> None:
        """Gives each event to its owner. Events of a stream that has ended are dropped."""
        for event in events:
            match event:
                case StepReply():
                    self._handle(event)
                    self._split(event)
                case (
                    RequestAdmitted()
                    | RequestRejected()
                    | PagesLost()
                    | RequestFailed()
                    | PrefillStarted()
                    | PrefillDone()
                ):
                    self._give(int(event.id.partition(":")[0]), event)
                case WatchUpdate():
                    self._give(event.watch, event)
                case (
                    LeaseReleased()
                    | PagesStaged()
                    | LinkProbed()
                    | CacheFlushed()
                    | AdapterLoaded()
                    | AdapterUnloaded()
                    | EngineControlled()
                    | WeightsAnswer()
                ):
                    self._give(event.call, event)
                case DraftDown():
                    self._give(event.peer, event)
                case _:
                    self._handle(event)

    def _split(self, step: StepReply) -> None:
        """Gives each stream a `StepReply` of its own entries."""
        entries: dict[str, list[TokenEntry]] = {}
        for entry in step.entries:
            entries.setdefault(entry.id.partition(":")[0], []).append(entry)
        for number, own in entries.items():
            self._give(int(number), step if len(entries) == 1 else StepReply(tuple(own)))

    def _give(self, number: int, event: Event) -> None:
        owner = self._owners.get(number)
        if owner is not None:  # else its stream has ended
            owner(event)

    def _handle(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)
