"""A chat on a terminal: answers appear as they come, with what each one cost.

It knows the SDK and a stream of text to write to. It refuses to know how the server is started.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from eyas.client.aio import AsyncClient
from eyas.client.types import Message, Options, Usage
from eyas.common.errors import EyasError

TIMEOUT_S = 120.0  # one answer


@dataclass(frozen=True)
class Told:
    """An answer that was shown, and its figures. Times in seconds, from sending the question."""

    text: str
    usage: Usage
    first_s: float
    total_s: float

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first, which is the prompt's."""
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


async def tell(client: AsyncClient, messages: Sequence[Message], **options: Unpack[Options]) -> Told:
    """Writes the answer to standard output as it comes. Raises EyasError if the call fails."""
    began = time.monotonic()
    first_s = 0.0
    text = ""
    async with client.chat_stream(messages, timeout_s=TIMEOUT_S, **options) as stream:
        async for delta in stream:
            first_s = first_s or time.monotonic() - began
            text += delta.text
            print(delta.text, end="", flush=True)
    print(flush=True)
    return Told(text, stream.usage or Usage(), first_s, time.monotonic() - began)


def chat(target: str, api_key: str | None, temperature: float) -> int:
    """Asks, answers, remembers, until end of input (0) or Ctrl-C. A failed answer is said and forgotten."""
    messages: list[Message] = []
    with asyncio.Runner() as runner:
        client = runner.run(_connect(target, api_key))
        try:
            while question := _ask():
                messages.append({"role": "user", "content": question})
                try:
                    told = runner.run(tell(client, messages, temperature=temperature))
                except EyasError as error:
                    print(f"eyas: {error}", file=sys.stderr)
                    messages.pop()
                    continue
                print(f"({told})")
                messages.append({"role": "assistant", "content": told.text})
        finally:
            runner.run(client.aclose())
    return 0


async def _connect(target: str, api_key: str | None) -> AsyncClient:
    return AsyncClient(target, api_key=api_key)


def _ask() -> str | None:
    """The next line that is not empty; None at the end of input."""
    try:
        while not (line := input("> ").strip()):
            pass
        return line
    except EOFError:
        return None
