"""The files of a model's folder about its tokenizer, beside the vocabulary.

It reads the files in which Hugging Face has kept special tokens and chat templates over the years, and
decides which counts where several have one (transformers' own order).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from eyas.common.errors import ConfigError
from eyas.common.model_folder import given_template, read_json_object
from gateway.text.templates import ChatTemplate

CONFIG = "tokenizer_config.json"


def load_chat_template(folder: Path, given: str | None = None) -> ChatTemplate | None:
    """The template that was `given`, itself or as a file; without one the folder's, or its named ones; None
    if the folder has none.

    Raises ConfigError, naming the file or the flag, for one that cannot be read or does not compile.
    """
    with _understood(folder):
        variables = {name: token.content for name, token in _special_tokens(folder) if name is not None}
        if given is not None:
            source, origin = given_template(given)
            return ChatTemplate(source, variables, origin=origin)
        if files := _template_files(folder):
            sources = {name: _read(path) for name, path in files.items()}
            return ChatTemplate(sources, variables, origin=" and ".join(map(str, files.values())))
        for name in ("chat_template.json", CONFIG):
            sources = _named_templates(read_json(path := folder / name).get("chat_template"))
            if "default" in sources:
                return ChatTemplate(sources, variables, origin=f"the chat_template of {path}")
    return None


def _template_files(folder: Path) -> dict[str, Path]:
    """Files that are templates, by the template's name."""
    paths = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    names = {path: "default" if path.name == "chat_template.jinja" else path.stem for path in paths}
    files = {name: path for path, name in names.items() if path.exists()}
    return files if "default" in files else {}


def name_special_tokens(hf: HFTokenizer, folder: Path) -> None:
    """Gives `hf` the tokens that only the other files name. Raises ConfigError if those cannot be read."""
    with _understood(folder):
        special = sorted(_special_tokens(folder), key=lambda token: token[0] is None)  # named ones come first
        named = {token.content for name, token in special if name is not None}
        entries = read_json(folder / CONFIG).get("added_tokens_decoder", {})
        added = [_token(entries[id]) for id in sorted(entries, key=int)]
        for token in added:
            token.special |= token.content in named
        hf.add_tokens(added)
        known = {token.content for token in hf.get_added_tokens_decoder().values()}
        hf.add_tokens([token for _, token in special if token.content not in known])


def cleans_up(hf: HFTokenizer, folder: Path) -> bool:
    """Whether texts lose spaces before punctuation. Never for BPE, which writes only a text's own spaces."""
    cleans = read_json(folder / CONFIG).get("clean_up_tokenization_spaces")
    return bool(cleans) and type(hf.model).__name__ != "BPE"


def read_json(path: Path) -> dict[str, Any]:
    """The object in an optional JSON file; {} without the file. Raises ConfigError for any other content."""
    return read_json_object(path, "model") if path.exists() else {}


@contextlib.contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """Turns errors from values of an unexpected type into ConfigErrors that name the folder."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"the files of {folder} beside its vocabulary do not describe a tokenizer: {error}"
        raise ConfigError(reason, param="model") from error


def _special_tokens(folder: Path) -> Iterator[tuple[str | None, AddedToken]]:
    """Special tokens, with their names if they have any."""
    values = read_json(folder / CONFIG)
    if "added_tokens_decoder" not in values:  # with that entry the older file does not count
        values |= read_json(folder / "special_tokens_map.json")
    for name, value in values.items():
        if name in ("additional_special_tokens", "extra_special_tokens"):
            named = value.items() if isinstance(value, dict) else ((None, token) for token in value or ())
            yield from ((name, _token(token, special=True)) for name, token in named)
        elif name.endswith("_token") and isinstance(value, str | dict) and value:
            yield name, _token(value, special=True)


def _token(value: str | Mapping[str, Any], **flags: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, **flags)
    return AddedToken(**{name: flag for name, flag in value.items() if name != "__type"} | flags)


def _named_templates(value: Any) -> dict[str, str]:
    """Templates by name; a single one is the default. Raises TypeError or LookupError for anything else."""
    named = {one["name"]: one["template"] for one in value} if isinstance(value, list) else {"default": value}
    if not all(isinstance(source, str | None) for source in named.values()):
        raise TypeError(f"chat_template is {value!r:.50}")
    return {name: source for name, source in named.items() if source is not None}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
