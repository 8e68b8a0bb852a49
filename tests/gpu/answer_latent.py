"""One rank of eight of DeepSeek-V3 answers on a GPU: dummy FP8 blocks, uniform routing, CUDA graphs.

    python -m tests.gpu.answer_latent [LAYERS]

Prints a JSON line for each batch, as `eyas bench one-batch` would, with the time of the bytes that its step
reads; then which kernels a step's time went to. With fewer layers the step of all 61 is estimated: what does
not grow with them, the output head, is small.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eyas.bench.one_batch import Script, ScriptLink, StaticBatch, figures, repeat
from eyas.bench.shapes import ModelShape, write_model
from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.errors import EyasError
from eyas.engine.loading.build import build_engine
from eyas.engine.loading.startup import EngineStart
from kv_transfer.backends.table import NONE

LAYERS, DENSE, VOCAB = 61, 3, 16160
SIZES: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": 7168,
    "intermediate_size": 2304,
    "moe_intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": DENSE,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
WHOLE = {
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}
BATCHES = (
    StaticBatch(1, 256, 96),
    StaticBatch(8, 256, 64),
    StaticBatch(32, 256, 64),
    StaticBatch(128, 256, 48),
)
PROMPT = StaticBatch(1, 4096, 1)
PROFILED = (StaticBatch(1, 32, 40), StaticBatch(32, 32, 40), PROMPT)
FLOOR_MS = {1: 1.36, 8: 5.03, 32: 12.9, 128: 19.5}  # of the weights, 61 layers
REACH_MS = {1: 3.2, 8: 7.0, 32: 16.0, 128: 30.0}
KERNELS = 15


def write_rank(folder: Path, layers: int, heads: int = 0) -> None:
    """A folder for dummy weights. `heads`: NextN layers behind the model's own."""
    _write(folder, VOCAB, SIZES | {"num_hidden_layers": layers, "num_nextn_predict_layers": heads})


def write_whole(folder: Path, layers: int, **changes: Any) -> None:
    """A folder for dummy weights of the whole model, of which it has `layers` layers."""
    _write(folder, WHOLE["vocab_size"], SIZES | WHOLE | {"num_hidden_layers": layers} | changes)


def _write(folder: Path, vocab: int, sizes: dict[str, Any]) -> None:
    write_model(ModelShape(7168, 2304, sizes["num_hidden_layers"], 16, 16, vocab=vocab), folder)
    told = json.loads((folder / "config.json").read_text())
    told |= sizes
    del told["head_dim"]
    (folder / "config.json").write_text(json.dumps(told))


def configured(folder: str) -> EngineConfig:
    batches = tuple(batch.size for batch in BATCHES)
    return resolve_engine(
        "cuda", model=folder, draft=None, load_format="dummy", worker="one-batch", transfer=NONE,
        context_length=8192, max_running=max(batches), cuda_graph_bs=batches, cuda_graph_max_bs=max(batches),
        mixed_tokens=0, uniform_experts=True, chunk_tokens=4096, num_pages=6000,
        prefill_attention_backend="triton",
    )  # fmt: skip


def tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def script(layers: int, vocab: int) -> Script:
    """Batches, a long prompt, and where the time goes."""
    for batch in (*BATCHES, PROMPT):
        try:
            found = figures(batch, (yield from repeat(batch, vocab)))
        except EyasError as error:
            tell({"batch": batch.name, "error": error.message})
            continue
        if batch is PROMPT:
            tell({"batch": batch.name, "layers": layers, "prompt_tokens_per_s": found["prefill_throughput"]})
            continue
        step = 1e3 * found["median_decode_latency"]
        whole = step * LAYERS / layers
        expected = {"floor_ms": FLOOR_MS[batch.size], "reach_ms": REACH_MS[batch.size]}
        prompt = {"prompt_tokens_per_s": found["prefill_throughput"]}
        tell(
            {
                "batch": batch.name,
                "layers": layers,
                "step_ms": step,
                "step_ms_of_61": whole,
                **expected,
                **prompt,
            }
        )
    for batch in PROFILED:
        try:
            yield from profiled(batch, vocab)
        except Exception as error:
            tell({"profile": batch.name, "error": repr(error)})


def profiled(batch: StaticBatch, vocab: int) -> Script:
    """Tells the kernels of a step: microseconds, and launches, of the whole over the number of steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:  # on the engine's own thread
        yield batch.requests(vocab, "profiled")
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in seen.events():
        if str(event.device_type).endswith("CUDA"):
            spent[event.name[:60]][0] += event.time_range.elapsed_us()
            spent[event.name[:60]][1] += 1
    steps = batch.output_len
    total = sum(us for us, _ in spent.values()) / steps
    tell({"profile": batch.name, "kernels_us_a_step": total})
    for name, (us, count) in sorted(spent.items(), key=lambda item: -item[1][0])[:KERNELS]:
        tell({"profile": batch.name, "kernel": name, "us": us / steps, "launches": count / steps})


def answer(layers: int) -> None:
    """From the weights on."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write_rank(Path(folder), layers)
        config = configured(folder)
        start = EngineStart.of(config)
        link = ScriptLink(lambda ready: script(layers, ready.vocab_size))
        engine = build_engine(config, link, start)
        tell({"ready_s": time.monotonic() - began, "memory_gb": torch.cuda.memory_allocated() / 1e9})
        engine.run()


if __name__ == "__main__":
    answer(int(sys.argv[1]) if len(sys.argv) > 1 else LAYERS)
