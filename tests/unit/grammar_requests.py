"""A small tokenizer, and requests with grammars over it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models

from eyas.common.grammars.notations import Grammar
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from tests.unit.special_steps import VOCAB

PIECES = ("0", "1", "~", "b", "ab", "{", "}", '"', ":", ",", "[", "]", " ", "a", '":')
"""By id; the model's own end, which is 2, writes what no grammar here holds."""
END = len(PIECES)


def bits(ids: list[int]) -> np.ndarray:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for id in ids:
        words[id // 32] |= np.uint32(1 << id % 32)
    return words.view(np.int32)


def write_tokenizer(folder: Path) -> None:
    """One that writes PIECES."""
    ids = {piece: id for id, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PIECES[0]))
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


def requests() -> list[GenerationRequest]:
    """Held to grammars, with choices and penalties, beside one that is free and drafted for."""
    held = {"stop_token_ids": (END,), "max_tokens": 8}
    bits = SamplingParams(temperature=0.0, grammar=Grammar.regex("(01|10){1,3}"), **held)  # type: ignore[arg-type]
    words = SamplingParams(
        temperature=0.9, seed=4, logprobs=1, grammar=Grammar.choice(["ab", "ba", "abba"]), **held
    )  # type: ignore[arg-type]
    pairs = SamplingParams(
        temperature=0.8, seed=7, repetition_penalty=1.2, grammar=Grammar.json_schema(PAIR), **held
    )  # type: ignore[arg-type]
    free = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    return [
        GenerationRequest("bits", (1, 2, 3, 4, 5), bits),
        GenerationRequest("words", tuple(range(14)) * 2, words, (RequestChoice(0), RequestChoice(1))),
        GenerationRequest("pairs", (7, 7, 7), pairs),
        GenerationRequest("free", (5, 9, 11), free),
    ]


PAIR = {"type": "object", "properties": {"a": {"enum": [0, 1]}}, "required": ["a"]}
