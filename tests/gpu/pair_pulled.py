"""A pulled prompt against a local one: the same greedy prompts to one worker of all roles and to a split.

    python -m tests.gpu.pair_pulled --out DIR [--layouts split] [SERVE FLAGS]

bf16 rounds, and a prompt alone may be computed in other chunks than where one worker does both, so answers
may part at near-ties. The rule: where two answers part, each holds the other's token, too, at most SLACK
below its own. With dummy weights any wrong page makes another answer altogether; the power of the rule is
told beside it: how many answers to *other* prompts it refuses. Every prompt must have been pulled, and the
paths of all are told. Ninety seconds with two starts.

`--layouts split21`: by a worker of one GPU from one of two; then sums over ranks part the answers at more
near-ties. `--deepseek 8` pulls latents: the model has 8 dense layers of DeepSeek-V3's sizes in bf16. Rows
rounded to FP8 would part the answers too, as would experts. `--device cpu --prompts 64 300 --count 4
--chunked-prefill-size 96` tries it with the embedded model, where nothing differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvloop

from tests.gpu.answer_latent import write_whole
from tests.gpu.pair_load import token_ids
from tests.gpu.pair_rig import Setting, Variant, add_setting, make_setting, served, step

ANSWER = 48  # tokens
HELD = 5  # tokens with logprobs per position
SLACK = 0.25  # logprobs: what `test_engine_on_gpu` allows bf16
ASK_S = 30.0
LATENTS = Path("/tmp/eyas-deepseek-dense")


@dataclass(frozen=True)
class Answer:
    """Its tokens, and per position the logprobs of the HELD likeliest ones, by token."""

    tokens: tuple[int, ...]
    held: tuple[dict[int, float], ...]
    path: str = ""  # of its prompt's pages; none came


def parting(one: Answer, other: Answer) -> tuple[int, float]:
    """Where two answers part first (ANSWER: nowhere), and how far below its own token each has the other's
    there: the larger of both. Infinite where it does not hold the other's token.
    """
    for place, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        if a != b:
            ours, theirs, never = one.held[place], other.held[place], -float("inf")
            return place, max(ours[a] - ours.get(b, never), theirs[b] - theirs.get(a, never))
    return ANSWER, 0.0


async def ask(http: httpx.AsyncClient, ids: tuple[int, ...]) -> Answer:
    """One greedy answer of ANSWER tokens. Raises httpx.HTTPError."""
    reply = await http.post(
        "/generate",
        json={
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": HELD,
            "timings": True,
        },
    )
    told = reply.raise_for_status().json()["meta_info"]
    held = tuple({id: logprob for logprob, id, *_ in place} for place in told["output_top_logprobs"])
    tokens = tuple(id for _, id, *_ in told["output_token_logprobs"])
    paths = [leg["transfer_path"] for leg in told["timings"]["legs"] if "transfer_path" in leg]
    return Answer(tokens, held, *paths)


async def _answers(setting: Setting, variant: Variant, prompts: Sequence[int], count: int) -> list[Answer]:
    async with (
        served(setting, variant) as cluster,
        httpx.AsyncClient(base_url=cluster.target.server.url, timeout=ASK_S, trust_env=False) as http,
    ):
        questions = [token_ids(cluster.vocabulary, size, 2, i) for size in prompts for i in range(count)]
        return [await ask(http, ids) for ids in questions]


async def _compare(setting: Setting, layouts: Sequence[str], prompts: Sequence[int], count: int) -> None:
    local = await _answers(setting, Variant("one"), prompts, count)
    others = [parting(a, b)[1] for a, b in itertools.permutations(local, 2)]
    power = f"{sum(one > SLACK for one in others)} of {len(others)}"
    for layout in layouts:
        pulled = await _answers(setting, Variant(layout), prompts, count)
        found = [parting(a, b) for a, b in zip(local, pulled, strict=True)]
        worst = max(gap for _, gap in found)
        verdict = {
            "layout": layout,
            "prompts": list(prompts),
            "answers": len(found),
            "equal": sum(place == ANSWER for place, _ in found),
            "worst": worst,
            "partings": [(place, round(gap, 3)) for place, gap in found if place < ANSWER],
            "paths": dict(Counter(one.path for one in pulled)),
            "other_prompts_refused": power,
        }
        setting.journal.write("pulled", **verdict)
        setting.journal.say(f"pulled against local: {verdict}")
        if not all(one.path for one in pulled):
            raise RuntimeError(f"{layout}: not every prompt was pulled")
        if worst > SLACK:
            error = RuntimeError(f"an answer parts from the local one by {worst:.2f}, not at a near-tie")
            setting.journal.failure(layout, error)


def main() -> int:
    """The command line; 1 if answers differ by more than near-ties."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_setting(parser, ())
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192], metavar="TOKENS")
    names = ("split", "split21", "split12")
    parser.add_argument("--layouts", choices=names, nargs="+", default=["split"])
    parser.add_argument("--deepseek", type=int, metavar="LAYERS", help="their latents, not Llama's heads")
    parser.add_argument("--count", type=int, default=8, help="of each length (%(default)d)")
    args, serve = parser.parse_known_args()
    if args.deepseek:
        write_whole(LATENTS, args.deepseek, first_k_dense_replace=args.deepseek, quantization_config=None)
        serve += ["--model", str(LATENTS)]
    setting = make_setting(args, serve, "pulled")

    async def run() -> None:
        await step(
            setting, "pulled", setting.left_s, _compare(setting, args.layouts, args.prompts, args.count)
        )

    uvloop.run(run())
    return int(setting.journal.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
