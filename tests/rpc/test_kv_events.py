"""What a worker publishes of its prefix cache, read as the routers of llm-d and Dynamo read it.

The reader is written from the published format (vLLM's `distributed/kv_events.py`, llm-d's adapter): three
frames, topic, number and content; arrays in msgpack; replay by a number in eight bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from real_worker import Decode, RealWorker, decoding, real_worker, tiny_config

from eyas import cli
from eyas.common.config import EngineConfig, KvEventsConfig
from eyas.common.errors import ConfigError
from eyas.common.page_names import packed, salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.engine.ipc.messages import CacheUpdate
from eyas.worker import kv_events
from eyas.worker.front import flush
from eyas.worker.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventPublisher, events_of

PAGE = 16
WAIT_S = 20


class ForeignRouter:
    """Which stretches of tokens are cached, by what a worker says: hashes by parent and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int | str, ...]]] = {}
        self.host: set[int] = set()
        self.next = 0
        self.cleared = 0

    def hear(self, number: bytes, content: bytes) -> None:
        """A message; in order, or there is a gap."""
        assert int.from_bytes(number, "big") == self.next
        self.next += 1
        time, events = msgspec.msgpack.decode(content)[:2]
        assert time > 1.7e9
        for name, *fields in events:
            getattr(self, name)(*fields)

    def BlockStored(self, hashes: list[int], parent: int | None, tokens: list[int], *rest: object) -> None:
        page, lora, medium, name, extra = rest
        if medium == "CPU":
            assert (page, lora, name, extra, parent, tokens) == (PAGE, None, None, None, None, [])
            self.host.update(hashes)
            return
        assert (page, lora, medium, name) == (PAGE, None, "GPU", None) and len(tokens) == PAGE * len(hashes)
        salt = None if extra is None else extra[0][0]
        assert extra is None or (parent is None and extra == [[salt], *[None] * (len(hashes) - 1)])
        assert parent is None or parent in self.blocks
        assert all(0 <= each < 1 << 64 for each in hashes)
        for place, each in enumerate(hashes):
            own = tuple(tokens[place * PAGE : (place + 1) * PAGE])
            self.blocks[each] = (parent, own if place or salt is None else (salt, *own))
            parent = each

    def BlockRemoved(self, hashes: list[int], medium: str) -> None:
        for each in hashes:
            if medium == "CPU":
                self.host.remove(each)
            else:
                del self.blocks[each]

    def AllBlocksCleared(self) -> None:
        self.blocks.clear()
        self.cleared += 1

    def match(self, prompt: list[int]) -> int:
        """The tokens of the longest prefix that is cached."""
        at: int | None = None
        for first in range(0, len(prompt) - PAGE + 1, PAGE):
            key = (at, tuple(prompt[first : first + PAGE]))
            found = [each for each, block in self.blocks.items() if block == key]
            if not found:
                return first
            at = found[0]
        return len(prompt) // PAGE * PAGE


