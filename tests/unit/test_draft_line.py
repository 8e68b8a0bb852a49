"""A line between two engines: what goes by it comes out as it went in, and both notice its end."""

from __future__ import annotations

import os
import select
import socket
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_child import Child

from eyas.common.errors import ConfigError
from eyas.engine.ipc import draft_line
from eyas.engine.ipc.draft_line import Line, OfferedLine, answer
from eyas.engine.ipc.draft_records import CommitRecords, ProposalRecords
from eyas.engine.ipc.messages import DraftCommit, DraftLine, Proposal

WIDTH, ROWS, NODES = 3, 4, 6
SHAPE = DraftLine(export={}, epoch=77, records=5, rows=ROWS, width=WIDTH, nodes=NODES)
INT = st.integers(-(2**31), 2**31 - 1)


def commit(seq: int, rows: int = 1, **changes: Any) -> DraftCommit:
    features = np.arange(rows * WIDTH, dtype=np.float32).tobytes()
    return DraftCommit(seq, 2, 9, tuple(range(rows)), features, 3, 1, changes.get("draft_tokens", 4))


def proposal(seq: int, nodes: int = 2) -> Proposal:
    return Proposal(seq, 2, 10, tuple(range(nodes)), tuple(range(-1, nodes - 1)))


@contextmanager
def line(folder: Path, shape: DraftLine = SHAPE) -> Iterator[tuple[Line, Line]]:
    """The decode engine's end and the draft worker's."""
    offered = OfferedLine(folder / "line", shape)
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


def mapped() -> int:
    """How many lines this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:eyas-drafts")


# --- records --------------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), INT, st.data())
def test_records_hold_what_was_written(seq: int, generation: int, base: int, data: st.DataObject) -> None:
    tokens = tuple(data.draw(st.lists(INT, max_size=ROWS)))
    features = data.draw(st.binary(min_size=4 * WIDTH * len(tokens), max_size=4 * WIDTH * len(tokens)))
    sent = DraftCommit(seq, generation, base, tokens, features, *data.draw(st.tuples(INT, INT, INT)))
    nodes = data.draw(st.lists(st.tuples(INT, INT), max_size=NODES))
    offered = Proposal(seq, generation, base, tuple(a for a, _ in nodes), tuple(b for _, b in nodes))
    for records, message in ((CommitRecords(SHAPE), sent), (ProposalRecords(SHAPE), offered)):
        old = data.draw(st.binary(min_size=records.size, max_size=records.size))
        record = memoryview(bytearray(old))  # of an earlier lap
        assert records.fits(message)
        records.write(record, message)
        assert records.read(record) == message
        stale = type(records)(msgspec.structs.replace(SHAPE, epoch=76))
        assert stale.read(record) is None


@given(st.data())
def test_no_bytes_break_a_reader(data: st.DataObject) -> None:
    for records, count_at in ((CommitRecords(SHAPE), 20), (ProposalRecords(SHAPE), 20)):
        record = bytearray(data.draw(st.binary(min_size=records.size, max_size=records.size)))
        record[:4] = SHAPE.epoch.to_bytes(4, "little")
        message = records.read(memoryview(record))
        count = int.from_bytes(record[count_at : count_at + 4], "little", signed=True)
        most = ROWS if isinstance(records, CommitRecords) else NODES
        assert (message is not None) == (0 <= count <= most)


def test_what_no_record_holds_is_not_posted(tmp_path: Path) -> None:
    with line(tmp_path) as (ours, theirs):
        assert ours.post(commit(1, ROWS)) and not ours.post(commit(2, ROWS + 1))
        assert not ours.post(msgspec.structs.replace(commit(3), features=b"xyz"))
        assert theirs.post(proposal(1, NODES)) and not theirs.post(proposal(2, NODES + 1))
        assert [c.seq for c in theirs.take()] == [1] and [p.seq for p in ours.take()] == [1]


# --- the line -------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(("commit", "proposal", "draft takes", "decode takes")), max_size=40))
def test_it_is_two_bounded_queues(ops: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, line(Path(folder)) as (ours, theirs):
        up: deque[int] = deque()
        down: deque[int] = deque()
        for number, op in enumerate(ops):
            if op == "commit":
                assert ours.post(commit(number)) == (len(up) < SHAPE.records)
                up += [number] if len(up) < SHAPE.records else []
            elif op == "proposal":
                assert theirs.post(proposal(number)) == (len(down) < SHAPE.records)
                down += [number] if len(down) < SHAPE.records else []
            elif op == "draft takes":
                assert theirs.take() == [commit(seq) for seq in up]
                up.clear()
            else:
                assert ours.take() == [proposal(seq) for seq in down]
                down.clear()
        assert not ours.gone and not theirs.gone


def test_the_bell_wakes_until_what_was_posted_is_taken(tmp_path: Path) -> None:
    with line(tmp_path) as (ours, theirs):
        assert not rung(theirs.descriptor)
        ours.post(commit(1))
        ours.ring()
        assert rung(theirs.descriptor) and len(theirs.take()) == 1 and not rung(theirs.descriptor)


def test_a_bell_that_is_not_heard_never_blocks(tmp_path: Path) -> None:
    with line(tmp_path) as (ours, theirs):
        for _ in range(100_000):
            ours.ring()
        assert not ours.gone and theirs.take() == [] and not rung(theirs.descriptor)


def test_the_end_of_one_side_is_noticed_and_the_memory_returned(tmp_path: Path) -> None:
    with line(tmp_path) as (ours, theirs):
        assert mapped() == 2
        theirs.post(proposal(1))
        theirs.close()
        assert rung(ours.descriptor)
        assert ours.take() == [proposal(1)] and ours.gone, "what was published still counts"
        ours.ring()
        ours.close()
        assert mapped() == 0


CHILD = """
import msgspec
from eyas.engine.ipc.draft_line import answer
from eyas.engine.ipc.messages import DraftLine, Proposal
line = answer(msgspec.json.decode(sys.argv[1], type=DraftLine), 3, sys.argv[2])
print("up", flush=True)
number = 0
while True:
    if line.post(Proposal(number, 2, 10, (number,), (-1,))):
        number += 1
    line.ring()
