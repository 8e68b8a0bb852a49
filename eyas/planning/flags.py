"""The flags of `eyas plan`. It imports no more than the command line needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyas.flags import fraction, positive

SLO = "ttft=1s,tpot=15ms"


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The flags: a cluster, a load, targets, and what to show."""
    add = parser.add_argument_group("cluster").add_argument
    add("--gpus", type=positive, nargs="+", default=[8], metavar="N", help="workers, one per GPU (8)")
    add("--rates", type=Path, metavar="FILE", help="measured rates (Llama-3.1-8B on an H200)")
    add = parser.add_argument_group("load").add_argument
    add("--input-len", type=positive, default=1024, metavar="N", help="tokens of the longest prompt (1024)")
    add("--output-len", type=positive, default=512, metavar="N", help="tokens of the longest answer (512)")
    ratio = "shortest length as a share of the longest (1: all the same)"
    add("--range-ratio", type=fraction, default=1.0, metavar="F", help=ratio)
    add("--prefix-share", type=_share, default=0.0, metavar="F", help="of a prompt that others share (0)")
    add("--request-rate", type=_rate, metavar="R", help="per second: also tell how many workers it needs")
    add("--slo", default=SLO, metavar="ttft=T,tpot=T", help=f"bounds of a good request ({SLO})")
    add = parser.add_argument_group("simulation").add_argument
    add("--seconds", type=_rate, default=40.0, metavar="S", help="of load that are simulated (40)")
    add("--seed", type=int, default=1, metavar="N", help="of everything that is drawn (1)")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="goodput over the TPOT bound, for every --gpus: .svg or .png",
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _share(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to less than 1")
    return value


def _rate(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
