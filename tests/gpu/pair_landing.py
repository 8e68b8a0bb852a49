"""Whether the pages of a prompt have landed when its last chunk ends: prompts one at a time on a split pair.

    python -m tests.gpu.pair_landing --out DIR [SERVE FLAGS]

The default prompts end with a chunk of the same 2,048 tokens and have 0, 1 and 2 chunks of 3,072 before it.
Token 1 is sent when the last chunk has ended, so the gap to token 2 holds what had not landed then, and one
decode step. If the earlier chunks have landed, that gap does not grow with their number; if one had not, it
would grow by its bytes over the rate of the link. A brief prompt beside them shows that rate: its gap is
shorter by the bytes that it lacks. Two minutes with the start. `--device cpu --brief 16 --prompts 64 160 256
--count 3 --chunked-prefill-size 96` tries it with the embedded model.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from eyas.bench.backends import COMPLETIONS, ParsedEvent
from eyas.bench.jobs import LoadJob
from eyas.bench.runner import TargetServer
from tests.gpu.pair_load import token_ids
from tests.gpu.pair_rig import Setting, Variant, add_setting, make_setting, served, step

ANSWER = 48
WARM_UP = 2  # of each length
ASK_S, PAUSE_S = 20.0, 0.05
ALLOWED_MS = 5.0  # from the last chunk to token 2, beside a decode step
FASTEST = 390e6  # bytes per ms of a contiguous copy between two H200s: pages are never faster


@dataclass(frozen=True)
class Asked:
    """One request, in milliseconds. `gap`: from token 1 to token 2 at the client; `inside`: at the gateway.

    `decode_step`: the median of the later gaps. `transfer`: since the pages to fill were there, so that it
    holds the computing of the prompt, too.
    """

    prompt: int
    ttft: float
    gap: float
    inside: float
    decode_step: float
    transfer: float
    bytes: int
    path: str

    @property
    def late(self) -> float:
        """What the gap holds beside a decode step."""
        return self.gap - self.decode_step


def main() -> int:
    """The command line; 1 if some step failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_setting(parser, ("split", "one"))
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 5120, 8192], metavar="TOKENS")
    parser.add_argument("--brief", type=int, default=256, metavar="TOKENS", help="another (%(default)d)")
    parser.add_argument("--count", type=int, default=15, help="of each length (%(default)d)")
    args, serve = parser.parse_known_args()
    setting = make_setting(args, serve, "landing")
    uvloop.run(_measure(setting, args.layouts, [args.brief, *sorted(args.prompts)], args.count))
    return int(setting.journal.failed > 0)


async def _measure(setting: Setting, variants: Sequence[Variant], prompts: Sequence[int], count: int) -> None:
    for variant in variants:
        await step(setting, str(variant), setting.left_s, _layout(setting, variant, prompts, count))


async def _layout(setting: Setting, variant: Variant, prompts: Sequence[int], count: int) -> None:
    found: list[Asked] = []
    async with served(setting, variant) as cluster:
        for number in range(WARM_UP + count):
            for prompt in prompts:
                ids = token_ids(cluster.vocabulary, prompt, 1, number, prompt)
                async with asyncio.timeout(ASK_S):
                    asked = await ask(cluster.target, ids)
                if number >= WARM_UP:
                    found.append(asked)
                    setting.journal.write("asked", layout=str(variant), **dataclasses.asdict(asked))
                await asyncio.sleep(PAUSE_S)
    _tell(setting, str(variant), found)


async def ask(target: TargetServer, ids: tuple[int, ...]) -> Asked:
    """Asks one prompt. Raises RuntimeError if it fails."""
    told: dict[str, Any] = {}

    def read(data: bytes) -> ParsedEvent:
        event = COMPLETIONS.read(data)
        told.update(event.timings or {})
        return event

    spied = dataclasses.replace(target, backend=dataclasses.replace(COMPLETIONS, read=read))
    record = await spied.ask(LoadJob.single(ids, ANSWER), ids, ANSWER)
    if record.error or len(record.itls_s) < 3:
        raise RuntimeError(record.error or "too few tokens have a text")
    moved: dict[str, Any] = next((leg for leg in told.get("legs", ()) if "transfer_path" in leg), {})
    return Asked(
        prompt=len(ids),
        ttft=1e3 * record.ttft_s,
        gap=1e3 * record.itls_s[0],
        inside=float(told.get("first_decode_ms") or 0.0),
        decode_step=1e3 * statistics.median(record.itls_s[1:]),
        transfer=float(moved.get("transfer_ms", 0.0)),
        bytes=int(moved.get("transfer_bytes", 0)),
        path=str(moved.get("transfer_path", "-")),
    )


def _tell(setting: Setting, name: str, found: Sequence[Asked]) -> None:
    say = setting.journal.say
    by_length = {one.prompt: [other for other in found if other.prompt == one.prompt] for one in found}
    say(
        f"{'prompt':>8}{'TTFT':>9}{'gap 1-2: p50':>14}{'p90':>8}{'max':>8}{'at gateway':>12}{'step':>8}"
        f"{'late p50':>10}{'max':>8}{'MB moved':>10}{'ms, with prefill':>18}  path"
    )
    for prompt, same in by_length.items():
        gap = np.array([one.gap for one in same])
        say(
            f"{prompt:>8}{_median(same, 'ttft'):>9.1f}{np.median(gap):>14.2f}{np.quantile(gap, 0.9):>8.2f}"
            f"{gap.max():>8.2f}{_median(same, 'inside'):>12.2f}{_median(same, 'decode_step'):>8.2f}"
            f"{_median(same, 'late'):>10.2f}{max(one.late for one in same):>8.2f}"
            f"{_median(same, 'bytes') / 1e6:>10.1f}{_median(same, 'transfer'):>18.2f}  {same[0].path}"
        )
    brief, short, *_, long = by_length.values()
    verdict = landed(brief, short, long)
    setting.journal.write("landed", layout=name, **verdict)
    say(f"{name}: {verdict}")


def landed(brief: Sequence[Asked], short: Sequence[Asked], long: Sequence[Asked]) -> dict[str, Any]:
    """What the earlier chunks of the longer prompts cost after the last one, and what they would, unlanded.

    `growth_ms`: of the median lateness, from short to long. `earlier_ms`: the time of the earlier chunks'
    bytes on the fastest link; a growth well below it says that they had landed. `link_gb_per_s`: from brief
    to short, bytes over lateness; None if the gap does not tell. `within`: how many of the longest have
    token 2 in ALLOWED_MS and a decode step.
    """
    late = [_median(side, "late") for side in (brief, short, long)]
    moved = [_median(side, "bytes") for side in (brief, short, long)]
    slower = late[1] - late[0]
    return {
        "growth_ms": round(late[2] - late[1], 3),
        "earlier_ms": round((moved[2] - moved[1]) / FASTEST, 3),
        "link_gb_per_s": round((moved[1] - moved[0]) / slower / 1e6, 1) if slower > 0 else None,
        "within": f"{sum(one.late <= ALLOWED_MS for one in long)} of {len(long)}",
    }


def _median(asked: Sequence[Asked], name: str) -> float:
    return float(statistics.median(getattr(one, name) for one in asked))


if __name__ == "__main__":
    sys.exit(main())
