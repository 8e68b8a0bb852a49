"""Launches by `launching.TritonKernel` beside Triton's own: kernels are compiled, nothing runs.

    python -m tests.unit.launched_kernels

Whatever is launched, the variant and its arguments must be those that Triton would have taken. Prints how
many launches were compared, how many of them differ, and how many would where less is known of arguments;
then the microseconds of a launch by Triton, and by `TritonKernel`.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from eyas.engine.kernels.launch import launching
from eyas.engine.kernels.launch.compile_ahead import NoDevice


class Compiled:
    """In place of what Triton compiles: notes with what it was launched."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *given: Any) -> None:
        self.launched.append((*given[:4], *given[9:]))


def _compile(function: JITFunction[Any], key: str, signature: Any, device: int, *_: Any) -> Compiled:
    made: Compiled = function.device_caches[device][0].setdefault(key, Compiled())
    return made


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def _body(
    x: Any, y: Any, n: Any, m: Any, f: Any, described: Any,
    SIZE: tl.constexpr, MODE: tl.constexpr = "", LAST: tl.constexpr = 3,
) -> None:  # fmt: skip
    """Is never compiled."""
    tl.store(x, tl.load(y) + n + m + f + SIZE)


def _arguments() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """All kinds of each argument, with some of the others."""
    draw = random.Random(0)
    floats, halves = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    tensors = [floats, floats[1:], halves, halves[8:], halves[3:], None]
    tensors += [(floats, 16), (floats, 17), (floats[1:], 16), (halves, None), (halves, (floats[1:],))]  # type: ignore[list-item]
    numbers = [0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**40), 2**63, True, False]
    described = [
        TensorDescriptor(t.view(4, 16), [4, 16], [16, 1], [2, each])
        for t, each in itertools.product((floats, halves), (8, 16))
    ]
    found = []
    for x, n, m in itertools.product(tensors, numbers, numbers):
        args = (x, draw.choice(tensors), n, m, draw.choice([0.5, 1.0]), draw.choice(described))
        named: dict[str, Any] = {"SIZE": draw.choice([16, 32]), "num_warps": draw.choice([4, 8])}
        if draw.random() < 0.5:
            named["MODE"] = draw.choice(["", "a"])
        found.append((args, named))
    return 2 * draw.sample(found, len(found))


def _same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    return len(found) == len(expected) and all(
        _same(a, b)
        if isinstance(a, tuple)
        else a is b or (not isinstance(a, torch.Tensor) and type(a) is type(b) and a == b)
        for a, b in zip(found, expected, strict=True)
    )


def compare(known: Any) -> tuple[int, int]:
    """Launches, and those that differ, where `known` says what may decide about a variant."""
    kernel, wrong, given = launching.TritonKernel(_body), 0, _arguments()
    with patch.object(launching, "_known", known):
        for i, (args, named) in enumerate(given):
            grid = ((3,), (3, 2), (4, 3, 2))[i % 3]
            expected = _body[grid](*args, **named)
            meant = expected.launched.pop()
            kernel[grid](*args, **named)
            wrong += not (expected.launched and _same(expected.launched.pop(), meant))
    return len(given), wrong


def _unaligned(arg: Any) -> Any:
    return arg.dtype if isinstance(arg, torch.Tensor) else launching_known(arg)


def _any_number(arg: Any) -> Any:
    return int if isinstance(arg, int) else launching_known(arg)


launching_known = launching._known


def seconds(rounds: int = 40, times: int = 250) -> tuple[float, float]:
    """Of a launch by Triton, and by `TritonKernel`, in turns, the least: the host's own work, for nothing
    runs."""
    kernel, (args, named) = launching.TritonKernel(_body), _arguments()[0]
    found = {_body: float("inf"), kernel: float("inf")}
    for launch in [_body, kernel] * rounds:
        began = time.perf_counter()
        for _ in range(times):
            launch[(3,)](*args, **named)
        found[launch] = min(found[launch], (time.perf_counter() - began) / times)
    return found[_body], found[kernel]


def main() -> None:
    driver.set_active(NoDevice(90))
    with patch.object(JITFunction, "_do_compile", _compile):
        print(*compare(launching_known), *(compare(less)[1] for less in (_unaligned, _any_number)))
        print(*(f"{1e6 * each:.1f}" for each in seconds()))
        for args, named in (
            ((None, None, 1, 2, 0.5), {"described": None}),
            ((None, "x", 1, 2, 0.5, None), {}),
        ):
            try:
                launching.TritonKernel(_body)[(1,)](*args, SIZE=16, **named)
            except TypeError as error:
                print(error)


if __name__ == "__main__":
    main()
