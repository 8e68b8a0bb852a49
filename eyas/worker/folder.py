"""Checks that a folder is a model that can be served, before any process starts.

It reads file names and small files only. The engine decides whether it can run the architecture.
"""

from __future__ import annotations

import json
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.folder import has_weights
from gateway.sampling_defaults import sampling_defaults
from gateway.tokenizer_files import load_chat_template


def check_model(folder: str, load_format: str = "auto") -> None:
    """Raises ConfigError unless `folder` has config.json, tokenizer.json and, unless "dummy", weights.

    Its chat template, if there is one, must compile, and its sampling defaults must be valid.
    """
    _check(folder, "model", ["config.json", "tokenizer.json"], load_format)
    load_chat_template(Path(folder))
    sampling_defaults(folder)


def check_draft(folder: str | None, load_format: str = "auto") -> None:
    """Raises ConfigError unless `folder` is None (no drafting) or has the files of a draft head."""
    if folder is not None:
        _check(folder, "draft", ["config.json"], load_format)


def _check(folder: str, flag: str, names: list[str], load_format: str) -> None:
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"--{flag}: {folder} is not a folder", param=flag)
    missing = [name for name in names if not (path / name).is_file()]
    if load_format != "dummy" and not has_weights(path):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"--{flag}: {folder} has no {' and no '.join(missing)}", param=flag)
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--{flag}: {folder}/config.json cannot be read: {error}", param=flag) from error
    if not isinstance(config, dict):
        raise ConfigError(f"--{flag}: {folder}/config.json is not a JSON object", param=flag)
