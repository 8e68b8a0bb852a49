"""An adapter's folder as an engine reads it: updates of the model, and of its draft head, if there are some.

Those of the head are an adapter of their own, in PEFT's format too, in the folder `draft` beside the model's.
Its modules are named as the head's tensors are stored. They change what is proposed for the adapter's
requests, and never an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eyas.common.errors import InvalidRequest
from eyas.engine.adapters.peft import MatrixCheck, PeftAdapter, read_adapter
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.host_tensors import HostTensors, Room
from eyas.engine.ipc.adapter_messages import DRAFT_FOLDER, LORA_PATH

OF_HEAD = "draft."
"""What stands before the names of the head's matrices."""


@dataclass(frozen=True)
class HeadNames:
    """The draft head that adapters may update: its layers, and the name by which these ask for what is stored
    under one.
    """

    decoder: ModelConfig
    spelling: Callable[[str], str]


@dataclass(frozen=True)
class AdapterReader:
    """Reads adapters of a model, of at most `most_rank`. `head`: None: none runs here that takes updates."""

    model: ModelConfig
    most_rank: int
    head: HeadNames | None = None

    def read(self, folder: Path, check: MatrixCheck, room: Room = HostTensors) -> PeftAdapter:
        """As `read_adapter`. `check` hears of the head's matrices by names that begin with `OF_HEAD`. `room`:
        gives memory for the model's updates; those of the head have their own.

        Raises InvalidRequest for updates of a head where none takes some.
        """
        own = read_adapter(folder, self.model, self.most_rank, check, room=room)
        beside = folder / DRAFT_FOLDER
        if not beside.is_dir():
            return own
        if self.head is None:
            text = f"{beside} updates a draft head, and this worker runs none that takes updates (--draft)"
            raise InvalidRequest(text, param=LORA_PATH)
        read = read_adapter(
            *(beside, self.head.decoder, self.most_rank),
            lambda name, shape: check(OF_HEAD + name, shape),
            self.head.spelling,
        )
        of_head = {OF_HEAD + name: update for name, update in read.updates.items()}
        return PeftAdapter({**own.updates, **of_head}, (*own.contents, *read.contents))
