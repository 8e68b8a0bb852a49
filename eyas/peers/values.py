"""Values of other servers' flags in the words of Eyas: numbers with a unit, lists, spellings, settings of
drafts.

Each function takes a value's text and returns another, or the settings that it means, or raises ValueError
with a sentence.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from eyas.peers.meanings import AcceptedWith, Convert, FlagSetting, Knows

PAGE = 16  # tokens per KV page
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_HEADS = ("eagle", "eagle3", "dflash", "dspark", "draft_model")  # told apart by their tensors
_OWN_LAYERS = ("mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "longcat_flash_mtp")
_NO_METHOD = (
    "Eyas drafts with EAGLE, P-EAGLE, DFlash and MTP heads and whole models (--draft DIR, or --draft mtp), "
    "ngram or suffix"
)
_KEYS = ("method", "model", "num_speculative_tokens", "parallel_drafting", "draft_tensor_parallel_size")
_LOOKUP = (  # Eyas finds the longest match, and how far it is worth following, by itself
    *("prompt_lookup_max", "prompt_lookup_min"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
)
_ADVICE = {
    "disable_by_batch_size": "leave it out: rounds of large batches draft less, where that pays",
    "speculative_token_tree": "leave it out: trees are asked for by --spec-topk and --spec-draft-tokens",
    "quantization": "leave it out: a head's own config.json says it",
    "max_model_len": "leave it out: a head follows its target to the end of the context",
    "revision": "leave it out: name the head's folder",
}


def size(text: str) -> str:
    """A number that may end in k, m, g (thousands) or K, M, G (powers of 1,024), as vLLM reads it."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    if number is None:
        return text  # the flag itself says what is wrong with it
    value = float(number[1]) * _UNITS[number[2]]
    return str(int(value)) if value.is_integer() else text


def spelled(names: Mapping[str, str]) -> Convert:
    """Returns a converter of some spellings; any other value stays as it is."""

    def convert(text: str) -> str:
        return names.get(text, text)

    return convert


def listed(text: str) -> str:
    """A list of texts in JSON, as one text with commas."""
    if not text.startswith("["):
        return text
    try:
        items = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a JSON list ({error})") from error
    if not all(isinstance(item, str) for item in items):
        raise ValueError(f"{text!r} is not a JSON list of texts")
    return ",".join(items)


def lora(text: str) -> str:
    """An adapter as NAME=DIR: it may be a JSON object, or a path alone, which then is its name as well."""
    if not text.startswith("{"):
        return text if "=" in text else f"{text}={text}"
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a JSON object ({error})") from error
    known = {"name": "name", "lora_name": "name", "path": "path", "lora_path": "path"}
    named = {known[key]: value for key, value in fields.items() if key in known}
    if others := [key for key, value in fields.items() if key not in known and value]:
        if others != ["base_model_name"]:  # there is one model
            raise ValueError(f"{others[0]} is not read: POST /load_lora_adapter loads a pinned one")
    if named.keys() != {"name", "path"} or not all(isinstance(value, str) for value in named.values()):
        raise ValueError(f"{text!r} needs a name and a path")
    return f"{named['name']}={named['path']}"


def address(text: str) -> str:
    """A URL, whose scheme may be left out."""
    return text if "://" in text else f"http://{text}"


def pages(text: str, _: Knows) -> list[FlagSetting]:
    """A number of tokens in the KV cache, as pages."""
    if not text.isdigit() or int(text) < PAGE:
        raise ValueError(f"{text!r} is not a number of tokens, {PAGE} or more")
    return [FlagSetting("--num-pages", (str(int(text) // PAGE),))]


def role(text: str, knows: Knows) -> list[FlagSetting]:
    """The kind of work of one server in a disaggregated cluster."""
    if text == "null":
        return []
    if text not in ("prefill", "decode"):
        raise ValueError(f"{text!r} is none of null, prefill and decode")
    if not knows("--roles"):
        advice = f"start `eyas worker --roles {text}`, or a cluster of both with `eyas serve --layout split`"
        raise ValueError(advice)
    return [FlagSetting("--roles", (text,))]


def from_json(text: str, _: Knows) -> list[FlagSetting]:
    """The settings of vLLM's --speculative-config."""
    settings = _object(text)
    method, model = settings.get("method"), settings.get("model")
    draft = model
    if method in ("ngram", "[ngram]") or model in ("ngram", "[ngram]"):
        draft = "ngram"
    elif method == "suffix":
        draft = "suffix"
    elif method in _OWN_LAYERS:
        draft = model or "mtp"
    elif method is not None and method not in _HEADS:
        raise ValueError(f"method {method!r} is not served: {_NO_METHOD}")
    if not isinstance(draft, str):
        raise ValueError(
            "it names no draft head: give it a model (--draft DIR), or the method mtp, ngram or suffix"
        )
    steps = settings.get("num_speculative_tokens")
    flags = [FlagSetting("--draft", (draft,))]
    if steps is not None:
        flags.append(FlagSetting("--spec-steps", (str(steps),)))
    return flags


def _object(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError("it is not a JSON object")
    known = (*_KEYS, *_LOOKUP)
    for name in settings:
        if name in _ADVICE:
            raise ValueError(f"{name}: {_ADVICE[name]}")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
            raise ValueError(f"{name} is unknown: {meant}")
    if settings.get("draft_tensor_parallel_size", 1) != 1:
        raise ValueError("draft_tensor_parallel_size: leave it out: a head runs on its target's GPUs")
    return settings


def from_algorithm(text: str, _: Knows) -> list[FlagSetting] | AcceptedWith:
    """The settings of SGLang's --speculative-algorithm; --draft, where it is given, names the head."""
    name = text.upper()
    if name in ("EAGLE", "EAGLE3", "NEXTN"):
        return [
            FlagSetting("--draft", ("mtp",), weak=True)
        ]  # as there: without a head's path, the model's own
    if name in ("STANDALONE", "DFLASH"):
        return AcceptedWith(("--draft",), "--draft says all", f"{name} drafts by a model: take --draft DIR")
    if name == "NGRAM":
        return [FlagSetting("--draft", ("ngram",))]
    raise ValueError(f"{text} is not served: {_NO_METHOD}")
