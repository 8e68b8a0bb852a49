"""Checkpoints in four and eight bits are read as what they mean: to the bit, or refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.methods import read_quantized
from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.checkpoint.sizes import weight_bytes
from eyas.engine.checkpoint.weights import FolderWeights, WeightPlacement
from eyas.engine.models.heads import read_head
from eyas.engine.models.table import read_model
from tests.unit.families import write_family
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.packed_formats import (
    CHANNEL,
    PACKINGS,
    SHAPE,
    TOKEN,
    UP,
    auto_round,
    awq,
    compressed,
    gptq,
    logits,
    read,
    write_packed,
)
from tests.unit.tiny import edit, write_tiny_eagle3, write_tiny_llama


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "plain", layers=2, vocab=96, tied=False)


@pytest.mark.parametrize("name", PACKINGS)
def test_logits_are_those_of_what_the_numbers_mean(tmp_path: Path, plain: Path, name: str) -> None:
    write_packed(tmp_path / "packed", plain, PACKINGS[name])
    found = logits(tmp_path / "packed")
    assert torch.equal(found, logits(tmp_path / "meant"))
    assert not torch.equal(found, logits(plain))


def _plus_one(words: torch.Tensor) -> torch.Tensor:
    """One more in each lowest number of a word."""
    return words + 1


def _halves_turned(words: torch.Tensor) -> torch.Tensor:
    """The two numbers of each byte in the other order."""
    numbers = words.contiguous().view(torch.uint8)
    return ((numbers & 15) << 4 | numbers >> 4).view(torch.int32)


def _neighbours(scales: torch.Tensor) -> torch.Tensor:
    return scales.roll(1, 0)


def _turned(groups: torch.Tensor) -> torch.Tensor:
    """The groups of a row in the other order."""
    return groups.flip(0 if groups.shape[0] < groups.shape[1] else 1)


def _in_order(groups: torch.Tensor) -> torch.Tensor:
    return groups.sort().values


MISTAKES = {
    "order of numbers": (_halves_turned, ("qweight", "weight_packed")),
    "zero point": (_plus_one, ("qzeros", "weight_zero_point")),
    "groups": (_turned, ("scales", "weight_scale")),
    "scale of the neighbour": (_neighbours, ("scales", "weight_scale")),
    "groups of columns": (_in_order, ("g_idx", "weight_g_idx")),
}


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        (name, mistake)
        for name in ("gptq, by activations", "awq", "w4a16, by activations")
        for mistake in MISTAKES
        if (name, mistake) != ("awq", "groups of columns")
    ],
)
def test_a_mistake_in_reading_would_be_noticed(tmp_path: Path, plain: Path, name: str, mistake: str) -> None:
    """Power check: what such a mistake makes of the numbers is nothing like what they mean."""
    stored = write_packed(tmp_path / "packed", plain, PACKINGS[name])
    change, ends = MISTAKES[mistake]
    names = [f"{UP}.{end}" for end in ends if f"{UP}.{end}" in stored]
    meant = load_file(tmp_path / "meant" / "model.safetensors")[f"{UP}.weight"]
    assert torch.equal(read(tmp_path / "packed"), meant)
    edit(tmp_path / "packed", {name: change(stored[name]).contiguous() for name in names})
    assert not torch.allclose(read(tmp_path / "packed"), meant, atol=1e-3)


def test_a_zero_point_of_zero_borrows_of_its_neighbour(tmp_path: Path) -> None:
    """One is taken of a whole word of them: the way GPTQModel writes sym=False."""
    zeros = [0, 8, 15, 0, 0, 1, 7, 0]
    word = sum(zero << (4 * i) for i, zero in enumerate(zeros)) - 0x11111111
    tensors = {
        "m.qweight": torch.zeros(1, 8, dtype=torch.int32),
        "m.qzeros": torch.tensor([[(word + 2**31) % 2**32 - 2**31]], dtype=torch.int32),
        "m.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = read_quantized({"quantization_config": gptq(group_size=-1)})
    with FolderWeights(tmp_path, quantized=config) as weights:
        assert weights.take("m.weight", (8, 8))[:, 3].tolist() == [-float(zero) for zero in zeros]


@pytest.mark.parametrize("name", ["gptq, by activations", "awq", "w4a16, zero points", "w8a8"])
def test_a_rank_has_its_share(tmp_path: Path, plain: Path, name: str) -> None:
    write_packed(tmp_path / "packed", plain, PACKINGS[name])
    whole, config = read(tmp_path / "packed"), read_model(tmp_path / "packed")
    placement = WeightPlacement(rank=1, ranks=2)
    with FolderWeights(tmp_path / "packed", placement=placement, quantized=config.quantized) as weights:
        rows, columns = (take(f"{UP}.weight", SHAPE) for take in (weights.take_rows, weights.take_columns))
        assert not weights.left((f"{UP}.",)) and weights.left(("model.layers.0.mlp.gate_proj.",))
    assert torch.equal(rows, whole[64:]) and torch.equal(columns, whole[:, 32:])
    assert rows.untyped_storage().nbytes() == rows.nbytes  # and not all of it


@pytest.mark.parametrize("name", ["gptq, by activations", "awq", "w4a16", "w8a8, zero points"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])  # by 4 and by 8, columns cut through groups of 32
def test_a_rank_has_its_share_of_the_numbers(tmp_path: Path, plain: Path, name: str, ranks: int) -> None:
    write_packed(tmp_path / "packed", plain, PACKINGS[name])
    config = read_model(tmp_path / "packed")
    meant = load_file(tmp_path / "meant" / "model.safetensors")[f"{UP}.weight"]
    placement = WeightPlacement(rank=ranks - 1, ranks=ranks)
    with FolderWeights(tmp_path / "packed", placement=placement, quantized=config.quantized) as weights:
        assert weights.is_packed(f"{UP}.weight") and not weights.is_packed("lm_head.weight")
        taken = [weights.take_packed(f"{UP}.weight", SHAPE, dimension) for dimension in (None, 0, 1)]
        with pytest.raises(ConfigError, match="tensor lm_head.weight is not packed"):
            weights.take_packed("lm_head.weight", (96, 64), None)
    shares = (meant, meant.chunk(ranks)[-1], meant.chunk(ranks, 1)[-1])
    for part, share in zip(taken, shares, strict=True):
        assert torch.equal(part.widened(), share)
        assert part.numbers.shape == share.shape and part.numbers.is_contiguous()
        assert part.scales.shape[0] == share.shape[0] and part.scales.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_share_of_a_wide_matrix_cuts_through_groups(dtype: torch.dtype) -> None:
    """Columns have more numbers than the types of scales can count."""
    n, k, ranks = 2, 6912, 8
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(16, (n, k), dtype=torch.uint8, generator=generator)
    whole = PackedNumbers(numbers, 8, torch.rand(n, k // 128, generator=generator).to(dtype))
    shares = [whole.part(columns=slice(k // ranks * r, k // ranks * (r + 1))) for r in range(ranks)]
    assert torch.equal(torch.cat([share.widened() for share in shares], 1), whole.widened())


def test_a_fused_matrix_gives_the_numbers_of_its_parts(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", "phi3", std=0.08, num_hidden_layers=1, hidden_size=64)
    write_packed(tmp_path / "packed", tmp_path / "plain", PACKINGS["awq"])
    config = read_model(tmp_path / "packed")
    meant = load_file(tmp_path / "meant" / "model.safetensors")["model.layers.0.mlp.gate_up_proj.weight"]
    half = meant.shape[0] // 2
    placement = WeightPlacement(rank=1, ranks=2)
    with FolderWeights(
        tmp_path / "packed", config.spelling, placement, quantized=config.quantized, fused=config.fused
    ) as weights:
        taken = weights.take_packed(f"{UP}.weight", (half, 64), 0)
    assert torch.equal(taken.widened(), meant[half + half // 2 :])


LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize(
    ("family", "name", "sizes"),
    [
        ("phi3", "gptq", {}),
        ("phi3", "w4a16, zero points", {}),
        ("qwen2", "auto-round", {}),
        ("mixtral", "awq", {}),
        ("qwen3_moe", "w8a8", {}),
        ("deepseek_v3", "gptq, by activations", LATENT),
    ],
)
def test_families_read_them_as_they_read_others(
    tmp_path: Path, family: str, name: str, sizes: dict[str, int]
) -> None:
    """Fused tensors, biases, experts under other names, latents."""
    write_family(tmp_path / "plain", family, std=0.08, num_hidden_layers=2, hidden_size=64, **sizes)
    write_packed(tmp_path / "packed", tmp_path / "plain", PACKINGS[name])
    assert torch.equal(logits(tmp_path / "packed"), logits(tmp_path / "meant"))


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def at(index: int, value: int) -> torch.Tensor:
    groups = torch.arange(64, dtype=torch.int32) // 16
    groups[index] = value
    return groups


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        (
            "gptq",
            {"qweight": words(7, 128)},
            r"up_proj.weight of .* is \(128, 56\), its config says \(128, 64\)",
        ),
        ("gptq", {"qweight": words(8)}, r"up_proj.qweight of .* is \(8,\): no packed matrix"),
        ("gptq", {"qweight": words(8, 128).float()}, "up_proj.qweight of .* is stored as F32, not as I32"),
        ("gptq", {"qzeros": words(2, 15)}, r"up_proj.qzeros of .* is \(2, 15\), not \(2, 16\)"),
        ("gptq", {"qzeros": None}, "has no tensor .*up_proj.qzeros"),
        ("gptq", {"scales": torch.ones(4, 128)}, r"up_proj.scales of .* is \(4, 128\), not \(2, 128\)"),
        (
            "gptq",
            {"scales": words(2, 128)},
            "up_proj.scales of .* is stored as I32, not as F16 or BF16 or F32",
        ),
        ("gptq", {"scales": torch.full((2, 128), torch.nan)}, "up_proj.weight of .* holds NaN"),
        ("gptq", {"g_idx": words(63)}, r"up_proj.g_idx of .* is \(63,\), not \(64,\)"),
        ("gptq, by activations", {"g_idx": None}, "has no tensor .*up_proj.g_idx"),
        ("gptq, by activations", {"g_idx": at(5, 4)}, "up_proj.g_idx holds group 4: there are 4, from 0 on"),
        ("gptq, by activations", {"g_idx": at(0, -1)}, "up_proj.g_idx holds group -1: there are 4"),
        ("gptq", {"weight": torch.ones(SHAPE)}, "holds both .*up_proj.qweight and .*up_proj.weight"),
        ("awq", {"qzeros": words(4, 16)}, r"up_proj.qzeros of .* is \(4, 16\), not \(2, 16\)"),
        ("awq", {"scales": None}, "has no tensor .*up_proj.scales"),
        (
            "w4a16",
            {"weight_shape": torch.tensor([128, 63])},
            r"up_proj.weight_shape is \(128, 63\), and \(128, 64\)",
        ),
        (
            "w4a16",
            {"weight_scale": torch.ones(128, 1)},
            r"up_proj.weight_scale of .* is \(128, 1\), not \(128, 2\)",
        ),
        ("w4a16, zero points", {"weight_zero_point": None}, "has no tensor .*up_proj.weight_zero_point"),
        (
            "w4a16, by activations",
            {"weight_g_idx": at(0, 9)},
            "up_proj.weight_g_idx holds group 9: there are 2",
        ),
        ("w8a8", {"weight": torch.ones(SHAPE)}, "up_proj.weight of .* is stored as F32, not as I8"),
        ("w8a8", {"weight": None}, r"up_proj.weight_scale of .* is \(128, 1\): no packed matrix"),
    ],
)
def test_what_is_not_as_the_format_says_is_refused_by_name(
    tmp_path: Path, plain: Path, name: str, changes: dict[str, Any], why: str
) -> None:
    write_packed(tmp_path / "packed", plain, PACKINGS[name])
    edit(tmp_path / "packed", {f"{UP}.{end}": tensor for end, tensor in changes.items()})
    with pytest.raises(ConfigError, match=why):
        Rig(tmp_path / "packed")


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (gptq(bits=3), "gptq of 3 bits whose zero points are stored less one"),
        (gptq(bits=5), "gptq of 5 bits"),
        (gptq(bits="4"), "gptq of '4' bits"),
        (gptq(group_size=0), "gptq with group_size 0"),
        (gptq(checkpoint_format="marlin"), "gptq with checkpoint_format 'marlin'"),
        (gptq(is_marlin_format=True), "gptq with is_marlin_format True"),
        (gptq(dynamic={"+:.*down.*": {"bits": 6}}), "gptq of 6 bits"),
        (gptq(dynamic={"+:*": {"bits": 8}}), "dynamic 're:\\*', which is no pattern"),
        (gptq(dynamic={"-:*": {}}), "dynamic 're:\\*', which is no pattern"),
        (gptq(rotation="hadamard"), "gptq with rotation 'hadamard'"),
        (awq(version="gemv"), "awq of version 'gemv'"),
        (awq(bits=8), "awq of 8 bits"),
        (
            auto_round("auto_round:llm_compressor"),
            "auto-round with packing_format 'auto_round:llm_compressor'",
        ),
        (auto_round("auto_round", data_type="mx_fp"), "auto-round with data_type 'mx_fp'"),
        (auto_round("auto_round", extra_config={"m": {"bits": 7}}), "auto-round of 7 bits"),
        (auto_round("auto_round", extra_config={"m": {"data_type": "mx_fp"}}), "with data_type 'mx_fp'"),
        (compressed("marlin-24"), "format marlin-24"),
        (compressed(num_bits=2), "weights of group_0 of 2 bits"),
        (compressed(strategy="block"), "int4 weights of group_0 by 'block'"),
        (compressed(actorder="sideways"), "weights of group_0 with actorder 'sideways'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    tmp_path: Path, plain: Path, told: dict[str, Any], why: str
) -> None:
    edit(write_tiny_llama(tmp_path, layers=1), quantization_config=told)
    with pytest.raises(ConfigError, match=f"quantization_config: .*{why}.*is not supported"):
        read_model(tmp_path)


def test_groups_that_do_not_divide_a_row_are_refused(tmp_path: Path, plain: Path) -> None:
    write_packed(tmp_path / "packed", plain, PACKINGS["gptq"], **gptq(group_size=48))
    with pytest.raises(ConfigError, match="qweight of .* has rows of 64, which are no whole groups of 48"):
        Rig(tmp_path / "packed")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gptq", {"dynamic": {r"-:.*\.o_proj": {}}}),
        ("awq", {"modules_to_not_convert": ["o_proj"]}),
        ("w4a16", {"ignore": ["re:.*o_proj", "lm_head"]}),
        (
            "auto-round",
            {"extra_config": {"model.layers.0.self_attn.o_proj": {"bits": 16, "data_type": "float"}}},
        ),
    ],
)
def test_modules_that_are_left_out(tmp_path: Path, plain: Path, name: str, told: dict[str, Any]) -> None:
    """They are read as they were; one that is packed in spite of that is refused."""
    out = ("lm_head", "embed_tokens", "norm", "o_proj")
    write_packed(tmp_path / "packed", plain, PACKINGS[name], out, **told)
    assert torch.equal(logits(tmp_path / "packed"), logits(tmp_path / "meant"))
    write_packed(tmp_path / "all", plain, PACKINGS[name], **told)
    with pytest.raises(
        ConfigError, match="o_proj.(q|weight_).*, though quantization_config says that it is not"
    ):
        Rig(tmp_path / "all")


def groups_of(*each: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    """compressed-tensors with a group of modules for each."""
    whole = {}
    for number, (names, told) in enumerate(each):
        group = told["config_groups"]["group_0"]
        whole[f"group_{number}"] = group | {"targets": names, "format": told["format"]}
    return each[0][1] | {"config_groups": whole, "format": "mixed-precision"}


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("gptq", "gptq, 8 bits, by row"), gptq(dynamic={r"+:.*\.down_proj": {"bits": 8, "group_size": -1}})),
        (
            ("gptq", "gptq, by activations"),
            gptq(dynamic={r"-:lm_head": {}, r".*\.down_proj": {"group_size": 16, "desc_act": True}}),
        ),
        (
            ("auto-round", "gptq, 8 bits, by row"),
            auto_round(
                "auto_round:gptq",
                extra_config={
                    f"model.layers.{i}.mlp.down_proj": {"bits": 8, "group_size": -1} for i in range(2)
                },
            ),
        ),
        (
            ("w4a16", "w8a16"),
            groups_of((["Linear"], compressed()), (["re:.*down_proj"], compressed(**CHANNEL))),
        ),
        (
            ("w4a16", "w8a8"),
            groups_of(
                (["Linear"], compressed()),
                (["re:.*down_proj"], compressed("int-quantized", TOKEN, **CHANNEL)),
            ),
        ),
    ],
)
def test_modules_may_be_in_another_format(
    tmp_path: Path, plain: Path, names: tuple[str, str], told: dict[str, Any]
) -> None:
    """The projections down are; the config tells of them by their names."""
    stored: dict[str, list[dict[str, torch.Tensor]]] = {"packed": [], "meant": []}
    for number, name in enumerate(names):
        (tmp_path / str(number)).mkdir()
        write_packed(tmp_path / str(number) / "packed", plain, PACKINGS[name])
        for kind, each in stored.items():
            each.append(load_file(tmp_path / str(number) / kind / "model.safetensors"))
    for kind, (usual, other) in stored.items():
        usual = {name: tensor for name, tensor in usual.items() if "down_proj" not in name}
        both = usual | {name: tensor for name, tensor in other.items() if "down_proj" in name}
        shutil.copytree(tmp_path / "0" / kind, tmp_path / kind)
        save_file(both, tmp_path / kind / "model.safetensors")
    edit(tmp_path / "packed", quantization_config=told)
    assert torch.equal(logits(tmp_path / "packed"), logits(tmp_path / "meant"))


def test_an_output_head_may_be_packed(tmp_path: Path, plain: Path) -> None:
    write_packed(tmp_path / "packed", plain, PACKINGS["gptq"], ("embed_tokens", "norm"), lm_head=True)
    assert torch.equal(logits(tmp_path / "packed"), logits(tmp_path / "meant"))


def test_a_tied_head_beside_packed_weights(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "plain", layers=1, vocab=96)
    write_packed(tmp_path / "packed", tmp_path / "plain", PACKINGS["awq"])
    assert torch.equal(logits(tmp_path / "packed"), logits(tmp_path / "meant"))


def test_biases_of_zeros_that_packers_add_are_passed_over(tmp_path: Path, plain: Path) -> None:
    write_packed(tmp_path / "packed", plain, PACKINGS["gptq"])
    found = logits(tmp_path / "packed")
    edit(tmp_path / "packed", {f"{UP}.bias": torch.zeros(128, dtype=torch.float16)})
    assert torch.equal(logits(tmp_path / "packed"), found)
    edit(tmp_path / "packed", {f"{UP}.bias": torch.full((128,), 0.5)})
    with pytest.raises(ConfigError, match="up_proj.bias, which a Llama.* does not read"):
        Rig(tmp_path / "packed")


def test_parts_of_a_matrix_may_be_in_two_files(tmp_path: Path, plain: Path) -> None:
    stored = write_packed(tmp_path / "packed", plain, PACKINGS["gptq"])
    found = logits(tmp_path / "packed")
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith("scales")}
    save_file(stored, tmp_path / "packed" / "model.safetensors")
    save_file(scales, tmp_path / "packed" / "scales.safetensors")
    assert torch.equal(logits(tmp_path / "packed"), found)


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16", "w8a8"])
def test_memory_is_that_of_what_they_mean(tmp_path: Path, plain: Path, name: str) -> None:
    write_packed(tmp_path / "packed", plain, PACKINGS[name])
    found, meant = (
        weight_bytes(read_model(tmp_path / each), "bfloat16", "cpu") for each in ("packed", "meant")
    )
    assert found == meant and found.as_stored == 0
    on_gpu = weight_bytes(read_model(tmp_path / "packed"), "bfloat16", "cuda")
    assert on_gpu.total < (0.6 if name != "w8a8" else 0.65) * found.total
    exact = weight_bytes(read_model(tmp_path / "packed"), "bfloat16", "cuda", exact=True)
    assert exact == (on_gpu if name != "w8a8" else found)  # exact products are of four bits


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16", "w8a8"])
def test_draft_heads_may_be_packed(tmp_path: Path, name: str) -> None:
    """What a head is, is told by the matrices that it means."""
    write_tiny_llama(tmp_path / "target", vocab=96)
    write_tiny_eagle3(tmp_path / "plain", tmp_path / "target")
    write_packed(tmp_path / "packed", tmp_path / "plain", PACKINGS[name], ("lm_head", "norm"))
    target = read_model(tmp_path / "target")
    heads = [read_head(tmp_path / each, target) for each in ("packed", "meant")]
    assert heads[0].decoder.layers == heads[1].decoder.layers and heads[0].algorithm == "eagle3"
    rows = []
    for each in ("packed", "meant"):
        rig = Rig(tmp_path / "target")
        draft, span = HeadRig(tmp_path / each, rig), QuerySpan(rig.table(5), 0, 5)
        features = torch.linspace(-1.0, 1.0, 5 * 64).view(5, 64)
        rows.append(draft.forward(features, [span], [3, 1, 4, 1, 5]))
    assert torch.equal(*rows)
