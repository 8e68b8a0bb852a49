"""Whether a value of the wire is of a type of OpenAI's SDK, to the letter.

It knows pydantic and nothing of Eyas, so that scripts of this folder can import it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter

# DeepSeek's and SGLang's; vLLM's, by which clients learn the context length; OpenAI's, which its types lack.
OURS = {"reasoning_content", "max_model_len", "store"}


def unknown(value: Any, path: str = "") -> Iterator[str]:
    """Fields that the SDK's types do not know."""
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or {} if name not in OURS)
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name, None), f"{path}.{name}")
    elif isinstance(value, list):
        for part in value:
            yield from unknown(part, f"{path}[]")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """It takes longer to make than to use."""
    return TypeAdapter(kind)


def strictly(kind: Any, raw: Any) -> None:
    """The wire's own value must be of the SDK's type, without a conversion and without unknown fields."""
    read = _adapter(kind).validate_python(raw, strict=True)
    more = sorted(set(unknown(read)))
    assert not more, f"{type(read).__name__} does not know {more}"
