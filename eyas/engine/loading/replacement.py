"""Puts new weights in the place of those that serve, without moving one: graphs were captured over their
addresses.

New weights become parts of a model by the loaders that made the old ones, part by part. Then both are walked
side by side, and each tensor of the new part is copied to the place of the old one. So whatever a format
does to stored tensors (folds gains into them, packs, stacks or shards them) is done to an update as at a
start, and a replaced model is, to the bit, one that was started on the new weights. `rehearse` does all but
the copying: what can be wrong with an update is found by it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from eyas.common.errors import ConfigError
from eyas.common.types import KvKind
from eyas.engine.checkpoint.weights import StoredFile
from eyas.engine.formats.adapted import AdaptedProjection
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.layers.adapted import AdaptedLinear
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.decoder import Decoder

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor that serves, and the one that takes its place."""


class WeightReplacement:
    """The weights of one rank of `loaded`, whose `model` serves."""

    def __init__(self, loaded: EngineSpec, model: Decoder[Any]) -> None:
        self._loaded, self._model = loaded, model
        device = loaded.config.device
        self._stream = None if device == "cpu" else torch.cuda.Stream(device)

    def rehearse(self, file: StoredFile) -> None:
        """Raises ConfigError, which names the tensor, if the weights of `file` cannot take the place of those
        that serve: one is missing, or has another shape, or NaN, or is read by nothing.
        """
        with self._aside():
            for _ in self._pairs(file):
                pass

    def write(self, file: StoredFile, beat: Beat = no_pulse) -> None:
        """Writes weights that were rehearsed; no step runs meanwhile. `beat`: is called after each part."""
        with self._aside():
            for pairs in self._pairs(file):
                for old, new in pairs:
                    old.copy_(new)
                beat()

    def forget(self) -> None:
        """Does nothing: the owner of the file drops it."""

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """What a GPU does for it runs beside the steps, on one stream, whose memory is used again; all of it
        is over at the end.
        """
        with torch.inference_mode():
            if self._stream is None:
                yield
                return
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:  # what was launched before an error reads the new weights' memory as well
                self._stream.synchronize()

    def _pairs(self, file: StoredFile) -> Iterator[list[Pair]]:
        """Yields the pairs of each part; one part at a time is in memory twice."""
        with self._loaded.weights(KvKind.TARGET, file) as weights:
            for name, old, new in self._model.renewed(weights):
                yield list(paired(old, new, name))


def paired(old: Any, new: Any, name: str) -> Iterator[Pair]:
    """The tensors of two parts that were made alike, each once. Raises ConfigError, which says where, if
    they are not: then the new one cannot take the old one's place.
    """
    return _Walk().pairs(old, new, name)


class _Walk:
    """Two objects side by side, with all that belongs to them."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()
        self._both: list[Any] = []  # so that no name of what was seen is another object's

    def pairs(self, old: Any, new: Any, where: str) -> Iterator[Pair]:
        if old is new or (id(old), id(new)) in self._seen:
            return
        self._seen.add((id(old), id(new)))
        self._both.append((old, new))
        if type(old) is not type(new):
            raise _differ(where, type(old).__name__, type(new).__name__)
        if isinstance(old, torch.Tensor):
            if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
                raise _differ(where, _said(old), _said(new))
            yield old, new
        elif (parts := _parts(old)) is not None:
            others = _parts(new)
            assert others is not None
            if parts.keys() != others.keys():
                raise _differ(where, sorted(map(str, parts)), sorted(map(str, others)))
            for name, part in parts.items():
                yield from self.pairs(part, others[name], f"{where}.{name}")
        elif old != new:
            raise _differ(where, old, new)


def _parts(whole: Any) -> Mapping[Any, Any] | None:
    """The parts of an object by name; None: it has none, and is compared as it is."""
    if isinstance(whole, Mapping):
        return whole
    if isinstance(whole, list | tuple):
        return dict(enumerate(whole))
    if isinstance(whole, functools.partial):
        return {"func": whole.func, "args": whole.args, "keywords": whole.keywords}
    if isinstance(whole, types.MethodType):
        return {"self": whole.__self__, "func": whole.__func__}
    if isinstance(whole, types.FunctionType):
        cells = [cell.cell_contents for cell in whole.__closure__ or ()]
        return {"code": whole.__code__, **dict(zip(whole.__code__.co_freevars, cells, strict=True))}
    if isinstance(whole, type | types.ModuleType):
        return None
    if isinstance(whole, AdaptedProjection | AdaptedLinear):
        sites = [whole.site] if isinstance(whole, AdaptedLinear) else whole.sites
        return {"base": whole.base, "sites": sites}  # what adapters add is theirs
    if dataclasses.is_dataclass(whole):
        return {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    return getattr(whole, "__dict__", None)


def _said(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _differ(where: str, old: Any, new: Any) -> ConfigError:
    return ConfigError(
        f"the new weights cannot take the old ones' place: {where} is {old}, and would be {new}"
    )
