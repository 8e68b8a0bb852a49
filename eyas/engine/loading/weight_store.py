"""The weights of an engine as they were stored: those that serve, and those of an update that is staged.

Stored tensors of an update stay in the host's memory when they serve. So a later update of some tensors has
the others, and what was stored of a tensor can be read, though formats have changed it beyond recognition.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eyas.common.errors import ConfigError, EyasError, InvalidRequest, NotFound
from eyas.common.weights import JoinGroup, PrepareWeights
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.folder import read_config, weight_files
from eyas.engine.checkpoint.host_tensors import DIGEST_BYTES, DiskFile, HostFile, HostTensors, LayeredFile
from eyas.engine.ipc.pulse import Beat
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.weight_sources import WeightSources
from eyas.engine.loop.weight_updates import StagedWeights
from eyas.engine.models.decoder import HEAD
from eyas.engine.models.table import read_model

UNSAID = frozenset(("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"))
"""What config.json of the same model may say otherwise: shapes and equations are not among it."""


class Replacement(Protocol):
    """The weights that steps read, on all ranks."""

    def rehearse(self, file: HostFile) -> None:
        """Raises ConfigError, by name, if those of `file` cannot take their place."""

    def write(self, file: HostFile, beat: Beat) -> None:
        """Writes those that were rehearsed last."""

    def forget(self) -> None:
        """Lets go of the weights that were rehearsed last."""


@dataclass(frozen=True)
class FixedWeights:
    """A `Replacement` of weights that stay as they are, and why."""

    why: str

    def rehearse(self, file: HostFile) -> None:
        """Raises InvalidRequest."""
        raise InvalidRequest(f"the weights of this worker do not change: {self.why}")

    def write(self, file: HostFile, beat: Beat) -> None:
        """Never called: no update was rehearsed."""
        raise AssertionError(self.why)

    def forget(self) -> None:
        """Never called."""
        raise AssertionError(self.why)


class EngineWeights:
    """A `WeightStore` over the weights that `replacement` writes."""

    def __init__(self, loaded: EngineSpec, replacement: Replacement, sources: WeightSources) -> None:
        self._loaded, self._replacement, self._sources = loaded, replacement, sources
        self._served: HostFile | None = None  # None: the folder's
        self._digest = ""

    def stage(self, update: PrepareWeights) -> StagedWeights:
        """Raises EyasError, which names what is wrong with the update; nothing is staged then."""
        if (folder := getattr(update.source, "path", None)) is not None:
            self._check_config(Path(folder))
        read = self._sources.read(update.source)
        digest, file = read.digest(), self._whole(read, whole=update.whole)
        if not update.whole:
            digest = hashlib.blake2b(
                f"{self._digest} {digest}".encode(), digest_size=DIGEST_BYTES
            ).hexdigest()
        try:
            self._replacement.rehearse(file)
        except ConfigError as error:
            raise InvalidRequest(error.message, param=update.source.param) from None
        return StagedWeights(digest, len(read.places), read.nbytes, file)

    def drop(self, staged: StagedWeights) -> None:
        """The memory is the next update's, or free, unless tensors of it still serve."""
        self._replacement.forget()
        spare, staged.file, served = staged.file, None, self._served
        if served is None or not any(part is spare for part, _ in served.parts()):
            self._sources.keep(spare)

    def tidy(self) -> None:
        """No update is near: frees memory for one."""
        self._sources.keep(None)

    def write(self, staged: StagedWeights, beat: Beat) -> None:
        """Whatever it raises, the weights are then neither the old ones nor the new."""
        self._replacement.write(staged.file, beat)
        self._served, self._digest, staged.file = staged.file, staged.digest, self._served

    def read(self, name: str, count: int) -> tuple[float, ...]:
        """Raises NotFound for a tensor that is not there."""
        file = self._stored()
        if name not in file.keys():
            raise NotFound(f"the model has no tensor {name[:200]!r}", param="name")
        whole = file.get_slice(name)[...]
        return tuple(whole.flatten()[:count].float().tolist())

    def check_join(self, group: str, backend: str) -> None:
        """See `WeightSources`."""
        self._sources.check_join(group, backend)

    def join(self, command: JoinGroup) -> None:
        """See `WeightSources`."""
        self._sources.join(command)

    def leave(self, group: str) -> None:
        """See `WeightSources`."""
        self._sources.leave(group)

    def _whole(self, read: HostTensors, *, whole: bool) -> HostFile:
        """What is served after the update. A tied head's copy may come with it; a copy of before would be one
        of an embedding that changes.
        """
        if whole:
            return read
        below, target = self._stored(), self._loaded.target
        copies = {n for n in (*read.keys(), *below.keys()) if target.tied_head and target.spelling(n) == HEAD}
        if unknown := sorted(set(read.keys()) - set(below.keys()) - copies):
            raise InvalidRequest(f"the model has no tensor {unknown[0]}", param="names")
        return LayeredFile(read, LayeredFile(below).without(copies))

    def _stored(self) -> HostFile:
        """The tensors that are served, as they were stored."""
        if self._served is not None:
            return self._served
        if self._loaded.config.load_format == "dummy":
            raise InvalidRequest("dummy weights were stored nowhere: the first update must be of all tensors")
        return _opened(weight_files(self._loaded.target.folder))

    def _check_config(self, folder: Path) -> None:
        """Raises InvalidRequest if the folder's config.json is another model's. One that says in words what
        the other leaves to defaults, as libraries store it, is not.
        """
        if not folder.is_dir():
            raise InvalidRequest(f"{folder} is no folder on this worker's machine", param="model_path")
        if not (folder / "config.json").is_file():
            return
        both = (self._loaded.target.folder, folder)
        try:
            own, other = (_said(read_config(each)) for each in both)
            if own == other or self._meaning(both[0]) == self._meaning(both[1]):
                return
        except EyasError as error:
            raise InvalidRequest(error.message, param="model_path") from None
        said = sorted(own.keys() & other.keys()) + sorted(own.keys() ^ other.keys())  # by both: likelier it
        key = next(key for key in said if own.get(key) != other.get(key))
        here, there = (json.dumps(each.get(key))[:80] for each in (own, other))
        text = f"config.json of {folder} is of another model: its {key} is {there}, and not {here}"
        raise InvalidRequest(text, param="model_path")

    def _meaning(self, folder: Path) -> ModelConfig:
        """The model that a folder's config.json describes, but for where it is and what ends its answers."""
        config = self._loaded.config
        read = read_model(folder, config.load_format, config.texts, config.model_impl)
        return dataclasses.replace(read, folder=Path(), eos_token_ids=())


def _said(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in UNSAID and value is not None}


def _opened(paths: Iterable[Path]) -> LayeredFile:
    return LayeredFile(*map(DiskFile, paths))
