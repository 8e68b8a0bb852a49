"""Sampling parameters and priorities of requests, and their valid values.

Plain values, shared by the SDK, the gateway, the wire and the engine. The arithmetic is in
`eyas.engine.sampling`; stop strings belong to the gateway.
"""

from __future__ import annotations

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.notations import Grammar

MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 64
INT32_MAX = 2**31 - 1  # the largest whole number on the wire, seeds aside
MOST_PRIORITY = 100  # and the least is its negative
MOST_SALT = 256  # characters of a cache_salt
MOST_ADAPTER_NAME = 256  # characters of an adapter's name,
ADAPTER_NAME = r"[!-9;-~]+"  # which are printable ASCII, without spaces and colons
MOST_ADAPTER_RANK = 256
PRIORITY_S = 1.0
"""Seconds of waiting that count as one unit of priority, so that no request waits indefinitely."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen for one request. Defaults sample from the model's own distribution.

    A token is the argmax, over the ids that the filters keep, of log p + G(seed, position, id). So `seed`
    fixes the whole output. Temperature 0 is plain argmax.
    """

    max_tokens: int = 256  # 0: only the prompt's log-probabilities
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # counts prompt and output
    presence_penalty: float = 0.0  # counts output only
    frequency_penalty: float = 0.0  # counts output only
    logit_bias: dict[int, float] = {}
    seed: int = 0  # 64-bit
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: of the token and of the n best ids
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prompt_logprobs_start: int = 0  # only for tokens after this position
    prompt_experts: bool = False  # with `prompt_logprobs`: also which experts each scored row took
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of ids that the output must not hold
    grammar: Grammar | None = None  # what the output must be, unless max_tokens cuts it

    @property
    def reads_history(self) -> bool:
        """Whether sampling needs more input than a row of logits, or has more output than a token."""
        return self.grammar is not None or self.reads_more_than_grammar

    @property
    def reads_more_than_grammar(self) -> bool:
        """`reads_history` without regard to a grammar."""
        # This runs per row of a step, so it builds no tuples.
        if self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0:
            return True
        return bool(self.logit_bias or self.bad_words) or self.logprobs is not None

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field with an invalid value."""
        rules = [
            ("max_tokens", 0 <= self.max_tokens <= INT32_MAX, f"must be between 0 and {INT32_MAX}"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must be between 0 and max_tokens"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "must be between 0 and 2"),
            ("top_k", 0 <= self.top_k <= INT32_MAX, f"must be between 0 (all) and {INT32_MAX}"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p < 1.0, "must be at least 0 and below 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "must be above 0 and at most 10"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be between -2 and 2"),
            ("seed", 0 <= self.seed < 2**64, "must fit in 64 bits"),
            ("logprobs", _is_top(self.logprobs), f"must be between 0 and {MAX_TOP_LOGPROBS}"),
            ("prompt_logprobs", _is_top(self.prompt_logprobs), f"must be between 0 and {MAX_TOP_LOGPROBS}"),
            (
                "prompt_experts",
                not self.prompt_experts or self.prompt_logprobs is not None,
                "goes with prompt_logprobs",
            ),
            ("prompt_logprobs_start", self.prompt_logprobs_start >= 0, "must be at least 0"),
            (
                "logit_bias",
                len(self.logit_bias) <= MAX_BIASED_TOKENS,
                f"has more than {MAX_BIASED_TOKENS} tokens",
            ),
            (
                "logit_bias",
                all(0 <= t < vocab_size and -100.0 <= b <= 100.0 for t, b in self.logit_bias.items()),
                f"must map token ids below {vocab_size} to values between -100 and 100",
            ),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS
                and all(0 <= t < vocab_size for t in self.stop_token_ids),
                f"must be at most {MAX_STOP_TOKEN_IDS} ids below {vocab_size}",
            ),
            (
                "bad_words",
                len(self.bad_words) <= MAX_BAD_WORDS
                and all(1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in self.bad_words)
                and all(0 <= t < vocab_size for word in self.bad_words for t in word),
                f"must be at most {MAX_BAD_WORDS} runs of 1 to {MAX_BAD_WORD_TOKENS} ids below {vocab_size}",
            ),
            ("bad_words", not (self.bad_words and self.grammar), "cannot go with a grammar"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise InvalidRequest(f"{name} {rule}", param=name)
        if self.grammar is not None:
            self.grammar.validate()

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0


def _is_top(count: int | None) -> bool:
    return count is None or 0 <= count <= MAX_TOP_LOGPROBS
