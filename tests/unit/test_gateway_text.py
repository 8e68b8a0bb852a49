"""Ids to text and stop strings: whole characters only, nothing leaks, however the ids are cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.common.errors import ConfigError, EyasError, InvalidRequest
from eyas.common.params import SamplingParams
from eyas.common.types import FinishCause, GenerationRequest, RequestChoice, TokenEntry, TokenLogprob
from gateway.text.entries import ChoiceText, StopMatcher, TextRules, TextStream
from gateway.text.templates import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from tests.unit.byte_tokenizers import byte_fallback, byte_level

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.feed([id]) for id in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 400), max_size=40))
def test_pieces_join_to_the_full_decode(ids: list[int]) -> None:
    tokenizer = Tokenizer(byte_level())
    text = byte_level().decode(ids, skip_special_tokens=True)
    assert "".join(pieces_of(tokenizer, ids)) == text
    assert tokenizer.decode(ids) == text


@given(st.text(max_size=30))
def test_no_piece_holds_half_a_character(text: str) -> None:
    for hf in (byte_level(), byte_fallback()):
        tokenizer = Tokenizer(hf)
        ids = list(tokenizer.encode(text))
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids) == hf.decode(ids)
        assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


def test_half_a_character_at_the_very_end_is_marked() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = [byte_level().token_to_id(piece) for piece in ("ð", "Ł")]  # two of the four bytes of an emoji
    assert pieces_of(tokenizer, ids) == ["", "", "\ufffd"]


def test_special_tokens_are_no_text_but_other_added_ones_are() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = [byte_level().token_to_id("<|end|>"), byte_level().token_to_id("<think>")]
    assert tokenizer.decode(ids) == "<think>"
    assert tokenizer.table.label(ids[0]) == ("<|end|>", b"<|end|>")


# --- stop strings ------------------------------------------------------------------------------------


def cut_at_first_stop(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The rule, letter by letter: the first completed stop string, the longest if there are several."""
    for end in range(1, len(text) + 1):
        completed = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end if include else end - max(completed)], True
    return text, False


@settings(max_examples=150)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    expected, hits = cut_at_first_stop("".join(pieces), stops, include)
    matcher = StopMatcher(stops, include=include)
    shown, stopped = "", False
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        shown += text
        assert expected.startswith(shown)  # nothing is shown that would have to be taken back
        if stopped:
            break
    assert stopped == hits
    assert (shown if stopped else shown + matcher.flush()) == expected


def test_only_what_may_become_a_stop_string_is_held() -> None:
    matcher = StopMatcher(["###"])
    assert matcher.feed("a#") == ("a", False)
    assert matcher.feed("b##") == ("#b", False)
    assert matcher.feed("#c") == ("", True)


# --- entries to deltas -------------------------------------------------------------------------------


def entry(tokens: list[int], index: int, finish: FinishCause | None = None, **more: Any) -> TokenEntry:
    scored = tuple(TokenLogprob(-float(index + i)) for i in range(len(tokens)))
    return TokenEntry("r", 1, 0, index, tuple(tokens), scored, finish, **more)


def choice_text(tokenizer: Tokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> ChoiceText:
    request = GenerationRequest("r", (1,), SamplingParams(min_tokens=min_tokens))
    return ChoiceText(tokenizer, request, TextRules(tuple(stops)))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 2))
def test_text_and_usage_do_not_depend_on_the_steps(cuts: list[int], min_tokens: int) -> None:
    tokenizer = Tokenizer(byte_level())
    ids = list(tokenizer.encode("naïve 日本語 cat \U0001f642 the cat"))
    alone = [entry([id], i) for i, id in enumerate(ids)]
    steps, start = [], 0
    for cut in cuts:
        steps.append(entry(ids[start : start + cut], start))
        start += cut
    steps.append(entry(ids[start:], start))
    results = []
    for entries in (alone, steps):
        choice = choice_text(tokenizer, [" cat"], min_tokens)
        deltas = []
        for one in entries:
            deltas.append(choice.push(one))
            if deltas[-1].finish is not None:
                break
        results.append(
            (
                "".join(d.text for d in deltas),
                [token for d in deltas for token in d.tokens],
                [offset for d in deltas for offset in d.offsets],
                deltas[-1].finish,
            )
        )
    assert results[0] == results[1]
    assert results[0][0] == "naïve 日本語" and results[0][3] is FinishCause.STOP


