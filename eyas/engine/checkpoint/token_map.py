"""The file of --speculative-token-map: the target's ids that a draft head proposes, and no others.

Most drafts are common words, so a few thousand rows of the target's output head do for drafting, and cost a
fraction of reading all of them (FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.pickled import load_saved

FLAG = "speculative-token-map"
TORCH = (".pt", ".pth", ".bin")
"""How the names of files end that `torch.save` has written; any other file is text."""

Numbered = tuple[str, object]  # an entry's place in the file, for errors, and what stands there


def read_token_map(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids in the order of the file, which is that of the draft head's rows.

    The file holds a list or a tensor that `torch.save` has written, or as text a JSON list, or one id per
    line. Raises ConfigError, which names the flag and the entry, unless all are distinct ids below
    `vocab_size`.
    """
    try:
        entries = _saved(path) if path.suffix in TORCH else _written(path.read_text())
    except (OSError, ValueError) as error:
        raise refused(f"{path} cannot be read: {error}") from error
    ids: dict[int, str] = {}
    for place, entry in entries:
        if not isinstance(entry, int) or isinstance(entry, bool):
            raise refused(f"{place} of {path} is {entry!r}, which is no token id")
        if not 0 <= entry < vocab_size:
            raise refused(f"{place} of {path} is {entry}, and the target's ids are 0 to {vocab_size - 1}")
        if entry in ids:
            raise refused(f"{place} of {path} is {entry}, as {ids[entry]} is")
        ids[entry] = place
    if not ids:
        raise refused(f"{path} has no ids")
    return tuple(ids)


def refused(why: str) -> ConfigError:
    """The error of this flag."""
    return ConfigError(f"--{FLAG}: {why}", param=FLAG)


def _saved(path: Path) -> Iterable[Numbered]:
    loaded = load_saved(path)
    if isinstance(loaded, torch.Tensor):
        loaded = loaded.tolist()
    return _listed(loaded)


def _written(text: str) -> Iterable[Numbered]:
    if text.lstrip().startswith("["):
        return _listed(json.loads(text))
    lines = ((f"line {number}", line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(place, int(line) if line.isdecimal() else line) for place, line in lines if line]


def _listed(entries: object) -> Iterable[Numbered]:
    if not isinstance(entries, list):
        raise ValueError(f"it holds a {type(entries).__name__}, not a list of ids")
    return ((f"entry {number}", entry) for number, entry in enumerate(entries, 1))
