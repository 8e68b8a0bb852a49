"""Checks that folders are a model and a head that can be served, before any process starts.

It reads file names, small files and the headers of large ones, and loads no torch: whether tensors have the
shapes that a model wants, and whether a head fits, the engine finds out.
"""

from __future__ import annotations

from pathlib import Path

from eyas.common.config import EngineConfig, GatewayConfig
from eyas.common.errors import ConfigError
from eyas.common.json_object import read_json_object
from eyas.common.tokenizers.source import TOKENIZER_FILES, read_tokenizer, tokenizer_file
from eyas.common.tokenizers.text_source import TextSource
from eyas.engine.checkpoint.folder import PICKLED, check_whole, has_weights, read_config, tensor_shapes
from eyas.engine.checkpoint.methods import read_quantized
from eyas.engine.models.keys import reading
from eyas.engine.models.mtp_names import layer_count, prefixes_among
from eyas.engine.models.table import read_model
from gateway.text.sampling_defaults import sampling_defaults
from gateway.text.tokenizer_files import load_chat_template


def check_engine(config: EngineConfig) -> None:
    """Raises ConfigError unless the folders have what an engine needs, and it supports the models in them."""
    check_model(config.model, config.load_format, config.chat_template, config.tokenizer)
    check_draft(config.draft, config.load_format)
    _check_own_layers(config)
    model = read_model(config.model, "dummy", config.texts)  # the files were looked at
    model.limited_to(config.context_length)


def check_gateway(config: GatewayConfig) -> None:
    """Raises ConfigError unless the folders have what a gateway needs; it reads no weights."""
    check_model(config.model, "dummy", config.chat_template, config.tokenizer)
    if config.tokenizer is not None:
        check_vocabulary(config.tokenizer, config.model)


def check_model(
    folder: str, load_format: str = "auto", template: str | None = None, tokenizer: str | None = None
) -> None:
    """Raises ConfigError unless `folder` has config.json, a tokenizer and, unless "dummy", weights.

    `tokenizer`: the folder that has the tokenizer instead. The chat template beside the tokenizer, or
    `template` instead of it, must compile, and the model's sampling defaults must be valid.
    """
    _check(folder, "model", ["config.json"], load_format)
    if tokenizer is not None:
        _check_folder(tokenizer, "tokenizer")
    flag, named = ("model", folder) if tokenizer is None else ("tokenizer", tokenizer)
    if tokenizer_file(Path(named)) is None:
        raise ConfigError(f"--{flag}: {named} has no tokenizer ({TOKENIZER_FILES})", param=flag)
    load_chat_template(Path(named), template)
    sampling_defaults(folder)


def check_vocabulary(tokenizer: str, model: str) -> None:
    """Raises ConfigError for a tokenizer that cannot be read, or that has ids which the model does not."""
    largest = max(read_tokenizer(Path(tokenizer)).get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= (size := read_model(model, "dummy", TextSource(Path(tokenizer))).vocab_size):
        text = f"{tokenizer} has token ids up to {largest}, and {model} embeds {size} (0 to {size - 1})"
        raise ConfigError(f"--tokenizer: {text}", param="tokenizer")


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
        there = layer_count(read_config(folder)) > 0
    elif any(folder.glob(PICKLED)):
        there = True
    else:
        with reading(folder):
            quantized = read_quantized(read_config(folder))
        there = bool(prefixes_among(tensor_shapes(folder, quantized)))
    if not there:
        raise ConfigError(f"--draft: {folder} has no MTP layer to draft with", param="draft")


def _check(folder: str, flag: str, names: list[str], load_format: str) -> None:
    path = _check_folder(folder, flag)
    missing = [name for name in names if not (path / name).is_file()]
    if load_format != "dummy" and not has_weights(path):
        gguf = " (GGUF files are not read)" if any(path.glob("*.gguf")) else ""
        missing.append(f"*.safetensors{gguf}")
    if missing:
        raise ConfigError(f"--{flag}: {folder} has no {' and no '.join(missing)}", param=flag)
    read_json_object(path / "config.json", flag)
    if load_format != "dummy":
        check_whole(path)


def _check_folder(folder: str, flag: str) -> Path:
    if folder.encode(errors="replace").decode() != folder:  # processes name it to each other in UTF-8
        raise ConfigError(f"--{flag}: the path {folder!a} is not UTF-8", param=flag)
    if not (path := Path(folder)).is_dir():
        raise ConfigError(f"--{flag}: {folder} is not a folder", param=flag)
    return path
