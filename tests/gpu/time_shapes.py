"""Whole engines of models' shapes on one GPU: dummy weights, uniform routing.

    python -m tests.gpu.time_shapes --out FILE [--shapes gpt-oss-20b gemma-4-31b] [--loads bs1 bs8 bs32 s1k]
    XDG_CACHE_HOME=DIR python -m tests.gpu.time_shapes --out FILE --shapes olmoe phi-4-mini --tune-seconds 20

Milliseconds per token of one request, eight and 32 at once (and with prompts of 1,024 tokens that keep
coming: s1k), each beside its floor: the bytes of a step's weights, with those of the experts that so many
rows touch, over 4.3 TB/s (for s1k the floor of 32 rows, which leaves the prompts out). Then the kernels of a
step, by the time that they take. Each shape is a process of its own. A line of JSON is in FILE as soon as it
is known. `--tune-seconds`: tiles that no table has are searched first, as a worker's first start does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eyas.bench.shapes import SHAPES as LLAMAS
from eyas.bench.shapes import ModelShape, write_model
from eyas.common.config import EngineConfig, resolve_engine
from eyas.engine.checkpoint.config import ExpertsSpec, LayerSpec, ModelConfig
from eyas.engine.loading.first_tiles import search_first
from eyas.engine.loading.startup import EngineStart, StartPhases
from eyas.engine.models.table import read_model
from tests.gpu.exact_cost import Load, Timed
from tests.gpu.exact_rig import KINDS
from tests.gpu.lines import say

BYTES_PER_S = 4.3e12
LOADS = (
    Load("bs1", 128, 256, 1, 1),
    Load("bs8", 128, 256, 8, 8),
    Load("bs32", 128, 256, 32, 32),
    Load("s1k", 1024, 128, 64, 32, gap_s=0.03),
)


@dataclass(frozen=True)
class Shape:
    """A model. `stated`: what config.json says beside a Llama's sizes. `expert_bits`, `dense_bits`: of a
    number of an expert, and of another layer's matrix; embeddings, routers and the head are of 16.
    """

    sizes: ModelShape
    stated: dict[str, Any]
    expert_bits: float = 16
    dense_bits: float = 16

    def floor_ms(self, config: ModelConfig, rows: int) -> float:
        """A step of that many rows of `config`, which is the model as it was read. A state is read and
        written.
        """
        bits = sum(self._bits(layer, config.hidden_size, rows) for layer in config.layers)
        states = sum(math.prod(layer.delta.state) for layer in config.layers if layer.delta is not None)
        ends = config.vocab_size * config.hidden_size * 2
        return (bits / 8 + ends + 2 * 4 * rows * states) / BYTES_PER_S * 1e3

    def _bits(self, layer: LayerSpec, hidden: int, rows: int) -> float:
        mlp, mixed = layer.feed_forward, mixing_numbers(layer, hidden) * self.dense_bits
        each, matrices = hidden * mlp.width, 3 if mlp.gated else 2
        if not isinstance(mlp, ExpertsSpec):
            return mixed + matrices * each * self.dense_bits
        touched = mlp.experts * (1 - (1 - mlp.per_row / mlp.experts) ** rows)
        shared = matrices * hidden * mlp.shared_width
        shared_bits = self.expert_bits if mlp.shared_width == mlp.width else self.dense_bits
        experts = touched * matrices * each * self.expert_bits + shared * shared_bits
        return mixed + experts + hidden * mlp.experts * 16


def mixing_numbers(layer: LayerSpec, hidden: int) -> int:
    """The numbers of the matrices of a layer's attention, or of its state."""
    if layer.delta is not None:
        return layer.delta.weights(hidden)
    attention = layer.attention
    stored = 0 if attention.shared_from is not None else 1 if attention.keys_as_values else 2
    heads = (2 + attention.gated) * attention.num_heads + stored * attention.num_kv_heads
    return hidden * attention.head_dim * heads


def _gpt_oss(layers: int, experts: int) -> Shape:
    stated = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "rope_theta": 150000.0,
        "rope_scaling": None,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    }
    sizes = ModelShape(2880, 2880, layers, 64, 8, head_dim=64, vocab=201088)
    return Shape(sizes, stated, expert_bits=4.25)


