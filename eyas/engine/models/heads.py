"""The draft heads that there are, one name per kind, and what kinds have in common.

Which kind a folder holds is seen by its tensors, never by what its config.json calls itself; of what it reads
here a kind's file makes a `DraftConfig`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, cast

import torch

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import DraftBlock, DraftConfig, LayerSpec, ModelConfig
from eyas.engine.checkpoint.folder import read_config, tensor_shapes
from eyas.engine.checkpoint.methods import read_quantized
from eyas.engine.checkpoint.token_map import read_token_map, refused
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import AnyProjection, ProjectionT
from eyas.engine.kv.pool import KvPool
from eyas.engine.models import llama
from eyas.engine.models.base import Drafted, DraftModel, FeatureTap, FinalNorm
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.keys import MOST_COLUMNS, Fit, reading
from eyas.engine.models.layer import head_layers, keep_layers, run_layers
from eyas.engine.models.ops.machine import Blocks, Machine

HEADS = ("mtp", "dspark", "dflash", "eagle", "peagle", "whole_model", "eagle3")
"""The modules of `eyas.engine.models` that are a `HeadFamily`, in the order in which they see a folder."""

TAKING_UPDATES = frozenset({"eagle", "peagle", "eagle3", "mtp"})
"""Those of them whose `DraftModel` is an `AdaptedDraftModel`."""

MOST_LAYERS = 128


class HeadFamily(Protocol):
    """The module of a kind of head. `NAME`: with its article, for errors."""

    NAME: str

    def describe_head(
        self, raw: Raw, folder: Path, target: ModelConfig, load_format: str
    ) -> DraftConfig | None:
        """The head of a folder whose config.json is `raw`; None if its tensors are another kind's.

        With `load_format` "dummy" there are no tensors, and a kind says yes to any config.json that it could
        be. Raises what `reading` makes sentences of, and ConfigError if the head does not fit `target`.
        """

    def spelling(self, name: str) -> str:
        """The name by which the head's classes ask for the tensor that is stored as `name`."""

    def load_tap(
        self, config: DraftConfig, weights: WeightSource, final_norm: FinalNorm, machine: Machine[Any]
    ) -> FeatureTap:
        """The half beside the target, whose `final_norm` some heads' features have passed."""

    def load_draft(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[Any]
    ) -> DraftModel[Any]:
        """The half that drafts. `ends`: the target's, for a head without its own."""


def read_head(
    folder: Path | str, target: ModelConfig, load_format: str = "auto", capture_layers: tuple[int, ...] = ()
) -> DraftConfig:
    """The draft head that a folder holds. Raises ConfigError if it is none, or does not fit `target`.

    `capture_layers`: instead of the layers in its config.json (--draft-capture-layers).
    """
    folder = Path(folder)
    raw = read_config(folder)
    kinds = [head_family(name) for name in HEADS]
    for family in kinds:
        with reading(folder):
            config = family.describe_head(raw, folder, target, load_format)
        if config is not None:
            return _capturing(config, target, capture_layers)
    if folder.resolve() == target.folder.resolve():
        raise ConfigError(f"draft head {folder}: it is the model's own folder, and has no MTP layer")
    names = " nor ".join(family.NAME for family in kinds)
    raise ConfigError(f"draft head {folder}: it is not {names} (another kind: docs/adding-a-draft-head.md)")


def target_alike(folder: Path) -> ModelConfig:
    """A target of the sizes in a head's own config.json, with as many layers as the largest models have, in a
    folder that is not there.

    For callers that ask what a head is, and have no target. Raises ConfigError if config.json does not say.
    """
    raw = read_config(folder)
    with reading(folder):
        alike = llama.describe({"num_hidden_layers": 1, **raw}, folder)
    return dataclasses.replace(alike, folder=folder / "nowhere", layers=alike.layers[:1] * MOST_LAYERS)


