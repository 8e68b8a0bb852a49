"""Checkpoints in FP8 as those who quantise write them, and what they mean: written from the formats alone.

It knows tensors, the words of a config.json, and transformers' models; nothing of Eyas, so that a mistake
there cannot hide here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

Tensors = dict[str, torch.Tensor]
KEPT = ("lm_head", "embed_tokens", "norm", "mlp.gate.", "block_sparse_moe.gate.", "bias")


def _numbers(strategy: str, **more: Any) -> dict[str, Any]:
    """As compressed-tensors writes a group's weights or activations."""
    usual = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False, "group_size": None}
    return usual | {"strategy": strategy, "block_structure": None, "observer": "minmax"} | more


def _compressed(weights: dict[str, Any], rows: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True)
class Format:
    """How weights have scales, and what of a row has one ("": rows stay; "powers": 128, as powers of two)."""

    weights: str
    rows: str
    told: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, str] = ("weight_scale", "input_scale")
    held: torch.dtype = torch.float32


TOKEN, STATIC = _numbers("token", dynamic=True), _numbers("tensor")
GROUP = _numbers("group", dynamic=True, group_size=128)
BLOCK = _numbers("block", block_structure=[128, 128])
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMATS = {
    "channel and token": Format(
        "channel", "token", _compressed(_numbers("channel"), TOKEN), held=torch.bfloat16
    ),
    "channel": Format("channel", "", _compressed(_numbers("channel"), None)),
    "tensor and token": Format("tensor", "token", _compressed(_numbers("tensor"), TOKEN)),
    "tensor and tensor": Format("tensor", "tensor", _compressed(_numbers("tensor"), STATIC)),
    "tensor": Format("tensor", "", _compressed(_numbers("tensor"), None)),
    "blocks and groups": Format("block", "group", _compressed(BLOCK, GROUP)),
    "fp8, dynamic": Format("tensor", "token", FP8),
    "fp8, static": Format("tensor", "tensor", FP8 | {"activation_scheme": "static"}),
    "fp8 of transformers, static": Format(
        "tensor",
        "tensor",
        FP8 | {"activation_scheme": "static", "weight_block_size": None},
        ("weight_scale_inv", "activation_scale"),
    ),
    "fp8 in blocks": Format(
        "block", "group", FP8 | {"weight_block_size": [128, 128]}, ("weight_scale_inv", "input_scale")
    ),
}


V31 = FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
FORMATS["fp8 in blocks, ue8m0"] = Format("block", "powers", V31, ("weight_scale_inv", "input_scale"))


FORMATS["modelopt"] = Format("tensor", "tensor", {"quant_method": "modelopt", "quant_algo": "FP8"})
FORMATS["modelopt, by channel"] = Format(
    "channel", "token", {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
)
FORMATS["fbgemm"] = Format("channel", "token", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})


def quantised(weight: torch.Tensor, strategy: str, held: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What is stored of a weight, and its scales as they are stored."""
    if strategy == "tensor":
        scale = (weight.abs().max() / 448.0).to(held)
        return _to_fp8(weight / scale.float()), scale
    if strategy == "channel":
        scale = (weight.abs().amax(1, keepdim=True) / 448.0).to(held)
        return _to_fp8(weight / scale.float()), scale
    rows, columns = (-(-size // 128) for size in weight.shape)
    scale, stored = torch.empty(rows, columns), torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale[i, j] = weight[at].abs().max() / 448.0
            stored[at] = _to_fp8(weight[at] / scale[i, j])
    return stored, scale.to(held)


def dequantised(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight that is meant, float32."""
    scale = scale.float()
    if scale.dim() == 2 and scale.shape[1] != 1 or scale.shape[:1] not in (stored.shape[:1], (), (1,)):
        scale = torch.kron(scale, torch.ones(128, 128))[: stored.shape[0], : stored.shape[1]]
    return stored.float() * scale


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def write_format(
    folder: Path,
    plain: Path,
    form: Format,
    ignore: tuple[str, ...] = (),
    kept: tuple[str, ...] = KEPT,
    **told: Any,
) -> Tensors:
    """The model of `plain` in this format; gives what its tensors mean. `kept`: names with these stay."""
    tensors, meant = {}, load_file(plain / "model.safetensors")
    for name, weight in meant.items():
        tensors[name] = weight
        if weight.dim() != 2 or any(part in name for part in kept):
            continue
        stored, scale = quantised(weight, form.weights, form.held)
        module = name.removesuffix("weight")
        tensors[name], tensors[module + form.names[0]] = stored, scale
        meant[name] = dequantised(stored, scale)
        if form.rows == "tensor":
            others = sum(form.names[1] in there for there in tensors)
            tensors[module + form.names[1]] = torch.tensor([0.01 + 0.001 * (others % 7)])
    folder.mkdir()
    lists = {"modules_to_not_convert" if form.told["quant_method"] == "fp8" else "ignore": list(ignore)}
    raw = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": form.told | lists | told}))
    save_file(tensors, folder / "model.safetensors")
    return meant


def rounded(x: torch.Tensor, rows: str, static: float = 0.0) -> torch.Tensor:
    """Rows x [R, K] as a product reads them, one number group after the other, float64."""
    out = torch.empty(x.shape, dtype=torch.float64)
    width = 128 if rows in ("group", "powers") else x.shape[1]
    for r, row in enumerate(x):
        for first in range(0, x.shape[1], width):
            part = row[first : first + width]
            largest = torch.tensor(max(1e-4, float(part.abs().max())))
            scale = torch.tensor(static) if rows == "tensor" else largest / torch.tensor(448.0)
            if rows == "powers":
                scale = torch.tensor(2.0 ** math.ceil(math.log2(float(scale))))
            out[r, first : first + width] = _to_fp8(part / scale).double() * scale.double()
    return out


class Rendered(nn.Module):
    """A linear layer of transformers with rows rounded and a dequantised weight, summed in float64."""

    def __init__(self, plain: nn.Linear, weight: torch.Tensor, rows: str, static: float) -> None:
        super().__init__()
        self._weight, self._bias, self._how = weight.double(), plain.bias, (rows, static)
        self.weight = plain.weight  # its dtype is looked at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        made = (rounded(flat, *self._how) @ self._weight.t()).float()
        made = made if self._bias is None else made + self._bias
        return made.view(*x.shape[:-1], -1)


PRODUCTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def render(model: Any, folder: Path, form: Format) -> Any:
    """The transformers model with every module replaced that `folder` has in FP8.

    A part of a product whose other parts are not in FP8 reads rows as they are.
    """
    stored = load_file(folder / "model.safetensors")
    scale_name, row_name = form.names
    for name, module in list(model.named_modules()):
        tensor = f"{name}.weight"
        if (
            not isinstance(module, nn.Linear)
            or stored.get(tensor, torch.empty(0)).dtype != torch.float8_e4m3fn
        ):
            continue
        parent, own = name.rsplit(".", 1)
        group = [f"{parent}.{part}" for parts in PRODUCTS if own in parts for part in parts] or [name]
        weight = dequantised(stored[tensor], stored[f"{name}.{scale_name}"])
        alike = all(stored[f"{one}.weight"].dtype == torch.float8_e4m3fn for one in group)
        if not form.rows or not alike:
            with torch.no_grad():
                module.weight.copy_(weight)
            continue
        static = max((float(stored.get(f"{one}.{row_name}", torch.zeros(1))) for one in group), default=0.0)
        setattr(model.get_submodule(parent), own, Rendered(module, weight, form.rows, static))
    return model
