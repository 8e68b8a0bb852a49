"""Named tensors in one flat piece of the host's memory, read as a safetensors file is.

The memory has no name in any file system: it is gone with the last process that maps it, however that ends.
The other ranks of an engine map it by `path`, so that a host holds the weights of an update once.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from safetensors import safe_open

from eyas.common import weights
from eyas.common.errors import ConfigError, InvalidRequest
from eyas.common.machine.memory import GIB, memory
from eyas.engine.kv.pinned import pin, short_pieces, unpin

ALIGNED = 64  # bytes: as kernels and copies like tensors to begin
PIECE_BYTES = 16 * 2**20  # read from a file at a time
READERS = 4
_HASHED = 4 * 2**20  # bytes that one thread hashes at a time
DIGEST_BYTES = 16
_LENGTH_BYTES = 8
_PAGE = 4096
_ZEROS = 2**20  # bytes that are written at a time
_MOST_NUMBERS = 2**59  # of a tensor: their bytes are counted by 63 bits
_MOST_HEADER = 100 * 2**20  # bytes, as the library that writes such files has it

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for own, name in weights.DTYPES.items()}
"""By the names that safetensors files have for them."""


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's dtype, as safetensors files name it, its shape, and its first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count * DTYPES[self.dtype].itemsize


def laid_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, TensorPlace]:
    """Places for tensors (name, dtype, shape), one behind the other. Raises InvalidRequest for a dtype that
    has no name here, for a size below 0, for sizes that no tensor has, and for a name that comes twice.
    """
    places: dict[str, TensorPlace] = {}
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in DTYPES:
            raise InvalidRequest(f"tensor {name}: {dtype} is no dtype of weights ({', '.join(DTYPES)})")
        strides = math.prod(max(size, 1) for size in shape)  # no size of 0 makes the others small
        if name in places or min(shape, default=0) < 0 or strides > _MOST_NUMBERS:
            what = "is there twice" if name in places else f"cannot be {list(shape)}"
            raise InvalidRequest(f"tensor {name} {what}")
        places[name] = place = TensorPlace(dtype, shape, end)
        end = -(-(end + place.nbytes) // ALIGNED) * ALIGNED
    return places


class HostTensors:
    """The memory, and where each tensor is. A `StoredFile`."""

    def __init__(self, places: Mapping[str, TensorPlace], path: str = "") -> None:
        """New memory, whose content is zeros; `path`: that of another process, which is mapped. Raises
        ConfigError for more than the host has left.
        """
        self.places = dict(places)
        self._locked: list[torch.Tensor] = []
        size = max((place.start + place.nbytes for place in places.values()), default=0) or 1
        if not path and size > (host := memory()).free:
            left = f"the {host.holder} has {host.free_gib:.1f} GiB left"
            raise ConfigError(f"no room for {size / GIB:.1f} GiB of tensors: {left}")
        self._file = os.open(path, os.O_RDWR) if path else os.memfd_create("eyas-weights")
        try:
            if not path:
                os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        except BaseException:
            os.close(self._file)
            raise

    def __del__(self) -> None:
        for piece in self._locked:
            unpin(piece)
        if hasattr(self, "_memory"):
            os.close(self._file)

    def lock(self, device: str) -> None:
        """Page-locks the memory for copies from and to a GPU, of which none may run when this object goes.

        It is touched before: the driver would do that slowly. It is locked in `short_pieces`, at which copies
        are cut. Raises ConfigError if it cannot be locked.
        """
        if self._locked:
            return
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        with ThreadPoolExecutor(READERS, "weights") as touching:
            list(touching.map(lambda piece: piece[::_PAGE].add_(0), whole.split(PIECE_BYTES)))
        with torch.cuda.device(device):
            for start, end in short_pieces(whole.data_ptr(), whole.nbytes):
                pin(whole[start:end])
                self._locked.append(whole[start:end])

    def allocate(self) -> None:
        """Takes the host's pages for all of the memory by writing zeros to its file: a thread that touches
        mapped memory keeps those waiting that map some. Raises OSError if the host has too few.
        """
        zeros = bytes(_ZEROS)
        for start in range(0, len(self._memory), _ZEROS):
            os.pwrite(self._file, memoryview(zeros)[: len(self._memory) - start], start)

    @property
    def path(self) -> str:
        """The file by which processes of the same user map it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.nbytes for place in self.places.values())

    def keys(self) -> Iterable[str]:
        """The tensors' names."""
        return self.places.keys()

    def parts(self) -> list[tuple[Any, list[str]]]:
        """See `LayeredFile.parts`: it has one."""
        return [(self, list(self.places))]

    def get_slice(self, name: str) -> HostSlice:
        """Opens a reader of a tensor."""
        return HostSlice(self.places[name].dtype, self.tensor(name))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor itself: what is written there is written here."""
        place = self.places[name]
        dtype = DTYPES[place.dtype]
        if not place.nbytes:
            return torch.empty(place.shape, dtype=dtype)
        count = place.nbytes // dtype.itemsize
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=place.start)
        return flat.view(place.shape)

    def window(self, start: int, size: int) -> memoryview:
        """Bytes of the memory, writable."""
        return memoryview(self._memory)[start : start + size]

    @property
    def finite(self) -> bool:
        """Whether all tensors, which are floating-point, hold numbers alone. Of one dtype they are looked
        through in large pieces, each by one call: threads that make many wait for each other.
        """
        dtypes = {DTYPES[place.dtype] for place in self.places.values()}
        pieces = [self.tensor(name) for name in self.places]
        if len(dtypes) == 1:
            (dtype,) = dtypes
            whole = torch.frombuffer(self._memory, dtype=dtype, count=len(self._memory) // dtype.itemsize)
            pieces = list(whole.split(PIECE_BYTES // dtype.itemsize))
        with ThreadPoolExecutor(READERS, "numbers", lambda: torch.set_num_threads(1)) as readers:
            ends = list(readers.map(lambda piece: torch.stack(torch.aminmax(piece)), pieces))
        return bool(torch.stack(ends).isfinite().all())

    def digest(self) -> str:
        """Hex digest of all names, dtypes, shapes and elements, whatever their order."""
        names = sorted(self.places)
        with ThreadPoolExecutor(READERS, "digest") as readers:
            parts = list(readers.map(self._digest, names))
        return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).hexdigest()

    def digest_in_order(self) -> str:
        """Hex digest of all tensors as they lie, which is another one for the same in another order. It reads
        large pieces: threads that hash many small tensors wait for each other.
        """
        places = sorted(self.places.items(), key=lambda pair: pair[1].start)
        first, end = places[0][1].start, max(place.start + place.nbytes for _, place in places)
        kinds = repr([(name, each.dtype, each.shape, each.start - first) for name, each in places])
        pieces = [(at, min(_HASHED, end - at)) for at in range(first, end, _HASHED)]
        with ThreadPoolExecutor(READERS, "digest") as readers:
            parts = list(readers.map(lambda piece: hashlib.blake2b(self.window(*piece)).digest(), pieces))
        whole = hashlib.blake2b(kinds.encode(), digest_size=DIGEST_BYTES)
        whole.update(b"".join(parts))
        return whole.hexdigest()

    def _digest(self, name: str) -> bytes:
        place = self.places[name]
        digest = hashlib.blake2b(repr((name, place.dtype, place.shape)).encode())
        digest.update(self.window(place.start, place.nbytes))
        return digest.digest()


@dataclass(frozen=True)
class HostSlice:
    """Read as a safetensors file's slice is."""

    dtype: str
    whole: torch.Tensor

    def get_dtype(self) -> str:
        """The dtype, by the name that files have for it."""
        return self.dtype

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        return list(self.whole.shape)

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self.whole[part]


