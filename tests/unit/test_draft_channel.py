"""A channel between two engines: what is left in a mailbox comes out as it was, and both notice its end."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_child import Child

from eyas.common.errors import ConfigError
from eyas.engine.ipc import draft_channel
from eyas.engine.ipc.draft_channel import MailChannel, OfferedChannel, answer
from eyas.engine.ipc.mailbox import NEWEST, PAGE, DraftMailbox, MailLayout
from eyas.engine.ipc.messages import DraftChannel, DraftProposal
from eyas.engine.ipc.row_ring import tag
from tests.unit.draft_channel_pair import mapped

WIDTH, NODES, PLACES, KEPT = 3, 6, 4, 8
SHAPE = DraftChannel(export={}, width=WIDTH, nodes=NODES, places=PLACES, rows=KEPT)


@contextmanager
def channel(folder: Path, shape: DraftChannel = SHAPE) -> Iterator[tuple[MailChannel, MailChannel]]:
    """The decode engine's end and the draft worker's."""
    offered = OfferedChannel(folder / "mail", shape)
    assert offered.accept() is None
    theirs = answer(msgspec.structs.replace(shape, export=offered.export), WIDTH, str(folder))
    assert rung(offered.descriptor)
    ours = offered.accept()
    assert ours is not None and os.listdir(folder) == [], "no other process finds it"
    yield ours, theirs
    ours.close()
    theirs.close()


def rung(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def rows(count: int, first: float = 0.0) -> np.ndarray:
    return np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH) + np.float32(first)


def box(width: int = WIDTH) -> DraftMailbox:
    """Both ends in one process."""
    place = MailLayout(KEPT, NODES, width)
    return DraftMailbox(memoryview(bytearray(place.nbytes(PLACES))), place, PLACES)


# --- a mailbox --------------------------------------------------------------------------------------


def test_rows_lie_where_a_device_would_put_them() -> None:
    mail = box()
    mail.post(2, 7, 9, [5, 6], rows(2))
    words = mail.words[2].tolist()
    assert words[9 % KEPT] == (tag(7, 9) & 0xFFFFFFFF) << 32 | 5
    assert words[10 % KEPT] == (tag(7, 10) & 0xFFFFFFFF) << 32 | 6 | NEWEST
    assert mail.features(2, 7, 9, 2) == rows(2).tobytes()
    assert not mail.words[[0, 1, 3]].any()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30), st.integers(0, 40))
def test_the_features_of_the_newest_rows_are_there_and_those_of_older_laps_are_not(
    rounds: list[int], first: int
) -> None:
    mail, told, base = box(), {}, first
    for count in rounds:
        features = rows(count, base)
        mail.post(1, 3, base, [0] * count, features)
        told |= {base + i: features[i].tobytes() for i in range(count)}
        base += count
    for position, features in told.items():
        assert mail.features(1, 3, position, 1) == (features if position >= base - KEPT else None)
    assert mail.features(1, 4, base - 1, 1) is None, "another sequence's"


def test_what_is_overwritten_while_it_is_copied_is_not_taken() -> None:
    """A row that is being written is none: its word goes first and comes last."""
    mail, seen = box(), []
    mail.post(0, 1, 0, [4], rows(1))

    class Slow(np.ndarray):
        def __setitem__(self, key, value) -> None:
            seen.append((int(mail.words[0, 0]), mail.features(0, 1, 0, 1), mail.features(0, 1, KEPT, 1)))
            super().__setitem__(key, value)

    mail._features = mail._features.view(Slow)
    mail.post(0, 1, KEPT, [4], rows(1, 9))
    assert seen == [(0, None, None)]
    assert mail.features(0, 1, KEPT, 1) == rows(1, 9).tobytes()


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(-1, 2**31 - 1)), min_size=1, max_size=NODES))
def test_a_proposal_comes_out_as_it_went_in(nodes: list[tuple[int, int]]) -> None:
    mail = box()
    tokens, parents = (tuple(part) for part in zip(*nodes, strict=True))
    assert mail.proposal(1, 5, 7, 9) is None
    assert mail.propose(1, DraftProposal(1, 7, 9, tokens, parents))
    for newest in (9, 10, 9 + KEPT - 1):
        assert mail.proposal(1, 5, 7, newest) == DraftProposal(5, 7, 9, tokens, parents), (
            "a late one says where it belongs"
        )
    for number, generation, newest in ((1, 7, 8), (1, 7, 9 + KEPT), (1, 8, 9), (0, 7, 9)):
        assert mail.proposal(number, 5, generation, newest) is None


def test_a_proposal_that_is_being_written_is_none() -> None:
    mail = box()
    mail.propose(1, DraftProposal(1, 7, 9, (5, 6), (-1, 0)))
    header = mail.place.header
    mail.words[1, header + 2] ^= np.uint64(1 << 40)
    assert mail.proposal(1, 5, 7, 9) is None
    mail.words[1, header] = np.uint64((tag(7, 9) & 0xFFFFFFFF) << 32 | (NODES + 1))
    assert mail.proposal(1, 5, 7, 9) is None


@pytest.mark.parametrize(("number", "nodes"), [(PLACES, 1), (-1, 1), (0, NODES + 1)])
def test_what_has_no_room_is_not_proposed(number: int, nodes: int) -> None:
    mail = box()
    assert not mail.propose(number, DraftProposal(1, 7, 9, (1,) * nodes, (-1,) * nodes))
    assert not mail.words.any()


def test_places_do_not_share_cache_lines_and_features_lie_behind_all() -> None:
    for kept, nodes in ((8, 3), (32, 6), (128, 256)):
        place = MailLayout(kept, nodes)
        assert place.words % 16 == 0 and place.words >= kept + 1 + 2 * nodes
    assert MailLayout(8, 3).nbytes(2) == PAGE and MailLayout(8, 3, 5).nbytes(2) == PAGE + 2 * 8 * 5 * 4


# --- the channel --------------------------------------------------------------------------------------


def test_both_ends_see_one_memory(tmp_path: Path) -> None:
    with channel(tmp_path) as (ours, theirs):
        ours.mailbox.post(2, 7, 9, [5], rows(1))
        assert np.array_equal(theirs.mailbox.words, ours.mailbox.words)
        assert theirs.mailbox.features(2, 7, 9, 1) == rows(1).tobytes()
        theirs.mailbox.propose(2, DraftProposal(1, 7, 10, (8,), (-1,)))
        assert ours.mailbox.proposal(2, 5, 7, 10) == DraftProposal(5, 7, 10, (8,), (-1,))
        assert ours.rows is None and theirs.rows is None


def test_each_place_has_one_sequence(tmp_path: Path) -> None:
    with channel(tmp_path) as (ours, _):
        taken = [ours.take_place() for _ in range(PLACES)]
        assert sorted(taken) == list(range(PLACES)) and ours.take_place() == -1
        ours.give_back(taken[1])
        assert ours.take_place() == taken[1]


def test_an_end_that_is_woken_can_be_read_until_it_listens(tmp_path: Path) -> None:
    with channel(tmp_path) as (ours, theirs):
        assert not rung(theirs.descriptor)
        ours.wake()
        assert rung(theirs.descriptor)
        theirs.listen()
        assert not rung(theirs.descriptor) and not theirs.gone


def test_an_end_that_does_not_listen_never_blocks(tmp_path: Path) -> None:
    with channel(tmp_path) as (ours, theirs):
        for _ in range(100_000):
            ours.wake()
        theirs.listen()
        assert not ours.gone and not rung(theirs.descriptor)


def test_the_end_of_one_side_is_noticed_and_the_memory_returned(tmp_path: Path) -> None:
    with channel(tmp_path) as (ours, theirs):
        assert mapped() == 2
        theirs.close()
        assert rung(ours.descriptor)
        ours.listen()
        assert ours.gone
        ours.wake()
        ours.close()
        assert mapped() == 0


CHILD = """
import msgspec
from eyas.engine.ipc.draft_channel import answer
from eyas.engine.ipc.messages import DraftChannel, DraftProposal
there = answer(msgspec.json.decode(sys.argv[1], type=DraftChannel), 3, sys.argv[2])
print("up", flush=True)
number = 0
while True:
    number += 1
    there.mailbox.propose(1, DraftProposal(1, 2, number, (number,) * 6, (-1,) * 6))
    there.wake()
