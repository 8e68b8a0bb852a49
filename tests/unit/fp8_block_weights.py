"""A checkpoint whose weights are FP8 in blocks, and which of them stay as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.tiny_deepseek import RAGGED, write_tiny_deepseek

Tensors = dict[str, torch.Tensor]
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
TOLD = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def in_blocks(weight: torch.Tensor, powers_of_two: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q in e4m3, a scale for each block, and q * scale; block by block, as the format is described."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    stored, meant = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale = weight[block].abs().max() / 448.0
            if powers_of_two:
                scale = torch.exp2(scale.log2().ceil())
            scales[i, j] = scale
            stored[block] = (weight[block] / scale).to(torch.float8_e4m3fn)
            meant[block] = stored[block].float() * scale
    return stored, scales, meant


def write_fp8(folder: Path, plain: Path, scales_as: torch.dtype | None = None) -> Tensors:
    """The model of `plain` in FP8 blocks; gives what its weights stand for. `scales_as`: powers of two."""
    tensors, meant = {}, load_file(plain / "model.safetensors")
    for name, weight in meant.items():
        tensors[name] = weight
        if weight.dim() == 2 and not any(part in name for part in KEPT):
            stored, scales, meant[name] = in_blocks(weight, scales_as is not None)
            tensors[name], tensors[f"{name}_scale_inv"] = stored, scales.to(scales_as or torch.float32)
    folder.mkdir()
    told = TOLD if scales_as is None else TOLD | {"scale_fmt": "ue8m0"}
    raw = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": told}))
    save_file(tensors, folder / "model.safetensors")
    return meant


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_tiny_deepseek(folder, RAGGED | {"num_hidden_layers": 2})
    return folder
