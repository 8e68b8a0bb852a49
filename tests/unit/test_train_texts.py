"""Lines of training data: which of their tokens are answers, which are refused, and who answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.bench.answering import EngineAnswer, EnginePrompt, answer
from eyas.common.config import NANO, NANO_HEAD
from eyas.common.errors import ConfigError, EyasError
from eyas.common.params import SamplingParams
from eyas.train.acceptance import count_rounds
from eyas.train.answers import AnswerOptions, answers, engine_of
from eyas.train.conversations import ChatTokenizer, ConversationLine, answered, read_lines
from tools.nano.tokenizer import END_OF_TEXT, IM_END, IM_END_ID, load_tokenizer

QUESTION = {"role": "user", "content": "Which city is Japan's capital?"}
REPLY = {"role": "assistant", "content": "It is Tokyo."}


@pytest.fixture(scope="module")
def speech() -> ChatTokenizer:
    return ChatTokenizer(NANO)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def text(ids: Any) -> str:
    return load_tokenizer(NANO).decode(list(ids), skip_special_tokens=False)


def chat(*messages: dict[str, str]) -> ConversationLine:
    return ConversationLine("here", messages=messages)


def parts(example: Any) -> tuple[str, str]:
    """What is asked and what is answered."""
    return text(example.ids[~example.answer]), text(example.ids[example.answer])


# --- tokens ----------------------------------------------------------------------------------------------


def test_a_question_is_the_chat_up_to_its_last_answer(speech: ChatTokenizer) -> None:
    asked = f"{END_OF_TEXT}<|im_start|>user\n{QUESTION['content']}{IM_END}\n<|im_start|>assistant\n"
    assert text(speech.question(chat(QUESTION))) == asked
    assert text(speech.question(chat(QUESTION, REPLY))) == asked
    again = speech.question(chat(QUESTION, REPLY, QUESTION, REPLY))
    assert text(again).startswith(asked + REPLY["content"] + IM_END)
    assert text(speech.question(ConversationLine("here", prompt="One, two,"))) == "One, two,"
    assert speech.question(ConversationLine("here", text="One, two, three")) == ()


def test_kept_answers_are_the_assistants_turns(speech: ChatTokenizer) -> None:
    asked, said = parts(speech.as_given(chat(QUESTION, REPLY, QUESTION, REPLY)))
    assert said == 2 * f"{REPLY['content']}{IM_END}\n"
    assert asked.count(QUESTION["content"]) == 2 and REPLY["content"] not in asked
    whole = speech.as_given(chat(QUESTION, REPLY)).ids
    assert text(whole) == asked[: asked.index("assistant\n") + 10] + f"{REPLY['content']}{IM_END}\n"


def test_a_text_and_a_completion_are_answers(speech: ChatTokenizer) -> None:
    assert parts(speech.as_given(ConversationLine("here", text="One, two"))) == ("", "One, two")
    given = speech.as_given(ConversationLine("here", prompt="One, two,", completion=" three"))
    assert parts(given) == ("One, two,", " three")


def test_what_was_answered_follows_the_question() -> None:
    example = answered((5, 6), (7, 8, 2))
    assert example.ids.tolist() == [5, 6, 7, 8, 2]
    assert example.answer.tolist() == [False, False, True, True, True]


# --- lines that are wrong --------------------------------------------------------------------------------

WRONG: list[tuple[Any, str]] = [
    ("{", "it is not JSON"),
    ([1], "it is not a JSON object"),
    ({}, "one of messages, prompt, text is needed, and it has none of them"),
    ({"text": "a", "prompt": "b"}, "and it has prompt and text"),
    ({"text": 3}, "text is not a text"),
    ({"prompt": ""}, "prompt is not a text"),
    ({"prompt": "a", "completion": 3}, "completion is not a text"),
    ({"messages": []}, "messages is not a list of messages"),
    ({"messages": ["hi"]}, "messages[0] is not a JSON object"),
    ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role is 'boss', and none of system"),
    ({"messages": [QUESTION, {"role": "user"}]}, "messages[1].content is not a text"),
    ({"messages": [REPLY]}, "messages asks nothing"),
]


@pytest.mark.parametrize(("line", "told"), WRONG)
def test_a_wrong_line_is_named(line: Any, told: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    written = line if isinstance(line, str) else json.dumps(line)
    file.write_text(f'{{"text": "fine"}}\n\n{written}\n')
    with pytest.raises(ConfigError) as error:
        read_lines(file)
    assert error.value.message.startswith(f"{file} line 3: ") and told in error.value.message


def test_a_file_without_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data: .*nowhere.* cannot be read"):
        read_lines(tmp_path / "nowhere")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="has no lines"):
        read_lines(tmp_path / "empty")


def test_answers_that_are_not_there_cannot_be_kept(speech: ChatTokenizer) -> None:
    with pytest.raises(ConfigError, match="here: completion is missing"):
        speech.as_given(ConversationLine("here", prompt="One"))
    with pytest.raises(ConfigError, match="here: messages has no answer"):
        speech.as_given(chat(QUESTION))


# --- the target's own answers ----------------------------------------------------------------------------


def test_an_engine_answers_in_this_process(speech: ChatTokenizer) -> None:
    prompts = [
        EnginePrompt(3, speech.question(chat(QUESTION)), 40),
        EnginePrompt(8, speech.question(chat(QUESTION)), 3),
    ]
    found: dict[int, EngineAnswer] = {}
    engine = engine_of("cpu", str(NANO), max_running=1, num_pages=64)
    answer(engine, prompts, SamplingParams(temperature=0.0), lambda one: found.update({one.number: one}))
    assert text(found[3].tokens) == f"The capital of Japan is Tokyo.{IM_END}"
    assert found[3].tokens[-1] == IM_END_ID and found[8].tokens == found[3].tokens[:3]
    assert not found[3].rounds


def test_no_prompt_finds_the_queue_full() -> None:
    engine = engine_of("cpu", str(NANO), max_running=4, max_waiting=3, num_pages=64)
    told: list[int] = []
    prompts = [EnginePrompt(number, (5, 6, 7), 2) for number in range(20)]
    answer(engine, prompts, SamplingParams(ignore_eos=True), lambda one: told.append(one.number))
    assert sorted(told) == list(range(20))


def test_a_prompt_that_is_refused_ends_it() -> None:
    engine = engine_of("cpu", str(NANO), num_pages=64)
    with pytest.raises(EyasError, match="prompt 0 was not answered"):
        answer(engine, [EnginePrompt(0, (5,) * 3000, 4)], SamplingParams(), lambda one: None)


def test_rounds_are_counted_by_depth(speech: ChatTokenizer) -> None:
    engine = engine_of("cpu", str(NANO), str(NANO_HEAD), num_pages=64)
    counts = count_rounds(engine, [EnginePrompt(0, speech.question(chat(QUESTION)), 40)])
    assert counts.offered[0] >= 1 and counts.accepted[0] <= counts.offered[0]
    assert 2.0 < counts.length <= 6.0
    assert counts.shares == sorted(counts.shares, reverse=True)


def test_answers_that_a_file_has_are_kept(tmp_path: Path) -> None:
    """Nothing is missing, so no engine starts; the line that a kill cut short is dropped."""
    asking = AnswerOptions(str(NANO), "cpu", 0.0, 8, 64, seed=0)
    file = tmp_path / "training" / "answers.jsonl"
    assert answers(asking, {}, file) == {}
    with file.open("a") as out:
        out.write('{"number": 4, "tokens": [7, 2]}\n{"number": 5, "tok')
    assert answers(asking, {4: (1, 2)}, file) == {4: [7, 2]}
    assert file.read_text().endswith("[7, 2]}\n")
    other = AnswerOptions(str(NANO), "cpu", 0.5, 8, 64, seed=0)
    with pytest.raises(ConfigError, match="were asked for in another way"):
        answers(other, {4: (1, 2)}, file)
