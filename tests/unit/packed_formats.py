"""Checkpoints of four and eight bits as those who quantise write them, number by number, and what they mean.

It knows tensors and the words of a config.json; nothing of Eyas, so that a mistake there cannot hide here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.models.table import read_model
from tests.unit.model_rig import Rig

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Tensors = dict[str, torch.Tensor]
KEPT = ("lm_head", "embed_tokens", "norm", "mlp.gate.", "block_sparse_moe.gate.", "bias")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of eight columns: which one is in a word's first, second... four bits."""


@dataclass(frozen=True)
class Quantised:
    """A weight [n, k]: numbers from 0 on, zero points and scales [n, groups], a group for each column."""

    numbers: Numbers
    zeros: Numbers
    scales: torch.Tensor
    groups: Numbers
    bits: int

    def meant(self) -> torch.Tensor:
        out = torch.empty(self.numbers.shape)
        scales = self.scales.float()
        for column, group in enumerate(self.groups.tolist()):
            number = torch.from_numpy(self.numbers[:, column] - self.zeros[:, group])
            out[:, column] = number.float() * scales[:, group]
        return out


@dataclass(frozen=True)
class Packing:
    """A format: its words in a config.json, how it writes a weight, and what it quantises to.

    `quantise`: another way than `quantised`. `group`: columns with one scale (0: all). `symmetric`: zero
    points are half the range. `shuffled`: columns are in groups in no order, all of one width in the same.
    `whole`: a weight has one scale.
    """

    told: dict[str, Any]
    write: Callable[[Any], Tensors]
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    shuffled: bool = False
    whole: bool = False
    scales: torch.dtype = torch.float16
    quantise: Callable[[torch.Tensor], Any] | None = None


def quantised(weight: torch.Tensor, form: Packing, seed: int) -> Quantised:
    n, k = weight.shape
    size, most = form.group or k, 2**form.bits - 1
    generator = np.random.default_rng(seed)
    groups = np.arange(k) // size
    if form.shuffled:
        np.random.default_rng(k).shuffle(groups)
    count = k // size
    wide = torch.stack([weight[:, torch.from_numpy(groups == g)].abs().amax(1) for g in range(count)], 1)
    if form.whole:
        wide = wide.amax().expand_as(wide)
    scales = (wide * 2.2 / most).to(form.scales)
    zeros = np.full((n, count), 2 ** (form.bits - 1))
    if not form.symmetric:
        spread = generator.integers(-3, 4, size=(1, 1) if form.whole else zeros.shape)
        zeros = zeros + spread
    at = torch.from_numpy(groups)
    numbers = (weight / scales.float()[:, at]).round().long().numpy() + zeros[:, groups]
    return Quantised(numbers.clip(0, most), zeros, scales, groups, form.bits)


