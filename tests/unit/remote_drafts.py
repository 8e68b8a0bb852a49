"""Decode engines whose drafts come from a draft engine, and the rounds that had some."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.common.config import EngineConfig
from eyas.common.types import Role
from eyas.engine.loop.drafting import DraftWait
from tests.unit.device_engines import PATIENCE_S, on_device
from tests.unit.loopback import Result


def apart(plain: EngineConfig, *, device_drafter: bool = False) -> tuple[EngineConfig, EngineConfig]:
    """A decode engine on the device, and a draft worker that is or is not."""
    device = on_device(plain)
    drafter = device if device_drafter else plain
    return (
        replace(device, roles=(Role.DECODE,), worker="decode"),
        replace(drafter, roles=(Role.DRAFT,), worker="draft"),
    )


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted step has run when it is launched: it seems to take no time, so none bears waiting."""
    monkeypatch.setattr(DraftWait, "seconds", PATIENCE_S / 3)


def rounds_with_drafts(results: list[Result]) -> tuple[int, int]:
    """Rounds that verified drafts, and how many of these were accepted."""
    entries = [entry for result in results for entry in result.entries if entry.offered]
    return len(entries), sum(entry.accepted for entry in entries)
