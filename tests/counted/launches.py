"""What a step of the device launches: Triton kernels, and operations of torch that compute something.

A step's program reads no value of the device, so it launches the same whatever the numbers are: here the
kernels are counted and not run, and the model is tiny. It knows shapes, never tokens.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.engine.device.executor import WORDS
from eyas.engine.device.program import DeviceState, StepProgram
from eyas.engine.device.special import padding_rows
from eyas.engine.device.step import StepShape
from eyas.engine.kernels.launch.launching import TritonKernel
from eyas.engine.kernels.sampling.special import COLUMNS
from eyas.engine.loading.device_build import build_state
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.startup import StartPhases
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from tests.unit.tiny import write_tiny_eagle3, write_tiny_llama
from tests.unit.tiny_deepseek import write_tiny_deepseek

DRAFTS = {
    "plain": None,
    "chain": SpeculationConfig(steps=3, topk=1, draft_tokens=4),
    "tree": SpeculationConfig(steps=3, topk=2, draft_tokens=6),
}
LAYERS = 8
NO_WORK = ("aten::lift_fresh", "aten::detach", "aten::detach_")  # unlike item, for which a device is waited


class Launches(TorchDispatchMode):
    """While it is entered: kernels are counted instead of run, and torch's operations beside being run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        name = function.name().partition(".")[0]
        if "empty" in name:
            found.zero_()  # what the kernels leave unwritten may be an index
        elif name not in NO_WORK and not _is_view(function):
            self.operations[name] += 1
        return found

    def launch(self, kernel: Any) -> None:
        """Takes the place of running it."""
        self.kernels[kernel.fn.__name__] += 1


@contextlib.contextmanager
def counted() -> Iterator[Launches]:
    """What is launched within."""
    launches = Launches()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launches.launch(kernel)

    with patch.object(TritonKernel, "launch", run), patch.object(InterpretedFunction, "run", run), launches:
        yield launches


def counts(folder: Path) -> dict[str, int | float]:
    """Of steps of every kind; the models are written to `folder`."""
    write_tiny_llama(folder / "target", layers=LAYERS, hidden=32, ffn=32)
    write_tiny_eagle3(folder / "head", folder / "target")
    found: dict[str, int | float] = {}
    for way, drafts in DRAFTS.items():
        state = _state(folder, drafts)
        width = state.tables.sizes.width
        for name, shape in {
            "8 rounds": StepShape(8, width),
            "a chunk of 48 rows": StepShape(0, width, 48, 4, 1),
            "8 rounds and a chunk of 8 rows": StepShape(8, width, 8, 2, 1),
        }.items():
            launches = launched(state, shape)
            found[f"{way}, {name}: kernels"] = launches.kernels.total()
            found[f"{way}, {name}: torch operations"] = launches.operations.total()
            found[f"{way}, {name}: bytes to the device"] = 4 * shape.sections["all"][1]
        found[f"{way}, 4 special rows: kernels"] = launched(state, StepShape(8, width), 4).kernels.total()
    return found


def latents_and_experts(folder: Path) -> dict[str, int | float]:
    """Of a model with a dense layer, and with experts in the others: few rows, many, and both exactly."""
    write_tiny_deepseek(folder)
    found: dict[str, int | float] = {}
    plain = replace(_config(folder), model=str(folder))
    for way, config in {"": plain, " exactly": replace(plain, deterministic=True, dtype="bfloat16")}.items():
        state = _built(config)
        for name, shape in {
            "1 round": StepShape(1, 1),
            "8 rounds": StepShape(8, 1),
            "a chunk of 144 rows": StepShape(0, 1, 144, 12, 1),
        }.items():
            launches = launched(state, shape)
            found[f"latents and experts, {name}{way}: kernels"] = launches.kernels.total()
            found[f"latents and experts, {name}{way}: torch operations"] = launches.operations.total()
    return found


@torch.inference_mode()
def launched(state: DeviceState, shape: StepShape, special: int = 0) -> Launches:
    """A step of padding, or (if there are some) only the sampling of its special rows."""
    inputs, results = (torch.zeros(WORDS, dtype=torch.int32) for _ in range(2))
    program = StepProgram(state, shape, inputs, results)
    program.blank()
    with counted() as step:
        program.forward()
        if not special:
            program.rest(program.choose())
    if not special:
        return step
    with counted() as sampling:
        rows = padding_rows(special, state.tables.padding_slot, state.model.config.vocab_size)
        program.sample_special(torch.from_numpy(rows[:, : len(COLUMNS)].copy()))  # none has a mask
    return sampling


def _state(folder: Path, drafts: SpeculationConfig | None) -> DeviceState:
    config = _config(folder)
    if drafts is not None:
        config = replace(config, draft=str(folder / "head"), speculation=drafts)
    return _built(config)


def _config(folder: Path) -> EngineConfig:
    return EngineConfig(
        str(folder / "target"),
        draft=None,
        num_pages=8,
        max_running=8,
        attention_backend="triton",
        prefill_attention_backend="triton",
        pool_dir=str(folder),
    )


def _built(config: EngineConfig) -> DeviceState:
    spec, ranks = EngineSpec.of(config, epoch=1), ProcessGroup(RankInfo(), config.device)
    return build_state(spec, ranks, StartPhases())[1]


def _is_view(function: Any) -> bool:
    """Whether it gives another look at memory that is there already."""
    aliases = [given.alias_info for given in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