"""


def test_a_peer_that_is_killed_while_it_writes_leaves_whole_proposals_alone(
    tmp_path: Path,
) -> None:
    offered = OfferedChannel(tmp_path / "mail", SHAPE)
    offer = msgspec.structs.replace(SHAPE, export=offered.export)
    with Child(CHILD, msgspec.json.encode(offer).decode(), str(tmp_path)) as child:
        assert child.line() == "up"
        ours, newest, found = offered.accept(), 0, 0
        assert ours is not None
        while found < 300:
            newest += 1
            one = ours.mailbox.proposal(1, 5, 2, newest)
            if one is None:  # it is ahead: it is looked for where it is
                newest = int(ours.mailbox.words[1, ours.mailbox.place.header + 1]) & 0xFFFFFFFF
            else:
                found += 1
                assert one == DraftProposal(5, 2, one.base_len, (one.base_len,) * NODES, (-1,) * NODES)
        child.kill()
        assert rung(ours.descriptor)
        ours.listen()
        assert ours.gone
    ours.close()
    assert mapped() == 0


# --- the handshake --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": WIDTH + 1}, "features"),
        ({"places": 0}, "places"),
        ({"rows": -8}, "rows"),
        ({"nodes": -1}, "nodes"),
        ({"nodes": draft_channel.MOST_NODES + 1}, "nodes"),
        ({"places": 2000, "rows": 64}, "GiB"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(
    tmp_path: Path, changes: dict, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_channel, "MOST_BYTES", 1 << 20)
    offered = OfferedChannel(tmp_path / "mail", SHAPE)
    offer = msgspec.structs.replace(SHAPE, export=offered.export, **changes)
    with pytest.raises(ConfigError, match=reason):
        answer(offer, WIDTH, str(tmp_path))
    offered.close()
    assert mapped() == 0 and os.listdir(tmp_path) == []


def test_only_a_socket_of_this_host_is_answered(tmp_path: Path) -> None:
    offered = OfferedChannel(tmp_path / "mail", SHAPE)
    other = {**offered.export, "identity": b"another host's"}
    for export, pool_dir in ((other, tmp_path), (offered.export, tmp_path / "elsewhere"), ({}, tmp_path)):
        with pytest.raises(ConfigError, match="not a file"):
            answer(msgspec.structs.replace(SHAPE, export=export), WIDTH, str(pool_dir))
    offered.close()


def test_memory_of_another_size_is_no_answer(tmp_path: Path) -> None:
    offered = OfferedChannel(tmp_path / "mail", SHAPE)
    larger = msgspec.structs.replace(SHAPE, export=offered.export, places=10 * PLACES)
    theirs = answer(larger, WIDTH, str(tmp_path))
    with pytest.raises(ConfigError, match="not as large"):
        offered.accept()
    offered.close()
    theirs.listen()
    assert theirs.gone


def test_a_worker_that_hangs_up_before_it_hands_over_is_no_answer(tmp_path: Path) -> None:
    offered = OfferedChannel(tmp_path / "mail", SHAPE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(tmp_path / "mail"))
        assert offered.accept() is None, "it may still come"
    with pytest.raises(ConfigError, match="hung up"):
        offered.accept()
    offered.close()


def test_without_ordered_stores_there_is_no_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_channel, "STORES_IN_ORDER", False)
    with pytest.raises(ConfigError, match="order"):
        OfferedChannel(tmp_path / "mail", SHAPE)
