"""A whole model of experts answers on a GPU: Qwen3-30B-A3B's sizes, dummy weights, CUDA graphs.

    python -m tests.gpu.answer_experts bf16|fp8

Prints a JSON line for batches of 1, 8 and 32 requests, as `eyas bench one-batch` would.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.bench import one_batch
from eyas.bench.one_batch import StaticBatch
from eyas.bench.shapes import ModelShape, write_model
from eyas.common.config import resolve_engine
from kv_transfer.backends.table import NONE

BATCHES = (1, 8, 32)
LAYERS, VOCAB = 48, 151936
BYTES_PER_S = 4.3e12


def write_qwen(folder: Path, fp8: bool) -> None:
    """A folder for dummy weights."""
    write_model(ModelShape(2048, 6144, LAYERS, 32, 4, vocab=VOCAB, context=32768), folder)
    told = json.loads((folder / "config.json").read_text())
    told |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128}
    told |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    told |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1e6, "rope_scaling": None}
    if fp8:
        told["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(told))


def answer(fp8: bool) -> None:
    """Prints a JSON line for each batch, with graphs."""
    with tempfile.TemporaryDirectory() as directory:
        write_qwen(Path(directory), fp8)
        config = resolve_engine(
            "cuda", model=directory, draft=None, load_format="dummy", worker="one-batch", transfer=NONE,
            context_length=2048, max_running=32, cuda_graph_bs=BATCHES, cuda_graph_max_bs=32,
            mixed_tokens=0, prefill_attention_backend="triton",
        )  # fmt: skip
        plan = one_batch.BatchPlan(tuple(StaticBatch(size, 256, 128) for size in BATCHES), "experts")
        one_batch.measure(config, plan, one_batch.GRAPHS, lambda line: print(json.dumps(line), flush=True))


def engine(fp8: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """What a process that answers prints; and the floor of each batch's step."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.gpu.answer_experts", "fp8" if fp8 else "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1.0))
    sys.stderr.write(done.stderr[-6000:])
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            size = 1 if fp8 else 2
            touched = 128 * (1 - (1 - 8 / 128) ** told.get("batch_size", 1))
            layer = (2048 * (4096 + 1024 + 4096) + touched * 3 * 768 * 2048) * size + 128 * 2048 * 2
            told["floor_ms"] = round((LAYERS * layer + VOCAB * 2048 * 2) / BYTES_PER_S * 1e3, 3)
            yield {"ok": "error" not in told, **told}
    yield {"ok": done.returncode == 0, "seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    answer(sys.argv[1] == "fp8")
