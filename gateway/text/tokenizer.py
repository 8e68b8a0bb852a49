"""The model's tokenizer, loaded from a Hugging Face folder without torch or transformers.

Callers check lengths and limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer as HFTokenizer

from eyas.common.errors import InvalidRequest
from eyas.common.machine.memory import give_back
from eyas.common.tokenizers.source import read_tokenizer
from gateway.text.caller_text import CallerText, unsigned
from gateway.text.detokenize import Detokenizer, TokenBytes
from gateway.text.rendering import TemplateRenderer
from gateway.text.templates import ChatTemplate, Message, TemplateCuts
from gateway.text.tokenizer_files import (
    cleans_up,
    load_chat_template,
    name_special_tokens,
)

Done = TypeVar("Done")
MANY_MESSAGES = 1000
"""A chat with this number of messages is searched for control tokens in a thread: it takes some 10 ms."""
_LONG_TEXT = 16_384  # characters from which a text is tokenized in a thread, so that other streams continue
_HUGE_TEXT = 1 << 18
"""Characters from which texts are tokenized sequentially: each may take seconds, and some hundred bytes of
memory per character."""


class Tokenizer:
    """Converts text to token ids and back for one model. Immutable; shared by all requests."""

    def __init__(
        self,
        hf: HFTokenizer,
        template: ChatTemplate | None = None,
        *,
        clean_up: bool = False,
        trust_special_tokens: bool = False,
    ) -> None:
        """`clean_up`: texts lose the spaces that some tokenizers write before English punctuation.
        `trust_special_tokens`: special tokens are recognised in all texts of chats, as in other servers.
        """
        self._hf = hf
        cuts = TemplateCuts() if template is None else template.cuts
        self._callers = None if trust_special_tokens else CallerText(hf, cuts)
        self.template = template
        self._renderer = None if template is None else TemplateRenderer(template)
        self._long = ThreadPoolExecutor(2, "tokenize")
        self._huge = ThreadPoolExecutor(1, "tokenize-huge")
        self.table = TokenBytes(hf, clean_up=clean_up)

    @classmethod
    def load(
        cls, folder: str | Path, *, template: str | None = None, trust_special_tokens: bool = False
    ) -> Tokenizer:
        """The tokenizer of a folder in any form that `read_tokenizer` reads (and, for chat, its template).
        `template`: a file instead of that.

        Raises ConfigError if there is none, or a file cannot be used.
        """
        path = Path(folder)
        hf = read_tokenizer(path)
        hf.no_truncation()
        hf.no_padding()
        name_special_tokens(hf, path)
        return cls(
            hf,
            load_chat_template(path, template),
            clean_up=cleans_up(hf, path),
            trust_special_tokens=trust_special_tokens,
        )

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The ids of `text`; `special` adds the tokens that the model expects around it."""
        # The batch form releases the GIL while it works, the plain one does not.
        return tuple(self._hf.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a completion's prompt."""
        return await self._encode(text, special=add_special_tokens)

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special: bool = False,
    ) -> tuple[str, tuple[int, ...]]:
        """The prompt for the next assistant message, or for the rest of the last one, and its ids.

        It has the special tokens of the template; `special` adds those around a text. Text of the caller
        never becomes a special token (`caller_text`), unless it is trusted. See `ChatTemplate.render` for the
        other arguments.

        Raises InvalidRequest if there is no chat template, or it refuses the messages or fails on them.
        """
        if self._renderer is None:
            raise InvalidRequest("the model has no chat template: use /v1/completions", param="messages")
        sign = ""
        if self._callers is not None:
            job = partial(self._callers.signed, (messages, template_kwargs, tools))
            is_long = len(messages) >= MANY_MESSAGES
            chat, sign = await self._in_thread(job) if is_long else job()
            messages, template_kwargs, tools = chat
        text = await self._renderer.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
        )
        if self._callers is None or not sign:
            return text, await self.encode_prompt(text, add_special_tokens=special)
        encode = partial(self._callers.encode, text, sign)
        ids = await asyncio.get_running_loop().run_in_executor(self._huge, encode)
        before, after = self._around() if special else ((), ())
        return unsigned(text, sign), (*before, *ids, *after)

    async def encode_chat(
        self, messages: Sequence[Message], *, continue_final_message: bool = False
    ) -> tuple[int, ...]:
        """The ids of `chat_prompt`."""
        _, ids = await self.chat_prompt(messages, continue_final_message=continue_final_message)
        return ids

    async def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The ids of each word at the beginning of a text and after a space, without duplicates."""
        return await asyncio.to_thread(self._spellings, words)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(ids) + detokenizer.flush()

    def special_id(self, name: str) -> int | None:
        """The id of the special token of this name; None if there is none."""
        return self.table.special_id(name)

    def detokenizer(
        self, context: Sequence[int] = (), *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> Detokenizer:
        """A detokenizer for text that continues the text of `context`; () for a new text.

        `shown`: names of special tokens that are shown even if others are skipped.
        """
        table = self.table.showing(frozenset(shown)) if shown and skip_special_tokens else self.table
        return table.detokenizer(context, skip_special_tokens)

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the model expects before and after a text."""
        text, whole = self.encode("x", special=False), self.encode("x")
        starts = range(len(whole) - len(text) + 1)
        start = next((at for at in starts if whole[at : at + len(text)] == text), len(whole))
        return whole[:start], whole[start + len(text) :]

    def _spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        texts = (space + word.lstrip() for word in words for space in ("", " "))
        return tuple(dict.fromkeys(self.encode(text, special=False) for text in texts))

    async def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        if len(text) < _LONG_TEXT:
            return self.encode(text, special=special)
        if len(text) < _HUGE_TEXT:
            return await self._in_thread(partial(self.encode, text, special=special))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._huge, partial(self._encode_huge, text, special=special))

    async def _in_thread(self, work: Callable[[], Done]) -> Done:
        return await asyncio.get_running_loop().run_in_executor(self._long, work)

    def _encode_huge(self, text: str, *, special: bool) -> tuple[int, ...]:
        ids = self.encode(text, special=special)
        give_back()
        return ids
