"""Groups of ranks on two hosts, and a cable that is pulled: `python -m tests.e2e.rank_hosts [--ranks 2 1]`.

The hosts are network namespaces. Ranks are processes whose kernels are interpreted, and whose pools are files
that rank 0 of their own host maps (`tests.unit.ranks_rig`). Pages go by `tcp`, by heads where the numbers of
ranks differ. Tokens must be those of one worker that computes everything itself; while the cable is out, a
prompt costs time and no answer; in the end every slot and every lease is free, on both hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.common.wire import message
from eyas.engine.kv.staging import PageStaging
from eyas.engine.loading import travel
from prefill_svc import transfer
from tests.e2e.namespaces import FAR_ADDRESS, NEAR_ADDRESS, TwoHosts, problem, two_hosts
from tests.rpc.real_worker import RealWorker, alone, decoding, prefill
from tests.unit import interpreted
from tests.unit.ranks_rig import install, of_ranks
from tests.unit.tiny import write_tiny_llama

WINDOW = 2  # pages
SLOW_S = 1.0  # of a copy out of a pool, when it is to be cut in the middle
CUT_S = 8.0
PATCH = pytest.MonkeyPatch()


def request(number: int) -> GenerationRequest:
    """A prompt of 4 pages, and no other's."""
    prompt = tuple((7 * i + 13 * number) % 60 + 3 for i in range(57))
    return GenerationRequest(f"r{number}", prompt, SamplingParams(temperature=0.8, seed=5, max_tokens=4))


def config(model: str) -> EngineConfig:
    """An engine that takes little."""
    return EngineConfig(
        model=model, draft=None, num_pages=64, max_running=4, chunk_tokens=32, context_length=128
    )


def prepare() -> None:
    """Engines of this process have ranks, and windows of few pages."""
    interpreted.install()
    install(PATCH)
    PATCH.setattr(travel, "STAGED_BYTES", 0)
    for module in (travel, transfer):
        PATCH.setattr(module, "window_pages", lambda page_bytes: WINDOW)


@contextlib.asynccontextmanager
async def worker(engine: EngineConfig, role: Role, host: str, registry: str) -> AsyncIterator[RealWorker]:
    """A worker that others reach at `host`."""
    made = RealWorker(dataclasses.replace(engine, roles=(role,), transfer="tcp"), registry)
    made._config = dataclasses.replace(made._config, host=host)
    started = await made.start()
    try:
        yield started
    finally:
        await started.stop()


async def own(model: str, folder: str, ranks: int) -> None:
    """The far host's worker. Says its address; hears `slow`, `fast` and `idle`, and says when it is."""
    copy, slow = PageStaging._copy_out, [0.0]

    def slowly(*args: Any) -> int:
        time.sleep(slow[0])
        return copy(*args)

    PATCH.setattr(PageStaging, "_copy_out", slowly)
    async with worker(of_ranks(config(model), ranks, folder), Role.PREFILL, FAR_ADDRESS, "static:") as made:
        print(made.address, flush=True)
        while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
            slow[0] = SLOW_S if word == "slow" else 0.0
            if word == "idle":
                await made.idle()
            print(word, flush=True)


class Far:
    """The process of `own`."""

    def __init__(self, hosts: TwoHosts, *words: str) -> None:
        command = hosts.on_far(sys.executable, "-m", "tests.e2e.rank_hosts", "--own", *words)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()

    def tell(self, word: str) -> None:
        """Returns when it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._line() == word

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


async def pulled(hosts: TwoHosts, far: Far, b: RealWorker, expected: list[list[int]]) -> None:
    """Three prompts: with the cable in place, pulled in the middle, and in place again."""
    dial_far = dataclasses.make_dataclass("Owner", ["address", "dial"])(far.address, b.dial)
    async with decoding(b) as decode:
        decode.attach(request(0), await prefill(dial_far, request(0)))
        assert await decode.tokens() == (expected[0], "tcp"), "with the cable in place"
        far.tell("slow")
        decode.attach(request(1), await prefill(dial_far, request(1)))
        await asyncio.sleep(SLOW_S / 2)
        began = time.monotonic()
        hosts.cable("down")
        await decode.next(message.PagesLost)
        print(f"the pages were given up after {time.monotonic() - began:.1f} s without the cable", flush=True)
        decode.session.attach("r1", 3, (), ())
        assert await decode.tokens() == (expected[1], ""), "without the cable"
        await asyncio.sleep(max(0.0, CUT_S - (time.monotonic() - began)))
        hosts.cable("up")
        far.tell("fast")
        async with asyncio.timeout(60):
            handles = await prefill(dial_far, request(2))
        decode.attach(request(2), handles)
        assert await decode.tokens() == (expected[2], "tcp"), "with the cable back"
    await b.idle()
    slots = b.engine._parts.copiers[0]._landing.slots
    assert slots.free == slots.total
    far.tell("idle")


async def run(hosts: TwoHosts, folder: Path, there: int, here: int) -> None:
    write_tiny_llama(folder / "model", layers=2, tied=False)
    model = str(folder / "model")
    expected = await alone(of_ranks(config(model), 1, ""), folder / "alone", *map(request, range(3)))
    far = await asyncio.to_thread(Far, hosts, model, str(folder / "there"), str(there))
    engine = of_ranks(config(model), here, str(folder / "here"))
    try:
        async with worker(engine, Role.DECODE, NEAR_ADDRESS, f"static:{far.address}") as b:
            await pulled(hosts, far, b, expected)
    finally:
        far.close()
    print(f"{there} to {here} ranks: the tokens of one worker, before, during and after the cut", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs=2, default=(2, 1), metavar="N", help="there, here (2 1)")
    parser.add_argument("--own", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own:
        prepare()
        asyncio.run(own(args.own[0], args.own[1], int(args.own[2])))
        return 0
    if reason := problem():
        print(f"two hosts cannot be made here: {reason}", file=sys.stderr)
        return 2
    with two_hosts() as hosts, tempfile.TemporaryDirectory(prefix="eyas-ranks-", dir="/dev/shm") as folder:
        prepare()
        asyncio.run(run(hosts, Path(folder), *args.ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
