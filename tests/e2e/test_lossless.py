"""A part of `make lossless`: whatever way requests are answered, every token is the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.lossless import BROKEN, REFERENCE, VARIANTS, Requests, Variant, differences, make_requests, run
from tests.e2e.lossless_ways import InProcess, Tokens

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = 3
SEED = 21


def each(variants: list[Variant]) -> list[Any]:
    """Engines of this process; those that are not quick are slow tests."""
    return [
        pytest.param(variant, id=variant.name, marks=() if variant.quick else pytest.mark.slow)
        for variant in variants
        if isinstance(variant.way, InProcess)
    ]


@pytest.fixture(scope="module")
def requests() -> Requests:
    return make_requests(PROMPTS, SEED)


@pytest.fixture(scope="module")
def expected(requests: Requests) -> Tokens:
    return run(REFERENCE, requests, None, lambda: None).answers.tokens


@pytest.mark.parametrize("variant", each(VARIANTS))
def test_no_token_differs(variant: Variant, requests: Requests, expected: Tokens) -> None:
    assert run(variant, requests, expected, lambda: None).problem == ""


@pytest.mark.parametrize("variant", each(BROKEN))
def test_what_is_broken_is_noticed(variant: Variant, requests: Requests, expected: Tokens) -> None:
    assert run(variant, requests, expected, lambda: None).problem == ""


def test_a_difference_is_reported_with_its_position() -> None:
    expected = {"same": (1, 2), "changed": (1, 2, 3), "longer": (1,), "lost": (5,)}
    found = {"same": (1, 2), "changed": (1, 9, 3), "longer": (1, 2)}
    assert differences(expected, found) == [
        "changed from token 1: [2, 3] became [9, 3]",
        "longer from token 1: [] became [2]",
        "lost from token 0: [5] became []",
    ]
