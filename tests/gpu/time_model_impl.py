"""A model by its own file beside the same by transformers' code: `python -m tests.gpu.time_model_impl`.

`eyas bench one-batch` for both, kernel by kernel and in graphs, with random weights of Llama-3.1-8B's shape:
a table and a JSON line for each way, mode and batch (`--out FILE`). `--layers` takes as many of its 32. Then
the step of a model without a file: OLMo 1, of 7 billion weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


def main() -> int:
    """Runs each; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch-size", nargs="+", default=["1", "32"])
    parser.add_argument("--input-len", default="256")
    parser.add_argument("--output-len", default="64")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as top:
        for name, folder, way in folders(Path(top), args.layers):
            print(name, flush=True)
            command = [sys.executable, "-m", "eyas.cli", "bench", "one-batch", "--run-name", name]
            command += ["--model", str(folder), "--load-format", "dummy", "--draft", "none"]
            command += ["--model-impl", way, "--device", args.device, "--context-length", "2048"]
            command += ["--input-len", args.input_len, "--output-len", args.output_len]
            command += ["--batch-size", *args.batch_size]
            command += ["--output-file", str(args.out)] if args.out else []
            failed |= subprocess.run(command, check=False).returncode
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
