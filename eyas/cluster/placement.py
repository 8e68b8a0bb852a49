"""Assigns GPUs, and parts of their memory, to the workers of a cluster: pure functions of numbers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eyas.common.config import RESERVE_BYTES
from eyas.common.errors import ConfigError


@dataclass(frozen=True)
class WorkerGpus:
    """A worker's first GPU, "cuda:1" for instance, and the fraction of the memory of each of its GPUs."""

    device: str
    fraction: float


def places(
    ranks: Mapping[str, int], numbers: Sequence[int], fraction: float, memory: Sequence[int | None]
) -> dict[str, WorkerGpus]:
    """A place for each worker. Workers whose GPU is named several times share it, in equal fractions.

    `ranks`: how many GPUs each worker takes; `numbers`: those GPUs, worker after worker. `fraction`: of a
    GPU's memory, for all workers there together. `memory`: bytes of every GPU of the machine, by number;
    None: unknown. Raises ConfigError, which names the flag, if that does not fit.
    """
    _check_count(ranks, numbers)
    left = iter(numbers)
    own = {name: tuple(itertools.islice(left, count)) for name, count in ranks.items()}
    sharers: dict[int, list[str]] = defaultdict(list)
    for name, gpus in own.items():
        _check_gpus(name, gpus, len(memory))
        for gpu in gpus:
            sharers[gpu].append(name)
    for gpu, names in sharers.items():
        _check_shares(gpu, names, fraction, memory[gpu])
    return {
        name: WorkerGpus(f"cuda:{gpus[0]}", fraction / max(len(sharers[gpu]) for gpu in gpus))
        for name, gpus in own.items()
    }


def _check_count(ranks: Mapping[str, int], numbers: Sequence[int]) -> None:
    needed = sum(ranks.values())
    if len(numbers) != needed:
        text = f"{len(numbers)} named, {needed} needed by {', '.join(ranks)}"
        raise ConfigError(f"--gpus: {text}", param="gpus")


def _check_gpus(name: str, gpus: Sequence[int], there: int) -> None:
    for gpu in gpus:
        if gpu >= there:
            text = f"{name} would be on GPU {gpu}, and this machine has {there}, numbered from 0"
            raise ConfigError(f"--gpus: {text}; a GPU named twice is shared (--gpus 0,0)", param="gpus")
    if list(gpus) != list(range(gpus[0], gpus[0] + len(gpus))):
        text = f"{name} takes {len(gpus)} GPUs that follow each other, and {','.join(map(str, gpus))} do not"
        raise ConfigError(f"--gpus: {text}", param="gpus")


def _check_shares(gpu: int, names: Sequence[str], fraction: float, memory: int | None) -> None:
    """A worker alone on a GPU makes do with what is free; several would each take what is free now."""
    if memory is None or len(names) == 1 or fraction * memory + len(names) * RESERVE_BYTES <= memory:
        return
    raise ConfigError(
        f"--mem-fraction-static: {', '.join(names)} share GPU {gpu}: {fraction:g} of its "
        f"{memory / 2**30:.1f} GiB, and for each worker {RESERVE_BYTES / 2**30:g} GiB more for graphs and "
        "activations, are more than it has; lower the fraction or name the GPU less often",
        param="mem-fraction-static",
    )
