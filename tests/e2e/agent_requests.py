"""What an agent asks: answers that a schema describes, and dialogues with tools in every format of calls.

A request comes with a judge of its answer, who reads it as a caller would. How requests are answered is not
known here.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema

from eyas.common.config import NANO
from eyas.common.grammars.notations import Grammar
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from gateway.formats.chat_request import ChatModel, chat_prompt, reading_of
from gateway.formats.fields import validated
from gateway.grammars.tool_grammar import answer_grammar
from gateway.grpc.messages import GrpcChat
from gateway.parsers.message import MessageParser, MessageReading
from gateway.parsers.output import CallArguments, CallDone, CallStarted, ContentText, merged
from gateway.text.dialect import dialect_of
from gateway.text.templates import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from tests.chat_templates import TEMPLATES
from tests.unit.grammar_cases import ENDS, random_schema, some_params, text_of
from tools.nano.heldout import heldout_prompts

FORMATS = (
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "mistral_v11",
    "deepseek_v3_1",
    "glm45",
    "kimi_k2",
    "deepseek_v3",
    "gpt_oss",
    "pythonic",
)
MAX_TOKENS = 96
CALL_TOKENS = 160  # where a small vocabulary writes a format's markers letter by letter
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
}
Judge = Callable[[str], None]  # raises ValueError for what its caller did not ask for
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """A request, and the judge of its answer. `kind`: a schema's, or the format of calls; `dialogue`: that it
    belongs to, if any.
    """

    request: GenerationRequest
    judge: Judge
    kind: str
    dialogue: Dialogue | None = None

    def verdict(self, tokens: Tokens) -> str:
        """What is wrong with an answer. "" if nothing is, "cut" if `max_tokens` ended it."""
        if not tokens or tokens[-1] not in (*ENDS, *self.request.params.stop_token_ids):
            return "cut" if len(tokens) == self.request.params.max_tokens else "it ends for no reason"
        try:
            self.judge(text_of(list(tokens)))
        except (ValueError, jsonschema.ValidationError) as error:
            return str(error).splitlines()[0] or type(error).__name__
        return ""


def schemas(count: int, seed: int) -> list[Asked]:
    """Random schemas, each beside a prompt, under parameters of many kinds."""
    pick, made = random.Random(seed), list[Asked]()
    chats = heldout_prompts(count, seed)
    tokenizer = Tokenizer.load(NANO)
    for i, chat in enumerate(chats):
        schema = random_schema(pick)
        params = {"max_tokens": MAX_TOKENS} | some_params(pick)
        params.pop("stop_token_ids", None)
        wanted = SamplingParams(**params, grammar=Grammar.json_schema(schema))
        request = GenerationRequest(f"schema/{i}", asyncio.run(tokenizer.encode_chat(chat)), wanted)
        made.append(Asked(request, _follows(schema), "schema"))
    return made


def dialogues(count: int, seed: int) -> list[Asked]:
    """The first questions of dialogues with tools, the formats in turn; which is the first, the seed says."""
    pick = random.Random(seed)
    chats = heldout_prompts(count, seed + 1)
    return [
        Dialogue(f"tools/{i}", FORMATS[(seed * count + i) % len(FORMATS)], chat, pick).first()
        for i, chat in enumerate(chats)
    ]


class Dialogue:
    """A person asks, the model calls tools, they answer, and the model answers or calls again."""

    def __init__(self, name: str, format: str, chat: list[Any], pick: random.Random) -> None:
        self.name = name
        self.format = format
        self._model = _model(format)
        self._messages: list[dict[str, Any]] = [*chat]
        self._pick = random.Random(pick.getrandbits(64))
        self._tools = [_tool(f"tool_{i}", self._pick) for i in range(self._pick.randrange(1, 4))]
        if "tools" not in str(TEMPLATES[format]):  # then the caller says which there are
            names = ", ".join(tool["function"]["name"] for tool in self._tools)
            self._messages.insert(0, {"role": "system", "content": f"Tools: {names}."})
        self._reading = MessageReading()

    def first(self) -> Asked:
        """Calls of one tool or of any: asked for, or strict where the model comes to call."""
        tools = self._tools
        named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
        return self._ask("first", self._pick.choice(["required", "required", named, "auto"]), None)

    def second(self, answer: str) -> Asked | None:
        """After the first answer and what its calls gave; None if it made none."""
        found = read(self._reading, answer)
        calls = [
            {"id": f"abc12345{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(found.calls)
        ]
        if not calls:
            return None
        self._messages.append({"role": "assistant", "content": found.content or None, "tool_calls": calls})
        for call in calls:
            told = json.dumps({"found": self._pick.randrange(100)})
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
        return self._ask("second", "auto", Grammar.json_schema(ANSWER))

    def _ask(self, turn: str, choice: Any, content: Grammar | None) -> Asked:
        fields = {"messages": self._messages, "tools": self._tools, "tool_choice": choice}
        if "enable_thinking" in self._model.dialect.reads:
            fields["enable_thinking"] = False  # a small model would reason to the end
        chat = validated(GrpcChat, fields)
        text, ids = asyncio.run(chat_prompt(self._model, chat.messages, chat))
        reading = reading_of(self._model.dialect, chat, chat.messages, text)
        assert reading is not None
        self._reading = reading
        grammar = answer_grammar(chat, reading, content, self._model.tokenizer.special_id)
        sampled = {"temperature": self._pick.choice((0.0, 0.8)), "seed": self._pick.getrandbits(64)}
        params = SamplingParams(max_tokens=CALL_TOKENS, grammar=grammar, **sampled)
        request = GenerationRequest(f"{self.name}/{turn}", ids, params)
        must = choice != "auto"
        judge = _calls_follow(reading, self._tools, must, content is not None)
        return Asked(request, judge, self.format, self)


@dataclass(frozen=True)
class Found:
    """What a reader finds in an answer: its content, and (name, arguments) of each complete call."""

    content: str
    calls: tuple[tuple[str, str], ...]


def read(reading: MessageReading, text: str, cuts: random.Random | None = None) -> Found:
    """By the gateway's own parser, given the text at once or in pieces. Raises ValueError for half a call."""
    parser, pieces = MessageParser(reading), [text]
    if cuts is not None:
        places = sorted(cuts.sample(range(len(text) + 1), min(len(text), 9)))
        pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    events = merged([event for piece in pieces for event in parser.feed(piece)] + parser.end())
    begun = {event.index: event.name for event in events if isinstance(event, CallStarted)}
    arguments = {event.index: event.text for event in events if isinstance(event, CallArguments)}
    if len([event for event in events if isinstance(event, CallDone)]) != len(begun):
        raise ValueError("a call is not complete")
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    return Found(content, tuple((name, arguments[index]) for index, name in begun.items()))


