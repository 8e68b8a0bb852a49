"""Adapters in a campaign: requests have some, and one changes, comes and goes all the time.

There are more than slots, so slots change hands too. Those of the start and those that a caller loads take
turns among the requests, whose answers must be what they are undisturbed. The name `TURNED` has now one
content and now another, and at times none: an answer is wholly of the content that it was begun with. It
knows names, folders and answers; which worker is struck, and when, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from eyas.common.config import NANO
from eyas.common.errors import EyasError, NotFound, Overloaded
from eyas.common.page_names import salt_of
from eyas.common.types import GenerationRequest
from eyas.engine.adapters.peft import read_adapter
from eyas.engine.models.table import read_model
from tests.chaos.rig import ANSWER_S, Rig
from tests.chaos.streams import COME_BACK_S, Tokens, call_options
from tests.unit.adapter_rig import write_adapter

RANKS = (4, 8, 16, 12)
OF_START = 2  # of them; the others are loaded by a caller
SLOTS = 2
TURNED, CONTENTS = "turned", ("heads", "tails")
PROBES, TOKENS = 3, 40  # requests for each content, and of each answer
EACH_THIRD = 3  # time, the name is unloaded
PAUSE_S = 0.3  # between two changes
SAME_S = 60.0  # until all workers have the same, once nothing is struck any more


@dataclass
class AdapterTurns:
    """`names`: of what requests have: ids, so that a request tells its name. `counts`: what became of changes
    and of the requests for what changes. `violations`: what must not be.
    """

    folder: Path
    names: tuple[str, ...]
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    _expected: dict[tuple[str, str], Tokens] = field(default_factory=dict)  # by content and request
    _probes: list[GenerationRequest] = field(default_factory=list)
    _contents: list[str] = field(default_factory=list)  # of the name, in turn, from when each may be there
    _sure: int = 0  # of these, the last one that was there for sure
    _probing: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    def written(cls, folder: Path) -> Self:
        """With adapters of the embedded model, which are written below the folder."""
        model, names = read_model(NANO), []
        for seed, rank in enumerate(RANKS):
            path = write_adapter(folder / f"rank{rank}", NANO, rank=rank, seed=seed, size=0.3)
            names.append(read_adapter(path, model, max(RANKS)).id)
        for seed, name in enumerate(CONTENTS, len(RANKS)):
            write_adapter(folder / name, NANO, rank=8, seed=seed, size=0.3)
        return cls(folder, tuple(names))

    def flags(self) -> list[str]:
        """Of `eyas serve`."""
        first = [f"{name}={path}" for name, path in self._paths()[:OF_START]]
        return ["--lora", *first, "--lora-dir", str(self.folder), "--max-loras", str(SLOTS)]

    def adapted(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """The requests, most of them with an adapter."""
        names = itertools.cycle(("", *self.names))
        return [
            msgspec.structs.replace(request, adapter=name, salt=salt_of("", name))
            for request, name in zip(requests, names, strict=False)
        ]

    # --- a campaign ------------------------------------------------------------------------------------

    async def begin(self, cluster: Rig, requests: Sequence[GenerationRequest]) -> None:
        """Loads what is loaded by callers, and asks each content of `TURNED` undisturbed."""
        for request in [request for request in requests if not request.adapter][:PROBES]:
            params = msgspec.structs.replace(request.params, max_tokens=TOKENS, ignore_eos=True)
            self._probes.append(msgspec.structs.replace(request, params=params))
        for content in CONTENTS:
            await self._change(cluster, content)
            for probe in self._probes:
                self._expected[content, probe.id], _ = await self._answer(cluster, probe)
        for name, path in self._paths()[OF_START:]:
            await cluster.client.load_adapter(name, path.name)
        await cluster.gateway.adapters.look()  # as who is asked by a name it does not know
        for probe in self._probes:
            if len({self._expected[content, probe.id] for content in CONTENTS}) == 1:
                self.violations.append(f"{probe.id} does not tell contents apart")

    async def run(self, cluster: Rig, seed: int) -> None:
        """Changes what `TURNED` is, and asks it, until it is cancelled."""
        rng = random.Random(f"adapters/{seed}")
        for count in itertools.count():
            await asyncio.sleep(PAUSE_S * rng.random())
            content = CONTENTS[count % len(CONTENTS)]
            if not await self._change(cluster, content):
                continue
            for probe in self._probes:
                task = asyncio.create_task(self._ask(cluster, probe))
                self._probing.add(task)
                task.add_done_callback(self._probing.discard)
            if count % EACH_THIRD == 0:
                await asyncio.gather(*self._probing)
                await self._unload(cluster)

    async def end(self, cluster: Rig) -> None:
        """Nothing is struck any more: a change succeeds, and every worker has what the others have."""
        await asyncio.gather(*self._probing)
        try:
            async with asyncio.timeout(SAME_S):
                while not await self._change(cluster, CONTENTS[0]):
                    await asyncio.sleep(COME_BACK_S)
                while len(rosters := await _rosters(cluster)) > 1 or None in rosters:
                    await asyncio.sleep(COME_BACK_S)
        except TimeoutError:
            self.violations.append(f"workers differ in their adapters: {await _rosters(cluster)}")
            return
        (roster,) = rosters
        if roster != frozenset((*self.names, TURNED)):
            self.violations.append(f"adapters got lost: {roster}")

    async def _change(self, cluster: Rig, content: str) -> bool:
        """Whether the name has that content now: a change may fail while workers die."""
        self._contents.append(content)
        try:
            await cluster.client.load_adapter(TURNED, content, replace=True)
        except EyasError as error:
            self.counts[f"loads refused: {type(error).__name__}"] += 1
            return False
        self.counts["loads"] += 1
        self._sure = len(self._contents) - 1
        return True

    async def _unload(self, cluster: Rig) -> None:
        """Unloads the name: no request can have it any more."""
        try:
            await cluster.client.unload_adapter(TURNED)
        except EyasError as error:
            self.counts[f"unloads refused: {type(error).__name__}"] += 1
            return
        self.counts["unloads"] += 1
        try:
            await self._answer(cluster, self._probes[0])
        except NotFound:
            return
        except EyasError as error:
            self.violations.append(f"a request for an unloaded adapter: {type(error).__name__}: {error}")
        else:
            self.violations.append("an adapter that is unloaded was answered for")

    async def _ask(self, cluster: Rig, probe: GenerationRequest) -> None:
        """One answer, wholly of a content. One whose worker dies after the next change is not found."""
        try:
            tokens, contents = await self._answer(cluster, probe)
        except NotFound:
            self.counts["answers that ended with their adapter"] += 1
        except EyasError as error:
            self.violations.append(f"{TURNED}, {probe.id}: {type(error).__name__}: {error}")
        else:
            self.counts["answers" if len(contents) == 1 else "answers begun in a change"] += 1
            if tokens not in {self._expected[content, probe.id] for content in contents}:
                others = [name for name in CONTENTS if tokens == self._expected[name, probe.id]]
                self.violations.append(f"{TURNED}, {probe.id}: {others or 'no content'} for {contents}")

    async def _answer(self, cluster: Rig, probe: GenerationRequest) -> tuple[Tokens, set[str]]:
        """What `TURNED` says, and its contents from when it was asked until it began to answer: a call may
        be made anew meanwhile. Waits for a place.
        """
        tokens: list[int] = []
        options = call_options(probe) | {"model": TURNED}
        while not tokens:
            first, contents = self._sure, set[str]()
            try:
                async with cluster.client.generate_stream(
                    probe.prompt_ids, timeout_s=ANSWER_S, **options
                ) as stream:
                    async for delta in stream:
                        if not tokens:
                            contents = set(self._contents[first:])
                        tokens += delta.tokens
            except Overloaded:
                if tokens:
                    raise
                await asyncio.sleep(COME_BACK_S)
        return tuple(tokens), contents

    def _paths(self) -> list[tuple[str, Path]]:
        return [(name, self.folder / f"rank{rank}") for name, rank in zip(self.names, RANKS, strict=True)]


async def _rosters(cluster: Rig) -> set[frozenset[str] | None]:
    """The names that workers have which compute the model; None: one says nothing, or has none."""
    infos = [info for name, info in (await cluster.infos()).items() if not name.startswith("draft")]
    rosters = [None if info is None else info.adapters for info in infos]
    return {None if roster is None else frozenset(one.name for one in roster.adapters) for roster in rosters}
