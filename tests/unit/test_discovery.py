"""Discovery without a network: what a registry may be called, and who the engine thinks can draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_rig import VOCAB
from redis.exceptions import ConnectionError as RedisAway

from eyas.common.cluster.discovery import RedisRegistry, StaticRegistry, WorkerKeys, registry
from eyas.common.errors import ConfigError, Unavailable
from eyas.engine.ipc.messages import DraftClosed, DraftDown
from eyas.engine.speculation.drafters.remote import RemoteDrafter
from tests.unit.draft_engine_drive import NO_CHANNELS, SPEC, opened_sequences


async def test_a_cluster_has_a_name_that_is_no_pattern_and_a_redis() -> None:
    for name in ("", "*", "a:b", "a b", "é", "a" * 65, "a\n"):
        with pytest.raises(ConfigError, match="--cluster: .* is not 1 to 64 letters") as caught:
            registry("redis://host:6379/0", cluster=name)
        assert caught.value.param == "cluster"
    with pytest.raises(ConfigError, match="--cluster goes with a registry redis://"):
        registry("static:a:1", cluster="blue")


async def test_a_registry_is_a_list_or_a_redis() -> None:
    assert isinstance(registry("static:"), StaticRegistry)
    assert isinstance(registry("static:a:1, b:2,a:1"), StaticRegistry)
    for url in (
        "redis://host:6379/0",
        "redis://host",
        "redis://user:secret@host:1/7",
        "redis://[::1]:6379/0",
        "rediss://user:secret@host:1/7",
    ):
        assert isinstance(registry(url), RedisRegistry)


@pytest.mark.parametrize(
    "spec",
    ["redis:host:1", "redis://", "redis://h:port", "redis://h:1/x", "redis://h:1/0?db=3", "rediss://"],
)
def test_what_is_neither_is_refused_by_name(spec: str) -> None:
    with pytest.raises(ConfigError, match="registry must") as caught:
        registry(spec)
    assert caught.value.param == "registry"


@pytest.mark.parametrize("spec", ["static:a:1", "redis://host"])
def test_authorities_go_with_tls_alone(spec: str) -> None:
    with pytest.raises(ConfigError, match="--registry-ca goes with a registry rediss://") as caught:
        registry(spec, ca="ca.crt")
    assert caught.value.param == "registry-ca"


def test_a_file_without_authorities_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("nothing")
    for name in ("ca.crt", "none.crt"):
        with pytest.raises(ConfigError, match=f"--registry-ca: .*{name} names no authorities"):
            registry("rediss://host", ca=str(tmp_path / name))


async def test_no_line_shows_the_password() -> None:
    keys = WorkerKeys("redis://user:secret@127.0.0.1:1/7", "")
    with pytest.raises(Unavailable, match="redis 127.0.0.1:1/7 is away") as caught:
        await keys.read()
    assert "secret" not in str(caught.value) and isinstance(caught.value.__cause__, RedisAway)
    await keys.aclose()


def test_the_engine_drafts_with_whom_it_has_heard_of() -> None:
    drafter = RemoteDrafter(SPEC, VOCAB, NO_CHANNELS)
    (seq,) = opened_sequences(drafter, 1)
    assert not seq.drafting
    drafter.deliver(DraftDown(worker="w"))
    drafter.deliver(DraftDown(worker="w"))
    assert drafter.open(seq, 4, None)
    assert [up.worker for up in drafter.outgoing()] == ["w"]
    drafter.deliver(DraftDown(closed=(DraftClosed(0, 0, "it has left"),), worker="w"))
    assert not drafter.open(seq, 4, None)
    drafter.deliver(DraftDown(worker="w"))  # it is back, at once
    assert drafter.open(seq, 4, None)
    drafter.deliver(DraftDown(closed=(DraftClosed(seq.uid, 2, "evicted"),), worker="v"))
    assert seq.uid in drafter._followed  # another worker's word
