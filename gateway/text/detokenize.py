"""Converts token ids to text incrementally, without ever returning a part of a character.

If a text is the concatenation of its tokens' bytes (byte-level and SentencePiece models), a `ByteDetokenizer`
decodes them incrementally as UTF-8 and holds back an unfinished character. Other texts are streamed by the
`tokenizers` library (`LibraryDetokenizer`), or returned at the end if no earlier part is final. The parts of
a text join to the same string for every split of the ids.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

from tokenizers import Tokenizer as HFTokenizer
from tokenizers.decoders import DecodeStream

from eyas.common.tokenizers.vocabulary import compile_decoder, decoder_of

_CONTEXT = 16  # tokens before a text that can change its beginning


_CLEANED = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " ' ": "'",
    " n't": "n't",
    " 'm": "'m",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}
"""The replacements of `clean_up_tokenization_spaces`, in transformers' order."""


class CleanUp:
    """Removes the spaces that some tokenizers write before English punctuation, from a text in parts.

    Applies the replacements of `_CLEANED` sequentially. Text that may still change is held back, so that the
    output joins to the same string for every split of the input.
    """

    __slots__ = ("_stages",)

    def __init__(self) -> None:
        self._stages = [_TextReplacer(pattern, content) for pattern, content in _CLEANED.items()]

    def feed(self, text: str) -> str:
        """Takes a part of the text; returns the text that can no longer change."""
        for stage in self._stages:
            text = stage.feed(text)
        return text

    def flush(self) -> str:
        """Returns the rest at the end of a text, or of a part that was shown as a whole."""
        text = ""
        for stage in self._stages:
            text = stage.feed(text) + stage.flush()
        return text


class _TextReplacer:
    """Incremental `str.replace` of a `pattern` that is not empty."""

    __slots__ = ("_content", "_pattern", "_pending")

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._pending = ""  # possibly the beginning of a pattern

    def feed(self, text: str) -> str:
        *done, last = (self._pending + text).split(self._pattern)
        end = len(last) - self._partial_length(last)
        self._pending = last[end:]
        return self._content.join([*done, last[:end]])

    def flush(self) -> str:
        pending, self._pending = self._pending, ""
        return pending

    def _partial_length(self, text: str) -> int:
        """The length of the longest beginning of the pattern with which `text` ends."""
        longest = min(len(self._pattern) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(self._pattern[:n])), 0)


class _TokenTexts(dict[int, str | None]):
    """The texts of tokens, by id; None for an unknown id and for a token with an incomplete character.

    Filled on first use and shared by all streams.
    """

    def __init__(self, entries: Sequence[bytes]) -> None:
        self._entries = entries

    def __missing__(self, id: int) -> str | None:
        if not 0 <= id < len(self._entries):
            return None
        try:
            self[id] = text = self._entries[id].decode()
        except UnicodeDecodeError:
            self[id] = text = None
        return text


_NEVER = _TokenTexts(())


class TokenBytes:
    """The bytes that each id adds to a text; none for special tokens and unknown ids.

    `decoder` is None for a tokenizer whose text is only known at its end. `cleans_up`: texts pass through
    `CleanUp`.
    """

    def __init__(self, tokenizer: HFTokenizer, *, clean_up: bool) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.hf = tokenizer
        self.decoder = compile_decoder(decoder_of(tokenizer), vocabulary)
        self.cleans_up = clean_up
        self._names = [tokenizer.id_to_token(id) for id in range(max(vocabulary.values(), default=-1) + 1)]
        to_bytes = self.decoder.piece if self.decoder else str.encode
        self._shown = [b"" if name is None else to_bytes(name) for name in self._names]
        added = tokenizer.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        self._table = [b"" if id in self._special else data for id, data in enumerate(self._shown)]
        self._alone = {True: _TokenTexts(self._table), False: _TokenTexts(self._shown)}
        self._views: dict[frozenset[str], TokenBytes] = {}

    def special_id(self, name: str) -> int | None:
        """The id of the special token of this name; None if there is none."""
        return next((id for id in self._special if self._names[id] == name), None)

    def showing(self, names: frozenset[str]) -> TokenBytes:
        """Returns this table with the special tokens of these names shown like other tokens. Cached."""
        if names not in self._views:
            view = copy.copy(self)
            view._special = {id for id in self._special if self._names[id] not in names}
            view._table = [b"" if id in view._special else data for id, data in enumerate(self._shown)]
            view._alone = self._alone | {True: _TokenTexts(view._table)}
            self._views[names] = view
        return self._views[names]

    def __len__(self) -> int:
        return len(self._table)

    def entries(self, skip_special: bool) -> list[bytes]:
        """Returns the bytes that each id adds to a text."""
        return self._table if skip_special else self._shown

    def alone(self, skip_special: bool) -> Mapping[int, str | None]:
        """Returns the text of each token by id; None if it depends on its neighbours."""
        return self._alone[skip_special]

    def piece(self, id: int, skip_special: bool) -> str | None:
        """The vocabulary's entry for `id`; None for an unknown id and for a skipped special token."""
        if not 0 <= id < len(self._names) or (skip_special and id in self._special):
            return None
        return self._names[id]

    def context(self, ids: Sequence[int], skip_special: bool) -> list[int]:
        """The last of `ids` that are shown, at most `_CONTEXT`: those that can change the following text."""
        parts = (id for id in reversed(ids) if self.piece(id, skip_special) is not None)
        return [*islice(parts, _CONTEXT)][::-1]

    def detokenizer(self, context: Sequence[int], skip_special: bool) -> Detokenizer:
        """Returns a detokenizer that continues the text of `context`; () for a new text."""
        if self.decoder is not None and self.decoder.joined:
            return ByteDetokenizer(self, context, skip_special)
        return LibraryDetokenizer(self, context, skip_special)

    def label(self, id: int) -> tuple[str, bytes]:
        """The text (the name of a special token) and the bytes of a single token."""
        known = 0 <= id < len(self._names)
        data = self._table[id] or (self._names[id] or "").encode() if known else b""
        return data.decode("utf-8", "replace"), data


