"""Copies on a stream of their own, with a stand-in for the GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from eyas.engine.kv.pinned import copying_on


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
