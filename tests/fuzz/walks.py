"""Walks through the masks of a grammar, at random: texts that a model without a mind of its own would write.

The vocabulary is small, so that a walk meets marks and escapes often, and has tokens of several characters,
which reach over the ends of rules.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from eyas.common.grammars.compiler import library

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
        self._closing = {END, *(self.pieces.index(mark) for mark in (b'"', b"}", b"]", b'"}'))}
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
        for place in range(most):
            matcher.fill_next_token_bitmask(mask, 0)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            ids = np.flatnonzero(bits[: len(self.pieces)])
            assert len(ids), f"nothing may follow {text!r}"
            token = self._draw(set(ids.tolist()), hurry=place > most // 3)
            assert matcher.accept_token(token)
            if token == END:
                return text.decode()  # half a character is a fault
            text += self.pieces[token]
        return None

    def _draw(self, ids: set[int], hurry: bool) -> int:
        """One of the ids; in a hurry rather one that ends something."""
        if END in ids and self._rng.random() < 0.3:
            return END
        closing = sorted(ids & self._closing)
        return self._rng.choice(closing if closing and hurry and self._rng.random() < 0.8 else sorted(ids))

    def takes(self, compiled: Any, text: str) -> bool:
        """Whether the grammar lets the text through."""
        matcher = library().GrammarMatcher(compiled)
        return bool(matcher.accept_string(text) and matcher.is_completed())


def campaign(faults: Callable[[int, int], Iterable[str]], what: str | None) -> None:
    """Prints the faults of so many walks, and how many there were."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--walks", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given, count = parser.parse_args(), 0
    for fault in faults(given.walks, given.seed):
        count += 1
        print(fault, flush=True)
    print(count)
