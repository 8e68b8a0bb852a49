"""The fields of a body that ask for structured output, by OpenAI's, vLLM's and SGLang's names.

One of them at most may ask for something. null, an empty text, list or object ask for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.notations import Grammar
from gateway.formats.fields import RequestBody, given, needs, refuse


def _object_or_text(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError("must be a JSON object, or the text of one")
    return value


ObjectOrText = Annotated[Any, PlainValidator(_object_or_text, json_schema_input_type=str | dict[str, Any])]


class JsonSchemaFormat(RequestBody):
    """A JSON schema with a name."""

    name: str | None = None
    """Not read."""
    description: str | None = None
    """Not read."""
    definition: dict[str, Any] = Field(validation_alias="schema")
    """The schema that the answer follows."""
    strict: bool | None = None
    """Not read: the answer follows the schema in any case."""


class ResponseFormat(RequestBody):
    """The format of an answer, by OpenAI's names."""

    rules = (
        needs(given("type", {"const": "json_schema"}), given("json_schema")),
        needs(given("type", {"const": "structural_tag"}), {"anyOf": [given("format"), given("structures")]}),
    )

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    """`text`: anything."""
    json_schema: JsonSchemaFormat | None = None
    """With `json_schema`: the schema."""
    format: dict[str, Any] | None = None
    """With `structural_tag`: xgrammar's description of the text."""
    structures: list[dict[str, Any]] | None = None
    """With `structural_tag`: the older notation, beside `triggers`."""
    triggers: list[str] | None = None
    """With `structural_tag`: the texts at which structures may begin."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            refuse("json_schema", "is required with the type json_schema")
        if self.type == "structural_tag" and self.format is None and self.structures is None:
            refuse("format", "is required with the type structural_tag")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """None: any text."""
        match self.type:
            case "json_object":
                return Grammar.json_object()
            case "json_schema":
                assert self.json_schema is not None
                return Grammar.json_schema(self.json_schema.definition)
            case "structural_tag":
                parts = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
                fields = {name: part for name, part in parts.items() if part is not None}
                return Grammar.structural_tag({"type": "structural_tag", **fields})
        return None


class StructuredOutputs(RequestBody):
    """The format of an answer, by vLLM's newer names: one of these fields."""

    json_schema: ObjectOrText | None = Field(None, validation_alias="json")
    """A JSON schema."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: list[str] | None = None
    """Texts, one of which is the answer."""
    grammar: str | None = None
    """Rules in GBNF, from `root` on."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: ObjectOrText | None = None
    """xgrammar's description of a text with structured parts."""
    disable_any_whitespace: bool | None = None
    """True: what `json` or `json_object` asks for is written without white space between values."""

    def as_json(self, schema: Any) -> Grammar:
        """The grammar of a schema's values; True: of any object."""
        grammar = Grammar.json_object() if schema is True else Grammar.json_schema(schema)
        return grammar.compact() if self.disable_any_whitespace else grammar


class GrammarFields(RequestBody):
    """SGLang's names, which every route that generates takes."""

    json_schema: ObjectOrText | None = None
    """The answer is a JSON value that this JSON schema describes."""
    regex: str | None = None
    """The answer is a text that this regular expression matches as a whole."""
    ebnf: str | None = None
    """The answer is what these rules in GBNF derive from `root`."""
    structural_tag: ObjectOrText | None = None
    """The answer is text with structured parts, as xgrammar's structural tags describe it."""

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        given: list[str] = []
        for name, make, value in self._grammars():
            if value in ("", [], {}, None, False):
                continue
            given.append(name)
            try:
                if (grammar := make(value)) is not None:
                    grammar.validate()
                else:
                    given.pop()
            except InvalidRequest as error:
                refuse(name, f"cannot be followed: {error.message}")
        if len(given) > 1:
            names = ", ".join(given)
            refuse(given[1], f"cannot be asked for beside {given[0]}: give one of {names}")
        return self

    @property
    def grammar_field(self) -> tuple[str, Grammar] | None:
        """The field that asks for a grammar, and the grammar. None: none does."""
        for name, make, value in self._grammars():
            if value not in ("", [], {}, None, False) and (grammar := make(value)) is not None:
                return name, grammar
        return None

    def _grammars(self) -> Iterator[tuple[str, Any, Any]]:
        """Names of fields, how their values become grammars, and their values."""
        yield "json_schema", Grammar.json_schema, self.json_schema
        yield "regex", Grammar.regex, self.regex
        yield "ebnf", Grammar.ebnf, self.ebnf
        yield "structural_tag", Grammar.structural_tag, self.structural_tag


class GuidedFields(GrammarFields):
    """OpenAI's and vLLM's names, which its routes take too."""

    response_format: ResponseFormat | None = None
    """The answer is text, any JSON object, a value that a JSON schema describes, or a structural tag."""
    guided_json: ObjectOrText | None = None
    """vLLM's name of `json_schema`."""
    guided_regex: str | None = None
    """vLLM's name of `regex`."""
    guided_grammar: str | None = None
    """vLLM's name of `ebnf`."""
    guided_choice: list[str] | None = None
    """The answer is one of these texts."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's newer notation of the same."""

    def _grammars(self) -> Iterator[tuple[str, Any, Any]]:
        yield from super()._grammars()
        yield "response_format", lambda format: format.grammar, self.response_format
        yield "guided_json", Grammar.json_schema, self.guided_json
        yield "guided_regex", Grammar.regex, self.guided_regex
        yield "guided_grammar", Grammar.ebnf, self.guided_grammar
        yield "guided_choice", Grammar.choice, self.guided_choice
        if (outputs := self.structured_outputs) is not None:
            yield "structured_outputs.json", outputs.as_json, outputs.json_schema
            yield "structured_outputs.regex", Grammar.regex, outputs.regex
            yield "structured_outputs.choice", Grammar.choice, outputs.choice
            yield "structured_outputs.grammar", Grammar.ebnf, outputs.grammar
            yield "structured_outputs.json_object", outputs.as_json, outputs.json_object
            yield "structured_outputs.structural_tag", Grammar.structural_tag, outputs.structural_tag
