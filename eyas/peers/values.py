"""Values of other servers' flags in the words of Eyas: numbers with a unit, lists in JSON, other spellings.

Each function takes a value's text and returns another, or raises ValueError with a sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from eyas.peers.meanings import Convert, FlagSetting, Knows

PAGE = 16  # tokens per KV page
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


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
