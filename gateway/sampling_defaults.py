"""How a model wants to be sampled: what generation_config.json says becomes the default of every request.

It knows that file; it refuses to know requests. `do_sample` and `max_length` are not read (nor do vLLM and
SGLang read them): without a temperature there, a request without one is sampled.
"""

from __future__ import annotations

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
    """Fields of `SamplingParams` and their values; none without the file.

    Raises ConfigError, naming the file, for a value that makes no sense.
    """
    path = Path(folder) / "generation_config.json"
    said = read_json(path)
    given = {_OUR_NAMES.get(name, name): said[name] for name in _FIELDS if said.get(name) is not None}
    if given.get("top_k") == -1:  # "all", as some write it
        given["top_k"] = 0
    try:
        params = msgspec.convert(given, SamplingParams)
        params.validate(vocab_size=0)
    except (msgspec.ValidationError, InvalidRequest) as error:
        reason = str(error)
        for name, ours in _OUR_NAMES.items():
            reason = reason.replace(ours, name)
        raise ConfigError(f"{path}: {reason}", param="model") from error
    return {name: getattr(params, name) for name in given}


def as_named_there(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The same under the names of the file, which are SGLang's too."""
    theirs = {ours: name for name, ours in _OUR_NAMES.items()}
    return {theirs.get(name, name): value for name, value in defaults.items()}
