"""The flags by which requests are shared out: a local cluster's layout, a gateway's, and its targets.

Every default is read from `eyas.common.config`. What flags mean together is decided in `eyas.configuration`.
"""

from __future__ import annotations

import argparse
import math

from eyas.common.config import GatewayConfig, ServeConfig
from eyas.flags import numbers, processes


def add_layout(parser: argparse.ArgumentParser) -> None:
    """The flags of a local cluster: which workers it has."""
    add = parser.add_argument_group("layout").add_argument
    text = "which workers there are (split on a CPU, unified on a GPU, auto on several)"
    add("--layout", choices=["unified", "split", "auto"], help=text)
    for name, what in (
        ("prefill", "prefill workers"),
        ("decode", "decode workers"),
        ("draft-workers", "draft workers, on GPUs only if asked for"),
    ):
        add(f"--{name}", type=processes, metavar="N", help=f"{what} (1)")
    text = "workers of the unified layout (1) and of the auto layout (one per GPU; on a CPU 2)"
    add("--workers", type=processes, metavar="N", help=text)
    add("--prefill-tp", type=processes, metavar="N", help="GPUs per prefill worker (--tp)")
    add("--decode-tp", type=processes, metavar="N", help="GPUs per decode worker (--tp)")
    add(
        "--gpus",
        type=numbers,
        default=ServeConfig.gpus,
        metavar="N,...",
        help="the workers' GPUs in order, prefill first (0,1,...); one named twice is shared",
    )


def add_gateway_layout(parser: argparse.ArgumentParser) -> None:
    """The layout of `eyas gateway`, whose workers run already."""
    text = "auto: workers with all roles share requests as is predicted to be best (static: by their roles)"
    parser.add_argument("--layout", choices=["static", "auto"], default=GatewayConfig.layout, help=text)


def add_targets(parser: argparse.ArgumentParser) -> None:
    """Adds the targets of the auto layout."""
    add = parser.add_argument_group("targets of the auto layout").add_argument
    for name, what in (("ttft", "to the first token"), ("tpot", "per later token, in the mean")):
        default = getattr(GatewayConfig, f"{name}_target")
        add(f"--{name}-target", type=seconds, metavar="S", help=f"seconds {what} ({default:g})")


def seconds(text: str) -> float:
    """A time above 0 and finite."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
