"""Weights in the place of others are, to the bit, those of a fresh start: any family, machine and format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from fp8_formats import FORMATS, write_format
from hybrid_rig import write_hybrid
from packed_formats import PACKINGS, write_packed
from safetensors.torch import load_file, save_file

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.host_tensors import read_files
from eyas.engine.loading.replacement import WeightReplacement, paired
from eyas.engine.models.decoder import Decoder
from tests.unit.crossed import crossed
from tests.unit.hybrid_sizes import SIZES as HYBRID
from tests.unit.weight_models import model_of

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["llama_biases", "qwen3_moe", "deepseek_v3", "olmo2", "gemma2", "gpt_oss"]
SIZES = {
    "deepseek_v3": {
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
}
WIDE = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 144, "head_dim": 64}
FP8 = ["fp8, dynamic", "fp8 in blocks, ue8m0", "channel and token"]
QUICK = ["llama_biases", "qwen3_moe", "fp8, dynamic", "gptq"]
PACKED = ["gptq", "awq", "w8a8, by tensor"]


def config(folder: Path, *, device: bool, exact: bool = False) -> EngineConfig:
    plain = EngineConfig(model=str(folder), draft=None, num_pages=8, max_running=2, context_length=64)
    if not device:
        return plain
    plain = replace(plain, dtype="bfloat16" if exact else "float32", deterministic=exact)
    return replace(plain, attention_backend="triton", prefill_attention_backend="triton")


def differences(one: Decoder[Any], other: Decoder[Any]) -> tuple[int, int]:
    """How many tensors of two models differ, of how many."""
    pairs = [pair for name in one._parts for pair in paired(one._parts[name], other._parts[name], name)]
    return sum(not same(*pair) for pair in pairs), len(pairs)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_mkldnn:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check(first: Path, second: Path, *, device: bool, exact: bool = False) -> None:
    """A model of the first folder becomes one of the second."""
    loaded, model = model_of(config(first, device=device, exact=exact))
    _, fresh = model_of(config(second, device=device, exact=exact))
    before, count = differences(model, fresh)
    assert before > count / 4, "they were others"
    where = {id(old): old.data_ptr() for name in model._parts for old, _ in _own(model, fresh, name)}
    replacement = WeightReplacement(loaded, model)
    file = read_files([second / "model.safetensors"])
    replacement.rehearse(file)
    assert differences(model, fresh)[0] == before, "a rehearsal changes nothing"
    replacement.write(file)
    assert differences(model, fresh) == (0, count)
    assert where == {id(old): old.data_ptr() for name in model._parts for old, _ in _own(model, fresh, name)}


def _own(model: Decoder[Any], fresh: Decoder[Any], name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = paired(model._parts[name], fresh._parts[name], name)
    return [pair for pair in pairs if not pair[0].is_mkldnn]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        case
        for case in crossed(
            FAMILIES, ["cpu", "fast", "exact"], quick=lambda family, way: family in QUICK and way != "cpu"
        )
        if case.id not in ("olmo2-exact", "gpt_oss-exact")  # no exact kernels
    ],
)
def test_a_replaced_model_is_a_fresh_one(tmp_path: Path, family: str, way: str) -> None:
    changes = SIZES.get(family, {}) | {"vocab_size": 144}
    write_family(tmp_path / "a", family, **changes)
    write_family(tmp_path / "b", family, std=0.3, **changes)
    check(tmp_path / "a", tmp_path / "b", device=way != "cpu", exact=way == "exact")


@pytest.mark.parametrize("device", [False, True])
def test_matrices_that_adapters_update(tmp_path: Path, device: bool) -> None:
    """Their slots stay as they are; what adapters that are loaded later are multiplied by is new."""
    write_family(tmp_path / "a", "llama", **WIDE)
    write_family(tmp_path / "b", "llama", std=0.3, **WIDE)
    loaded, model = model_of(replace(config(tmp_path / "a", device=device), max_loras=2))
    _, fresh = model_of(replace(config(tmp_path / "b", device=device), max_loras=2))
    file = read_files([tmp_path / "b" / "model.safetensors"])
    WeightReplacement(loaded, model).write(file)
    changed, count = differences(model, fresh)
    assert changed == 0
    assert count > 20


@pytest.mark.parametrize("device", [False, True])
def test_layers_with_states(tmp_path: Path, device: bool) -> None:
    for name in "ab":
        write_hybrid(tmp_path / name, "qwen3_5", **HYBRID)
    stored = load_file(tmp_path / "b" / "model.safetensors")
    save_file({n: t * 1.25 for n, t in stored.items()}, tmp_path / "b" / "model.safetensors")
    check(tmp_path / "a", tmp_path / "b", device=device)


@pytest.mark.parametrize("form", crossed([*FP8, *PACKED], quick=lambda form: form in QUICK))
def test_stored_formats(tmp_path: Path, form: str) -> None:
    """Whose numbers stay as they are on a device."""
    for name, std in (("a", 0.2), ("b", 0.3)):
        write_family(tmp_path / f"plain-{name}", "llama", std=std, **WIDE)
        if form in FORMATS:
            write_format(tmp_path / name, tmp_path / f"plain-{name}", FORMATS[form], ignore=("lm_head",))
        else:
            write_packed(tmp_path / name, tmp_path / f"plain-{name}", PACKINGS[form])
    check(tmp_path / "a", tmp_path / "b", device=True)


def test_a_number_that_graphs_have_in_them_is_refused(tmp_path: Path) -> None:
    """The scale of rows is a static one of the format, and no tensor."""
    write_family(tmp_path / "plain", "llama", **WIDE)
    write_format(tmp_path / "a", tmp_path / "plain", FORMATS["fp8, static"], ignore=("lm_head",))
    stored = load_file(tmp_path / "a" / "model.safetensors")
    loaded, model = model_of(config(tmp_path / "a", device=True))
    scales = [name for name in stored if "input" in name or "activation" in name]
    assert scales
    for name in scales:
        stored[name] = stored[name] * 2
    save_file(stored, tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match=r"cannot take the old ones' place: layer 0\..*rounding.*scale"):
        WeightReplacement(loaded, model).rehearse(read_files([tmp_path / "b.safetensors"]))