def _calls_follow(
    reading: MessageReading, tools: list[dict[str, Any]], must: bool, has_format: bool
) -> Judge:
    """Every call is of a tool, by its schema; `must`: there is one; `has_format`: else the answer has one."""
    schemas: Mapping[str, Any] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}

    def judge(text: str) -> None:
        found = read(reading, text)
        if read(reading, text, random.Random(len(text))) != found:
            raise ValueError("how the text is cut changes what is read")
        if must and (found.content or not found.calls):
            raise ValueError(f"not calls alone: {text!r}")
        for name, arguments in found.calls:
            jsonschema.validate(json.loads(arguments), schemas[name])
        if has_format and not found.calls:
            jsonschema.validate(json.loads(found.content), ANSWER)

    return judge


def _follows(schema: Any) -> Judge:
    return lambda text: jsonschema.validate(json.loads(text), schema)


def _tool(name: str, pick: random.Random) -> dict[str, Any]:
    properties = {
        f"{name}_{key}": random_schema(pick, 3) for key in ("from", "to", "by")[: pick.randrange(1, 4)]
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": pick.sample([*properties], pick.randrange(len(properties) + 1)),
        "additionalProperties": False,
    }
    function = {"name": name, "description": f"Does {name}.", "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


@cache
def _model(format: str) -> ChatModel:
    """The embedded model, as if it had been taught this format: its markers are text to it."""
    template = ChatTemplate(TEMPLATES[format], {"bos_token": "", "eos_token": ""})
    return ChatModel(Tokenizer(Tokenizer.load(NANO).table.hf, template), dialect_of(template))
