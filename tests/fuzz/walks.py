"""Walks through the masks of a grammar, at random: texts that a model without a mind of its own would write.

The vocabulary is small, so that a walk meets marks and escapes often, and has tokens of several characters,
which reach over the ends of rules.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from eyas.common.grammar_compiler import library

END = 0
_PIECES = [
    *'abcxyzABC0123456789-+.:,;@/_#~%<>|=&?!*$^()[]{} "\\\n\té😀',
    *("ab", "abc", "bb", "00", "10", "a1", "1b", '",', '":', '"}', "{}", "[]", "  ", "\n  ", '\\"', "\\n"),
    "\\\\",
    *("\\u", "\\u00", "Z", "T", "true", "null", "false", "é1", "b@", "x0", '{"', '["', "a,b", ": ", ", "),
]  # fmt: skip


def vocabulary() -> list[bytes]:
    """What each id writes; id 0 ends a text. Every byte but those of the pieces is a token as well."""
    whole = [piece.encode() for piece in _PIECES]
    return [b"\xff<end>", *whole, *(bytes([byte]) for byte in range(256) if bytes([byte]) not in whole)]


class Walker:
    """Compiles rules for the vocabulary, and walks through them. `rng` draws all."""

    def __init__(self, rng: random.Random) -> None:
        xgrammar = library()
        self.pieces = vocabulary()
        self._rng = rng
        info = xgrammar.TokenizerInfo(
            self.pieces, xgrammar.VocabType.RAW, vocab_size=len(self.pieces), stop_token_ids=[END]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, rules: str) -> Any:
        return self._compiler.compile_grammar(library().Grammar.from_ebnf(rules))

    def walk(self, compiled: Any, most: int = 60) -> str | None:
        """A text that the grammar lets through; None: it did not end within `most` tokens."""
        matcher, text = library().GrammarMatcher(compiled), b""
        mask = np.zeros((1, -(-len(self.pieces) // 32)), np.int32)
        for _ in range(most):
            matcher.fill_next_token_bitmask(mask, 0)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            ids = np.flatnonzero(bits[: len(self.pieces)])
            assert len(ids), f"nothing may follow {text!r}"
            ends = END in ids and self._rng.random() < 0.3
            token = END if ends else int(self._rng.choice(ids.tolist()))
            assert matcher.accept_token(token)
            if token == END:
                return text.decode()  # half a character is a fault
            text += self.pieces[token]
        return None

    def takes(self, compiled: Any, text: str) -> bool:
        """Whether the grammar lets the text through."""
        matcher = library().GrammarMatcher(compiled)
        return bool(matcher.accept_string(text) and matcher.is_completed())
