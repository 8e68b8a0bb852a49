"""Checks that folders are a model and a head that can be served, before any process starts.

It reads file names, small files and the headers of large ones, and loads no torch: whether tensors have the
shapes that a model wants, and whether a head fits, the engine finds out.
"""

from __future__ import annotations

from pathlib import Path

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.json_object import read_json_object
from eyas.common.tokenizer_source import TOKENIZER_FILES, tokenizer_file
from eyas.engine.checkpoint.folder import PICKLED, check_whole, has_weights, read_config, tensor_shapes
from eyas.engine.models.mtp_names import prefixes_among, told_layers
from eyas.engine.models.table import read_model
from gateway.sampling_defaults import sampling_defaults
from gateway.tokenizer_files import load_chat_template


def check_engine(config: EngineConfig) -> None:
    """Raises ConfigError unless the folders have what an engine needs, and it knows what they describe."""
    check_model(config.model, config.load_format)
    check_draft(config.draft, config.load_format)
    _check_own_layers(config)
    read_model(config.model, "dummy").limited_to(config.context_length)  # the files were looked at


def check_model(folder: str, load_format: str = "auto", template: str | None = None) -> None:
    """Raises ConfigError unless `folder` has config.json, a tokenizer and, unless "dummy", weights.

    Its chat template, or the file `template` instead of it, must compile, and its sampling defaults must
    be valid.
    """
    _check(folder, "model", ["config.json"], load_format)
    if tokenizer_file(Path(folder)) is None:
        raise ConfigError(f"--model: {folder} has no tokenizer ({TOKENIZER_FILES})", param="model")
    load_chat_template(Path(folder), template)
    sampling_defaults(folder)


def check_draft(folder: str | None, load_format: str = "auto") -> None:
    """Raises ConfigError unless `folder` is None (no drafting) or has the files of a draft head."""
    if folder is not None:
        _check(folder, "draft", ["config.json"], load_format)


def _check_own_layers(config: EngineConfig) -> None:
    """Raises ConfigError for a model that is to be its own head (--draft mtp), and has no layer for it.

    Of weights in an older export the engine finds it out: their names cannot be read without torch.
    """
    folder = Path(config.model)
    if config.draft is None or Path(config.draft).resolve() != folder.resolve():
        return
    if config.load_format == "dummy":
        there = told_layers(read_config(folder)) > 0
    else:
        there = any(folder.glob(PICKLED)) or bool(prefixes_among(tensor_shapes(folder)))
    if not there:
        raise ConfigError(f"--draft: {folder} has no MTP layer to draft with", param="draft")


def _check(folder: str, flag: str, names: list[str], load_format: str) -> None:
    path = Path(folder)
    if folder.encode(errors="replace").decode() != folder:  # processes name it to each other in UTF-8
        raise ConfigError(f"--{flag}: the path {folder!a} is not UTF-8", param=flag)
    if not path.is_dir():
        raise ConfigError(f"--{flag}: {folder} is not a folder", param=flag)
    missing = [name for name in names if not (path / name).is_file()]
    if load_format != "dummy" and not has_weights(path):
        gguf = " (GGUF files are not read)" if any(path.glob("*.gguf")) else ""
        missing.append(f"*.safetensors{gguf}")
    if missing:
        raise ConfigError(f"--{flag}: {folder} has no {' and no '.join(missing)}", param=flag)
    read_json_object(path / "config.json", flag)
    if load_format != "dummy":
        check_whole(path)