def words(rows: Numbers, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Rows of numbers -> rows of words, each number shifted to its place; `order`: of a word's numbers."""
    if bits == 3:
        return stream(rows, bits)
    each = 32 // bits
    places = order or tuple(range(each))
    out = np.zeros((rows.shape[0], -(-rows.shape[1] // each)), dtype=np.int64)
    for r, row in enumerate(rows.tolist()):
        for first in range(0, len(row), each):
            word, there = 0, row[first : first + each]
            for place, column in enumerate(places):
                if column < len(there):
                    word |= there[column] << (bits * place)
            out[r, first // each] = word
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def stream(rows: Numbers, bits: int) -> torch.Tensor:
    """Rows of numbers -> rows of words, the numbers one behind the other whatever word they end in."""
    made = []
    for row in rows.tolist():
        whole = sum(number << bits * place for place, number in enumerate(row))
        made.append([whole >> 32 * word & 0xFFFFFFFF for word in range(-(-len(row) * bits // 32))])
    return torch.from_numpy(np.array(made, dtype=np.uint32).view(np.int32))


def _gptq(less: int, *, with_groups: bool = True) -> Callable[[Quantised], Tensors]:
    def write(weight: Quantised) -> Tensors:
        stored = {
            "qweight": words(weight.numbers, weight.bits).t().contiguous(),
            "qzeros": words(weight.zeros.T - less, weight.bits),
            "scales": weight.scales.t().contiguous(),
        }
        return stored | ({"g_idx": torch.from_numpy(weight.groups).int()} if with_groups else {})

    return write


def _awq(weight: Quantised) -> Tensors:
    return {
        "qweight": words(weight.numbers.T, 4, AWQ_ORDER),
        "qzeros": words(weight.zeros.T, 4, AWQ_ORDER),
        "scales": weight.scales.t().contiguous(),
    }


def _packed(*, zeros: bool = False, with_groups: bool = False) -> Callable[[Quantised], Tensors]:
    def write(weight: Quantised) -> Tensors:
        stored = {
            "weight_packed": words(weight.numbers, weight.bits),
            "weight_scale": weight.scales.contiguous(),
            "weight_shape": torch.tensor(weight.numbers.shape),
        }
        if zeros:
            stored["weight_zero_point"] = words(weight.zeros.T, weight.bits).t().contiguous()
        if with_groups:
            stored["weight_g_idx"] = torch.from_numpy(weight.groups).int()
        return stored

    return write


def _bytes(*, zeros: bool = False, whole: bool = False) -> Callable[[Quantised], Tensors]:
    def write(weight: Quantised) -> Tensors:
        half = 2 ** (weight.bits - 1)
        stored = {
            "weight": torch.from_numpy(weight.numbers - half).to(torch.int8),
            "weight_scale": weight.scales[:1, 0].contiguous() if whole else weight.scales.contiguous(),
        }
        if zeros:
            points = torch.from_numpy(weight.zeros - half).to(torch.int8)
            stored["weight_zero_point"] = points[:1, 0].contiguous() if whole else points
        return stored

    return write


def gptq(**told: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False} | told


def auto_round(form: str, **told: Any) -> dict[str, Any]:
    usual = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
    return usual | {"packing_format": form} | told


def awq(**told: Any) -> dict[str, Any]:
    usual = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return usual | {"modules_to_not_convert": None} | told


def compressed(
    form: str = "pack-quantized", rows: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    usual = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}
    usual |= {"dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": usual | weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


TOKEN = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
CHANNEL: dict[str, Any] = {"num_bits": 8, "strategy": "channel", "group_size": None}
PACKINGS = {
    "gptq": Packing(gptq(), _gptq(1)),
    "gptq, 8 bits, by row": Packing(
        gptq(bits=8, group_size=-1, sym=True), _gptq(1), bits=8, group=0, symmetric=True
    ),
    "gptq, by activations": Packing(
        gptq(group_size=16, desc_act=True), _gptq(1), group=16, shuffled=True, scales=torch.bfloat16
    ),
    "gptq, 8 bits, by activations": Packing(
        gptq(bits=8, desc_act=True, sym=True), _gptq(1), bits=8, symmetric=True, shuffled=True
    ),
    "gptq_v2": Packing(gptq(checkpoint_format="gptq_v2"), _gptq(0)),
    "gptq, 2 bits": Packing(gptq(bits=2, group_size=16), _gptq(1), bits=2, group=16, symmetric=True),
    "gptq_v2, 3 bits": Packing(gptq(checkpoint_format="gptq_v2", bits=3), _gptq(0), bits=3),
    "auto-round": Packing(auto_round("auto_round:auto_gptq"), _gptq(1, with_groups=False), symmetric=True),
    "auto-round, as it is": Packing(
        auto_round("auto_round:gptqmodel", sym=False), _gptq(0, with_groups=False)
    ),
    "auto-round, awq": Packing(auto_round("auto_round:auto_awq", sym=False), _awq),
    "awq": Packing(awq(), _awq),
    "awq, by row": Packing(awq(group_size=-1), _awq, group=0),
    "w4a16": Packing(compressed(), _packed(), symmetric=True, scales=torch.bfloat16),
    "w4a16, zero points": Packing(compressed(symmetric=False), _packed(zeros=True)),
    "w4a16, by activations": Packing(
        compressed(actorder="group", symmetric=False), _packed(zeros=True, with_groups=True), shuffled=True
    ),
    "w8a16": Packing(compressed(**CHANNEL), _packed(), bits=8, group=0, symmetric=True),
    "w8a8": Packing(compressed("int-quantized", TOKEN, **CHANNEL), _bytes(), bits=8, group=0, symmetric=True),
    "w8a8, zero points": Packing(
        compressed("int-quantized", TOKEN, symmetric=False, **CHANNEL), _bytes(zeros=True), bits=8, group=0
    ),
    "w8a8, by tensor": Packing(
        compressed("int-quantized", TOKEN, num_bits=8, strategy="tensor"),
        _bytes(whole=True),
        bits=8,
        group=0,
        symmetric=True,
        whole=True,
    ),
}


def write_packed(
    folder: Path, plain: Path, form: Packing, kept: tuple[str, ...] = KEPT, **told: Any
) -> Tensors:
    """The model of `plain` in this format; beside it, in "meant", the same with what its numbers mean.

    `kept`: names with these stay. Gives what is stored.
    """
    tensors, meant = {}, load_file(plain / "model.safetensors")
    for seed, (name, weight) in enumerate(sorted(meant.items())):
        if weight.dim() != 2 or any(part in name for part in kept):
            tensors[name] = weight
            continue
        each = form.quantise(weight.float()) if form.quantise else quantised(weight, form, seed)
        module = name.removesuffix("weight")
        tensors |= {module + end: tensor for end, tensor in form.write(each).items()}
        meant[name] = each.meant()
    raw = json.loads((plain / "config.json").read_text())
    for there, stored, more in (
        (folder, tensors, {"quantization_config": form.told | told}),
        (folder.parent / "meant", meant, {}),
    ):
        there.mkdir(exist_ok=True)
        (there / "config.json").write_text(json.dumps(raw | more))
        save_file(stored, there / "model.safetensors")
    return tensors


UP = "model.layers.0.mlp.up_proj"
SHAPE = (128, 64)


def logits(folder: Path) -> torch.Tensor:
    rig = Rig(folder, pages=8)
    return rig.logits([QuerySpan(rig.table(12), 0, 12)], list(range(40, 52)))


def read(folder: Path, name: str = UP, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    config = read_model(folder)
    with FolderWeights(folder, config.spelling, quantized=config.quantized, fused=config.fused) as weights:
        return weights.take(f"{name}.weight", shape)
