"""Random values, hostile or nearly right: JSON, protobuf messages, bytes. They know no server."""

from __future__ import annotations

import json
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

NUMBERS = (
    0,
    1,
    -1,
    2,
    16,
    4095,
    4096,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**32,
    2**63,
    2**64,
    10**30,
    0.5,
    -0.5,
    1e-9,
    1e308,
)
WORDS = (
    "",
    " ",
    "a",
    "user",
    "Hello!",
    "\x00",
    "\ud7ff\ue000",
    "é" * 40,
    "🙂🙃",
    "</s>",
    "{{ 7*7 }}",
    "../../etc/passwd",
    "x" * 5000,
)
LITERALS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "01",
    "'a'",
    "{",
    "[",
    '"\\ud800"',
    "tru",
    "[1,]",
    '{"a":1,"a":2}',
)
ENDS: dict[int, tuple[Any, ...]] = {  # of values that were right
    Field.TYPE_STRING: ("\x00", "x", "/..", "é"),
    Field.TYPE_BYTES: (b"\x00", b"\x00" * 4, b"\xff" * 1024),
}
SAMPLES: dict[int, tuple[Any, ...]] = {
    Field.TYPE_INT32: (0, 1, 2, 5, -1, 77, 4096, 2**31 - 1, -(2**31)),
    Field.TYPE_SINT32: (0, 1, 2, 5, -1, 100, -101, 2**31 - 1, -(2**31)),
    Field.TYPE_UINT32: (0, 1, 2, 9, 2**32 - 1),
    Field.TYPE_FIXED32: (0, 1, 2, 9, 2**32 - 1),
    Field.TYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    Field.TYPE_UINT64: (0, 1, 2, 2**64 - 1),
    Field.TYPE_DOUBLE: (0.0, 1.0, 0.7, -1.0, 1e308, float("nan"), float("inf"), -float("inf")),
    Field.TYPE_FLOAT: (0.0, 1.0, 0.7, -1.0, 3e38, float("nan"), float("inf"), -float("inf")),
    Field.TYPE_BOOL: (True, False),
    Field.TYPE_ENUM: (0, 1, 2, 3, 99, -1),
    Field.TYPE_STRING: ("", "a", "user", "eyas-nano", "127.0.0.1:1", "0" * 24, "x" * 3000, "\x00", "é🙂"),
    Field.TYPE_BYTES: (b"", b"\x00", b"\xff" * 7, b"\x00" * 4096, b"{}"),
}


def any_json(rng: random.Random, depth: int = 0) -> Any:
    """A value of any type: numbers at the limits of types, odd strings, nested lists and objects."""
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(WORDS)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return rng.randrange(-5, 5000)
    size = rng.choice((0, 1, 2, 3, 20))
    if kind == 4:
        return [any_json(rng, depth + 1) for _ in range(size)]
    return {rng.choice(WORDS[:8]) + str(i): any_json(rng, depth + 1) for i in range(size)}


def mutated(rng: random.Random, body: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    """`body` with some of its values, or of those of the known `fields`, replaced, dropped or added."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name = rng.choice([*body, *fields, "no_such_field"])
        inner = body.get(name)
        if isinstance(inner, dict) and inner and rng.random() < 0.7:
            inner[rng.choice([*inner, "no_such_field"])] = any_json(rng)
        elif isinstance(inner, list) and inner and rng.random() < 0.5:
            inner[rng.randrange(len(inner))] = any_json(rng)
        elif name in body and rng.random() < 0.15:
            del body[name]
        else:
            body[name] = any_json(rng)
    return body


def broken(rng: random.Random, text: bytes) -> bytes:
    """Bytes that were JSON once: cut, doubled, with a byte changed, a literal put in, or nested too deep."""
    at = rng.randrange(len(text) + 1)
    return rng.choice(
        (
            text[:at],
            text + text,
            text[:at] + rng.randbytes(3) + text[at:],
            text[:at] + rng.choice(LITERALS).encode() + text[at:],
            b"[" * 50_000,
            b'{"a":' * 20_000,
            rng.randbytes(rng.choice((1, 10, 1000))),
            b"",
        )
    )


def nearly(rng: random.Random, message: Message) -> bytes:
    """`message` on the wire, with one field changed, at any depth."""
    changed = type(message).FromString(message.SerializeToString())
    _change(rng, changed)
    return bytes(changed.SerializeToString())


def _change(rng: random.Random, message: Message) -> None:
    """One field of `message`, or of a message in it, is replaced, dropped, or (in a list) doubled."""
    fields = message.DESCRIPTOR.fields
    present = [field for field, _ in message.ListFields()]
    if not fields:
        return
    field = rng.choice(present if present and rng.random() < 0.8 else fields)
    inner = _messages_in(message, field)
    if inner and rng.random() < 0.8:
        _change(rng, rng.choice(inner))
    elif field.is_repeated and field in present and not _is_map(field) and rng.random() < 0.4:
        values = getattr(message, field.name)
        values.extend(list(values) * rng.choice((1, 1, 1, 500)))
    elif field.is_repeated and field in present and not _is_map(field) and not inner:
        values = getattr(message, field.name)
        values[rng.randrange(len(values))] = rng.choice(SAMPLES[field.type])
    elif field.type in ENDS and not field.is_repeated and rng.random() < 0.5:
        right = getattr(message, field.name)
        cut = right[: rng.randrange(len(right) + 1)]
        setattr(message, field.name, rng.choice((cut, right + rng.choice(ENDS[field.type]))))
    else:
        message.ClearField(field.name)
        if rng.random() < 0.8:
            _set(rng, message, field, 0)


def _messages_in(message: Message, field: Field) -> list[Message]:
    """The messages that stand in `field`."""
    if field.message_type is None or _is_map(field):
        return []
    if field.is_repeated:
        return list(getattr(message, field.name))
    return [getattr(message, field.name)] if message.HasField(field.name) else []


def fill(rng: random.Random, message: Message, depth: int = 0) -> Message:
    """Sets about half of the fields of `message`, one of each oneof, to random values."""
    for field in message.DESCRIPTOR.fields:
        group = field.containing_oneof
        if not (group is not None and message.WhichOneof(group.name) or rng.random() < 0.4 or depth > 4):
            _set(rng, message, field, depth)
    return message


def _set(rng: random.Random, message: Message, field: Field, depth: int) -> None:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name].type for name in ("key", "value"))
        keys = rng.sample(SAMPLES[key], rng.randrange(3))
        getattr(message, field.name).update({key: rng.choice(SAMPLES[value]) for key in keys})
    elif field.is_repeated:
        for _ in range(rng.choice((0, 1, 2, 9))):
            _append(rng, getattr(message, field.name), field, depth)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        fill(rng, getattr(message, field.name), depth + 1)
    else:
        setattr(message, field.name, rng.choice(SAMPLES[field.type]))


def _append(rng: random.Random, values: Any, field: Field, depth: int) -> None:
    if field.message_type is not None:
        fill(rng, values.add(), depth + 1)
    else:
        values.append(rng.choice(SAMPLES[field.type]))


def _is_map(field: Field) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)
