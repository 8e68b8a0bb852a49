"""What a rank above 0 has of adapters, where a folder holds one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eyas.common.errors import InvalidRequest
from eyas.engine.device import calls
from eyas.engine.device.adapters import DeviceAdapters, FollowerAdapters

FOLDER = Path("/adapters/my own")


@dataclass
class Slots:
    """Slots of a device. `contents`: what a folder holds each time that it is read, "": it is wrong."""

    contents: list[str]
    inside: dict[int, str] = field(default_factory=dict)

    def read(self, folder: Path) -> Any:
        if not (name := self.contents.pop(0)):
            raise InvalidRequest("it is wrong", param="lora_path")
        return SimpleNamespace(id=name)

    def fill(self, slot: int, adapter: Any) -> Callable[[], bool]:
        self.inside[slot] = adapter.id
        return lambda: True


def _following(*contents: str) -> tuple[Slots, FollowerAdapters]:
    """Slots, and adapters that were read as often as there are contents."""
    slots = Slots(list(contents))
    adapters = FollowerAdapters(cast("DeviceAdapters", slots))
    for _ in contents:
        adapters.announce(FOLDER)
    return slots, adapters


def test_an_adapter_serves_on_when_its_folder_holds_another() -> None:
    slots, adapters = _following("old", "", "new")
    adapters.fill(1, FOLDER, "old")
    adapters.fill(2, FOLDER, "new")
    assert slots.inside == {1: "old", 2: "new"}
    adapters.forget(FOLDER, "old")
    adapters.fill(1, FOLDER, "new")
    assert slots.inside == {1: "new", 2: "new"}
    with pytest.raises(RuntimeError, match="has changed"):
        adapters.fill(1, FOLDER, "old")


def test_what_was_read_twice_is_forgotten_once_at_a_time() -> None:
    slots, adapters = _following("a", "a")
    adapters.forget(FOLDER, "a")
    adapters.fill(1, FOLDER, "a")
    adapters.forget(FOLDER, "a")
    adapters.forget(FOLDER, "a")  # as of a rank that has read another
    with pytest.raises(RuntimeError, match="has changed"):
        adapters.fill(1, FOLDER, "a")


def test_other_ranks_hear_which_adapter_of_a_folder_is_meant() -> None:
    call = calls.fill_adapter(3, FOLDER, "0123abcd")
    assert call.numbers == (3,) and calls.adapter_of(call) == (FOLDER, "0123abcd")
    assert calls.adapter_of(calls.forget_adapter(FOLDER, "0123abcd")) == (FOLDER, "0123abcd")
    assert calls.folder_of(calls.read_adapter(FOLDER)) == FOLDER
