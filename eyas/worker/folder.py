"""Checks that a folder is a model that can be served, before any process starts.

It reads file names and small files only. The engine decides whether it can run the architecture.
"""

from __future__ import annotations

import json
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.folder import pickles
from gateway.sampling_defaults import sampling_defaults
from gateway.tokenizer_files import load_chat_template


def check_model(folder: str, load_format: str = "auto") -> None:
    """Raises ConfigError unless `folder` has config.json, tokenizer.json and, unless "dummy", safetensors.

    Its chat template, if there is one, must compile, and its sampling defaults must be valid.
    """
    _check(folder, "model", ["config.json", "tokenizer.json", *_weights(load_format)])
    load_chat_template(Path(folder))
    sampling_defaults(folder)


def check_draft(folder: str | None, load_format: str = "auto") -> None:
    """Raises ConfigError unless `folder` is None (no drafting) or has the files of a draft head."""
    if folder is not None:
        _check(folder, "draft", ["config.json", *_weights(load_format)])


def _weights(load_format: str) -> list[str]:
    return [] if load_format == "dummy" else ["*.safetensors"]


def _check(folder: str, flag: str, patterns: list[str]) -> None:
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"--{flag}: {folder} is not a folder", param=flag)
    missing = [pattern for pattern in patterns if not any(path.glob(pattern))]
    if missing:
        hint = pickles(path) if "*.safetensors" in missing else ""
        raise ConfigError(f"--{flag}: {folder} has no {' and no '.join(missing)}{hint}", param=flag)
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--{flag}: {folder}/config.json cannot be read: {error}", param=flag) from error
    if not isinstance(config, dict):
        raise ConfigError(f"--{flag}: {folder}/config.json is not a JSON object", param=flag)
