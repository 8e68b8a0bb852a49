"""Sources of a model's tensors: a folder of safetensors files, or seeded noise of the same shapes.

A model asks for each tensor by name and shape, once, in the order in which it builds itself; at most one
tensor is held at a time. Where several ranks share a model, each asks for its own part of a tensor, and only
that part is read. Quantized weights are widened as they are read, unless they are asked for as they are.

`FiniteCheck` checks that weights are finite numbers. A model with NaN or infinity serves, and its answers are
empty. What is found of a tensor stays on its device until all are loaded: asking a GPU means waiting for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import fp4, fp8
from eyas.engine.checkpoint.folder import weight_files
from eyas.engine.checkpoint.fused_tensors import View
from eyas.engine.checkpoint.packed import PackedConfig, WidenedFile
from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.checkpoint.quantized import Fp8Config, QuantizedConfig, ScaledConfig
from eyas.engine.checkpoint.stacked_tensors import JoinedTensor
from eyas.engine.checkpoint.staging import WeightStaging

Shape = tuple[int, ...]
Part = tuple[slice, ...]  # the slice of each dimension, from the first on; (): everything
_COMPARED_ROWS = 4096  # at once, of two matrices
PLAIN = ("F64", "F32", "F16", "BF16")
"""What a safetensors file calls dtypes that mean what they say."""


_FP8_NAN = 127
"""Of e4m3, which has no infinity, the bits of a NaN without their sign: the largest there are."""


class FiniteCheck:
    """Takes tensors in any order, and says at the end which of them have NaN or infinity."""

    def __init__(self) -> None:
        # Numbers of one dtype, finite if all elements of their tensor are. Two dtypes cannot be stacked.
        self._names: defaultdict[torch.dtype, list[str]] = defaultdict(list)
        self._extremes: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)

    def see(self, name: str, tensor: torch.Tensor) -> None:
        """Looks at a tensor of floating-point numbers; others are never infinite."""
        if tensor.numel() and tensor.is_floating_point():
            for number in _extremes(tensor):
                self._names[number.dtype].append(name)
                self._extremes[number.dtype].append(number)

    def broken(self) -> list[str]:
        """The names of the tensors that are not finite, each once. Waits for the device, once."""
        if not self._extremes:
            return []
        finite = torch.cat([torch.stack(numbers).isfinite() for numbers in self._extremes.values()])
        names = [name for each in self._names.values() for name in each]
        return list(dict.fromkeys(n for n, holds in zip(names, finite.tolist(), strict=True) if not holds))


def _extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scalars that are finite if all elements are. A minimum and a maximum cannot overflow, as sums can."""
    if tensor.dtype is not torch.float8_e4m3fn:
        return torch.aminmax(tensor)
    largest = tensor.view(torch.uint8).bitwise_and(_FP8_NAN).amax()
    return ((_FP8_NAN - largest.float()).reciprocal(),)


@dataclass(frozen=True)
class WeightPlacement:
    """The device of tensors, the precision in which a model computes, and which of its `ranks` this is.

    `sharer`: which of the `sharers` that have a share of the experts, whole, and all of everything else.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    rank: int = 0
    ranks: int = 1
    sharer: int = 0
    sharers: int = 1

    def own_experts(self, experts: int) -> range:
        """The numbers of the experts that this sharer has. The sharers divide a layer's `experts`."""
        each = experts // self.sharers
        return range(each * self.sharer, each * (self.sharer + 1))