def _air(fp8: bool) -> Shape:
    """In FP8 as it is published, a scale for each channel; in bf16 half of its layers: all are larger than a
    GPU.
    """
    stated: dict[str, Any] = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 0,
        "rope_theta": 1e6,
        "rope_scaling": None,
    }
    if fp8:
        each = {"num_bits": 8, "type": "float", "symmetric": True}
        scales = {
            "targets": ["Linear"],
            "weights": each | {"strategy": "channel", "dynamic": False},
            "input_activations": each | {"strategy": "token", "dynamic": True},
        }
        stated["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": scales},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        }
    sizes = ModelShape(4096, 10944, 46 if fp8 else 23, 96, 8, vocab=151552)
    bits = 8 if fp8 else 16
    return Shape(sizes, stated, expert_bits=bits, dense_bits=bits)


def _gemma4() -> Shape:
    """Every sixth layer has four heads of 512 for keys and values in one; the others 16 of 256."""
    stated = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 1024,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "rope_scaling": None,
    }
    return Shape(ModelShape(5376, 21504, 60, 32, 16, head_dim=256, vocab=262144), stated)


def _olmoe() -> Shape:
    """OLMoE-1B-7B: no table has its experts."""
    stated = {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "rope_scaling": None,
    }
    return Shape(ModelShape(2048, 1024, 16, 16, 16, vocab=50304), stated)


def _phi4_mini() -> Shape:
    stated = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
        "rope_scaling": None,
    }
    return Shape(ModelShape(3072, 8192, 32, 24, 8, vocab=200064), stated)


SHAPES = {
    "llama-3.1-8b": Shape(LLAMAS["llama-3.1-8b"], {}),
    "llama-3.1-8b-int4": Shape(LLAMAS["llama-3.1-8b"], KINDS["int4"], dense_bits=4.125),
    "llama-3.1-70b-int4": Shape(LLAMAS["llama-3.1-70b"], KINDS["int4"], dense_bits=4.125),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "glm-4.5-air-fp8": _air(fp8=True),
    "glm-4.5-air-bf16-23": _air(fp8=False),
    "gemma-4-31b": _gemma4(),
    "olmoe": _olmoe(),
    "phi-4-mini": _phi4_mini(),
}


SMALL = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts": 8,
    "vocab_size": 4096,
}


def written(
    shape: Shape, folder: Path, layers: int, *, small: bool, sizes: Mapping[str, int] = SMALL
) -> None:
    """`layers`: of it, if not 0. `small`: with few and small matrices of these `sizes`, to try the script."""
    whole = replace(shape.sizes, layers=layers or shape.sizes.layers)
    write_model(replace(whole, vocab=sizes["vocab_size"]) if small else whole, folder)
    stated = json.loads((folder / "config.json").read_text()) | shape.stated
    stated |= {key: size for key, size in sizes.items() if small and key in stated}
    (folder / "config.json").write_text(json.dumps(stated))


def config_of(folder: str, device: str, pages: int) -> EngineConfig:
    return resolve_engine(
        device,
        model=folder,
        draft=None,
        load_format="dummy",
        worker="unified",
        transfer="none",
        context_length=2048,
        max_running=32,
        num_pages=pages,
        uniform_experts=device != "cpu",
        **({} if device == "cpu" else {"prefill_attention_backend": "triton"}),
    )


