"""The source of a server's tokens: the folder of its tokenizer, and its chat template, as flags name them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.common.errors import ConfigError

_TEMPLATE_MARKS = ("{{", "{%")
"""Signs that only a chat template has, and no path."""


@dataclass(frozen=True)
class TextSource:
    """The source of a tokenizer: the tokenizer of `folder`, and its chat templates, or the one that was given
    (`given_template`) instead.
    """

    folder: Path
    template: str | None = None


def given_template(given: str) -> tuple[str, str]:
    """The chat template that a flag names, itself or as a file, and what to call it in errors.

    Raises ConfigError for a file that cannot be read.
    """
    flag = "chat-template"
    if any(mark in given for mark in _TEMPLATE_MARKS):
        return given, f"--{flag}: the template"
    try:
        return Path(given).read_text(encoding="utf-8"), f"--{flag}: {given}"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        text = f"--{flag}: {given} is neither a template ({{{{ or {{%) nor a file that can be read: {reason}"
        raise ConfigError(text, param=flag) from error
