"""`eyas quantize`: what it writes is read by Eyas, is near to the model, and leaves out what it says."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import cli
from eyas.common.config import NANO
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.models.table import read_model
from eyas.quantize.flags import FORMATS, GROUPED
from eyas.quantize.formats import whole_numbers
from eyas.quantize.tensor_file import TensorFile
from tests.unit.calibration_story import Reader, story
from tests.unit.families import write_family
from tests.unit.model_rig import Rig
from tests.unit.tiny import edit, write_tiny_llama

__all__ = ["story"]  # a fixture

AGREE = {"gptq": 0.75, "awq": 0.75, "int4": 0.75, "int8": 0.95, "fp8": 0.9, "mxfp4": 0.65}
"""Of the likeliest tokens, the part that must be the same."""

ERROR = {"gptq": 1 / 14.9, "awq": 1 / 14.9, "int4": 1 / 14.9, "int8": 1 / 255, "fp8": 1 / 28, "mxfp4": 1 / 5}
"""Of a number, at most, of the largest that shares its scale; half a step, and a little of the scale's."""


def quantized(folder: Path, out: Path, form: str, *more: str) -> Path:
    assert cli.main(["quantize", str(folder), "--out", str(out), "--format", form, *more]) == 0
    return out


def grouped(form: str, size: int) -> tuple[str, ...]:
    """The flags of a group's size, where a format has any."""
    return ("--group-size", str(size)) if form in GROUPED else ()


@pytest.mark.parametrize(
    "form",
    [each if each in ("awq", "fp8") else pytest.param(each, marks=pytest.mark.slow) for each in FORMATS],
)
def test_the_embedded_model_goes_on_as_it_did(
    tmp_path: Path, story: tuple[list[int], torch.Tensor], form: str
) -> None:
    tokens, expected = story
    out = quantized(NANO, tmp_path / "out", form, *grouped(form, 16))
    assert (Reader(out).likeliest(tokens) == expected).float().mean() >= AGREE[form]
    beside = {path.name for path in NANO.iterdir()}
    assert {path.name for path in out.iterdir()} == beside
    for name in beside - {"config.json", "model.safetensors"}:
        assert (out / name).read_bytes() == (NANO / name).read_bytes()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rows of 64, and of 72 in the projections down."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    write_family(folder, "qwen3_moe", hidden_size=64, num_hidden_layers=2, moe_intermediate_size=72, std=0.1)
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_are_the_nearest(tmp_path: Path, plain: Path, form: str) -> None:
    """Each weight is within half a step of what is read; what is left out is as it was."""
    out = quantized(plain, tmp_path / "out", form, *grouped(form, 32))
    config, weights = read_model(out), load_file(plain / "model.safetensors")
    stored = load_file(out / "model.safetensors")
    size = {"int8": 0, "fp8": 0}.get(form, 32)
    packed = 0
    with FolderWeights(out, quantized=config.quantized) as read:
        for name, weight in weights.items():
            if name in stored and stored[name].dtype == weight.dtype:
                assert torch.equal(stored[name], weight)
                continue
            packed += 1
            assert weight.dim() == 2 and not any(part in name for part in ("embed", "lm_head", "mlp.gate."))
            groups = weight.unflatten(1, (-1, size or weight.shape[1]))
            error = read.take(name, tuple(weight.shape)).view(groups.shape) - groups
            assert (error.abs().amax(-1) <= ERROR[form] * groups.abs().amax(-1) + 1e-6).all()
    held = [
        name
        for name, weight in weights.items()
        if name.endswith("_proj.weight") and not (size and weight.shape[1] % size)
    ]
    assert packed == len(held)
    assert config.quantized is not None and config.quantized.keeps("model.layers.0.mlp.gate.weight")
    assert config.quantized.keeps("model.layers.0.mlp.experts.2.down_proj") is bool(size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
def test_small_weights_have_small_scales(dtype: torch.dtype, bits: int) -> None:
    """And a group of zeros has one too."""
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).mul_(1e-6).to(dtype)
    weight[0] = 0.0
    numbers, scales = whole_numbers(weight, 32, bits, dtype)
    groups = weight.float().view(4, 2, 32)
    read = (numbers.view(groups.shape).float() - 2 ** (bits - 1)) * scales.float()[..., None]
    bound = {4: 1 / 12, 8: 1 / 100}[bits]
    assert ((read - groups).abs().amax(-1) <= bound * groups.abs().amax(-1)).all()