class DiskFile:
    """A safetensors file of a folder, mapped: a `StoredFile`. `names`: of its tensors; None: of all."""

    def __init__(self, path: Path, names: Iterable[str] | None = None) -> None:
        self.path = str(path)
        file: Any = safe_open(path, framework="pt")
        self._file, self._names = file, tuple(file.keys() if names is None else names)

    def keys(self) -> Iterable[str]:
        """The names of the tensors."""
        return self._names

    def get_slice(self, name: str) -> Any:
        """Opens a reader of a tensor."""
        return self._file.get_slice(name)


class LayeredFile:
    """Files as one, a `StoredFile`: the first that has a tensor gives it. One that gives none is let go."""

    def __init__(self, *files: Any) -> None:
        self._home: dict[str, Any] = {}
        for file in reversed(files):
            own = file._home if isinstance(file, LayeredFile) else dict.fromkeys(file.keys(), file)
            self._home |= own

    def keys(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._home.keys()

    def get_slice(self, name: str) -> Any:
        """Opens a reader of a tensor."""
        return self._home[name].get_slice(name)

    def without(self, names: Container[str]) -> LayeredFile:
        """The same but for those tensors."""
        rest = LayeredFile()
        rest._home = {name: file for name, file in self._home.items() if name not in names}
        return rest

    def parts(self) -> list[tuple[Any, list[str]]]:
        """The files, and the names of the tensors that each gives."""
        files = {id(file): file for file in self._home.values()}
        return [(file, [n for n, home in self._home.items() if home is file]) for file in files.values()]


HostFile = HostTensors | LayeredFile
"""Tensors that an update has brought, beside those that stay."""


class SharedFile(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that another process of this user opens by a path: of memory with their places, of a
    safetensors file without.
    """

    path: str
    tensors: dict[str, TensorPlace | None]


def shared(file: HostFile) -> list[SharedFile]:
    """A description by which `mapped` has the same file in another process, as long as this one has it."""
    return [
        SharedFile(
            part.path, {name: part.places[name] if isinstance(part, HostTensors) else None for name in names}
        )
        for part, names in file.parts()
    ]


def mapped(files: Iterable[SharedFile], device: str) -> LayeredFile:
    """The tensors of another process, not copied; locked here too, if a GPU is to read them."""
    parts: list[HostTensors | DiskFile] = []
    for file in files:
        places = {name: place for name, place in file.tensors.items() if place is not None}
        if not places:
            parts.append(DiskFile(Path(file.path), file.tensors))
            continue
        parts.append(there := HostTensors(places, file.path))
        if device != "cpu":
            there.lock(device)
    return LayeredFile(*parts)


Room = Callable[[dict[str, TensorPlace]], HostTensors]
"""Makes memory for tensors at places."""

REUSED_BYTES = 2**28
"""Of memory that waits for what comes next: more is made anew each time, and given back."""


class SameRoom:
    """A `Room` that gives the memory of last time again, with its content, where the places are the same: its
    pages are there. Its caller writes all tensors, and is done with those of last time.
    """

    def __init__(self) -> None:
        self._last: HostTensors | None = None

    def __call__(self, places: dict[str, TensorPlace]) -> HostTensors:
        room, self._last = self._last, None
        if room is None or room.places != places:
            room = HostTensors(places)
        if room.nbytes <= REUSED_BYTES:
            self._last = room
        return room


def read_files(paths: Iterable[Path], room: Room = HostTensors) -> HostTensors:
    """A copy of safetensors files in the host's memory. It reads and maps nothing: a file that is cut short
    meanwhile is an error, not a signal.

    Raises ConfigError for a file that cannot be read, or is none, and for a tensor that two files hold.
    """
    headers = [(path, _header(path)) for path in paths]
    homes: dict[str, tuple[Path, int]] = {}
    for path, tensors in headers:
        if twice := homes.keys() & tensors.keys():
            raise ConfigError(f"tensor {min(twice)} of {path} is in another file of the folder as well")
        homes |= {name: (path, start) for name, (_, _, start) in tensors.items()}
    read = room(laid_out((n, *kind[:2]) for _, tensors in headers for n, kind in tensors.items()))
    with ThreadPoolExecutor(READERS, "weights") as readers:
        pieces = [
            readers.submit(_read, path, start + at, read, first + at, min(PIECE_BYTES, count - at))
            for path, start, first, count in _runs(read.places, homes)
            for at in range(0, count, PIECE_BYTES)
        ]
        for piece in pieces:
            piece.result()
    return read


def _runs(
    places: Mapping[str, TensorPlace], homes: Mapping[str, tuple[Path, int]]
) -> list[tuple[Path, int, int, int]]:
    """The runs of bytes that are read at once: a file, the first byte in it and in memory, and how many.
    Tensors that follow each other in both are one run.
    """
    runs: list[tuple[Path, int, int, int]] = []
    for name, place in places.items():
        path, start = homes[name]
        if runs and runs[-1][0] == path and start - runs[-1][1] == place.start - runs[-1][2] == runs[-1][3]:
            _, first, to, count = runs.pop()
            runs.append((path, first, to, count + place.nbytes))
        else:
            runs.append((path, start, place.start, place.nbytes))
    return runs


def read_bytes(files: Sequence[bytes], room: Room = HostTensors) -> HostTensors:
    """A copy of safetensors files whose bytes are given. Raises ConfigError as `read_files`."""
    found: dict[str, tuple[str, tuple[int, ...], memoryview]] = {}
    for data in files:
        for name, (dtype, shape, start) in _read_header(
            BytesIO(data), len(data), "a file of the update"
        ).items():
            if name in found:
                raise ConfigError(f"tensor {name} is in two files of the update")
            size = TensorPlace(dtype, shape, 0).nbytes
            found[name] = dtype, shape, memoryview(data)[start : start + size]
    read = room(laid_out((name, dtype, shape) for name, (dtype, shape, _) in found.items()))
    for name, place in read.places.items():
        read.window(place.start, place.nbytes)[:] = found[name][2]
    return read


Header = dict[str, tuple[str, tuple[int, ...], int]]
"""Of each tensor its dtype, its shape, and its first byte in the file."""


def _header(path: Path) -> Header:
    """The tensors of a file. Raises ConfigError, also for a pipe, which might never give a byte."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file")
    try:
        with path.open("rb") as file:
            return _read_header(file, os.fstat(file.fileno()).st_size, str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


class _Stored(msgspec.Struct):
    """A header's entry of a tensor; `data_offsets`: its first byte behind the header and the next one's."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_header(file: BinaryIO, size: int, name: str) -> Header:
    try:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_MOST_HEADER, size):
            raise ValueError("its header is longer than the file")
        # Raw at first: nothing is made of what a wrong header has inside.
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        return dict(_tensors(header, _LENGTH_BYTES + length, size))
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{name} is not a readable safetensors file: {error}") from None


def _tensors(header: Mapping[str, msgspec.Raw], first: int, size: int) -> Iterator[tuple[str, Any]]:
    free = size - first
    for name, raw in header.items():
        if name == "__metadata__":
            continue
        try:
            stored = msgspec.json.decode(raw, type=_Stored)
        except msgspec.DecodeError as error:
            raise ValueError(f"tensor {name}: {error}") from None
        dtype, shape, (start, end) = stored.dtype, stored.shape, stored.data_offsets
        place, said = TensorPlace(dtype, shape, 0), f"tensor {name} of {dtype} {list(shape)}"
        if dtype not in DTYPES or place.nbytes != end - start or not 0 <= start <= end <= size - first:
            raise ValueError(f"{said} is not at bytes {start} to {end}")
        free -= place.nbytes
        if free < 0:
            raise ValueError(f"{said} shares its bytes with another")
        yield name, (dtype, shape, first + start)


def _read(path: Path, start: int, into: HostTensors, at: int, count: int) -> None:
    """Copies `count` bytes of a file. Raises ConfigError if it has become shorter."""
    done, target = 0, into.window(at, count)
    with path.open("rb", buffering=0) as file:
        while done < count:
            got = os.preadv(file.fileno(), [target[done:]], start + done)
            if not got:
                raise ConfigError(f"{path} was cut short while it was read")
            done += got
