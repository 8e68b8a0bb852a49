"""Copies on a stream of their own, and memory that is locked, with stand-ins for the GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from eyas.common.errors import ConfigError
from eyas.engine.kv import pinned
from eyas.engine.kv.pinned import copying_on, pin_each


@pytest.mark.parametrize("fails", [False, True])
def test_copies_are_done_when_their_block_ends_however_it_does(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    done = []

    class Event:
        def record(self, stream: object) -> None:
            done.append(("recorded", stream))

        def synchronize(self) -> None:
            done.append("over")

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream = SimpleNamespace(device=0)
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext(), copying_on(stream):  # type: ignore[arg-type]
        if fails:
            raise RuntimeError("out of memory, behind a copy that was launched")
    assert done == [("recorded", stream), "over"]


def test_pieces_are_locked_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that stays locked when it is gone could not be locked again at its place."""
    locked: list[float] = []

    def pin(piece: torch.Tensor) -> None:
        if piece[0] == 4:
            raise ConfigError("there is no more")
        locked.append(piece[0].item())

    monkeypatch.setattr(pinned, "pin", pin)
    monkeypatch.setattr(pinned, "unpin", lambda piece: locked.remove(piece[0].item()))
    pin_each(torch.arange(4).split(2))
    assert locked == [0, 2]
    locked.clear()
    with pytest.raises(ConfigError, match="there is no more"):
        pin_each(torch.arange(6).split(2))
    assert not locked
