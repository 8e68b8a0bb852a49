"""A chat on a terminal: answers appear as they come, with what each one cost.

Markdown is drawn as it comes; where no person looks, the bare text is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from eyas.client.aio import AsyncClient
from eyas.client.reach import ServerAddress, grpc_target
from eyas.client.types import Message, Options, Usage
from eyas.common.errors import EyasError

TIMEOUT_S = 120.0  # one answer
HELP = """\
/clear  forget what was said
/help   this list
/exit   leave (Ctrl-D too)
Ctrl-C  stop the answer"""
FENCES = ("```", "~~~")


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class ShownAnswer:
    """An answer that was shown, and its figures. Times in seconds, from sending the question."""

    text: str
    usage: Usage
    first_s: float
    total_s: float

    @property
    def tokens_per_second(self) -> float:
        """The speed of the tokens after the first, which is the prompt's."""
        spent = self.total_s - self.first_s
        return (self.usage.completion_tokens - 1) / spent if spent > 0 else 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step, its own token included; None if nothing was drafted."""
        steps = self.usage.verify_steps
        return (self.usage.accepted_prediction_tokens + steps) / steps if steps else None

    def __str__(self) -> str:
        parts = [f"{self.usage.completion_tokens} tokens", f"{self.tokens_per_second:.0f} tokens/s"]
        parts.append(f"first token after {1e3 * self.first_s:.0f} ms")
        if self.acceptance_length is not None:
            drafted = self.usage.accepted_prediction_tokens + self.usage.rejected_prediction_tokens
            parts.append(f"acceptance length {self.acceptance_length:.2f}")
            parts.append(f"{self.usage.accepted_prediction_tokens} of {drafted} drafts accepted")
        if self.usage.synthetic:
            parts.append("accepted by chance: the answer means nothing")
        return ", ".join(parts)


async def tell(
    client: AsyncClient, messages: Sequence[Message], prose: AnswerWriter, **options: Unpack[Options]
) -> ShownAnswer:
    """Writes the answer to `prose` as it comes, and closes that. Raises EyasError if the call fails."""
    began = time.monotonic()
    first_s = 0.0
    try:
        async with client.chat_stream(messages, timeout_s=TIMEOUT_S, **options) as stream:
            async for delta in stream:
                first_s = first_s or time.monotonic() - began
                prose.write(delta.text)
    finally:
        prose.close()
    return ShownAnswer(prose.text, stream.usage, first_s, time.monotonic() - began)


def chat(server: ServerAddress, temperature: float, model: str = "") -> int:
    """Asks, answers, remembers, until end of input; returns the exit code. `model`: the name of the model, or
    of one of its adapters; "": the model.

    Prompts, Markdown and commands are for a person, who has seen every answer that failed: the code is 0.
    With a pipe at either end each line is a question, each answer bare text, and the code is 1 if the last
    answer failed. Raises EyasError if no server is there.
    """
    target = grpc_target(server)
    with asyncio.Runner() as runner:
        client = runner.run(_connect(target, server, model))
        try:
            talk = TerminalChat(runner, client, temperature)
            return _with_person(talk) if sys.stdin.isatty() and sys.stdout.isatty() else _with_pipe(talk)
        finally:
            runner.run(client.aclose())


async def _connect(target: str, server: ServerAddress, model: str) -> AsyncClient:
    return AsyncClient(target, model=model, api_key=server.api_key, ca=server.ca)


class TerminalChat:
    """The conversation so far, and the next answer. Figures and errors go to standard error."""

    def __init__(self, runner: asyncio.Runner, client: AsyncClient, temperature: float) -> None:
        self._runner = runner
        self._client = client
        self._temperature = temperature
        self._messages: list[Message] = []

    def clear(self) -> None:
        """Forgets all messages: the next question begins a new conversation."""
        self._messages.clear()

    def answer(self, question: str, prose: AnswerWriter) -> bool:
        """False for an answer that failed: it is said and forgotten.

        Ctrl-C ends the answer and raises KeyboardInterrupt; what was shown of it is remembered.
        """
        self._messages.append({"role": "user", "content": question})
        try:
            answer = tell(self._client, self._messages, prose, temperature=self._temperature)
            print(f"({self._runner.run(answer)})", file=sys.stderr)
        except EyasError as error:
            print(f"eyas: {visible(str(error))}", file=sys.stderr)
            self._messages.pop()
            return False
        except KeyboardInterrupt:
            self._messages.append({"role": "assistant", "content": prose.text})
            raise
        self._messages.append({"role": "assistant", "content": prose.text})
        return True


def _with_pipe(talk: TerminalChat) -> int:
    answered = True
    for line in sys.stdin:
        if question := line.strip():
            answered = talk.answer(question, PlainProse())
    return 0 if answered else 1


def _with_person(talk: TerminalChat) -> int:
    import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]  (editing and history for input())

    console = Console(highlight=False)
    print("/help shows what you can type.")
    while (question := _ask()) not in (None, "/exit"):
        if question == "/help":
            print(HELP)
        elif question == "/clear":
            talk.clear()
        elif question.startswith("/"):
            print(f"{question.split()[0]} is no command: /help lists them", file=sys.stderr)
        else:
            with _stoppable():
                talk.answer(question, MarkdownProse(console))
    return 0


def _ask() -> str | None:
    """The next line that is not empty; None at the end of input."""
    while True:
        try:
            if line := input("> ").strip():
                return line
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")


@contextlib.contextmanager
def _stoppable() -> Generator[None, None, None]:
    """Ctrl-C inside ends only what runs inside."""
    try:
        yield
    except KeyboardInterrupt:
        print("(stopped)", file=sys.stderr)


def visible(text: str) -> str:
    """The text with every character shown that a terminal would obey: an answer must not move its cursor,
    set its title or turn its lines around.
    """
    return _CONTROLS.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class AnswerWriter(Protocol):
    """The writer of an answer: `write` as it comes, `close` at its end. `text` is all of it so far."""

    text: str

    def write(self, text: str) -> None:
        """Adds the next part of the answer."""
        ...

    def close(self) -> None:
        """Ends the answer. Nothing is written after this."""
        ...


class PlainProse:
    """The text as it is, for pipes and files; on a terminal what that would obey is shown."""

    def __init__(self) -> None:
        self.text: str = ""

    def write(self, text: str) -> None:
        """Prints the part at once."""
        self.text += text
        print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)

    def close(self) -> None:
        """Ends the last line."""
        print(flush=True)


class MarkdownProse:
    """Finished blocks are printed for good; only the last, unfinished one is redrawn as it grows."""

    def __init__(self, console: Console) -> None:
        self.text: str = ""
        self._open = ""  # the block that may still grow
        self._live = Live(console=console, transient=True, refresh_per_second=12)
        self._live.start()

    def write(self, text: str) -> None:
        """Prints the blocks that the part completes, and redraws the unfinished one."""
        self.text += text
        whole, self._open = split_blocks(self._open + visible(text))
        if whole:
            self._live.console.print(Markdown(whole))
        self._live.update(Markdown(self._open))

    def close(self) -> None:
        """Prints the last block for good."""
        self._live.stop()
        self._live.console.print(Markdown(self._open))


def split_blocks(text: str) -> tuple[str, str]:
    """(blocks that can no longer change, the rest). A block ends at an empty line outside a code fence."""
    fence, end, at = "", 0, 0
    for line in text.splitlines(keepends=True):
        at += len(line)
        mark = next((mark for mark in FENCES if line.lstrip().startswith(mark)), "")
        if mark and (not fence or fence == mark):
            fence = "" if fence else mark
        elif not fence and not line.strip() and line.endswith("\n"):
            end = at
    return text[:end], text[end:]