def _capturing(config: DraftConfig, target: ModelConfig, flagged: tuple[int, ...]) -> DraftConfig:
    """The head with the captured layers that a flag names, or its own. ConfigError if there are none."""
    flag, last = "draft-capture-layers", target.num_layers
    if flagged and config.capture_layers in ((last,), ()):
        fed = "what leaves the last layer, and with no other" if config.capture_layers else "no layer"
        what = f"draft head {config.folder} is fed with {fed}"
        raise ConfigError(f"--{flag}: {what}", param=flag)
    layers = flagged or config.capture_layers
    named = ", ".join(map(str, layers))
    if flagged and config.captures not in (0, len(flagged)):
        what = f"draft head {config.folder} is fed with {config.captures} layers"
        raise ConfigError(f"--{flag}: {what}, and {named} are {len(flagged)}", param=flag)
    if not all(0 <= layer <= last for layer in layers):
        text = f"the target of draft head {config.folder} has the layers 0 to {last}"
        if flagged:
            raise ConfigError(f"--{flag}: {named}: {text}", param=flag)
        text = f"draft head {config.folder} captures the layers {named}, and the target has 0 to {last}"
        raise ConfigError(f"{text} (--{flag} names others)", param=flag)
    return dataclasses.replace(config, capture_layers=layers)


def with_token_map(head: DraftConfig, target: ModelConfig, config: EngineConfig) -> DraftConfig:
    """The head that proposes the ids in the file of --speculative-token-map alone; `head`, if there is none.

    Raises ConfigError, which names the flag, for a head whose outputs are not the target's, and for a file
    that does not fit.
    """
    if config.speculative_token_map is None:
        return head
    if head.own_outputs:
        name = head_family(head.algorithm).NAME
        raise refused(f"{name} with an output head of its own ({head.folder}) proposes what that knows")
    ids = read_token_map(Path(config.speculative_token_map), target.vocab_size)
    if len(ids) < config.speculation.topk:
        raise refused(f"{config.speculative_token_map} has {len(ids)} ids, fewer than --spec-topk")
    if len(ids) % (ranks := config.tensor_parallel_size):
        text = f"{config.speculative_token_map} has {len(ids)} ids, which {ranks} ranks cannot divide"
        raise refused(f"{text} (--tensor-parallel-size)")
    return dataclasses.replace(head, token_ids=ids)


def head_family(algorithm: str) -> HeadFamily:
    """The module that knows a kind of head, by its line in `HEADS`, which is `DraftConfig.algorithm`."""
    return cast(HeadFamily, importlib.import_module(f"eyas.engine.models.{algorithm}"))


def head_spelling(config: DraftConfig) -> Callable[[str], str]:
    """The name by which a head's classes, and the layers of its decoder, ask for a stored tensor."""
    return functools.partial(_spelled, config)  # which another process may have


def _spelled(config: DraftConfig, stored: str) -> str:
    return config.decoder.spelling(head_family(config.algorithm).spelling(stored))


def load_draft(
    config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[Any]
) -> DraftModel[Any]:
    """The half that drafts, of any kind of head; the parameters are those of `HeadFamily.load_draft`.

    One that drafts with some rows of the target's output head has their ids for its map.
    """
    ends = ends.limited_to(config.token_ids, machine)
    draft = head_family(config.algorithm).load_draft(config, weights, ends, machine)
    if config.token_ids:
        draft.token_map = torch.tensor(config.token_ids, device=weights.placement.device)
    return draft


Shapes = Mapping[str, tuple[int, ...]]
"""Of stored tensors, by the names by which a kind's classes ask for them."""

NO_SHAPE = (0, 0)
OWN_HEAD = frozenset({"lm_head.weight", "d2t"})
"""The tensors of a head with a vocabulary of its own."""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_READ = re.compile(
    r"self_attn\.[qkvo]_proj\.(weight|bias)|self_attn\.[qk]_norm\.weight|self_attn\.rotary_emb\.inv_freq"
    r"|mlp\.(gate|up|down)_proj\.weight|(input|post_attention)_layernorm\.weight"
)
"""The tensors that a layer of heads and a gated feed-forward reads, or may leave out."""


