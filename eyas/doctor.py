"""`eyas doctor`: asks every worker of a running cluster, sends one request through it, and reports.

It changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import httpx

from eyas.client.reach import ServerAddress, http_options, unreachable
from eyas.common.errors import EyasError
from eyas.common.security.tls import service_tls
from eyas.common.types import Role
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient
from eyas.common.wire.links import PageLink

TIMEOUT_S = 10.0
DIAL_S = 2.0
REQUEST = {
    "input_ids": [0, 1, 2, 3],
    "sampling_params": {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True},
    "timings": True,
    "timeout": TIMEOUT_S,
}


PROBE_S = 12.0  # a worker answers earlier, unless it is stuck


async def links(workers: list[dict[str, Any]], dial: rpc.Dial) -> list[str]:
    """Has every link measured, one after the other, prints them, and returns the problems found."""
    problems = []
    routes = pairs(workers)
    if routes:
        print("  how KV pages come (puller <- owner), measured by copies of a proof page:")
    for puller, owner in routes:
        name = f"{puller} <- {owner}"
        try:
            async with dial(puller) as channel:
                measured = await InfoClient(channel).probe_links(owner, PROBE_S)
        except EyasError as error:
            print(f"  !! {name}")
            problems.append(f"link {name}: {error.message}")
            continue
        for link in measured:
            rank = f" rank {link.rank}" if len(measured) > 1 else ""
            print("\n".join(rows(name + rank, link)))
            if link.problem:
                problems.append(f"link {name}{rank}: {link.problem}")
    return problems


def pairs(workers: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(puller, owner) for each worker that pulls KV, and each other one that computes prompts for others."""
    owners = [w["worker"] for w in workers if Role.PREFILL in w["roles"] and not w["stays"]]
    pullers = [w["worker"] for w in workers if set(w["roles"]) != {Role.PREFILL} and not w["stays"]]
    return [(puller, owner) for puller in pullers for owner in owners if puller != owner]


def rows(name: str, link: PageLink) -> list[str]:
    """One link as a person reads it: figures, then why better ways are not taken."""
    state = "!!" if link.problem else "ok"
    figures = f"{_latency(link.latency_s):>9} per page  {_rate(link.bytes_per_s):>10}"
    pulled = f"{link.pulls} pulls, {_size(link.pulled_bytes)} so far"
    first = f"  {state} {name:46} {link.path or 'no way':8} {figures}  {pulled}"
    return [first, *(f"       not {path}: {reason}" for path, reason in link.passed_over.items())]