class WeightSource(ABC):
    """A source of named tensors, all on one device; floating-point ones in one precision.

    Shapes are always those of the whole tensor. Every method raises ConfigError, which names the tensor, if
    it is missing, has another shape, or cannot be divided among the ranks. Tensors have the placement's dtype
    unless `dtype` is given. `quantized`: how those are stored that are not in 16 or 32 bits.
    """

    def __init__(self, placement: WeightPlacement, quantized: QuantizedConfig | None = None) -> None:
        self.placement = placement
        self.quantized = quantized

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """`part` of the tensor `name`, contiguous."""

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor, the same on every rank."""
        return self._load(name, shape, (), dtype or self.placement.dtype)

    def take_rows(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's share of dimension 0: [shape[0] / ranks, ...]."""
        return self._load(name, shape, self._share(name, shape, 0), dtype or self.placement.dtype)

    def take_columns(self, name: str, shape: Shape) -> torch.Tensor:
        """This rank's share of dimension 1: [shape[0], shape[1] / ranks, ...]."""
        return self._load(name, shape, self._share(name, shape, 1), self.placement.dtype)

    def is_quantized(self, name: str) -> bool:
        """True if a tensor is stored as `quantized` says."""
        return False

    def alike(self, name: str, other: str) -> bool:
        """True if two stored tensors [n, ...] are equal. Both count as taken."""
        return True

    def left(self, parts: tuple[str, ...]) -> list[str]:
        """The stored tensors whose names begin with one of `parts` and that were not taken."""
        return []

    def rounding(self, names: list[str]) -> fp8.RowRounding | None:
        """The rounding of rows that meet these weights in one product; None: rows stay as they are.

        So they are unless all of the weights are in FP8. Where each of them has a scale for rows, the largest
        is for all: less of a row is cut off than its own would.
        """
        if not isinstance(self.quantized, Fp8Config) or not self.quantized.rows:
            return None
        if not all(map(self.is_quantized, names)):
            return None
        scale = max(map(self._row_scale, names)) if self.quantized.rows == "tensor" else 0.0
        return fp8.RowRounding(self.quantized.rows, self.quantized.powers, scale)

    def take_stored(
        self, name: str, shape: Shape, dimension: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share, along a dimension, of a quantized tensor [n, k] as it is stored, and of its
        scales float32, in blocks [ceil(n / 128), ceil(k / 128)], else [n]. A share has whole blocks.
        None: all of it.
        """
        if not isinstance(self.quantized, ScaledConfig):
            raise _unnamed(name)
        if dimension is None:
            return self._load_stored(name, shape, (), ())
        part = self._share(name, shape, dimension)
        if self.quantized.weights != "block":
            return self._load_stored(name, shape, part, part[:1])
        scales = fp8.scales_of(shape, "block")
        return self._load_stored(name, shape, part, self._share(name, scales, dimension))

    def _load_stored(
        self, name: str, shape: Shape, part: Part, scales: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`part` of the tensor, and the `scales` part of its scales; both contiguous."""
        raise ConfigError(f"tensor {name} is not quantized")

    def is_packed(self, name: str) -> bool:
        """True if a tensor is a matrix [n, k] that is stored as a `PackedConfig` says."""
        return False

    def take_packed(self, name: str, shape: Shape, dimension: int | None) -> PackedNumbers:
        """This rank's share, along a dimension, of a packed matrix [n, k], before it is widened. None: all of
        it.
        """
        return self._load_packed(
            name, shape, () if dimension is None else self._share(name, shape, dimension)
        )

    def _load_packed(self, name: str, shape: Shape, part: Part) -> PackedNumbers:
        """`part` of the matrix, its tensors contiguous."""
        raise ConfigError(f"tensor {name} is not packed")

    def _row_scale(self, name: str) -> float:
        """The scale of all rows that a weight multiplies."""
        raise ConfigError(f"tensor {name} has no scale for rows")

    def stack(self, names: list[str], rows: list[int], columns: int) -> torch.Tensor:
        """Matrices of the same width, concatenated: [sum(rows), columns], in the order of `names`."""
        return torch.cat([self.take(n, (r, columns)) for n, r in zip(names, rows, strict=True)])

    def stack_rows(self, names: list[str], rows: list[int], columns: int) -> torch.Tensor:
        """This rank's rows of each matrix, concatenated: [sum(rows) / ranks, columns]."""
        return torch.cat([self.take_rows(n, (r, columns)) for n, r in zip(names, rows, strict=True)])

    def _share(self, name: str, shape: Shape, dimension: int) -> Part:
        size, rank, ranks = shape[dimension], self.placement.rank, self.placement.ranks
        if ranks == 1:
            return ()
        if size % ranks:
            raise ConfigError(f"tensor {name}: its {size} rows or columns cannot be divided by {ranks} ranks")
        mine = slice(size // ranks * rank, size // ranks * (rank + 1))
        return (slice(None),) * dimension + (mine,)


CPU = WeightPlacement()


class StoredFile(Protocol):
    """Named tensors, as a safetensors file that is open gives them."""

    def keys(self) -> Iterable[str]:
        """Their names."""

    def get_slice(self, name: str) -> Any:
        """A reader of one: `get_shape`, `get_dtype` (by the name that such files have for it), indexing."""


class FolderWeights(WeightSource):
    """Reads a folder's safetensors files. A context manager: it holds the files and a progress bar open.

    `spelling` maps a stored name to the name by which models ask for the tensor; `fused`: which of those are
    several tensors that models ask for one by one. `prefixes`: only tensors whose stored names begin with one
    of them are there. Raises ConfigError if a file cannot be read, for a
    tensor that two files hold, for one that is stored in FP8 where `quantized` does not say so, and at its
    end for one that holds NaN or infinity.
    """

    def __init__(
        self,
        folder: Path,
        spelling: Callable[[str], str] = str,
        placement: WeightPlacement = CPU,
        prefixes: tuple[str, ...] = ("",),
        quantized: QuantizedConfig | None = None,
        fused: tuple[JoinedTensor, ...] = (),
    ) -> None:
        super().__init__(placement, quantized)
        self._folder = folder
        self._open = contextlib.ExitStack()
        self._home: dict[str, _StoredTensor] = {}
        self._seen: set[str] = set()
        self._finite = FiniteCheck()
        self._place: Callable[[torch.Tensor], torch.Tensor] = _aligned
        if placement.device != "cpu":
            staging = self._open.enter_context(contextlib.closing(WeightStaging(placement.device)))
            self._place = staging.upload
        files = self._files(folder)
        stored = {name: file for _, file in files for name in file.keys() if name.startswith(prefixes)}
        widened = WidenedFile(folder, quantized, stored, self._place)
        for path, file in (*files, (folder, widened)):
            names = [name for name in file.keys() if name.startswith(prefixes)]
            if file is not widened:
                names = [name for name in names if name not in widened.parts]
            homes = {here: at for name in names for here, at in _parts(file, name, spelling(name), fused)}
            if twice := sorted(self._home.keys() & homes.keys()):
                raise ConfigError(f"tensor {twice[0]} of {path} is in another file of the folder as well")
            self._home |= homes
        screen = Console(stderr=True)
        progress = Progress(console=screen, disable=not sys.stderr.isatty(), transient=True)
        self._progress = self._open.enter_context(progress)
        self._task = progress.add_task(f"loading {folder.name}", total=len(self._home))

    def _files(self, folder: Path) -> list[tuple[Path, StoredFile]]:
        """The files of the folder, open."""
        return [(path, self._opened(path)) for path in weight_files(folder)]

    def _opened(self, path: Path) -> Any:
        try:
            return self._open.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open.close()
        if kind is None and (broken := self._finite.broken()):
            self._complain(broken)

    def _complain(self, broken: list[str]) -> None:
        """Called at the end if any tensor that was taken has NaN or infinity."""
        others = f", as {len(broken) - 1} others do" if broken[1:] else ""
        raise ConfigError(f"tensor {self._named(broken[0])} of {self._folder} holds NaN or infinity{others}")

    def _named(self, name: str) -> str:
        """A tensor's name for an error, and how the files call it or what it is a part of."""
        stored = self._home[name].name if name in self._home else name
        return name if stored == name else f"{name} (stored as {stored})"

    def _missing(self, name: str) -> str:
        """The name of a tensor that is not there, and how the files call that of another layer or expert."""
        alike = re.compile(re.sub(r"\d+", r"\\d+", re.escape(name)))
        stored = (self._home[there].name for there in self._home if alike.fullmatch(there))
        other = next((each for each in stored if not alike.fullmatch(each)), None)
        return name if other is None else f"{name} (of the kind that is stored as {other})"

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def alike(self, name: str, other: str) -> bool:
        shape = self._shape(name)
        if shape != self._shape(other):
            return False
        one, two = self._mapped(name, shape), self._mapped(other, shape)
        parts = (slice(start, start + _COMPARED_ROWS) for start in range(0, shape[0], _COMPARED_ROWS))
        return all(torch.equal(one[part].float(), two[part].float()) for part in parts)

    def left(self, parts: tuple[str, ...]) -> list[str]:
        left = [name for name in self._home if name.startswith(parts) and name not in self._seen]
        return sorted(name for name in left if not self._adds_nothing(name))

    def _adds_nothing(self, name: str) -> bool:
        """Is it a bias of zeros, which those who pack weights add to every matrix?"""
        matrix = self._home.get(f"{name.removesuffix('bias')}weight") if name.endswith(".bias") else None
        return matrix is not None and matrix.is_packed and not self._home[name].read()[...].any()

    def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
        quantized, read = self.is_quantized(name), self._mapped(name, shape)
        if self._home[name].is_packed:
            return self._as(dtype, name, read[part].to(dtype).contiguous())
        if quantized:
            wide = fp8.widened(read[:], self._scales(name, shape))[part]
            return self._as(dtype, name, self._place(wide.to(dtype)))
        if dtype.is_floating_point:
            check_meaning(self._named(name), read, PLAIN)
        return self._as(dtype, name, self._place(read[part]))

    def _as(self, dtype: torch.dtype, name: str, stored: torch.Tensor) -> torch.Tensor:
        """The tensor in another dtype. The shorter of both is looked at: it costs less, and NaN and infinity
        stay what they are on the way, which may add some where a number becomes too large.
        """
        taken = stored.to(dtype)
        self._finite.see(name, min(taken, stored, key=lambda tensor: tensor.itemsize))
        return taken

    def is_quantized(self, name: str) -> bool:
        if name not in self._home:
            return False
        stored = self._home[name]
        kind = stored.read().get_dtype()
        if self.quantized is None and kind == fp8.STORED:
            raise _unnamed(name)
        if not isinstance(self.quantized, ScaledConfig) or kind != self.quantized.kind:
            return False
        if self.quantized.keeps(stored.name):
            excuse = "though quantization_config says that it is not"
            raise ConfigError(f"tensor {stored.name} is stored as {kind}, {excuse}")
        return True

    def _load_stored(
        self, name: str, shape: Shape, part: Part, scales: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stored = self._mapped(name, shape)[part]
        scale = self._scales(name, shape)[scales]
        weight, placed = self._place(stored.view(torch.uint8)).view(stored.dtype), self._place(scale)
        self._finite.see(name, weight)
        self._finite.see(name, placed)
        return weight, placed

    def is_packed(self, name: str) -> bool:
        return name in self._home and self._home[name].is_packed and len(self._shape(name)) == 2

    def _load_packed(self, name: str, shape: Shape, part: Part) -> PackedNumbers:
        if not self.is_packed(name):
            return super()._load_packed(name, shape, part)
        placed: PackedNumbers = self._mapped(name, shape).numbers(part).contiguous()
        self._finite.see(name, placed.scales)
        return placed

    def _scales(self, name: str, shape: Shape) -> torch.Tensor:
        """The scales of a weight, shaped as `fp8.scales_of` says, float32."""
        assert isinstance(self.quantized, ScaledConfig)
        there = next((n for end in fp8.SCALES if (n := name + end) in self._home), name + fp8.SCALES[0])
        expected = fp8.scales_of(shape, self.quantized.weights)
        if self.quantized.weights == "block":
            return self._whole(there, expected)
        if self.quantized.weights == "tensor":
            return self._whole(there, (), (1,)).reshape(1).repeat(expected[0])
        return self._whole(there, (*expected, 1), expected).reshape(expected)

    def _row_scale(self, name: str) -> float:
        module = name.removesuffix("weight")
        names = [module + end for end in fp8.ROW_SCALE]
        there = next((n for n in names if n in self._home), names[0])
        scale = float(self._whole(there, (), (1,)))
        if not 0.0 < scale < math.inf:
            raise ConfigError(f"tensor {there} of {self._folder} is {scale:g}: no scale")
        return scale

    def _whole(self, name: str, *shapes: Shape) -> torch.Tensor:
        """A small tensor of one of the shapes, float32."""
        stored = self._shape(name)
        read = self._mapped(name, stored if stored in shapes else shapes[0])
        check_meaning(name, read, (*PLAIN, fp8.POWERS))
        whole: torch.Tensor = read[...]
        return whole.float()

    def _mapped(self, name: str, shape: Shape) -> Any:
        """A reader of a stored tensor, or of slices of it."""
        stored = self._shape(name)
        if stored != shape:
            named = self._named(name)
            raise ConfigError(f"tensor {named} of {self._folder} is {stored}, its config says {shape}")
        self._seen.add(name)
        self._progress.advance(self._task)
        return self._home[name].read()

    def _shape(self, name: str) -> Shape:
        if name not in self._home:
            raise ConfigError(f"{self._folder} has no tensor {self._missing(name)}")
        return tuple(self._home[name].read().get_shape())


class GivenWeights(FolderWeights):
    """The tensors of `file` as if they were those of a folder."""

    def __init__(self, file: StoredFile, *args: Any) -> None:
        """`args`: as of `FolderWeights`; the folder is for messages."""
        self._given = file
        super().__init__(*args)

    def _files(self, folder: Path) -> list[tuple[Path, StoredFile]]:
        return [(folder, self._given)]


@dataclass(frozen=True)
class _StoredTensor:
    """The location of a tensor: all of a stored one, or a part of it that `view` reads."""

    file: Any
    name: str
    view: View | None = None

    @property
    def is_packed(self) -> bool:
        """Is it stored as numbers that are unpacked as they are read?"""
        return isinstance(self.file, WidenedFile)

    def read(self) -> Any:
        """Opens a reader of it, or of slices of it."""
        whole = self.file.get_slice(self.name)
        return whole if self.view is None else self.view(whole)


def _parts(
    file: Any, name: str, here: str, fused: tuple[JoinedTensor, ...]
) -> Iterator[tuple[str, _StoredTensor]]:
    """The tensors that a stored one is, whose name in the model's spelling is `here`, and where they are."""
    for each in fused:
        if each.holds(here):
            for part, view in each.split(here, tuple(file.get_slice(name).get_shape())):
                yield part, _StoredTensor(file, name, view)
            return
    yield here, _StoredTensor(file, name)


def check_meaning(name: str, read: Any, kinds: tuple[str, ...]) -> None:
    """Raises ConfigError for stored numbers that are not what they mean: int8, say, or e5m2."""
    if (kind := read.get_dtype()) not in kinds:
        raise ConfigError(f"tensor {name} is stored as {kind}: only {', '.join(kinds)} can be read there")


def _unnamed(name: str) -> ConfigError:
    return ConfigError(f"tensor {name} is stored in FP8, of which quantization_config says nothing")


def _aligned(mapped: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of its own memory, which is aligned as kernels need: a file that somebody writes
    anew changes no weight that is served.
    """
    return mapped.clone(memory_format=torch.contiguous_format)


class DummyWeights(WeightSource):
    """Seeded noise: vectors are ones, matrices keep the scale of their input, integers are zero.

    A tensor depends on its name and the seed alone, not on the order in which tensors are taken. A rank's
    part is cut from the whole tensor. `optional`: the names of the optional tensors that the model has.
    Matrices that are asked for as they are stored are in FP8 if `quantized` says that any are; where all rows
    have one scale, it is 1/64. Packed ones are integers of as many bits.
    """

    def __init__(
        self,
        seed: int = 0,
        placement: WeightPlacement = CPU,
        optional: frozenset[str] = frozenset(),
        quantized: QuantizedConfig | None = None,
    ) -> None:
        super().__init__(placement, quantized)
        self._seed = seed
        self._optional = optional

    def __contains__(self, name: str) -> bool:
        return name in self._optional

    def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
        whole = self._noise(name, shape, dtype)
        return whole[part].clone() if part else whole

    def is_quantized(self, name: str) -> bool:
        return isinstance(self.quantized, Fp8Config) and not self.quantized.keeps(name)

    def _load_stored(
        self, name: str, shape: Shape, part: Part, scales: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A quarter of e4m3's range is the noise's deviation: all of its values are there."""
        assert isinstance(self.quantized, ScaledConfig)
        deviation = fp8.LARGEST / 4
        noise = self._noise(name, shape, self.placement.dtype).mul_(deviation * shape[-1] ** 0.5)
        stored = noise.clamp_(-fp8.LARGEST, fp8.LARGEST)[part].to(torch.float8_e4m3fn)
        each = 1.0 / (deviation * shape[-1] ** 0.5)
        sizes = fp8.scales_of(shape, self.quantized.weights)
        scale = torch.full(sizes, each, device=self.placement.device)[scales]
        return stored.contiguous(), scale.contiguous()

    def is_packed(self, name: str) -> bool:
        if not isinstance(self.quantized, PackedConfig) or self.quantized.keeps(name):
            return False
        return ".experts." in name or not self.quantized.of_experts

    def _load_packed(self, name: str, shape: Shape, part: Part) -> PackedNumbers:
        """Even numbers, whose deviation is that of the noise; in floating point about as wide."""
        config = self.quantized
        assert isinstance(config, PackedConfig)
        device, most, (n, k) = self.placement.device, 1 << config.bits, shape
        numbers = torch.randint(most, shape, generator=self._chance(name), device=device, dtype=torch.uint8)
        each, groups = math.sqrt(12 / k) / most, 1
        if config.group and k % config.group == 0:
            groups = k // config.group
        if not config.integers:
            power = torch.full((n, groups), 2.0 ** round(math.log2(each)), device=device)
            return PackedNumbers(numbers, 0, power, None, fp4.values(power), power[0, :1]).part(*part)
        scales = torch.full((n, groups), each, device=device, dtype=self.placement.dtype)
        return PackedNumbers(numbers, most // 2, scales).part(*part)

    def _chance(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self.placement.device)
        return generator.manual_seed(int.from_bytes(digest[:7], "little"))

    def _row_scale(self, name: str) -> float:
        return 1.0 / 64.0

    def _noise(self, name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        device = self.placement.device
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        noise = torch.randn(shape, generator=self._chance(name), device=device, dtype=dtype)
        return noise.div_(shape[-1] ** 0.5)
