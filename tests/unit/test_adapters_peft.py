"""Folders in PEFT's format: what they say is read as PEFT reads it, and what is not served is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_rig import write_adapter
from safetensors.torch import load_file, save_file
from tiny import write_tiny_llama

from eyas.common.errors import InvalidRequest, NotFound
from eyas.engine.adapters.patterns import ModulePatterns
from eyas.engine.adapters.peft import LowRankUpdate, PeftAdapter, read_adapter
from eyas.engine.models.table import read_model

FIRST = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama", layers=2)


def _read(folder: Path, model: Path, most: int = 16) -> PeftAdapter:
    return read_adapter(folder, read_model(model), most)


def _up(update: LowRankUpdate) -> torch.Tensor:
    """The upper factor with its scaling."""
    return update.stored.float() * update.scaling


def _say(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _store(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_scalings_and_patterns_are_those_of_peft(tmp_path: Path, model: Path) -> None:
    plain = write_adapter(tmp_path / "plain", model, rank=4, lora_alpha=6)
    (name,) = [n for n in _read(plain, model).updates if n == f"{FIRST}.weight"]
    update = _read(plain, model).updates[name]
    stored = load_file(plain / "adapter_model.safetensors")[f"base_model.model.{FIRST}.lora_B.weight"]
    assert torch.equal(_up(update), stored * 1.5)
    _say(plain, use_rslora=True)
    assert torch.equal(_up(_read(plain, model).updates[name]), stored * 3.0)
    _say(plain, use_rslora=False, alpha_pattern={"0.self_attn.q_proj": 8, "v_proj": 100})
    assert torch.equal(_up(_read(plain, model).updates[name]), stored * 2.0)
    _say(plain, alpha_pattern={"elf_attn.q_proj": 8})  # a pattern names whole parts of a name
    assert torch.equal(_up(_read(plain, model).updates[name]), stored * 1.5)
    _say(plain, rank_pattern={"^model.layers.0.self_attn.q_proj": 2})
    with pytest.raises(InvalidRequest, match=r"q_proj is \(4, 64\): no factor of rank 2"):
        _read(plain, model)

    def cut_rank(tensors: dict[str, torch.Tensor]) -> None:
        down, up = (f"base_model.model.{FIRST}.lora_{factor}.weight" for factor in "AB")
        tensors |= {down: tensors[down][:2].contiguous(), up: tensors[up][:, :2].contiguous()}

    _store(plain, cut_rank)
    assert torch.equal(_up(_read(plain, model).updates[name]), stored[:, :2] * 3.0)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (r"layers\.\d+\.(self_attn\.)?(q|k)_proj", True),
        (r"^model\.layers\.[0-3]\.", True),
        (r"^layers\.0", False),
        (r"(k|v)_proj|model.layers.0.*", True),
        (r"(q_proj|k).proj", False),
        ("(([a-z._0-9]+)+)+!", False),  # `re` takes hours
        ("^(([a-z._0-9]+)*)*!", False),
    ],
)
def test_a_pattern_names_what_it_does_for_peft(pattern: str, named: bool) -> None:
    assert ModulePatterns({pattern: 2, "q_proj": 3}).value(FIRST, 4) == (2 if named else 3)
    assert ModulePatterns({pattern: 2}).value("lm_head", 4) == 4


def test_an_id_is_the_contents(tmp_path: Path, model: Path) -> None:
    one = write_adapter(tmp_path / "one", model, seed=1)
    copy = shutil.copytree(one, tmp_path / "copy")
    _say(copy, inference_mode=True)  # means nothing here
    assert _read(one, model).id == _read(copy, model).id
    assert len(_read(one, model).id) == 16
    _say(copy, lora_alpha=17)
    others = [copy, write_adapter(tmp_path / "other", model, seed=2)]
    assert len({_read(folder, model).id for folder in [one, *others]}) == 3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"kasa_config": {"beta": 1e-4}}, "KaSA"),
        ({"monteclora_config": {"num_samples": 8}}, "MonteCLoRA"),
        ({"r": 0}, "r 0 must be 1 or more"),
        ({"r": 2.5}, "r 2.5"),
        ({"lora_alpha": "16"}, "lora_alpha '16'"),
        ({"use_rslora": 1}, "use_rslora 1"),
        ({"rank_pattern": [3]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj(": 3}}, r"rank_pattern 'q_proj\('"),
        ({"alpha_pattern": {"*": 3}}, r"alpha_pattern '\*'"),
        ({"rank_pattern": {"(?=q)q_proj": 3}}, r"rank_pattern '\(\?=q\)q_proj': a look-ahead"),
        ({"rank_pattern": {f"{i}+": 3 for i in range(65)}}, "rank_pattern has more than 64 patterns"),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, model: Path, fields: dict[str, Any], named: str) -> None:
    folder = write_adapter(tmp_path / "adapter", model)
    _say(folder, **fields)
    with pytest.raises(InvalidRequest, match=named) as refused:
        _read(folder, model)
    assert refused.value.param == "lora_path"


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"base_model.model.{FIRST}.lora_B.weight"][3, 2] = float("nan")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_nan, "lora_B of model.layers.0.self_attn.q_proj holds NaN"),
        (lambda t: t.pop(f"base_model.model.{FIRST}.lora_A.weight"), "has no lora_A"),
        (lambda t: t.clear(), "no factors"),
        (lambda t: t.update({f"base_model.model.{FIRST}.lora_magnitude_vector": torch.ones(4)}), "DoRA"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 4)}),
            "embed",
        ),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(4, 4)}), "lm_head.weight"),
        (lambda t: t.update({f"base_model.model.{FIRST}.lora_A.weight": torch.ones(8, 64).int()}), "I32"),
        (lambda t: t.update({f"base_model.model.{FIRST}.lora_A.weight": torch.ones(8)}), "no factor of rank"),
    ],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, model: Path, change: Callable[[dict[str, torch.Tensor]], object], named: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", model)
    _store(folder, change)
    with pytest.raises(InvalidRequest, match=named):
        _read(folder, model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_of_the_models_own_head_is_left_out(tmp_path: Path, tied: bool) -> None:
    """PEFT writes one beside the factors of an output head."""
    model = write_tiny_llama(tmp_path / "model", tied=tied)
    folder = write_adapter(tmp_path / "adapter", model, modules=("q_proj",))
    before, weights = _read(folder, model), load_file(model / "model.safetensors")
    own = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    name = "base_model.model.lm_head.base_layer.weight"
    _store(folder, lambda tensors: tensors.update({name: own.bfloat16()}))
    after = _read(folder, model)
    assert after.id == before.id and after.updates.keys() == before.updates.keys()
    own[5, 3] += 1.0
    _store(folder, lambda tensors: tensors.update({name: own}))
    with pytest.raises(InvalidRequest, match="lm_head.base_layer.weight is no copy of the model's own"):
        _read(folder, model)


def test_a_copy_between_factors_has_no_room_among_them(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", tied=False)
    folder = write_adapter(tmp_path / "adapter", model, modules=("lm_head", "q_proj"))
    before, own = _read(folder, model), load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    _store(
        folder, lambda tensors: tensors.update({"base_model.model.model.embed_tokens.weight": own.float()})
    )
    after = _read(folder, model)
    assert after.id == before.id and after.updates.keys() == before.updates.keys()


def test_no_number_is_read_of_a_file_that_fits_no_matrix(tmp_path: Path, model: Path) -> None:
    """It may hold more than there is memory."""
    folder = write_adapter(tmp_path / "adapter", model)
    wide = 1 << 26
    size = 4 * 8 * wide
    entry = {"dtype": "F32", "shape": [8, wide], "data_offsets": [0, size]}
    other = entry | {"shape": [wide, 8], "data_offsets": [size, 2 * size]}
    names = (f"base_model.model.{FIRST}.lora_{factor}.weight" for factor in "AB")
    header = json.dumps(dict(zip(names, (entry, other), strict=True))).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * size)

    def check(name: str, shape: tuple[int, int]) -> None:
        raise InvalidRequest(f"{name} is {shape}")

    with pytest.raises(InvalidRequest, match=rf"{FIRST}.weight is \({wide}, {wide}\)"):
        read_adapter(folder, read_model(model), 16, check)


@pytest.mark.parametrize("shape", [[2**40, 2**40, 0], [0, 2**70]])
def test_sizes_that_no_tensor_has_are_named(tmp_path: Path, model: Path, shape: list[int]) -> None:
    """One of 0 makes their product small, and the numbers' bytes none."""
    folder = write_adapter(tmp_path / "adapter", model)
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    names = [f"base_model.model.{FIRST}.lora_{factor}.weight" for factor in "AB"]
    header = json.dumps(dict.fromkeys(names, entry)).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidRequest, match=rf"tensor {names[0]} cannot be \[{shape[0]}, {shape[1]}"):
        _read(folder, model)


