"""Finds the class by which transformers computes a config.json, or says why it cannot be served that way.

Only classes of the transformers package are looked up: code that lies in a model's repository never runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.quantized import QUANTIZED
from eyas.engine.checkpoint.values import Raw, said, words
from eyas.engine.models.table import MODELS
from eyas.engine.models.unserved import ITSELF, NO_DECODER, OWN_FILE

_MORE_THAN_TEXT = f"it reads more than text: its language model has no file here, {ITSELF}, {OWN_FILE}"

_IDLE = ("auto_map", "attn_implementation", "experts_implementation", "torch_dtype", "dtype")
"""Keys of a config.json that say how somebody ran a model, not what it is."""


def model_class(raw: Raw, folder: Path) -> tuple[Any, Any]:
    """The configuration as transformers reads it, and the class that computes it.

    Raises ConfigError, in one sentence that says what can be done, for what is not served by transformers'
    code.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    architecture = next(iter(words(raw, "architectures")), "(none named)")
    decoders = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = raw.get("model_type") or next((key for key, n in decoders.items() if n == architecture), None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING or architecture != decoders.get(kind):
        own = [key for key, name in decoders.items() if name == architecture]
        refuse(raw, folder, _stranger(raw, architecture, own))
    try:
        config = CONFIG_MAPPING[str(kind)].from_dict(_settings(raw))
        causal_lm = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except ConfigError:
        raise
    except Exception as error:  # whatever transformers raises for a value that it does not take
        text = " ".join(str(error).split())
        raise ConfigError(f"config.json of {folder} is not one that transformers reads: {text}") from error
    if why := _unserved(raw, config, causal_lm):
        refuse(raw, folder, why)
    return config, causal_lm


def refuse(raw: Raw, folder: Path, why: str) -> None:
    """Raises ConfigError: the architecture is not supported. `why` ends with a colon and what can be done: of
    an architecture that has a file, something else.
    """
    architecture = next(iter(words(raw, "architectures")), "(none named)")
    if architecture in MODELS:
        reason = why.rpartition(": ")[0]
        instead = "leave --model-impl transformers out, and Eyas' own code serves it"
        raise ConfigError(
            f"architecture {architecture} of {folder} is not supported there: {reason}: {instead}"
        )
    raise ConfigError(f"architecture {architecture} of {folder} is not supported: {why}")


def _settings(raw: Raw) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in _IDLE and not name.startswith("_")}


def _stranger(raw: Raw, architecture: str, own: Sequence[str]) -> str:
    """Why an architecture is none of transformers' decoders. `own`: the model types that are computed by it
    there.
    """
    from transformers import __version__

    if not words(raw, "architectures"):
        return "config.json has no architectures: the model's card says which it is"
    if raw.get("auto_map"):
        return (
            "its equations are code in its own repository (auto_map), which Eyas never runs: "
            f"take a copy that is converted to an architecture of transformers, {OWN_FILE}"
        )
    if "text_config" in raw:
        return _MORE_THAN_TEXT
    if own:
        return f"model_type {said(raw.get('model_type'))} is another model's: it must be {' or '.join(own)}"
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return f"transformers {__version__} has no such decoder either: try a newer transformers, {OWN_FILE}"
    return NO_DECODER


def _unserved(raw: Raw, config: Any, causal_lm: Any) -> str:
    """Why transformers' class of this decoder cannot attend over pages; "": it can."""
    if name := next((name for name in QUANTIZED if raw.get(name)), ""):
        method = raw[name].get("quant_method") if isinstance(raw[name], dict) else raw[name]
        return (
            f"its weights are quantized ({name}: {said(method)}), which Eyas reads for architectures with a "
            f"file alone: take its weights in 16 bits, {OWN_FILE}"
        )
    if not hasattr(config, "num_hidden_layers"):  # each of its parts has them
        return _MORE_THAN_TEXT
    if getattr(causal_lm, "_is_stateful", False):
        return (
            "its layers keep a running state in place of keys and values (a state-space model, or a hybrid "
            f"with one), and pages hold keys and values: take a decoder that attends in every layer; {ITSELF}"
        )
    if not getattr(causal_lm, "_supports_attention_backend", False):
        return (
            "its code in transformers does not attend through the attention interface, so it cannot use "
            f"pages: {ITSELF}, {OWN_FILE}"
        )
    return ""
