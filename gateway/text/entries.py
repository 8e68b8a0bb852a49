"""Converts the token entries of a generation to text and ends it at stop strings, for every front.

A `TextStream` reads one admitted request, detokenizes each choice, applies the stop strings and counts usage.
A caller never sees a part of a stop string. The result does not depend on how the text is split: the stop
string that is *completed* first wins (of several completed by the same character, the longest), and the
caller sees the text before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from eyas.common.errors import EyasError
from eyas.common.types import (
    EngineTimings,
    FinishCause,
    GenerationRequest,
    PromptTokenLogprobs,
    TokenEntry,
    TokenLogprob,
)
from gateway.backends.base import GenerationStream, Lanes
from gateway.text.detokenize import Detokenizer
from gateway.text.tokenizer import Tokenizer


class TextRules(msgspec.Struct, frozen=True):
    """How the tokens of a request are converted to text.

    `continues_prompt`: the text continues the prompt (a completion) instead of beginning a new text (a chat
    answer); with some tokenizers this decides whether its first space is shown. `include_stop`: the stop
    string or token that ended a choice is shown. `shown`: special tokens that are shown even if others are
    skipped. `offsets`: deltas have the offset of each token's text.
    """

    stops: tuple[str, ...] = ()
    continues_prompt: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False
    shown: tuple[str, ...] = ()
    offsets: bool = False


class TextDelta(msgspec.Struct, frozen=True):
    """The text that one entry added to one choice.

    `tokens`: every token that counts, including the final one. `logprobs`: one item per token if requested.
    `offsets`: one per token if log-probabilities or offsets are requested; the text of tokens[i] begins at
    character offsets[i]. `text` may lag behind the tokens: it never ends inside a character or a stop string.
    Drafts accepted beyond a stop string count as never offered. `matched`: the stop string, or the id of the
    last token, that stopped the choice. `experts`: of the rows of a complete answer, if requested
    (`gateway.backends.routed`).
    """

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()
    finish: FinishCause | None = None
    accepted: int = 0
    offered: int = 0
    verify_steps: int = 0
    matched: str | int | None = None
    experts: bytes = b""


class UsageCounts(msgspec.Struct):
    """Token counts of one request. `completion_tokens` includes `accepted` drafts but no `rejected` ones.

    Drafts are counted by depth: only one branch of a tree can be accepted, so the other branches do not count
    as rejected.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    verify_steps: int = 0
    cached_tokens: int = 0

    def add(self, delta: TextDelta) -> None:
        """Counts a delta."""
        self.completion_tokens += len(delta.tokens)
        if delta.offered:
            self.drafted(delta.accepted, delta.offered, delta.verify_steps)

    def drafted(self, accepted: int, offered: int, verify_steps: int) -> None:
        """Counts drafts, by depth, that were verified in this number of steps."""
        self.accepted += accepted
        self.rejected += offered - accepted
        self.verify_steps += verify_steps

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step, including the step's own; None if nothing was verified."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None


class RequestTrace(msgspec.Struct):
    """The history of one request: the timings of every worker, and the arrival of its first tokens.

    `first`: the arrival of token 0 of any choice; `second`: of the first token after it, by which decode had
    begun (both monotonic seconds; 0 before). `prompt`: the prompt's log-probabilities, if requested; they
    arrive before any delta.
    """

    legs: list[EngineTimings] = []
    first: float = 0.0
    second: float = 0.0
    prompt: PromptTokenLogprobs | None = None

    def record(self, entry: TokenEntry) -> None:
        """Records an entry on its arrival."""
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
        """Prompt tokens found in the cache of the last worker that computed the prompt."""
        return next((leg.cached_tokens for leg in reversed(self.legs) if leg.prefill_ms), 0)


