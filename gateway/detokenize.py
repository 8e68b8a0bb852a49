"""Turns token ids into text as they arrive, without ever showing half a character.

Every token stands for some bytes, and the text is these bytes joined. A `TokenBytes` table holds the bytes of
each id; a `Detokenizer` feeds them to an incremental UTF-8 decoder, which holds back an unfinished character.
However a list of ids is cut, the parts of its text join to the same string. This module refuses to know
requests and stop strings.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Mapping, Sequence
from itertools import islice

from tokenizers import Tokenizer as HFTokenizer

from eyas.common.decoders import StreamedDecoder, compile_decoder, decoder_of
from eyas.common.text_stages import TextStage, clean_up_stages

_CONTEXT = 16  # tokens before a text that can change how it begins


class _Alone(dict[int, str | None]):
    """By id: the text of a token that stands alone; None for one with half a character, and for unknown ids.

    It is filled as it is asked, so that streams share what they see.
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


_NEVER = _Alone(())


class TokenBytes:
    """What each id contributes to a text, in bytes: nothing for special tokens and unknown ids.

    `decoder` is None for a tokenizer whose text is only known at its end.
    """

    def __init__(self, tokenizer: HFTokenizer, *, clean_up: bool) -> None:
        """`clean_up`: texts lose the spaces that some tokenizers write before English punctuation."""
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.hf = tokenizer
        self.decoder = compile_decoder(decoder_of(tokenizer), vocabulary)
        self._clean_up = clean_up
        self._names = [tokenizer.id_to_token(id) for id in range(max(vocabulary.values(), default=-1) + 1)]
        to_bytes = self.decoder.piece if self.decoder else str.encode
        self._shown = [b"" if name is None else to_bytes(name) for name in self._names]
        added = tokenizer.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        self._table = [b"" if id in self._special else data for id, data in enumerate(self._shown)]
        self._alone = {True: _Alone(self._table), False: _Alone(self._shown)}
        self._views: dict[frozenset[str], TokenBytes] = {}

    def special_id(self, name: str) -> int | None:
        """The id of the special token of this name; None if there is none."""
        return next((id for id in self._special if self._names[id] == name), None)

    def showing(self, names: frozenset[str]) -> TokenBytes:
        """This table, but special tokens of these names show as any other token does. It is made once."""
        if names not in self._views:
            view = copy.copy(self)
            view._special = {id for id in self._special if self._names[id] not in names}
            view._table = [b"" if id in view._special else data for id, data in enumerate(self._shown)]
            view._alone = self._alone | {True: _Alone(view._table)}
            self._views[names] = view
        return self._views[names]

    def __len__(self) -> int:
        return len(self._table)

    def entries(self, skip_special: bool) -> list[bytes]:
        """What each id contributes after others."""
        return self._table if skip_special else self._shown

    def alone(self, skip_special: bool) -> Mapping[int, str | None]:
        """By id: the text of a token after others, None where it cannot be told from the token alone."""
        return self._alone[skip_special]

    def piece(self, id: int, skip_special: bool) -> str | None:
        """The vocabulary's entry for `id`; None for an unknown id and for special tokens that are skipped."""
        if not 0 <= id < len(self._names) or (skip_special and id in self._special):
            return None
        return self._names[id]

    def context(self, ids: Sequence[int], skip_special: bool) -> list[int]:
        """The last of `ids` that show in a text: as many as can change how the next text begins."""
        parts = (id for id in reversed(ids) if self.piece(id, skip_special) is not None)
        return [*islice(parts, _CONTEXT)][::-1]

    def stages(self) -> list[TextStage]:
        """New stages, for one new text."""
        stages = [make() for make in self.decoder.stages] if self.decoder else []
        return [*stages, *clean_up_stages()] if self._clean_up else stages

    def label(self, id: int) -> tuple[str, bytes]:
        """How one token is shown alone: its text (a special token's name) and its bytes."""
        known = 0 <= id < len(self._names)
        data = self._table[id] or (self._names[id] or "").encode() if known else b""
        return data.decode("utf-8", "replace"), data


