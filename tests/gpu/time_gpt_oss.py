"""gpt-oss and GLM-4.5-Air on one GPU: whole engines of their shapes, dummy weights, uniform routing.

    python -m tests.gpu.time_gpt_oss --out FILE [--shapes gpt-oss-20b gpt-oss-120b] [--loads bs1 bs8 bs32 s1k]

Milliseconds per token of one request, eight and 32 at once (and with prompts of 1,024 tokens that keep
coming: s1k), each beside its floor: the bytes of a step, with those of the experts that so many rows touch,
over 4.3 TB/s. Then the kernels of a step, by the time that they take. Each shape is a process of its own. A
line of JSON is in FILE as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eyas.bench.shapes import ModelShape, write_model
from eyas.common.config import EngineConfig, resolve_engine
from eyas.engine.loading.startup import EngineStart
from tests.gpu.exact_cost import Load, Timed, say

BYTES_PER_S = 4.3e12
LOADS = (
    Load("bs1", 128, 256, 1, 1),
    Load("bs8", 128, 256, 8, 8),
    Load("bs32", 128, 256, 32, 32),
    Load("s1k", 1024, 128, 64, 32, gap_s=0.03),
)


@dataclass(frozen=True)
class Shape:
    """A model. `bits`: of a number of an expert; `told`: what config.json says beside a Llama's sizes."""

    sizes: ModelShape
    experts: int
    per_row: int
    width: int
    bits: float
    shared: int
    told: dict[str, Any]

    def floor_ms(self, rows: int) -> float:
        """A step of that many rows. Dense weights are bf16, or in FP8 where experts are."""
        s, size = self.sizes, 1 if self.bits == 8 else 2
        attention = s.hidden * s.head_dim * 2 * (s.heads + s.kv_heads) * size
        touched = self.experts * (1 - (1 - self.per_row / self.experts) ** rows)
        each = 3 * s.hidden * self.width * self.bits / 8
        layer = attention + (touched + self.shared) * each + s.hidden * self.experts * 2
        return (s.layers * layer + s.vocab * s.hidden * 2) / BYTES_PER_S * 1e3


def _gpt_oss(layers: int, experts: int) -> Shape:
    told = {
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
    return Shape(sizes, experts, 4, 2880, 4.25, 0, told)


def _air(fp8: bool) -> Shape:
    """In bf16 half of its layers: all are larger than a GPU."""
    told: dict[str, Any] = {
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
        told["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    sizes = ModelShape(4096, 10944, 46 if fp8 else 23, 96, 8, vocab=151552)
    return Shape(sizes, 128, 8, 1408, 8 if fp8 else 16, 1, told)


SHAPES = {
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "glm-4.5-air-fp8": _air(fp8=True),
    "glm-4.5-air-bf16-23": _air(fp8=False),
}


def written(shape: Shape, folder: Path, layers: int) -> None:
    """`layers`: of it, if not 0."""
    sizes = replace(shape.sizes, layers=layers or shape.sizes.layers)
    write_model(sizes, folder)
    told = json.loads((folder / "config.json").read_text()) | shape.told
    (folder / "config.json").write_text(json.dumps(told))


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
    EngineStart.of(config).wait_for_kernels()
    engine = Timed(config)
    memory = round(torch.cuda.memory_allocated() / 1e9, 1) if args.device != "cpu" else 0
    say(args.out, {"shape": name, "ready s": round(time.monotonic() - began, 1), "GB": memory})
    for load in LOADS:
        if load.name in args.loads:
            first, figure = (round(engine.measured(load, seed), 4) for seed in (1, 2))
            floor = {}
            if load.name != "s1k":
                ms = shape.floor_ms(load.at_once)
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
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.measured(load, 3)
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        if str(event.device_type).endswith("CUDA"):
            spent[event.name[:60]].append(event.time_range.elapsed_us())
    lines = sorted(spent.items(), key=lambda item: -sum(item[1]))[:18]
    return [
        {
            "kernel": name,
            "us of a step": round(sum(each) / load.answer, 1),
            "launches": round(len(each) / load.answer, 1),
            "us each": round(sum(each) / len(each), 2),
        }
        for name, each in lines
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt-oss-20b", "gpt-oss-120b"])
    parser.add_argument("--loads", nargs="+", default=["bs1", "bs8", "bs32"])
    parser.add_argument("--seconds", type=float, default=150.0, help="for each shape (%(default)g)")
    parser.add_argument("--device", default="cuda", help="cpu: plain torch, to try the script")
    parser.add_argument("--layers", type=int, default=0, help="of a model (0: all)")
    parser.add_argument("--pages", type=int, default=3000)
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
            written(SHAPES[name], Path(folder), args.layers)
            words = [
                sys.executable,
                "-m",
                "tests.gpu.time_gpt_oss",
                "--out",
                str(args.out),
                "--folder",
                folder,
            ]
            words += ["--shapes", name, "--device", args.device, "--pages", str(args.pages), "--loads"]
            words += [*args.loads, *["--bare"] * args.bare]
            try:
                subprocess.run(words, check=True, timeout=args.seconds)
            except subprocess.SubprocessError as error:
                failed = True
                say(args.out, {"shape": name, "failed": str(error)})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
