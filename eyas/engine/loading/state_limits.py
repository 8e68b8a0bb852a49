"""What a model with recurrent states is not served with, refused before any weight is read."""

from __future__ import annotations

import dataclasses

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.types import Role
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.states.shape import SPAN
from kv_transfer.backends.table import NONE


def staying(target: ModelConfig, config: EngineConfig) -> EngineConfig:
    """The configuration by which states stay where they cannot travel."""
    stays = target.delta is not None and config.attention_backend != "torch"
    return dataclasses.replace(config, transfer=NONE) if stays else config


def check_states(target: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigError, naming the flag, for what does not work with states, or needs a model with some."""
    if target.delta is None:
        if config.state_slots is not None:
            raise ConfigError(
                f"--state-slots: {target.architecture} has no recurrent states", param="state-slots"
            )
        return
    refused = {
        "dp-attention": (config.dp_attention > 1, "attention ranks have no slots of states"),
        "host-cache-gb": (config.host_cache_gb > 0, "states do not leave for the host's memory"),
        "spec-draft-tokens": (
            config.round_width > SPAN,
            f"a round has at most {SPAN} rows, drafts and the one before them",
        ),
    }
    if config.attention_backend != "torch":
        whole = set(config.roles) == set(Role)
        refused |= {
            "tensor-parallel-size": (config.tensor_parallel_size > 1, "GPUs do not share them yet"),
            "spec-topk": (
                config.speculates and config.speculation.topk > 1,
                "on a GPU drafts are chains (1)",
            ),
            "roles": (not whole, "they do not leave a GPU yet, so that a worker has all roles (unified)"),
        }
    for flag, (asked, why) in refused.items():
        if asked:
            raise ConfigError(f"--{flag}: {target.architecture} has recurrent states: {why}", param=flag)
