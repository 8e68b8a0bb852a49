"""The commands beside the servers: tables of names, and flags of those that have no commands of their own.

A command's module has its flags and its work, and is loaded when it is called; nothing else is loaded here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eyas.commands import CommandEntry, CommandParser
from eyas.common.cluster.names import is_host
from eyas.flags import fraction, host, names, positive

BENCH_COMMANDS = {
    "serve": CommandEntry("load a server and measure it", "eyas.bench.serve"),
    "sweep": CommandEntry("load servers more and more, to the knee of their goodput", "eyas.bench.sweep"),
    "compare": CommandEntry("which of two runs is faster, with confidence intervals", "eyas.bench.compare"),
    "suite": CommandEntry(
        "the named cases, and a report of them (without --url: on clusters of its own)", "eyas.bench.suite"
    ),
    "one-batch": CommandEntry(
        "run static batches through an engine, without a server", "eyas.bench.one_batch"
    ),
    "speculative": CommandEntry("which drafts pay at which batch size", "eyas.bench.speculative"),
    "kernels": CommandEntry(
        "time kernels beside what memory and arithmetic allow", "eyas.bench.kernels.command"
    ),
}
TUNE_COMMANDS = {
    "moe": CommandEntry("the products of a model's experts", "eyas.bench.tune", given={"products": "moe"}),
    "gemm": CommandEntry("a model's products in FP8 blocks", "eyas.bench.tune", given={"products": "gemm"}),
    "int4": CommandEntry("a model's products in four bits", "eyas.bench.tune", given={"products": "int4"}),
}
HEADS = "eyas.train.head_command"
TRAIN_COMMANDS = {
    "eagle3": CommandEntry("an EAGLE-3 head for any target", HEADS, {"kind": "eagle3"}),
    "eagle": CommandEntry("an EAGLE-1/2 head for any target", HEADS, {"kind": "eagle"}),
    "mtp": CommandEntry("an MTP head for any target, with MiMo's names", HEADS, {"kind": "mtp"}),
    "peagle": CommandEntry("a P-EAGLE head for any target", HEADS, {"kind": "peagle"}),
    "dflash": CommandEntry("a DFlash head for any target", HEADS, {"kind": "dflash"}),
}
KEYS = "eyas.admin.keys"
DAYS = 365
HERE = ("localhost", "127.0.0.1", "::1")
SLO = "ttft=1s,tpot=15ms"


def add_bench(parser: CommandParser) -> None:
    """The commands of `eyas bench`."""
    parser.add_commands(BENCH_COMMANDS)


def add_tune(parser: CommandParser) -> None:
    """The commands of `eyas tune`."""
    parser.add_commands(TUNE_COMMANDS)


def add_train(parser: CommandParser) -> None:
    """The commands of `eyas train`."""
    parser.add_commands(TRAIN_COMMANDS)


def add_keys(parser: CommandParser) -> None:
    """The commands of `eyas keys`."""
    parser.add_commands(
        {
            "add": CommandEntry(
                "make a key, print it once, and write its hash to a file", KEYS, {"does": "add"}
            ),
            "list": CommandEntry("the names in a file", KEYS, {"does": "list"}),
            "remove": CommandEntry("take a key out of a file", KEYS, {"does": "remove"}),
        }
    )


def add_certs(parser: CommandParser) -> None:
    """Adds the flags of `eyas certs`: where its files go, and what they say."""
    add = parser.add_argument
    add("folder", metavar="DIR", help="made if it is not there; an authority in it signs again")
    add("--days", type=positive, default=DAYS, metavar="N", help=f"how long certificates are valid ({DAYS})")
    text = f"what callers call the gateway: host names or IP addresses ({','.join(HERE)})"
    add("--names", type=hosts, default=HERE, metavar="NAME,...", help=text)


def _fits(name: str) -> bool:
    """Is it as short as names of hosts are? RFC 1035, section 2.3.4."""
    return len(name) <= 253 and all(len(label) <= 63 for label in name.split("."))


def hosts(text: str) -> tuple[str, ...]:
    """Host names, also *.NAME, and IP addresses, separated by commas."""
    listed = tuple(map(host, names(text)))
    wrong = [name for name in listed if not is_host(name.removeprefix("*.")) or not _fits(name)]
    if wrong or not listed:
        raise argparse.ArgumentTypeError(f"{(wrong or [text])[0]!r} is not a host name or an IP address")
    return listed


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The flags: a cluster, a load, targets, and what to show."""
    add = parser.add_argument_group("cluster").add_argument
    add("--gpus", type=positive, nargs="+", default=[8], metavar="N", help="workers, one per GPU (8)")
    add("--rates", type=Path, metavar="FILE", help="measured rates (Llama-3.1-8B on an H200)")
    add("--model", type=Path, metavar="DIR", help="whose weights and KV take the memory (that of --rates)")
    add("--kv-cache-dtype", choices=["auto", "fp8_e4m3"], default="auto", help="of its KV (auto: its own)")
    add("--state-slots", type=positive, metavar="N", help="of a hybrid (as a worker takes by itself)")
    add("--gpu-gib", type=_rate, default=140.0, metavar="GIB", help="memory of a GPU, for --model (140)")
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