class Detokenizer(Protocol):
    """Converts the tokens of one choice to text incrementally."""

    __slots__ = ()

    alone: Mapping[int, str | None]
    """The text of the next token by its id, if feeding the token would not change the state; None: feed
    it.
    """

    def feed(self, ids: Sequence[int]) -> str:
        """Returns the characters that these tokens complete (often a word per token, sometimes none)."""
        ...

    def flush(self) -> str:
        """Ends the text; an unfinished character becomes U+FFFD."""
        ...


class ByteDetokenizer(Detokenizer):
    """Detokenizes texts that are the concatenation of their tokens' bytes."""

    __slots__ = ("_clean_up", "_entries", "_left", "_partial", "_settled", "_strip", "alone")

    def __init__(self, table: TokenBytes, context: Sequence[int], skip_special: bool) -> None:
        """`table`: with a decoder that joins bytes."""
        assert table.decoder is not None
        self._entries = table.entries(skip_special)
        self._clean_up = CleanUp() if table.cleans_up else None
        self._strip, count = table.decoder.stripped
        self._left = count  # the number of `_strip` still to remove from the beginning of the text
        self._partial = b""  # the first bytes of an unfinished character
        self.alone: Mapping[int, str | None] = _NEVER
        self._settled = table.alone(skip_special)
        self._settle()
        if context:
            self.feed(table.context(context, skip_special))
            if self._clean_up is not None:
                self._clean_up.flush()  # the caller has that text already

    def feed(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and (alone := self.alone[ids[0]]) is not None:
            return alone
        entries, known = self._entries, len(self._entries)
        parts = [self._partial]
        for id in ids:  # a comprehension would cost twice as much for one token, and most steps have one
            if 0 <= id < known:
                parts.append(entries[id])
        data = b"".join(parts)
        try:
            text, self._partial = data.decode(), b""
        except UnicodeDecodeError:  # it ends inside a character, or has bytes that belong to none
            text, used = codecs.utf_8_decode(data, "replace", False)
            self._partial = data[used:]
        text = self._cleaned(text)
        self._settle()
        return text

    def flush(self) -> str:
        text, self._partial = self._cleaned(self._partial.decode(errors="replace")), b""
        self._settle()
        return text if self._clean_up is None else text + self._clean_up.flush()

    def _cleaned(self, text: str) -> str:
        """Strips the beginning of the text and cleans it up."""
        if self._left and text:
            rest = text.lstrip(self._strip)
            taken = min(len(text) - len(rest), self._left)
            self._left = 0 if rest else self._left - taken
            text = text[taken:]
        return text if self._clean_up is None else self._clean_up.feed(text)

    def _settle(self) -> None:
        depends = self._partial or self._left or self._clean_up is not None
        self.alone = _NEVER if depends else self._settled


class LibraryDetokenizer(Detokenizer):
    """Detokenizes texts whose tokens depend on their neighbours."""

    alone = _NEVER

    def __init__(self, table: TokenBytes, context: Sequence[int], skip_special: bool) -> None:
        """`table`: if it has no decoder, the whole text is returned at the end."""
        self._table = table
        self._skip_special = skip_special
        self._clean_up = CleanUp() if table.cleans_up else None
        self._ids = table.context(context, skip_special)
        self._length = len(self._whole())  # of the text so far
        self._stream = DecodeStream(ids=self._ids) if table.decoder is not None else None

    def feed(self, ids: Sequence[int]) -> str:
        shown = [id for id in ids if self._table.piece(id, self._skip_special) is not None]
        self._ids += shown
        parts = [] if self._stream is None else [self._stream.step(self._table.hf, id) for id in shown]
        return self._advance("".join(part for part in parts if part is not None))

    def flush(self) -> str:
        text = self._advance(self._whole()[self._length :])
        return text if self._clean_up is None else text + self._clean_up.flush()

    def _advance(self, text: str) -> str:
        self._length += len(text)
        return text if self._clean_up is None else self._clean_up.feed(text)

    def _whole(self) -> str:
        return self._table.hf.decode(self._ids, skip_special_tokens=False) if self._ids else ""
