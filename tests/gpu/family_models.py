"""Small models of every family on a GPU, and what runs them step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.engine.attention.device import chunk_tile_rows, row_attention
from eyas.engine.attention.rows import RowLimits
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.checkpoint.weights import FolderWeights, WeightPlacement
from eyas.engine.kernels.products import skinny
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.ops.device_step import LayerContext
from eyas.engine.models.table import read_model
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo

SLACK = {"float32": 0.002, "bfloat16": 0.3}  # of the standard deviation of logits
WINDOW = 128
PROMPTS, ANSWER = (301, 150), 24  # the windows move past the shorter prompt's end too
PAGE = 16
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
WINDOWED = {"sliding_window": WINDOW}
GEMMA = WINDOWED | {"query_pre_attn_scalar": 128}
TWO_WIDTHS = WINDOWED | {"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 1}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 48,
    "long_factor": [1.0 + pair / 8 for pair in range(48)],
    "original_max_position_embeddings": WINDOW,
}
"""Of a context that is longer than that of the training, as the prompts are too."""
TEMPERED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": WINDOW,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
GROUPED = EXPERTS | {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENTS = {
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 8,
    "head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_llama3": {},
    "mistral": WINDOWED | {"head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 4},
    "olmo2": {"attention_bias": False},
    "phi3": WINDOWED | {"rope_parameters": LONG, "original_max_position_embeddings": WINDOW},
    "qwen2": {},
    "qwen3": {},
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gemma4": TWO_WIDTHS,
    "gemma4_tokens": TWO_WIDTHS | {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 2048},
    "gemma4_moe": TWO_WIDTHS | {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 512},
    "smollm3": {},
    "olmo3": WINDOWED,
    "granite": {},
    "ministral3": {"rope_parameters": TEMPERED},
    "glm": {},
    "glm4": {},
    "hunyuan": {},
    "cohere": {},
    "cohere2": WINDOWED,
    "nemotron": {},
    "apertus": {},
    "phi": {},
    "gpt2": {"n_inner": 2816, "n_positions": 1024, "scale_attn_by_inverse_layer_idx": False},
    "gptj": {"n_inner": 2816, "n_positions": 1024, "rotary_dim": 64},
    "gpt_neox": {},
    "falcon": {"ffn_hidden_size": 2816},
    "falcon_groups": {"ffn_hidden_size": 2816},
    "opt": {"ffn_dim": 2816, "num_key_value_heads": 8, "word_embed_proj_dim": 1024},
    "exaone4": WINDOWED,
    "gemma": {},
    "stablelm": {},
    "ernie4_5": {},
    "seed_oss": {},
    "starcoder2": WINDOWED,
    "arcee": {},
    "helium": {},
    "glm4_moe": GROUPED,
    "glm4_moe_lite": GROUPED | LATENTS,
    "mistral4": GROUPED | LATENTS | {"head_dim": 96},
    "deepseek_v2_lite": GROUPED | LATENTS | {"q_lora_rank": None},
    "deepseek_v3": GROUPED | LATENTS | {"n_group": 4, "topk_group": 2},
    "dots1": GROUPED | WINDOWED,
    "ernie4_5_moe": EXPERTS | {"moe_k": 2, "moe_num_experts": 8},
    "llama4": {"intermediate_size": 512, "intermediate_size_mlp": 2816, "attention_chunk_size": WINDOW},
    "gpt_oss": {"num_experts_per_tok": 2, "intermediate_size": 512, "sliding_window": WINDOW},
    "granite_moe": {"num_experts_per_tok": 2, "intermediate_size": 512},
    "hunyuan_moe": {"moe_topk": 2, "intermediate_size": 512},
    "minimax_m2": {"num_experts_per_tok": 2, "intermediate_size": 512},
    "mixtral": {"num_experts_per_tok": 2, "intermediate_size": 512},
    "olmoe": {"num_experts_per_tok": 2, "intermediate_size": 512},
    "phimoe": {"intermediate_size": 512},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 512},
    "qwen3_moe": EXPERTS,
}


def sizes_of(family: str) -> dict[str, Any]:
    """What stands in a sample's configuration here."""
    return SIZES | FAMILIES[family]


class Device:
    """A family's device model, a pool, and a page table for each prompt."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cuda") -> None:
        config = read_model(folder).limited_to(1024)
        pages = -(-(max(PROMPTS) + ANSWER) // PAGE)
        order = torch.randperm(len(PROMPTS) * pages, generator=torch.Generator().manual_seed(2)) + 1
        self._tables = order.view(len(PROMPTS), pages).to(torch.int32).to(device)
        shape = PoolShape(config.kv_format, 1 + order.numel(), PAGE, dtype, device)
        self._pool, self._tile = KvPool(shape), chunk_tile_rows(config)
        pdl, most = device == "cuda", RowLimits.of(config, len(PROMPTS), 1)
        attention = row_attention(self._tables, config.num_heads, shape, most, pdl=pdl)
        group, launch = ProcessGroup(RankInfo(), device), skinny.ProductLaunch.on(device, pdl=pdl)
        context = LayerContext.on(device, config, group, launch, attention)
        with FolderWeights(
            folder, config.spelling, WeightPlacement(device, dtype), fused=config.fused
        ) as weights:
            self.model = Decoder(config, weights, DeviceMachine(context))
        self._device = device

    def prompts(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of the last rows of whole prompts, in one step: float32 [prompts, vocab]."""
        tokens, places, tiles, ends = [], [], [], []
        for slot, prompt in enumerate(prompts):
            for i in range(0, len(prompt), self._tile):
                tiles.append((slot, len(tokens) + i, i, min(self._tile, len(prompt) - i)))
            places += [(slot, row) for row in range(len(prompt))]
            tokens += prompt
            ends.append(len(tokens) - 1)
        return self._logits(tokens, places, None, self._int32(tiles), self._int32(ends))

    def rounds(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Of the next row of every sequence: float32 [prompts, vocab]."""
        return self._round(tokens, lengths, range(len(tokens)))

    def alone(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """The same, one sequence after the other: kernels of one row are others."""
        each = zip(tokens, lengths, range(len(tokens)), strict=True)
        return torch.cat([self._round([token], [length], [slot]) for token, length, slot in each])

    def _round(self, tokens: Sequence[int], lengths: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        decode = DecodeRows(self._int32(slots), self._int32(lengths))
        return self._logits(tokens, list(zip(slots, lengths, strict=True)), decode, None, None)

    def _logits(
        self,
        tokens: Sequence[int],
        places: Sequence[tuple[int, int]],
        rounds: DecodeRows | None,
        tiles: torch.Tensor | None,
        picked: torch.Tensor | None,
    ) -> torch.Tensor:
        slots, rows = (torch.tensor(column, device=self._device) for column in zip(*places, strict=True))
        kv_rows = self._tables[slots, rows // PAGE] * PAGE + rows % PAGE
        step = ForwardRows(self._int32(tokens), rows.int(), kv_rows.int(), rounds, tiles)
        with torch.inference_mode():
            x, _ = self.model.forward(step, self._pool)
            return self.model.logits(x, picked)

    def _int32(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self._device)
