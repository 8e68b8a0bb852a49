"""A cluster answers while its workers are killed, stopped and drained; nothing may be lost.

Every stream must give the tokens that it gives undisturbed (on a GPU as many, and others are counted), and at
the end nothing may be held: no page, lease, slot or file. Each fault and each outcome is a line of a JSONL
file, whose first line holds the seed that repeats the campaign.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from eyas.common.types import GenerationRequest
from tests.chaos.aborts import Aborts
from tests.chaos.adapters import AdapterTurns
from tests.chaos.faults import Fault, Kind, Part, Phase, resume, strike
from tests.chaos.rig import ON_CPU, Rig, Site, rig
from tests.chaos.streams import Outcome, Streams, through_rig

UNDISTURBED = 8  # at once, for the answers that everything is compared with
WHOLE_S = 90.0  # until all workers of a role serve again
PHASE_S = 15.0  # until a request is in the wanted phase at the wanted worker
QUIET_S = 45.0  # until nothing is held: longer than a lease


@dataclass(frozen=True)
class Plan:
    """How long, how hard. `faults`: those and no more; none: `seconds` of the seed's own."""

    seed: int
    seconds: float
    streams: int
    aborts: int
    stop_s: float = 20.0
    lease_s: float = 30.0
    faults: tuple[Fault, ...] = ()
    site: Site = ON_CPU


@dataclass
class Findings:
    faults: list[Fault] = field(default_factory=list)
    calm: int = 0  # requests that gave other tokens when asked again undisturbed; only counted on a GPU
    unreached: int = 0  # faults whose phase did not come: they struck anyway
    outcomes: list[Outcome] = field(default_factory=list)
    aborts: Counter[str] = field(default_factory=Counter)
    adapters: Counter[str] = field(default_factory=Counter)  # as `AdapterTurns.counts`
    tiers: dict[str, float] = field(default_factory=dict)  # as `Rig.tiers`, when the faults are over
    violations: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        failed = [f"{outcome.request}: {outcome.error}" for outcome in self.outcomes if outcome.error]
        if not self.faults:
            failed.append("nothing was struck")
        if not any(outcome.attempts > 1 for outcome in self.outcomes):
            failed.append("no stream had to go on elsewhere: the faults hit nothing")
        return failed + self.violations


