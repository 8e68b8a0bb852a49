"""Broken checkpoints of today's families: the error names the field, or the tensor as the files do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from model_rig import Rig
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.models.table import read_model


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gpt_oss", {"rope_parameters": 7}, "rope_parameters 7 must be an object"),
        ("gpt_oss", {"rope_parameters": []}, r"rope_parameters \[\] must be an object"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is not supported"),
        ("gpt_oss", {"rope_parameters": {"rope_type": 0}}, "rope_type 0 is not supported"),
        ("gpt_oss", {"rms_norm_eps": 7.0}, "rms_norm_eps 7.0 is no small number"),
        ("gemma4_moe", {"top_k_experts": 9}, "top_k_experts 9 must be 6 or less"),
        ("gemma4_moe", {"hidden_activation": "swoosh"}, "hidden_activation 'swoosh' is not supported"),
        ("gemma4_moe", {"hidden_activation": []}, r"hidden_activation \[\] is not supported"),
        ("llama4", {"intermediate_size_mlp": 0}, "intermediate_size_mlp 0 must be 1 or more"),
        ("glm4_moe", {"num_experts_per_tok": 99}, "num_experts_per_tok 99 is not between 1 and the 12"),
        ("opt", {"ffn_dim": -1}, r"intermediate_size -1 must be 1 or more \(ffn_dim there\)"),
        ("mistral4", {"kv_lora_rank": None}, "has no kv_lora_rank|kv_lora_rank None"),
    ],
)
def test_the_field_is_named(tmp_path: Path, family: str, changes: dict[str, Any], says: str) -> None:
    write_family(tmp_path, family)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | changes))
    with pytest.raises(ConfigError, match=says):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            "missing",
            r"has no tensor model.layers.1.mlp.gate.bias \(of the kind .* model.layers.0.mlp.router.bias\)",
        ),
        (
            "short",
            r"gate.bias \(stored as model.layers.1.mlp.router.bias\) of .* is \(5,\), its config says",
        ),
        ("broken", r"mlp.gate.bias \(stored as model.layers.1.mlp.router.bias\) of .* holds NaN"),
        ("whole numbers", r"mlp.gate.bias \(stored as model.layers.1.mlp.router.bias\) is stored as I8"),
    ],
)
def test_a_tensor_is_named_as_the_files_name_it(tmp_path: Path, change: str, says: str) -> None:
    write_family(tmp_path, "gpt_oss")
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.router.bias"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    if change == "broken":
        tensor[2] = torch.inf
    if change != "missing":
        tensors[name] = {"short": tensor[:-1].clone(), "whole numbers": tensor.char()}.get(change, tensor)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=says):
        Rig(tmp_path)
