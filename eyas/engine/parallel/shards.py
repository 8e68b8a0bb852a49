"""Divides a decoder among the ranks of a group (Megatron-LM, section 3).

| tensor | each rank holds | then |
| --- | --- | --- |
| embedding, norms | all of it | every rank has every residual row |
| q, k, v | the rows of its query heads and of its key and value heads | it attends with those alone |
| o | the columns of its query heads | sum over the ranks |
| gate, up | its rows of each | |
| down | its columns | sum over the ranks |
| of experts the same, of each one; the router | all of it | every rank chooses alike |
| q, k, v, gates, convolution of states | the rows of its key heads and of their value heads | |
| lm_head | its rows of the vocabulary | logits joined by columns |

So a layer has two sums, and a rank's KV pool holds the rank's heads only; latents, which all heads read,
every rank holds. A draft head's layers are of the same kind; every rank holds all of its fc. Biases of q, k
and v are divided like their rows; only rank 0 adds the bias of o, so that the sum has it once.
`eyas.engine.checkpoint.weights` divides the tensors, and `ProcessGroup` does the sums and joins.
"""

from __future__ import annotations

import dataclasses

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ExpertsSpec, LayerSpec, ModelConfig


def config_of_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """The decoder with one rank's heads and feed-forward width; hidden size and vocabulary stay whole.

    Raises ConfigError, which names the flag and the size, if a size is not divisible: no rank shares a head.
    """
    sizes = {"vocabulary rows": config.vocab_size}
    for layer in config.layers:
        sizes |= {
            "query heads": layer.attention.num_heads,
            "key and value heads": layer.attention.num_kv_heads,
            "feed-forward columns": layer.feed_forward.width,
        }
        if layer.attention.latent:
            del sizes["key and value heads"]
        if layer.attention.row_norms and ranks > 1:
            flag = "tensor-parallel-size"
            text = f"--{flag}: {config.folder.name}: ranks cannot divide norms over whole rows of q and k"
            raise ConfigError(text, param=flag)
        if layer.token_width and ranks > 1:
            flag = "tensor-parallel-size"
            text = f"--{flag}: {config.folder.name}: ranks cannot divide the vectors of tokens for layers"
            raise ConfigError(text, param=flag)
        if isinstance(layer.feed_forward, ExpertsSpec):
            sizes["shared expert's columns"] = layer.feed_forward.shared_width
        if layer.delta is not None and not layer.delta.divisible and ranks > 1:
            flag = "tensor-parallel-size"
            text = f"--{flag}: {config.folder.name}: ranks cannot divide layers with {layer.delta.kind}"
            raise ConfigError(text, param=flag)
        if layer.delta is not None:
            sizes |= {"key heads of states": layer.delta.key_heads, "value heads": layer.delta.value_heads}
        for name, size in sizes.items():
            if size % ranks:
                flag = "tensor-parallel-size"
                text = f"--{flag}: {config.folder.name}: {size} {name} cannot be divided among {ranks} ranks"
                raise ConfigError(text, param=flag)
    return dataclasses.replace(config, layers=tuple(_share(layer, ranks) for layer in config.layers))


def check_experts(config: ModelConfig, ranks: int) -> None:
    """Raises ConfigError, which names the flag, if attention ranks cannot share this decoder's experts."""
    counts = {part.experts for part in config.experts}
    if ranks == 1 or (len(counts) == 1 and not max(counts) % ranks):
        return
    flag, name = "dp-attention", config.folder.name
    if not counts:
        text = f"{name} has no experts for ranks to share; more workers (--workers) serve a dense model"
    else:
        numbers = " or ".join(map(str, sorted(counts)))
        text = f"{name}: {numbers} experts per layer cannot be divided among {ranks} ranks"
    raise ConfigError(f"--{flag}: {text}", param=flag)


def check_replicas(config: ModelConfig, engine: EngineConfig) -> None:
    """Raises ConfigError, which names the flag, for more replicas than other attention ranks have experts."""
    if not (spares := engine.expert_replicas):
        return
    fewest = min(part.experts for part in config.experts)
    others = fewest - fewest // engine.dp_attention
    if spares > others:
        flag = "expert-replicas"
        text = f"--{flag}: {spares} are more than the {others} experts that a rank's layer has not"
        raise ConfigError(text, param=flag)


def _share(layer: LayerSpec, ranks: int) -> LayerSpec:
    attention, feed_forward = layer.attention, layer.feed_forward
    kv_heads = attention.num_kv_heads
    feed_forward = dataclasses.replace(feed_forward, width=feed_forward.width // ranks)
    if isinstance(feed_forward, ExpertsSpec):
        shared = feed_forward.shared_width // ranks
        feed_forward = dataclasses.replace(feed_forward, shared_width=shared)
    return dataclasses.replace(
        layer,
        attention=dataclasses.replace(
            attention,
            num_heads=attention.num_heads // ranks,
            num_kv_heads=kv_heads if attention.latent else kv_heads // ranks,
        ),
        feed_forward=feed_forward,
        delta=None if layer.delta is None else layer.delta.of_rank(ranks),
    )
