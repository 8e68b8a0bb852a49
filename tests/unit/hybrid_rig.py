"""Small random hybrids as transformers builds them, and a decoder over pages and slots of states."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from eyas.engine.attention.forward import build_batch
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models.keys import reading
from eyas.engine.models.table import MODELS
from eyas.engine.states.rows import StateRows
from eyas.engine.states.shape import SPAN, ring_rows
from eyas.engine.states.store import StateFormat, StateStore
from tests.unit.dense_families import EYES, IN_A_PLANE
from tests.unit.family_sample import SIZES, Sample
from tests.unit.model_rig import Rig

STATES: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "hidden_size": 64,
    "pad_token_id": None,
    "bos_token_id": None,
}
THIRDS = STATES | {"linear_num_key_heads": 3}
"""transformers writes the filters of queries, keys and values as equal thirds, whatever they are."""

EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
SPACES: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "pad_token_id": None,
    "bos_token_id": None,
}
MULTIPLIERS: dict[str, Any] = {
    "mamba_d_ssm": 96,
    "num_hidden_layers": 3,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.65,
    "key_multiplier": 0.6,
    "lm_head_multiplier": 0.3,
    "mlp_multipliers": [0.88, 0.7],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.7, 0.9, 0.6, 0.5, 0.8],
    "ssm_out_multiplier": 0.8,
}
MULTIPLIED: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "shared_intermediate_size": 48,
}
CONVOLUTIONS: dict[str, Any] = {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
}
CHANNELS: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "model_max_length": 512,
    "pad_token_id": None,
    "bos_token_id": None,
}
ALONE: dict[str, Any] = {"state_size": 8, "num_hidden_layers": 3, "pad_token_id": None, "bos_token_id": None}
NOT_ALONE = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
BLOCKS: dict[str, Any] = {
    "layers_block_type": [
        *("linear_attention", "moe", "linear_attention", "full_attention", "mlp"),
        *("linear_attention", "moe"),
    ],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 64,
    "time_step_min": 0.3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "pad_token_id": None,
    "bos_token_id": None,
}
ATTENDS = "layers.2."
"""The layer that attends, of the samples that have an MTP layer."""

HYBRIDS = {
    "bamba": Sample("BambaForCausalLM", "BambaConfig", 1.0, SPACES | {"attn_layer_indices": [2]}),
    "falcon_h1": Sample("FalconH1ForCausalLM", "FalconH1Config", 1.0, SPACES | MULTIPLIERS),
    "falcon_h1_norm": Sample(
        "FalconH1ForCausalLM", "FalconH1Config", 1.0, SPACES | MULTIPLIERS | {"mamba_rms_norm": True}
    ),
    "granite_hybrid": Sample(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        1.0,
        SPACES | MULTIPLIED | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32},
    ),
    "granite_hybrid_dense": Sample(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        1.0,
        SPACES
        | MULTIPLIED
        | {"num_local_experts": 0, "position_embedding_type": "rope", "time_step_limit": (0.3, 1.5)},
    ),
    "nemotron_h": Sample("NemotronHForCausalLM", "NemotronHConfig", 1.0, BLOCKS),
    "nemotron_h_latent": Sample(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        1.0,
        BLOCKS | {"moe_latent_size": 24},
    ),
    "jamba": Sample(
        "JambaForCausalLM",
        "JambaConfig",
        1.0,
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 5,
            "pad_token_id": None,
            "bos_token_id": None,
        },
    ),
    "kimi_linear": Sample(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        1.0,
        CHANNELS | {"num_expert_group": 4, "topk_group": 2},
        without=("head_dim", "max_position_embeddings"),
    ),
    "olmo_hybrid": Sample(
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        1.0,
        THIRDS | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        without=("head_dim",),
    ),
    "olmo_hybrid_rotated": Sample(
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        1.0,
        THIRDS | {"linear_allow_neg_eigval": False},
        without=("head_dim",),
    ),
    "mamba": Sample("MambaForCausalLM", "MambaConfig", 1.0, ALONE, without=NOT_ALONE),
    "falcon_mamba": Sample("FalconMambaForCausalLM", "FalconMambaConfig", 1.0, ALONE, without=NOT_ALONE),
    "mamba2": Sample(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        1.0,
        ALONE | {"num_heads": 6, "head_dim": 16, "n_groups": 1, "time_step_limit": (0.3, 1.5)},
        without=tuple(name for name in NOT_ALONE if name != "head_dim"),
    ),
    "lfm2": Sample(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        1.0,
        CONVOLUTIONS | {"intermediate_size": 90, "block_ffn_dim_multiplier": 1.5, "block_multiple_of": 16},
    ),
    "lfm2_with_eyes": Sample(
        "Lfm2VlForConditionalGeneration",
        "Lfm2VlConfig",
        1.0,
        CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": Sample(
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        1.0,
        CONVOLUTIONS
        | {
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3_next": Sample(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", 0.0, STATES | EXPERTS | {"mlp_only_layers": [1]}
    ),
    "qwen3_5": Sample("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", 0.0, STATES | IN_A_PLANE),
    "qwen3_5_with_eyes": Sample("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", 0.0, STATES | IN_A_PLANE),
    "qwen3_5_moe_with_eyes": Sample(
        "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", 0.0, STATES | EXPERTS | IN_A_PLANE
    ),
    "qwen3_5_moe": Sample("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", 0.0, STATES | EXPERTS),
}


def write_hybrid(folder: Path, name: str, **changes: Any) -> Any:
    """Stores the sample, with `changes` to its configuration; gives transformers' model, float32, eager."""
    sample = HYBRIDS[name]
    sizes = copy.deepcopy(SIZES | sample.changes | changes)  # transformers writes into what it reads
    sizes = {name: size for name, size in sizes.items() if name not in sample.without}
    kind = getattr(transformers, sample.config)
    if sample.model.endswith("ForConditionalGeneration"):
        config = kind(text_config=sizes, vision_config=dict(EYES))
    else:
        config = kind(**sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, sample.model)(config).eval()
    with torch.no_grad():
        for tensor, weight in model.named_parameters():
            if tensor.endswith("A_log"):  # a state has something of hundreds of rows, as trained ones do
                weight.normal_(mean=-3.0, std=0.5)
            elif tensor.endswith(("dt_bias", ".D")):
                weight.normal_(std=0.5)
            else:
                gain = (
                    1.0
                    if ".norm." in tensor and "linear_attn" in tensor
                    else sample.gain
                    if "norm" in tensor
                    else 0.0
                )
                weight.normal_(mean=gain, std=0.2)
        for tensor, bias in model.named_buffers():
            if tensor.endswith(("e_score_correction_bias", "expert_bias")):
                bias.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def add_mtp_layer(folder: Path, attends: str, hidden: int) -> dict[str, torch.Tensor]:
    """Stores an MTP layer of random numbers beside a target's, like the one whose tensors' names have
    `attends`; gives its tensors.
    """
    stored, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    layer = {key: tensor for key, tensor in stored.items() if attends in key and "visual" not in key}
    head = {f"mtp.layers.0.{key.partition(attends)[2]}": tensor for key, tensor in layer.items()}
    joins = {"fc": 2, "pre_fc_norm_embedding": 1, "pre_fc_norm_hidden": 1, "norm": 1}
    head |= {f"mtp.{key}.weight": torch.empty([hidden, 2 * hidden][:sides]) for key, sides in joins.items()}
    head = {key: 0.2 * torch.randn(tensor.shape, generator=random) for key, tensor in head.items()}
    save_file(stored | head, folder / "model.safetensors", {"format": "pt"})
    return head


