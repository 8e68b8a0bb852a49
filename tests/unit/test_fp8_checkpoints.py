"""FP8 checkpoints as their users have them, on the plain decoder, against a rendering from the formats."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.checkpoint.methods import read_quantized
from eyas.engine.checkpoint.quantized import Fp8Config
from eyas.engine.checkpoint.weights import FolderWeights, WeightPlacement
from eyas.engine.layers.linear import Linear, LinearLoader
from eyas.engine.models.feed_forward import GatedLoaders
from eyas.engine.models.table import read_model
from tests.unit.crossed import crossed
from tests.unit.families import write_family
from tests.unit.fp8_formats import (
    FORMATS,
    KEPT,
    Format,
    dequantised,
    quantised,
    render,
    rounded,
    write_format,
)
from tests.unit.model_rig import Rig

SMALL = {"num_hidden_layers": 2, "vocab_size": 128, "hidden_size": 160, "intermediate_size": 288}
FAMILIES = ("llama", "qwen3", "mistral")
TIPPED = 0.01
"""Of logits, over their deviation: a number that two ways of adding up put on two sides of a rounding."""
ERROR = 0.2
"""Of rows rounded to 4 bits, layer after layer."""


def prompt(length: int = 24) -> list[int]:
    return torch.randint(128, (length,), generator=torch.Generator().manual_seed(5)).tolist()


def logits(folder: Path) -> torch.Tensor:
    rig, tokens = Rig(folder, pages=16), prompt()
    found: torch.Tensor = rig.logits([QuerySpan(rig.table(len(tokens)), 0, len(tokens))], tokens)
    return found


def differ(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The median row's, over the deviation of all."""
    return float(((found - expected).square().mean(1).sqrt() / expected.std()).median())


@pytest.fixture(scope="module", params=crossed(FAMILIES, quick=lambda name: name == FAMILIES[0]))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder and transformers' model; Llama's output head is its embedding."""
    folder = tmp_path_factory.mktemp(request.param)
    tied = {"tie_word_embeddings": request.param == "llama"}
    return folder, write_family(folder, request.param, std=0.08, **SMALL, **tied)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_rendering(tmp_path: Path, family: tuple[Path, Any], name: str) -> None:
    """And those of the dequantised weights within the rounding of rows: to the bit where there is none."""
    (plain, model), form = family, FORMATS[name]
    meant = write_format(tmp_path / "fp8", plain, form, ignore=("lm_head",))
    (tmp_path / "meant").mkdir()
    (tmp_path / "meant" / "config.json").write_text((plain / "config.json").read_text())
    save_file(meant, tmp_path / "meant" / "model.safetensors")
    found, wide = logits(tmp_path / "fp8"), logits(tmp_path / "meant")
    if not form.rows:
        assert torch.equal(found, wide)
    else:
        assert 0.005 < differ(found, wide) < ERROR
    with torch.no_grad():
        expected = render(copy.deepcopy(model), tmp_path / "fp8", form)(torch.tensor([prompt()])).logits[0]
    assert differ(found, expected) < (TIPPED if form.rows else 1e-5)
    assert 0.005 < differ(found, logits(plain)) < ERROR


@pytest.mark.parametrize(
    ("ignore", "there"),
    [
        (("re:.*o_proj$", "lm_head"), "self_attn.o_proj"),
        (("model.layers.1.mlp.down_proj",), "layers.1.mlp.down_proj"),
        (("model.layers.0.self_attn",), "layers.0.self_attn"),
        (("k_proj",), "k_proj"),
    ],
)
def test_modules_that_are_ignored_are_as_they_were(
    tmp_path: Path, family: tuple[Path, Any], ignore: tuple[str, ...], there: str
) -> None:
    """By pattern, by name, by what they are in, by their last part: in one product with others, too."""
    (plain, model), form = family, FORMATS["channel and token"]
    write_format(tmp_path / "fp8", plain, form, ignore, kept=("lm_head", "embed_tokens", "norm", there))
    with torch.no_grad():
        expected = render(copy.deepcopy(model), tmp_path / "fp8", form)(torch.tensor([prompt()])).logits[0]
    assert differ(logits(tmp_path / "fp8"), expected) < TIPPED
    write_format(tmp_path / "all", plain, form, ignore, kept=("lm_head", "embed_tokens", "norm"))
    with pytest.raises(ConfigError, match=f"tensor .*{there}.* is stored as F8_E4M3, though"):
        logits(tmp_path / "all")


def test_a_model_that_also_reads_images_says_it_of_both_parts(tmp_path: Path) -> None:
    """Beside `text_config`, not in it; what stays is named as it is stored."""
    write_family(tmp_path / "plain", "gemma3_with_eyes", std=0.08)
    kept, ignore = (*KEPT, "vision_tower", "projector"), ("re:.*vision_tower.*", "lm_head")
    meant = write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS["channel"], ignore, kept)
    (tmp_path / "meant").mkdir()
    text = (tmp_path / "plain" / "config.json").read_text()
    (tmp_path / "meant" / "config.json").write_text(text)
    save_file(meant, tmp_path / "meant" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "fp8"), logits(tmp_path / "meant"))
    other = json.loads(text) | {"quantization_config": {"quant_method": "quip"}}
    (tmp_path / "meant" / "config.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="quant_method 'quip' is not supported"):
        read_model(tmp_path / "meant")


ROWS = {"block": "group", "token": "token", "tensor": "tensor"}


@pytest.mark.parametrize("rows", ROWS)
def test_rows_are_rounded_by_the_rule(rows: Any) -> None:
    """To the bit; zeros, tiny numbers, ties and numbers beyond a stored scale too."""
    x = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    x *= torch.tensor([1.0, 0.0, 1e-6, 1e3, 1e30, 0.1])[:, None]
    x[5] = torch.linspace(-448.0, 448.0, 300)  # its scale is one: ties are
    rounding = RowRounding(rows, scale=0.02)
    found = rounding.rounded(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, rounded(x, ROWS[rows], torch.tensor(0.02).item()).float())
    assert torch.equal(rounding.rounded(found), found) or rows == "token"
    assert not found[1].any() and not torch.equal(found, x)


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_of_nan_spoils_no_other(rows: Any) -> None:
    weight, rounding = torch.randn(48, 256), RowRounding(rows, scale=0.05)
    x = torch.randn(5, 256)
    product = Linear(weight, rounding=rounding)
    alone = product(x)
    x[2, 7], x[3, 9] = float("nan"), float("inf")
    found = product(x)
    assert found[2].isnan().all() and torch.equal(found[[0, 1, 4]], alone[[0, 1, 4]])
    assert not torch.equal(found[3], alone[3])


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_does_not_depend_on_its_company(rows: Any) -> None:
    product = Linear(torch.randn(64, 256), rounding=RowRounding(rows, scale=0.05))
    x = torch.randn(70, 256) * torch.logspace(-2, 2, 70)[:, None]
    assert torch.equal(product(x)[41], product(x[41:42])[0])


def test_powers_of_two_are_the_next_ones() -> None:
    """A scale that is one stays what it is."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2))
    x[0, 0], x[1] = 448.0 * 2.0, 448.0 * 2.0**-9
    exact, powers = RowRounding("token"), RowRounding("token", powers=True)
    assert torch.equal(exact.rounded(x)[1], powers.rounded(x)[1])
    stored = powers.rounded(x)[2:]
    for row, given in zip(stored, x[2:], strict=True):
        scale = 2.0 ** torch.ceil(torch.log2(given.abs().max() / 448.0))
        assert torch.equal(row, (given / scale).to(torch.float8_e4m3fn).float() * scale)
    assert not torch.equal(stored, exact.rounded(x)[2:])


