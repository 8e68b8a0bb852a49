"""`eyas bench kernels`: families of kernels at the model's own sizes, each time beside its floor."""

from __future__ import annotations

import argparse
import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.bench.output import TablePrinter
from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError, EyasError
from eyas.common.model_folder import model_name
from eyas.configuration import engine_config
from eyas.flags import add_engine

if TYPE_CHECKING:
    from eyas.bench.kernels.case import KernelCase, KernelSetting
    from eyas.bench.kernels.timing import MachineLimits
    from eyas.bench.parts import Line, Tell

FAMILIES = {
    "attention": "decode rows, rounds that verify drafts, chunks of prompts",
    "products": "a layer's matrix products and the output head, by rows",
    "sampling": "a token for each row of logits",
    "transfer": "KV pages by shared memory, and to and from a GPU's staging",
}
"""Each has a module of its name here, with `cases(setting)`."""

COLUMNS = {
    "kernel": "kernel",
    "": "cached",
    "us": "us",
    "floor us": "floor_us",
    "of floor": "share",
    "bound by": "bound",
    "GB/s": "gb_per_s",
    "TFLOP/s": "tflop_per_s",
}


KERNEL_WIDTH = 36


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas bench kernels`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "families:\n" + "\n".join(f"  {name:10} {text}" for name, text in FAMILIES.items())
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"(all: {' '.join(FAMILIES)})")
    parser.add_argument(
        "--output-file", type=Path, metavar="FILE", help="appends a JSON line per kernel and size"
    )
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints a table; 1 if anything failed."""
    families = args.families or list(FAMILIES)
    if unknown := [name for name in families if name not in FAMILIES]:
        message = f"{unknown[0]!r} is no family of kernels; there are {', '.join(FAMILIES)}"
        raise ConfigError(message, param="families")
    args.load_format = "dummy"  # no weights are read
    config = engine_config(args)
    from eyas.bench.fits import check
    from eyas.bench.parts import ChildPart, run_parts

    check(config)
    lines = TablePrinter(COLUMNS, args.output_file, _shown, first=KERNEL_WIDTH)
    parts = [ChildPart(name, functools.partial(measure, config, name)) for name in families]
    failed = run_parts(parts, lines.tell)
    return int(bool(failed or lines.failed))


def measure(config: EngineConfig, family: str, tell: Tell) -> None:
    """Measures the floors, then every case of one family, and tells a line for each. In a part's process."""
    import torch

    from eyas.bench.kernels.case import KernelSetting
    from eyas.bench.kernels.timing import MachineLimits

    torch.set_num_threads(config.threads)
    setting = KernelSetting.of(config)
    with torch.inference_mode():
        floors = MachineLimits.measure(setting)
        print(f"{family}: {about(setting)}; {floors}", flush=True)
        for case in importlib.import_module(f"eyas.bench.kernels.{family}").cases(setting):
            tell({"family": family, "kernel": case.name} | figures(case, setting, floors))


def figures(case: KernelCase, setting: KernelSetting, floors: MachineLimits) -> Line:
    """The case's time beside its floor; or its `error`, and the next one may still work."""
    from eyas.bench.kernels.timing import CLOCKS
    from eyas.bench.parts import brief

    try:
        work = case.make()
        try:
            us = CLOCKS[work.clock](work.calls)
        finally:
            work.close()
    except EyasError as error:
        return {"error": error.message}
    except Exception as error:  # too large for the memory, or no kernel for this shape: it is named
        return {"error": brief(error)}
    floor = floors.us(work)
    return {
        "us": us,
        "floor_us": floor,
        "share": floor / us,
        "bound": floors.bound(work),
        "gb_per_s": work.nbytes / us / 1e3,
        "tflop_per_s": work.flops / us / 1e6,
        "nbytes": work.nbytes,
        "flops": work.flops,
        "buffers": len(work.calls),
        "cached": setting.cached(work),
        "clock": work.clock,
        "model": model_name(setting.config.model),
        "device": device_name(setting.device),
        "dtype": setting.config.dtype,
    }


def about(setting: KernelSetting) -> str:
    """Says what is measured, and how memory is kept out of caches."""
    model, dtype, cache = model_name(setting.config.model), setting.config.dtype, setting.cache >> 20
    way = "the engine's kernels" if setting.fast else "plain torch"
    return (
        f"{model} in {dtype} on {device_name(setting.device)}, {way}; every call has memory of its own, "
        f"more in all than the last cache holds ({cache} MiB) but where * says otherwise"
    )


def device_name(device: str) -> str:
    """The GPU's, or "cpu"."""
    if device == "cpu":
        return device
    import torch

    return torch.cuda.get_device_name(device)


def _shown(name: str, value: Any) -> str:
    if name == "cached":
        return "*" if value else ""
    if name == "share":
        return f"{100 * value:.0f} %"
    if isinstance(value, float):
        return f"{value:,.1f}" if name.endswith("us") else f"{value:,.3g}"
    return str(value)
