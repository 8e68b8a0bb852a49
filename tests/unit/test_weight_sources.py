"""Tensors of an update that cannot be read: named, and nobody waits for them."""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import time
import uuid
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save
from torch.distributed import TCPStore

from eyas.client.weights import device_buffers
from eyas.common import process_groups
from eyas.common.cluster.listening import free_ports
from eyas.common.errors import ConfigError, InvalidRequest
from eyas.common.machine.processes import with_variable
from eyas.common.process_groups import MetGroup
from eyas.common.weights import (
    BytesSource,
    DeviceBuffer,
    GroupSource,
    JoinGroup,
    PrepareWeights,
    SharedSource,
    Source,
    TensorMeta,
)
from eyas.engine.checkpoint.host_tensors import HostTensors, LayeredFile, laid_out, read_bytes
from eyas.engine.checkpoint.staging import WeightStaging
from eyas.engine.ipc.pulse import no_pulse
from eyas.engine.kv import pinned
from eyas.engine.kv.pinned import SHORT_BYTES, short_pieces
from eyas.engine.loading import weight_sources
from eyas.engine.loading.weight_sources import SHARED_MEMORY, WeightSources, check_within
from eyas.engine.loading.weight_store import EngineWeights
from kv_transfer.gpu.driver import CopyBlock

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


def test_an_address_where_nobody_listens_is_named_in_time() -> None:
    sources, port, began = WeightSources("cpu"), next(free_ports()), time.monotonic()
    with pytest.raises(InvalidRequest, match="nobody listens there for 0.5 s: .*refused") as refused:
        sources.join(JoinGroup("weights", f"127.0.0.1:{port}", 1, 2, "gloo", 0.5))
    assert refused.value.param == "master_address" and 0.4 < time.monotonic() - began < 5.0


def test_a_group_whose_others_do_not_come_ends_in_time() -> None:
    """Rank 0 listens, rank 2 does not come; broadcasts have more time."""
    sources, port, began = WeightSources("cpu"), next(free_ports()), time.monotonic()
    listening = TCPStore("127.0.0.1", port, 3, is_master=True, wait_for_workers=False)
    with pytest.raises(InvalidRequest, match="did not meet"):
        sources.join(JoinGroup("weights", f"127.0.0.1:{listening.port}", 1, 3, "gloo", 2.0))
    assert 1.5 < time.monotonic() - began < 15.0


def leaves_early(port: int) -> None:
    """A trainer that broadcasts one tensor of two, and dies."""
    group = MetGroup("weights", f"127.0.0.1:{port}", 0, 2, "gloo", 30.0)
    group.broadcast(torch.ones(3))
    os._exit(1)


@pytest.mark.slow
def test_a_trainer_that_dies_is_named_and_its_group_left() -> None:
    """The next trainer makes it anew, under the same name."""
    sources, context = WeightSources("cpu"), multiprocessing.get_context("spawn")
    metas = tuple(TensorMeta(name, "F32", (3,)) for name in "ab")
    for _ in range(2):
        port = next(free_ports())
        trainer = context.Process(target=leaves_early, args=(port,))
        trainer.start()
        sources.join(JoinGroup("weights", f"127.0.0.1:{port}", 1, 2, "gloo", 30.0))
        with pytest.raises(InvalidRequest, match="broke, and was left"):
            sources.read(GroupSource("weights", metas))
        trainer.join(20)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_a_trainers_tensor_of_a_dtype_that_weights_do_not_have_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"tensor lm_head.weight is of {str(dtype)[6:]}"):
        device_buffers({"lm_head.weight": torch.zeros(2, dtype=dtype)})


class CountingGroup:
    """Rank 0 broadcasts 1, 2, 3 ..., by a GPU."""

    on_device = True

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.fill_(next(self._next))


class CopyingDriver:
    """Copies at once, no more than a locked piece at a time."""

    def __init__(self, _: int) -> None:
        pass

    def copy_host(self, blocks: list[CopyBlock], *, out: bool) -> None:
        for source, target, width, *_ in blocks:
            assert out
            assert target // 64 == (target + width - 1) // 64
            ctypes.memmove(target, source, width)