def _latency(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s else "-"


def _size(bytes: int) -> str:
    return f"{bytes / 1e6:.1f} MB" if bytes >= 1e5 else f"{bytes / 1e3:.1f} kB"


def examine(server: ServerAddress, tls_dir: str | None) -> int:
    """Prints a report; returns the exit code: 0 without problems, else 1.

    `tls_dir`: the certificates with which workers are asked. Raises ConfigError for bad ones.
    """
    problems = asyncio.run(_examine(server, rpc.dialer(service_tls(tls_dir))))
    for problem in problems:
        print(f"problem: {problem}")
    print("all is well" if not problems else f"{len(problems)} found")
    return 1 if problems else 0


async def _examine(server: ServerAddress, dial: rpc.Dial) -> list[str]:
    """All problems, in the order in which they were found."""
    problems: list[str] = []
    url, options = server.url, http_options(server)
    async with httpx.AsyncClient(base_url=url, timeout=2 * TIMEOUT_S, **options) as http:
        with _step("looking at the cluster failed", problems):
            cluster = await _ask(http, "GET", "/cluster")
            health, workers = cluster["health"], cluster["workers"]
            state = health["problem"] or health["degraded"] or "healthy"
            print(f"gateway {url}: {cluster['model']}, {state}")
            problems += [text for text in health.values() if text]
            for worker_problems in await asyncio.gather(*(_visit(worker, dial) for worker in workers)):
                problems += worker_problems
            if not workers:
                problems.append("the gateway knows no worker")
            problems += adapters(workers)
            with _step("the request through the cluster failed", problems):
                problems += _trace(await _ask(http, "POST", "/generate"), workers)
            with _step("measuring the links failed", problems):
                problems += await links(workers, dial)
    return problems


@contextlib.contextmanager
def _step(failure: str, problems: list[str]) -> Iterator[None]:
    """A step of the examination: an exception in it becomes one more problem, and the others are kept.

    This includes every exception: a peer of another version may send what the doctor cannot read.
    """
    try:
        yield
    except EyasError as error:
        problems.append(f"{failure}: {error.message}")
    except Exception as error:
        problems.append(f"{failure}: {error!r}")


def adapters(workers: list[dict[str, Any]]) -> list[str]:
    """Prints the adapters of the cluster; returns which worker lacks one."""
    names = {
        worker["worker"]: {adapter["name"] for adapter in worker["adapters"]["adapters"]}
        for worker in workers
        if worker.get("adapters")
    }
    every = sorted(set().union(*names.values()))
    if every:
        print(f"  adapters: {', '.join(every)}")
    return [
        f"worker {worker} lacks the adapter {name}: its log says why"
        for worker, own in names.items()
        for name in every
        if name not in own
    ]


async def _ask(http: httpx.AsyncClient, method: str, path: str) -> Any:
    """The JSON of the gateway's answer. Raises EyasError if it refuses or does not answer."""
    try:
        reply = await http.request(method, path, json=REQUEST if method == "POST" else None)
    except httpx.ConnectError as error:
        raise unreachable(str(http.base_url).rstrip("/"), error) from error
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__  # a timeout has no text
        raise EyasError(f"{http.base_url} does not answer {path}: {reason}") from error
    if reply.status_code != 200:
        raise EyasError(f"{path}: HTTP {reply.status_code}: {reply.text[:300]}")
    return reply.json()


async def _visit(worker: dict[str, Any], dial: rpc.Dial) -> list[str]:
    """Asks one worker directly, prints its line of the report, and returns its problems."""
    address, roles = worker["worker"], ",".join(worker["roles"])
    problems: list[str] = []
    async with dial(address) as channel:
        with _step(f"worker {address} ({roles}) could not be asked from here", problems):
            info = await InfoClient(channel).info(DIAL_S)
            if not info.serving:
                problems.append(f"worker {address} ({roles}) is not serving")
            if str(info.epoch) != worker["epoch"]:
                problems.append(f"worker {address} is at epoch {info.epoch}: the gateway knows an older one")
            if info.trouble:
                problems.append(f"worker {address} ({roles}): {info.trouble}")
    if Role.DECODE in worker["roles"] and not worker["connected"]:
        problems.append(f"the gateway has no session with {address} ({roles})")
    load = f"{worker['running']} running, {worker['waiting']} waiting"
    pages = f"{worker['pages_used']} of {worker['pages_total']} pages"
    state = "ok" if not problems else "!!"
    said = f"epoch {worker['epoch']:20} {worker['arithmetic']:5} {load}, {pages}"
    print(f"  {state} {address:21} {roles:20} {said}")
    return problems


def _trace(answer: dict[str, Any], workers: list[dict[str, Any]]) -> list[str]:
    """Prints the path of a request; returns the problems that it shows."""
    meta = answer["meta_info"]
    timings = meta["timings"]
    for leg in timings["legs"]:
        parts = [f"queue {leg['queue_ms']:.1f} ms"]
        if "prefill_ms" in leg:
            parts.append(f"prefill {leg['prefill_ms']:.1f} ms")
        if "transfer_path" in leg:
            moved = f"{leg['transfer_bytes']} bytes by {leg['transfer_path']} in {leg['transfer_ms']:.1f} ms"
            parts.append(moved)
        print(f"  -> {leg['role']:8} {leg['worker']:21} {', '.join(parts)}")
    length = timings["acceptance_length"]
    drafts = f"acceptance length {length:.2f}" if length else "no drafts"
    print(f"  {meta['completion_tokens']} tokens in {timings['total_ms']:.0f} ms, {drafts}")
    roles = {role for worker in workers for role in worker["roles"]}
    problems = []
    legs = timings["legs"]
    if len(legs) > 1 and not any("transfer_path" in leg for leg in legs):
        problems.append(f"{legs[-1]['worker']} computed the prompt itself: its pages were not transferred")
    if Role.DRAFT in roles and not length and any(w["draft_fingerprint"] for w in workers):
        problems.append("no draft was verified: every token took a step of its own")
    return problems
