"""What four and eight GPUs are to show: DeepSeek-V3 whole, a 70B model, split layouts, chaos.

    python -m tests.gpu.many_gpus --out DIR [--gpus 8] [--parts deepseek dense split chaos]

It knows a list of commands, each a measurement of its own with an end, and runs one after the other: what a
command says goes to DIR/NAME.log, what became of it to DIR/many.jsonl, at once. So whatever ran has left its
figures. `--list` prints the commands, and how long each may take.

* `deepseek`: all 61 layers in FP8 with dummy weights and uniform routing. Tensor parallelism over all GPUs;
  NextN at a synthetic 2.3 tokens per round; attention ranks beside it.
* `dense`: Llama-3.1-70B's shape, bf16, on four GPUs and on eight; EAGLE-3 chains of 3, 3.0 tokens per round.
* `split`: half of the workers prefill, half decode; `auto` and all unified, at rates near the simulated knee,
  for an 8B model on one GPU each and a 70B model on two each. `tests.gpu.pair_report` compares the runs of
  each model with the simulator (70B: `--rates tests/gpu/llama-3.1-70b-tp2-h200.json`).
* `chaos`: five minutes on a worker per GPU.

`--small` tries them on two GPUs: 3 + 2 layers of DeepSeek-V3, an 8B model in place of 70B, little load.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from eyas.bench.output import append_line
from eyas.bench.shapes import SHAPES, write_head, write_model
from tests.gpu.answer_latent import write_whole

LAYERS = 61
SERVED = "tests.gpu.serve_bench"
GRACE_S = 20.0  # for a command that is asked to end
TOKENS_PER_ROUND = {"nextn": 2.3, "eagle": 3.0}
SYNTHETIC = ("--rejection-sample-method", "synthetic", "--synthetic-acceptance-length")
TOGETHER = ("128x256x512x128", "256x256x512x256")  # where attention ranks are compared
RATES_8B = {"256/512": (160.0, 190.0), "8192/256": (15.5, 18.0)}  # eight workers, see pair_workloads
RATES_70B = {"256/512": (26.0, 30.0), "8192/256": (1.1, 1.4)}  # four of two GPUs each
SLO_70B = "ttft=2s,tpot=28ms"


@dataclass(frozen=True)
class Command:
    """A Python module with its arguments, and the seconds that it may take."""

    part: str
    name: str
    seconds: float
    module: str
    arguments: tuple[str, ...]

    def run(self, out: Path) -> dict[str, object]:
        """Its exit code, None if it was ended for its time; what it says is in a log of its name."""
        began = time.monotonic()
        with (out / f"{self.name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.arguments], stdout=log, stderr=log
            )
            code = _ended(process, self.seconds)
        took = round(time.monotonic() - began, 1)
        return {"part": self.part, "name": self.name, "exit": code, "seconds": took}


def _ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit code; None if it took too long: then it is asked to end, and what is left of it and of all
    that it began is killed, or the next command would find GPUs in use.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    process.kill()
    for left in family:
        with contextlib.suppress(psutil.Error):
            left.kill()
    process.wait()
    return None


@dataclass(frozen=True)
class Machine:
    """Where it runs. `small`: to try the commands."""

    out: Path
    gpus: int
    small: bool

    def cases(self, *names: str) -> tuple[str, ...]:
        """Of what is sent."""
        return ("--cases", *(("bs1", "32x256x64x32") if self.small else names))

    def served(self, name: str, seconds: float, *rest: str) -> tuple[str, ...]:
        """Arguments of `tests.gpu.serve_bench`."""
        own = ("--out", str(self.out / name), "--label", name)
        return (*own, "--seconds", f"{seconds - 30:g}", *rest)

    def folder(self, name: str) -> Path:
        """Of a model without weights."""
        return self.out / "models" / name


def write_models(machine: Machine) -> None:
    """Folders of the models; their weights are dummies."""
    layers = 5 if machine.small else LAYERS
    write_whole(machine.folder("deepseek-v3"), layers, num_nextn_predict_layers=1)
    shape = SHAPES["llama-3.1-8b" if machine.small else "llama-3.1-70b"]
    write_model(shape, machine.folder("llama"))
    write_head(shape, machine.folder("llama-head"))


def deepseek(machine: Machine) -> Iterator[Command]:
    """One server after another: tensor parallelism plain, then with NextN; attention ranks."""
    model = ("--model", str(machine.folder("deepseek-v3")), "--uniform-experts")
    nextn = ("--draft", "mtp", "--spec-steps", "2", *SYNTHETIC, str(TOKENS_PER_ROUND["nextn"]))
    few, most = ("bs1", "bs8", "bs32", "64x256x512x64"), ("--draft", "none", "--max-running", "256")
    together = ("--tensor-parallel-size", str(machine.gpus))
    ways = {
        "tp": (machine.cases("s1k", *few, *TOGETHER), (*together, *most)),
        "nextn": (machine.cases(*few), (*together, *nextn)),
        "adaptive": (machine.cases(*few), (*together, *nextn, "--spec-adaptive")),
        "dp": (machine.cases(*TOGETHER), ("--dp-attention", str(machine.gpus), *most)),
    }
    for name, (cases, flags) in ways.items():
        label = f"deepseek-{name}"
        arguments = machine.served(label, 480.0, *cases, *model, *flags)
        yield Command("deepseek", label, 480.0, SERVED, arguments)


def dense(machine: Machine) -> Iterator[Command]:
    """A 70B model on half of the GPUs and on all."""
    model = ("--model", str(machine.folder("llama")))
    eagle = ("--draft", str(machine.folder("llama-head")), "--spec-steps", "3")
    ways = {"plain": ("--draft", "none"), "eagle": (*eagle, *SYNTHETIC, str(TOKENS_PER_ROUND["eagle"]))}
    for ranks in (machine.gpus // 2, machine.gpus):
        for way, flags in ways.items():
            label = f"dense-tp{ranks}-{way}"
            own = (*machine.cases("bs1", "bs32"), *model, *flags, "--tensor-parallel-size", str(ranks))
            yield Command("dense", label, 240.0, SERVED, machine.served(label, 240.0, *own))


def split(machine: Machine) -> Iterator[Command]:
    """Layouts at rates near their knees, the same requests for each."""
    two = ("--slo", SLO_70B, "--model", str(machine.folder("llama")), "--tensor-parallel-size", "2")
    sizes = [("8b", machine.gpus, RATES_8B, ()), ("70b", machine.gpus // 2, RATES_70B, two)]
    for name, workers, rates, more in sizes[: 1 if machine.small else 2]:
        for workload, at in rates.items():
            label = f"split-{name}-{workload.replace('/', '-')}"
            near = [f"{rate * machine.gpus / 8:g}" for rate in at][: 1 if machine.small else 2]
            asked = ("--workers", str(workers), "--workloads", workload, "--at", *near, *more)
            where = ("--out", str(machine.out / label), "--seconds", "590")
            yield Command("split", label, 600.0, "tests.gpu.pair_goodput", (*where, *asked))


def chaos(machine: Machine) -> Iterator[Command]:
    """Faults on a worker per GPU, half of them of each kind; where that is one of each, two share a GPU."""
    each, seconds = max(machine.gpus // 2, 2), 30.0 if machine.small else 300.0
    gpus = ",".join(str(number % machine.gpus) for number in range(2 * each))
    cluster = ("--each", str(each), "--device", "cuda", "--layout", "split", "--gpus", gpus)
    own = ("--out", str(machine.out / "chaos.jsonl"), "--seconds", f"{seconds:g}", "--streams", "64")
    yield Command("chaos", "chaos", seconds + 280.0, "tests.chaos", (*own, *cluster))


PARTS = {"deepseek": deepseek, "dense": dense, "split": split, "chaos": chaos}


def commands(machine: Machine, parts: Sequence[str]) -> list[Command]:
    """Of the parts, in order."""
    return [command for part in parts for command in PARTS[part](machine)]


def main() -> int:
    """The command line; 1 if a command failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gpus", type=int, default=8, help="(%(default)d)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these commands alone")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    parser.add_argument("--small", action="store_true", help="to try them on two GPUs")
    args = parser.parse_args()
    machine = Machine(args.out, args.gpus, args.small)
    wanted = [one for one in commands(machine, args.parts) if not args.only or one.name in args.only]
    if args.list:
        for one in wanted:
            print(f"{one.seconds:4.0f} s  python -m {one.module} {' '.join(one.arguments)}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    write_models(machine)
    failed = 0
    for one in wanted:
        found = one.run(args.out)
        append_line(args.out / "many.jsonl", found)
        print(found, flush=True)
        failed += found["exit"] != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
