"""The flags of `eyas quantize`. It imports no more than the command line needs."""

from __future__ import annotations

import argparse
from pathlib import Path

FORMATS = ("gptq", "awq", "int4", "int8", "fp8", "mxfp4")
GROUPED = ("gptq", "awq", "int4")
"""Those whose numbers have one scale for as many of a row as the caller says."""

SEARCHED = ("gptq", "awq")
"""Those whose numbers may be searched by a text."""

GROUPS = (16, 32, 64, 128, 256)
GROUP = 128


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """The flags: which folder, where to, and in which format."""
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the model: config.json and weights in 16 or 32 bits")
    add("--out", type=Path, required=True, metavar="DIR", help="where it is written: empty, or not there yet")
    text = "gptq, awq: 4 bits; int4, int8, fp8, mxfp4: as compressed-tensors"
    add("--format", choices=FORMATS, required=True, help=text)
    text = f"numbers of a row with one scale, of gptq, awq and int4 ({GROUP})"
    add("--group-size", type=int, choices=GROUPS, metavar="N", help=text)
    text = "text like that which the model will read: GPTQ and AWQ search numbers by it (needs llmcompressor)"
    add("--calibration", type=Path, metavar="FILE", help=text)
