"""Absorbed latent attention over a paged pool against the expanded form, written out densely."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.engine.attention.torch_backend import TorchAttention
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ExpertsSpec, FeedForwardSpec, LatentSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.checkpoint.weights import Part, Shape, WeightPlacement, WeightSource
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.layers.linear import Linear
from eyas.engine.layers.rotary import Rotary, tables
from eyas.engine.models.latent_attention import LatentMixer
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.models.ops.torch_ops import Step, TorchMachine, TorchOps
from eyas.engine.models.table import read_model

HIDDEN, ROWS, PAGE = 48, 150, 16
SPEC = LatentSpec(
    num_heads=3,
    num_kv_heads=1,
    head_dim=24 + 8,
    rope=RopeConfig(10000.0),
    scale=0.3,
    kv_rank=24,
    query_rank=40,
    plain_dim=12,
    value_dim=20,
)


class Noise(WeightSource):
    """Random tensors, kept for who writes out what is made of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(WeightPlacement(dtype=dtype))
        self.taken: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return True

    def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(self.taken))
        noise = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if len(shape) == 1:
            noise = 1.0 + 0.3 * torch.randn(shape, generator=generator)
        self.taken[name.removeprefix("a.").removesuffix(".weight")] = noise.to(dtype)
        return noise.to(dtype)


