"""A part of `make lossless`: whatever way requests are answered, every token is the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.lossless import BROKEN, REFERENCE, VARIANTS, Requests, Variant, differences, make_requests, run
from tests.e2e.lossless_hybrids import CUTS, Campaign
from tests.e2e.lossless_packed import PackedModels
from tests.e2e.lossless_ways import InProcess, Tokens
from tests.unit.hybrid_rig import write_with_mtp

pytestmark = pytest.mark.usefixtures("one_thread")

WIDEST = "MTP tree and lookups"
FEW, MORE = 1, 3  # prompts, each under several sets of parameters: of quick variants and of the others
SEED = 21


def each(variants: list[Variant]) -> list[Any]:
    """Engines of this process; those that are not quick are slow tests."""
    return [
        pytest.param(variant, id=variant.name, marks=() if variant.quick else pytest.mark.slow)
        for variant in variants
        if isinstance(variant.way, InProcess)
    ]


@functools.cache
def reference(prompts: int) -> tuple[Requests, Tokens]:
    requests = make_requests(prompts, SEED)
    return requests, run(REFERENCE, requests, None, lambda: None).answers.tokens


def problem(variant: Variant) -> str:
    requests, expected = reference(FEW if variant.quick else MORE)
    assert len(expected) == len(requests)
    return run(variant, requests, expected, lambda: None).problem


@pytest.mark.slow
@pytest.mark.parametrize("variant", each(VARIANTS))
def test_no_token_differs(variant: Variant) -> None:
    assert problem(variant) == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nor_does_one_with_a_target_or_a_head_in_four_bits(tmp_path: Path) -> None:
    models, (requests, expected) = PackedModels(tmp_path), reference(FEW)
    models.write()
    packed = run(models.reference(), requests, None, lambda: None).answers.tokens
    assert len(packed) == len(requests)
    for variants, tokens in ((models.of_the_target(), packed), (models.of_the_head(), expected)):
        *_, last = variants  # a tree of a head in four bits, split
        assert run(last, requests, tokens, lambda: None).problem == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nor_does_one_of_a_hybrid(tmp_path: Path) -> None:
    """Of the campaign's ways the widest, with every tenth cut."""
    write_with_mtp(tmp_path / "model", "qwen3_next")
    ways = Campaign(tmp_path / "model", tmp_path / "model", range(10, CUTS + 1, 10))
    requests, before = ways.cached()
    expected = run(ways.reference(), requests, None, lambda: None).answers.tokens
    some = [each for each in ways.variants(requests, before) if each.name.startswith(WIDEST)]
    for variant in (*some, *ways.broken(before)):
        assert not run(variant, requests, expected, lambda: None).problem, variant.name


@pytest.mark.parametrize("variant", each(BROKEN))
def test_what_is_broken_is_noticed(variant: Variant) -> None:
    assert problem(variant) == ""


def test_a_difference_is_reported_with_its_position() -> None:
    expected = {"same": (1, 2), "changed": (1, 2, 3), "longer": (1,), "lost": (5,)}
    found = {"same": (1, 2), "changed": (1, 9, 3), "longer": (1, 2)}
    assert differences(expected, found) == [
        "changed from token 1: [2, 3] became [9, 3]",
        "longer from token 1: [] became [2]",
        "lost from token 0: [5] became []",
    ]
