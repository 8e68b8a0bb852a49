"""A folder in PEFT's format: low-rank updates of a model's matrices (LoRA, arXiv 2106.09685).

What of the format is not computed here is refused by its name. PEFT names modules as transformers does; here
they have the names by which the model asks for their weights, and a module that the model stores as several
matrices is several updates with the same lower factor.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eyas.common.errors import ConfigError, InvalidRequest, NotFound
from eyas.common.grammars.regex_syntax import UnsupportedPattern
from eyas.common.model_folder import read_json_object
from eyas.engine.adapters.copies import check_copies, copied
from eyas.engine.adapters.fused_experts import FusedParameter, parameter_of
from eyas.engine.adapters.patterns import ModulePatterns, ValueT
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.host_tensors import (
    HostSlice,
    HostTensors,
    Room,
    TensorPlace,
    laid_out,
    read_files,
)
from eyas.engine.checkpoint.transposed_tensors import TransposedTensor
from eyas.engine.ipc.adapter_messages import ADAPTER_FILES, LORA_PATH

CONFIG, TENSORS = ADAPTER_FILES
MOST_CONFIG = 1 << 20  # bytes: one that names every module of a large model has a tenth
MatrixCheck = Callable[[str, tuple[int, int]], None]
"""Takes the name of a matrix and the shape of its update; raises InvalidRequest if there is no such one."""

_FACTOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")
_TURNED = (0, 19)
"""The version of PEFT from which A of a parameter of all experts has its columns, as of other modules."""
_FLOATS = ("F32", "F16", "BF16")
_OTHERS = {
    "lora_magnitude_vector": "DoRA (lora_magnitude_vector)",
    "lora_embedding": "embeddings (lora_embedding)",
    "modules_to_save": "whole modules (modules_to_save)",
    ".bias": "biases",
}
"""Parts of the names of tensors that are no factor."""

_UNSERVED = {
    "use_dora": "DoRA (use_dora)",
    "modules_to_save": "whole modules (modules_to_save)",
    "lora_bias": "biases of factors (lora_bias)",
    "use_qalora": "QALoRA (use_qalora)",
    "kasa_config": "KaSA, which cuts the base model's weights (kasa_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
    "use_bdlora": "block-diagonal factors (use_bdlora)",
    "layer_replication": "replicated layers (layer_replication)",
    "trainable_token_indices": "embeddings of tokens (trainable_token_indices)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "arrow_config": "a router of adapters (arrow_config)",
    "ensure_weight_tying": "updates that embedding and output head share (ensure_weight_tying)",
}
"""Fields that say of the equation what is not computed here, unless they are empty."""

_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` by which the base model's own weights have changed."""


@dataclass(frozen=True)
class LowRankUpdate:
    """What is added to a matrix [n, k]: the upper factor, `stored` [n, rank] times `scaling`, times `down`
    [rank, k].
    """

    down: torch.Tensor
    stored: torch.Tensor
    scaling: float = 1.0

    @property
    def rank(self) -> int:
        """Rows of `down`."""
        return self.down.shape[0]


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter as it was read. `updates`: by the names by which the model asks for the matrices.
    `contents`: of each folder all factors and their scalings, as words, which are being made.
    """

    updates: Mapping[str, LowRankUpdate]
    contents: tuple[Future[str], ...]

    @cached_property
    def id(self) -> str:
        """16 hex digits of a digest of the contents; waits for those."""
        words = " ".join(content.result() for content in self.contents)
        return hashlib.sha256(words.encode()).hexdigest()[:16]

    @property
    def rank(self) -> int:
        """The largest of its updates."""
        return max(update.rank for update in self.updates.values())


@dataclass(frozen=True)
class PeftConfig:
    """What adapter_config.json says of factors and scalings."""

    rank: int
    alpha: float
    ranks: ModulePatterns[int]
    alphas: ModulePatterns[float]
    stabilized: bool  # rsLoRA, arXiv 2312.03732
    old: bool = False  # whether a parameter of all experts has the factors' sides as PEFT had them at first

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Raises InvalidRequest for what is wrong or not served."""
        if (size := (folder / CONFIG).stat().st_size) > MOST_CONFIG:
            raise _wrong(f"{CONFIG} of {folder} has {size} bytes; {MOST_CONFIG} are the most")
        try:
            raw = read_json_object(folder / CONFIG)
            _check_served(raw)
            return cls(
                values.whole(raw, "r", least=1),
                values.number(raw, "lora_alpha"),
                _patterns(raw, "rank_pattern", partial(values.whole, least=1)),
                _patterns(raw, "alpha_pattern", values.number),
                values.switch(raw, "use_rslora", False),
                _is_old(raw.get("peft_version")),
            )
        except KeyError as error:
            raise _wrong(f"{CONFIG} of {folder} has no {error.args[0]}") from None
        except (ValueError, ConfigError) as error:
            raise _wrong(f"{CONFIG} of {folder}: {error}") from None

    def rank_of(self, module: str) -> int:
        """The rank of a module's factors."""
        return self.ranks.value(module, self.rank)

    def scaling_of(self, module: str) -> float:
        """What multiplies the product of a module's factors."""
        rank = self.rank_of(module)
        return self.alphas.value(module, self.alpha) / (math.sqrt(rank) if self.stabilized else rank)


