"""KV of a model with windows on a GPU: `python -m tests.gpu.windows`, about a minute.

A small model with the keys and values of gpt-oss-20b (24 layers, every other with a window of 128, 8 heads of
64), random weights, graphs on. First prompts and answers with pages behind windows freed, and with all pages:
the same tokens. Then 32 sequences of 32,768 tokens at once: the pages in use beside those of all layers.
One JSON line each.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.loading.spec import EngineSpec
from kv_transfer.layout import pages_for
from tests.gpu.steady import STUCK_S, Clocked, clocked, engine_config, submit, wait
from tests.unit.loopback import wait_all

VOCAB = 512
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 131072,
    "eos_token_id": 0,
}


def prompts(count: int, length: int) -> list[tuple[int, ...]]:
    """Seeded ids."""
    draws = random.Random(7)
    return [tuple(draws.randrange(1, VOCAB) for _ in range(length + i)) for i in range(count)]


def config_of(folder: Path, args: argparse.Namespace) -> EngineConfig:
    """An engine for the whole load. On a CPU kernels are interpreted."""
    (folder / "config.json").write_text(json.dumps(GPT_OSS | {"num_hidden_layers": args.layers}))
    sizes = {"context_length": args.length + 4096, "max_running": args.sequences}
    if args.device == "cpu":
        sizes |= {"num_pages": 400, "chunk_tokens": 64}
    return engine_config(args.device, model=str(folder), draft=None, pool_dir=str(folder), **sizes)


def tokens(cluster: Clocked, args: argparse.Namespace) -> list[list[int]]:
    """Of a few prompts, by greedy choice and by seeds; in the second turn these go on from the cache."""
    asked, found = prompts(min(4, args.sequences), args.short), []
    params = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=args.new) for i in range(4)]
    for turn in range(2):
        names = [f"{turn} {i}" for i in range(len(asked))]
        requests = [GenerationRequest(*each) for each in zip(names, asked, params, strict=False)]
        results = submit(cluster, requests)
        wait_all(results, STUCK_S)
        found += [result.tokens[0] for result in results]
        asked = [(*ids, *result.tokens[0]) for ids, result in zip(asked, results, strict=True)]
    return found


def pages_in_use(cluster: Clocked, args: argparse.Namespace) -> dict[str, Any]:
    """While all sequences decode."""
    began = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=min(4000, args.length), ignore_eos=True)
    asked = prompts(args.sequences, args.length)
    submit(cluster, [GenerationRequest(f"r{i}", ids, params) for i, ids in enumerate(asked)])
    wait(lambda: cluster.begun >= args.sequences, STUCK_S)
    prompts_s = time.perf_counter() - began
    parts = cluster.by_role["decode"].engine._parts
    before, since = cluster.tokens, time.perf_counter()
    time.sleep(1.0)
    rate = (cluster.tokens - before) / (time.perf_counter() - since)
    scheduler, shape = parts.scheduler, parts.pools[0].shape
    used, running = scheduler.pool.used, list(scheduler.running)
    whole = len(scheduler.cache.groups) * sum(pages_for(len(seq), shape.page_size) for seq in running)
    cluster.cancel([f"r{i}" for i in range(args.sequences)])
    return {
        "sequences": len(running),
        "pages": used,
        "of_all_layers": whole,
        "ratio": round(used / max(whole, 1), 4),
        "gib": round(used * shape.page_bytes / 2**30, 2),
        "preemptions": scheduler.preemptions,
        "prompts_s": round(prompts_s, 1),
        "tokens_s": round(rate),
        "left": scheduler.pool.used,
    }


def main() -> int:
    """1 if a token differs, or too many pages are in use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--short", type=int, default=3000)
    parser.add_argument("--new", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as top:
        config = config_of(Path(top), args)
        with clocked(config) as cluster:
            freed = tokens(cluster, args)
            saved = pages_in_use(cluster, args)
        print(json.dumps(saved), flush=True)
        EngineSpec.windows_ignored = property(lambda spec: "so that all stay")  # type: ignore[assignment, method-assign]
        with clocked(config) as cluster:
            same = tokens(cluster, args) == freed
        print(json.dumps({"same tokens": same, "answers": len({tuple(each) for each in freed})}), flush=True)
    return int(not same or saved["ratio"] > 0.55 or saved["left"] > 0)


if __name__ == "__main__":
    sys.exit(main())
