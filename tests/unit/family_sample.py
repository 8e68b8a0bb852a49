"""The description of a random-weight model that transformers builds, and the sizes that samples share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB = 131
WINDOW = 40  # less than a block of keys, and less than the prompts


@dataclass(frozen=True)
class Sample:
    """`gain`: the mean of the stored norm gains. `changes`: to the sizes and defaults below, but for those
    `without` which the configuration is made.
    """

    model: str
    config: str
    gain: float = 1.0
    changes: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}
