"""Fused models in FP8 against the plain ones, however scales lie, and with modules that are not in FP8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.engine.checkpoint.fp8 import widened
from eyas.engine.checkpoint.weights import DummyWeights, FolderWeights, WeightPlacement, WeightSource
from eyas.engine.formats.table import loader_of
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from tests.unit.families import write_family
from tests.unit.fp8_formats import FORMATS, KEPT, write_format
from tests.unit.fused_models import FIRST, SLOTS, Steps, Twin, with_tokens
from tests.unit.model_rig import Rig
from tests.unit.tiny_deepseek import SMALL, write_tiny_deepseek

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 128, "num_hidden_layers": 1, "hidden_size": 160, "intermediate_size": 288}
BLOCKS = SIZES | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 2}
FEW = 4
"""Rows of the first prompt."""
TIPPED = 0.02
"""Of a logit, over their deviation: sums in another order put a number on the other side of a rounding."""
FORMS = [
    ("llama", "channel and token"),
    ("qwen3", "tensor and token"),
    ("mistral", "tensor and tensor"),
    ("qwen2", "fp8, static"),
]


def differ(fused: Path, plain: Path, first: int = FEW) -> float:
    """The difference of two models' logits, over their deviation, of the median row."""
    rig = Rig(plain)
    config = read_model(fused)
    assert refusal(config, config.vocab_size) == ""
    twin = Twin(config, rig.pool, torch.zeros(SLOTS, 16, dtype=torch.int32))
    with FolderWeights(fused, config.spelling, quantized=config.quantized) as weights:
        model = Decoder(config, weights, DeviceMachine(twin.context))
    differences: list[torch.Tensor] = []
    for rounds, chunks, spans, tokens in Steps(rig, first):
        expected = rig.model.logits(rig.forward(spans, tokens.tolist())[0])
        found, _ = model.forward(with_tokens(twin.rows(rounds, chunks), tokens.tolist()), twin.pool)
        difference = (model.logits(found) - expected[: found.shape[0]]).square().mean(1).sqrt()
        differences.append(difference / expected.std())
    return float(torch.cat(differences).median())


def spoilt(folder: Path, to: Path, part: str) -> Path:
    """The model with a scale that is twice as large."""
    to.mkdir()
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if part in name and name.endswith("weight_scale"))
    stored[name] = stored[name] * 2.0
    (to / "config.json").write_text((folder / "config.json").read_text())
    save_file(stored, to / "model.safetensors")
    return to


@pytest.mark.parametrize(("family", "name"), FORMS)
def test_dense_models_are_the_plain_ones(tmp_path: Path, family: str, name: str) -> None:
    """With norms of heads, a window, biases; and one scale of another size is noticed."""
    write_family(tmp_path / "plain", family, std=0.08, **SIZES)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS[name])
    assert differ(tmp_path / "fp8", tmp_path / "fp8") < TIPPED
    if family == "llama":
        assert differ(spoilt(tmp_path / "fp8", tmp_path / "spoilt", "v_proj"), tmp_path / "fp8") > 2 * TIPPED


def test_many_rows_are_the_plain_ones(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", "qwen3", std=0.08, **SIZES)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS["channel and token"])
    assert differ(tmp_path / "fp8", tmp_path / "fp8", FIRST["wide"]) < TIPPED


def test_weights_alone_in_fp8_are_widened(tmp_path: Path) -> None:
    """Rows are left as they are: nothing is rounded twice, and the narrow way is open."""
    write_family(tmp_path / "plain", "llama", **SIZES)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS["channel"])
    assert differ(tmp_path / "fp8", tmp_path / "fp8") < 1e-5


HERE = [("channel and token", part) for part in ("k_proj", "self_attn", "down_proj")]
HERE += [("fp8 in blocks", part) for part in ("o_proj", "up_proj", ".mlp.")]
HERE += [("fp8 in blocks, ue8m0", "o_proj")]


@pytest.mark.parametrize(("name", "there"), HERE)
def test_modules_that_are_not_in_fp8(tmp_path: Path, name: str, there: str) -> None:
    """One matrix, part of a product, a half."""
    write_family(tmp_path / "plain", "llama", std=0.08, **BLOCKS)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS[name], kept=(*KEPT, there))
    assert 1e-7 < differ(tmp_path / "fp8", tmp_path / "fp8") < TIPPED


@pytest.mark.parametrize("there", ["self_attn", "mlp."])
def test_norms_behind_what_is_in_fp8_beside_what_is_not(tmp_path: Path, there: str) -> None:
    """Few rows go the narrow way where attention is not in FP8; the norm behind the feed-forward is there."""
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    write_family(tmp_path / "plain", "gemma3", std=0.08, **sizes)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS["channel and token"], kept=(*KEPT, there))
    assert 1e-7 < differ(tmp_path / "fp8", tmp_path / "fp8") < TIPPED


