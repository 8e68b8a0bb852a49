"""A model's own sampling defaults: generation_config.json sets what a request leaves out.

It knows that file; it refuses to know requests. `do_sample` and `max_length` are not read, as in vLLM and
SGLang: if neither the file nor the request has a temperature, tokens are sampled at 1.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from eyas.common.errors import ConfigError, InvalidRequest
from eyas.common.params import SamplingParams
from gateway.tokenizer_files import read_json

_OUR_NAMES = {"max_new_tokens": "max_tokens"}
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """Values of `SamplingParams` by field; empty if the folder has no such file.

    Raises ConfigError, naming the file, for a bad value.
    """
    path = Path(folder) / "generation_config.json"
    file = read_json(path)
    found = {}
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
            raise ConfigError(f"{path}: {name} {reprlib.repr(value)}: {reason}", param="model") from error
        found[ours] = getattr(params, ours)
    return found


def with_file_names(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults under the file's own names, which are SGLang's too."""
    theirs = {ours: name for name, ours in _OUR_NAMES.items()}
    return {theirs.get(name, name): value for name, value in defaults.items()}
