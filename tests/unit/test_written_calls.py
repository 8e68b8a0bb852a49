"""Whatever a grammar of calls lets a model write is read as the schema says, however it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from answers import check_cuts
from call_writer import Writer, demanded, random_parameters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.parsers.output import CallArguments, CallDone, CallStarted

BY_PARAMETER = ["qwen3_coder", "glm45"]
CALL = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=s>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
}
WRITER = Writer()


@pytest.mark.parametrize("format", [*BY_PARAMETER, "pythonic", "minimax_m2", "gemma4"])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_a_call_is_read_as_its_grammar_let_it_be_written(format: str, seed: int) -> None:
    check(format, random.Random(seed))


@pytest.mark.parametrize("format", BY_PARAMETER)
def test_a_grammar_lets_no_bytes_be_written_that_are_no_text(format: str) -> None:
    """Half a surrogate pair is read as three characters, which may be more than a schema allows."""
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": 2}},
        "required": ["s"],
        "additionalProperties": False,
    }
    grammar, _ = demanded(format, schema)
    before, _, after = CALL[format].partition("{}")
    for value in (b"", "é".encode(), "\ud7ff\U0001f642".encode()):
        assert WRITER.accepts(grammar, before.encode() + value + after.encode())
    assert not WRITER.accepts(grammar, before.encode() + b"\xed\xa0\x80" + after.encode())


def check(format: str, pick: random.Random, schema: Any = None) -> bool:
    """Whether a call was written to its end. Fails if it is read otherwise than by its schema."""
    schema = random_parameters(pick) if schema is None else schema
    grammar, reading = demanded(format, schema)
    text = WRITER.write(grammar, pick)
    if text is None:
        return False
    found = check_cuts(reading, text, pick, most=8)
    kinds = [type(event) for event in found]
    assert kinds == [CallStarted, CallArguments, CallDone], text
    assert isinstance(found[1], CallArguments)
    told = json.loads(found[1].text)
    jsonschema.Draft202012Validator(schema).validate(told)
    return True
