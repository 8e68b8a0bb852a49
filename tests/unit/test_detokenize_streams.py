"""Random streams of tokens: their text is the whole text's, and the library's wherever it streams them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizer_families import FAMILIES, LINES
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.decoders import DecodeStream

from eyas.common.config import NANO
from eyas.common.params import SamplingParams
from eyas.common.tokenizers.source import read_tokenizer
from eyas.common.types import FinishCause, GenerationRequest, TokenEntry
from gateway.text.entries import ChoiceText, TextRules
from gateway.text.tokenizer import Tokenizer
from tests.unit.tokenizer_sources import sentence_model, tekken

TEXTS = [
    *LINES[:5],
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 e\u0301\u0323 \ufffd \ufb01",
    "  two before, <s> and <think>two</think> after  ",
    "ab  \u00e9 ba<own>",
]
STREAMS = 150


@cache
def tokenizer_of(name: str) -> HFTokenizer:
    if name == "nano":
        return HFTokenizer.from_file(str(NANO / "tokenizer.json"))
    made = HFTokenizer.from_str(FAMILIES[name]().to_str())
    made.add_tokens([AddedToken("<added>", special=False), AddedToken(" spaced ", special=False)])
    made.add_special_tokens(["<|hidden|>"])
    return made


def streams(hf: HFTokenizer, rng: random.Random) -> Iterator[list[int]]:
    """Whole texts, pieces of texts behind each other, and any ids, unknown ones too."""
    size = hf.get_vocab_size(with_added_tokens=True)
    encoded = [hf.encode(text).ids for text in TEXTS]
    yield from encoded
    for _ in range(STREAMS):
        yield [rng.randrange(size + 2) for _ in range(rng.randrange(1, 40))]
        parts = []
        for _ in range(rng.randrange(1, 7)):
            ids = rng.choice(encoded)
            start = rng.randrange(len(ids) or 1)
            parts += ids[start : start + rng.randrange(1, 9)]
        yield parts


def streamed(tokenizer: Tokenizer, ids: Sequence[int], skip: bool, rng: random.Random) -> str:
    detokenizer, start, parts = tokenizer.detokenizer(skip_special_tokens=skip), 0, []
    while start < len(ids):
        end = start + rng.choice([1, 1, 1, 4])
        parts.append(detokenizer.feed(ids[start:end]))
        start = end
    return "".join([*parts, detokenizer.flush()])


def library_streamed(hf: HFTokenizer, ids: Sequence[int], skip: bool) -> str | None:
    """What `DecodeStream` gives; it has no end, so what it holds back behind a broken character stays in it.

    None: it raises, as it does for a text whose beginning changes.
    """
    stream = DecodeStream(skip_special_tokens=skip)
    with contextlib.suppress(Exception):
        return "".join(stream.step(hf, id) or "" for id in ids)
    return None


def check(hf: HFTokenizer, whole_runs: bool) -> None:
    """`whole_runs`: the library marks every byte of a run of byte tokens if one of them is broken. Then the
    text is that of the bytes.
    """
    tokenizer, rng, compared = Tokenizer(hf), random.Random(0), 0
    for ids in streams(hf, rng):
        for skip in (True, False):
            text, whole = streamed(tokenizer, ids, skip, rng), hf.decode(ids, skip_special_tokens=skip)
            if whole_runs and "\ufffd" in whole:
                entries = tokenizer.table.entries(skip)
                data = b"".join(entries[id] for id in ids if id < len(entries))
                assert text in (joined := data.decode(errors="replace"), joined.removeprefix(" "))
                continue
            assert text == whole
            theirs = library_streamed(hf, ids, skip)
            assert theirs is not None and text.startswith(theirs)
            assert text == theirs or text.endswith("\ufffd")
            compared += 1
    assert compared > STREAMS / 2


@pytest.mark.parametrize("name", [*FAMILIES, "nano"])
def test_streams_have_the_text_of_the_whole(name: str) -> None:
    check(tokenizer_of(name), whole_runs=name in ("llama2", "mistral", "gemma"))


def test_converted_tokenizers_stream_alike(tmp_path: Path) -> None:
    """Those of Tekken's and SentencePiece's own files."""
    tekken(tmp_path, ["<unk>", "<s>", "</s>"])
    check(read_tokenizer(tmp_path), whole_runs=False)
    (tmp_path / "tekken.json").unlink()
    for kind in (1, 2):
        sentence_model(tmp_path, kind)
        check(read_tokenizer(tmp_path), whole_runs=True)


@pytest.mark.parametrize("name", ["llama2", "gemma"])
def test_a_character_that_was_shown_stays_when_a_broken_byte_follows(name: str) -> None:
    """The library takes back what it has given and raises; SentencePiece itself reads bytes as this does."""
    hf = tokenizer_of(name)
    ids = [hf.token_to_id(piece) for piece in ("<0xE3>", "<0x81>", "<0x82>", "<0xFF>", "t", "<0xC3>")]
    detokenizer = Tokenizer(hf).detokenizer()
    assert [*(detokenizer.feed([id]) for id in ids), detokenizer.flush()] == [
        "", "", "\u3042", "\ufffd", "t", "", "\ufffd",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["qwen", "gemma", "nano"])
def test_many_broken_bytes_cost_no_more_than_others(name: str) -> None:
    """The library decodes all of them again for each one: a caller could ask for half a character forever."""
    hf = tokenizer_of(name)
    broken = next(id for id in range(hf.get_vocab_size()) if hf.decode([id]) == "\ufffd")
    detokenizer = Tokenizer(hf).detokenizer()
    parts = [detokenizer.feed([broken]) for _ in range(20_000)]
    assert "".join([*parts, detokenizer.flush()]) == "\ufffd" * 20_000
    assert sum(map(len, parts)) >= 19_999


@pytest.mark.parametrize("name", ["qwen", "mistral", "t5", "words"])
def test_stop_strings_end_a_stream_where_they_end_the_text(name: str) -> None:
    hf, rng = tokenizer_of(name), random.Random(name)
    tokenizer = Tokenizer(hf)
    for ids in streams(hf, rng):
        text = tokenizer.decode(ids)
        if len(text) < 4:
            continue
        start = rng.randrange(len(text) - 2)
        stop = text[start : start + rng.randrange(1, 4)]
        rules = TextRules(stops=(stop,))
        choice = ChoiceText(tokenizer, GenerationRequest("r", (1,), SamplingParams()), rules)
        shown = ""
        for at, id in enumerate(ids):
            finish = FinishCause.LENGTH if at == len(ids) - 1 else None
            delta = choice.push(TokenEntry("r", 1, 0, at, (id,), (), finish))
            shown += delta.text
            if delta.finish is not None:
                break
        assert (shown, delta.matched) == (text[: text.index(stop)], stop)