class Campaign:
    """One run of a plan; `journal` gets a JSON line for everything that happens."""

    def __init__(
        self, plan: Plan, journal: TextIO, console: Console, adapters: AdapterTurns | None = None
    ) -> None:
        self._plan = plan
        self._adapters = adapters
        self._journal = journal
        self._writing = threading.Lock()  # processes' lines come from threads, and a text file is for one
        self._console = console
        self._began = time.monotonic()
        self._resuming: dict[str, asyncio.Task[None]] = {}  # the latest stop of each role
        self._dying: dict[str, Fault] = {}  # killed or drained, and not gone yet
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self.findings = Findings()

    async def run(self, requests: list[GenerationRequest]) -> Findings:
        plan = self._plan
        self._write("plan", **{**asdict(plan), "faults": len(plan.faults), "site": str(plan.site.config)})
        try:
            with self._bars:
                async with rig(plan.lease_s, self._log, plan.site) as cluster:
                    await self._on(cluster, requests)
                    folder = cluster.processes.pool_folder
        finally:
            for task in self._resuming.values():
                task.cancel()
        if folder.exists():
            self.findings.violations.append(f"{folder} is still there")
        self._write("end", problems=self.findings.problems)
        return self.findings

    async def _on(self, cluster: Rig, requests: list[GenerationRequest]) -> None:
        plan, adapters = self._plan, self._adapters
        if adapters is not None:
            requests = adapters.adapted(requests)
            await adapters.begin(cluster, requests)
        expected = await self._undisturbed(cluster, requests)
        if not plan.site.exact:
            again = await self._undisturbed(cluster, requests[::-1])
            self.findings.calm = sum(again[id] != tokens for id, tokens in expected.items())
        streams = Streams(cluster, expected, self._heard, plan.site.exact, plan.site.answer_s)
        streams.start(requests, plan.streams, plan.seed)
        turning = None if adapters is None else asyncio.create_task(adapters.run(cluster, plan.seed))
        await self._torment(cluster, streams)
        await streams.finish()
        if adapters is not None and turning is not None:
            turning.cancel()
            await asyncio.wait([turning])
            await adapters.end(cluster)
            self._adapters_changed(adapters, turning)
        await self._quiet(cluster, "after the faults")
        self.findings.tiers = await cluster.tiers()
        bar = self._bars.add_task("aborts", total=plan.aborts)
        aborts = Aborts(cluster, requests, plan.seed, told=lambda: self._bars.advance(bar))
        self.findings.aborts = await aborts.run(plan.aborts)
        await self._quiet(cluster, "after the aborts")
        self.findings.violations += [f"{name} was to end and did not" for name in self._dying]

    async def _undisturbed(
        self, cluster: Rig, requests: list[GenerationRequest]
    ) -> dict[str, tuple[int, ...]]:
        """What every request gives as long as nothing happens."""
        bar = self._bars.add_task("undisturbed", total=len(requests))
        places = asyncio.Semaphore(UNDISTURBED)

        async def one(request: GenerationRequest) -> tuple[str, tuple[int, ...]]:
            async with places:
                tokens, _ = await through_rig(cluster, request)
            self._bars.advance(bar)
            return request.id, tokens

        expected = dict(await asyncio.gather(*map(one, requests)))
        self._say(f"{len(requests)} requests answered undisturbed")
        return expected

    # --- faults ----------------------------------------------------------------------------------------

    async def _torment(self, cluster: Rig, streams: Streams) -> None:
        plan = self._plan
        bar = self._bars.add_task("faults", total=len(plan.faults) or plan.seconds)
        began = time.monotonic()
        for fault in plan.faults or plan.site.faults(plan.seed):
            left = plan.seconds - (time.monotonic() - began)
            if not plan.faults and left <= plan.stop_s:
                break
            await asyncio.sleep(fault.pause_s)
            try:
                await self._until_whole(cluster, fault.role)
            except TimeoutError:
                self.findings.violations.append(
                    f"after {WHOLE_S:g} s a {fault.role} worker was still missing"
                )
                break
            await self._strike_in_phase(cluster, streams, fault)
            done = len(self.findings.faults) if plan.faults else time.monotonic() - began
            self._bars.update(bar, completed=done)
        await asyncio.gather(*self._resuming.values())

    async def _until_whole(self, cluster: Rig, role: str) -> None:
        """Never the last worker of a role: all of them serve before the next one is struck."""
        if role in self._resuming:
            await self._resuming[role]
        async with asyncio.timeout(WHOLE_S):
            while any(fault.role == role for fault in self._dying.values()) or not await cluster.whole(role):
                await asyncio.sleep(0.2)

    async def _strike_in_phase(self, cluster: Rig, streams: Streams, fault: Fault) -> None:
        struck = asyncio.Event()
        address = cluster.processes.addresses[fault.worker]

        def saw(phase: Phase, workers: set[str]) -> None:
            if phase is fault.phase and (fault.role == "draft" or address in workers):
                cluster.saw = lambda phase, workers: None
                self._strike(cluster, fault)
                struck.set()

        if fault.phase is Phase.IDLE:
            await streams.idle()
            self._strike(cluster, fault)
            streams.go_on()
            return
        cluster.saw = saw
        try:
            async with asyncio.timeout(PHASE_S):
                await struck.wait()
        except TimeoutError:
            cluster.saw = lambda phase, workers: None
            self.findings.unreached += 1
            self._strike(cluster, fault)

    def _strike(self, cluster: Rig, fault: Fault) -> None:
        front = cluster.processes.pids[fault.worker]
        pids = strike(fault, front)
        if fault.kind is Kind.STOP:
            self._resuming[fault.role] = asyncio.create_task(resume(pids, self._plan.stop_s))
        else:
            self._dying[fault.worker] = fault
        self.findings.faults.append(fault)
        self._write("fault", **{**asdict(fault), "worker": fault.worker, "pids": pids})
        self._say(f"{fault.kind} {fault.worker} ({fault.part}) {fault.phase}")

    async def _quiet(self, cluster: Rig, when: str) -> None:
        """Waits until nothing is held any more; what is held after that has leaked."""
        began = time.monotonic()
        while (lines := await cluster.leftovers()) and time.monotonic() < began + QUIET_S:
            self._write("held", when=when, leftovers=lines)
            await asyncio.sleep(0.5)
        self._say(f"quiet {when}, {time.monotonic() - began:.1f} s later")
        self.findings.violations += [f"{when}: {line}" for line in lines]

    def _adapters_changed(self, adapters: AdapterTurns, turning: asyncio.Task[None]) -> None:
        """What became of adapters that were changed under the streams."""
        if not turning.cancelled() and (failure := turning.exception()) is not None:
            self.findings.violations.append(f"changes of adapters ended: {failure!r}")
        self.findings.adapters = adapters.counts
        self.findings.violations += adapters.violations

    # --- what is told ----------------------------------------------------------------------------------

    def _heard(self, outcome: Outcome) -> None:
        self.findings.outcomes.append(outcome)
        self._write("stream", **{**asdict(outcome), "began": round(outcome.began - self._began, 3)})
        if outcome.error:
            self._say(f"[red]stream {outcome.request}: {outcome.error}")

    def _log(self, process: str, line: str) -> None:
        self._write("log", process=process, line=line)
        stopped = any(f.kind is Kind.STOP and f.part is Part.ENGINE for f in self.findings.faults)
        if "not serving: its engine" in line and not stopped:
            self.findings.violations.append(f"{process}: {line}")
        if line.startswith("ended with code "):
            self._ended(process, int(line.split()[3].rstrip(";")))

    def _ended(self, process: str, code: int) -> None:
        """A worker dies when it is made to, and only then; a drained one leaves in good order."""
        fault = self._dying.pop(process, None)
        if fault is None:
            self.findings.violations.append(f"{process} ended by itself with code {code}")
        elif fault.kind is Kind.DRAIN and code != 0:
            self.findings.violations.append(f"{process} was drained and ended with code {code}")

    def _say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:7.1f} s  {text}", highlight=False)

    def _write(self, event: str, **fields: object) -> None:
        at = round(time.monotonic() - self._began, 3)
        line = json.dumps({"at": at, "event": event, **fields}) + "\n"
        with self._writing:
            self._journal.write(line)