@contextlib.asynccontextmanager
async def subscribed(address: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket that hears all topics that begin as a worker's do."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"kv@")
    socket.connect(address)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


async def replayed(address: str, first: int, rests_s: float = 0.0) -> list[tuple[bytes, bytes]]:
    """The messages from a number on, as a subscriber that missed them asks for them, and rests before it
    reads.
    """
    context, messages = zmq.asyncio.Context(), []
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    try:
        await socket.send_multipart((b"", first.to_bytes(8, "big")))
        await asyncio.sleep(rests_s)
        async with asyncio.timeout(WAIT_S):
            while True:
                empty, number, content = await socket.recv_multipart()
                assert empty == b""
                if int.from_bytes(number, "big", signed=True) < 0:
                    return messages
                messages.append((number, content))
    finally:
        context.destroy(linger=0)


def prompt(seed: int, count: int = 100) -> tuple[int, ...]:
    return tuple(5 + (seed * 7 + i * i) % 40 for i in range(count))


async def answer(decode: Decode, name: str, ids: tuple[int, ...], salt: bytes = b"") -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    decode.session.submit(GenerationRequest(name, ids, params, salt=salt), attempt=1, attach=False)
    return (*ids, *(await decode.tokens())[0])


async def heard(
    router: ForeignRouter, socket: zmq.asyncio.Socket, whole: tuple[int, ...], tokens: int
) -> None:
    """Until the router takes so many tokens of a text for cached."""
    async with asyncio.timeout(WAIT_S):
        while router.match(list(whole)) != tokens:
            topic, *message = await socket.recv_multipart()
            assert topic.startswith(b"kv@127.0.0.1:")
            router.hear(*message)


def served(config: EngineConfig, folder: Path) -> contextlib.AbstractAsyncContextManager[RealWorker]:
    events = KvEventsConfig(f"ipc://{folder}/out", f"ipc://{folder}/replay")
    return real_worker(config, *Role, pool_dir=str(folder / "pools"), events=events)


async def test_a_router_of_others_knows_what_is_cached(tmp_path: Path) -> None:
    """Texts that share a beginning, a second router that missed everything, and a cache that is emptied."""
    router, late = ForeignRouter(), ForeignRouter()
    config = tiny_config(tmp_path)
    async with served(config, tmp_path) as worker, decoding(worker) as decode:
        async with subscribed(f"ipc://{tmp_path}/out") as socket:
            await asyncio.sleep(0.2)  # a subscription takes a moment, and what came before is replayed
            for message in await replayed(f"ipc://{tmp_path}/replay", 0):
                router.hear(*message)
            assert router.cleared == 1
            first = await answer(decode, "first", prompt(1))
            await heard(router, socket, first, 96)  # the token behind a page is part of a head's page
            other = (*first[:40], *prompt(2, 60))
            assert router.match(list(other)) == 32
            await answer(decode, "other", other)
            await heard(router, socket, other, 96)
            assert len(router.blocks) == 6 + 4
            for message in await replayed(f"ipc://{tmp_path}/replay", 0):
                late.hear(*message)
            assert late.blocks == router.blocks
            await worker.idle()
            await flush(worker.front._engine, 5.0)
            await heard(router, socket, first, 0)
            assert not router.blocks
        assert [int.from_bytes(n, "big") for n, _ in await replayed(f"ipc://{tmp_path}/replay", 2)] == [
            *range(2, router.next)
        ]


async def test_a_router_of_others_takes_no_salted_page_for_a_plain_prompts(tmp_path: Path) -> None:
    router = ForeignRouter()
    async with served(tiny_config(tmp_path), tmp_path) as worker, decoding(worker) as decode:
        async with subscribed(f"ipc://{tmp_path}/out") as socket:
            await asyncio.sleep(0.2)
            for message in await replayed(f"ipc://{tmp_path}/replay", 0):
                router.hear(*message)
            whole = await answer(decode, "salted", prompt(1), salt_of("mine"))
            async with asyncio.timeout(WAIT_S):
                while len(router.blocks) < 6:
                    _, *message = await socket.recv_multipart()
                    router.hear(*message)
            assert router.match(list(whole)) == 0
            assert salt_of("mine")[:8].hex() in {key for _, block in router.blocks.values() for key in block}
            await answer(decode, "plain", prompt(1))
            await heard(router, socket, whole[:96], 96)


async def test_a_router_of_others_hears_of_the_hosts_memory(tmp_path: Path) -> None:
    router = ForeignRouter()
    config = dataclasses.replace(tiny_config(tmp_path), host_cache_gb=0.02, num_pages=64)
    async with served(config, tmp_path) as worker, decoding(worker) as decode:
        async with subscribed(f"ipc://{tmp_path}/out") as socket:
            await asyncio.sleep(0.2)
            for message in await replayed(f"ipc://{tmp_path}/replay", 0):
                router.hear(*message)
            await answer(decode, "first", prompt(1))
            async with asyncio.timeout(WAIT_S):
                while len(router.host) < 6:
                    _, *message = await socket.recv_multipart()
                    router.hear(*message)
            assert router.host == router.blocks.keys()
            await worker.idle()
            await flush(worker.front._engine, 5.0)
            async with asyncio.timeout(WAIT_S):
                while router.host or router.blocks:
                    _, *message = await socket.recv_multipart()
                    router.hear(*message)


async def test_an_engine_that_is_not_asked_says_no_tokens(tmp_path: Path) -> None:
    said: list[CacheUpdate] = []
    async with real_worker(tiny_config(tmp_path), *Role, pool_dir=str(tmp_path / "pools")) as worker:
        worker.front._engine.on(CacheUpdate, said.append)
        async with decoding(worker) as decode:
            await answer(decode, "first", prompt(1))
            async with asyncio.timeout(WAIT_S):
                while not said:
                    await asyncio.sleep(0.01)
    assert all(not each.before and not each.tokens for each in said)


def name(number: int) -> bytes:
    return number.to_bytes(8, "big")


def test_pages_that_follow_each_other_are_one_event() -> None:
    """And what is lost goes first; another branch, and a first page, begin anew."""
    tokens = packed(range(4 * 2))
    before = b"".join(map(name, (9, 1, 9, 0)))
    said = CacheUpdate(2, 1, b"".join(map(name, (1, 2, 3, 4))), name(7) + name(8), before, tokens)
    assert events_of(said) == [
        BlockRemoved([7, 8]),
        BlockStored([1, 2], 9, (0, 1, 2, 3), 2),
        BlockStored([3], 9, (4, 5), 2),
        BlockStored([4], None, (6, 7), 2),
    ]
    host = CacheUpdate(2, 0, b"", b"", host_added=name(5), host_dropped=name(6) + name(7))
    assert events_of(host) == [BlockRemoved([6, 7], "CPU"), BlockStored([5], None, (), 2, medium="CPU")]
    coded = msgspec.msgpack.decode(msgspec.msgpack.encode(events_of(said)))
    assert coded[1] == ["BlockStored", [1, 2], 9, [0, 1, 2, 3], 2, None, "GPU", None, None]
    assert coded[0] == ["BlockRemoved", [7, 8], "GPU"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(AllBlocksCleared())) == ["AllBlocksCleared"]


async def test_old_messages_make_room_and_questions_that_are_none_get_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MOST_BYTES", 200)
    address = f"ipc://{tmp_path}/replay"
    publisher = KvEventPublisher(KvEventsConfig(f"ipc://{tmp_path}/out", address, "mine"))
    serving = asyncio.create_task(publisher.serve())
    try:
        publisher.begin("other")
        for number in range(20):
            publisher.publish(CacheUpdate(2, 0, b"", name(number)))
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        for question in ((b"",), (b"", b"short"), (b"x", name(0)), (b"", name(0), b"")):
            await socket.send_multipart(question)
        numbers = [int.from_bytes(number, "big") for number, _ in await replayed(address, 0)]
        assert numbers == [*range(numbers[0], 21)] and 0 < numbers[0] < 20
        assert not await socket.poll(50)
        context.destroy(linger=0)
    finally:
        serving.cancel()
        publisher.close()


async def test_a_long_replay_is_whole_and_one_who_leaves_or_stalls_ends_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More messages than ZMQ's queues hold, which would drop them."""
    monkeypatch.setattr(kv_events, "REPLAY_S", 0.3)
    address, count = f"ipc://{tmp_path}/replay", 5000
    publisher = KvEventPublisher(KvEventsConfig(f"ipc://{tmp_path}/out", address, "mine"))
    serving = asyncio.create_task(publisher.serve())
    context = zmq.asyncio.Context()
    try:
        publisher.begin("other")
        for number in range(count):
            publisher.publish(CacheUpdate(2, 0, b"", name(number)))
        for leaves in (True, False):
            socket = context.socket(zmq.DEALER)
            socket.connect(address)
            await socket.send_multipart((b"", name(0)))
            assert await socket.poll(1000 * WAIT_S)  # its time has begun: what is said later is for others
            if leaves:
                socket.close(linger=0)
        monkeypatch.setattr(kv_events, "REPLAY_S", 2 * WAIT_S)
        content = context.socket(zmq.DEALER)  # has all that it wants, and stays: its queue is empty
        content.connect(address)
        await content.send_multipart((b"", (count + 1).to_bytes(8, "big")))
        assert await content.poll(1000 * WAIT_S)
        numbers = [int.from_bytes(number, "big") for number, _ in await replayed(address, 0, rests_s=0.6)]
        assert numbers == [*range(count + 1)]
    finally:
        serving.cancel()
        publisher.close()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (KvEventsConfig("nonsense"), "kv-events"),
        (KvEventsConfig("tcp://*:none"), "kv-events"),
        (KvEventsConfig("tcp://*:99999"), "kv-events"),
        (KvEventsConfig("ipc:///tmp/x", "tcp://nowhere.invalid:1"), "kv-events-replay"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(tmp_path: Path, config: KvEventsConfig, flag: str) -> None:
    if config.replay:
        config = KvEventsConfig(f"ipc://{tmp_path}/out", config.replay)
    with pytest.raises(ConfigError, match=f"--{flag}: .* cannot be used: "):
        KvEventPublisher(config)


def test_an_address_of_this_machine_is_bound() -> None:
    """As one with `*` is: who dialled it would publish to nobody."""
    publishers = []
    try:
        publishers.append(KvEventPublisher(KvEventsConfig("tcp://*:*")))
        bound = publishers[0]._out.get(zmq.LAST_ENDPOINT).decode()
        with pytest.raises(ConfigError, match="Address already in use"):
            publishers.append(KvEventPublisher(KvEventsConfig(bound)))
        assert bound.startswith("tcp://0.0.0.0:")
    finally:
        for publisher in publishers:
            publisher.close()


@pytest.mark.parametrize("flag", ["replay", "topic"])
def test_a_flag_alone_is_refused(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert cli.main(["worker", f"--kv-events-{flag}", "x"]) == 2
    assert f"--kv-events-{flag}: needs --kv-events ADDRESS" in capsys.readouterr().err
