"""The byte-level BPE tokenizer of the embedded model, its chat markup and its folder.

Every digit is a token of its own and all 256 bytes are covered, so any text round-trips.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.nano.text.core import Message, TextSplit
from tools.nano.text.dialogues import dialogue, plain_text

VOCAB_SIZE = 4096
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, IM_START, IM_END)
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = range(3)
CONTEXT = 2048
# The bit that marks a token as part of an answer; ids need only the lower twelve bits.
ANSWER_BIT = 1 << 15
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ 'Tools:\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    '{{ \'A call of one:\\n<tool_call>\\n{"name": "its name", "arguments": {}}\\n</tool_call>\' }}'
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson + '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Turns; tools and calls as Hermes writes them: calls can be demanded, though the model has learnt none."""


def render(messages: list[Message], add_generation_prompt: bool = False) -> str:
    """The chat template in plain Python; a test checks that both give the same text."""
    turns = "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)
    return END_OF_TEXT + turns + (f"{IM_START}assistant\n" if add_generation_prompt else "")


def training_text(seed: int, count: int) -> Iterator[str]:
    """Text from which the merges are learnt: dialogues without their markup, and plain passages."""
    for index in range(count):
        for message in dialogue(seed, index, TextSplit.TRAIN):
            yield f"{message['role']}\n{message['content']}\n"
        if index % 20 == 0:
            yield plain_text(seed, index)


def train_tokenizer(seed: int, dialogues: int) -> Tokenizer:
    """Learns the merges. Raises ValueError unless the vocabulary has exactly `VOCAB_SIZE` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(seed, dialogues), trainer)
    size = tokenizer.get_vocab_size()
    if size != VOCAB_SIZE:
        raise ValueError(f"the text gave {size} tokens, not {VOCAB_SIZE}: train on more dialogues")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json in Hugging Face's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads tokenizer.json back."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_chat(tokenizer: Tokenizer, messages: list[Message]) -> np.ndarray:
    """A dialogue as uint16 ids. The assistant's tokens, with their end of turn, carry the answer bit."""
    pieces, answers = [END_OF_TEXT], [False]
    for message in messages:
        pieces += [f"{IM_START}{message['role']}\n", f"{message['content']}{IM_END}", "\n"]
        answers += [False, message["role"] == "assistant", False]
    # One by one: a batch would start threads in each of the processes that make text.
    encodings = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    rows = [
        np.array(encoding.ids, dtype=np.uint16) | np.uint16(ANSWER_BIT if answer else 0)
        for encoding, answer in zip(encodings, answers, strict=True)
    ]
    return np.concatenate(rows)


def encode_plain(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """A passage as uint16 ids, all with the answer bit; it ends where the next text begins."""
    ids = tokenizer.encode(END_OF_TEXT + text, add_special_tokens=False).ids
    row = np.array(ids, dtype=np.uint16) | np.uint16(ANSWER_BIT)
    row[0] = END_OF_TEXT_ID
    return row