class StoredFactor(NamedTuple):
    """The name of a factor's tensor, and its place in a file."""

    name: str
    place: TensorPlace


@dataclass(frozen=True)
class FactorPair:
    """Both factors of a module, A and B, or of one of its parameters that all experts share. `matrix`: the
    name by which the model asks for the module's.
    """

    module: str
    matrix: str
    lower: StoredFactor
    upper: StoredFactor
    parameter: FusedParameter | None

    @property
    def name(self) -> str:
        """The name that patterns match."""
        return self.module if self.parameter is None else self.parameter.name

    @property
    def experts(self) -> int:
        """How many experts each factor holds: 1 where it is a module's own."""
        return 1 if self.parameter is None else self.parameter.experts


def read_adapter(
    folder: Path,
    model: ModelConfig,
    most_rank: int,
    check: MatrixCheck = lambda _, shape: None,
    spelling: Callable[[str], str] | None = None,
    room: Room = HostTensors,
) -> PeftAdapter:
    """Reads an adapter of that model. `check`: raises for an update of a matrix, by its name and shape, that
    there is not; no factor is read before all have passed, so a file may be of any size.
    What is read is a copy: the file may be written again meanwhile. `spelling`: the name by which the model
    asks for a stored tensor; None: the model's own. `room`: gives memory for the copy.

    Raises NotFound if there is no such folder or file, InvalidRequest for what is wrong or not served in it,
    and for factors of more than `most_rank` rows.
    """
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise NotFound(f"{folder} has no {name}", param=LORA_PATH)
    config = PeftConfig.read(folder)
    pairs: list[FactorPair] = []
    copies: list[str] = []
    spelled = spelling or model.spelling

    def checked(places: dict[str, TensorPlace]) -> HostTensors:
        copies.extend(name for name in places if copied(name, spelled))
        own = ((n, each.dtype, each.shape) for n, each in places.items() if n not in copies)
        places = laid_out(own)  # with no room for copies
        pairs.extend(_pairs(places, folder, model, spelled, config.old))
        for pair in pairs:
            _check_pair(pair, config.rank_of(pair.name), most_rank)
        _check_matrices(pairs, model, folder, check)
        return room(places)

    try:
        file = read_files([folder / TENSORS], checked)
        check_copies(folder / TENSORS, copies, model, spelled)
    except (OSError, ConfigError) as error:
        raise _wrong(str(error)) from None
    updates: dict[str, LowRankUpdate] = {}
    scalings = {pair.name: config.scaling_of(pair.name) for pair in pairs}
    beside = ThreadPoolExecutor(1, "content")
    content = beside.submit(lambda: f"{file.digest_in_order()} {sorted(scalings.items())}")
    beside.shutdown(wait=False)
    for pair in pairs:
        down, up = file.tensor(pair.lower.name), file.tensor(pair.upper.name)
        updates |= _updates(pair, LowRankUpdate(down, up, scalings[pair.name]), model)
    _check_numbers(pairs, file)
    return PeftAdapter(updates, (content,))


def _pairs(
    places: Mapping[str, TensorPlace],
    folder: Path,
    model: ModelConfig,
    spelling: Callable[[str], str],
    old: bool,
) -> Iterator[FactorPair]:
    """Both factors of each module, in the order of their names. `old`: as of `parameter_of`."""
    factors: dict[str, dict[str, StoredFactor]] = {}
    for name, place in places.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            what = next((meant for part, meant in _OTHERS.items() if part in name), "it is no factor")
            raise _wrong(f"tensor {name} of {folder}: {what}: not supported")
        pair = factors.setdefault(match["module"], {})
        if match["factor"] in pair:
            raise _wrong(f"tensor {name} of {folder} is there by another name, too")
        pair[match["factor"]] = StoredFactor(name, place)
    if not factors:
        raise _wrong(f"{folder / TENSORS} has no factors (base_model.model.<module>.lora_A.weight)")
    for module, pair in sorted(factors.items()):
        if len(pair) < 2:
            raise _wrong(f"module {module} of {folder} has no lora_{'A' if 'B' in pair else 'B'}")
        shapes = pair["A"].place.shape, pair["B"].place.shape
        parameter = parameter_of(module, *shapes, model, old)
        yield FactorPair(module, spelling(f"{module}.weight"), pair["A"], pair["B"], parameter)


