"""Entries become text: what every front shows of a generation.

A `TextStream` reads one admitted request, detokenizes each choice, applies the stop strings and counts
usage. It knows tokens and text; it refuses to know HTTP, JSON and protobuf.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import msgspec

from eyas.common.errors import EyasError
from eyas.common.types import Entry, Finish, GenerationRequest, PromptLogprobs, Timings, TokenLogprob
from gateway.backend import GenerationStream
from gateway.stop import StopMatcher
from gateway.tokenizer import Tokenizer


class TextRules(msgspec.Struct, frozen=True):
    """How the tokens of a request are shown.

    `continues_prompt`: the text goes on where the prompt's ends (a completion) instead of beginning anew (an
    answer), which tells a tokenizer with marked spaces whether its first space is shown. `include_stop`: what
    stopped a choice, a stop string or a token, is shown as its end.
    """

    stops: tuple[str, ...] = ()
    continues_prompt: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False


class Delta(msgspec.Struct, frozen=True):
    """What one entry added to one choice.

    `tokens` covers every token that counts, the final one included, and so do `logprobs` and `offsets` where
    log-probabilities are asked for: tokens[i]'s text begins at character offsets[i]. `text` may lag behind
    the tokens: it never holds half a character nor the beginning of a stop string. Drafts that were
    accepted beyond a stop string count as never offered. `matched` is what stopped the choice: a stop string
    or the id of its last token.
    """

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()
    finish: Finish | None = None
    accepted: int = 0
    offered: int = 0
    verify_steps: int = 0
    matched: str | int | None = None


class Usage(msgspec.Struct):
    """Counts of one request. `rejected` drafts are not part of `completion_tokens`; `accepted` ones are.

    Both count in depth: of a tree's branches one can be accepted, so the others are not rejected.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    verify_steps: int = 0
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.completion_tokens += len(delta.tokens)
        self.accepted += delta.accepted
        self.rejected += delta.offered - delta.accepted
        self.verify_steps += delta.verify_steps

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verify step gave, its own included; None if nothing was verified."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None


class RequestTrace(msgspec.Struct):
    """What happened to one request: every worker's own timings, and when its tokens came.

    `first` and `second` are monotonic seconds, 0 until they have come: token 0 of some choice, and the first
    tokens after it, which is when decode has begun. `prompt`: what was asked of the prompt, known before any
    delta is.
    """

    legs: list[Timings] = []
    first: float = 0.0
    second: float = 0.0
    prompt: PromptLogprobs | None = None

    def saw(self, entry: Entry) -> None:
        if entry.timings is not None:
            self.legs.append(entry.timings)
        if entry.prompt is not None:
            self.prompt = entry.prompt
        if entry.tokens and not self.second:
            now = time.monotonic()
            self.first = self.first or now
            if entry.index + len(entry.tokens) > 1:
                self.second = now

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the last worker which ran the prompt found in its cache."""
        return next((leg.cached_tokens for leg in reversed(self.legs) if leg.prefill_ms), 0)


class ChoiceText:
    """One choice's tokens on their way to text."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, rules: TextRules) -> None:
        context = request.prompt_ids if rules.continues_prompt else ()
        self._detokenizer = tokenizer.detokenizer(context, skip_special_tokens=rules.skip_special_tokens)
        self._matcher = StopMatcher(rules.stops, include=rules.include_stop)
        self._include_stop = rules.include_stop
        self._min_tokens = request.params.min_tokens
        self._tokens = 0
        self._length = 0  # characters decoded so far, held ones included

    def push(self, entry: Entry) -> Delta:
        """The delta of the choice's next entry; `finish` is set if a stop string ended it here."""
        finish = entry.finish
        if self._matcher or entry.logprobs:
            text, offsets, stopped = self._by_token(entry)
            kept, finish = len(offsets), Finish.STOP if stopped else finish
        else:
            text, offsets, kept = self._at_once(entry), (), len(entry.tokens)
        accepted = min(entry.accepted, kept)
        offered = entry.offered - (entry.accepted - accepted)
        return Delta(
            choice=entry.choice,
            text=text,
            tokens=entry.tokens[:kept],
            logprobs=entry.logprobs[:kept],
            offsets=offsets,
            finish=finish,
            accepted=accepted,
            offered=offered,
            verify_steps=int(offered > 0),
            matched=self._matcher.hit or (entry.tokens[-1] if _is_stopped(entry) else None),
        )

    def _at_once(self, entry: Entry) -> str:
        text = self._detokenizer.feed(entry.tokens[:-1] if self._is_silent(entry) else entry.tokens)
        return text if entry.finish is None else text + self._detokenizer.flush()

    def _by_token(self, entry: Entry) -> tuple[str, tuple[int, ...], bool]:
        """(text, where that of each token begins, whether a stop string ended it); no offsets beyond it."""
        pieces: list[str] = []
        offsets: list[int] = []
        silent = len(entry.tokens) - 1 if self._is_silent(entry) else -1
        stopped = False
        for position, token in enumerate(entry.tokens):
            offsets.append(self._length)
            self._tokens += 1
            if position == silent:
                break
            piece = self._detokenizer.feed((token,))
            self._length += len(piece)
            # Before min_tokens no stop string is looked for, so nothing is held either.
            if self._tokens >= self._min_tokens:
                piece, stopped = self._matcher.feed(piece)
            pieces.append(piece)
            if stopped:
                break
        if entry.finish is not None and not stopped:
            pieces.append(self._rest())
        return "".join(pieces), tuple(offsets), stopped

    def _rest(self) -> str:
        """What was still held when the engine finished the choice."""
        shown, stopped = self._matcher.feed(self._detokenizer.flush())
        return shown if stopped else shown + self._matcher.flush()

    def _is_silent(self, entry: Entry) -> bool:
        """The token that made the engine stop is no text, whatever it would spell, unless it is asked for."""
        return not self._include_stop and _is_stopped(entry)


def _is_stopped(entry: Entry) -> bool:
    return entry.finish is Finish.STOP and bool(entry.tokens)


class TextStream:
    """The text of one admitted request. Whoever started `stream` closes it.

    A choice that a stop string ended is cancelled at once, and what still arrives of it is dropped.
    """

    def __init__(
        self,
        stream: GenerationStream,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        rules: TextRules,
    ) -> None:
        self.usage = Usage(prompt_tokens=len(request.prompt_ids))
        self.trace = RequestTrace()
        self._stream = stream
        self._open = {choice.index: ChoiceText(tokenizer, request, rules) for choice in request.choices}

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Ends after every choice has finished. Raises what the generation stream raises."""
        async for entry in self._stream:
            self.trace.saw(entry)
            choice = self._open.get(entry.choice)
            if choice is None or not (entry.tokens or entry.finish):
                continue
            delta = choice.push(entry)
            self.usage.add(delta)
            if entry.timings is not None:
                self.usage.cached_tokens = self.trace.cached_tokens
            if delta.finish is not None:
                await self._finish(entry)
            yield delta
            if not self._open:
                return
        raise EyasError("the generation ended before all of its choices had")

    async def _finish(self, entry: Entry) -> None:
        del self._open[entry.choice]
        if entry.finish is None:
            await self._stream.cancel(entry.choice if self._open else None)
