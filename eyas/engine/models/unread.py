"""Stored tensors that a model must not leave unread: they say that it is another one.

A bias, a norm or a correction of scores that nothing reads leaves fluent answers that are wrong. This file
knows the names that decoders ask for; it refuses to know files.
"""

from __future__ import annotations

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightSource

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ASIDE = ("scale", "scale_inv", "inv_freq", "cos_cached", "sin_cached")
"""Ends of names that no equation here needs: scales of other quantities than weights, tables of RoPE."""


def check_tied(config: ModelConfig, weights: WeightSource) -> None:
    """Raises ConfigError if the output head is the embedding by its config.json, and differs from it."""
    if config.tied_head and HEAD in weights and not weights.alike(HEAD, EMBEDDING):
        raise ConfigError(
            f"config.json of {config.folder}: tie_word_embeddings says that {HEAD} is {EMBEDDING}, "
            "and a different one is stored: set it to false to serve that one"
        )


def check_layers(config: ModelConfig, weights: WeightSource) -> None:
    """Raises ConfigError, which names it, for a tensor of the layers or the ends that was not taken.

    Experts may be another rank's. What stands behind the last layer is a draft head's.
    """
    parts = ("lm_head.", "model.norm.", *(f"model.layers.{i}." for i in range(config.num_layers)))
    unread = [n for n in weights.left(parts) if ".experts." not in n and not n.endswith(_ASIDE)]
    if unread:
        others = f" and {len(unread) - 1} others" if unread[1:] else ""
        raise ConfigError(
            f"{config.folder} holds a tensor {unread[0]}{others}, which a {config.architecture} "
            "with its config.json does not read: it is another model"
        )
