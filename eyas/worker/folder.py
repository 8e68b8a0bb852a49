"""Is this folder a model that can be served? Answered before any process starts, in one plain sentence.

It looks at file names and at config.json only; whether the architecture is one that the engine can run is the
engine's to say.
"""

from __future__ import annotations

import json
from pathlib import Path

from eyas.common.errors import ConfigError


def check_model(folder: str, load_format: str = "auto") -> None:
    """Raises ConfigError unless `folder` holds config.json, tokenizer.json and (not "dummy") safetensors."""
    _check(folder, "model", tokenizer=True, weights=load_format != "dummy")


def check_draft(folder: str | None, load_format: str = "auto") -> None:
    """Raises ConfigError unless `folder` is None (no drafting) or a draft head's folder."""
    if folder is not None:
        _check(folder, "draft", tokenizer=False, weights=load_format != "dummy")


def _check(folder: str, flag: str, *, tokenizer: bool, weights: bool) -> None:
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"--{flag}: {folder} is not a folder", param=flag)
    missing = [name for name, needed in (("config.json", True), ("tokenizer.json", tokenizer)) if needed]
    missing = [name for name in missing if not (path / name).is_file()]
    if weights and not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"--{flag}: {folder} has no {' and no '.join(missing)}", param=flag)
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--{flag}: {folder}/config.json cannot be read: {error}", param=flag) from error
    if not isinstance(config, dict):
        raise ConfigError(f"--{flag}: {folder}/config.json is not a JSON object", param=flag)