"""


def test_a_peer_that_is_killed_while_it_writes_leaves_whole_records_and_nothing_else(tmp_path: Path) -> None:
    offered = OfferedLine(tmp_path / "line", SHAPE)
    offer = msgspec.structs.replace(SHAPE, export=offered.export)
    with Child(CHILD, msgspec.json.encode(offer).decode(), str(tmp_path)) as child:
        assert child.line() == "up"
        ours = offered.accept()
        assert ours is not None
        taken: list[Proposal] = []
        while len(taken) < 300:
            taken += ours.take()
        child.kill()
        assert rung(ours.descriptor)
        taken += ours.take()
        assert ours.gone
    assert [p.seq for p in taken] == list(range(len(taken)))
    assert all(p.tokens == (p.seq,) for p in taken)
    ours.close()
    assert mapped() == 0


# --- the handshake --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": WIDTH + 1}, "features"),
        ({"records": 0}, "records"),
        ({"rows": 10**6}, "rows"),
        ({"nodes": -1}, "nodes"),
        ({"records": draft_line.MOST_RECORDS, "rows": 33, "nodes": draft_line.MOST_NODES}, "GiB"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(
    tmp_path: Path, changes: dict, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_line, "MOST_BYTES", 1 << 20)
    offered = OfferedLine(tmp_path / "line", SHAPE)
    offer = msgspec.structs.replace(SHAPE, export=offered.export, **changes)
    with pytest.raises(ConfigError, match=reason):
        answer(offer, WIDTH, str(tmp_path))
    offered.close()
    assert mapped() == 0 and os.listdir(tmp_path) == []


def test_only_a_socket_of_this_host_is_answered(tmp_path: Path) -> None:
    offered = OfferedLine(tmp_path / "line", SHAPE)
    other = {**offered.export, "identity": b"another host's"}
    for export, pool_dir in ((other, tmp_path), (offered.export, tmp_path / "elsewhere"), ({}, tmp_path)):
        with pytest.raises(ConfigError, match="not a file"):
            answer(msgspec.structs.replace(SHAPE, export=export), WIDTH, str(pool_dir))
    offered.close()


def test_memory_of_another_size_is_no_answer(tmp_path: Path) -> None:
    offered = OfferedLine(tmp_path / "line", SHAPE)
    larger = msgspec.structs.replace(SHAPE, export=offered.export, records=SHAPE.records + 1)
    theirs = answer(larger, WIDTH, str(tmp_path))
    with pytest.raises(ConfigError, match="not as large"):
        offered.accept()
    offered.close()
    theirs.take()
    assert theirs.gone


def test_a_worker_that_hangs_up_before_it_hands_over_is_no_answer(tmp_path: Path) -> None:
    offered = OfferedLine(tmp_path / "line", SHAPE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(tmp_path / "line"))
        assert offered.accept() is None, "it may still come"
    with pytest.raises(ConfigError, match="hung up"):
        offered.accept()
    offered.close()


def test_without_ordered_stores_there_is_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_line, "STORES_IN_ORDER", False)
    with pytest.raises(ConfigError, match="order"):
        OfferedLine(tmp_path / "line", SHAPE)