EXPERTS = BLOCKS | {"num_experts": 4, "moe_intermediate_size": 128, "mlp_only_layers": []}
SOME = [("channel and token", ""), ("fp8, static", ""), ("channel and token", "experts.2.gate_proj")]
SOME += [("fp8 in blocks", "experts.2.down_proj")]


@pytest.mark.parametrize(("name", "there"), SOME)
def test_experts_of_which_some_are_not_in_fp8(tmp_path: Path, name: str, there: str) -> None:
    write_family(tmp_path / "plain", "qwen3_moe", std=0.08, **EXPERTS)
    kept = (*KEPT, there) if there else KEPT
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS[name], kept=kept)
    assert differ(tmp_path / "fp8", tmp_path / "fp8") < TIPPED


LATENT = SMALL | {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
PARTS = [("channel and token", ""), ("fp8, static", ""), ("fp8 in blocks", "shared_experts")]
PARTS += [("channel and token", "shared_experts.up_proj"), ("fp8 in blocks", "kv_a_proj")]
PARTS += [("channel and token", "q_a_proj"), ("fp8 in blocks", "q_b_proj")]


@pytest.mark.parametrize(("name", "there"), PARTS)
def test_latents_and_shared_experts(tmp_path: Path, name: str, there: str) -> None:
    """Whatever of them is not in FP8, beside what is. Scores are made smaller: they decide much."""
    write_tiny_deepseek(tmp_path / "plain", LATENT)
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    small = {n: t / 4 if "q_b_proj" in n else t for n, t in stored.items()}
    save_file(small, tmp_path / "plain" / "model.safetensors")
    kept = (*KEPT, there) if there else KEPT
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS[name], kept=kept)
    assert differ(tmp_path / "fp8", tmp_path / "fp8") < TIPPED


def test_blocks_alone_need_whole_blocks(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", "llama", **SIZES)
    why = {}
    for name in ("channel and token", "fp8 in blocks"):
        write_format(tmp_path / name, tmp_path / "plain", FORMATS[name])
        config = read_model(tmp_path / name)
        why[name] = refusal(config, config.vocab_size)
    assert why["channel and token"] == "" and "in FP8 blocks" in why["fp8 in blocks"]


@pytest.mark.parametrize("name", ["channel and token", "fp8, static"])
def test_dummies_are_in_fp8_where_the_config_says_so(tmp_path: Path, name: str) -> None:
    write_family(tmp_path / "plain", "llama", std=0.08, **SIZES)
    dense = ("model.layers.0.mlp.down_proj",)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS[name], dense, (*KEPT, *dense))
    config = read_model(tmp_path / "fp8", "dummy")
    weights: WeightSource = DummyWeights(quantized=config.quantized)
    assert config.quantized is not None
    rounding = weights.rounding(["model.layers.1.mlp.down_proj.weight"])
    assert rounding is not None and rounding.rows == config.quantized.rows
    assert weights.rounding(["model.layers.0.mlp.down_proj.weight"]) is None
    rig = Rig(tmp_path / "fp8")
    twin = Twin(config, rig.pool, torch.zeros(SLOTS, 16, dtype=torch.int32))
    model = Decoder(config, weights, DeviceMachine(twin.context))
    rounds, chunks, _, tokens = next(iter(Steps(rig, FEW)))
    found, _ = model.forward(with_tokens(twin.rows(rounds, chunks), tokens.tolist()), twin.pool)
    assert found.isfinite().all()


@pytest.mark.parametrize("name", ["channel and token", "fp8, static", "fp8 in blocks"])
def test_ranks_have_their_rows_and_columns(tmp_path: Path, name: str) -> None:
    """With the scales that belong to them: of each part of a product, whose scales differ."""
    write_family(tmp_path / "plain", "llama", **BLOCKS)
    meant = write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS[name])
    quantized = read_model(tmp_path / "fp8").quantized
    names, back = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")], DOWN
    for rank in range(2):
        placement = WeightPlacement(rank=rank, ranks=2)
        with FolderWeights(tmp_path / "fp8", placement=placement, quantized=quantized) as weights:
            upper = loader_of(weights, names, exact=False).rows(names, [256, 256], 256).weight
            lower = loader_of(weights, [back], exact=False).columns(back, (256, 256)).weight
        mine = slice(128 * rank, 128 * rank + 128)
        assert upper.scales is not None and lower.scales is not None
        parts = torch.cat([meant[part][mine] for part in names])
        assert torch.equal(widened(upper.stored, upper.scales), parts)
        assert torch.equal(widened(lower.stored, lower.scales), meant[back][:, mine])


DOWN = "model.layers.0.mlp.down_proj.weight"
