"""Translates vLLM's and SGLang's settings of speculation to the flags of Eyas."""

from __future__ import annotations

import difflib
import json
from typing import Any

from eyas.peers.meanings import FlagSetting, Knows

_HEADS = ("eagle", "eagle3")
_OWN_LAYERS = ("mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "longcat_flash_mtp")
_NO_METHOD = "Eyas drafts with EAGLE, EAGLE-3 and MTP heads (--draft DIR, or --draft mtp) or --draft ngram"
_KEYS = ("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size")
_LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")  # Eyas finds the longest match by itself
_ADVICE = {
    "disable_by_batch_size": "leave it out: --spec-adaptive drafts less in large batches, where that pays",
    "speculative_token_tree": "leave it out: trees are asked for by --spec-topk and --spec-draft-tokens",
    "quantization": "leave it out: a head's own config.json says it",
    "max_model_len": "leave it out: a head follows its target to the end of the context",
    "revision": "leave it out: name the head's folder",
}


def from_json(text: str, _: Knows) -> list[FlagSetting]:
    """The settings of vLLM's --speculative-config."""
    settings = _object(text)
    method, model = settings.get("method"), settings.get("model")
    draft = model
    if method in ("ngram", "[ngram]") or model in ("ngram", "[ngram]"):
        draft = "ngram"
    elif method in _OWN_LAYERS:
        draft = model or "mtp"
    elif method is not None and method not in _HEADS:
        raise ValueError(f"method {method!r} is not served: {_NO_METHOD}")
    if not isinstance(draft, str):
        raise ValueError("it names no draft head: give it a model (--draft DIR), or the method mtp or ngram")
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


def from_algorithm(text: str, _: Knows) -> list[FlagSetting]:
    """The settings of SGLang's --speculative-algorithm; --draft, where it is given, names the head."""
    name = text.upper()
    if name in ("EAGLE", "EAGLE3", "NEXTN"):
        return [
            FlagSetting("--draft", ("mtp",), weak=True)
        ]  # as there: without a head's path, the model's own
    if name == "NGRAM":
        return [FlagSetting("--draft", ("ngram",))]
    raise ValueError(f"{text} is not served: {_NO_METHOD}")
