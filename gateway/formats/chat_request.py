"""Turns the validated body of a chat into a call: its prompt, and what is looked for in the answer.

Messages become what the model's template reads: calls, their results, reasoning, parts of content.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from eyas.common.config import GatewayConfig
from eyas.common.errors import InvalidRequest
from gateway.backends.admission import GenerationOptions, ServedModel, admit, called
from gateway.formats.chat_fields import ChatMessage, ChatToolCall
from gateway.formats.lone_calls import with_room
from gateway.formats.openai_request import ApiCall, api_call, generation_options, named, text_rules, timeout_s
from gateway.formats.schema import ChatBody, TemplateFields
from gateway.formats.tool_responses import with_responses
from gateway.grammars.tool_grammar import answer_grammar
from gateway.parsers import reasoning
from gateway.parsers.message import MessageReading
from gateway.parsers.table import CallIds, counted_id
from gateway.text.dialect import ABSENT, THOUGHTS, TemplateDialect, dialect_of
from gateway.text.entries import TextRules
from gateway.text.templates import Message
from gateway.text.tokenizer import Tokenizer

_NO_EFFORT, _USUAL_EFFORT = "none", "medium"  # OpenAI's words; the second is what silence means there
_SWITCHES = ("enable_thinking", "thinking")  # what templates call the switch of their reasoning
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


class ChatModel(NamedTuple):
    """The model as chats see it."""

    tokenizer: Tokenizer
    dialect: TemplateDialect

    @classmethod
    def of(cls, config: GatewayConfig, tokenizer: Tokenizer) -> ChatModel:
        """The model of this tokenizer; the flags of `config` may name its formats."""
        dialect = dialect_of(tokenizer.template, config.tool_call_parser, config.reasoning_parser)
        return cls(tokenizer, dialect)


async def chat_prompt(
    model: ChatModel, messages: Sequence[ChatMessage], body: TemplateFields, *, special: bool = False
) -> tuple[str, tuple[int, ...]]:
    """The text of the messages, and its ids. `special`: with what the tokenizer puts around a text.

    Raises InvalidRequest if the model's template refuses them or cannot do what is asked.
    """
    tools = _shown_tools(model.dialect, body)
    text, ids = await model.tokenizer.chat_prompt(
        template_messages(messages, model.dialect),
        add_generation_prompt=body.asks_for_a_message,
        continue_final_message=body.continue_final_message,
        template_kwargs=_variables(model.dialect, body),
        tools=tools,
        special=special,
    )
    _check_seen(model.dialect, messages, body, text)
    return text, ids


async def chat_call(
    config: GatewayConfig, served: ServedModel, model: ChatModel, body: ChatBody, *, cut_to_fit: bool = False
) -> ApiCall:
    """The call of a chat. `cut_to_fit`: its longest answer may be more than the context has space for.

    Raises EyasError for what the model cannot do.
    """
    served = called(served, config, body.model, body.lora_path or "")
    text, prompt = await chat_prompt(model, body.messages, body, special=body.add_special_tokens)
    reading = reading_of(model.dialect, body, body.messages, text)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    options = await _options(served, model, body, reading, limit)
    options = dataclasses.replace(options, cut_to_fit=cut_to_fit)
    names = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    with named(names, "messages"):
        request = admit(served, prompt, options, timeout_s(config, body.timeout))
    rules = text_rules(body, continues_prompt=body.continue_final_message, include_stop=body.includes_stop)
    if reading is None:
        return api_call("chatcmpl-", served, body, rules, [request])
    call = api_call("chatcmpl-", served, body, read_rules(rules, reading), [request])
    field, older = call.grammar_field or body.tools_field, body.speaks_functions
    return dataclasses.replace(call, reading=reading, grammar_field=field, speaks_functions=older)


async def _options(
    served: ServedModel, model: ChatModel, body: ChatBody, reading: MessageReading | None, limit: int | None
) -> GenerationOptions:
    options = await generation_options(served, model.tokenizer, body, limit)
    options = options.with_params(logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    options = with_grammar(options, model, body, reading)
    if body.prediction is not None:
        predicted = await model.tokenizer.encode_prompt(body.prediction.text, add_special_tokens=False)
        options = dataclasses.replace(options, predicted=predicted)
    return options


def with_grammar(
    options: GenerationOptions, model: ChatModel, body: TemplateFields, reading: MessageReading | None
) -> GenerationOptions:
    """The options with the grammar of what tools, reasoning and the options' own grammar ask for."""
    if reading is None:
        return options
    grammar = answer_grammar(body, reading, options.params.grammar, model.tokenizer.special_id)
    return options.with_params(grammar=grammar)