def measure(name: str, args: argparse.Namespace, folder: str) -> None:
    """One shape, in this process."""
    began, shape = time.monotonic(), SHAPES[name]
    config = config_of(folder, args.device, args.pages)
    phases = StartPhases()
    search_first(replace(config, tune_seconds=args.tune_seconds), phases)
    if args.tune_seconds:
        say(args.out, {"shape": name, "tiles": phases.summary()})
    EngineStart.of(config).wait_for_kernels()
    engine = Timed(config)
    memory = round(torch.cuda.memory_allocated() / 1e9, 1) if args.device != "cpu" else 0
    say(args.out, {"shape": name, "ready s": round(time.monotonic() - began, 1), "GB": memory})
    decoder = read_model(folder, load_format="dummy")
    for load in (
        replace(load, prompt=64, answer=8, count=1, at_once=1) if args.small else load for load in LOADS
    ):
        if load.name in args.loads:
            first, figure = (round(engine.measured(load, seed), 4) for seed in (1, 2))
            ms = shape.floor_ms(decoder, load.at_once)
            floor = {"floor ms": round(ms, 3), "times": round(figure / ms, 2)}
            say(args.out, {"shape": name, "load": load.name, "ms": figure, "the first time": first, **floor})
    if args.device != "cpu" and not args.bare:
        for load in (each for each in LOADS[:3] if each.name in args.loads):
            for line in kernels(engine, load):
                say(args.out, {"shape": name, "load": load.name, **line})
    sys.stdout.flush()
    os._exit(0)


def kernels(engine: Timed, load: Load) -> list[dict[str, Any]]:
    """The kernels that take the most time of a load, microseconds of a step."""
    load = replace(load, answer=32)  # a profile's events are slow to read
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.measured(load, 3)
    return most_time(seen, load.answer)


def launched(seen: profile) -> list[Any]:
    """The events of a profile on the GPU, by their begin."""
    events = [event for event in seen.events() if str(event.device_type).endswith("CUDA")]
    return sorted(events, key=lambda event: event.time_range.start)


def most_time(seen: profile, steps: int) -> list[dict[str, Any]]:
    """The kernels of a profile of that many steps that take the most time.

    A kernel that is launched while the one before it runs counts from its launch on, and does its work when
    that one has ended: "alone" is the time behind that end.
    """
    spent: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    last = -math.inf
    for event in launched(seen):
        span = event.time_range
        spent[event.name[:60]].append((max(span.end - max(span.start, last), 0.0), span.elapsed_us()))
        last = max(last, span.end)
    lines = []
    for name, each in spent.items():
        alone, whole = (sum(times) for times in zip(*each, strict=True))
        line = {"kernel": name, "us of a step alone": round(alone / steps, 1)}
        line |= {"us of a step": round(whole / steps, 1), "launches": round(len(each) / steps, 1)}
        lines.append(line | {"us each alone": round(alone / len(each), 2)})
    return sorted(lines, key=lambda line: -line["us of a step alone"])[:22]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt-oss-20b", "gpt-oss-120b"])
    parser.add_argument("--loads", nargs="+", default=["bs1", "bs8", "bs32"])
    parser.add_argument("--seconds", type=float, default=150.0, help="for each shape (%(default)g)")
    parser.add_argument("--device", default="cuda", help="cpu: plain torch, to try the script")
    parser.add_argument("--layers", type=int, default=0, help="of a model (0: all)")
    parser.add_argument("--small", action="store_true", help="small matrices and loads, to try it")
    parser.add_argument("--pages", type=int, default=3000)
    parser.add_argument("--tune-seconds", type=float, default=0, help="of a search for tiles (none)")
    parser.add_argument("--bare", action="store_true", help="no profile")
    parser.add_argument("--folder", help="one shape alone, in this process")
    args = parser.parse_args()
    if args.folder:
        try:
            measure(args.shapes[0], args, args.folder)
        except BaseException:
            say(args.out, {"shape": args.shapes[0], "failed": traceback.format_exc()})
            os._exit(1)
    failed = False
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            written(SHAPES[name], Path(folder), args.layers, small=args.small)
            words = [
                sys.executable,
                "-m",
                "tests.gpu.time_shapes",
                "--out",
                str(args.out),
                "--folder",
                folder,
            ]
            words += ["--shapes", name, "--device", args.device, "--pages", str(args.pages)]
            words += ["--tune-seconds", str(args.tune_seconds), "--loads"]
            words += [*args.loads, *["--bare"] * args.bare, *["--small"] * args.small]
            try:
                subprocess.run(words, check=True, timeout=args.seconds)
            except subprocess.SubprocessError as error:
                failed = True
                say(args.out, {"shape": name, "failed": str(error)})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