@pytest.mark.parametrize("name", ["channel and token", "fp8, static"])
def test_ranks_cut_scales_with_their_rows(tmp_path: Path, family: tuple[Path, Any], name: str) -> None:
    """And share them where they cut columns; rows are rounded by the one stored scale on each."""
    plain, form = family[0], FORMATS[name]
    write_format(tmp_path / "fp8", plain, form)
    config, stored = read_model(tmp_path / "fp8"), load_file(tmp_path / "fp8" / "model.safetensors")
    module, shape = "model.layers.0.mlp.up_proj.", (288, 160)
    whole = stored[f"{module}weight"]
    scales = stored[f"{module}weight_scale"].float().reshape(-1).expand(288).reshape(-1)
    roundings = set()
    for rank in range(2):
        placement = WeightPlacement(rank=rank, ranks=2)
        with FolderWeights(tmp_path / "fp8", placement=placement, quantized=config.quantized) as weights:
            mine, held = weights.take_stored(f"{module}weight", shape, 0)
            assert torch.equal(mine.float(), whole[144 * rank : 144 * rank + 144].float())
            assert torch.equal(held, scales[144 * rank : 144 * rank + 144])
            mine, held = weights.take_stored(f"{module}weight", shape, 1)
            assert torch.equal(mine.float(), whole[:, 80 * rank : 80 * rank + 80].float())
            assert torch.equal(held, scales)
            wide = dequantised(whole, stored[f"{module}weight_scale"])
            assert torch.equal(weights.take_columns(f"{module}weight", shape), wide[:, 80 * rank :][:, :80])
            roundings.add(weights.rounding([f"{module}weight", f"{module}weight".replace("up", "gate")]))
    assert len(roundings) == 1


