"""Lines of training data: what a person wrote, as a model's tokens, and which of them an answer is.

A line is a JSON object with `messages` (as OpenAI's chat API takes them), with `prompt` and perhaps
`completion`, or with `text`. A line that cannot be used is a ConfigError that names the line and the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.common.errors import ConfigError, InvalidRequest
from eyas.train.packing import TrainingExample
from gateway.text.templates import ChatTemplate, TooManySteps
from gateway.text.tokenizer import Tokenizer
from gateway.text.tokenizer_files import load_chat_template

KINDS = ("messages", "prompt", "text")
ROLES = ("system", "developer", "user", "assistant", "tool")
Ids = tuple[int, ...]


@dataclass(frozen=True)
class ConversationLine:
    """One line of a file; `where` names it in errors. It has one of `messages`, `prompt` and `text`."""

    where: str
    messages: tuple[dict[str, str], ...] = ()
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None


def read_lines(path: Path, flag: str = "data") -> list[ConversationLine]:
    """All lines but empty ones, of the file that `flag` names.

    Raises ConfigError for the first that is wrong, and for a file that has none.
    """
    try:
        written = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--{flag}: {path} cannot be read: {error}", param=flag) from error
    lines = [
        _line(text, f"{path} line {number}") for number, text in enumerate(written, start=1) if text.strip()
    ]
    if not lines:
        raise ConfigError(f"--{flag}: {path} has no lines", param=flag)
    return lines


def as_chats(chats: Sequence[Sequence[Mapping[str, str]]]) -> list[ConversationLine]:
    """Chats that are in no file."""
    return [ConversationLine(f"chat {i}", messages=tuple(map(dict, chat))) for i, chat in enumerate(chats)]


class ChatTokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder has no tokenizer, or one that cannot be used."""
        self._tokenizer = Tokenizer.load(folder)
        self._template = load_chat_template(folder)

    @property
    def chats(self) -> bool:
        """True if the model has a chat template."""
        return self._template is not None

    def question(self, line: ConversationLine) -> Ids:
        """The text that the target is to answer: the chat up to its last answer, or the prompt; (): there is
        none.
        """
        if line.prompt is not None:
            return self._tokenizer.encode(line.prompt)
        messages = line.messages
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return self._tokenizer.encode(self._chat(line, messages, True), special=False) if messages else ()

    def as_given(self, line: ConversationLine) -> TrainingExample:
        """The line as it is; what the assistant says is the answer, and all of a text.

        Raises ConfigError for a line without an answer.
        """
        if line.text is not None:
            return _example([(self._tokenizer.encode(line.text), True)])
        if line.prompt is not None:
            if line.completion is None:
                raise ConfigError(f"{line.where}: completion is missing, and --keep-answers is given")
            both = self._tokenizer.encode(line.prompt + line.completion)
            prompt_length = len(self._tokenizer.encode(line.prompt))
            return _example([(both[:prompt_length], False), (both[prompt_length:], True)])
        return _example(self._turns(line))

    def _turns(self, line: ConversationLine) -> list[tuple[Ids, bool]]:
        """The chat, cut where answers begin and end: the template's text grows by a turn at a time."""
        pieces: list[tuple[Ids, bool]] = []
        known = ""
        for i, message in enumerate(line.messages):
            if message["role"] != "assistant":
                continue
            prompt = self._chat(line, line.messages[:i], True)
            said = self._chat(line, line.messages[: i + 1], False)
            if not (prompt.startswith(known) and said.startswith(prompt)):
                raise ConfigError(
                    f"{line.where}: messages[{i}]: the chat template writes what came before it anew, "
                    "so answers cannot be kept (leave out --keep-answers)"
                )
            pieces += [(self._encode(prompt[len(known) :]), False), (self._encode(said[len(prompt) :]), True)]
            known = said
        if not pieces:
            raise ConfigError(f"{line.where}: messages has no answer, and --keep-answers is given")
        return pieces

    def _encode(self, text: str) -> Ids:
        return self._tokenizer.encode(text, special=False)

    def _chat(self, line: ConversationLine, messages: Sequence[dict[str, str]], asks: bool) -> str:
        template: ChatTemplate | None = self._template
        if template is None:
            raise ConfigError(f"{line.where}: messages: the target has no chat template")
        try:
            return template.render(messages, add_generation_prompt=asks)
        except (InvalidRequest, TooManySteps) as error:
            raise ConfigError(f"{line.where}: messages: {error}") from error


def answered(question: Sequence[int], answer: Sequence[int]) -> TrainingExample:
    """A question and what the target said to it."""
    return _example([(tuple(question), False), (tuple(answer), True)])


def _example(pieces: Sequence[tuple[Ids, bool]]) -> TrainingExample:
    ids = np.concatenate([np.array(piece, np.int32) for piece, _ in pieces])
    return TrainingExample(ids, np.concatenate([np.full(len(piece), answer) for piece, answer in pieces]))


def _line(text: str, where: str) -> ConversationLine:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: it is not a JSON object")
    kinds = [kind for kind in KINDS if kind in value]
    if len(kinds) != 1:
        listed = " and ".join(kinds) or "none of them"
        raise ConfigError(f"{where}: one of {', '.join(KINDS)} is needed, and it has {listed}")
    if kinds == ["messages"]:
        return ConversationLine(where, messages=_messages(value["messages"], where))
    for key in (kinds[0], "completion"):
        if key in value and (not isinstance(value[key], str) or not value[key]):
            raise ConfigError(f"{where}: {key} is not a text")
    return ConversationLine(
        where, prompt=value.get("prompt"), completion=value.get("completion"), text=value.get("text")
    )


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: messages is not a list of messages")
    for i, message in enumerate(value):
        name = f"{where}: messages[{i}]"
        if not isinstance(message, dict):
            raise ConfigError(f"{name} is not a JSON object")
        if message.get("role") not in ROLES:
            raise ConfigError(f"{name}.role is {message.get('role')!r}, and none of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ConfigError(f"{name}.content is not a text")
    if value[0]["role"] == "assistant" and len(value) == 1:
        raise ConfigError(f"{where}: messages asks nothing: its only message is the assistant's")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)