def stored_shapes(raw: Raw, folder: Path, spelling: Callable[[str], str]) -> Shapes:
    """The shape of every stored tensor. Raises ConfigError if the folder holds none."""
    quantized = read_quantized(raw)
    return {spelling(name): shape for name, shape in tensor_shapes(folder, quantized).items()}


def captures_and_outputs(raw: Raw, shapes: Shapes, target: ModelConfig) -> dict[str, Any]:
    """Fields of a `DraftConfig`: how many layers make its feature, and its vocabulary. Tensors say so; where
    there are none, config.json.
    """
    outputs = values.whole(raw, "draft_vocab_size", target.vocab_size, least=1, most=MOST_COLUMNS)
    if shapes:
        outputs = shapes.get("lm_head.weight", (target.vocab_size,))[0]
    return {
        "draft_vocab_size": outputs,
        "captures": shapes.get("fc.weight", NO_SHAPE)[1] // target.hidden_size,
        "dummy_tensors": frozenset() if outputs == target.vocab_size else OWN_HEAD,
        "own_outputs": "lm_head.weight" in shapes or outputs != target.vocab_size,
    }


def own_decoder(raw: Raw, folder: Path, target: ModelConfig, fit: Fit) -> ModelConfig:
    """The sizes of a head of Llama's layers and its own RoPE, for sequences as long as the target's.

    A head of another vocabulary does not fit, nor one that attends to a window.
    """
    decoder = llama.describe(raw, folder)
    # Rows go as far as the target's, whatever the head saw in training.
    context = max(decoder.context_length, target.context_length)
    window = values.whole(raw, "sliding_window", 0) if values.switch(raw, "use_sliding_window", True) else 0
    fit.wants(decoder.vocab_size == target.vocab_size, "its vocab_size is not the target's")
    fit.wants(not 0 < window < context, "its sliding_window is shorter than the context")
    return dataclasses.replace(decoder, context_length=context)


def stored_layers(
    usual: LayerSpec, shapes: Shapes, fit: Fit, besides: frozenset[str] = frozenset()
) -> tuple[LayerSpec, ...]:
    """One specification for each stored layer: `usual`, with the biases and the norms of heads that it has.

    They are counted here because some config.json state the target's depth. `besides`: tensors that a kind's
    own file reads. A head with a tensor that no equation here reads does not fit.
    """
    last = 0
    for name in shapes:
        if (match := _LAYER.fullmatch(name)) is None:
            continue
        last = max(last, int(match[1]))
        read = name in besides or _READ.fullmatch(match[2]) is not None
        fit.wants(read, f"its tensor {name} belongs to equations unknown here")
    return tuple(_as_stored(usual, shapes, f"layers.{i}.self_attn") for i in range(last + 1))


def _as_stored(usual: LayerSpec, shapes: Shapes, prefix: str) -> LayerSpec:
    attention = dataclasses.replace(
        usual.attention,
        qkv_bias=f"{prefix}.q_proj.bias" in shapes,
        output_bias=f"{prefix}.o_proj.bias" in shapes,
        head_norms=f"{prefix}.q_norm.weight" in shapes,
    )
    return dataclasses.replace(usual, attention=attention)


def flat(raw: Raw) -> Raw:
    """One level of keys: speculators nests the layers' sizes; RoPE may stand within or outside."""
    nested = values.section(raw, "transformer_layer_config")
    return {**raw, **{key: value for key, value in nested.items() if value is not None}}


def stored_token_map(config: DraftConfig, weights: WeightSource) -> torch.Tensor | None:
    """Target id of each draft id, int64 [draft vocab], from the stored offsets; None: they are the same."""
    size, vocab = config.draft_vocab_size, config.decoder.vocab_size
    if "d2t" not in weights:
        if size != vocab:
            raise ConfigError(f"draft head {config.folder} has {size} outputs but no d2t map to {vocab} ids")
        return None
    token_map = torch.arange(size) + weights.take("d2t", (size,), torch.int64).cpu()
    if not bool(((token_map >= 0) & (token_map < vocab)).all()):
        raise ConfigError(f"d2t of draft head {config.folder} maps outside the target's {vocab} ids")
    return token_map.to(weights.placement.device)


