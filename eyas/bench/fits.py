"""What can be refused before anything is loaded: a device that is not there, a model that does not fit."""

from __future__ import annotations

import torch

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.memory import memory
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models.table import read_model
from eyas.engine.parallel.shards import config_of_rank


def check(config: EngineConfig) -> None:
    """Raises ConfigError if the model's folder cannot be served, or there is no such device here."""
    read_model(config.model, config.load_format)
    if config.device != "cpu" and not torch.cuda.is_available():
        message = f"--device: {config.device} is not available: PyTorch sees no GPU here"
        raise ConfigError(message, param="device")


def check_memory(config: EngineConfig, free: int | None = None) -> None:
    """Raises ConfigError if one rank's weights take more than `free` bytes (None: what is free now)."""
    model = read_model(config.model, config.load_format)
    size = torch.empty(0, dtype=getattr(torch, config.dtype)).element_size()
    needed = size * parameters(config_of_rank(model, config.tensor_parallel_size))
    free = free_bytes(config.device) if free is None else free
    if needed > free:
        raise ConfigError(
            f"--model: {config.model} takes {needed / 1e9:.1f} GB of {config.dtype} weights, "
            f"and {free / 1e9:.1f} GB of {config.device} memory are free",
            param="model",
        )


def free_bytes(device: str) -> int:
    """Of the machine's memory, or of a GPU's."""
    if device == "cpu":
        return memory().free
    return int(torch.cuda.mem_get_info(device)[0])


def parameters(model: ModelConfig) -> int:
    """Elements of a decoder's matrices; what vectors add does not count."""
    total = model.vocab_size * model.hidden_size * (1 if model.tied_head else 2)
    for layer in model.layers:
        attention = layer.attention
        heads = 2 * attention.num_heads + 2 * attention.num_kv_heads  # q and o; k and v
        total += model.hidden_size * (heads * attention.head_dim + 3 * layer.feed_forward.width)
    return total
