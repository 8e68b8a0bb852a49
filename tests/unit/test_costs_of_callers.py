"""What callers choose does not make a token dear: the worst text costs little more than any other.

Both are measured on this thread's own processor time, and the best of a few tries counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from eyas.common.params import MAX_BIASED_TOKENS, SamplingParams
from eyas.engine.sampling.processors import SampledRow, adjusted
from eyas.engine.speculation.drafters.lookup import SequenceText, look_up
from gateway.formats.fields import MAX_STOP_LENGTH, MAX_STOPS
from gateway.text.entries import StopMatcher


def seconds(call: Callable[[], object]) -> float:
    """The least of a few tries."""
    tries = []
    for _ in range(4):
        began = time.thread_time()
        call()
        tries.append(time.thread_time() - began)
    return min(tries)


def test_a_text_that_repeats_one_word_is_looked_up_as_fast_as_another() -> None:
    size = 20_000
    varied, same = list(range(size)), [7] * size
    dear = seconds(lambda: look_up(SequenceText(same, size - 5, same), 5))
    assert dear < 15 * seconds(lambda: look_up(SequenceText(varied, size - 5, varied), 5))


def test_stop_strings_that_nearly_come_are_found_as_fast_as_others() -> None:
    nearly = ["a" * (MAX_STOP_LENGTH - 1) + chr(ord("b") + i) for i in range(MAX_STOPS)]
    text = ("a" * (MAX_STOP_LENGTH - 2) + "c") * 8
    dear = seconds(lambda: StopMatcher(nearly).feed(text))
    assert dear < 15 * seconds(lambda: StopMatcher(["b" * MAX_STOP_LENGTH] * MAX_STOPS).feed(text))


class Counted(dict[int, float]):
    """How often its values were asked for."""

    reads = 0

    def values(self):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().values()


def test_a_bias_is_read_once_for_all_nodes_of_a_tree() -> None:
    bias = Counted(dict.fromkeys(range(MAX_BIASED_TOKENS), 0.5))
    params, logits = SamplingParams(logit_bias=bias), torch.zeros(64, 2048)
    found = adjusted(logits, [SampledRow(params, 0, 9, (1, 2), [3], ()) for _ in range(64)])
    assert (found[:, :MAX_BIASED_TOKENS] == 0.5).all() and not found[:, MAX_BIASED_TOKENS:].any()
    assert bias.reads == 1
