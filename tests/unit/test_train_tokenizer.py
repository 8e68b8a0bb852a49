"""The embedded tokenizer: round trips, single digits, stable markup."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import eyas
from tools.nano.data import IDS
from tools.nano.text.core import TextSplit
from tools.nano.text.dialogues import dialogue
from tools.nano.tokenizer import (
    ANSWER_BIT,
    END_OF_TEXT_ID,
    IM_END_ID,
    IM_START_ID,
    SPECIALS,
    VOCAB_SIZE,
    encode_chat,
    load_tokenizer,
    render,
)

NANO = Path(eyas.__file__).parent / "assets" / "nano"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(NANO)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello!",
        "  two  spaces\n\n\ttab",
        "12 x 345 = 4140",
        "Zürich 你好 😀 \x00\x7f",
        "".join(map(chr, range(256))),
    ],
)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_every_digit_is_its_own_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a2048b 77", add_special_tokens=False).tokens == ["a", *"2048", "b", "Ġ", *"77"]
    longer = [token for token in tokenizer.get_vocab() if len(token) > 1 and any(c.isdigit() for c in token)]
    assert longer == []


def test_vocabulary_and_special_ids_are_fixed(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == [END_OF_TEXT_ID, IM_START_ID, IM_END_ID]


def test_packed_ids_are_those_of_the_rendered_chat(tokenizer: Tokenizer) -> None:
    for index in range(100):
        chat = dialogue(3, index, TextSplit.TRAIN)
        packed = encode_chat(tokenizer, chat)
        assert (packed & IDS).tolist() == tokenizer.encode(render(chat), add_special_tokens=False).ids
        answers = tokenizer.decode(
            [i for i in (packed[packed >= ANSWER_BIT] - ANSWER_BIT).tolist() if i != IM_END_ID]
        )
        assert answers == "".join(m["content"] for m in chat if m["role"] == "assistant")


def test_the_chat_template_is_render() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(NANO)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi 42"}]
    for open_turn in (False, True):
        made = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=open_turn)
        assert made == render(chat, open_turn)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (END_OF_TEXT_ID, IM_END_ID)