class ChoiceText:
    """Converts the tokens of one choice to text."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, rules: TextRules) -> None:
        context = request.prompt_ids if rules.continues_prompt else ()
        self._detokenizer = tokenizer.detokenizer(
            context, skip_special_tokens=rules.skip_special_tokens, shown=rules.shown
        )
        self._matcher = StopMatcher(rules.stops, include=rules.include_stop)
        self._include_stop = rules.include_stop
        self._offsets = rules.offsets
        self._min_tokens = request.params.min_tokens
        self.bare: Detokenizer | None = None if rules.stops or rules.offsets else self._detokenizer
        """The detokenizer, if neither stop strings nor offsets need more than the text; else None."""
        self._tokens = 0
        self._length = 0  # characters decoded so far, with those held back

    def push(self, entry: TokenEntry) -> TextDelta:
        """The delta of the choice's next entry; `finish` is also set if a stop string ends the choice."""
        finish = entry.finish
        if self._matcher or entry.logprobs or self._offsets:
            text, offsets, stopped = self._by_token(entry)
            count, finish = len(offsets), FinishCause.STOP if stopped else finish
        else:
            text, offsets, count = self._whole(entry), (), len(entry.tokens)
        accepted = min(entry.accepted, count)
        offered = entry.offered - (entry.accepted - accepted)
        return TextDelta(
            choice=entry.choice,
            text=text,
            tokens=entry.tokens[:count],
            logprobs=entry.logprobs[:count],
            offsets=offsets,
            finish=finish,
            accepted=accepted,
            offered=offered,
            verify_steps=int(offered > 0),
            matched=self._matcher.hit or (entry.tokens[-1] if _is_stopped(entry) else None),
        )

    def _whole(self, entry: TokenEntry) -> str:
        text = self._detokenizer.feed(entry.tokens[:-1] if self._is_silent(entry) else entry.tokens)
        return text if entry.finish is None else text + self._detokenizer.flush()

    def _by_token(self, entry: TokenEntry) -> tuple[str, tuple[int, ...], bool]:
        """(text, offset per token up to a stop string, whether a stop string was completed)."""
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
            # Before min_tokens no stop string is matched, so no text is held back either.
            if self._tokens >= self._min_tokens:
                piece, stopped = self._matcher.feed(piece)
            pieces.append(piece)
            if stopped:
                break
        if entry.finish is not None and not stopped:
            pieces.append(self._rest())
        return "".join(pieces), tuple(offsets), stopped

    def _rest(self) -> str:
        """The text still held back when the engine finished the choice."""
        shown, stopped = self._matcher.feed(self._detokenizer.flush())
        return shown if stopped else shown + self._matcher.flush()

    def _is_silent(self, entry: TokenEntry) -> bool:
        """Whether the last token stopped the choice and is not shown, whatever its text."""
        return not self._include_stop and _is_stopped(entry)


def _is_stopped(entry: TokenEntry) -> bool:
    return entry.finish is FinishCause.STOP and bool(entry.tokens)


class TextStream:
    """The text of one admitted request. The caller owns and closes `stream`.

    A choice that a stop string ended is cancelled immediately; further entries for it are dropped. `usage`
    and `trace`: as of the last entry.
    """

    def __init__(
        self,
        stream: GenerationStream,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        rules: TextRules,
    ) -> None:
        self.usage = UsageCounts(prompt_tokens=len(request.prompt_ids))
        self.trace = RequestTrace()
        self._stream = stream
        self._open = {choice.index: ChoiceText(tokenizer, request, rules) for choice in request.choices}

    @property
    def weight_version(self) -> str:
        """See `GenerationStream.weight_version`."""
        return self._stream.weight_version

    def use_lanes(self, lanes: Lanes | None) -> None:
        """See `GenerationStream.use_lanes`."""
        self._stream.use_lanes(lanes)

    def bare(self, number: int) -> Detokenizer | None:
        """Returns the detokenizer for the next tokens of a choice until it finishes; the caller counts
        `usage`.

        None before the first two tokens, and if deltas need more than the text of tokens.
        """
        choice = self._open.get(number)
        return choice.bare if choice is not None and self.trace.second else None

    async def take(self) -> Sequence[TextDelta]:
        """Waits for the next deltas, at least one; () once every choice has finished.

        Raises the error of the generation stream.
        """
        deltas: list[TextDelta] = []
        while self._open and not deltas:
            entries = await self._stream.take()
            if not entries:
                raise EyasError("the generation ended before all of its choices had")
            for entry in entries:
                self.trace.record(entry)
                choice = self._open.get(entry.choice)
                if choice is None or not (entry.tokens or entry.finish):
                    continue
                delta = choice.push(entry)
                self.usage.add(delta)
                if entry.timings is not None:
                    self.usage.cached_tokens = self.trace.cached_tokens
                if delta.finish is not None:
                    await self._finish(entry)
                deltas.append(delta)
        return deltas

    async def _finish(self, entry: TokenEntry) -> None:
        del self._open[entry.choice]
        if entry.finish is None:
            await self._stream.cancel(entry.choice if self._open else None)


class StopMatcher:
    """Finds the first of `stops` (non-empty strings) in the text of one choice. `hit`: the completed one.

    For each stop string the length of its longest beginning with which the text ends is tracked (the
    automaton of Knuth, Morris and Pratt), in constant time per character. The longest of them is the text to
    hold back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop string is shown as the end of the text, so nothing is held back."""
        self._include = include
        self._stops = [(stop, _fallbacks(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._pending = ""
        self.hit = ""

    def __bool__(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stops)

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string was completed). Not to be called after a hit."""
        if not self._stops:
            return text, False
        text, start = self._pending + text, len(self._pending)
        for position in range(start, len(text)):
            if hit := self._advance(text[position]):
                self.hit = hit
                end = position + 1
                return text[: end if self._include else end - len(hit)], True
        safe = len(text) - (0 if self._include else max(self._matched))
        self._pending = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """The text held back; called when no more text follows."""
        pending, self._pending = self._pending, ""
        return pending

    def _advance(self, character: str) -> str:
        """Takes one character; returns the longest stop string that it completes, or ""."""
        hit = ""
        for i, (stop, fallbacks) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = fallbacks[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                hit = max(hit, stop, key=len)
                matched = fallbacks[matched - 1]
            self._matched[i] = matched
        return hit


def _fallbacks(stop: str) -> list[int]:
    """Returns, for each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table
