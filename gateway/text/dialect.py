"""The dialect of a model's chat template: how it writes calls, reasoning and parts of content.

A template is asked, not looked up: it writes a call of a tool that does not exist, and the format whose
parser reads that call back is the model's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass
from typing import Any

from eyas.common.errors import InvalidRequest
from gateway.parsers.message import MessageParser, MessageReading
from gateway.parsers.output import CallArguments, CallStarted, Event, merged
from gateway.parsers.reasoning import ReasoningTags
from gateway.parsers.table import REASONING, TOOL_FORMATS, CallIds, ToolFormat, counted_id
from gateway.text.templates import ChatTemplate, Message, TooManySteps

AUTO, NONE = "auto", "none"  # of both flags, beside the names in the tables
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what templates call a message's reasoning
ABSENT = object()

_NAME, _ARGUMENTS = "look_up", {"word": "tree"}
_OTHER = "heather"  # the word of another call
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
_FUNCTION = {"name": _NAME, "description": "Looks up a word.", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_SYSTEM = {"role": "system", "content": "You are a dictionary."}
_QUESTION = {"role": "user", "content": "What is a tree?"}


@dataclass(frozen=True)
class TemplateDialect:
    """The abilities of the model's template beside text.

    `calls`: the format of calls, None if it writes none. `text_arguments`: it wants the arguments of calls in
    the history as the text of an object, not as an object; `object_arguments`: it fails on any that are no
    object. `no_content`: what it wants where a message has calls and no content; ABSENT: no such key.
    `lone_calls`: a message has room for one call; `lone_words`: one with calls has room for content or for
    reasoning, not for both; `tool_responses`: it may have their results. `words_think`: one without calls has
    room for reasoning; `words_role`: of words before calls, by which a turn that they end is begun again.
    `lists_parts`: it goes through the parts of content itself. `reads`: variables that it reads.
    `shows_tools`: a model hears from it which tools there are.
    """

    calls: ToolFormat | None = None
    reasoning: ReasoningTags | None = None
    text_arguments: bool = False
    object_arguments: bool = False
    no_content: Any = ABSENT
    lone_calls: bool = False
    lone_words: bool = False
    tool_responses: bool = False
    words_think: bool = False
    words_role: str = "assistant"
    lists_parts: bool = False
    reads: frozenset[str] = frozenset()
    shows_tools: bool = False

    def silent(self, message: Message) -> Message:
        """A message without content, as the template wants one."""
        rest = {key: value for key, value in message.items() if key != "content"}
        return rest if self.no_content is ABSENT else {**rest, "content": self.no_content}


def dialect_of(
    template: ChatTemplate | None, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> TemplateDialect:
    """The dialect of a template; the flags may name its formats, or "none" for none."""
    if template is None:
        return TemplateDialect()
    calls, style = _calls_of(template, tool_parser)
    frame = None if calls is None else calls.frame
    text_arguments, no_content = style
    return TemplateDialect(
        calls=calls,
        reasoning=_reasoning_of(template, reasoning_parser) if frame is None else frame.reasoning,
        text_arguments=text_arguments,
        object_arguments=not text_arguments
        and calls is not None
        and not _takes_text(template, calls, no_content),
        no_content=no_content,
        **_room(template, calls, text_arguments, no_content),
        lists_parts=template.lists_parts,
        reads=template.reads,
        shows_tools=_shows_tools(template),
    )


def _calls_of(template: ChatTemplate, parser: str) -> tuple[ToolFormat | None, tuple[bool, Any]]:
    """The format of calls, and how the template wants them: arguments as text, what is for no content."""
    named = TOOL_FORMATS.get(parser)
    styles = list(itertools.product((False, True), (ABSENT, "", None)))
    if parser == NONE:
        return None, styles[0]
    formats = [named] if named else list(TOOL_FORMATS.values())
    with contextlib.suppress(InvalidRequest, TooManySteps):
        prompt = template.render([_QUESTION], tools=_TOOLS)
        for style, format in itertools.product(styles, formats):
            if _writes(template, prompt, format, *style):
                detected = _format_of_template(template) if format.opener else None
                return detected or format, style
    return named or _format_of_template(template), styles[0]


def _format_of_template(template: ChatTemplate) -> ToolFormat | None:
    """The format that the template tells the model to write, with its markers: some write calls without."""
    try:
        with_tools = template.render([_QUESTION], tools=_TOOLS)
        without = template.render([_QUESTION])
    except (InvalidRequest, TooManySteps):
        return None
    formats = (format for format in TOOL_FORMATS.values() if format.says)
    return next(
        (format for format in formats if format.says in with_tools and format.says not in without), None
    )


def _shows_tools(template: ChatTemplate) -> bool:
    """Whether the name of a tool reaches the prompt, with or without a system message before it."""
    for messages in ([_QUESTION], [_SYSTEM, _QUESTION]):
        with contextlib.suppress(InvalidRequest, TooManySteps):
            if _NAME in template.render(messages, tools=_TOOLS):
                return True
    return False


def _writes(
    template: ChatTemplate, prompt: str, format: ToolFormat, text_arguments: bool, no_content: Any
) -> bool:
    """Whether the template writes a call in this format, after its `prompt`, if it gets it in this way."""
    arguments = json.dumps(_ARGUMENTS) if text_arguments else _ARGUMENTS
    answer = _answer(format, arguments, no_content)
    try:
        whole = template.render([_QUESTION, answer], tools=_TOOLS, add_generation_prompt=False)
    except (InvalidRequest, TooManySteps):
        return False
    if format.opener and not whole.startswith(prompt):
        return False
    text = whole.removeprefix(prompt) if format.opener else whole
    if format.sign not in text:
        return False
    parser = MessageParser(MessageReading(format, {_NAME: _SCHEMA}))
    return _has_the_call(merged([*parser.feed(text), *parser.end()]))


def _takes_text(template: ChatTemplate, format: ToolFormat, no_content: Any) -> bool:
    """Whether a template that wants objects also writes a call whose arguments could not be read as one."""
    try:
        template.render([_QUESTION, _answer(format, '{"half', no_content)], tools=_TOOLS)
    except (InvalidRequest, TooManySteps):
        return False
    return True


def _room(
    template: ChatTemplate, format: ToolFormat | None, text_arguments: bool, no_content: Any
) -> dict[str, Any]:
    """Whether a template that writes a call lacks room for two, or for words and reasoning before it; where
    it has room for results, and for reasoning without a call.
    """
    if format is None:
        return {}
    one = _answer(format, json.dumps(_ARGUMENTS) if text_arguments else _ARGUMENTS, no_content)
    other = {"word": _OTHER}
    (second,) = _answer(format, json.dumps(other) if text_arguments else other, no_content)["tool_calls"]
    two = {**one, "tool_calls": [*one["tool_calls"], second]}
    thinks = {**one, "thinking": "Hm.", "reasoning_content": "Hm."}
    responds = {**one, "tool_responses": [{"name": _NAME, "response": _OTHER}]}
    words = {"role": "assistant", "content": "Wait.", **dict.fromkeys(THOUGHTS, _OTHER)}
    return {
        "words_think": _writes_it(template, words, _OTHER),
        "words_role": _words_role(template, responds),
        "tool_responses": _writes_it(template, responds, _OTHER),
        "lone_calls": _writes_it(template, one) and not _writes_it(template, two, _OTHER),
        "lone_words": _writes_it(template, thinks)
        and not _writes_it(template, {**thinks, "content": "Wait."}),
    }


def _words_role(template: ChatTemplate, calls: dict[str, Any]) -> str:
    """The role of words before a message with calls: Gemma 4 writes two of an assistant's as one turn, and
    ends it between them.
    """

    def rendered(*messages: Message, begun: bool = False) -> str:
        return template.render([_QUESTION, *messages], tools=_TOOLS, add_generation_prompt=begun)

    words, roles = "Wait.", ("assistant", "model")
    with contextlib.suppress(InvalidRequest, TooManySteps):
        begin = rendered(begun=True).removeprefix(rendered()).strip()
        for role in roles:
            said = {"role": role, "content": words}
            end = rendered(said).rpartition(words)[2].strip()
            between = rendered(said, calls).rpartition(words)[2].partition(_NAME)[0]
            if not (end and end in between) or begin in between:
                return role
    return roles[0]


def _writes_it(template: ChatTemplate, answer: dict[str, Any], word: str = "tree") -> bool:
    """Whether an answer can be rendered, and the word shows in it."""
    try:
        return word in template.render([_QUESTION, answer], tools=_TOOLS)
    except (InvalidRequest, TooManySteps):
        return False


def _answer(format: ToolFormat, arguments: Any, no_content: Any) -> dict[str, Any]:
    """A message with a call of the tool."""
    id = counted_id(_NAME, 0) if format.ids is CallIds.COUNTED else "abcdef123"
    call = {"id": id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    answer: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    return answer if no_content is ABSENT else answer | {"content": no_content}


def _has_the_call(events: list[Event]) -> bool:
    for start, arguments in itertools.pairwise(events):
        if isinstance(start, CallStarted) and start.name == _NAME and isinstance(arguments, CallArguments):
            try:
                if json.loads(arguments.text) == _ARGUMENTS:
                    return True
            except ValueError:
                continue
    return False


def _reasoning_of(template: ChatTemplate, parser: str) -> ReasoningTags | None:
    """The tags that the flag names, or else those that the template has."""
    if parser != AUTO:
        return REASONING.get(parser)
    return next((tags for tags in REASONING.values() if template.mentions(tags.end)), None)