def read_rules(rules: TextRules, reading: MessageReading) -> TextRules:
    """The rules of a text that is read: it shows what the reader looks for."""
    return msgspec.structs.replace(rules, shown=reading.markers, offsets=reading.reasoning is not None)


def _variables(dialect: TemplateDialect, body: TemplateFields) -> dict[str, Any]:
    """Returns the template's other variables. Raises InvalidRequest for one that it does not read."""
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.documents:
        _check("documents", "documents" in dialect.reads, "reads no documents")
        variables["documents"] = body.documents
    thinks, field, effort = body.enable_thinking, "enable_thinking", body.reasoning_effort
    if effort is not None and "reasoning_effort" in dialect.reads:
        variables["reasoning_effort"] = effort
    elif effort == _NO_EFFORT and thinks is None:
        thinks, field = False, "reasoning_effort"
    elif effort not in (None, _NO_EFFORT, _USUAL_EFFORT):
        _check("reasoning_effort", False, "knows no effort")
    if thinks is not None:
        switches = [name for name in _SWITCHES if name in dialect.reads]
        idle = not thinks and dialect.reasoning is None  # such a model never thinks
        _check(field, bool(switches) or idle, "has no switch for its reasoning")
        variables |= dict.fromkeys(switches, thinks)
    return variables


def _shown_tools(dialect: TemplateDialect, body: TemplateFields) -> list[dict[str, Any]] | None:
    """The tools that the template shows to the model; none of them if it may call none."""
    tools = body.callable_tools
    if not tools:
        return None
    _check(body.tools_field, dialect.calls is not None, "writes no calls of tools")
    return [tool.written for tool in tools]


def _check_seen(
    dialect: TemplateDialect, messages: Sequence[ChatMessage], body: TemplateFields, prompt: str
) -> None:
    """Raises InvalidRequest for a tool whose name does not reach the model.

    Where the template shows none, a caller may do so in a system message. (A user's question may hold the
    name by chance.)
    """
    visible = prompt
    if not dialect.shows_tools:
        system = [message for message in messages if message.role in ("system", "developer")]
        visible = "\n".join(text for message in system for text in texts_of(message))
    for name in [tool.function.name for tool in body.callable_tools]:
        if name not in visible:
            lack = f"does not show {name[:100]!r} to the model (--chat-template gives another one)"
            _check(body.tools_field, False, lack)


def _check(field: str, can: bool, lack: str) -> None:
    if not can:
        raise InvalidRequest(f"{field} is not supported: the model's chat template {lack}", param=field)


def reading_of(
    dialect: TemplateDialect, body: TemplateFields, messages: Sequence[ChatMessage], prompt: str
) -> MessageReading | None:
    """Returns how the answer is parsed; None if all of it is content."""
    tools = {tool.function.name: tool.function.parameters or {} for tool in body.callable_tools}
    tags = dialect.reasoning
    if not tools and tags is None:
        return None
    continues = body.continue_final_message
    return MessageReading(
        calls=dialect.calls if tools or (dialect.calls and dialect.calls.frame) else None,
        tools=tools,
        most_calls=1 if body.named_tool or not body.parallel_tool_calls else None,
        calls_before=calls_in(messages),
        is_named=body.named_tool is not None,
        reasoning=tags,
        is_open=tags is not None and reasoning.is_open(tags, prompt, continues=continues),
    )


