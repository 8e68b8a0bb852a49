"""Lowers the kernels that a start on a GPU compiles, of models' real shapes, without a GPU.

    python -m tests.lower_kernels [llama-3.1-8b rank8 ...] [--exact] [--kernels NAME ...]

Triton's interpreter runs a kernel as Python: it takes sums whose shape changes in a loop, branches of a
constant that never run and ranges of no length, which the compiler refuses. So the variants that the recipe
of a start launches (`eyas.engine.kernels.launch.compile_ahead`) go through the compiler's first stage here,
which checks shapes and types. The stages behind it take most of the time and find little. Prints a line per
shape, and an error whole; returns 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from eyas.bench.shapes import SHAPES as LLAMAS
from eyas.bench.shapes import write_block_head, write_head
from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.types import Role
from eyas.engine.kernels.launch.compile_ahead import NoDevice, Variant, record
from eyas.engine.loading.recipe import draft_launches, launches
from tests.gpu import time_hybrids, time_shapes
from tests.gpu.time_prompts import SHAPES as PROMPTED

HEADS = {"EAGLE-3": write_head, "DFlash": write_block_head}
LORA: dict[str, Any] = {"max_loras": 32, "max_lora_rank": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "8b": ("llama-3.1-8b", {}),
    "8b with EAGLE-3": ("llama-3.1-8b", {"draft": "EAGLE-3"}),
    "8b with DFlash": ("llama-3.1-8b", {"draft": "DFlash", "draft_capture_layers": (1, 2, 3, 4, 5)}),
    "draft worker of an 8b": ("llama-3.1-8b", {"draft": "EAGLE-3", "roles": (Role.DRAFT,)}),
    "8b with adapters": ("llama-3.1-8b", LORA),
    "8b with EAGLE-3 and adapters": ("llama-3.1-8b", {"draft": "EAGLE-3"} | LORA),
    "8b in four bits": ("llama-3.1-8b-int4", {}),
    "8b in FP8": ("8b-fp8", {}),
    "gpt-oss-20b": ("gpt-oss-20b", {}),
    "gemma-4-31b": ("gemma-4-31b", {}),
    "glm-4.5-air in FP8": ("glm-4.5-air-fp8", {}),
    "rank8": ("rank8", {}),
    "qwen3.5-35b-a3b": ("qwen3.5-35b-a3b", {}),
    "qwen3.5-35b-a3b with adapters of experts": (
        "qwen3.5-35b-a3b",
        {"max_loras": 2, "max_lora_rank": 16, "lora_experts": True},
    ),
    "qwen3.5-27b": ("qwen3.5-27b", {}),
}


def write(shape: str, folder: Path) -> None:
    """A folder of the shape without weights: a few layers, of each kind."""
    if shape in time_hybrids.SHAPES:
        time_shapes.written(time_hybrids.SHAPES[shape], folder, 4, small=False)
    elif shape in time_shapes.SHAPES:
        time_shapes.written(time_shapes.SHAPES[shape], folder, 6, small=False)
    else:
        PROMPTED[shape].write(folder, 4, False)


def config_of(case: str, exact: bool, folder: Path) -> EngineConfig:
    """Of a start of `case`, whose model is written into `folder`."""
    shape, options = CASES[case]
    write(shape, folder / "model")
    options = {"draft": None} | options
    if options["draft"]:
        HEADS[options["draft"]](LLAMAS["llama-3.1-8b"], folder / "head")
        options["draft"] = str(folder / "head")
    return resolve_engine(
        "cuda", model=str(folder / "model"), load_format="dummy", deterministic=exact, num_pages=1,
        prefill_attention_backend="triton", transfer="none", context_length=16384, **options,
    )  # fmt: skip


def lower(src: Any, target: Any, options: dict[str, Any]) -> None:
    """In place of `triton.compile`: the first stage alone."""
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    src.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)


def errors(variants: list[Variant]) -> Iterator[str]:
    """What the compiler says of those that it refuses."""
    for variant in variants:
        function = variant.args[0]  # type: ignore[attr-defined]
        with (
            patch.object(function, "compile", lower),
            patch.object(JITFunction, "_call_hook", lambda *_, **__: None),
        ):
            try:
                variant()
            except Exception:
                yield f"{function.__name__}:\n{traceback.format_exc(limit=-3)}"


def check(case: str, exact: bool, names: set[str] | None = None) -> tuple[int, list[str]]:
    """How many kernels a start of `case` launches, and what the compiler says of those that it refuses."""
    driver.set_active(NoDevice(90))
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(case, exact, Path(folder))
        variants = record(partial(draft_launches if config.only_drafts else launches, config))
    chosen = [one for one in variants if names is None or one.args[0].__name__ in names]  # type: ignore[attr-defined]
    return len(chosen), list(errors(chosen))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; none: all")
    parser.add_argument("--exact", action="store_true", help="as with --deterministic")
    parser.add_argument("--kernels", nargs="+", help="these functions alone")
    args = parser.parse_args()
    refused = 0
    for case in args.cases or CASES:
        began = time.monotonic()
        count, said = check(case, args.exact, set(args.kernels) if args.kernels else None)
        refused += len(said)
        print(f"{case}: {count} kernels in {time.monotonic() - began:.0f} s, {len(said)} refused", flush=True)
        print("\n".join(said), end="")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
