"""The SDK's public names are typed to the last parameter, and say so to type checkers."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import pytest

import eyas.client

CLASSES = [thing for name in eyas.client.__all__ if inspect.isclass(thing := getattr(eyas.client, name))]


def functions(cls: type) -> Iterator[Callable[..., Any]]:
    """What the class itself offers to its users."""
    for name, member in vars(cls).items():
        if name.startswith("_") and not (name.startswith("__") and name.endswith("__")):
            continue
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and function.__module__.startswith("eyas."):
            yield function


def test_type_checkers_are_told() -> None:
    assert (resources.files("eyas") / "py.typed").is_file()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_parameter_and_result_has_a_type(cls: type) -> None:
    typing.get_type_hints(cls)  # every field's type can be found
    for function in functions(cls):
        hints = typing.get_type_hints(function)
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        assert {*names, "return"} <= hints.keys(), function.__qualname__