def test_parts_of_a_product_share_the_largest_scale_of_rows(tmp_path: Path, family: tuple[Path, Any]) -> None:
    write_format(tmp_path / "fp8", family[0], FORMATS["fp8, static"])
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    each = [float(stored[name.replace("weight", "input_scale")]) for name in names]
    assert len(set(each)) == 3
    with FolderWeights(tmp_path / "fp8", quantized=read_model(tmp_path / "fp8").quantized) as weights:
        assert weights.rounding(names) == RowRounding("tensor", scale=max(each))
        assert weights.rounding(names[:1]) == RowRounding("tensor", scale=each[0])


def test_experts_read_the_same_rows(tmp_path: Path) -> None:
    """The largest scale of all; rows as they are if one expert is not in FP8."""
    write_family(tmp_path / "plain", "mixtral", num_hidden_layers=1)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS["fp8, static"])
    config, stored = read_model(tmp_path / "fp8"), load_file(tmp_path / "fp8" / "model.safetensors")
    scales = {
        part: [float(t) for n, t in stored.items() if n.endswith(f"{part}.input_scale")]
        for part in "w1 w2 w3".split()
    }
    prefixes = [f"model.layers.0.mlp.experts.{i}" for i in range(4)]
    with FolderWeights(tmp_path / "fp8", config.spelling, quantized=config.quantized) as weights:
        loaders = GatedLoaders.of(partial(LinearLoader.of, weights), prefixes)
    assert loaders.gate_up.rounding == RowRounding("tensor", scale=max(scales["w1"] + scales["w3"]))
    assert loaders.down.rounding == RowRounding("tensor", scale=max(scales["w2"]))
    logits(tmp_path / "fp8")
    name = next(n for n in stored if "experts.2.w2.weight" in n and "scale" not in n)
    stored[name] = load_file(tmp_path / "plain" / "model.safetensors")[name]
    save_file(stored, tmp_path / "fp8" / "model.safetensors")
    with FolderWeights(tmp_path / "fp8", config.spelling, quantized=config.quantized) as weights:
        loaders = GatedLoaders.of(partial(LinearLoader.of, weights), prefixes)
    assert loaders.gate_up.rounding is not None and loaders.down.rounding is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"weight_scale": None}, "has no tensor .*q_proj.weight_scale"),
        (
            {"weight_scale": torch.ones(7, 1)},
            r"q_proj.weight_scale of .* is \(7, 1\), its config says \(64, 1\)",
        ),
        ({"input_scale": None}, "has no tensor .*q_proj.input_scale"),
        ({"input_scale": torch.ones(2)}, r"q_proj.input_scale of .* is \(2,\), its config says \(\)"),
    ],
)
def test_scales_that_are_missing_or_misfit_are_named(
    tmp_path: Path, family: tuple[Path, Any], change: dict[str, Any], why: str
) -> None:
    form = FORMATS["channel and token" if "weight_scale" in change else "fp8, static"]
    write_format(tmp_path / "fp8", family[0], form)
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    for name, tensor in change.items():
        key = f"model.layers.0.self_attn.q_proj.{name}"
        del tensors[key]
        if tensor is not None:
            tensors[key] = tensor
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(ConfigError, match=why):
        Rig(tmp_path / "fp8")


def test_fp8_that_no_config_tells_of_is_refused(tmp_path: Path, family: tuple[Path, Any]) -> None:
    write_format(tmp_path / "fp8", family[0], FORMATS["fp8, dynamic"])
    raw = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        ConfigError, match="q_proj.weight is stored in FP8, of which quantization_config says"
    ):
        Rig(tmp_path / "fp8")


E4M3 = torch.ones(8, 32).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"m.weight": E4M3.float().to(torch.float8_e5m2)}, "m.weight is stored as F8_E5M2"),
        ({"m.weight": E4M3.to(torch.int8)}, "m.weight is stored as I8"),
        ({"m.weight_scale": torch.tensor(120, dtype=torch.uint8)}, "m.weight_scale is stored as U8"),
        ({"m.input_scale": torch.tensor(0.0)}, "m.input_scale of .* is 0: no scale"),
        ({"m.input_scale": torch.tensor(float("nan"))}, "m.input_scale of .* is nan: no scale"),
    ],
)
def test_numbers_that_mean_something_else_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor], why: str
) -> None:
    scales = {"m.weight_scale": torch.tensor(0.5), "m.input_scale": torch.tensor(0.25)}
    save_file({"m.weight": E4M3} | scales | changes, tmp_path / "model.safetensors")
    with (
        FolderWeights(tmp_path, quantized=Fp8Config("tensor", rows="tensor")) as weights,
        pytest.raises(ConfigError, match=why),
    ):
        Linear.load(weights, "m.weight", (8, 32))