def expanded(spec: LatentSpec, taken: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Keys and values of every head made of the latents, then causal attention; all in float64."""
    w = {name: tensor.double() for name, tensor in taken.items()}
    x, heads, plain = x.double(), spec.num_heads, spec.plain_dim
    read = _norm(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T if spec.query_rank else None
    q = (x @ w["q_proj"].T if read is None else read).view(len(x), heads, -1)
    row = x @ w["kv_a_proj_with_mqa"].T
    latent = _norm(row[:, : spec.kv_rank], w["kv_a_layernorm"])
    made = (latent @ w["kv_b_proj"].T).view(len(x), heads, -1)
    shared = _turned(spec, row[:, None, spec.kv_rank :]).expand(-1, heads, -1)
    k = torch.cat((made[..., :plain], shared), -1)
    q = torch.cat((q[..., :plain], _turned(spec, q[..., plain:])), -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    seen = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", seen, made[..., plain:]).reshape(len(x), -1)


def _norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def _turned(spec: LatentSpec, x: torch.Tensor) -> torch.Tensor:
    """Neighbours as the two parts of complex numbers; the order within a head is left as it is stored."""
    cos, sin = tables(spec.rope, spec.rotated_dim, len(x))
    turn = torch.complex(cos[: len(x), None].double(), sin[: len(x), None].double())
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turn).flatten(-2)


def mixer(spec: LatentSpec, weights: Noise) -> LatentMixer[Linear]:
    layer = LayerSpec(spec, FeedForwardSpec(HIDDEN))
    config = ModelConfig(Path(), "", 8, HIDDEN, 1e-5, (layer,), ROWS)
    machine = TorchMachine(config, TorchAttention(spec.num_heads, PoolShape(config.kv_format, 1, PAGE)))
    return LatentMixer(Blocks(config, weights, machine), spec, "a", None)


def absorbed(spec: LatentSpec, block: LatentMixer[Linear], x: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The block's results for the chunks of x between `cuts`, over scattered pages."""
    shape = PoolShape(KvFormat(1, 1, spec.head_dim, spec.kv_rank), 16, PAGE, x.dtype)
    pool, backend = KvPool(shape), TorchAttention(spec.num_heads, shape)
    pool.tensor.fill_(math.nan)
    pages = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    rotary, parts = Rotary(spec.rope, spec.rotated_dim, ROWS), []
    for start, end in zip(cuts, cuts[1:], strict=False):
        places = torch.arange(start, end)
        rows = torch.tensor(pages)[places // PAGE] * PAGE + places % PAGE
        plan = backend.plan([QuerySpan(pages, start, end - start)])
        angles = {spec.rotation: rotary.angles(places)}
        step = Step(pool, rows, places, [(pool.slots(rows), plan)], angles, backend)
        parts.append(block.attend(x[start:end], 0, TorchOps(step, 1e-5)))
    return torch.cat(parts)


@pytest.mark.parametrize("query_rank", [40, 0])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 5e-6), (torch.bfloat16, 6e-2)], ids=str)
def test_the_absorbed_form_is_the_expanded_one(
    query_rank: int, dtype: torch.dtype, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt at once; then in chunks and single rows, as in decoding, which gives the same bits."""
    if dtype == torch.bfloat16:  # as on a GPU; not every CPU's oneDNN has it
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    spec, weights = dataclasses.replace(SPEC, query_rank=query_rank), Noise(dtype)
    block = mixer(spec, weights)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
    wanted = expanded(spec, weights.taken, x)
    found = absorbed(spec, block, x, [0, ROWS])
    assert (found - wanted).abs().max() < close * wanted.std()
    assert torch.equal(absorbed(spec, block, x, [0, 5, 69, *range(100, ROWS + 1)]), found)
    wrong = expanded(dataclasses.replace(spec, scale=spec.scale * 1.2), weights.taken, x)
    assert (found - wrong).abs().max() > 2 * close * wanted.std()


def test_a_cached_row_is_the_normed_latent_and_the_rotated_key() -> None:
    weights = Noise(torch.float32)
    block = mixer(SPEC, weights)
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(9))
    shape = PoolShape(KvFormat(2, 1, SPEC.head_dim, SPEC.kv_rank), 2, PAGE)
    pool, backend = KvPool(shape), TorchAttention(SPEC.num_heads, shape)
    angles = Rotary(SPEC.rope, SPEC.rotated_dim, 8).angles(torch.arange(8))
    plan = backend.plan([QuerySpan([1], 0, 7)])
    rows = torch.arange(16, 23)
    step = Step(pool, rows, torch.arange(8), [(pool.slots(rows), plan)], {SPEC.rotation: angles}, backend)
    block.keep(x, 1, TorchOps(step, 1e-5))
    row = x @ weights.taken["kv_a_proj_with_mqa"].T
    latent = _norm(row[:7, :24], weights.taken["kv_a_layernorm"])
    key = _turned(SPEC, row[:7, None, 24:].double())[:, 0].view(7, 4, 2).transpose(1, 2).reshape(7, 8)
    stored = pool.layer(1)[1, 0, :7, 0]
    assert torch.allclose(stored, torch.cat((latent, key.float()), -1), atol=1e-5)
    assert pool.tensor.count_nonzero() == 7 * 32, "padding and the other layer stay as they are"


def test_a_row_of_latents_is_small_and_every_ranks() -> None:
    v3 = KvFormat(61, kv_heads=1, head_dim=576, latent=512)
    assert v3.slot == (1, 1, 576) and v3.page_bytes(1, 2) == 70272 and v3.value_dim == 512
    assert v3.of_rank(8) == v3
    geometry = PoolShape(v3, pages=3, page_size=64, dtype=torch.bfloat16).geometry
    assert geometry.fields == 1 and geometry.page_bytes == 61 * 73728


# --- published configurations ------------------------------------------------------------------------------

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
V2_LITE = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "quantization_config": None,
}
KIMI_K2 = V3 | {
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "rope_theta": 50000,
    "rope_scaling": V3["rope_scaling"] | {"factor": 32, "beta_fast": 1},
    "max_position_embeddings": 131072,
}


@pytest.mark.parametrize(
    ("raw", "scale", "dense", "row_bytes", "experts"),
    [
        (V3, 0.1352338, 3, 70272, (256, 8, "sigmoid", True, 2.5, True, 8, 4, 2, 2048)),
        (V2_LITE, 0.114721, 1, 31104, (64, 6, "softmax", False, 1.0, False, 1, 1, 1, 2816)),
        (KIMI_K2, 0.130861, 1, 70272, (384, 8, "sigmoid", True, 2.827, True, 1, 1, 2, 2048)),
    ],
    ids=["V3", "V2-Lite", "Kimi-K2"],
)
def test_published_configurations(
    tmp_path: Path,
    raw: dict[str, Any],
    scale: float,
    dense: int,
    row_bytes: int,
    experts: tuple[object, ...],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model(tmp_path, "dummy")
    first, last = config.layers[0], config.layers[-1]
    assert isinstance(first.attention, LatentSpec) and isinstance(last.feed_forward, ExpertsSpec)
    assert first.attention.scale == pytest.approx(scale, abs=1e-6)
    assert first.attention.rope.attention_factor == 1.0
    assert sum(not isinstance(layer.feed_forward, ExpertsSpec) for layer in config.layers) == dense
    assert config.kv_format.page_bytes(1, 2) == row_bytes
    names = "experts per_row scores normalised scale corrected groups topk_groups group_best shared_width"
    assert tuple(getattr(last.feed_forward, name) for name in names.split()) == experts
    assert bool(config.quantized) == bool(raw["quantization_config"])
    assert config.context_length == raw["max_position_embeddings"]


def test_yarns_ramp_is_that_of_the_paper() -> None:
    """Pairs 0 to 10 turn as without yarn, those from 23 on 40 times slower."""
    rope = RopeConfig(10000.0, "yarn", 40.0, original_context=4096)
    cos, sin = (table[1].double() for table in tables(rope, 64, 2))
    plain = 10000.0 ** (-torch.arange(32).double() / 32)
    share = torch.atan2(sin, cos) / plain
    assert torch.allclose(share[:11], torch.ones(11).double(), atol=1e-5)
    assert torch.allclose(share[23:], torch.full((9,), 1 / 40).double(), atol=1e-5)
    assert ((share[11:23] < 1) & (share[11:23] > 1 / 40)).all()
