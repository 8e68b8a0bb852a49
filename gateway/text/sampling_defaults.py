"""A model's own sampling defaults: generation_config.json sets what a request leaves out.

Flags name another file, or override it. `do_sample` and `max_length` are not read, as in vLLM and SGLang: if
neither the file nor the request has a temperature, tokens are sampled at 1.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from eyas.common.config import GatewayConfig
from eyas.common.errors import ConfigError, InvalidRequest
from eyas.common.nearest import nearest
from eyas.common.params import SamplingParams
from gateway.text.tokenizer_files import read_json

FILE = "generation_config.json"
MODELS, NOWHERE = "auto", "vllm"  # sources: the model's folder, and none at all

_OUR_NAMES = {"max_new_tokens": "max_tokens"}
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def chosen_defaults(config: GatewayConfig) -> dict[str, Any]:
    """The values that a gateway's flags choose. Raises ConfigError, naming the flag or the file."""
    source = config.generation_config
    defaults = (
        {} if source == NOWHERE else sampling_defaults(config.model if source == MODELS else _named(source))
    )
    flag = "override-generation-config"
    override = json.loads(config.override_generation_config)
    for name in override:
        if name not in _FIELDS:
            advice = nearest(name, _FIELDS) or f": known are {', '.join(_FIELDS)}"
            raise ConfigError(f"--{flag}: unknown: {name!r}{advice}", param=flag)
    return defaults | _values(override, f"--{flag}", flag)


def _named(folder: str) -> str:
    """The folder itself. Raises ConfigError unless it has such a file."""
    if not (Path(folder) / FILE).is_file():
        flag = "generation-config"
        reason = f"{folder!r} is neither {MODELS} nor {NOWHERE}, nor a folder with a {FILE}"
        raise ConfigError(f"--{flag}: {reason}", param=flag)
    return folder


def sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """Values of `SamplingParams` by field; empty if the folder has no such file.

    Raises ConfigError, naming the file, for a bad value.
    """
    path = Path(folder) / FILE
    return _values(read_json(path), str(path), "model")


def _values(file: Mapping[str, Any], origin: str, flag: str) -> dict[str, Any]:
    values = {}
    for name in _FIELDS:
        if (value := file.get(name)) is None:
            continue
        ours = _OUR_NAMES.get(name, name)
        if (ours, value) == ("top_k", -1):  # "all", as some write it
            value = 0
        try:
            params = msgspec.convert({ours: value}, SamplingParams)
            params.validate(vocab_size=0)
        except (msgspec.ValidationError, OverflowError, InvalidRequest) as error:
            reason = str(error).replace(ours, name)
            raise ConfigError(f"{origin}: {name} {reprlib.repr(value)}: {reason}", param=flag) from error
        values[ours] = getattr(params, ours)
    return values


def with_file_names(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults under the file's own names, which are SGLang's too."""
    theirs = {ours: name for name, ours in _OUR_NAMES.items()}
    return {theirs.get(name, name): value for name, value in defaults.items()}