def template_messages(messages: Sequence[ChatMessage], dialect: TemplateDialect) -> list[Message]:
    """The chat as this dialect's template reads it. Keys without a value are left out."""
    ids = _ChatCallIds(dialect)
    made = with_room([_message(message, dialect, ids) for message in messages], dialect)
    return with_responses(made, dialect) if dialect.tool_responses else made


def calls_in(messages: Sequence[ChatMessage]) -> int:
    """How many calls the chat has."""
    return sum(len(message.tool_calls or ()) for message in messages)


def _message(message: ChatMessage, dialect: TemplateDialect, ids: _ChatCallIds) -> Message:
    read: dict[str, Any] = {"role": message.role}
    content = _content(message, dialect)
    if content is not ABSENT:
        read["content"] = content
    if message.name is not None:
        read["name"] = message.name
    if (thought := message.reasoning) is not None:
        read |= dict.fromkeys(THOUGHTS, thought)
    if message.tool_calls:
        read["tool_calls"] = [_call(call, dialect, ids) for call in message.tool_calls]
    if message.tool_call_id is not None:
        read["tool_call_id"] = ids.of_result(message.tool_call_id)
    return read


def _content(message: ChatMessage, dialect: TemplateDialect) -> Any:
    """Text; parts where the template goes through them; what it wants for none."""
    content: str | list[Any] | None = message.content
    if content is None:
        return dialect.no_content if message.tool_calls else ""
    if isinstance(content, str):
        return content
    if dialect.lists_parts:
        return [{"type": part.type, "text": part.text} for part in content]
    return "\n".join(part.text for part in content)


def texts_of(message: ChatMessage) -> list[str]:
    """The texts of a message's content."""
    content: str | list[Any] | None = message.content
    return [content] if isinstance(content, str) else [part.text for part in content or ()]


def _call(call: ChatToolCall, dialect: TemplateDialect, ids: _ChatCallIds) -> Mapping[str, Any]:
    arguments = call.function.arguments
    if dialect.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not dialect.text_arguments and isinstance(arguments, str):
        arguments = _object(arguments)
        if dialect.object_arguments and not isinstance(arguments, dict):
            arguments = {"arguments": arguments}
    function = {"name": call.function.name, "arguments": arguments}
    written = {"type": "function", "function": function}
    id = ids.of_call(call)
    return written if id is None else {"id": id, **written}


def _object(arguments: str) -> Any:
    """The object of this text, which stays text if it is none, or holds half of a surrogate pair: a model's
    mistakes are part of its history.
    """
    try:
        read = json.loads(arguments) if arguments.strip() else {}
        json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


class _ChatCallIds:
    """The ids of a chat's calls as the template wants them, in the order in which messages have them."""

    def __init__(self, dialect: TemplateDialect) -> None:
        self._kind = CallIds.FREE if dialect.calls is None else dialect.calls.ids
        self._counted: dict[str, str] = {}  # by the caller's ids
        self._count = 0

    def of_call(self, call: ChatToolCall) -> str | None:
        """Returns the id of a call; one without an id gets one only where calls are counted."""
        if self._kind is CallIds.COUNTED:
            id = counted_id(call.function.name, self._count)
            self._count += 1
            if call.id is not None:
                self._counted[call.id] = id
            return id
        return None if call.id is None else self._short(call.id)

    def of_result(self, id: str) -> str:
        """Returns the id of the call whose result a message is."""
        return self._counted.get(id, id) if self._kind is CallIds.COUNTED else self._short(id)

    def _short(self, id: str) -> str:
        """The id; for templates that want nine characters, nine made of any other."""
        if self._kind is not CallIds.SHORT or _SHORT_ID.fullmatch(id):
            return id
        return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
