"""Cases of sampling: a token for each of a step's rows of logits, by the usual parameters.

Logits are peaked (a standard deviation of 4), so that a nucleus holds tens of ids. In a step they come from
the output head and may still be in a cache; here every call has rows of its own, which come from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec
import torch

from eyas.bench.kernels.case import Call, KernelCalls, KernelCase, KernelSetting
from eyas.common.params import SamplingParams
from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.kernels.sampling import sample
from eyas.engine.sampling import sampler

ROWS = (1, 8, 32)
PEAKED = 4.0
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(seed=1),
    "top_p 0.95": SamplingParams(seed=1, top_p=0.95),
    "top_k 20, top_p 0.95": SamplingParams(seed=1, top_k=20, top_p=0.95),
}
FIELDS = ("temperature", "top_p", "min_p", "top_k", "seed")


def cases(setting: KernelSetting) -> Iterator[KernelCase]:
    """The cases: every way of sampling, by rows."""
    for count in ROWS:
        for name, params in WAYS.items():
            title = f"{name}, {count} x {setting.model.vocab_size}"
            yield KernelCase(title, partial(_work, setting, params, count))


def _work(setting: KernelSetting, params: SamplingParams, count: int) -> KernelCalls:
    size = (count, setting.model.vocab_size)
    nbytes = 4 * size[0] * size[1]
    logits = [setting.normal(*size, dtype=torch.float32).mul_(PEAKED) for _ in range(setting.calls(nbytes))]
    calls = _choose(setting, params, logits) if setting.fast else _sample(params, logits)
    return KernelCalls(calls, nbytes, clock=setting.clock)


def _sample(params: SamplingParams, logits: list[torch.Tensor]) -> list[Call]:
    rows = [
        sampler.SampledRow(msgspec.structs.replace(params, seed=params.seed + i), 0, 100 + i, (), (), ())
        for i in range(logits[0].shape[0])
    ]
    return [partial(sampler.sample, some, rows) for some in logits]


def _choose(setting: KernelSetting, params: SamplingParams, logits: list[torch.Tensor]) -> list[Call]:
    count = logits[0].shape[0]
    tables = SlotTables(TableSizes(count + 1, 1), setting.device)
    for name in FIELDS:
        getattr(tables, name).fill_(getattr(params, name) or 0)
    tables.seed += torch.arange(count + 1, device=setting.device)
    slots = torch.arange(count, dtype=torch.int32, device=setting.device)
    rows = sample.SampledRows(slots, slots + 100)
    out = torch.empty(count, dtype=torch.int32, device=setting.device)
    return [partial(sample.choose, some, rows, tables, out, setting.pdl) for some in logits]