def token_embedding(config: DraftConfig, weights: WeightSource, target: torch.Tensor) -> torch.Tensor:
    """The embedding of a head [vocab, hidden]: its own, or the target's where it has none.

    The official code of EAGLE replaces the target's by a stored one, with which the head was then trained.
    """
    if "embed_tokens.weight" not in weights:
        return target
    return weights.take("embed_tokens.weight", (config.decoder.vocab_size, config.decoder.hidden_size))


def embedding_and_head(
    config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[ProjectionT]
) -> tuple[torch.Tensor, Any]:
    """The head's own embedding and output head, or the target's (`ends`)."""
    lm_head: Any = ends.lm_head
    if "lm_head.weight" in weights:
        shape = (config.draft_vocab_size, config.decoder.hidden_size)
        lm_head = machine.matrix(weights.take_rows("lm_head.weight", shape))
    return token_embedding(config, weights, ends.embedding), lm_head


class LayeredDraft(ABC, Generic[ProjectionT]):
    """A `DraftModel` of decoder layers, `layers.0` and on, of which the first reads rows that a kind makes of
    features and tokens, and the others the residual.

    `gain`: of the norm that those rows have passed without one; None: there was none.
    """

    token_map: torch.Tensor | None = None
    block: DraftBlock | None = None
    whole = False

    def __init__(self, blocks: Blocks[ProjectionT], lm_head: Any, gain: torch.Tensor | None) -> None:
        self._machine, self._eps, self._lm_head = blocks.machine, blocks.config.norm_eps, lm_head
        self._layers = head_layers(blocks, gain)
        self._few_rows = self._machine.most_rows(self._layers)

    @property
    def projections(self) -> list[AnyProjection]:
        """The weights of its layers."""
        return [each for layer in self._layers for each in layer.projections]

    @abstractmethod
    def entering(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that the first layer's attention reads [R, width], and the residual [R, hidden]."""

    @abstractmethod
    def leaving(self, x: torch.Tensor) -> torch.Tensor:
        """`Drafted.rows`, which are the next rows' features as well, of the residual behind all layers."""

    @abstractmethod
    def scored(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that the output head reads, of `Drafted.rows`."""

    @torch.inference_mode()
    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> Drafted:
        """features [R, width] joined with tokens [R] -> rows [R, hidden], which are features as well."""
        given, x = self.entering(features, tokens, rows.positions)
        ops = self._machine.ops(rows, pool, self._eps, self._few_rows)
        x = self.leaving(run_layers(self._layers, ops, ops.residual(x), given=ops.given(given)))
        return Drafted(x, x)

    @torch.inference_mode()
    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> None:
        """The same, as far as it writes the rows' KV."""
        given, x = self.entering(features, tokens, rows.positions)
        ops = self._machine.ops(rows, pool, self._eps, self._few_rows, whole=False)
        keep_layers(self._layers, ops, ops.residual(x), ops.given(given))

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [r, hidden] as `forward` gave them -> float32 [r, draft vocab]."""
        return self._machine.logits(self.scored(rows), self._lm_head)


class LastHiddenTap:
    """The `FeatureTap` of heads whose feature is what the target's output head reads."""

    def __init__(self, config: DraftConfig, final_norm: FinalNorm) -> None:
        """`config` captures what leaves the target's last layer; `final_norm` is the target's."""
        self.layers = config.capture_layers
        self._final_norm = final_norm

    def features(self, tapped: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """tapped [R, hidden], before any norm -> features [R, hidden]."""
        return self._final_norm(tapped)


def last_hidden_tap(
    config: DraftConfig, weights: WeightSource, final_norm: FinalNorm, machine: Machine[Any]
) -> LastHiddenTap:
    """The half beside the target of a kind that has no tensors there."""
    return LastHiddenTap(config, final_norm)
