"""Pages, pools and the handshake: the sizes are right, and every difference is named before bytes move."""

from __future__ import annotations

import msgspec
import pytest

from eyas.common.errors import ConfigError
from eyas.common.types import KvKind
from eyas.common.wire import transfer
from eyas.common.wire.pool import PoolGeometry, PoolInfo, RankPool
from kv_transfer.layout import PageMeaning, check_compatible, pages_for
from protos import transfer_pb2

LLAMA_8B = PoolGeometry(pages=64, page_size=16, layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
MEANING = PageMeaning("weights-1", KvKind.TARGET, "bfloat16", 32, 8, 128, "llama3:500000")


def test_a_llama_page_of_all_layers_is_one_block_of_2_mib():
    assert LLAMA_8B.page_bytes == 2 << 20
    assert LLAMA_8B.pool_bytes == 64 * (2 << 20)


@pytest.mark.parametrize("tokens, pages", [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_counts_the_partial_last_page(tokens, pages):
    assert pages_for(tokens, page_size=16) == pages


def info(meaning: PageMeaning, geometry: PoolGeometry = LLAMA_8B) -> PoolInfo:
    exports = {"shm": {"path": b"/dev/shm/x", "identity": bytes(range(256))}, "grpc": {}}
    return PoolInfo(
        2**64 - 1, meaning.hash(), geometry, (RankPool(0, 2**32 - 1, exports), RankPool(1, 0, {}))
    )


def test_what_a_worker_says_of_its_pool_survives_the_wire():
    said = info(MEANING)
    wire = transfer.pool_to_pb(said).SerializeToString()
    assert transfer.pool_from_pb(transfer_pb2.HandshakeResponse.FromString(wire)) == said


def test_states_beside_latents_go_between_as_many_ranks_alone() -> None:
    """Each rank has all latents, and states of its own, which nothing divides."""
    latents = PoolGeometry(64, 16, 8, kv_heads=1, head_dim=576, dtype="bfloat16", fields=1, state_pages=4)
    meaning = PageMeaning("weights-1", KvKind.TARGET, "bfloat16", 8, 1, 576, "none", latent=512)
    two = info(meaning, latents)
    one = PoolInfo(7, two.layout_hash, latents, two.ranks[:1])
    check_compatible(two, two)
    for here, there in ((one, two), (two, one)):
        with pytest.raises(ConfigError, match="states of 2 ranks beside KV that each rank has whole cannot"):
            check_compatible(here, there)


@pytest.mark.parametrize(
    "field, value, complaint",
    [
        ("pages", 0, "at least 1"),
        ("page_size", 0, "at least 1"),
        ("fields", 0, "at least 1"),
        ("dtype", "int7", "int7"),
    ],
)
def test_a_peers_bad_geometry_is_one_clear_error(field, value, complaint):
    reply = transfer.pool_to_pb(info(MEANING))
    setattr(reply.geometry, field, value)
    with pytest.raises(ConfigError, match=complaint):
        transfer.pool_from_pb(reply)


def test_every_field_of_meaning_changes_the_hash():
    others = {
        "fingerprint": "weights-2",
        "group": KvKind.DRAFT,
        "dtype": "float32",
        "layers": 31,
        "kv_heads": 4,
        "head_dim": 64,
        "rope": "default:10000",
        "latent": 96,
        "arithmetic": "exact",
    }
    assert set(others) == set(MEANING.__struct_fields__)
    changed = [msgspec.structs.replace(MEANING, **{field: other}) for field, other in others.items()]
    assert len({meaning.hash() for meaning in [MEANING, *changed]}) == 1 + len(others)
    assert PageMeaning(*msgspec.structs.astuple(MEANING)).hash() == MEANING.hash()


def test_pages_of_another_arithmetic_are_refused_by_name():
    exact, fast = (msgspec.structs.replace(info(MEANING), arithmetic=name) for name in ("exact", "fast"))
    with pytest.raises(ConfigError, match="arithmetic is exact here and fast at the peer"):
        check_compatible(exact, fast)
    check_compatible(exact, exact)


def test_compatible_pools_may_differ_in_length():
    longer = msgspec.structs.replace(LLAMA_8B, pages=65)
    check_compatible(info(MEANING), info(MEANING, longer))


def test_compatible_pools_may_share_their_heads_among_other_ranks():
    whole = msgspec.structs.replace(LLAMA_8B, kv_heads=2 * LLAMA_8B.kv_heads)
    one = msgspec.structs.replace(info(MEANING, whole), ranks=(RankPool(0, 1, {}),))
    check_compatible(info(MEANING), one)
    with pytest.raises(ConfigError, match="kv_heads is 16 here and 32 at the peer"):
        check_compatible(info(MEANING), info(MEANING, whole))


@pytest.mark.parametrize(
    "field, value",
    [
        ("page_size", 32),
        ("layers", 2),
        ("kv_heads", 2),
        ("head_dim", 64),
        ("dtype", "float32"),
        ("fields", 1),
    ],
)
def test_a_different_geometry_is_refused_by_name(field, value):
    theirs = msgspec.structs.replace(LLAMA_8B, **{field: value})
    here = getattr(LLAMA_8B, field)
    if field == "kv_heads":  # of both ranks
        here, value = 2 * here, 2 * value
    sentence = f"{field} is {here} here and {value} at the peer"
    with pytest.raises(ConfigError, match=sentence):
        check_compatible(info(MEANING), info(MEANING, theirs))


def test_other_weights_of_the_same_shape_are_refused():
    other = msgspec.structs.replace(MEANING, fingerprint="weights-2")
    with pytest.raises(ConfigError, match="hash of meaning differs"):
        check_compatible(info(MEANING), info(other))


def test_ranks_of_latents_have_all_of_them_and_may_differ_in_number() -> None:
    """Where heads are shared, the same difference is one of heads."""
    latents = PoolGeometry(64, 16, 61, kv_heads=1, head_dim=576, dtype="bfloat16", fields=1)
    meaning = PageMeaning("weights-1", KvKind.TARGET, "bfloat16", 61, 1, 576, "yarn", latent=512)
    two = info(meaning, latents)
    one = PoolInfo(7, two.layout_hash, latents, two.ranks[:1])
    check_compatible(one, two)
    check_compatible(two, one)
    heads = msgspec.structs.replace(latents, fields=2)
    with pytest.raises(ConfigError, match="kv_heads is 1 here and 2 at the peer"):
        check_compatible(PoolInfo(7, one.layout_hash, heads, one.ranks), info(meaning, heads))


def test_states_go_between_ranks_that_have_several_times_their_heads() -> None:
    geometry = PoolGeometry(pages=4, page_size=4, layers=1, kv_heads=6, head_dim=4, dtype="float32")

    def of_ranks(count: int, state_pages: int = 3) -> PoolInfo:
        own = msgspec.structs.replace(geometry, kv_heads=6 // count, state_pages=state_pages)
        return PoolInfo(1, "a", own, tuple(RankPool(rank, 0, {}) for rank in range(count)))

    for here, there in ((1, 2), (6, 3), (2, 2)):
        check_compatible(of_ranks(here), of_ranks(there))
    check_compatible(of_ranks(2, 0), of_ranks(3, 0))
    with pytest.raises(ConfigError, match="recurrent states of 3 ranks cannot be divided among 2"):
        check_compatible(of_ranks(2), of_ranks(3))
    with pytest.raises(ConfigError, match="state_pages is 3 here and 4 at the peer"):
        check_compatible(of_ranks(1), of_ranks(2, 4))
