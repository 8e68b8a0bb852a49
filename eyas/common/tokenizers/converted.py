"""Tokenizers that were converted, in the user's cache: each a tokenizer.json, named after its sources' bytes.

Converting a vocabulary of 130,000 takes seconds, and a cluster has several processes that need it: the first
one writes it, whole or not at all. A file that cannot be read counts as absent. `tokenizer_source` converts.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer

from eyas.common.machine.cache import cache_home


def digest(paths: Iterable[Path]) -> str:
    """Hex digest of the names and contents of files; those that are not there count as absent."""
    found = hashlib.blake2b(digest_size=16)
    for path in paths:
        if path.is_file():
            found.update(f"{path.name}:{path.stat().st_size};".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def place(sources: Iterable[Path]) -> Path:
    """Where the tokenizer that is made of these files is, or will be."""
    return cache_home() / "tokenizers" / f"{digest(sources)}-{tokenizers.__version__}.json"


def find(path: Path) -> Tokenizer | None:
    """The tokenizer in a file of the cache; None if there is none that can be read."""
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises bare Exception for every cause
        return None


def put(path: Path, made: Tokenizer) -> None:
    """Writes it for others. Where the cache cannot be written, each process converts for itself."""
    own = path.with_suffix(f".{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            own.write_text(made.to_str(), encoding="utf-8")
            own.replace(path)
        finally:
            own.unlink(missing_ok=True)
