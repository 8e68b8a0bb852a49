"""The part of `eyas doctor` on links: how KV pages come from each worker that has some to each that pulls
some.
"""

from __future__ import annotations

from typing import Any

from eyas.common.errors import EyasError
from eyas.common.types import Role
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient
from eyas.common.wire.links import PageLink

PROBE_S = 12.0  # a worker answers earlier, unless it is stuck


async def links(workers: list[dict[str, Any]], dial: rpc.Dial) -> list[str]:
    """Has every link measured, one after the other, prints them, and returns the problems found."""
    problems = []
    found = pairs(workers)
    if found:
        print("  how KV pages come (puller <- owner), measured by copies of a proof page:")
    for puller, owner in found:
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
