"""Pages, pools and the handshake: the sizes are right, and every difference is named before bytes move."""

from __future__ import annotations

import msgspec
import pytest

from eyas.common.errors import ConfigError
from eyas.common.types import KvKind
from kv_transfer.layout import Geometry, PageMeaning, PoolLayout, check_compatible, pages_for

LLAMA_8B = Geometry(pages=64, page_size=16, layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
MEANING = PageMeaning("weights-1", KvKind.TARGET, "bfloat16", 32, 8, 128, "llama3:500000")


def test_a_llama_page_of_all_layers_is_one_block_of_2_mib():
    assert LLAMA_8B.page_bytes == 2 << 20
    assert LLAMA_8B.pool_bytes == 64 * (2 << 20)


@pytest.mark.parametrize("tokens, pages", [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_counts_the_partial_last_page(tokens, pages):
    assert pages_for(tokens, page_size=16) == pages


def test_geometry_survives_json():
    assert Geometry.from_json(LLAMA_8B.to_json()) == LLAMA_8B


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("{", "truncated"),
        ('{"pages": 1}', "page_size"),
        (LLAMA_8B.to_json().replace("64", "0"), "pages"),
        (LLAMA_8B.to_json().replace("bfloat16", "int7"), "int7"),
        (LLAMA_8B.to_json().replace("{", '{"strides": 1, '), "strides"),
    ],
)
def test_a_peers_bad_geometry_is_one_clear_error(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Geometry.from_json(text)


def test_every_field_of_meaning_changes_the_hash():
    others = {
        "fingerprint": "weights-2",
        "group": KvKind.DRAFT,
        "dtype": "float32",
        "layers": 31,
        "kv_heads": 4,
        "head_dim": 64,
        "rope": "default:10000",
    }
    assert set(others) == set(MEANING.__struct_fields__)
    changed = [msgspec.structs.replace(MEANING, **{field: other}) for field, other in others.items()]
    assert len({meaning.hash() for meaning in [MEANING, *changed]}) == 1 + len(others)
    assert PageMeaning(*msgspec.structs.astuple(MEANING)).hash() == MEANING.hash()


def test_compatible_pools_may_differ_in_length():
    longer = msgspec.structs.replace(LLAMA_8B, pages=65)
    check_compatible(PoolLayout(MEANING.hash(), LLAMA_8B), PoolLayout(MEANING.hash(), longer))


@pytest.mark.parametrize(
    "field, value",
    [("page_size", 32), ("layers", 2), ("kv_heads", 2), ("head_dim", 64), ("dtype", "float32")],
)
def test_a_different_geometry_is_refused_by_name(field, value):
    theirs = msgspec.structs.replace(LLAMA_8B, **{field: value})
    sentence = f"{field} is {getattr(LLAMA_8B, field)} here and {value} at the peer"
    with pytest.raises(ConfigError, match=sentence):
        check_compatible(PoolLayout(MEANING.hash(), LLAMA_8B), PoolLayout(MEANING.hash(), theirs))


def test_other_weights_of_the_same_shape_are_refused():
    other = msgspec.structs.replace(MEANING, fingerprint="weights-2")
    with pytest.raises(ConfigError, match="hash of meaning differs"):
        check_compatible(PoolLayout(MEANING.hash(), LLAMA_8B), PoolLayout(other.hash(), LLAMA_8B))
