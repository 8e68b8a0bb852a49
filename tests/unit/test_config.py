"""Configuration: frozen, no unknown key, and folders judged before anything starts."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.cluster.checks import check_draft, check_engine, check_model
from eyas.common.config import NANO, EngineConfig
from eyas.common.errors import ConfigError
from tests.unit.tiny_mtp import write_tiny_mimo


def test_a_config_is_frozen_and_refuses_unknown_keys() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().device = "cuda"  # type: ignore[misc]
    with pytest.raises(TypeError, match="num_page"):
        EngineConfig(num_page=1)  # type: ignore[call-arg]


def folder(path: Path, **files: str) -> str:
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return str(path)


def test_a_whole_model_folder_passes(tmp_path: Path) -> None:
    path = folder(tmp_path, config_json="{}", tokenizer_json="{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    check_model(path)
    check_draft(path)
    check_draft(None)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        check_model(str(tmp_path / "nowhere"))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no \\*.safetensors"):
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


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 13320528\n"
NOT_WHOLE: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda whole: whole[:-1], r"is cut off: 13320527 of 13320528 bytes are there"),
    (lambda whole: whole[:1000], "is not a safetensors file"),
    (lambda whole: b"", "is not a safetensors file"),
    (lambda whole: whole[:8] + b"[" + whole[9:], "is not a safetensors file"),
    (lambda whole: LFS, "is a pointer of Git LFS, not the weights"),
]


@pytest.mark.parametrize(("spoil", "says"), NOT_WHOLE)
def test_weights_that_are_not_whole_are_told(
    tmp_path: Path, spoil: Callable[[bytes], bytes], says: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(spoil((NANO / "model.safetensors").read_bytes()))
    with pytest.raises(ConfigError, match=f"model.safetensors {says}"):
        check_draft(str(tmp_path))


def test_weights_that_cannot_be_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(NANO, tmp_path, dirs_exist_ok=True)
    opened = Path.open

    def denied(path: Path, *args: Any, **more: Any) -> Any:
        if path.suffix == ".safetensors":  # the super-user may read every file
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **more)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: Permission denied"):
        check_model(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["xLSTMForCausalLM"], "model_type": "xlstm"},
            "architecture xLSTMForCausalLM of .* is not supported",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type 'spiral' is not supported"),
        ({"quantization_config": {"quant_method": "quip"}}, "quant_method 'quip' is not supported"),
        ({}, "--context-length: 4096 is more than the 2048 tokens"),
    ],
)
def test_a_model_that_no_engine_runs_is_told_at_once(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    shutil.copytree(NANO, tmp_path, dirs_exist_ok=True)
    config = json.loads((NANO / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says):
        check_engine(EngineConfig(model=str(tmp_path), draft=None, context_length=4096))


def test_a_wrong_value_is_named_of_a_model_that_is_its_own_head(tmp_path: Path) -> None:
    """Its tensors' shapes are looked at first, packed ones' as its config.json says."""
    shutil.copytree(NANO, tmp_path, dirs_exist_ok=True)
    config = json.loads((NANO / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "desc_act": "yes"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="config.json of .* desc_act 'yes' must be true or false"):
        check_engine(EngineConfig(model=str(tmp_path), draft=str(tmp_path)))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_that_is_to_be_its_own_head_has_a_layer_for_it(tmp_path: Path, load_format: str) -> None:
    """`--draft mtp`. Its engine would say so, long after the command has returned from its checks."""
    own = write_tiny_mimo(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, own)
    config = EngineConfig(model=str(own), draft=str(own), load_format=load_format)
    check_engine(config)
    nano = dataclasses.replace(config, model=str(NANO), draft=str(NANO))
    with pytest.raises(ConfigError, match="--draft: .* has no MTP layer to draft with") as refused:
        check_engine(nano)
    assert refused.value.param == "draft"


def test_looking_at_folders_loads_no_torch() -> None:
    script = (
        "import sys; from eyas.common.config import NANO, EngineConfig;"
        "from eyas.common.errors import ConfigError;"
        "from eyas.cluster.checks import check_engine;"
        "check_engine(EngineConfig())\n"
        "try: check_engine(EngineConfig(draft=str(NANO)))\n"
        "except ConfigError: sys.exit('torch' in sys.modules)\n"
        "sys.exit('taken')"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
