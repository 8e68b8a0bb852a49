"""What a model with recurrent states is not served with, refused before any weight is read."""

from __future__ import annotations

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.states.shape import SPAN


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
    for flag, (asked, why) in refused.items():
        if asked:
            raise ConfigError(f"--{flag}: {target.architecture} has recurrent states: {why}", param=flag)
