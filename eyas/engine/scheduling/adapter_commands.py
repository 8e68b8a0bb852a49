"""The front's commands about adapters, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eyas.common.errors import Busy, EyasError, InvalidRequest
from eyas.common.wire.message import WireFailure
from eyas.engine.adapters.table import AdapterTable
from eyas.engine.ipc.adapter_messages import (
    LORA_PATH,
    AdapterCounts,
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from eyas.engine.ipc.outbox import EventOutbox


@dataclass(frozen=True)
class AdapterCommands:
    """`table`: None where no adapter can be loaded. `away`: the memory of weights and slots has left."""

    table: AdapterTable | None
    outbox: EventOutbox
    away: Callable[[], bool]

    def load(self, command: LoadAdapter) -> None:
        """Begins to read a folder; one `AdapterLoaded` follows."""
        refusal: EyasError | None = None
        if self.table is None:
            refusal = InvalidRequest("no adapter can be loaded here (--max-loras 0)", param=LORA_PATH)
        elif self.away():  # its factors take gains of the weights
            refusal = Busy("it sleeps: its weights must be resumed first (/resume_memory_occupation)")
        else:
            self.table.load(command)
        if refusal is not None:
            self.outbox.add(AdapterLoaded(command.call, failure=WireFailure.of(refusal)))

    def unload(self, command: UnloadAdapter) -> None:
        """Answered at once."""
        if self.table is None:
            self.outbox.add(AdapterUnloaded(command.call))
        else:
            self.outbox.add(self.table.unload(command))

    def poll(self) -> None:
        """Answers for what has been read by now."""
        if self.table is not None:
            self.outbox.add(*self.table.poll())

    @property
    def busy(self) -> bool:
        """True while something is being read or copied."""
        return self.table is not None and self.table.busy

    def counts(self, waiting: int) -> AdapterCounts:
        """As of the table. `waiting`: sequences that wait for a slot."""
        return AdapterCounts() if self.table is None else self.table.counts(waiting)
