"""Matrices of numbers of four or eight bits, stored as several tensors: read as the one that they mean.

A matrix is (number - zero point) * scale. Along a row, some elements are a group, which has one scale and one
zero point. Formats differ in how numbers are packed into words, and in which order; each is a `PackedConfig`,
in a file of its own. Readers of a folder see one tensor "NAME.weight" instead of its parts
(`WidenedFile`). No torch is loaded here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.checkpoint.quantized import QuantizedConfig, Raw, named, refused
from eyas.engine.checkpoint.values import said

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Place = Callable[["torch.Tensor"], "torch.Tensor"]
WORDS = ("I32",)
WHOLE = ("I32", "I64")
FLOATS = ("F16", "BF16", "F32")
_WORD = 32


@dataclass(frozen=True)
class PackedPart:
    """A stored tensor of a matrix: the dtypes, by safetensors' names, and the shapes that it may have (none:
    any).
    """

    kinds: tuple[str, ...]
    shapes: tuple[Shape, ...]
    optional: bool = False


@dataclass(frozen=True)
class PackedConfig(QuantizedConfig, ABC):
    """Numbers of `bits`; of a row, `group` elements have one scale (0: the whole row).

    `ends`: what the parts of a matrix are called in the place of "weight", the first of them one that no
    other matrix has. Those that `parts` leaves out are not read. `of_experts`: a matrix is one for each
    expert, [experts, k, n], seen under its module's name; an end has "_" before it, and `read` is given the
    parts of an expert. `integers`: numbers are whole ones, from 0 on. `tells`: the ends of parts of which one
    is there, whose bytes say the shape, where the parts' shapes do not.
    """

    ends: ClassVar[tuple[str, ...]]
    of_experts: ClassVar[bool] = False
    integers: ClassVar[bool] = True
    tells: ClassVar[tuple[str, ...]] = ()
    bits: int
    group: int

    @abstractmethod
    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        """The shape of a matrix, by its parts' shapes; () where they are of no matrix."""

    def stated_shape(self, text: bytes) -> Shape:
        """The shape by the bytes of a part that tells it; () where they do not."""
        return ()

    @abstractmethod
    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        """The tensors as which a matrix of that shape is stored, by the ends of their names; `groups`: of a
        row.
        """

    @abstractmethod
    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        """The numbers that the parts hold. Raises ValueError that begins with a part's end, for numbers out
        of range.
        """

    @property
    def by_activations(self) -> bool:
        """True if a row's columns are in groups in an order of their own."""
        return False

    def bytes_of_32(self, experts: bool, exact: bool) -> int | None:
        """Bytes of 32 numbers of layers, or of their experts, on a GPU whose products read them packed; None:
        they are widened. `exact`: in exact arithmetic.
        """
        if not self.integers or (experts and self.by_activations):
            return None
        if self.bits == 8:
            return None if exact else 32
        widened = self.bits != 4 or (exact and (experts or self.by_activations))
        return None if widened else 16

    @property
    def joint(self) -> str:
        """The text before an end in a stored tensor's name."""
        return "_" if self.of_experts else "."

    @property
    def grouping(self) -> str:
        """How many elements share a scale, for the log."""
        return f"by {self.group}" if self.group else "by output channel"


@dataclass(frozen=True)
class MixedConfig(QuantizedConfig):
    """Packed formats by module. `formats`: beside what names modules ("": all); the first that names a module
    is its own.
    """

    formats: tuple[tuple[str, PackedConfig], ...]

    def of(self, module: str) -> PackedConfig | None:
        """The format of a module; None: it has none."""
        return next((config for entry, config in self.formats if not entry or named(entry, module)), None)

    def __str__(self) -> str:
        return "by module: " + "; ".join(dict.fromkeys(str(config) for _, config in self.formats))


@dataclass(frozen=True)
class PackedMatrix:
    """A packed matrix of a folder. `stored`: the tensors that it is, by the ends of their names."""

    config: PackedConfig
    module: str
    stored: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name under which readers see it."""
        return self.module if self.config.of_experts else f"{self.module}.weight"

    def stored_as(self, end: str) -> str:
        """The name of the stored tensor with this end."""
        return f"{self.module}{self.config.joint}{end}"

    def shape(self, shapes: Mapping[str, Shape], text: Callable[[str], bytes]) -> Shape:
        """The matrix's shape, by those and the bytes of stored tensors; () where they are of no matrix."""
        for end in self.config.tells:
            if end in self.stored:
                return self.config.stated_shape(text(self.stored[end]))
        return self.config.shape({end: shapes[name] for end, name in self.stored.items()})


