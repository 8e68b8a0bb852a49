"""Which step of a layer changes a row's bits with its company: exact arithmetic, operation by operation.

    python -m tests.gpu.exact_ops --out FILE [--models next ...] [--device cpu --small]

Small models (`MODELS`), each in a process of its own, compute a sequence's positions in other ways: a prompt
at once, in chunks and by rows, and beside others; by our own products, and with cuBLAS' of many rows. An
operation is at fault where what it reads has the same bits in both, and what it gives has not: FILE gets a
line for each, and how many positions, and how far. What reads rows of earlier positions counts as reading all
of them. The last line of a way says whether its logits are the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.kernels.experts.route import ChosenExperts
from eyas.engine.loading.arithmetic import UNSPLIT
from eyas.engine.models.ops import expert_products
from eyas.engine.models.ops.device_machine import DeviceMachine
from tests.bits.compare import difference
from tests.bits.models import CHUNK, ROWS, Model, Step
from tests.gpu.lines import say
from tests.gpu.ways import side_by_side
from tests.unit import tensor_core
from tests.unit.hybrid_rig import write_hybrid

TYPES = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "vocab_size": 512}
STATES = {"linear_num_key_heads": 2, "linear_num_value_heads": 8}
SMALL: dict[str, Any] = (
    TYPES
    | STATES
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
)
REAL: dict[str, Any] = TYPES | {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "mlp_only_layers": [],
}
TINY = SMALL | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
TINY |= {"linear_num_key_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("qwen3_5", SMALL),
    "small experts": ("qwen3_5_moe", SMALL | {"moe_intermediate_size": 128}),
    "next": ("qwen3_next", REAL),
}
WAYS: dict[str, tuple[int, list[Step]]] = {
    "a prompt at once": (0, [(CHUNK, 330)]),
    "chunks, rows and chains": (
        0,
        [(CHUNK, 150), (CHUNK, 100), (CHUNK, 7), *[(ROWS, 1)] * 5, *[(ROWS, 4)] * 17],
    ),
    "beside eight": (8, [(CHUNK, 200), (CHUNK, 58), *[(ROWS, 1)] * 40, *[(ROWS, 4)] * 8]),
}
FEW: dict[str, tuple[int, list[Step]]] = {
    "a prompt at once": (0, [(CHUNK, 135)]),
    "chunks and a chain": (0, [(CHUNK, 70), (CHUNK, 56), (ROWS, 1), (ROWS, 4)]),
    "beside two": (2, [(CHUNK, 62), (ROWS, 1), (ROWS, 4)]),
}
"""The company, and the steps."""

VERBS = (
    *("qkv", "gated_qkv", "kept", "delta", "product", "recur", "attend", "gated", "add", "mix", "chosen"),
    *("normed", "route", "_beside"),
)
EARLIER = ("delta", "recur", "attend")
"""Operations that read rows of earlier positions: `attend` those that `kept` has written."""


@dataclass
class Operation:
    """What an operation read and gave, by name: rows [positions, ..]."""

    reads: dict[str, torch.Tensor]
    gave: dict[str, torch.Tensor]


@dataclass
class Trace:
    """The operations of all steps of a way, by layer, name and turn, in the order in which they ended; each
    step's rows stand below those before.
    """

    count: int = 0
    turns: Counter[str] = field(default_factory=Counter)
    steps: dict[str, list[Operation]] = field(default_factory=dict)

    def begin(self, count: int) -> None:
        """Begins a step of `count` rows of the sequence, the last ones of a forward."""
        self.count = count
        self.turns.clear()

    def add(self, name: str, reads: dict[str, torch.Tensor], gave: dict[str, torch.Tensor]) -> None:
        key = f"{name} {self.turns[name]}"
        self.turns[name] += 1
        self.steps.setdefault(key, []).append(Operation(reads, gave))

    def whole(self, key: str) -> Operation:
        """An operation over all positions."""
        steps = self.steps[key]
        return Operation(
            *(
                {
                    name: torch.cat([getattr(each, part)[name] for each in steps])
                    for name in getattr(steps[0], part)
                }
                for part in ("reads", "gave")
            )
        )

    def rows(self, x: Any) -> dict[str, torch.Tensor]:
        """Copies of the sequence's rows of a verb's argument or result."""
        if isinstance(x, tuple):
            return {f"{i}{name}": rows for i, each in enumerate(x) for name, rows in self.rows(each).items()}
        for name in ("rows", "x", "plain"):
            if hasattr(x, name):
                return self.rows(getattr(x, name))
        if hasattr(x, "chosen"):
            return self.rows(x.chosen)
        if isinstance(x, ChosenExperts):
            return self.rows((x.experts, x.weights))
        if isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[0] >= self.count:
            return {"": x.flatten(1)[-self.count :].clone()}
        return {}


def traced(trace: Trace, name: str, verb: Any, *args: Any, **options: Any) -> Any:
    """What the verb gives, which is written down."""
    reads = {f"{i}{part}": rows for i, arg in enumerate(args) for part, rows in trace.rows(arg).items()}
    result = verb(*args, **options)
    trace.add(name, reads, trace.rows(result))
    return result


def made(trace: Trace, compute: Any, routed: Any, part: Any, step: Any) -> torch.Tensor:
    """`expert_products.made`, whose choices are rows of theirs."""
    result: torch.Tensor = compute(routed, part, step)
    reads = trace.rows((routed.rows, routed.chosen))
    trace.add("experts", reads, trace.rows(result.unflatten(0, (-1, part.per_row))))
    return result


def run(folder: Path, way: tuple[int, list[Step]], args: argparse.Namespace) -> tuple[Trace, torch.Tensor]:
    """A way's operations, and its logits by position."""
    (beside, steps), trace = way, Trace()
    dtype = torch.float16 if args.device == "cpu" else torch.bfloat16
    place = WeightPlacement(args.device, dtype)
    model = Model(folder, True, place, cublas=args.cublas, beside=beside)
    make = DeviceMachine.ops

    def ops(machine: DeviceMachine, rows: Any, *given: Any, **options: Any) -> Any:
        made_ops = make(machine, rows, *given, **options)
        trace.begin(rows.count // (1 + beside))
        for verb in VERBS:
            setattr(made_ops, verb, partial(traced, trace, verb, getattr(made_ops, verb)))
        return made_ops

    experts = partial(made, trace, expert_products.made)
    with patch.object(DeviceMachine, "ops", ops), patch.object(expert_products, "made", experts):
        logits = model.logits(steps)
    return trace, torch.stack([logits[position] for position in sorted(logits)])


def faults(one: Trace, other: Trace) -> Iterator[dict[str, Any]]:
    """The operations that read the same and gave something else, in the order of a layer's."""
    kept = torch.ones(0, dtype=torch.bool)
    for key in one.steps:
        if key not in other.steps:
            yield {"operation": key, "there": False}
            continue
        first, second = one.whole(key), other.whole(key)
        count = min(len(next(iter(each.gave.values()))) for each in (first, second))
        alike = torch.ones(count, dtype=torch.bool)
        for name, rows in first.reads.items():
            if name in second.reads:
                alike &= (rows[:count] == second.reads[name][:count]).all(1).cpu()
        verb = key.split()[0]
        if verb == "kept":
            kept = alike.cummin(0).values
        if verb in EARLIER:
            alike = alike.cummin(0).values
            alike &= kept[:count] if verb == "attend" else alike
        for name, rows in first.gave.items():
            found = second.gave[name][:count]
            differ = (rows[:count] != found).any(1).cpu()
            if (differ & alike).any():
                at = int((differ & alike).nonzero()[0])
                how = difference(at, ("", rows[at]), ("", found[at]))
                where = {"operation": key, "result": name, "rows": int((differ & alike).sum()), "first": at}
                yield where | {
                    "elements": how.count,
                    "of": rows.shape[1],
                    "place": how.place,
                    "ulps": how.ulps,
                }


def measure(name: str, folder: Path, args: argparse.Namespace) -> None:
    """One model, in this process."""
    began, ways = time.monotonic(), FEW if args.small else WAYS
    with ExitStack() as stack:
        if args.device == "cpu":
            stack.enter_context(tensor_core.hopper(folds=True))
        if args.way:
            run(folder, ways[args.way], args)
            return
        first, *others = ways
        trace, logits = run(folder, ways[first], args)
        for other in others:
            second, found = run(folder, ways[other], args)
            about = {"model": name, "way": other, "cublas": args.cublas}
            for line in faults(trace, second):
                say(args.out, about | line)
            count = min(len(logits), len(found))
            differ = int((logits[:count] != found[:count]).any(1).sum())
            say(
                args.out, about | {"logits": count, "differ": differ, "s": round(time.monotonic() - began, 1)}
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=120.0, help="for everything (%(default)g)")
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to try the script")
    parser.add_argument("--small", action="store_true", help="tiny heads and short ways")
    parser.add_argument("--cublas", action="store_true", help="its products of many rows, unsplit")
    parser.add_argument("--folder", type=Path, help="one model alone, in this process")
    parser.add_argument("--way", help="that way alone: its kernels are compiled")
    args = parser.parse_args()
    if args.folder:
        try:
            measure(args.models[0], args.folder, args)
        except BaseException:
            say(args.out, {"model": args.models[0], "failed": traceback.format_exc()})
            return 1
        return 0
    os.environ.update(UNSPLIT)
    ends_at = time.monotonic() + args.seconds
    words = [sys.executable, "-m", "tests.gpu.exact_ops", "--out", str(args.out), "--device", args.device]
    words += ["--small"] * args.small
    with tempfile.TemporaryDirectory() as folder:
        commands = []
        for name in args.models:
            family, sizes = MODELS[name]
            write_hybrid(Path(folder, name), family, **(sizes | TINY if args.small else sizes))
            commands.append([*words, "--models", name, "--folder", str(Path(folder, name))])
        ways = [] if args.device == "cpu" else list(WAYS)
        sides = ([], ["--cublas"]) if args.device != "cpu" else ([],)
        side_by_side([[*each, "--way", way] for each in commands for way in ways], ends_at)
        return int(any(side_by_side([[*each, *side] for each in commands for side in sides], ends_at)))


if __name__ == "__main__":
    sys.exit(main())
