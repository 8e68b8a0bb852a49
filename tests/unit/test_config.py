"""Configuration: frozen, no unknown key, and folders judged before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from eyas.common.config import EngineConfig, ServeConfig, replace_engine
from eyas.common.errors import ConfigError
from eyas.worker.folder import check_draft, check_model


def test_a_config_is_frozen_and_refuses_unknown_keys() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().device = "cuda"  # type: ignore[misc]
    with pytest.raises(TypeError, match="num_page"):
        EngineConfig(num_page=1)  # type: ignore[call-arg]
    assert replace_engine(ServeConfig(), num_pages=7).engine.num_pages == 7


def folder(path: Path, **files: str) -> str:
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return str(path)


def test_a_whole_model_folder_passes(tmp_path: Path) -> None:
    path = folder(tmp_path, config_json="{}", tokenizer_json="{}", model_safetensors="")
    check_model(path)
    check_draft(path)
    check_draft(None)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        check_model(str(tmp_path / "nowhere"))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer.json and no \\*.safetensors"):
        check_model(folder(tmp_path, config_json="{}"))
    with pytest.raises(ConfigError, match="--draft: .* has no \\*.safetensors"):
        check_draft(str(tmp_path))


def test_weights_of_an_older_export_are_weights(tmp_path: Path) -> None:
    path = folder(tmp_path, config_json="{}")
    (tmp_path / "pytorch_model.bin").touch()
    check_draft(path)


def test_dummy_weights_need_no_file(tmp_path: Path) -> None:
    check_model(folder(tmp_path, config_json="{}", tokenizer_json="{}"), "dummy")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = folder(tmp_path, config_json=text, tokenizer_json="{}", model_safetensors="")
    with pytest.raises(ConfigError, match="config.json") as refused:
        check_model(path)
    assert "\n" not in str(refused.value)
