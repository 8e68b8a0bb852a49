"""What a rank above 0 has of adapters, where a folder holds one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eyas.common.errors import InvalidRequest
from eyas.engine.device import calls
from eyas.engine.device.adapters import DeviceAdapters, FollowerAdapters, LeaderAdapters
from eyas.engine.parallel.leader import RankLeader
from eyas.engine.parallel.ranks import RankCall, RankChannel

FOLDER = Path("/adapters/my own")


@dataclass
class Channel:
    """What a rank above 0 answers."""

    answers: list[tuple[int, bytes]] = field(default_factory=list)

    def answer(self, number: int, data: bytes = b"") -> None:
        self.answers.append((number, data))


@dataclass
class Slots:
    """Slots of a device. `contents`: what a folder holds each time that it is read, "": it is wrong."""

    contents: list[str]
    inside: dict[int, str] = field(default_factory=dict)
    slots: int = 0
    awaited: dict[int, str] = field(default_factory=dict)  # what was inside when steps had to wait for it

    def read(self, folder: Path) -> Any:
        if not (name := self.contents.pop(0)):
            raise InvalidRequest("it is wrong", param="lora_path")
        return SimpleNamespace(id=name)

    def fill(self, slot: int, adapter: Any) -> Callable[[], bool]:
        self.inside[slot] = adapter.id
        return lambda: True

    def wait(self) -> None:
        self.awaited = dict(self.inside)


def _following(*contents: str) -> tuple[Slots, FollowerAdapters]:
    """Slots, and adapters that were read as often as there are contents."""
    slots, channel = Slots(list(contents)), Channel()
    adapters = FollowerAdapters(cast("DeviceAdapters", slots), cast("RankChannel", channel), lambda: None)
    for number in range(len(contents)):
        adapters.read(number, FOLDER)
    adapters._reader.shutdown()
    assert channel.answers == [(number, name.encode()) for number, name in enumerate(contents)]
    return slots, adapters


def test_an_adapter_serves_on_when_its_folder_holds_another() -> None:
    slots, adapters = _following("old", "", "new")
    adapters.fill(1, FOLDER, "old")
    adapters.fill(2, FOLDER, "new")
    assert slots.inside == {1: "old", 2: "new"}
    adapters.forget(FOLDER, "old")
    adapters.fill(1, FOLDER, "new")
    assert slots.inside == {1: "new", 2: "new"}
    with pytest.raises(AssertionError, match="rank 0 has heard"):
        adapters.fill(1, FOLDER, "old")


def test_steps_wait_for_a_slot_that_is_filled() -> None:
    """Rank 0 has steps read it once its own copy is there, and this rank's may take longer."""
    slots, adapters = _following("one", "two")
    for slot, name in ((1, "one"), (2, "two")):
        adapters.fill(slot, FOLDER, name)
        assert slots.awaited == slots.inside and slots.awaited[slot] == name


def test_what_was_read_twice_is_forgotten_once_at_a_time() -> None:
    slots, adapters = _following("a", "a")
    adapters.forget(FOLDER, "a")
    adapters.fill(1, FOLDER, "a")
    adapters.forget(FOLDER, "a")
    adapters.forget(FOLDER, "a")  # as of a rank that has read another
    with pytest.raises(AssertionError, match="rank 0 has heard"):
        adapters.fill(1, FOLDER, "a")


def test_a_folder_that_is_read_again_holds_up_no_other_call() -> None:
    """What the other ranks do meanwhile waits for this one."""
    slots, going_on = Slots(["a", "b"]), threading.Event()
    first, channel = slots.read, Channel()

    def slow(folder: Path) -> Any:
        assert len(slots.contents) > 1 or going_on.wait(20)
        return first(folder)

    slots.read = slow  # type: ignore[method-assign]
    adapters = FollowerAdapters(cast("DeviceAdapters", slots), cast("RankChannel", channel), lambda: None)
    adapters.read(1, FOLDER)
    adapters._reader.submit(lambda: None).result(20)
    adapters.read(2, FOLDER)
    adapters.fill(1, FOLDER, "a")
    adapters.forget(FOLDER, "b")
    assert slots.inside == {1: "a"} and channel.answers == [(1, b"a")]
    going_on.set()
    adapters._reader.shutdown()
    adapters.fill(2, FOLDER, "b")
    assert slots.inside == {1: "a", 2: "b"} and channel.answers[1:] == [(2, b"b")]


@dataclass
class Leader:
    """Other ranks that read these names. `sent`: the rank, the kind and the name of calls."""

    names: list[str]
    sent: list[tuple[int, str, str]] = field(default_factory=list)

    def ask(self, call: RankCall) -> int:
        return 7

    def answers(self, number: int, wait_s: float) -> list[bytes]:
        assert number == 7
        return [name.encode() for name in self.names]

    def tell_one(self, rank: int, call: RankCall) -> None:
        self.sent.append((rank, call.kind, calls.adapter_of(call)[1]))


@pytest.mark.parametrize("others", [["new", "new"], ["old", "new"], ["old", ""]])
@pytest.mark.parametrize("own", ["old", ""])
def test_an_adapter_that_not_all_ranks_have_read_is_refused(own: str, others: list[str]) -> None:
    """Its folder changed between two of them; each forgets what it has read itself, since it may have had the
    other for long, and all serve on.
    """
    leader = Leader(others)
    slots = cast("DeviceAdapters", Slots([own], slots=2))
    adapters = LeaderAdapters(slots, cast("RankLeader", leader))
    with pytest.raises(InvalidRequest, match="changed while it was read" if own else "it is wrong"):
        adapters.read(FOLDER)
    assert leader.sent == [
        (rank, calls.FORGET_ADAPTER, name) for rank, name in enumerate(others, start=1) if name
    ]


def test_an_adapter_that_all_ranks_have_read_is_taken() -> None:
    leader = Leader(["one", "one"])
    adapters = LeaderAdapters(cast("DeviceAdapters", Slots(["one"], slots=2)), cast("RankLeader", leader))
    assert (adapters.read(FOLDER).id, leader.sent) == ("one", [])


def test_other_ranks_hear_which_adapter_of_a_folder_is_meant() -> None:
    call = calls.fill_adapter(3, FOLDER, "0123abcd")
    assert call.numbers == (3,) and calls.adapter_of(call) == (FOLDER, "0123abcd")
    assert calls.adapter_of(calls.forget_adapter(FOLDER, "0123abcd")) == (FOLDER, "0123abcd")
    assert calls.folder_of(calls.read_adapter(FOLDER)) == FOLDER
