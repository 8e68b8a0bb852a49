"""Where a model's tensors come from: a folder of safetensors files, or seeded noise of the same shapes.

A model asks for each tensor by name and shape, once, in the order in which it builds itself; at most one
tensor is held at a time. Where several ranks share a model, each asks for its own part of a tensor, and only
that part is read. Weights in FP8 blocks are widened as they are read. This file does not know what the
tensors mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import fp8_blocks
from eyas.engine.checkpoint.folder import weight_files
from eyas.engine.checkpoint.staging import Staging

Shape = tuple[int, ...]
Part = tuple[slice, ...]  # the slice of each dimension, from the first on; (): everything


@dataclass(frozen=True)
class Placement:
    """Where tensors live, in which precision a model computes, and which of its `ranks` this is."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    rank: int = 0
    ranks: int = 1


class Weights(ABC):
    """A source of named tensors, all on one device; floating-point ones in one precision.

    Shapes are always those of the whole tensor. Every method raises ConfigError, which names the tensor, if
    it is missing, has another shape, or cannot be divided among the ranks. Tensors have the placement's dtype
    unless `dtype` is given.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """`part` of the tensor `name`, contiguous."""

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor, the same on every rank."""
        return self._load(name, shape, (), dtype or self.placement.dtype)

    def take_rows(self, name: str, shape: Shape) -> torch.Tensor:
        """This rank's share of dimension 0: [shape[0] / ranks, ...]."""
        return self._load(name, shape, self._share(name, shape, 0), self.placement.dtype)

    def take_columns(self, name: str, shape: Shape) -> torch.Tensor:
        """This rank's share of dimension 1: [shape[0], shape[1] / ranks, ...]."""
        return self._load(name, shape, self._share(name, shape, 1), self.placement.dtype)

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


CPU = Placement()


class FolderWeights(Weights):
    """Reads a folder's safetensors files. A context manager: it holds the files and a progress bar open.

    `spelling` maps a stored name to the name by which models ask for the tensor; `prefix`: only tensors whose
    stored names begin with it are there. Raises ConfigError if a file cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        spelling: Callable[[str], str] = str,
        placement: Placement = CPU,
        prefix: str = "",
    ) -> None:
        super().__init__(placement)
        self._folder = folder
        self._open = contextlib.ExitStack()
        self._home: dict[str, tuple[Any, str]] = {}
        for path in weight_files(folder):
            try:
                file = self._open.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a dict)
            self._home |= {spelling(name): (file, name) for name in names}
        screen = Console(stderr=True)
        progress = Progress(console=screen, disable=not sys.stderr.isatty(), transient=True)
        self._progress = self._open.enter_context(progress)
        self._task = progress.add_task(f"loading {folder.name}", total=len(self._home))
        self._place: Callable[[torch.Tensor], torch.Tensor] = _aligned
        if placement.device != "cpu":
            staging = self._open.enter_context(contextlib.closing(Staging(placement.device)))
            self._place = staging.upload

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
        mapped = self._mapped(name, shape)
        if mapped.get_dtype() != fp8_blocks.STORED:
            return self._place(mapped[part]).to(dtype)
        scales = self._mapped(f"{name}{fp8_blocks.SCALES}", fp8_blocks.scales_of(shape))
        return self._place(fp8_blocks.widened(mapped[:], scales[:])[part].to(dtype))

    def _mapped(self, name: str, shape: Shape) -> Any:
        """What reads a stored tensor, or slices of it."""
        if name not in self._home:
            raise ConfigError(f"{self._folder} has no tensor {name}")
        file, stored = self._home[name]
        mapped = file.get_slice(stored)
        found = tuple(mapped.get_shape())
        if found != shape:
            raise ConfigError(f"tensor {name} of {self._folder} is {found}, its config says {shape}")
        self._progress.advance(self._task)
        return mapped


def _aligned(mapped: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that starts at a multiple of 16 bytes, as kernels need; files do not align it."""
    whole = mapped.contiguous()
    return whole.clone() if whole.data_ptr() % 16 else whole


class DummyWeights(Weights):
    """Seeded noise: vectors are ones, matrices keep the scale of their input, integers are zero.

    A tensor depends on its name and the seed alone, not on the order in which tensors are taken. A rank's
    part is cut from the whole tensor. `optional`: the names of the optional tensors that the model has.
    """

    def __init__(
        self, seed: int = 0, placement: Placement = CPU, optional: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(placement)
        self._seed = seed
        self._optional = optional

    def __contains__(self, name: str) -> bool:
        return name in self._optional

    def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
        whole = self._whole(name, shape, dtype)
        return whole[part].clone() if part else whole

    def _whole(self, name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        device = self.placement.device
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        noise = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return noise.div_(shape[-1] ** 0.5)
