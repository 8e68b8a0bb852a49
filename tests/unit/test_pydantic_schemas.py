"""Whatever a mask of a pydantic model's schema lets through, the model itself takes."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import random
import uuid
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import AnyUrl, BaseModel, Field, HttpUrl, SecretStr, TypeAdapter

from eyas.common.config import NANO
from eyas.common.grammars.compiler import GrammarCompiler, library
from eyas.common.grammars.notations import Grammar

SIZE, END = 4096, 2
MOST = 160  # tokens of a walk; what is longer is no whole text, and not judged
WALKS = 8


class Colour(enum.Enum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


class Home(BaseModel):
    """A part."""

    city: str = Field(max_length=6)
    zip: Annotated[str, Field(pattern=r"^[0-9]{2,5}$", max_length=3)] | None = None


class Tree(BaseModel):
    """A part of itself."""

    n: int = Field(ge=0, le=9)
    below: list[Tree] = Field(default_factory=list, max_length=1)


class Cat(BaseModel):
    """One of two."""

    kind: Literal["cat"] = "cat"
    lives: int = Field(default=9, ge=1, le=9)


class Dog(BaseModel):
    """The other."""

    kind: Literal["dog"] = "dog"


class Pet(BaseModel):
    """One of two, told apart by a tag that has a default."""

    pet: Cat | Dog = Field(discriminator="kind")


class Person(BaseModel):
    """Parts of other kinds."""

    home: Home
    colour: Colour
    sure: bool | None
    scores: dict[Annotated[str, Field(max_length=3)], int] = Field(max_length=2)


TYPES: list[Any] = [
    HttpUrl,
    AnyUrl,
    Path,
    SecretStr,
    bytes,
    set[int],
    set[str],
    set[Colour],
    frozenset[Literal["a", "b", 3]],
    Annotated[str, Field(pattern="^[a-c]+$", min_length=2, max_length=4)],
    Annotated[str, Field(pattern="x", max_length=4)],
    Annotated[int, Field(ge=3, multiple_of=5)],
    Annotated[int, Field(gt=-20, lt=20, multiple_of=7)],
    Annotated[float, Field(ge=0.5, le=2, multiple_of=0.25)],
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    decimal.Decimal,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    Literal["a", 1, None, True],
    Colour,
    tuple[Annotated[int, Field(ge=0, le=5)], bool],
    Pet,
    Person,
    Tree,
    list[Pet],
    dict[Colour, int],
    dict[uuid.UUID, bool],
]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Path(NANO), SIZE, (END,))


def walk(compiled: Any, pick: random.Random) -> str | None:
    """A text that the mask lets through, token by token; None: it did not end."""
    matcher, mask = library().GrammarMatcher(compiled), np.zeros((1, SIZE // 32), np.int32)
    tokens = list[int]()
    for _ in range(MOST):
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert len(allowed), "nothing may follow"
        token = END if END in allowed and pick.random() < 0.5 else int(pick.choice(allowed))
        if token == END:
            return b"".join(compiler().pieces[one] for one in tokens).decode()
        assert matcher.accept_token(token)
        tokens.append(token)
    return None


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_models_take_what_their_masks_let_through(kind: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    compiled = compiler().compile(Grammar.json_schema(adapter.json_schema()))
    pick, judged = random.Random(5), 0
    for _ in range(WALKS):
        text = walk(compiled, pick)
        if text is not None and not (kind is decimal.Decimal and text[0] == '"'):  # any, as its schema says
            adapter.validate_json(text)
            judged += 1
    assert judged or kind in (Path, SecretStr, bytes)