class Detokenizer:
    """The text of one choice, as its tokens come."""

    __slots__ = (
        "_alone",
        "_decoder",
        "_entries",
        "_last",
        "_needs_pieces",
        "_partial",
        "_skip_special",
        "_stages",
        "_table",
    )

    def __init__(
        self, table: TokenBytes, decoder: StreamedDecoder, context: Sequence[int], skip_special: bool
    ) -> None:
        """`context`: ids whose text this one continues; () for a text of its own."""
        self._table = table
        self._decoder = decoder
        self._skip_special = skip_special
        self._entries = table.entries(skip_special)
        self._stages = table.stages()
        self._partial = b""  # the first bytes of an unfinished character
        self._last: str | None = None  # the last piece, while the bytes depend on it
        self._needs_pieces = decoder.distinct or decoder.first_piece is not None
        self._alone: Mapping[int, str | None] = _NEVER  # while the text depends on what is before it
        self._settle()
        if context:
            self._follow(context)

    def feed(self, ids: Sequence[int]) -> str:
        """The characters that these tokens completed (often one word each, sometimes none)."""
        if len(ids) == 1 and not self._partial and (alone := self._alone[ids[0]]) is not None:
            return alone
        parts = [self._partial]
        if self._needs_pieces:
            parts += self._pieces(ids)
        else:
            entries, known = self._entries, len(self._entries)
            for id in ids:  # a comprehension would cost twice as much for one token, and most steps have one
                if 0 <= id < known:
                    parts.append(entries[id])
        data = b"".join(parts)
        try:
            text, self._partial = data.decode(), b""
        except UnicodeDecodeError:  # it ends inside a character, or has bytes that belong to none
            text, used = codecs.utf_8_decode(data, "replace", False)
            self._partial = data[used:]
        for stage in self._stages:
            text = stage.feed(text)
        return text

    def flush(self) -> str:
        """Ends the text: a character still unfinished becomes U+FFFD."""
        text, self._partial = self._partial.decode(errors="replace"), b""
        for stage in self._stages:
            text = stage.feed(text) + stage.flush()
        return text

    def _follow(self, context: Sequence[int]) -> None:
        """Feeds the text before this one without giving it out: the caller has it already."""
        self.feed(self._table.context(context, self._skip_special))
        rest = ""
        for stage in self._stages:
            rest = stage.feed(rest) + stage.settle()

    def _pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each of `ids` where they depend on the pieces before."""
        parts = []
        for id in ids:
            piece = self._table.piece(id, self._skip_special)
            if piece is None or (self._decoder.distinct and piece == self._last):
                continue
            first = self._decoder.first_piece if self._last is None else None
            parts.append(self._entries[id] if first is None else first(piece))
            self._last = piece
        self._needs_pieces = self._decoder.distinct or self._last is None
        self._settle()
        return parts

    def _settle(self) -> None:
        if not (self._needs_pieces or self._stages):
            self._alone = self._table.alone(self._skip_special)


class LateDetokenizer:
    """The text of one choice for a tokenizer whose text is only known at its end."""

    def __init__(self, table: TokenBytes, context: Sequence[int], skip_special: bool) -> None:
        self._table = table
        self._skip_special = skip_special
        self._context = table.context(context, skip_special)
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        """Takes the tokens; the text stays empty until `flush`."""
        self._ids += ids
        return ""

    def flush(self) -> str:
        """The whole text."""
        return self._text([*self._context, *self._ids])[len(self._text(self._context)) :]

    def _text(self, ids: Sequence[int]) -> str:
        shown = [id for id in ids if self._table.piece(id, self._skip_special) is not None]
        text = self._table.hf.decode(shown, skip_special_tokens=False)
        for stage in self._table.stages():
            text = stage.feed(text) + stage.flush()
        return text