def test_a_tensor_of_any_type_stays_as_it_is(tmp_path: Path) -> None:
    kinds = [torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64]
    kinds += [torch.bool, torch.int16, torch.float64, torch.complex64]
    tensors = {f"table.{number}": torch.ones(2, 3).to(kind) for number, kind in enumerate(kinds)}
    names = list(tensors)
    with TensorFile(tmp_path / "x.safetensors", names) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor)
    read = load_file(tmp_path / "x.safetensors")
    assert [read[name].dtype for name in names] == kinds
    assert all(torch.equal(read[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in names)


def test_a_wrong_order_would_be_noticed(tmp_path: Path, plain: Path) -> None:
    """Power check of the bounds: a scale of the neighbour."""
    out = quantized(plain, tmp_path / "out", "int4", "--group-size", "32")
    name = "model.layers.0.self_attn.q_proj"
    weight = load_file(plain / "model.safetensors")[f"{name}.weight"]
    scale = load_file(out / "model.safetensors")[f"{name}.weight_scale"]
    edit(out, {f"{name}.weight_scale": scale.roll(1, 0)})
    with FolderWeights(out, quantized=read_model(out).quantized) as read:
        error = (
            (read.take(f"{name}.weight", tuple(weight.shape)) - weight).unflatten(1, (-1, 32)).abs().amax(-1)
        )
    assert (error > ERROR["int4"] * weight.unflatten(1, (-1, 32)).abs().amax(-1)).any()


def test_several_files_have_an_index(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "plain", layers=2)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for number in (1, 2):
        some = {name: weights[name] for name in names[number % 2 :: 2]}
        save_file(some, folder / f"model-{number}.safetensors")
    (folder / "tokenizer.model").write_bytes(b"x")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ x }}")
    out = quantized(folder, tmp_path / "out", "gptq", "--group-size", "64")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert set(index["weight_map"].values()) == files
    there = {name: file for file in files for name in load_file(out / file)}
    assert index["weight_map"] == there and (out / "tokenizer.model").read_bytes() == b"x"
    assert (out / "additional_chat_templates" / "rag.jinja").is_file()
    Rig(out)


@pytest.mark.parametrize("kind", ["quantized", "full", "nan", "nothing", "no folder"])
def test_what_cannot_be_quantized_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder, out = write_tiny_llama(tmp_path / "plain", layers=1), tmp_path / "out"
    name = "model.layers.0.mlp.up_proj.weight"
    why = {
        "quantized": "is quantized already: its config.json has a quantization_config",
        "full": f"--out: {out} is there already, and is no empty folder",
        "nan": f"tensor {name} of {folder} holds NaN or infinity",
        "nothing": f"{folder} has no matrix that gptq can hold",
        "no folder": "does not exist",
    }[kind]
    group = "64"
    if kind == "quantized":
        edit(folder, quantization_config={"quant_method": "fp8"})
    elif kind == "full":
        out.mkdir()
        (out / "mine").touch()
    elif kind == "nan":
        edit(folder, {name: torch.full((128, 64), torch.nan)})
    elif kind == "nothing":
        group = "256"
    else:
        folder = tmp_path / "none"
    command = ["quantize", str(folder), "--out", str(out), "--format", "gptq", "--group-size", group]
    assert cli.main(command) == 2 and why in capsys.readouterr().err
    assert not out.exists() or [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("form", "flag", "value", "formats"),
    [
        ("int8", "--group-size", "128", "gptq and awq and int4"),
        ("fp8", "--group-size", "64", "gptq and awq and int4"),
        ("mxfp4", "--group-size", "32", "gptq and awq and int4"),
        ("int4", "--calibration", "text", "gptq and awq"),
        ("fp8", "--calibration", "text", "gptq and awq"),
    ],
)
def test_a_flag_that_means_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, flag: str, value: str, formats: str
) -> None:
    """Before anything is read."""
    command = ["quantize", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--format", form]
    assert cli.main([*command, flag, value]) == 2
    assert f"{flag}: is of {formats}, not of {form}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "embeddings"), [("gpt2", ("wte", "wpe")), ("falcon", ("word_embeddings",))]
)
def test_embeddings_of_any_name_stay_as_they_are(
    tmp_path: Path, family: str, embeddings: tuple[str, ...]
) -> None:
    write_family(tmp_path / "plain", family)
    stored = load_file(quantized(tmp_path / "plain", tmp_path / "out", "int8") / "model.safetensors")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    names = [name for name in plain if name.split(".")[-2] in embeddings]
    assert len(names) == len(embeddings)
    assert all(name in stored and torch.equal(stored[name], plain[name]) for name in names)


def test_experts_in_one_tensor_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They stay as they are, which the size of what is written would tell late."""
    write_family(tmp_path / "plain", "mistral4", num_hidden_layers=2)
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    stacked = sum(weight.dim() == 3 for weight in weights.values())
    quantized(tmp_path / "plain", tmp_path / "out", "fp8")
    assert stacked and f", {stacked} tensors of several matrices as they were; " in capsys.readouterr().out


@pytest.mark.parametrize("out", ["/proc/none", "config.json/out", "x" * 300])
def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    folder = write_tiny_llama(tmp_path / "plain", layers=1)
    assert cli.main(["quantize", str(folder), "--out", str(folder / out), "--format", "fp8"]) == 2
    assert f"--out: {folder / out} cannot be made: " in capsys.readouterr().err


@pytest.mark.parametrize("large", ["weights", "vocabulary"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], large: str) -> None:
    """Neither one that takes no weights, nor one that takes all but what lies beside them."""
    folder, out = write_tiny_llama(tmp_path / "plain", layers=1), tmp_path / "out"
    (folder / "vocab.txt").write_bytes(b"x" * 2_000_000)
    with _files_of_at_most(20_000 if large == "weights" else 1_000_000):
        code = cli.main(["quantize", str(folder), "--out", str(out), "--format", "fp8"])
    assert code == 1 and f"--out: {out} could not be written: " in capsys.readouterr().err
    assert not out.exists()


@contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
