"""Walks through a compiled grammar, to find out what a token costs that an engine follows.

Time is the thread's own, and a slow call counts as its faster one of two: a busy machine makes no grammar
slow. No walk finds every trap: an engine has a budget for each of its sequences besides.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from eyas.common.grammars.compiler import library

WALK_S = 0.3  # seconds of a processor after which a walk ends: it has found nothing
_LOOKS = 768  # tokens of a walk at most
_SAMPLE = 16  # of the tokens that are allowed, among which a far walk takes the longest

Pick = Callable[[np.ndarray], int]


def slowest_token(compiled: Any, lengths: Sequence[int], most: float) -> float:
    """Seconds for the slowest token along outputs of several kinds. It stops at one that takes over `most`.

    One goes at random, as a text does. One takes long tokens, and so comes far into what a pattern repeats.
    `lengths`: bytes that each id writes.
    """
    rng, slowest = random.Random(0), 0.0

    def any_one(ids: np.ndarray) -> int:
        return int(rng.choice(ids))

    def a_long_one(ids: np.ndarray) -> int:
        return max((int(rng.choice(ids)) for _ in range(_SAMPLE)), key=lengths.__getitem__)

    for pick in (any_one, a_long_one):
        slowest = max(slowest, _walk(compiled, pick, most))
        if slowest > most:
            break
    return slowest


def _walk(compiled: Any, pick: Pick, most: float) -> float:
    """The slowest token of one output; it ends with it, or once it has found a slow one."""
    matcher, slowest = library().GrammarMatcher(compiled), 0.0
    ends = set(matcher.stop_token_ids)
    mask = np.zeros((1, -(-compiled.tokenizer_info.vocab_size // 32)), np.int32)
    until = time.thread_time() + WALK_S
    for _ in range(_LOOKS):
        took = _faster(most, lambda: matcher.fill_next_token_bitmask(mask, 0))
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ids = ids[~np.isin(ids, list(ends))]
        if not len(ids):
            break
        accept = partial(matcher.accept_token, pick(ids))
        took += _faster(most, accept, lambda: matcher.rollback(1))
        slowest = max(slowest, took)
        if matcher.is_terminated() or slowest > most or time.thread_time() > until:
            break
    return slowest


def _faster(most: float, call: Callable[[], Any], undo: Callable[[], Any] = lambda: None) -> float:
    """Seconds of one call; if these are over `most`, the fewer of two."""
    seconds = _seconds(call)
    if seconds > most:
        undo()
        seconds = min(seconds, _seconds(call))
    return seconds


def _seconds(call: Callable[[], Any]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began