def compressed(**changes: Any) -> Any:
    """With changes to the whole, to the group's weights or to its rows."""
    told = copy.deepcopy(FORMATS["channel and token"].told)
    group = told["config_groups"]["group_0"]
    for part in ("weights", "input_activations"):
        group[part] |= changes.pop(part, {})
    group |= changes.pop("group", {})
    told.update(changes)
    return told


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"quant_method": "quanto", "weights": "int8"}, "quant_method 'quanto'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt with quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme 'none'"),
        (compressed(weights={"type": "int"}), "format float-quantized"),
        (compressed(weights={"num_bits": 4}), "float4 weights of group_0"),
        (compressed(weights={"symmetric": False}), "weights of group_0, asymmetric"),
        (compressed(weights={"strategy": "group"}), "weights of group_0 by group"),
        (compressed(weights={"strategy": "block", "block_structure": [64, 64]}), r"by block of \[64, 64\]"),
        (compressed(input_activations={"type": "int"}), "int8 input_activations of group_0"),
        (compressed(input_activations={"dynamic": False}), "static input_activations of group_0 by token"),
        (compressed(group={"output_activations": {"num_bits": 8}}), "output_activations of group_0"),
        (
            compressed(group={"format": "nvfp4-pack-quantized"}),
            "nvfp4-pack-quantized with weights of group_0",
        ),
        (compressed(format="pack-quantized"), "format pack-quantized"),
        (compressed(format="int-quantized"), "format int-quantized"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}), "2:4"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (compressed(config_groups={}), "0 kinds of config_groups"),
        (compressed(config_groups={"FP8_DYNAMIC": ["Linear"]}), "FP8_DYNAMIC of config_groups"),
        (compressed(ignore=["re:*mlp.gate"]), r"ignore 're:\*mlp.gate', which is no pattern"),
        (compressed(ignore="lm_head"), "ignore 'lm_head', which is no list"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
    ],
)
def test_every_other_kind_is_refused_by_name(tmp_path: Path, told: dict[str, Any], why: str) -> None:
    """At the start, before any weight is read; and the sentence says what there is."""
    write_family(tmp_path, "llama", num_hidden_layers=1)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": told}))
    with pytest.raises(ConfigError, match=f"quantization_config: .*{why}.*is not supported .*FP8"):
        read_model(tmp_path)


def test_two_groups_of_one_kind_are_one(tmp_path: Path) -> None:
    told = compressed()
    groups = told["config_groups"]
    both = {"a": groups["group_0"] | {"targets": ["re:.*self_attn.*"]}, "b": groups["group_0"]}
    assert read_quantized({"quantization_config": told | {"config_groups": both}}) == Fp8Config(
        "channel", rows="token"
    )
    both["b"] = groups["group_0"] | {"input_activations": None}
    with pytest.raises(ConfigError, match="2 kinds of config_groups"):
        read_quantized({"quantization_config": told | {"config_groups": both}})


def test_scales_of_an_fp8_cache_are_passed_over(tmp_path: Path, family: tuple[Path, Any]) -> None:
    """The cache has the model's type: no logit changes."""
    form = FORMATS["channel and token"]
    write_format(tmp_path / "plain", family[0], form)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    write_format(tmp_path / "cache", family[0], form, kv_cache_scheme=scheme)
    tensors = load_file(tmp_path / "cache" / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{k}_scale": torch.tensor([0.02]) for k in "kv"}
    tensors |= {f"model.layers.1.self_attn.{k}_proj.{k}_scale": torch.tensor(0.02) for k in "kv"}
    save_file(tensors, tmp_path / "cache" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "cache"), logits(tmp_path / "plain"))


def test_a_scale_in_another_place_is_noticed(tmp_path: Path, family: tuple[Path, Any]) -> None:
    """Power check of the rendering: one output channel of one weight."""
    form = replace(FORMATS["channel and token"], held=torch.float32)
    write_format(tmp_path / "fp8", family[0], form)
    found = logits(tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight_scale"][7] *= 4.0
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    assert differ(logits(tmp_path / "fp8"), found) > TIPPED


def test_the_formats_themselves() -> None:
    """What is meant is near to what was quantised, but for rows that a tensor's scale makes zeros of."""
    weight = (
        torch.randn(200, 150, generator=torch.Generator().manual_seed(3))
        * torch.logspace(-6, 0, 200)[:, None]
    )
    errors = {}
    for strategy in ("tensor", "block", "channel"):
        stored, scale = quantised(weight, strategy, torch.float32)
        relative = (dequantised(stored, scale) - weight).norm(dim=1) / weight.norm(dim=1)
        errors[strategy] = float(relative.max())
    assert max(errors["channel"], errors["block"]) < 0.04 and errors["tensor"] == 1.0
    assert all(isinstance(form, Format) for form in FORMATS.values())
