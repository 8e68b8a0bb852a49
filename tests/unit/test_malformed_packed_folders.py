"""Packed folders with a part missing, cut, of another dtype or of other numbers: one sentence, or a model.

Whatever a tensor or a word of the config is, what reads a folder raises ConfigError, and names the tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.folder import read_config, stored_tensors
from eyas.engine.checkpoint.methods import read_quantized
from eyas.engine.checkpoint.weights import FolderWeights
from tests.unit.bitsandbytes_formats import FORMATS as TABLES
from tests.unit.fp4_formats import FP4, gpt_oss, mx_experts
from tests.unit.packed_formats import PACKINGS, Packing, quantised

SHAPE = (64, 64)
NAME = "model.layers.0.mlp.up_proj"
KINDS = (torch.float32, torch.float16, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn)
FORMS = PACKINGS | FP4 | TABLES
SETTINGS = settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def written(form: Packing) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A matrix's tensors, and what a config.json says of them."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    each = form.quantise(weight) if form.quantise else quantised(weight, form, 0)
    return {f"{NAME}.{end}": tensor for end, tensor in form.write(each).items()}, form.told


def experts() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return mx_experts(NAME, torch.randn(3, 32, 10, generator=generator))[0], gpt_oss()


def read(folder: Path, tensors: dict[str, torch.Tensor], told: Any) -> None:
    """All that anything reads of a folder. Raises nothing else than ConfigError with the tensor's name."""
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": told}))
    try:
        config = read_quantized(read_config(folder))
    except (ConfigError, ValueError, KeyError):  # those that `reading` turns into one
        return
    there = stored_tensors(folder, config)
    try:
        with FolderWeights(folder, quantized=config) as weights:
            for name in [name for name in there if name in weights]:
                shape = there[name][1]
                weights.take(name, shape)
                if weights.is_packed(name):
                    weights.take_packed(name, shape, None)
    except ConfigError as error:
        assert NAME in str(error)


def cut(tensor: torch.Tensor, how: int) -> torch.Tensor:
    """Of another shape: one row less, one column less, flat, none, a scalar, one dimension more."""
    if how == 0:
        return tensor[:-1].contiguous() if tensor.dim() else tensor.reshape(1, 1)
    if how == 1:
        return tensor[..., :-1].contiguous() if tensor.dim() else tensor.expand(2).contiguous()
    if how == 2:
        return tensor.flatten()
    if how == 3:
        return tensor.new_empty(0)
    return tensor.flatten()[0].clone() if how == 4 else tensor[None].contiguous()


changes = st.one_of(
    st.tuples(st.just("drop"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("cut"), st.integers(0, 9), st.integers(0, 5)),
    st.tuples(st.just("kind"), st.integers(0, 9), st.integers(0, len(KINDS) - 1)),
    st.tuples(st.just("numbers"), st.integers(0, 9), st.integers(-128, 127)),
)


@pytest.mark.parametrize("name", [*FORMS, "experts"])
def test_a_malformed_matrix_is_named(tmp_path: Path, name: str) -> None:
    tensors, told = experts() if name == "experts" else written(FORMS[name])
    read(tmp_path, tensors, told)

    @SETTINGS
    @given(st.lists(changes, min_size=1, max_size=2))
    def changed(made: list[tuple[str, int, int]]) -> None:
        now = dict(tensors)
        for kind, which, how in made:
            part = sorted(now)[which % len(now)]
            if kind == "drop" and len(now) > 1:
                del now[part]
            elif kind == "cut":
                now[part] = cut(now[part], how)
            elif kind == "kind":
                now[part] = now[part].float().to(KINDS[how])
            elif kind == "numbers":
                now[part] = now[part].float().fill_(how).to(now[part].dtype)
        read(tmp_path, now, told)

    changed()


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.just([1]),
    st.just({"a": 1}),
    st.just(1.5),
)


@pytest.mark.parametrize("name", [*FORMS, "experts"])
def test_a_malformed_config_is_refused(tmp_path: Path, name: str) -> None:
    tensors, told = experts() if name == "experts" else written(FORMS[name])
    places = list(_places(told))

    @SETTINGS
    @given(st.integers(0, 99), values)
    def changed(which: int, value: Any) -> None:
        now = json.loads(json.dumps(told))
        *path, last = places[which % len(places)]
        at = now
        for key in path:
            at = at[key]
        at[last] = value
        read(tmp_path, tensors, now)

    changed()


def _places(told: Any, path: tuple[str, ...] = ()) -> Any:
    for key, value in told.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _places(value, (*path, key))
