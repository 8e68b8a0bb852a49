"""The messages between a worker's front and its engine that are about adapters: a part of `messages`.

The engine has adapters by their ids. Their names, and which of them are to be loaded, are the front's.
"""

from __future__ import annotations

import msgspec

from eyas.common.wire.message import TaggedMessage, WireFailure

LORA_PATH = "lora_path"
"""The field of a caller's request that names an adapter's folder: at fault where the folder is."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files of a folder in PEFT's format that are read: what it says of its factors, and these."""

DRAFT_FOLDER = "draft"
"""The folder of an adapter that updates the draft head: it has the same files."""

# --- commands -----------------------------------------------------------------------------------------


class LoadAdapter(TaggedMessage, frozen=True):
    """Reads the adapter in the folder `path` into the host's memory. The answer is one `AdapterLoaded`.

    `name`: for messages. `id`: what it has to be, else it is refused; "": whatever it is. One that is loaded
    already is not read again, but may become `pinned`, or no longer be: its slot on the device then is, or is
    not, for others to take.
    """

    call: int
    path: str
    name: str
    id: str = ""
    pinned: bool = False


class UnloadAdapter(TaggedMessage, frozen=True):
    """Refuses new requests for the adapter from now on. The answer is one `AdapterUnloaded`, at once.

    Its memory is freed once the requests that it has are at their end. One that is not loaded is no failure.
    """

    call: int
    id: str


# --- events -------------------------------------------------------------------------------------------


class AdapterLoaded(TaggedMessage, frozen=True):
    """The answer to `LoadAdapter`: what the folder holds. `failure`: why it was refused; nothing changed.

    Failures are of the folder's content or the engine's limits (InvalidRequest, its `param` "lora_path"), of
    a folder that is not there (NotFound), or of memory (Overloaded).
    """

    call: int
    id: str = ""
    rank: int = 0
    host_bytes: int = 0
    failure: WireFailure | None = None


class AdapterUnloaded(TaggedMessage, frozen=True):
    """The answer to `UnloadAdapter`."""

    call: int


class AdapterCounts(msgspec.Struct, frozen=True, array_like=True):
    """Adapters of an engine, as a part of its load.

    `slots`: ids of those on the device. `waiting`: requests that wait for a slot. `running`: those in the
    batch, by id. Running totals: `loads`, copies from the host's memory into slots, and `seconds` of them.
    """

    slots: tuple[str, ...] = ()
    waiting: int = 0
    running: dict[str, int] = {}
    loads: int = 0
    seconds: float = 0.0
    host_bytes: int = 0