def test_what_a_group_brings_to_a_gpu_is_copied_to_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces as they were locked: a copy from one into the next would fail, one to other memory wait."""
    locked: list[str] = []
    monkeypatch.setattr(pinned, "SHORT_BYTES", 64)
    monkeypatch.setattr(weight_sources, "CudaDriver", CopyingDriver)
    monkeypatch.setattr(weight_sources, "number_of", lambda _: 0)
    monkeypatch.setattr(HostTensors, "lock", lambda _, device: locked.append(device))
    sources: Any = WeightSources("cpu")
    sources._groups["group"] = CountingGroup()
    shapes = {"b": (5, 40), "a": (3,), "c": (0, 2), "d": ()}
    read = sources.read(GroupSource("group", tuple(TensorMeta(n, "F32", s) for n, s in shapes.items())))
    assert locked == ["cpu"]
    for number, (name, shape) in enumerate(shapes.items(), start=1):
        assert torch.equal(read.tensor(name), torch.full(shape, float(number)))


def test_a_group_of_gpus_is_not_ended_by_its_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for before in (None, "3"):
        monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
        with with_variable(*process_groups.UNWATCHED):
            assert os.environ[name] == "0"
        assert os.environ.get(name) == before


def test_what_does_not_come_is_not_waited_for_for_ever() -> None:
    times = iter([False, False, True])
    assert process_groups.waited_for(lambda: next(times), 5.0)
    assert not process_groups.waited_for(lambda: False, 0.01)


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
        b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 18446744073709551616]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_header_that_is_none(header: bytes) -> None:
    refusal(BytesSource((len(header).to_bytes(8, "little") + header + bytes(4),)))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((10**14,), "GiB of tensors"),
        ((10**17,), "GiB of tensors"),
        ((10**30,), "tensor a cannot be"),
        ((2**40, 2**40, 0), "tensor a cannot be"),
    ],
)
def test_more_than_the_host_or_any_has_room_for(shape: tuple[int, ...], said: str) -> None:
    assert said in refusal(GroupSource("group", (TensorMeta("a", "F32", shape),))).message


@pytest.mark.parametrize(
    ("address", "size"), [(4096, 3 * SHORT_BYTES + 7), (SHORT_BYTES, SHORT_BYTES), (64, 5)]
)
def test_memory_and_its_parts_are_cut_at_the_same_addresses(address: int, size: int) -> None:
    """No copy may reach from one piece that was locked into the next."""
    whole = list(short_pieces(address, size))
    assert [whole[0][0], whole[-1][1]] == [0, size]
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(whole))
    assert max(end - start for start, end in whole) <= SHORT_BYTES
    for first in range(0, size, SHORT_BYTES // 3):
        for start, end in short_pieces(address + first, min(SHORT_BYTES, size - first)):
            assert sum(a <= first + start and first + end <= b for a, b in whole) == 1


@pytest.mark.parametrize(
    ("offset", "nbytes", "start"),
    [(-4, 8, 0), (0, -8, 0), (2**63, 8, 0), (60, 8, 0), (0, 65, 0), (0, 8, 1), (0, 7, 0), (0, 8, -1)],
)
def test_memory_that_was_not_shared_is_not_read(offset: int, nbytes: int, start: int) -> None:
    """Of an allocation of 64 bytes, for a tensor of 8."""
    meta = TensorMeta("a", "F32", (2,), start)
    read = HostTensors(laid_out([("a", "F32", (2,))]))
    with pytest.raises(InvalidRequest, match="is not within"):
        check_within(DeviceBuffer(b"", offset, nbytes, "", (meta,)), 64, read)
    check_within(DeviceBuffer(b"", 56, 8, "", (TensorMeta("a", "F32", (2,)),)), 64, read)


def test_tensors_of_an_update_are_staged_by_threads() -> None:
    """An update makes them in inference mode, which a thread is in by itself alone."""
    staging: Any = object.__new__(WeightStaging)
    fetched = SimpleNamespace(synchronize=lambda: None, record=lambda stream: None)
    staging._buffers = SimpleQueue()
    staging._buffers.put(SimpleNamespace(memory=torch.empty(64, dtype=torch.uint8), fetched=fetched))
    piece = torch.arange(8.0).view(2, 4)
    with torch.inference_mode(), ThreadPoolExecutor(1) as threads:
        inside = torch.empty(2, 4)
        threads.submit(staging._copy, piece, inside, None).result()
    outside = torch.empty(2, 4)
    staging._copy(piece, outside, None)
    assert torch.equal(inside, piece) and torch.equal(outside, piece)


class Locked(HostTensors):
    """Memory that counts as page-locked without a GPU."""

    def lock(self, device: str) -> None:
        self._locked = self._locked or [torch.empty(0)]


def test_the_memory_of_replaced_weights_is_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking takes longer than all else. It is another's where the tensors are others."""
    monkeypatch.setattr("eyas.engine.loading.weight_sources.HostTensors", Locked)
    monkeypatch.setattr("eyas.engine.checkpoint.host_tensors.unpin", lambda memory: None)
    sources = WeightSources("cuda")

    def read(**tensors: torch.Tensor) -> HostTensors:
        return sources.read(BytesSource((save(tensors),)))

    first = read(a=torch.ones(2), b=torch.zeros(3))
    digest = first.digest()
    second = read(a=torch.zeros(2), b=torch.ones(3))
    assert second is not first
    sources.keep(first)
    third = read(a=torch.full((2,), 5.0), b=torch.zeros(3))
    assert third is first and third.digest() != digest
    assert third.tensor("a").tolist() == [5.0, 5.0]
    sources.keep(second)
    assert read(a=torch.ones(3)) is not second
    sources.keep(third)
    sources.keep(None)
    assert read(a=torch.ones(2), b=torch.zeros(3)) is not third


def test_memory_of_which_a_tensor_still_serves_is_no_other_updates() -> None:
    """An update of some tensors leaves the others where they are."""
    kept: list[Any] = []
    written = SimpleNamespace(rehearse=id, write=lambda file, beat: None, forget=lambda: None)
    sources: Any = WeightSources("cpu")
    sources.keep = kept.append
    model = SimpleNamespace(target=SimpleNamespace(tied_head=False))
    weights: Any = EngineWeights(cast("Any", model), cast("Any", written), sources)
    files = []
    for whole in (True, False, True, True):
        data = save({name: torch.ones(2) for name in ("ab" if whole else "b")})
        staged = weights.stage(PrepareWeights("v", 1, BytesSource((data,)), whole))
        files.append(staged.file)
        weights.write(staged, no_pulse)
        weights.drop(staged)
    assert kept == [None, files[1], files[2]], "the first one's memory goes with the second"


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
