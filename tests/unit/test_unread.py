"""A folder whose tensors are another model's than its config.json's is refused by the tensor's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.table import read_model
from tests.unit.families import VOCAB, write_family
from tests.unit.fused_models import Twin
from tests.unit.model_rig import Rig

LAYER = "model.layers.1."


def store(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> None:
    """Adds tensors to the folder's, and changes keys of its config.json."""
    path, config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(path) | tensors, path)
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", f"{LAYER}self_attn.q_proj.bias"),
        ("llama", f"{LAYER}self_attn.q_norm.weight"),
        ("llama", f"{LAYER}mlp.gate_proj.bias"),
        ("llama", f"{LAYER}pre_feedforward_layernorm.weight"),
        ("llama", "model.norm.bias"),
        ("llama", "lm_head.bias"),
        ("qwen2", f"{LAYER}self_attn.o_proj.bias"),
        ("mixtral", f"{LAYER}block_sparse_moe.shared_expert.gate_proj.weight"),
        ("deepseek_v2", f"{LAYER}mlp.gate.e_score_correction_bias"),
        ("gemma3_with_eyes", "model.language_model.layers.1.self_attn.q_proj.bias"),
    ],
)
def test_a_tensor_that_no_equation_reads(tmp_path: Path, family: str, name: str) -> None:
    write_family(tmp_path, family)
    store(tmp_path, {name: torch.zeros(8)})
    with pytest.raises(ConfigError, match="does not read: it is another model") as refused:
        Rig(tmp_path)
    assert name.split("layers.")[-1].replace("block_sparse_moe", "mlp") in str(refused.value)


def test_a_shared_expert_that_its_config_leaves_out(tmp_path: Path) -> None:
    write_family(tmp_path, "deepseek_v2")
    store(tmp_path, {}, n_shared_experts=None)
    with pytest.raises(ConfigError, match=r"layers.1.mlp.shared_experts.down_proj.weight and 8 others"):
        Rig(tmp_path)


def test_tensors_that_may_lie_beside_the_layers(tmp_path: Path) -> None:
    """Tables and scales of old exports, a draft head behind the last layer, another one's layers."""
    write_family(tmp_path, "llama")
    beside = ("self_attn.rotary_emb.inv_freq", "self_attn.k_scale", "self_attn.k_proj.output_scale")
    others = ("model.layers.4.eh_proj.weight", "model.mtp_layers.0.input_proj.weight", "vision.layers.1.bias")
    store(tmp_path, {name: torch.zeros(8) for name in (*(LAYER + each for each in beside), *others)})
    Rig(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_may_be_stored_again_and_may_not_differ(tmp_path: Path, dtype: torch.dtype) -> None:
    write_family(tmp_path, "llama", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rounded = embedding.bfloat16()
    store(tmp_path, {"model.embed_tokens.weight": rounded, "lm_head.weight": rounded.clone().to(dtype)})
    Rig(tmp_path)
    last_row = rounded.to(dtype).index_fill(0, torch.tensor([VOCAB - 1]), 1.0)
    for other in (last_row, rounded[:64].contiguous()):
        store(tmp_path, {"lm_head.weight": other})
        with pytest.raises(ConfigError, match="tie_word_embeddings says that lm_head.weight is"):
            Rig(tmp_path)
    store(tmp_path, {"lm_head.weight": embedding}, tie_word_embeddings=False)
    Rig(tmp_path)


def test_the_same_on_a_device(tmp_path: Path) -> None:
    write_family(tmp_path, "llama", vocab_size=128, num_hidden_layers=2)
    rig = Rig(tmp_path)
    context = Twin(rig.config, rig.pool, torch.zeros(4, 16, dtype=torch.int32)).context

    def load() -> None:
        config = read_model(tmp_path)
        with FolderWeights(tmp_path, config.spelling) as weights:
            Decoder(config, weights, DeviceMachine(context))

    load()
    store(tmp_path, {f"{LAYER}self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ConfigError, match="self_attn.q_proj.bias, which a LlamaForCausalLM"):
        load()
    store(tmp_path, {}, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        load()
