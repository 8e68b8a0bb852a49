"""A query over latents has one set of bits, whether it runs alone, in a batch, a chain, a tree or a prompt.

As tests/unit/test_exact_attention.py has it of keys and values of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from eyas.engine.kernels.attention.exact_parts import PartSizes
from eyas.engine.kernels.latent import exact_latents, latent_products
from eyas.engine.kernels.products.skinny import RotaryInput
from tests.bits.attention import Bits, Path, branching
from tests.bits.compare import Composition, differences
from tests.bits.latents import Latents
from tests.unit import tensor_core

SHORT = PartSizes(near=64, near_end=128, middle=128, middle_end=384, far=192)
PATH: Path = tuple(range(330))
SIZES = (4, 32, 16)


@pytest.fixture(scope="module")
def latents() -> Latents:
    return Latents(420, SIZES, "cpu", torch.float16, SHORT)


@pytest.fixture(autouse=True)
def _matrix_unit() -> Iterator[None]:
    with tensor_core.hopper():
        yield


def said(runs: dict[str, partial[Bits]]) -> list[str]:
    return [str(found) for found in differences(Composition(*run) for run in runs.items())]


def plain(latents: Latents, *ends: int) -> dict[str, partial[Bits]]:
    """Rows that end there, each alone."""
    return {f"row {end}": partial(latents.rows, [PATH[:end]]) for end in ends}


def test_rows_chains_and_chunks(latents: Latents) -> None:
    """By several programs for a row, and by one where there are too many rows for that."""
    runs = plain(latents, 65, 129, 257)
    runs["batch"] = partial(latents.rows, [PATH[:n] for n in (257, 65, 1)])
    runs["chain over a part's end"] = partial(latents.rows, [PATH[:258]], 4)
    runs["many rows"] = partial(latents.rows, [PATH[:258], PATH[:129]], 9)
    runs["chunks"] = partial(latents.chunks, [(PATH[:66], 60), (PATH[:258], 250)])
    assert said(runs) == []


@pytest.mark.parametrize("length", [pytest.param(61, marks=pytest.mark.slow), 126])
def test_a_trees_nodes_stand_in_the_columns_of_their_paths(latents: Latents, length: int) -> None:
    tree = branching(PATH[:length], PATH[length : length + 4], range(400, 404))
    runs = plain(latents, length + 1, length + 4)
    runs["sibling"] = partial(latents.rows, [(*PATH[: length + 3], 403)])
    runs["tree"] = partial(latents.trees, [tree])
    assert said(runs) == []


def test_a_row_is_a_softmax_over_its_path(latents: Latents) -> None:
    for row, path in zip(latents.rows([PATH, PATH[:3]]).values(), (PATH, PATH[:3]), strict=True):
        assert (row - latents.expected(path)).abs().max() < 1e-3


def test_parts_that_prompts_have_for_themselves_are_noticed(latents: Latents) -> None:
    other = Latents(420, SIZES, "cpu", torch.float16, PartSizes(near=128, near_end=256, middle=128))
    runs = plain(latents, 258) | {"chunk": partial(other.chunks, [(PATH[:258], 256)])}
    assert said(runs)


def test_a_part_that_follows_the_programs_is_noticed(
    latents: Latents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that take columns of their own number, as the fast kernel's do."""
    runs = plain(latents, 258)
    alone = runs["row 258"]()
    monkeypatch.setattr(exact_latents, "_MOST_SHARES", 1)
    assert said({"shared": lambda: alone, "by one": runs["row 258"]}) == []
    parts = latents._parts
    latents._parts = PartSizes(near=192, near_end=192, middle=192, middle_end=384, far=192)
    try:
        assert said({"shared": lambda: alone, "longer parts": runs["row 258"]})
    finally:
        latents._parts = parts


def test_the_products_of_heads_do_not_depend_on_the_rows() -> None:
    """Into the latents and out of them; by the fast cut there are tiles of 16 rows and of 64."""
    q, keys = torch.randn(40, 4 * 40).half(), torch.randn(4, 24, 32).half()
    mixed, factor = torch.randn(40, 4, 32).half(), torch.randn(4, 24, 32).half()
    angles = torch.rand(8, 8)
    for count in (1, 17, 40):
        turned = RotaryInput(angles.cos(), angles.sin(), torch.arange(count, dtype=torch.int32) % 8)
        made, out = latent_products.absorb(q[:count], keys, turned, exact=True), torch.empty(count, 96).half()
        latent_products.values(mixed[:count], factor, out, exact=True)
        if count == 1:
            first = made.clone(), out.clone()
        assert torch.equal(made[:1], first[0]) and torch.equal(out[:1], first[1])
