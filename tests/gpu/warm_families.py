"""Compiles the kernels of every family of `test_models_on_gpu`, each once, by all cores.

    python -m tests.gpu.warm_families [FAMILY ...]
    OMP_NUM_THREADS=2 pytest -n 8 tests/gpu/test_models_on_gpu.py -k bfloat16

Without it each family's test compiles its own, one after the other, and most are another one's too. A test in
bfloat16 has the one in float32 before it, so that half of them are all.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.machine import gpus
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.loading import recipe
from tests.gpu.family_models import EXPERTS, FAMILIES, PROMPTS, SLACK, sizes_of
from tests.unit.families import SAMPLES, family_config


def launches(folder: str, families: list[str]) -> None:
    """Every launch of these families' tests: a recipe of `eyas.engine.kernels.launch.warm`."""
    for family in families:
        model = Path(folder) / family
        config = family_config(family, **sizes_of(family))
        config.architectures = [SAMPLES[family].model]
        config.save_pretrained(model)
        for dtype in SLACK:
            recipe.launches(engine_of(model, dtype))


def engine_of(folder: Path, dtype: str) -> EngineConfig:
    """An engine without graphs, whose steps have the shapes of those of the tests."""
    asked: dict[str, Any] = {"model": str(folder), "draft": None, "load_format": "dummy", "dtype": dtype}
    asked |= {"context_length": 1024, "max_running": 4, "chunk_tokens": sum(PROMPTS), "mixed_tokens": 0}
    return resolve_engine("cuda", prefill_attention_backend="triton", cuda_graph_max_bs=0, **asked)


def shares(families: list[str]) -> list[list[str]]:
    """Those with experts, and the others: they have few kernels in common."""
    named = {*EXPERTS, "top_k_experts", "moe_topk", "attention_chunk_size"}
    routed = [family for family in families if sizes_of(family).keys() & named]
    return [share for share in (routed, [each for each in families if each not in routed]) if share]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="(all)")
    families = parser.parse_args().families or list(FAMILIES)
    began, parts = time.monotonic(), shares(families)
    with tempfile.TemporaryDirectory() as folder:
        cores, capability = max((os.cpu_count() or 1) // len(parts), 1), gpus.capability("cuda")
        made = f"{__spec__.name}:launches"
        warmups = [KernelWarmup(made, (folder, part), capability, cores) for part in parts]
        with ThreadPoolExecutor(len(warmups)) as pool:
            kernels = sum(report.kernels for report in pool.map(KernelWarmup.wait, warmups))
    print(f"{kernels} kernels of {len(families)} families in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
