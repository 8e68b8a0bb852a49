"""A ring of rows beside a channel: both ends map it, or hosts use the channel without one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_gpu import FakeDriver
from shared_child import Child

from eyas.common.errors import ConfigError
from eyas.engine.ipc import row_ring
from eyas.engine.ipc.draft_channel import MailChannel, OfferedChannel, answer
from eyas.engine.ipc.messages import DraftChannel
from eyas.engine.ipc.row_ring import LocalGpu, RowMemory

WIDTH = 4
SHAPE = DraftChannel({}, WIDTH, 6, 3, 32, gpu=b"gpu-a", dtype="bfloat16")


def gpu(name: bytes = b"gpu-a", dtype: str = "bfloat16", **changes: Any) -> LocalGpu:
    return LocalGpu(FakeDriver(name, **changes), dtype, lambda: None)


def agreed(folder: Path, ours: LocalGpu | None, theirs: LocalGpu | None) -> tuple[MailChannel, MailChannel]:
    """The decode engine's end and the draft worker's."""
    offered = OfferedChannel(folder / "mail", SHAPE, ours)
    rows = RowMemory.new(SHAPE, theirs) if theirs is not None else None
    there = answer(msgspec.structs.replace(SHAPE, export=offered.export), WIDTH, str(folder), rows)
    here = offered.accept()
    assert here is not None
    return here, there


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[tuple[MailChannel, MailChannel, LocalGpu, LocalGpu]]:
    ours, theirs = gpu(), gpu(b"gpu-b")
    here, there = agreed(tmp_path, ours, theirs)
    yield here, there, ours, theirs
    here.close()
    there.close()
    assert isinstance(ours.driver, FakeDriver) and ours.driver.mappings == 0


def test_both_ends_see_the_same_rows(channels: tuple[MailChannel, MailChannel, LocalGpu, LocalGpu]) -> None:
    here, there, _, _ = channels
    assert here.rows.ring == there.rows.ring and here.rows.ring.words == WIDTH // 2
    for place, position in ((0, 0), (2, 31), (1, 40)):
        ctypes.memmove(here.rows.address(place, position), b"eight by", 8)
        assert ctypes.string_at(there.rows.address(place, position), 8) == b"eight by"


def test_the_memory_outlives_the_draft_worker_for_its_decode_engine(
    channels: tuple[MailChannel, MailChannel, LocalGpu, LocalGpu],
) -> None:
    """What is written there then is read by none, and writing faults nothing."""
    here, there, _, theirs = channels
    there.rows.close()
    there.rows = None
    assert theirs.driver.mappings == 0
    ctypes.memset(here.rows.address(0), 7, here.rows.ring.nbytes)
    assert ctypes.string_at(here.rows.address(2, 31), 1) == b"\7"


def test_engines_of_one_gpu_agree_where_that_is_asked_for(tmp_path: Path) -> None:
    here, there = agreed(tmp_path, gpu(), replace(gpu(), shared=True))
    assert here.rows.ring == there.rows.ring
    here.close()
    there.close()


def test_kernels_that_were_launched_end_before_the_memory_goes(tmp_path: Path) -> None:
    driver, held = FakeDriver(), []
    waiting = LocalGpu(driver, "bfloat16", lambda: held.append((len(driver.registered), driver.mappings)))
    here, there = agreed(tmp_path, waiting, gpu(b"gpu-b"))
    here.close()
    assert held == [(1, 1), (0, 1)], "the mailbox, then the ring"
    assert (driver.registered, driver.mappings) == ({}, 0)
    there.close()


@pytest.mark.parametrize(
    ("changes", "theirs", "reason"),
    [
        ({}, lambda: None, "no GPU"),
        ({}, lambda: gpu(dtype="float16"), "bfloat16"),
        ({}, gpu, "the same GPU"),
        ({"places": 0}, lambda: gpu(b"gpu-b"), "none"),
        ({"rows": 10**6}, lambda: gpu(b"gpu-b"), "GiB"),
        ({}, lambda: gpu(b"gpu-b", sees=(b"gpu-b",)), "does not see"),
    ],
)
def test_where_there_can_be_no_ring_it_says_why(
    changes: dict[str, int],
    theirs: Callable[[], LocalGpu | None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_ring, "MOST_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match=reason):
        RowMemory.new(msgspec.structs.replace(SHAPE, **changes), theirs())


def test_without_a_gpu_of_the_draft_worker_hosts_share_their_memory(tmp_path: Path) -> None:
    here, there = agreed(tmp_path, gpu(), None)
    assert here.rows is None and here.mailbox.place.width == WIDTH and not here.gone
    here.close()
    there.close()


@pytest.mark.parametrize("ours", [gpu(), None], ids=["cannot be mapped", "not asked for"])
def test_a_ring_that_cannot_be_used_is_no_answer(
    tmp_path: Path, ours: LocalGpu | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowMemory, "size", property(lambda rows: rows.ring.nbytes - 1))
    with pytest.raises(ConfigError, match="not as large|not asked for"):
        agreed(tmp_path, ours, gpu(b"gpu-b"))


CHILD = """
import msgspec, time
sys.path.insert(0, sys.argv[3])
from fake_gpu import FakeDriver
from eyas.engine.ipc.draft_channel import answer
from eyas.engine.ipc.messages import DraftChannel
from eyas.engine.ipc.row_ring import LocalGpu, RowMemory
offer = msgspec.json.decode(sys.argv[1], type=DraftChannel)
rows = RowMemory.new(offer, LocalGpu(FakeDriver(b"gpu-b"), "bfloat16", lambda: None))
there = answer(offer, 4, sys.argv[2], rows)
print("up", flush=True)
time.sleep(60)
"""


def test_a_draft_worker_that_is_killed_leaves_memory_to_write_to(tmp_path: Path) -> None:
    ours = gpu()
    offered = OfferedChannel(tmp_path / "mail", SHAPE, ours)
    offer = msgspec.json.encode(msgspec.structs.replace(SHAPE, export=offered.export)).decode()
    with Child(CHILD, offer, str(tmp_path), str(Path(__file__).parent)) as child:
        assert child.line() == "up"
        here = offered.accept()
        assert here is not None and here.rows is not None
        child.kill()
    ctypes.memset(here.rows.address(0), 9, here.rows.ring.nbytes)
    here.listen()
    assert here.gone
    here.close()
    assert isinstance(ours.driver, FakeDriver) and ours.driver.mappings == 0
