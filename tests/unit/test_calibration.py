"""`eyas quantize --calibration`: what is refused, and, where llmcompressor is installed, what it writes."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from eyas import cli
from eyas.common.config import NANO
from eyas.engine.checkpoint.packed import PackedConfig
from eyas.engine.models.table import read_model
from eyas.quantize import calibration
from eyas.quantize.calibration import MOST_ROWS, ROW_TOKENS, Calibration
from tests.unit.calibration_story import TEXT, Reader, story
from tests.unit.families import write_family
from tests.unit.tiny import write_tiny_llama

__all__ = ["story"]  # a fixture
INSTALLED = importlib.util.find_spec("llmcompressor") is not None


def asked(folder: Path, out: Path, text: Path, form: str = "gptq", group: int = 16) -> int:
    words = ("--format", form, "--group-size", str(group), "--calibration", str(text))
    return cli.main(["quantize", str(folder), "--out", str(out), *words])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT * 40)
    return path


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks before the search take it for installed."""
    found = importlib.util.find_spec
    spec = ModuleSpec("llmcompressor", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == spec.name else found(name))


@pytest.mark.skipif(INSTALLED, reason="the library is there")
def test_what_to_install_is_said(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(NANO, tmp_path / "out", text) == 2
    assert "--calibration: needs llmcompressor: pip install 'eyas[calibration]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", ["no file", "no text", "no words", "awq", "experts", "nothing"])
def test_what_cannot_be_searched_is_refused(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder, out, group = NANO, tmp_path / "out", 16
    why = {
        "no file": f"--calibration: {tmp_path / 'none'} cannot be read: ",
        "no text": f"--calibration: {text} holds no text",
        "no words": f"--calibration: {text} cannot be read: ",
        "awq": "--calibration: AWQ of llmcompressor copies rows to a GPU, and there is none here",
        "experts": f"--calibration: {tmp_path / 'model'} has experts: ",
        "nothing": f"{tmp_path / 'model'} has no matrix that groups of 256 can hold",
    }[kind]
    if kind == "no file":
        text = tmp_path / "none"
    elif kind == "no text":
        text.write_text("")
    elif kind == "no words":
        text.write_bytes(b"\xff\xfe")
    elif kind == "experts":
        write_family(folder := tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
        _with_tokenizer(folder)
    elif kind == "nothing":
        folder, group = write_tiny_llama(tmp_path / "model", layers=1), 256
        _with_tokenizer(folder)
    assert asked(folder, out, text, "awq" if kind == "awq" else "gptq", group) == 2
    assert why in capsys.readouterr().err and not out.exists()


def _with_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes((NANO / "tokenizer.json").read_bytes())


@pytest.mark.usefixtures("library")
def test_a_text_is_cut_into_rows(tmp_path: Path, text: Path) -> None:
    """Of a long one the first are read."""
    text.write_text("word " * (ROW_TOKENS + 10))
    rows = Calibration.by(text, NANO, "gptq", 16).rows
    assert [len(row) for row in rows[:-1]] == [ROW_TOKENS] * (len(rows) - 1) and len(rows[-1]) <= ROW_TOKENS
    text.write_text("word " * (ROW_TOKENS * (MOST_ROWS + 2)))
    assert len(Calibration.by(text, NANO, "gptq", 16).rows) == MOST_ROWS


@pytest.mark.skipif(not INSTALLED, reason="needs llmcompressor")
@pytest.mark.slow
@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_the_embedded_model_goes_on_as_it_did(
    tmp_path: Path,
    text: Path,
    story: tuple[list[int], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    """AWQ without a GPU: rows are not copied to one."""
    if form == "awq" and not torch.accelerator.is_available():
        monkeypatch.setattr(calibration, "_check", lambda _: None)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: rows)
    assert asked(NANO, out := tmp_path / "out", text, form) == 0
    config = read_model(out).quantized
    assert isinstance(config, PackedConfig) and (config.bits, config.group) == (4, 16)
    assert {path.name for path in NANO.iterdir()} <= {path.name for path in out.iterdir()}
    tokens, expected = story
    assert (Reader(out).likeliest(tokens) == expected).float().mean() >= 0.75
