"""The names of all kernels in Triton's cache on disk, made in two orders.

    python -m tests.unit.kernel_names

Two processes launch kernels in different orders, and must give each one name: else neither finds what the
other one has compiled. Prints how many kernels there are, and how many of them have two names: as the engine
makes these, and as Triton does by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITFunction

from eyas.engine import kernels
from eyas.engine.kernels.launch.launching import TritonKernel, name_on_disk


def modules() -> Iterator[ModuleType]:
    """All that have kernels."""
    for each in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        yield importlib.import_module(each.name)


def forget(functions: list[JITFunction[Any]]) -> None:
    """As in a process that has named none."""
    for function in functions:
        function.hash, function.used_global_vals = None, {}


def main() -> None:
    """The command line."""
    values = {id(value): value for module in modules() for value in vars(module).values()}.values()
    functions = [value for value in values if isinstance(value, JITFunction)]
    launched = [value._function for value in values if isinstance(value, TritonKernel)]
    other = random.Random(1).sample(launched, len(launched))
    counts = [len(launched)]
    for name in (name_on_disk, lambda function: function.cache_key):
        names = []
        for order in (launched, other):
            forget([*functions, *launched])
            for function in order:
                name(function)
            names.append([function.cache_key for function in launched])
        counts.append(sum(first != second for first, second in zip(*names, strict=True)))
    print(*counts)


if __name__ == "__main__":
    main()
