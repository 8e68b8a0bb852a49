"""The names by which a folder's MTP layers are known, without any tensor, for modules that load no torch.

What the layers compute is the business of `eyas.engine.models.mtp`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eyas.engine.checkpoint.values import Raw, whole
from eyas.engine.models.keys import MOST_LAYERS, text_of


@dataclass(frozen=True)
class Dialect:
    """A published form. Its tensors' names begin with `stem` and the number of the head's layer; with the
    stem alone, if it is one of a single layer, whose own tensors stand below `layer` there.

    `token_norm`, `feature_norm`, `join` and `final_norm` name what the layer itself does not have.
    `feature_first`: the first half of the columns of `join` is the feature's, not the token's.
    `first_is_blank`: at position 0 the token's embedding counts as zeros.
    """

    stem: str
    token_norm: str
    feature_norm: str
    join: str
    final_norm: str
    feature_first: bool = False
    first_is_blank: bool = False
    layer: str = ""


MIMO = Dialect(
    stem="model.mtp_layers.",
    token_norm="token_layernorm",
    feature_norm="hidden_layernorm",
    join="input_proj",
    final_norm="final_layernorm",
    feature_first=True,
    first_is_blank=True,
)
NEXTN = Dialect(
    stem="model.layers.",  # numbered on from the target's, or from 0 in a folder of its own
    token_norm="enorm",
    feature_norm="hnorm",
    join="eh_proj",
    final_norm="shared_head.norm",
)
QWEN = Dialect(
    stem="mtp",
    token_norm="pre_fc_norm_embedding",
    feature_norm="pre_fc_norm_hidden",
    join="fc",
    final_norm="norm",
    layer="layers.0",
)
DIALECTS = (MIMO, NEXTN, QWEN)
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def dialect_of(prefix: str) -> Dialect:
    """The dialect of a layer whose tensors' names begin with `prefix`."""
    return next(dialect for dialect in DIALECTS if prefix.startswith(dialect.stem))


def layer_count(raw: Raw) -> int:
    """The number of MTP layers by config.json."""
    text = text_of(raw)
    return max(whole(text, name, 0, most=MOST_LAYERS) for name in COUNTS)


def expected_prefixes(raw: Raw, target_layers: int) -> list[str]:
    """The prefixes under which a folder without tensors yet would have its layers, by its config.json."""
    if str(text_of(raw).get("model_type", "")).startswith(("qwen3_next", "qwen3_5")):
        return [QWEN.stem] * layer_count(raw)
    stem, first = (MIMO.stem, 0) if raw.get("model_type") == "mimo" else (NEXTN.stem, target_layers)
    return [f"{stem}{first + i}" for i in range(layer_count(raw))]


def prefixes_among(names: Iterable[str]) -> list[str]:
    """The prefixes under which a tensor that joins stands, one per MTP layer, in the order of their
    numbers."""
    stems = (
        name.removesuffix(f".{dialect.join}.weight")
        for name in names
        for dialect in DIALECTS
        if name.startswith(dialect.stem) and name.endswith(f".{dialect.join}.weight")
    )
    return sorted(stems, key=lambda prefix: prefix != QWEN.stem and int(prefix.rpartition(".")[2]))
