"""Adapters of experts that a module has as one parameter: read as PEFT's equation for these says, which is
written down here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import write_family
from safetensors.torch import load_file, save_file

from eyas.common.errors import InvalidRequest
from eyas.engine.adapters.peft import read_adapter
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.models.table import read_model

RANK, ALPHA = 4, 6.0
MODULE = "model.layers.{}.mlp.experts"


def _sizes(model: ModelConfig, layer: int) -> dict[str, tuple[int, int, int]]:
    """Of each parameter the number of experts, its rows and its columns, as experts compute with it."""
    spec = model.layers[layer].feed_forward
    assert isinstance(spec, ExpertsSpec)
    hidden, width = model.hidden_size, spec.width
    return {"gate_up_proj": (spec.experts, 2 * width, hidden), "down_proj": (spec.experts, hidden, width)}


def _write(folder: Path, model: ModelConfig, layer: int, *, turned: bool) -> dict[str, torch.Tensor]:
    """An adapter of both parameters of a layer; what it adds to each, [experts, rows, columns]."""
    folder.mkdir()
    random, tensors, added = torch.Generator().manual_seed(1), {}, {}
    for depth, (name, (experts, rows, columns)) in enumerate(_sizes(model, layer).items()):
        inputs, outputs = (rows, columns) if turned else (columns, rows)
        lower = torch.randn(experts * RANK, inputs, generator=random)
        upper = torch.randn(outputs, RANK * experts, generator=random)
        stem = f"base_model.model.{MODULE.format(layer)}{'.base_layer' * depth}"
        tensors |= {f"{stem}.lora_A.weight": lower, f"{stem}.lora_B.weight": upper}
        a, b = lower.view(experts, RANK, inputs), upper.view(outputs, RANK, experts)
        added[name] = torch.einsum("ore,eri->eio" if turned else "ore,eri->eoi", b, a) * (ALPHA / RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": []}
    names = [f"mlp.experts.{name}" for name in added]
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"target_parameters": names}))
    return added


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_each_expert_gets_its_part(tmp_path: Path, family: str, turned: bool) -> None:
    """`turned`: in PEFT's first form. The rows of gate and up take turns in gpt-oss."""
    write_family(tmp_path / "model", family)
    model = read_model(tmp_path / "model")
    added = _write(tmp_path / "adapter", model, 2, turned=turned)
    updates = dict(read_adapter(tmp_path / "adapter", model, 64).updates)
    gates = added.pop("gate_up_proj")
    halves = (gates[:, ::2], gates[:, 1::2]) if family == "gpt_oss" else gates.chunk(2, dim=1)
    added |= {"gate_proj": halves[0], "up_proj": halves[1]}
    for name, each in added.items():
        for expert, expected in enumerate(each):
            update = updates.pop(f"{MODULE.format(2)}.{expert}.{name}.weight")
            torch.testing.assert_close(update.stored.float() * update.scaling @ update.down, expected)
    assert not updates


@pytest.mark.parametrize(
    ("version", "turned"), [(None, True), ("0.18.1", True), ("0.19.0", False), ("0.21.3.dev0@1a2b", False)]
)
def test_the_version_of_peft_says_the_form_of_a_square_parameter(
    tmp_path: Path, version: str | None, turned: bool
) -> None:
    write_family(tmp_path / "model", "qwen3_moe")
    model = read_model(tmp_path / "model")
    square, layer = model.hidden_size // 2, model.layers[2]
    wide = replace(layer, feed_forward=replace(layer.feed_forward, width=square))
    model = replace(model, layers=(*model.layers[:2], wide, *model.layers[3:]))
    (_, (experts, rows, columns)) = next(iter(_sizes(model, 2).items()))
    assert rows == columns
    added = _write(tmp_path / "adapter", model, 2, turned=turned)
    if version is not None:
        config = tmp_path / "adapter" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"peft_version": version}))
    updates = read_adapter(tmp_path / "adapter", model, 64).updates
    for expert in range(experts):
        update = updates[f"{MODULE.format(2)}.{expert}.gate_proj.weight"]
        made = update.stored.float() * update.scaling @ update.down
        torch.testing.assert_close(made, added["gate_up_proj"][expert, :square])


@pytest.mark.parametrize(
    ("layer", "rank", "named"),
    [(1, RANK, "no parameter of this model's experts"), (2, 2 * RANK, "no factor of rank 8")],
)
def test_what_fits_no_experts_is_named(tmp_path: Path, layer: int, rank: int, named: str) -> None:
    """A dense layer has none."""
    write_family(tmp_path / "model", "qwen3_moe")
    model = read_model(tmp_path / "model")
    folder = tmp_path / "adapter"
    _write(folder, model, 2, turned=False)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": rank}))
    if layer != 2:
        tensors = load_file(folder / "adapter_model.safetensors")
        moved = {name.replace(".2.", f".{layer}."): tensor for name, tensor in tensors.items()}
        save_file(moved, folder / "adapter_model.safetensors")
    with pytest.raises(InvalidRequest, match=named) as refused:
        read_adapter(folder, model, 64)
    assert refused.value.param == "lora_path"
