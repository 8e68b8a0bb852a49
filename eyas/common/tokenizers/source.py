"""The tokenizer of a model's folder, whichever of the published forms it has, as the `tokenizers` library's.

It decides which file counts where a folder has several, and needs neither torch nor transformers. The forms
other than tokenizer.json are converted, once: see `byte_ranks` and `sentence_pieces`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers import decoders as decoding

from eyas.common.errors import ConfigError
from eyas.common.machine.folders import cache_home
from eyas.common.model_folder import read_json_object
from eyas.common.tokenizers import byte_ranks, sentence_pieces

_JSON = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_ADDED = "added_tokens.json"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# Tokenizers that were converted, in the user's cache: each a tokenizer.json, named after its sources' bytes.
# Converting a vocabulary of 130,000 takes seconds, and a cluster has several processes that need it: the
# first one writes it, whole or not at all. A file that cannot be read counts as absent.
def digest(paths: Iterable[Path]) -> str:
    """Hex digest of the names and contents of files; those that are not there count as absent."""
    hashed = hashlib.blake2b(digest_size=16)
    for path in paths:
        if path.is_file():
            hashed.update(f"{path.name}:{path.stat().st_size};".encode())
            hashed.update(path.read_bytes())
    return hashed.hexdigest()


def cached_path(sources: Iterable[Path]) -> Path:
    """Returns the path in the cache of the tokenizer that is made of these files."""
    return cache_home() / "tokenizers" / f"{digest(sources)}-{tokenizers.__version__}.json"


def read_cached(path: Path) -> Tokenizer | None:
    """The tokenizer in a file of the cache; None if there is none that can be read."""
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises bare Exception for every cause
        return None


def write_cached(path: Path, made: Tokenizer) -> None:
    """Writes it for others. Where the cache cannot be written, each process converts for itself."""
    own = path.with_suffix(f".{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            own.write_text(made.to_str(), encoding="utf-8")
            own.replace(path)
        finally:
            own.unlink(missing_ok=True)


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


_FORMS: dict[str, Callable[[Path, dict[str, Any]], Tokenizer]] = {
    _JSON: lambda path, _: Tokenizer.from_file(str(path)),
    "tekken.json": lambda path, _: byte_ranks.of_tekken(path),
    "tiktoken.model": byte_ranks.of_kimi,
    "tokenizer.model": sentence_pieces.of_model,
    "vocab.json": lambda path, config: _of_vocabulary(path, config),
}
"""Makers by the file that they read: the first of these that a folder has counts."""

TOKENIZER_FILES = (
    "tokenizer.json, tekken.json, tiktoken.model, tokenizer.model, or vocab.json with merges.txt"
)


def tokenizer_digest(folder: Path) -> str:
    """Names the content of the folder's tokenizer file, wherever it lies; "" if there is none to be read."""
    path = tokenizer_file(folder)
    try:
        return "" if path is None else digest([path])
    except OSError:
        return ""


def tokenizer_file(folder: Path) -> Path | None:
    """The file of the folder that is its tokenizer; None if there is none."""
    there = [folder / name for name in _FORMS if (folder / name).is_file()]
    return next((path for path in there if path.name != "vocab.json" or _merges(path).is_file()), None)


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer. Raises ConfigError, which names the file, if there is none that can be read."""
    path = tokenizer_file(folder)
    if path is None:
        raise ConfigError(f"{folder} has no tokenizer ({TOKENIZER_FILES})", param="model")
    try:
        return _FORMS[_JSON](path, {}) if path.name == _JSON else _converted(path)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception for every cause
        raise ConfigError(f"{path} cannot be loaded: {error}", param="model") from error


def special_tokens(folder: Path) -> dict[str, int]:
    """Ids of the special tokens by their text; those of a folder whose tokenizer cannot be read: none."""
    if (path := tokenizer_file(folder)) is None:
        return {}
    written = path if path.name == _JSON else cached_path(_sources(path))
    try:
        if written.is_file():  # it is much quicker read for these alone
            tokens = msgspec.json.decode(written.read_bytes(), type=_TokenizerFile).added_tokens
            return {token.content: token.id for token in tokens if token.special}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if written == path:
            return {}
    try:
        added = read_tokenizer(folder).get_added_tokens_decoder()
    except ConfigError:
        return {}
    return {token.content: id for id, token in added.items() if token.special}


def _converted(path: Path) -> Tokenizer:
    """Converts another form than tokenizer.json, or reads it from the cache if it is there."""
    place = cached_path(_sources(path))
    if (made := read_cached(place)) is not None:
        return made
    config = read_json_object(path.with_name(_CONFIG), "model") if path.with_name(_CONFIG).exists() else {}
    made = _FORMS[path.name](path, config)
    _add_tokens(made, path.parent, config)
    write_cached(place, made)
    return made


def _sources(path: Path) -> list[Path]:
    """The files that a tokenizer is converted from, and the code that does it."""
    code = [Path(file) for file in (__file__, byte_ranks.__file__, sentence_pieces.__file__)]
    return [path, _merges(path), path.with_name(_CONFIG), path.with_name(_ADDED), *code]


def _add_tokens(made: Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """The tokens that stand beside the vocabulary, by id."""
    added = {int(id): entry for id, entry in config.get("added_tokens_decoder", {}).items()}
    older = folder / _ADDED
    for name, id in (read_json_object(older, "model") if older.exists() else {}).items():
        added.setdefault(id, {"content": name, "special": True})
    made.add_tokens(
        [
            AddedToken(
                entry["content"],
                special=entry.get("special", False),
                lstrip=entry.get("lstrip", False),
                rstrip=entry.get("rstrip", False),
                normalized=False,
            )
            for _, entry in sorted(added.items())
        ]
    )
    for id, entry in sorted(added.items()):
        if made.token_to_id(entry["content"]) != id:
            text = f"its added token {entry['content']!r} cannot have the id {id}"
            raise ConfigError(f"{folder}: {text}", param="model")


def _merges(vocabulary: Path) -> Path:
    return vocabulary.with_name("merges.txt")


def _of_vocabulary(path: Path, config: dict[str, Any]) -> Tokenizer:
    """Reads vocab.json and merges.txt; how texts are cut follows from the tokenizer's class."""
    vocabulary = json.loads(path.read_text(encoding="utf-8"))
    lines = _merges(path).read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    name = str(config.get("tokenizer_class", "GPT2Tokenizer")).removesuffix("Fast")
    if name == "GPT2Tokenizer":
        prefix = bool(config.get("add_prefix_space", False))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    elif name == "Qwen2Tokenizer":
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = byte_ranks.cut(_QWEN)
    else:
        text = (
            f"{name}, the tokenizer_class of {path.with_name(_CONFIG)}, is not known without tokenizer.json"
        )
        raise ConfigError(text, param="model")
    made.decoder = decoding.ByteLevel()
    return made
