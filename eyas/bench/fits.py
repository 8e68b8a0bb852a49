"""Checks before anything is loaded: a device that is not there, a model that does not fit."""

from __future__ import annotations

import torch

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.memory import GIB, memory
from eyas.engine.checkpoint.sizes import replica_share, weight_bytes
from eyas.engine.models.table import read_model


def check(config: EngineConfig) -> None:
    """Raises ConfigError if the model's folder cannot be served, or there is no such device here."""
    read_model(config.model, config.load_format, impl=config.model_impl)
    if config.device != "cpu" and not torch.cuda.is_available():
        message = f"--device: {config.device} is not available: PyTorch sees no GPU here"
        raise ConfigError(message, param="device")


def check_memory(config: EngineConfig, free: int | None = None) -> None:
    """Raises ConfigError if one rank's weights take more than `free` bytes (None: what is free now)."""
    model = read_model(config.model, config.load_format, impl=config.model_impl)
    amount = weight_bytes(model, config.dtype, config.device, config.deterministic)
    ranks, sharers = config.tensor_parallel_size, config.dp_attention
    needed = amount.of_rank(ranks, sharers, replica_share(model, config))
    free = free_bytes(config.device) if free is None else free
    if needed > free:
        raise ConfigError(
            f"--model: {config.model} takes {needed / GIB:.1f} GiB of {config.dtype} weights, "
            f"and {free / GIB:.1f} GiB of {config.device} memory are free",
            param="model",
        )


def free_bytes(device: str) -> int:
    """Free bytes of the machine's memory, or of a GPU's."""
    if device == "cpu":
        return memory().free
    return int(torch.cuda.mem_get_info(device)[0])
