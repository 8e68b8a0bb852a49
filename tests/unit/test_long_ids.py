"""Long lists of ids are read as the whole body would be, and what is wrong in them is said as it would be."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.common.errors import InvalidRequest
from eyas.common.params import INT32_MAX
from gateway.formats import fields
from gateway.formats.fields import RequestBody, ignored, parse
from gateway.formats.schema import TextBody
from gateway.formats.sglang import GenerateBody
from gateway.http import long_ids
from gateway.http.long_ids import LONG_BYTES, all_below, split

MANY = list(range(1000, 3000))
LAST = json.dumps(MANY)[:-1]
KINDS = [(TextBody, "prompt", '"model": "m"'), (GenerateBody, "input_ids", '"rid": "r"')]


def read(kind: type[RequestBody], body: bytes) -> Any:
    """What comes of the body: (fields, ignored names), or an error's message and field."""
    try:
        found = parse(kind, body)
    except InvalidRequest as error:
        return str(error), error.param
    given = {name: _plain(value) for name, value in vars(found).items()}
    return repr(given), list(ignored(found)), repr(found.model_extra)  # a NaN is not equal to itself


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return list(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def check(kind: type[RequestBody], body: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What comes of it, the same as if it was read whole."""
    got = read(kind, body)
    with monkeypatch.context() as patched:
        patched.setattr(fields.long_ids, "split", lambda body, field: None)
        assert got == read(kind, body)
    return got


@pytest.mark.parametrize(("kind", "field", "rest"), KINDS)
@pytest.mark.parametrize(
    "last",
    [
        *(
            "1.5",
            "2.0",
            "1e3",
            "-1",
            "-0",
            "true",
            "null",
            '"5"',
            "[1]",
            "[]",
            "{}",
            "007",
            "+1",
            "1 2",
            "NaN",
        ),
        *(
            str(INT32_MAX),
            str(INT32_MAX + 1),
            str(2**64),
            "1" + "0" * 400,
            "",
            "7 ",
            "\n7\t",
            "\u0667",
            "0x7",
        ),
    ],
)
def test_any_last_id(
    kind: type[RequestBody], field: str, rest: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f'{{{rest}, "{field}": {LAST}, {last}]}}'.encode()
    assert len(body) > LONG_BYTES
    got = check(kind, body, monkeypatch)
    if last in ("1.5", "true", '"5"', "[1]"):
        assert got[1] == field


@pytest.mark.parametrize(("kind", "field", "rest"), KINDS)
def test_any_rest(kind: type[RequestBody], field: str, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the body around the ids: unknown and repeated fields, errors of others, and what is no JSON."""
    ids = f'"{field}": {LAST}]'
    for body in (
        f"{{{rest}, {ids}}}",
        f'{{{rest}, "a": 1, {ids}, "b": {{"{field}": [1]}}, "stream": null}}',
        f'{{{rest}, "{field}": "x", {ids}}}',
        f'{{{rest}, {ids}, "{field}": [5]}}',
        f'{{{rest}, {ids}, "{field}": "x"}}',
        f'{{{rest}, {ids}, "n": 1, "a": 1, "n": 2, "a": 2}}',
        f'{{{rest}, {ids}, "priority": true}}',
        f'{{{rest}, {ids}, "timeout": -1}}',
        f'{{{rest}, {ids}, "n": NaN}}',
        f'{{{rest}, {ids}, "x": nul}}',
        f'{{{rest}, {ids}, "\\u00e4\\ud83d\\ude00": 1, "\\ud800": 2}}',
        f'{{{rest}, {ids}, "text": "both"}}',
        f"{{{rest}, {ids}}} x",
        f"{{{rest}, {ids},}}",
        f"{{{rest}, {ids}",
        f"[{{{rest}, {ids}}}]",
        f'{{"user": "{{\\"{field}\\": {LAST}]}}", "{field}": [1, true], {rest}}}',
        f'{{"{field}": [{LAST}], [5]], {rest}}}',
        f'{{"{field}": [{" " * LONG_BYTES}], {rest}}}',
        f'{{"{field}": [{" " * LONG_BYTES}5], {rest}}}',
        f'{{{rest}, {ids}, "a": {"[" * 50_000}{"]" * 50_000}}}',
        f'{{{rest}, {ids}, "n": {"[" * 50_000}',
    ):
        check(kind, body.encode(), monkeypatch)
        check(kind, b"\xef\xbb\xbf" + body.encode(), monkeypatch)
        check(kind, body.replace('"a"', '"\xff"').encode("latin-1", "replace"), monkeypatch)


@given(
    st.lists(st.integers(0, INT32_MAX), min_size=1),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ":")]),
)
def test_ids_are_those_written(few: list[int], separators: tuple[str, str]) -> None:
    ids = few * (LONG_BYTES // len(few) + 1)
    parts = split(json.dumps({"a": "x", "p": ids}, separators=separators).encode(), "p")
    assert parts is not None and parts[1] == array("i", ids)
    assert json.loads(parts[0]) == {"a": "x", "p": [0]}


def test_a_long_list_makes_no_object_per_id() -> None:
    body = f'{{"model": "m", "prompt": {LAST}]}}'.encode()
    (prompt,) = parse(TextBody, body).prompt
    assert isinstance(prompt, array) and long_ids.settled(prompt) is prompt
    (short,) = parse(TextBody, b'{"model": "m", "prompt": [1, 2]}').prompt
    assert long_ids.settled(short) == (1, 2)


@given(st.lists(st.integers(-2, 12), min_size=1), st.integers(1, 12))
def test_bounds_of_an_array_are_those_of_a_tuple(ids: list[int], end: int) -> None:
    assert all_below(array("i", ids), end) == all_below(tuple(ids), end) == all(0 <= id < end for id in ids)


@pytest.mark.parametrize("ids", [[1, 2], MANY])
def test_a_byte_order_mark_before_the_body_is_left_out(ids: list[int]) -> None:
    body = json.dumps({"model": "m", "prompt": ids}).encode()
    assert read(TextBody, b"\xef\xbb\xbf" + body) == read(TextBody, body)
    assert "not valid JSON" in read(TextBody, b"\xef\xbb\xbf" * 2 + body)[0]