def packed_among(config: QuantizedConfig | None, names: Collection[str]) -> list[PackedMatrix]:
    """The packed matrices among a folder's tensors."""
    if isinstance(config, PackedConfig):
        config = MixedConfig((("", config),))
    if not isinstance(config, MixedConfig):
        return []
    formats = dict.fromkeys(format for _, format in config.formats)
    return [
        matrix for each in formats for matrix in _matrices(each, names) if config.of(matrix.module) == each
    ]


def _matrices(config: PackedConfig, names: Collection[str]) -> Iterator[PackedMatrix]:
    """The matrices that may be in one format."""
    joint, first = config.joint, f"{config.joint}{config.ends[0]}"
    for name in names:
        if name.endswith(first):
            module = name.removesuffix(first)
            stored = {end: f"{module}{joint}{end}" for end in config.ends}
            yield PackedMatrix(
                config, module, {end: there for end, there in stored.items() if there in names}
            )


class WidenedFile:
    """The packed matrices of a folder, each as one tensor of a safetensors file.

    `parts`: the stored tensors that they are. Raises ConfigError, by name, for a matrix that is stored
    unpacked as well, or that the config says is not packed.
    """

    def __init__(
        self, folder: Path, config: QuantizedConfig | None, files: Mapping[str, Any], place: Place
    ) -> None:
        """`files`: where each of the folder's tensors is. `place` copies a stored part, contiguous, to where
        it is unpacked: on a GPU that takes milliseconds, and a second on a CPU.
        """
        matrices = packed_among(config, files)
        self._folder, self._files, self._place = folder, files, place
        self._matrices = {matrix.name: matrix for matrix in matrices}
        self.parts = frozenset(name for matrix in matrices for name in matrix.stored.values())
        for matrix in matrices:
            first = next(iter(matrix.stored.values()))
            if matrix.name in files and matrix.name not in self.parts:
                raise ConfigError(f"{folder} holds both {first} and {matrix.name}: one matrix, stored twice")
            if config is not None and config.keeps(matrix.name):
                excuse = "though quantization_config says that it is not quantized"
                raise ConfigError(f"{folder} holds a tensor {first}, {excuse}")

    def keys(self) -> Iterable[str]:
        """The names of the matrices."""
        return self._matrices.keys()

    def get_slice(self, name: str) -> WidenedMatrix | WidenedExperts:
        """Opens a reader."""
        matrix = self._matrices[name]
        parts = StoredParts(self._folder, matrix, self._files, self._place)
        return WidenedExperts(parts) if matrix.config.of_experts else WidenedMatrix(parts)


class StoredParts:
    """The parts of a matrix in their files."""

    def __init__(self, folder: Path, matrix: PackedMatrix, files: Mapping[str, Any], place: Place) -> None:
        self._folder, self._matrix, self._place = folder, matrix, place
        self._readers = {end: files[name].get_slice(name) for end, name in matrix.stored.items()}

    @cached_property
    def shape(self) -> Shape:
        """The matrix's shape. Raises ConfigError if the parts are of none."""
        shapes = {name: self._shape(end) for end, name in self._matrix.stored.items()}
        if (shape := self._matrix.shape(shapes, self._text)) and 0 not in shape:
            return shape
        name, stored = next(iter(shapes.items()))
        raise self._error(name, f"is {stored}: no packed matrix")

    def read(self, part: Any = ...) -> PackedNumbers:
        """The numbers of a part (a number: of that expert). Raises ConfigError, by name, for a part that is
        missing or is not what it must be.
        """
        config = self._matrix.config
        read = {end: self._place(self._readers[end][part]) for end in self._checked}
        try:
            return config.read(read, self.shape, self._groups)
        except ValueError as error:
            raise ConfigError(f"{self._folder}: tensor {self._matrix.stored_as(str(error))}") from None

    @cached_property
    def _checked(self) -> list[str]:
        """The ends of the parts that are there."""
        there = []
        for end, part in self._matrix.config.parts(self.shape, self._groups).items():
            if end in self._readers:
                self._check(end, part)
                there.append(end)
            elif not part.optional:
                raise ConfigError(f"{self._folder} has no tensor {self._matrix.stored_as(end)}")
        return there

    @cached_property
    def _groups(self) -> int:
        """The number of groups of a row."""
        group, k = self._matrix.config.group, self.shape[1]
        if group and k % group:
            name = next(iter(self._matrix.stored.values()))
            raise self._error(name, f"has rows of {k}, which are no whole groups of {group}")
        return k // group if group else 1

    def _check(self, end: str, part: PackedPart) -> None:
        """Raises ConfigError if a stored part is not what it must be."""
        name, kind, shape = self._matrix.stored[end], self._readers[end].get_dtype(), self._shape(end)
        if kind not in part.kinds:
            raise self._error(name, f"is stored as {kind}, not as {' or '.join(part.kinds)}")
        if part.shapes and shape not in part.shapes:
            raise self._error(name, f"is {shape}, not {' or '.join(map(str, part.shapes))}")

    def _text(self, name: str) -> bytes:
        reader = next(self._readers[end] for end, stored in self._matrix.stored.items() if stored == name)
        return bytes(reader[...].flatten().tolist()) if reader.get_dtype() == "U8" else b""

    def _shape(self, end: str) -> Shape:
        return tuple(self._readers[end].get_shape())

    def _error(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"tensor {name} of {self._folder} {why}")


