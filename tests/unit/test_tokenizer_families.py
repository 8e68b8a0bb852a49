"""Text as transformers shows it, whole and streamed, for the tokenizers of ten families of models."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizer_families import FAMILIES, LINES, WHOLE_BYTES, write_folder
from tokenizers import Regex, decoders, models
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, TokenEntry, TokenLogprob
from gateway.text.detokenize import ByteDetokenizer, Detokenizer, LibraryDetokenizer
from gateway.text.entries import ChoiceText, TextRules
from gateway.text.tokenizer import Tokenizer

TEXTS = [
    *LINES[:4],
    "",
    " ",
    "   three before, and two after  ",
    "a\n\n b\r\n\tc   d",
    "<s>between<s> special <think>tokens</think><s>",
    "I did n't , you 've ' no ' idea . Really ?! they 're 's 'm",
    "▁marks▁ and </w> and ##pieces and <0x41> in a text",
    "zero\u200bwidth \u202eright\u202c e\u0301\u0323 \ufb01 \U0001f3f3\ufe0f\u200d\U0001f308 \ufffd!",
    "x" * 40 + " " * 9 + "日" * 9,
]


def random_texts(seed: str, count: int = 40) -> list[str]:
    rng = random.Random(seed)
    pool = [*"ab tcs.,'?!\n", " ", " ", "é", "日本", "\U0001f642", "e\u0301", "the ", "<s>", "<think>", "n't"]
    return ["".join(rng.choices(pool, k=rng.randrange(1, 30))) for _ in range(count)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@cache
def pair(family: str, folder: Path, clean_up: bool) -> tuple[Tokenizer, Any]:
    """Ours and transformers' of one folder."""
    folder.mkdir()
    write_folder(family, folder, clean_up_tokenization_spaces=clean_up)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


def streamed(detokenizer: Detokenizer, ids: list[int], rng: random.Random) -> str:
    """The text of `ids`, cut anywhere."""
    parts, start = [], 0
    while start < len(ids):
        end = start + rng.choice([1, 1, 1, 2, 5])
        parts.append(detokenizer.feed(ids[start:end]))
        start = end
    return "".join([*parts, detokenizer.flush()])


@pytest.mark.parametrize("clean_up", [False, True])
def test_text_is_that_of_transformers(family: str, clean_up: bool, tmp_path_factory: Any) -> None:
    ours, theirs = pair(family, tmp_path_factory.getbasetemp() / f"{family}-{clean_up}", clean_up)
    rng = random.Random(family)
    for text in [*TEXTS, *random_texts(family)]:
        ids = list(ours.encode(text))
        assert ids == theirs.encode(text)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
            assert streamed(ours.detokenizer(skip_special_tokens=skip), ids, rng) == expected


def test_every_token_is_shown_as_it_comes(family: str, tmp_path_factory: Any) -> None:
    """Nothing waits for the end of a text, but for the characters and spaces that are not whole yet."""
    ours, _ = pair(family, tmp_path_factory.getbasetemp() / f"{family}-False", False)
    detokenizer, shown = ours.detokenizer(), ""
    ids = list(ours.encode(LINES[0]))
    for end, id in enumerate(ids, 1):
        shown += detokenizer.feed([id])
        assert shown.rstrip() == ours.decode(ids[:end]).rstrip()


def test_a_completion_continues_its_prompt(family: str, tmp_path_factory: Any) -> None:
    """Prompt and completion join to the text of both, wherever a text is parted between two characters."""
    ours, theirs = pair(family, tmp_path_factory.getbasetemp() / f"{family}-False", False)
    rng = random.Random(family)
    for text in [*TEXTS, *random_texts(family)]:
        ids = list(ours.encode(text))
        for cut in range(1, len(ids)):
            prompt, expected = (
                theirs.decode(ids[:cut], skip_special_tokens=True),
                theirs.decode(ids, skip_special_tokens=True),
            )
            if "\ufffd" not in prompt:
                continuation = streamed(ours.detokenizer(ids[:cut]), ids[cut:], rng)
                assert prompt + continuation == expected


def test_offsets_point_at_what_a_completion_shows(family: str, tmp_path_factory: Any) -> None:
    ours, theirs = pair(family, tmp_path_factory.getbasetemp() / f"{family}-False", False)
    prompt, output = list(ours.encode("the cat")), list(ours.encode("sat on the mat", special=False))
    for continues in (True, False):
        rules = TextRules(continues_prompt=continues)
        choice = ChoiceText(ours, GenerationRequest("r", tuple(prompt), SamplingParams()), rules)
        scored = tuple(TokenLogprob(-1.0) for _ in output)
        delta = choice.push(TokenEntry("r", 1, 0, 0, tuple(output), scored, None))
        ends = [*delta.offsets[1:], len(delta.text)]
        pieces = [delta.text[start:end] for start, end in zip(delta.offsets, ends, strict=True)]
        labels = [ours.table.label(id)[0] for id in output]
        assert [piece.strip() for piece in pieces] == [label.strip() for label in labels]
        before = prompt if continues else []
        assert theirs.decode(before, skip_special_tokens=True) + delta.text == theirs.decode(
            before + output, skip_special_tokens=True
        )


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(WHOLE_BYTES)))
def test_ids_in_any_order_are_read_alike(family: str, tmp_path_factory: Any) -> None:
    """Where tokens are bytes their runs may be broken, and these are read as UTF-8 is."""
    ours, theirs = pair(family, tmp_path_factory.getbasetemp() / f"{family}-False", False)
    rng = random.Random(family)
    for _ in range(200):
        ids = [rng.randrange(len(ours.table) + 2) for _ in range(rng.randrange(12))]
        assert streamed(ours.detokenizer(), ids, rng) == theirs.decode(ids, skip_special_tokens=True)


