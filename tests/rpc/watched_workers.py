"""A decode worker, and prompts that another worker has computed for it."""

from __future__ import annotations

from typing import Any

from fake_engine import FakeWorker, request, worker

from eyas.common.types import KvHandle, Role
from eyas.common.wire import clients, rpc


def decoder_of(*members: FakeWorker) -> Any:
    """A decode worker whose cluster is `members`."""
    return worker(Role.DECODE, registry="static:" + ",".join(member.address for member in members))


async def prefilled(w: FakeWorker, at: str = "") -> KvHandle:
    """The handle of a prompt that `w` has computed; `at`: where it is reached, if not by its name."""
    async with rpc.channel(at or w.address) as channel:
        stream = clients.PrefillClient(channel).prefill(request(4, 5, 6), 1, False)
        events = [event async for event in stream]
    return events[1].handles[0]
