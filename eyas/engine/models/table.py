"""The models that there are: one line per architecture, naming the file that describes it.

A lazy import per line, and no torch, so that a configuration can be judged without loading either.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Protocol, cast

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import folder as files
from eyas.engine.checkpoint.config import DraftConfig, ModelConfig
from eyas.engine.models.keys import Raw

MODELS = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""What a config.json calls an architecture, and the module of `eyas.engine.models` that knows it."""

HEADS = ("eagle3",)
"""The modules of `eyas.engine.models` that know a kind of draft head. One is recognised by its tensors."""


class Family(Protocol):
    """What such a module holds."""

    def describe(self, raw: Raw, folder: Path) -> ModelConfig:
        """The model of a config.json. KeyError, TypeError and ValueError are sentences of `read_model`'s."""


class HeadFamily(Protocol):
    """What a module of a kind of draft head holds."""

    def describe_head(self, raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig:
        """The head of a folder. Raises ConfigError if it is of another kind or does not fit `target`."""


def read_model(folder: Path | str, load_format: str = "auto") -> ModelConfig:
    """What a Hugging Face folder holds.

    Raises ConfigError if it cannot be served, in one sentence that says why.
    """
    folder = Path(folder)
    raw = files.read_config(folder)
    architecture = next(iter(raw.get("architectures") or ["(none named)"]))
    if architecture not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ConfigError(
            f"architecture {architecture} of {folder} is not supported ({known} are): "
            "it takes a file and a line in a table, see docs/adding-a-model.md"
        )
    if load_format != "dummy":
        files.weight_files(folder)
    family = cast(Family, importlib.import_module(f"eyas.engine.models.{MODELS[architecture]}"))
    config = describe(family, raw, folder)
    ends = files.end_tokens(folder, raw)
    return dataclasses.replace(config, eos_token_ids=ends, load_format=load_format)


def describe(family: Family, raw: Raw, folder: Path) -> ModelConfig:
    """As `family` reads it; a key that is missing or unusable is a ConfigError."""
    try:
        return family.describe(raw, folder)
    except KeyError as missing:
        raise ConfigError(f"config.json of {folder} has no {missing.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json of {folder} holds a value of the wrong kind: {error}") from None


def read_head(folder: Path | str, target: ModelConfig, load_format: str = "auto") -> DraftConfig:
    """The draft head that a folder holds. Raises ConfigError if it is none, or does not fit `target`."""
    from eyas.engine.models import eagle3

    return eagle3.describe_head(files.read_config(Path(folder)), Path(folder), target, load_format)
