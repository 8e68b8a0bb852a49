"""The description of a model: a common part and one specification per layer, frozen.

Sizes and equations are plain numbers, without torch, so the fronts may read a configuration too.
`eyas.engine.models` has a file per family, which makes one of these of a config.json.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.folder import fingerprint, weight_files
from eyas.engine.checkpoint.quantized import QuantizedConfig
from eyas.engine.checkpoint.rope import MOST_CONTEXT, RopeConfig
from eyas.engine.checkpoint.stacked_tensors import JoinedTensor
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.groups import KvGroup, KvGroups, kv_groups, one_group
from eyas.engine.states.shape import DeltaShape

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Temper:
    """Queries are sharper far behind the start: at position p they are multiplied by
    1 + scale * ln(1 + floor((p + first) / span)).
    """

    scale: float
    span: int
    first: int = 0


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: queries in groups over fewer key and value heads.

    `scale` multiplies scores. `window`: tokens that a row sees, itself the last of them (0: all). `unseen`:
    rows at a sequence's start that no other row sees. `soft_cap`: scores become cap * tanh(score / cap) (0.0:
    they do not). `head_norms`: q and k are normalised per head before they are rotated, or, with
    `norms_behind`, after; `row_norms`: all heads of q as one row, and all of k. `adjacent`: stored rotated
    elements are paired with their neighbours, not with those half the rotated part away. `sinks`:
    each head has a stored score that no key has, which takes its share of the softmax and mixes nothing.
    `centred_heads`: as `head_norms`, less the mean of a head, and each head has a gain of its own.
    `chunk`: a row sees no row before the last multiple of this many tokens (0: it sees all). `bare_norms`:
    heads of q and k are normalised without stored gains, with `value_norms` those of v. `keys_as_values`:
    values are the product that keys are, neither normalised as these are nor rotated. `shared_from`: the
    number of the layer whose keys and values it attends to, having none of its own (None: it has). `gated`:
    what a head mixes is multiplied by the sigmoid of as many elements of a product that stands behind its
    query.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float
    window: int = 0
    unseen: int = 0
    soft_cap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    row_norms: bool = False
    sinks: bool = False
    norms_behind: bool = False
    centred_heads: bool = False
    adjacent: bool = False
    temper: Temper | None = None
    chunk: int = 0
    bare_norms: bool = False
    value_norms: bool = False
    keys_as_values: bool = False
    shared_from: int | None = None
    gated: bool = False

    @property
    def rotation(self) -> tuple[RopeConfig, int]:
        """The RoPE, and the elements of a head that its angles are for: layers of one rotation share them."""
        return self.rope, self.rotated_dim

    @property
    def rotated_dim(self) -> int:
        """Elements of a head that the angles of its RoPE are for, some of which it may leave as they are."""
        return self.head_dim

    @property
    def latent(self) -> int:
        """The elements of a cached latent, see `KvFormat.latent`; 0: keys and values are cached."""
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    The cached row of a token is its latent of `kv_rank` elements, normalised, and behind it one rotated key
    that all heads share. A head's own key of `plain_dim` elements, and its value of `value_dim`, are products
    with the latent. Absorbed, those products move to the query and to the result: attention then has one key
    head of `head_dim` = `kv_rank` + rotated elements, of which the latent is the value too. `query_rank`: the
    width between the two factors of the queries' projection (0: it is one matrix).
    """

    kv_rank: int
    query_rank: int
    plain_dim: int
    value_dim: int
    adjacent: bool = True

    @property
    def rotated_dim(self) -> int:
        """Elements of a query, and of a cached row, that are rotated."""
        return self.head_dim - self.kv_rank

    @property
    def latent(self) -> int:
        """The elements of a cached latent, see `KvFormat.latent`."""
        return self.kv_rank