def write_with_mtp(folder: Path, name: str, **changes: Any) -> dict[str, torch.Tensor]:
    """Stores the sample, and an MTP layer beside it; gives the layer's tensors."""
    write_hybrid(folder, name, **changes)
    return add_mtp_layer(folder, ATTENDS, 64)


def described(folder: Path, name: str) -> ModelConfig:
    """The model of a stored sample."""
    family = importlib.import_module(f"eyas.engine.models.{MODELS[HYBRIDS[name].model]}")
    with reading(folder):
        model: ModelConfig = family.describe(json.loads((folder / "config.json").read_text()), folder)
    return model


@dataclasses.dataclass
class Text:
    """A sequence on pages and in a slot of its own, for one `stay`; its first `rows` are certain."""

    pages: list[int]
    slot: int
    stay: int
    rows: int = 0
    bound: int = 0


class HybridRig(Rig):
    """Sequences in slots that are filled with NaN: what was never written shows."""

    def __init__(self, folder: Path, config: ModelConfig, slots: int = 8, pages: int = 256) -> None:
        super().__init__(folder, config, pages, grouped=True)
        assert config.delta is not None
        layers = config.state_layers
        form = StateFormat(layers, config.delta, ring_rows(16), torch.float32)
        self.store = StateStore(form, torch.zeros(slots, form.slot_bytes, dtype=torch.uint8))
        self.pool.state_layers = self.store.layers
        for layer in self.store.layers.values():
            for part in (layer.states, layer.tails, layer.inputs, layer.gates):
                part.fill_(float("nan"))
        self._slots = list(range(slots))
        self._stays = itertools.count()

    def text(self, rows: int = 512) -> Text:
        """A new sequence."""
        return Text(self.table(rows), self._slots.pop(), next(self._stays))

    def free(self, text: Text) -> None:
        """Ends a sequence; its pages and its slot stay as they are."""
        self._free += text.pages
        self._slots.append(text.slot)

    def step(self, steps: Sequence[tuple[Text, Sequence[int], Sequence[int] | None]]) -> list[torch.Tensor]:
        """The logits of each sequence's tokens, of which those of a chunk (parents None) are certain
        afterwards; others are a tree, whose first token alone is certain.
        """
        spans = [_span(*each) for each in steps]
        batch = build_batch(
            spans, [token for _, tokens, _ in steps for token in tokens], self.pool.page_size, self.backend
        )
        batch = dataclasses.replace(batch, states=_state_rows(steps, spans))
        logits = self.model.logits(self.model.forward(batch, self.pool)[0])
        for text, tokens, parents in steps:
            text.bound = bound_behind(text, tokens, parents)
            text.rows += len(tokens) if parents is None else 1
        return list(logits.split([len(tokens) for _, tokens, _ in steps]))

    def accept(self, text: Text, nodes: Sequence[int]) -> None:
        """Nodes of the last tree, a path from below its root, become certain."""
        for i, node in enumerate(nodes):
            if node - 1 != i:
                self._move(text, text.rows - 1 + node, text.rows + i)
        text.rows += len(nodes)

    def _move(self, text: Text, source: int, target: int) -> None:
        size = self.pool.page_size
        physical = [text.pages[row // size] * size + row % size for row in (source, target)]
        self.pool.move(*(torch.tensor([row]) for row in physical))
        self.store.move(torch.tensor([text.slot]), torch.tensor([source]), torch.tensor([target]))


def bound_behind(text: Text, tokens: Sequence[int], parents: Sequence[int] | None) -> int:
    """Where the state stands behind a step."""
    return _fold(text, tokens, parents)


def _fold(text: Text, tokens: Sequence[int], parents: Sequence[int] | None) -> int:
    return (text.rows + (len(tokens) if parents is None else 0)) // SPAN * SPAN


def _span(text: Text, tokens: Sequence[int], parents: Sequence[int] | None) -> QuerySpan:
    if parents is None:
        return QuerySpan(text.pages, text.rows, len(tokens))
    paths = []
    for node, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), text.rows + node))
    return QuerySpan(text.pages, text.rows, len(tokens), tuple(paths))


def _state_rows(
    steps: Sequence[tuple[Text, Sequence[int], Sequence[int] | None]], spans: Sequence[QuerySpan]
) -> StateRows:
    counts = [len(tokens) for _, tokens, _ in steps]
    before, positions = [], []
    for text, tokens, parents in steps:
        chain = range(-1, len(tokens) - 1) if parents is None else parents
        before += [text.rows + parent for parent in chain]
    for span in spans:
        paths = span.paths or [range(i + 1) for i in range(span.count)]
        positions += [span.start + len(path) - 1 for path in paths]

    def words(numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    return StateRows(
        slots=words([text.slot for text, _, _ in steps]),
        firsts=words([sum(counts[:i]) for i in range(len(counts))]),
        counts=words(counts),
        starts=words([text.rows for text, _, _ in steps]),
        bounds=words([text.bound for text, _, _ in steps]),
        folds=words([_fold(*each) for each in steps]),
        before=words(before),
        positions=words(positions),
        most=max(counts),
        stays=tuple(text.stay for text, _, _ in steps),
    )