def test_special_tokens_show_by_name_where_others_are_skipped(family: str, tmp_path_factory: Any) -> None:
    ours, theirs = pair(family, tmp_path_factory.getbasetemp() / f"{family}-False", False)
    rng, hidden = random.Random(family), ours.table.hf.token_to_id("<unk>")
    for text in [*TEXTS[:8], *random_texts(family)]:
        ids = list(ours.encode(text))
        expected = theirs.decode([id for id in ids if id != hidden], skip_special_tokens=False)
        assert streamed(ours.detokenizer(shown=("<s>",)), ids, rng) == expected
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


# --- decoders of no family ---------------------------------------------------------------------------

PIECES = [
    "a",
    "b</w>",
    "</w>c",
    " d",
    "e ",
    "  ",
    "##f",
    "▁g",
    "▁",
    "|",
    "<pad>",
    "n't",
    " .",
    "",
    "é",
    "<0x41>",
]
WORDS = {"a", "b</w>", "|", "<pad>", "n't", "é", "<0x41>"}  # in which the suffix stands where words end
CHAINS: dict[str, Callable[[], Any]] = {
    "marks": lambda: decoders.Metaspace(),
    "continued words": lambda: decoders.WordPiece(),
    "words that end": lambda: decoders.BPEDecoder(),
    "patterns by character": lambda: decoders.Sequence(
        [decoders.Replace(Regex("[ab]"), "<>"), decoders.Replace("|", "a")]
    ),
    "bytes that may be no character": lambda: decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "the start stripped": lambda: decoders.Sequence(
        [decoders.Fuse(), decoders.Sequence([decoders.Strip("a", 2, 0)])]
    ),
    "ctc": lambda: decoders.CTC(),
    "ctc, then fused and stripped": lambda: decoders.Sequence(
        [decoders.CTC(), decoders.Fuse(), decoders.Strip("a", 2, 0)]
    ),
    "ctc, then by piece": lambda: decoders.Sequence([decoders.CTC(), decoders.Metaspace()]),
    "pieces stripped": lambda: decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.WordPiece()]),
    "patterns by piece": lambda: decoders.Sequence(
        [decoders.Replace(Regex("[ab]"), "<>"), decoders.Metaspace(prepend_scheme="never")]
    ),
    "text replaced": lambda: decoders.Sequence(
        [
            decoders.Fuse(),
            decoders.Replace("aa", "b"),
            decoders.Replace("b a", "!"),
            decoders.Strip(" ", 2, 1),
        ]
    ),
    "nested": lambda: decoders.Sequence(
        [decoders.Sequence([decoders.Metaspace(), decoders.Fuse()]), decoders.Strip("g", 0, 1)]
    ),
    "patterns over the text": lambda: decoders.Sequence(
        [decoders.Fuse(), decoders.Replace(Regex("a.*b"), "?")]
    ),
    "words that end in the middle": lambda: decoders.BPEDecoder(),
    "bytes, then by piece": lambda: decoders.Sequence([decoders.ByteFallback(), decoders.WordPiece()]),
    "nothing": lambda: decoders.Sequence([]),
}
STRIPPED = {"text replaced", "nested"}  # the library panics at texts that are too short for it
JOINED = {"patterns by character", "bytes that may be no character", "the start stripped", "nothing"}
STREAMED = {"marks", "continued words", "words that end"}  # by the library


@pytest.mark.parametrize("chain", CHAINS)
def test_any_decoder_streams_or_waits(chain: str) -> None:
    pieces = [piece for piece in PIECES if chain != "words that end" or piece in WORDS]
    hf = HFTokenizer(models.WordLevel({piece: id for id, piece in enumerate(pieces)}, unk_token="a"))
    hf.decoder = CHAINS[chain]()
    tokenizer, rng = Tokenizer(hf), random.Random(chain)
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, ByteDetokenizer if chain in JOINED else LibraryDetokenizer)
    assert (detokenizer.feed([pieces.index("é")]) == "é") == (chain in JOINED | STREAMED)
    for _ in range(400):
        ids = [rng.randrange(len(pieces)) for _ in range(rng.randrange(2, 14))]
        if chain in STRIPPED:
            ids[0] = 0
        expected = hf.decode(ids)
        assert streamed(tokenizer.detokenizer(), ids, rng) == expected
        cut = rng.randrange(1, len(ids))
        prompt = hf.decode(ids[:cut])
        if expected.startswith(prompt):
            assert prompt + streamed(tokenizer.detokenizer(ids[:cut]), ids[cut:], rng) == expected