def test_a_file_that_is_written_again_changes_nothing_that_was_read(tmp_path: Path, model: Path) -> None:
    """A trainer writes its adapter in place: what is mapped of a file would change, or end the engine."""
    folder = write_adapter(tmp_path / "adapter", model)
    read, again = _read(folder, model), _read(folder, model)
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(100)
        file.truncate(1 << 20)  # zeros
    for name, update in read.updates.items():
        assert update.down.any() and _up(update).any()
        assert torch.equal(update.down, again.updates[name].down)
        assert torch.equal(_up(update), _up(again.updates[name]))


def test_two_names_of_one_matrix_are_refused(tmp_path: Path, model: Path) -> None:
    """Else the second one took the first one's place, and what was served was neither."""
    folder = write_adapter(tmp_path / "adapter", model)
    spelled = replace(read_model(model), renamed=(("decoder.", "model."),))
    assert read_adapter(folder, spelled, 16).id
    module = f"base_model.model.{FIRST}"

    def again(name: str, end: str = "") -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda tensors: tensors.update(
            {f"{name}.lora_{f}{end}.weight": tensors[f"{module}.lora_{f}.weight"].clone() for f in "AB"}
        )

    _store(folder, again(module.replace("model.layers", "decoder.layers")))
    with pytest.raises(InvalidRequest, match=rf"updates {FIRST}.weight, as another module"):
        read_adapter(folder, spelled, 16)
    _store(write_adapter(folder, model), again(module, ".default"))
    with pytest.raises(InvalidRequest, match=rf"{FIRST}.lora_A.* is there by another name, too"):
        _read(folder, model)


def test_a_rank_above_the_limit_and_a_folder_that_is_not_there(tmp_path: Path, model: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", model, rank=12)
    assert _read(folder, model, 12).rank == 12
    with pytest.raises(InvalidRequest, match="rank 12; 11 is the most"):
        _read(folder, model, 11)
    with pytest.raises(NotFound, match=r"adapter_config\.json"):
        _read(tmp_path / "nowhere", model)
    (folder / "adapter_config.json").write_bytes(b" " * (1 << 21))
    with pytest.raises(InvalidRequest, match="has 2097152 bytes; 1048576 are the most"):
        _read(folder, model)
    folder = write_adapter(tmp_path / "adapter", model)
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InvalidRequest, match="not a readable safetensors file"):
        _read(folder, model)