@dataclass(frozen=True)
class WidenedTensor:
    """Read as a safetensors file's slice is."""

    _parts: StoredParts

    def get_dtype(self) -> str:
        """The dtype, by the name that files have for it."""
        return "F32"

    def get_shape(self) -> list[int]:
        """Raises ConfigError if the parts are of no matrix."""
        return list(self._parts.shape)


class WidenedMatrix(WidenedTensor):
    """A matrix of which, for any part, all is unpacked, and only the part widened."""

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self.numbers(part).widened()

    def numbers(self, part: Any = ...) -> PackedNumbers:
        """The numbers of a part, before they are widened."""
        return self._whole.part(*_cuts(part))

    @cached_property
    def _whole(self) -> PackedNumbers:
        return self._parts.read()


class WidenedExperts(WidenedTensor):
    """[experts, k, n], of which each was stored as [n, k]. An expert is read when it is a part's."""

    def __getitem__(self, part: Any) -> torch.Tensor:
        which, columns, rows = (*_cuts(part), *[slice(None)] * 3)[:3]
        if isinstance(which, int):
            return self.numbers(part).widened().t()
        some = range(self._parts.shape[0])[which]
        first = self[some[0], columns, rows]
        wide = first.new_empty(len(some), *first.shape)
        wide[0] = first
        for place, expert in enumerate(some[1:], 1):
            wide[place] = self[expert, columns, rows]
        return wide

    def numbers(self, part: Any) -> PackedNumbers:
        """The numbers of a part of one expert, [n, k], before they are widened."""
        which, columns, rows = (*_cuts(part), *[slice(None)] * 2)[:3]
        return self._parts.read(which).part(rows, columns)


def _cuts(part: Any) -> tuple[Any, ...]:
    """What of each dimension, from the first on, is in a part."""
    return tuple(cut for cut in (part if isinstance(part, tuple) else (part,)) if cut is not ...)


def bits_of(raw: Raw, what: str, known: tuple[int, ...], name: str = "bits") -> int:
    """The bits of a number; others than those known are refused."""
    bits = raw.get(name)
    if type(bits) is not int or bits not in known:
        raise refused(f"{what} of {said(bits)} bits")
    return bits


def group_of(raw: Raw, what: str) -> int:
    """How many elements have one scale, for `PackedConfig.group`."""
    size = raw.get("group_size")
    if size is None or size == -1:
        return 0
    if type(size) is not int or size < 1:
        raise refused(f"{what} with group_size {said(size)}")
    return size


def mixed(
    own: Sequence[tuple[str, PackedConfig]], others: PackedConfig, ignored: tuple[str, ...]
) -> PackedConfig | MixedConfig:
    """The format of `others`, if all are alike, or the formats of modules by the entries that name them."""
    if all(config == others for _, config in own):
        return replace(others, ignored=ignored)
    return MixedConfig((*own, ("", others)), ignored=ignored)


def words(numbers: int, bits: int) -> int:
    """How many words of 32 bits hold these."""
    return -(-numbers * bits // _WORD)
