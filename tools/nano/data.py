"""Dialogues as packed rows of tokens, which other processes make while the device trains.

Shard i depends on (seed, i) alone and shards come in order, so a run can be repeated.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from eyas.common.machine.processes import importing_safely
from tools.nano.text.core import TextSplit
from tools.nano.text.dialogues import dialogue, plain_text
from tools.nano.tokenizer import ANSWER_BIT, encode_chat, encode_plain, load_tokenizer, render

Made = TypeVar("Made")
IDS = ANSWER_BIT - 1
PLAIN_SHARE = 30  # dialogues per passage without markup


@dataclass(frozen=True)
class ShardPacking:
    """The content of a shard: the tokenizer's folder, the seed of the text, and the number of dialogues."""

    tokenizer: Path
    seed: int
    dialogues: int = 4000


def make_shard(job: tuple[ShardPacking, int]) -> np.ndarray:
    """The texts of one shard, concatenated: uint16 ids [tokens] with their answer bits."""
    packing, shard = job
    tokenizer = load_tokenizer(packing.tokenizer)
    rows = []
    for index in range(shard * packing.dialogues, (shard + 1) * packing.dialogues):
        rows.append(encode_chat(tokenizer, dialogue(packing.seed, index, TextSplit.TRAIN)))
        if index % PLAIN_SHARE == 0:
            rows.append(encode_plain(tokenizer, plain_text(packing.seed, index)))
    return np.concatenate(rows)


def make_prompts(job: tuple[ShardPacking, int]) -> list[np.ndarray]:
    """The dialogues of one shard up to the begin of their last answer: uint16 ids, one array per dialogue."""
    packing, shard = job
    tokenizer = load_tokenizer(packing.tokenizer)
    turn = tokenizer.encode(render([], True), add_special_tokens=False).ids[1:]
    rows = []
    for index in range(shard * packing.dialogues, (shard + 1) * packing.dialogues):
        chat = dialogue(packing.seed, index, TextSplit.TRAIN)
        rows.append(np.append(encode_chat(tokenizer, chat[:-1]), np.array(turn, np.uint16)))
    return rows


@contextmanager
def shards(
    make: Callable[[tuple[ShardPacking, int]], Made], packing: ShardPacking, numbers: range, processes: int
) -> Iterator[Iterator[Made]]:
    """Yields the numbered shards in order. With 0 processes, each is made here when it is needed."""
    jobs = [(packing, number) for number in numbers]
    if processes == 0:
        yield map(make, jobs)
        return
    with importing_safely():
        started = multiprocessing.get_context("spawn").Pool(processes)
    with started as pool:
        yield pool.imap(make, jobs)


def batches(stream: Iterator[np.ndarray], rows: int, length: int) -> Iterator[Tensor]:
    """Packed batches, int32 [rows, length + 1]. The rest of the stream that fills no batch is dropped."""
    need = rows * (length + 1)
    shards: list[np.ndarray] = []
    size = 0
    for shard in stream:
        shards.append(shard)
        size += len(shard)
        while size >= need:
            joined = np.concatenate(shards)
            yield torch.from_numpy(joined[:need].astype(np.int32)).view(rows, length + 1)
            shards, size = [joined[need:]], size - need


def split_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (int64), and whether each is part of an answer (bool)."""
    return (packed & IDS).long(), (packed & ANSWER_BIT) > 0