def test_min_tokens_hides_early_stop_strings() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = list(tokenizer.encode("x the cat the"))
    choice = choice_text(tokenizer, ["the"], min_tokens=len(ids) - 1)
    assert choice.push(entry(ids, 0)).text == "x the cat "


def test_the_token_that_stopped_the_engine_is_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    word = list(tokenizer.encode("cat"))
    last = byte_level().token_to_id("x")
    delta = choice_text(tokenizer, ["ca#"]).push(entry([*word, last], 0, FinishCause.STOP))
    assert (delta.text, delta.tokens, delta.finish) == ("cat", (*word, last), FinishCause.STOP)


@given(
    st.lists(st.integers(0, 345), min_size=1, max_size=24),
    st.lists(st.integers(1, 5), max_size=8),
    st.sampled_from(FinishCause),
)
def test_what_is_read_at_once_is_what_is_read_by_token(
    ids: list[int], cuts: list[int], end: FinishCause
) -> None:
    """Without stop strings and log-probabilities the tokens of a step are not looked at one by one."""
    tokenizer = Tokenizer(byte_level())
    bounds = sorted({0, len(ids), *(min(sum(cuts[:i]), len(ids)) for i in range(len(cuts)))})
    entries = [
        entry(ids[a:b], a, end if b == len(ids) else None, accepted=b - a, offered=b - a + 1)
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    at_once, by_token = choice_text(tokenizer), choice_text(tokenizer)
    for one in entries:
        unscored = msgspec.structs.replace(one, logprobs=())
        wanted = msgspec.structs.replace(by_token.push(one), logprobs=(), offsets=())
        assert at_once.push(unscored) == wanted


class Script:
    """A generation stream of given entries."""

    def __init__(self, entries: list[TokenEntry]) -> None:
        self.entries = entries
        self.cancelled: list[int | None] = []

    async def take(self) -> Any:
        return [self.entries.pop(0)] if self.entries else ()

    def use_lanes(self, lanes: Any) -> None: ...

    async def cancel(self, choice: int | None = None) -> None:
        self.cancelled.append(choice)

    async def aclose(self) -> None: ...


async def test_drafts_after_a_stop_string_are_not_counted() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = list(tokenizer.encode("xyz"))
    stream = Script([entry(ids[:1], 0), entry([*ids[1:], *ids], 1, accepted=4, offered=6), entry(ids, 6)])
    text = TextStream(stream, GenerationRequest("r", (1, 2), SamplingParams()), tokenizer, TextRules(("y",)))
    assert [delta.text for delta in [*await text.take(), *await text.take()]] == ["x", ""]
    assert await text.take() == []
    usage = text.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 2)
    assert (usage.accepted, usage.rejected, usage.verify_steps) == (1, 2, 1)
    assert stream.cancelled == [None]


async def test_a_stream_that_just_ends_is_an_error() -> None:
    request = GenerationRequest("r", (1,), SamplingParams(), (RequestChoice(0), RequestChoice(1)))
    text = TextStream(
        Script([entry([5], 0, FinishCause.LENGTH)]), request, Tokenizer(byte_level()), TextRules()
    )
    with pytest.raises(EyasError, match="ended before"):
        while await text.take():
            pass


# --- folders and templates ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "<|end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


async def test_a_folder_gives_chats(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "日本"}]
    ids = await tokenizer.encode_chat(messages)
    assert byte_level().decode(ids, skip_special_tokens=False) == (
        "<|system|>s<|end|><|user|>日本<|end|><|assistant|>"
    )
    assert byte_level().token_to_id("<|end|>") in ids
    with pytest.raises(InvalidRequest, match="system must come first") as raised:
        await tokenizer.encode_chat(messages[::-1])
    assert raised.value.param == "messages"
    (folder / "chat_template.jinja").write_text("own file")
    assert await Tokenizer.load(folder).encode_chat(messages) == tokenizer.encode("own file")


async def test_long_prompts_are_tokenized_alike(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "the cat " * 4000
    assert await tokenizer.encode_prompt(text) == tokenizer.encode(text)


async def test_bad_folders_are_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="no chat template"):
        await Tokenizer.load(folder).encode_chat([{"role": "user", "content": "x"}])
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    with pytest.raises(ConfigError, match="does not compile"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_templates_have_the_usual_helpers() -> None:
    source = "{{ messages | tojson }} {{ strftime_now('%%') }}"
    rendered = ChatTemplate(source, {}).render([{"role": "user", "content": "<é>"}])
    assert rendered == '[{"role": "user", "content": "<é>"}] %'