@dataclasses.dataclass(frozen=True)
class FeedForwardSpec:
    """down(activation(gate(x), up(x))), "silu" being silu(gate) * up; `width`: rows of gate and of up.

    `activation`: a name in `eyas.engine.layers.activations`. `bias`: gate, up and down have one each. If it
    is not `gated` there is no gate: down(activation(up(x))). A layer with a `width` of 0 has no such half.
    """

    width: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec(FeedForwardSpec):
    """`experts` feed-forwards of `width`: each row takes its `per_row` best, by the router's scores.

    `scores`: of its logits, a name in `eyas.engine.layers.routing`. `router_bias`: logits have a stored bias.
    `corrected`: a stored bias is added to the scores that choose, not to the weights. `groups`: experts stand
    in as many groups, of which the `topk_groups` best alone are chosen from; a group is as good as the sum of
    its `group_best` best scores. The weights of the chosen are their scores, divided by their sum if
    `normalised`, times `scale`; they multiply what experts make, or, by `weighs_input`, what the one expert
    of a row reads. `shared_width`: of a feed-forward that every row takes (0: there is none); `shared_share`:
    of what it makes a row takes the share that the sigmoid of its product with a stored row says. `latent`:
    experts read rows of this width, a product of what the router reads, and another product takes their sum
    back (0: they read the same rows).
    """

    experts: int
    per_row: int
    scores: str
    normalised: bool
    scale: float = 1.0
    corrected: bool = False
    router_bias: bool = False
    groups: int = 1
    topk_groups: int = 1
    group_best: int = 1
    weighs_input: bool = False
    shared_width: int = 0
    shared_share: bool = False
    latent: int = 0

    def complaints(self) -> Iterator[str]:
        """Finds numbers that do not go together; a sentence for each."""
        if not 0 < self.scale < math.inf:
            yield f"routed_scaling_factor {self.scale} is not a positive number"
        if self.weighs_input and self.per_row != 1:
            yield f"num_experts_per_tok {self.per_row}: experts whose inputs are weighed are one for each row"
        if not 1 <= self.per_row <= self.experts:
            yield f"num_experts_per_tok {self.per_row} is not between 1 and the {self.experts} experts"
        if self.groups < 1 or self.experts % self.groups:
            yield f"n_group {self.groups} does not divide the {self.experts} experts"
        elif self.group_best > self.experts // self.groups:
            yield f"n_group {self.groups} leaves groups of fewer than {self.group_best} experts"
        elif not 1 <= self.topk_groups <= self.groups:
            yield f"topk_group {self.topk_groups} is not between 1 and n_group {self.groups}"
        elif self.per_row > self.topk_groups * (self.experts // self.groups):
            yield f"topk_group {self.topk_groups} leaves fewer than {self.per_row} experts to choose"

    @property
    def with_shared(self) -> tuple[int, int]:
        """The numbers of experts, and of experts per row, with a shared one that is like the others counted
        in.
        """
        shared = int(self.shared_width == self.width)
        return self.experts + shared, self.per_row + shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApartSpec(ExpertsSpec):
    """Experts beside a feed-forward of `shared_width`: each reads the residual by a norm of its own, the
    router too, and what each makes passes one before both are added. A stored number of each expert
    multiplies its weights.
    """

    @property
    def with_shared(self) -> tuple[int, int]:
        """See `ExpertsSpec.with_shared`: what is beside these experts is never counted in."""
        return self.experts, self.per_row


@dataclasses.dataclass(frozen=True)
class NormNames:
    """The tensors (below the layer's prefix) that hold the gains of a layer's norms; "": there is none.

    Those before stand on what a half reads, those after on what it adds to the residual.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str = ""

    @property
    def around(self) -> bool:
        """True if the sum that a half adds to the residual is normalised as well."""
        return bool(self.after_attention or self.after_feed_forward)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: attention, then the feed-forward, each added to the residual; and its norms.

    `residual_scale`: what each of the two adds is multiplied by it. `parallel`: both read what enters the
    layer. `token_width`: of a third half behind these, whose gate is multiplied by a vector of this width
    that a token has for each layer (0: there is none). `scaled`: what leaves the layer is multiplied by a
    stored number. `delta`: the state that it has instead of keys and values; its attention is then that of
    the others (None: it attends). `both`: it has keys and values beside that, and adds what both give.
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norms: NormNames = NormNames()
    residual_scale: float = 1.0
    parallel: bool = False
    token_width: int = 0
    scaled: bool = False
    delta: DeltaShape | None = None
    both: bool = False

    @property
    def attends(self) -> bool:
        """Whether it has keys and values, its own or another layer's."""
        return self.delta is None or self.both

    def complaints(self) -> Iterator[str]:
        """Finds impossible numbers; a sentence for each."""
        if self.attention.window < 0:
            yield f"sliding_window {self.attention.window} is negative"
        if self.attention.chunk < 0:
            yield f"attention_chunk_size {self.attention.chunk} is negative"
        yield from self.attention.rope.complaints()
        yield from _rope_complaints(self.attention.rope, self.attention)
        if not 0 < self.attention.scale < math.inf:
            yield f"mscale_all_dim or head_dim scale scores by {self.attention.scale}"
        if not 0 <= self.attention.soft_cap < math.inf:
            yield f"attn_logit_softcapping {self.attention.soft_cap} is negative"
        if (temper := self.attention.temper) is not None and (temper.span < 1 or temper.scale < 0):
            yield f"attention temperature grows by {temper.scale} in {temper.span} tokens"
        if not 0 < self.residual_scale < math.inf:
            yield f"residual_multiplier {self.residual_scale} is not a positive number"
        if isinstance(self.feed_forward, ExpertsSpec):
            yield from self.feed_forward.complaints()
        if self.delta is not None:
            yield from self.delta.complaints()


@dataclasses.dataclass(frozen=True)
class ForeignModel:
    """A decoder that transformers computes. `stated`: its config.json. `elements`: of all its weights.

    `modules`: the names of what attends in each layer.
    """

    stated: str
    elements: int
    modules: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder. `context_length` is in tokens; sizes are element counts.

    `norm_offset`: what is added to a stored gain. `centred`: norms take the mean off a row first, and with
    `norm_bias` add a stored bias. `head_bias`: logits have one. `positions`: rows of a stored table, of which
    that of its position, `position_offset` rows further, is added to an embedded token (0: there is none).
    `token_rows`: of the table of vectors that tokens have for each layer (0: there is none).
    `embedding_scale` multiplies embedded tokens,
    `logit_scale` logits. `logit_soft_cap`: logits become cap * tanh(logit / cap) (0.0: they do not).
    `quantized`: how weights are stored that are not in 16 or 32 bits (None: all are). `unread`: parts of the
    names of tensors that it does not need. `renamed`: parts of tensor names, (as stored, as the decoder calls
    them), replaced in this order; `fused`: tensors that are stored as one. `foreign`: transformers computes
    it, and of its layers the attention alone is described (None: Eyas does, as all of this says).
    Raises ConfigError if its layers cannot share a KV pool, or their sizes do not fit each other.
    """

    folder: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    context_length: int
    tied_head: bool = False
    norm_offset: float = 0.0
    centred: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    positions: int = 0
    position_offset: int = 0
    token_rows: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    quantized: QuantizedConfig | None = None
    unread: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    fused: tuple[JoinedTensor, ...] = ()
    foreign: ForeignModel | None = None
    eos_token_ids: tuple[int, ...] = ()
    load_format: str = "auto"  # "dummy": weight files are neither needed nor read

    def __post_init__(self) -> None:
        heads = self._shared("num_attention_heads", lambda layer: layer.attention.num_heads)
        kv = self.kv_format
        sizes = {
            "num_attention_heads": heads,
            "num_key_value_heads": kv.kv_heads,
            "head_dim": kv.head_dim,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context_length,
        }
        complaints = [f"{name} {size} must be 1 or more" for name, size in sizes.items() if size < 1]
        if not 0 <= self.norm_eps < 1:
            complaints.append(f"rms_norm_eps {self.norm_eps} is no small number")
        if not 0 < self.embedding_scale < math.inf:
            complaints.append(f"embedded tokens are scaled by {self.embedding_scale}")
        if not 0 < self.logit_scale < math.inf:
            complaints.append(f"logits are scaled by {self.logit_scale}")
        if not 0 <= self.logit_soft_cap < math.inf:
            complaints.append(f"final_logit_softcapping {self.logit_soft_cap} is negative")
        if self.positions and self.positions - self.position_offset < self.context_length:
            complaints.append(f"positions for {self.positions} tokens are too few")
        if self.token_rows and self.token_rows < self.vocab_size:
            complaints.append(f"vocab_size_per_layer_input {self.token_rows} is less than vocab_size")
        for layer in dict.fromkeys(self.layers):
            complaints += [
                *layer.complaints(),
                *(() if complaints else self._pool_complaints(layer.attention)),
            ]
            if self.centred and layer.norms.around:
                complaints.append("centred norms behind the halves of a layer are not supported")
        if len({layer.delta for layer in self.layers} - {None}) > 1:
            complaints.append("layers differ in the shape of their states")
        if self.context_length > MOST_CONTEXT:
            complaints.append(f"a context of {self.context_length} tokens is longer than {MOST_CONTEXT}")
        if complaints:
            raise ConfigError(f"config.json of {self.folder}: {complaints[0]}")

    def limited_to(self, context_length: int | None) -> ModelConfig:
        """The model for sequences of at most `context_length` tokens (None: its own limit).

        A window that is no shorter is none. Raises ConfigError if that is more than its own: positions that
        it was never trained on.
        """
        context_length = self.context_length if context_length is None else context_length
        if context_length > self.context_length:
            excess = f"--context-length: {context_length} is more than the {self.context_length} tokens"
            raise ConfigError(f"{excess} of {self.folder}", param="context-length")
        layers = tuple(_without_idle_window(layer, context_length) for layer in self.layers)
        return dataclasses.replace(self, context_length=context_length, layers=layers)

    def spelling(self, stored: str) -> str:
        """The name by which a decoder asks for the tensor that is stored under this one."""
        for there, here in self.renamed:
            stored = stored.replace(there, here)
        return stored

    @property
    def kv_format(self) -> KvFormat:
        """The KV format of all layers that have some: that of the widest, see `KvPool.layer`."""
        own = [each for each in self._attentions.values() if each.shared_from is None]
        widest = max(own or [self.layers[0].attention], key=lambda each: each.num_kv_heads * each.head_dim)
        latent = self._shared("kv_lora_rank", lambda layer: layer.attention.latent)
        return KvFormat(len(own), widest.num_kv_heads, widest.head_dim, latent)

    @property
    def kinds_of_heads(self) -> tuple[tuple[int, int], ...]:
        """The numbers of key and value heads that layers have, and the elements of each."""
        return tuple({(each.attention.num_kv_heads, each.attention.head_dim): 0 for each in self.layers})

    @property
    def uneven_heads(self) -> bool:
        """True if layers differ in the number of their key and value heads, or in the width of these."""
        return len(self.kinds_of_heads) > 1

    @property
    def kv_groups(self) -> KvGroups:
        """Its layers that have keys and values, by the rows that they see, as `kv_groups` groups them.

        One group if a layer reads those of another one that sees others, or if layers have states instead.
        """
        if self.delta is not None:
            return (KvGroup(tuple(self._attentions)),)
        every = [layer.attention for layer in self.layers]
        sights = [(each.window, each.chunk) for each in every]
        lent = [(sight, each.shared_from) for sight, each in zip(sights, every, strict=True)]
        if any(source is not None and sights[source] != sight for sight, source in lent):
            return one_group(self.kv_format.layers)
        return kv_groups([sight for sight, source in lent if source is None])

    @property
    def experts(self) -> list[ExpertsSpec]:
        """The experts of each layer that has some."""
        parts = (layer.feed_forward for layer in self.layers)
        return [part for part in parts if isinstance(part, ExpertsSpec)]

    @property
    def delta(self) -> DeltaShape | None:
        """The shape of the states of all layers that have one; None: no layer has."""
        return next((layer.delta for layer in self.layers if layer.delta is not None), None)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have a state."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.delta is not None)

    @property
    def _attentions(self) -> dict[int, AttentionSpec]:
        """The attention of each layer with rows in pages, by the layer's number: the layers that attend.

        Where none does, the first one has a place that nobody writes: pages count positions, and slots of
        states travel as pages.
        """
        attends = {i: layer.attention for i, layer in enumerate(self.layers) if layer.attends}
        return attends or {0: self.layers[0].attention}

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads of every layer."""
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of every layer."""
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of every head."""
        return self.layers[0].attention.head_dim

    @property
    def rope_meaning(self) -> str:
        """Every parameter of the rotary embeddings that keys are stored with."""
        ropes = dict.fromkeys(layer.attention.rope for layer in self.layers)
        length = f" for {self.context_length} tokens" if any(r.follows_length for r in ropes) else ""
        return ", ".join(map(str, ropes)) + length

    @property
    def meaning(self) -> dict[str, Any]:
        """Everything but the folder and the length of the context, which change no key and no value."""
        fields = dataclasses.asdict(self)
        del fields["folder"], fields["context_length"]
        return fields

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest that differs between models that could produce different KV (a sample of the bytes).

        Dummy weights follow from the configuration, which says that they are dummies.
        """
        files = [] if self.load_format == "dummy" else weight_files(self.folder)
        return fingerprint(self.meaning, files)

    def _pool_complaints(self, attention: AttentionSpec) -> Iterator[str]:
        """Finds heads that have no place in rows of the pool; a sentence for each."""
        heads, dim, pool = attention.num_kv_heads, attention.head_dim, self.kv_format
        row, source = pool.kv_heads * pool.head_dim, attention.shared_from
        if min(heads, dim) < 1 or attention.num_heads % heads:
            yield "num_key_value_heads must divide num_attention_heads"
        elif dim % 2:
            yield f"head_dim {dim} must be even"
        elif row % heads or row // heads < dim:
            heads_of = f"{heads} heads of {dim}"
            yield f"num_key_value_heads differs between layers: {heads_of} do not fit rows of {row}"
        if source is not None and not self._may_share(attention, source):
            yield f"num_kv_shared_layers: layer {source} has no keys and values for {heads} heads of {dim}"

    def _may_share(self, attention: AttentionSpec, source: int) -> bool:
        """Whether the keys and values of layer `source` are for those heads: the first layers have some."""
        own = [layer.attention for layer in self.layers[: self.kv_format.layers]]
        if not 0 <= source < len(own) or any(each.shared_from is not None for each in own):
            return False
        return all(
            getattr(own[source], name) == getattr(attention, name) for name in ("num_kv_heads", "head_dim")
        )

    def _shared(self, name: str, value: Callable[[LayerSpec], Value]) -> Value:
        """The value that is the same in every layer; raises ConfigError, naming the field, if there
        is none.
        """
        distinct = dict.fromkeys(value(layer) for layer in self.layers)
        if not distinct:
            raise ConfigError(f"config.json of {self.folder}: it has no layers")
        if len(distinct) != 1:
            values = " and ".join(map(str, distinct))
            raise ConfigError(f"config.json of {self.folder}: {name} differs between layers: {values}")
        return next(iter(distinct))


def _rope_complaints(rope: RopeConfig, attention: AttentionSpec) -> Iterator[str]:
    """Finds RoPE parameters that do not fit its heads; a sentence for each."""
    rotated, latent = rope.rotated(attention.rotated_dim), attention.latent
    if rope.kind == "dynamic" and rotated <= 2:
        yield f"head_dim {rotated} is too small for a dynamic RoPE"
    if rotated < 2 or rotated % 2 or (latent and rope.share != 1.0):
        yield f"partial_rotary_factor {rope.share} rotates {rotated} of the {attention.head_dim} of a head"
    if rope.kind != "longrope":
        return
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if len(factors) != rotated // 2:
            yield f"{name} has {len(factors)} numbers, not {rotated // 2}"


def _without_idle_window(layer: LayerSpec, context_length: int) -> LayerSpec:
    fields = {"window": layer.attention.window, "chunk": layer.attention.chunk}
    idle: dict[str, Any] = {name: 0 for name, size in fields.items() if size >= context_length}
    return (
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, **idle)) if idle else layer
    )


@dataclasses.dataclass(frozen=True)
class DraftBlock:
    """The rows that a head runs in one pass to draft a whole chain, behind its certain rows.

    Row j stands at the root token's position + j. `most`: drafts of a chain that the head was made for.
    `mask_token`: the id of rows whose token is still to be drafted. `rooted`: row 0 is the root token's; else
    all rows are masks. `first`: the row that gives the first draft; -1: the newest certain row does.
    `causal`: a row sees none behind it; else it sees the whole block. `coupling`: the width of what each
    draft's scores know of the draft before it, so that drafts are chosen one after the other; 0: nothing.
    """

    most: int
    mask_token: int
    rooted: bool = True
    first: int = 1
    causal: bool = False
    coupling: int = 0

    def width(self, drafts: int) -> int:
        """The number of rows of a chain of `drafts`: each from `first` on gives one."""
        return drafts + self.first

    def tokens(self, root: int, width: int) -> list[int]:
        """The tokens of a block of `width` rows behind the token `root`."""
        return [root if self.rooted and not row else self.mask_token for row in range(width)]


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """A draft head for a given target. `decoder` holds its own layers' sizes and its own RoPE.

    `capture_layers`: the residual stream *entering* these target layers makes the feature (the number of
    layers: leaving the last). `captures`: how many layers its tensors are made for (0: they do not say).
    `variants`: how its equations differ from its kind's usual ones, in the words of its kind's file.
    `target_hidden_size`: the width of the captured streams (None: the head's own).
    `dummy_tensors`: of the tensors that only some heads have, those that a dummy head of these sizes needs.
    `prefixes`: the names of its tensors begin with one of them, in a folder that may hold the target's too.
    `stages`: above 1 it is the number of its layers. Each drafts one token further than the layer before,
    of what the row before gave there; the last one drafts all that are deeper.
    `draft_vocab_size`: rows of its output head, which is the target's unless `own_outputs`. `token_ids`: of
    the target's head it takes the rows of these ids alone (empty: all).
    `block`: of a head that drafts all depths in one pass. `features`: elements of a feature (0: as many as
    its rows have).
    """

    folder: Path
    algorithm: str
    decoder: ModelConfig
    draft_vocab_size: int
    capture_layers: tuple[int, ...]
    captures: int = 0
    variants: frozenset[str] = frozenset()
    target_hidden_size: int | None = None
    dummy_tensors: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ("",)
    stages: int = 1
    own_outputs: bool = False
    token_ids: tuple[int, ...] = ()
    block: DraftBlock | None = None
    features: int = 0

    @property
    def feature_width(self) -> int:
        """Elements of the feature of one position, as it goes from the target to who drafts."""
        return self.features or self.decoder.hidden_size

    @property
    def outputs(self) -> int:
        """The number of ids that its logits are about."""
        return len(self.token_ids) or self.draft_vocab_size

    def pool_format(self, page_size: int, ranks: int = 1) -> KvFormat:
        """The KV format of one rank's part of the head's own pool; a page has `page_size` rows.

        Behind its layers a page has room for what the newest row in it gave at each stage but the last.
        """
        own = self.decoder.kv_format.of_rank(ranks)
        state_size, layer = (self.stages - 1) * self.decoder.hidden_size, page_size * math.prod(own.slot)
        return dataclasses.replace(own, layers=own.layers - -state_size // layer)

    @property
    def captured_width(self) -> int:
        """Elements of the captured streams of one position, side by side."""
        return len(self.capture_layers) * (self.target_hidden_size or self.decoder.hidden_size)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the head; compared between the workers that share draft KV or features."""
        meaning = {
            "algorithm": self.algorithm,
            "decoder": self.decoder.meaning,
            "outputs": self.outputs,
            "taps": self.capture_layers,
            "variants": sorted(self.variants),
            "prefixes": self.prefixes,
            "ids": self.token_ids,
            "block": None if self.block is None else dataclasses.astuple(self.block),
        }
        files = [] if self.decoder.load_format == "dummy" else weight_files(self.folder)
        return fingerprint(meaning, files)