def _check_pair(pair: FactorPair, rank: int, most: int) -> None:
    """Raises InvalidRequest for factors that are none of this rank."""
    for name, (_, place), side in (("lora_A", pair.lower, 0), ("lora_B", pair.upper, 1)):
        if place.dtype not in _FLOATS:
            raise _wrong(f"{name} of {pair.module} is stored as {place.dtype}")
        if len(place.shape) != 2 or place.shape[side] != rank * pair.experts:
            raise _wrong(f"{name} of {pair.module} is {place.shape}: no factor of rank {rank}")
    if rank > most:
        raise _wrong(f"{pair.module} has rank {rank}; {most} is the most (--max-lora-rank)")


def _check_matrices(
    pairs: Sequence[FactorPair], model: ModelConfig, folder: Path, check: MatrixCheck
) -> None:
    """Raises InvalidRequest for a matrix that several modules update; what `check` raises."""
    seen: set[str] = set()
    for pair in pairs:
        down, up = (torch.empty(place.shape, device="meta") for _, place in (pair.lower, pair.upper))
        shaped = LowRankUpdate(down, up)
        for name, update in _updates(pair, shaped, model).items():
            if name in seen:
                raise _wrong(f"module {pair.module} updates {name}, as another module of {folder} does")
            seen.add(name)
            check(name, (update.stored.shape[0], update.down.shape[1]))


def _check_numbers(pairs: Sequence[FactorPair], file: HostTensors) -> None:
    """Raises InvalidRequest for a factor that holds what is no number."""
    if file.finite:
        return
    for pair in pairs:
        for which, factor in (("A", pair.lower), ("B", pair.upper)):
            if not file.tensor(factor.name).isfinite().all():
                raise _wrong(f"lora_{which} of {pair.module} holds NaN or infinity")


def _updates(pair: FactorPair, update: LowRankUpdate, model: ModelConfig) -> dict[str, LowRankUpdate]:
    """The update of a module, by the names of the model's matrices that it is."""
    if pair.parameter is not None:
        each = pair.parameter.factors(update.down, update.stored, model)
        return {part: replace(update, down=down, stored=up) for part, down, up in each}
    name = pair.matrix
    joined = next((kind for kind in model.fused if kind.holds(name)), None)
    if joined is None:
        return {name: update}
    up = update.stored.t() if isinstance(joined, TransposedTensor) else update.stored
    stored = HostSlice("F32", up)
    try:
        parts = list(joined.split(name, tuple(up.shape)))
    except ConfigError as error:
        raise _wrong(f"lora_B of {pair.module} does not fit {model.architecture}: {error}") from None
    ups = {part: (view(stored) if view else stored)[:] for part, view in parts}
    return {part: replace(update, stored=up) for part, up in ups.items()}


def _check_served(raw: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that says of the equation what is not computed here."""
    if (kind := raw.get("peft_type")) != "LORA":
        raise ValueError(f"peft_type {values.said(kind)} is not supported; LORA is")
    for field, what in _UNSERVED.items():
        if raw.get(field):
            raise ValueError(f"{what} is not supported")
    if (bias := raw.get("bias", "none")) not in ("none", None):
        raise ValueError(f"bias {values.said(bias)} is not supported; none is")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASES):
        raise ValueError(f"init_lora_weights {start} changes the base model: convert the adapter to its own")


def _is_old(version: Any) -> bool:
    """Whether PEFT was older than `_TURNED`; one that says no version was older still."""
    match = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    return match is None or (int(match[1]), int(match[2])) < _TURNED


def _patterns(
    raw: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any], str], ValueT]
) -> ModulePatterns[ValueT]:
    """A field that says something by patterns. Raises ValueError for one that is not followed."""
    stored = values.section(raw, name)
    try:
        return ModulePatterns({pattern: read(stored, pattern) for pattern in stored})
    except UnsupportedPattern as error:
        raise ValueError(f"{name} {error}") from None


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=LORA_PATH)
