"""Where a model's tensors come from: a folder of safetensors files, or seeded noise of the same shapes.

A model asks for each tensor by name and shape, once, in the order in which it builds itself; nothing
larger than one tensor is held on the way. It knows nothing of what the tensors mean.
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
from eyas.engine.model_config import weight_files

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Where tensors live and in which precision a model computes."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32


class Weights(ABC):
    """A source of named tensors, all on one device; floating-point ones in one precision."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor `name`; ConfigError naming it if it is missing or not of this shape.

        `dtype`: the placement's unless said.
        """

    def stack(self, names: list[str], rows: list[int], columns: int) -> torch.Tensor:
        """Matrices of the same width fused into one, [sum(rows), columns], in the order of `names`."""
        return torch.cat([self.take(n, (r, columns)) for n, r in zip(names, rows, strict=True)])


CPU = Placement()


class FolderWeights(Weights):
    """Streams a folder's tensors; a context manager, since it holds the files (and a progress bar) open.

    `spelling` maps a stored name to the one that models ask for.
    """

    def __init__(
        self, folder: Path, spelling: Callable[[str], str] = str, placement: Placement = CPU
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
            self._home |= {spelling(name): (file, name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        screen = Console(stderr=True)
        progress = Progress(console=screen, disable=not sys.stderr.isatty(), transient=True)
        self._progress = self._open.enter_context(progress)
        self._task = progress.add_task(f"loading {folder.name}", total=len(self._home))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        if name not in self._home:
            raise ConfigError(f"{self._folder} has no tensor {name}")
        file, stored = self._home[name]
        found = tuple(file.get_slice(stored).get_shape())
        if found != shape:
            raise ConfigError(f"tensor {name} of {self._folder} is {found}, its config says {shape}")
        self._progress.advance(self._task)
        return file.get_tensor(stored).to(self.placement.device, dtype or self.placement.dtype)


class DummyWeights(Weights):
    """Seeded noise: gains of one, matrices that keep the scale of their input; no optional tensors.

    A tensor depends on its name and the seed alone, not on the order in which tensors are taken.
    """

    def __init__(self, seed: int = 0, placement: Placement = CPU) -> None:
        super().__init__(placement)
        self._seed = seed

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        device, dtype = self.placement.device, dtype or self.placement.dtype
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        noise = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return noise.div_(shape[-1] ** 0.5)
