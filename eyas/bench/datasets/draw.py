"""The options of a dataset, and the reading of its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from eyas.common.errors import ConfigError

CHARACTERS_PER_TOKEN = 4  # of English text, where no tokenizer counts


@dataclass(frozen=True)
class DatasetOptions:
    """The flags of a dataset. `count` None: as many as the file has, else the dataset's own default."""

    count: int | None = None
    seed: int = 1
    path: Path | None = None
    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    turns: int = 4
    fixed_output_len: int | None = None
    context_len: int | None = None
    tokenizer: Path | None = None
    slowdown: float = 1.0

    def text(self) -> str:
        """The file's text. Raises ConfigError."""
        if self.path is None:
            raise ConfigError("--dataset-path: this dataset needs a file", param="dataset-path")
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--dataset-path: {self.path}: {reason}", param="dataset-path") from error

    def refuse(self, line: int, problem: str) -> NoReturn:
        """Raises the ConfigError of a malformed line, counted from 1."""
        raise ConfigError(f"--dataset-path: {self.path}, line {line}: {problem}", param="dataset-path")

    def json_lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and object of every line that is not empty. Raises ConfigError."""
        for number, line in enumerate(self.text().split("\n"), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                self.refuse(number, f"no JSON: {error}")
            if not isinstance(value, dict):
                self.refuse(number, "not a JSON object")
            yield number, value

    def token_counter(self) -> Callable[[str], int]:
        """Counts the tokens of a text: by the tokenizer, else by its characters. Raises ConfigError."""
        if self.tokenizer is None:
            return lambda text: -(-len(text) // CHARACTERS_PER_TOKEN)
        from eyas.common.tokenizers.source import read_tokenizer

        folder = self.tokenizer if self.tokenizer.is_dir() else self.tokenizer.parent
        try:
            tokenizer = read_tokenizer(folder)
        except ConfigError as error:
            raise ConfigError(f"--tokenizer: {error.message}", param="tokenizer") from error
        return lambda text: len(tokenizer.encode(text).ids)
