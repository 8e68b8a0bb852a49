"""Tensors of an update that cannot be read: named, and nobody waits for them."""

from __future__ import annotations

import gc
import itertools
import os
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from eyas.common.errors import InvalidRequest
from eyas.common.weights import BytesSource, GroupSource, SharedSource, Source, TensorMeta
from eyas.engine.checkpoint.host_tensors import ALIGNED, LayeredFile, laid_out, pieces, read_bytes
from eyas.engine.loading.weight_sources import SHARED_MEMORY, WeightSources

pytestmark = pytest.mark.usefixtures("one_thread")


class SilentGroup:
    """Nothing is ever broadcast."""

    on_device = False

    def broadcast(self, tensor: torch.Tensor) -> None:
        raise AssertionError("no memory is taken for what the host has no room for")


@pytest.fixture
def pipe() -> Iterator[Path]:
    path = SHARED_MEMORY / f"pipe-{uuid.uuid4()}"
    os.mkfifo(path)
    yield path
    path.unlink()


def refusal(source: Source) -> InvalidRequest:
    sources: Any = WeightSources("cpu")
    sources._groups["group"] = SilentGroup()
    with pytest.raises(InvalidRequest) as refused:
        sources.read(source)
    assert refused.value.param == source.param
    return refused.value


def test_a_pipe_is_not_waited_for(pipe: Path) -> None:
    assert "is no file" in refusal(SharedSource((str(pipe),))).message


@pytest.mark.parametrize(
    "path", ["/dev/shm/a\0b", "/dev/shm/" + "x" * 5000, "/dev/shm", "/dev/shm/../../etc/passwd"]
)
def test_a_path_that_is_none(path: str) -> None:
    refusal(SharedSource((path,)))


def test_digests_are_of_all_files_or_of_none() -> None:
    """Else some would be compared with nothing."""
    sources = WeightSources("cpu")
    with pytest.raises(InvalidRequest, match="one of each file") as refused:
        sources.read(SharedSource(("/dev/shm/a", "/dev/shm/b"), ("00",)))
    assert refused.value.param == "digests"


@pytest.mark.parametrize(
    "header",
    [
        b"[1]",
        b"[" * 100_000,
        b'{"a": []}',
        b'{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_header_that_is_none(header: bytes) -> None:
    refusal(BytesSource((len(header).to_bytes(8, "little") + header + bytes(4),)))


@pytest.mark.parametrize("size", [10**14, 10**30])
def test_more_than_the_host_has_room_for(size: int) -> None:
    message = refusal(GroupSource("group", (TensorMeta("a", "F32", (size,)),))).message
    assert "GiB of tensors" in message


def test_memory_is_locked_in_pieces_of_whole_tensors() -> None:
    """No copy may reach from one into the next, and pages of two pieces differ."""
    mib = 2**20
    sizes = [100, 20 * mib, 1, 100 * mib, 500 * mib, 3 * mib, 0, 126 * mib, 7]
    places = laid_out((f"{i}", "U8", (size,)) for i, size in enumerate(sizes))
    found = list(pieces(places.values()))
    assert all(start % ALIGNED == 0 for start, _ in found)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(found))
    assert [round((end - start) / mib) for start, end in found] == [120, 500, 3, 126]
    for place in places.values():
        assert any(a <= place.start and place.start + place.nbytes <= b for a, b in found)


def test_what_updates_have_replaced_goes() -> None:
    """Of many updates of some tensors each, those stay of which a tensor still serves."""
    files = [read_bytes([save({"a": torch.ones(2), name: torch.ones(2)})]) for name in "bcb"]
    gone, needed = weakref.ref(files[0]), weakref.ref(files[1])
    served = LayeredFile(files.pop(0))
    while files:
        served = LayeredFile(files.pop(0), served)
    gc.collect()
    assert gone() is None
    assert needed() is not None
    assert sorted(served.keys()) == ["a", "b", "c"]
