"""A model by its own file beside the same by transformers' code: `python -m tests.gpu.time_model_impl`.

`eyas bench one-batch` of both in graphs, with random weights of Llama-3.1-8B's shape, and then of a model
without a file, OLMo 1 of 7 billion weights: a table and a JSON line for each way and batch (`--out FILE`).
`--layers` takes as many of 32 (8), `--eager` launches kernel by kernel as well. Nothing is tuned, and
prompts attend by Triton, so that all three start in seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from eyas.bench import one_batch
from eyas.bench.output import TablePrinter
from eyas.bench.parts import ChildPart, run_parts
from eyas.bench.shapes import SHAPES, write_model

OLMO = {
    "architectures": ["OlmoForCausalLM"],
    "model_type": "olmo",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": SHAPES["llama-3.1-8b"].vocab,
    "max_position_embeddings": 2048,
    "eos_token_id": 0,
    "bos_token_id": 0,
}


def folders(top: Path, layers: int) -> Iterator[tuple[str, Path, str]]:
    """A name, a folder and a way to compute it, one after the other."""
    llama, olmo = top / "llama-3.1-8b", top / "olmo-7b"
    for folder in (llama, olmo):
        write_model(SHAPES["llama-3.1-8b"], folder)
    stated = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(stated | {"num_hidden_layers": layers}))
    (olmo / "config.json").write_text(json.dumps(OLMO | {"num_hidden_layers": layers}))
    yield "llama, its file", llama, "eyas"
    yield "llama, transformers", llama, "transformers"
    yield "olmo, transformers", olmo, "auto"


STARTS = (
    *("--device", "cuda", "--load-format", "dummy", "--draft", "none", "--tune-seconds", "0"),
    *("--prefill-attention-backend", "triton", "--max-running-requests", "32", "--cuda-graph-bs", "1", "32"),
    *("--context-length", "1024", "--chunked-prefill-size", "1024", "--num-pages", "2200"),
)
ON_CPU = ("--load-format", "dummy", "--draft", "none", "--context-length", "1024", "--device", "cpu")


def main() -> int:
    """Runs each; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    flags, parts = argparse.ArgumentParser(), []
    one_batch.add_flags(flags)
    lines = TablePrinter({"way": "run_name"} | one_batch.COLUMNS, args.out, show=one_batch.shown)
    with tempfile.TemporaryDirectory() as top:
        for name, folder, way in folders(Path(top), args.layers):
            words = [*(STARTS if args.device == "cuda" else ON_CPU), "--model", str(folder)]
            words += ["--run-name", name, "--model-impl", way, "--batch-size", "1", "32"]
            given = flags.parse_args([*words, "--input-len", "128", "--output-len", "32"])
            plan, config = one_batch.plan_of(given), one_batch.config_for(given, 32)
            modes = dict(one_batch.modes_of(config))
            chosen = modes if args.eager else dict([list(modes.items())[-1]])
            parts += [
                ChildPart(f"{name} ({mode})", partial(one_batch.measure, each, plan, mode))
                for mode, each in chosen.items()
            ]
        failed = run_parts(parts, lines.tell)
    return int(bool(failed or lines.failed))


if __name__ == "__main__":
    sys.exit(main())
