"""Which engines' pages travel, and what stands beside their pools."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.types import KvKind, Role
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.pool import KvPool
from eyas.engine.loading.build import build_engine
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.travel import STAGED_BYTES, PageTransfer, travel
from kv_transfer import layout
from kv_transfer.host_files import LOCK
from kv_transfer.windows import AT_ONCE
from tests.unit.loopback import QueueLink

ALL = tuple(Role)


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return EngineSpec.of(EngineConfig(pool_dir=str(tmp_path), num_pages=300))


class Made:
    """What travels of a pool that is in no file."""

    def __init__(self, spec: EngineSpec, **changes: object) -> None:
        self.spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, **changes))
        self.pool = KvPool(self.spec.shape(KvKind.TARGET))
        self.travel: PageTransfer = travel(self.spec, {KvKind.TARGET: self.pool}, EventOutbox())

    @property
    def slots(self) -> tuple[int, int]:
        """On the way out, and in."""
        return self.travel.outlets[KvKind.TARGET].slots.total, self._inlet.slots.total

    @property
    def _inlet(self):
        return self.travel.copiers[KvKind.TARGET]._landing  # type: ignore[attr-defined]

    def close(self) -> None:
        assert all([copier.close(time.monotonic() + 5.0) for copier in self.travel.copiers.values()])
        self.pool.close()


@pytest.fixture
def made(spec: EngineSpec) -> Iterator[list[Made]]:
    found: list[Made] = []
    yield found
    for one in found:
        one.close()
    assert [path for path in Path(spec.config.pool_dir).iterdir() if path.suffix != LOCK] == []


@pytest.mark.parametrize(
    ("roles", "out", "back"),
    [
        ((Role.PREFILL,), True, False),
        ((Role.DECODE,), False, True),
        ((Role.DECODE, Role.DRAFT), False, True),
        (ALL, True, True),
    ],
)
def test_staging_is_for_the_ways_that_the_roles_take(
    spec: EngineSpec, made: list[Made], roles: tuple[Role, ...], out: bool, back: bool
) -> None:
    made.append(Made(spec, roles=roles))
    assert made[0].travel.possible
    window = layout.window_pages(made[0].pool.shape.page_bytes)
    fits = min(STAGED_BYTES // made[0].pool.shape.page_bytes, 300)
    each = max(AT_ONCE * window, fits)
    assert made[0].slots == (each * out, each * back)


def test_staging_is_a_number_of_bytes_and_no_part_of_the_pool(
    spec: EngineSpec, made: list[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = spec.shape(KvKind.TARGET).page_bytes
    monkeypatch.setattr("eyas.engine.loading.travel.STAGED_BYTES", 10 * page)
    for window, slots in ((1, 10), (3, 3 * AT_ONCE), (8, 8 * AT_ONCE)):
        monkeypatch.setattr(layout, "WINDOW_BYTES", window * page)
        made.append(Made(spec, num_pages=300))
        assert made[-1].slots == (slots, slots)
    made.append(Made(spec, num_pages=3000))
    assert made[-1].slots == (8 * AT_ONCE, 8 * AT_ONCE)


def test_nothing_stands_beside_a_pool_whose_pages_stay(spec: EngineSpec, made: list[Made]) -> None:
    made.append(Made(spec, transfer="none"))
    there = made[0].travel
    assert not there.possible and (there.layouts, there.outlets, there.infos, there.files) == ({}, {}, {}, {})
    assert [path for path in Path(spec.config.pool_dir).iterdir() if path.suffix != LOCK] == []


def test_pages_of_a_file_stay_too(spec: EngineSpec) -> None:
    config = dataclasses.replace(spec.config, transfer="none")
    still = dataclasses.replace(spec, config=config)
    pool = still.pool(KvKind.TARGET)
    assert not travel(still, {KvKind.TARGET: pool}, EventOutbox()).possible
    pool.close()


@pytest.mark.parametrize("roles", [(Role.PREFILL,), (Role.DECODE,), (Role.DRAFT,)])
def test_a_worker_that_needs_others_lets_its_pages_travel(spec: EngineSpec, roles: tuple[Role, ...]) -> None:
    config = dataclasses.replace(spec.config, transfer="none", roles=roles)
    with pytest.raises(ConfigError, match="--transfer: none, but only a worker with all roles"):
        build_engine(config, QueueLink(lambda event: None))
