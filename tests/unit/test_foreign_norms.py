"""Norms of transformers' modules by one launch: the same results, or the module's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.engine.models.foreign.norms import fuse_norms


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])  # gains as they are, and those that 1 is added to
def test_logits_stay_and_no_norm_takes_eight_operations(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    model = write_family(tmp_path, name).to(dtype)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        before = model(ids).logits.float()
        norms = sum("RMSNorm" in type(module).__name__ for module in model.modules())
        assert fuse_norms(model) == norms == 4 * 4 + 1
        with Operations() as seen:
            after = model(ids).logits.float()
    assert seen.counts["aten::rsqrt"] == 0
    assert (after - before).abs().max() <= (1e-5 if dtype == torch.float32 else 0.1) * before.abs().max()


class OddRMSNorm(torch.nn.Module):
    """One whose gains have 1/2 added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.rand(64)), 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scaled = rows * (rows.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return scaled * (0.5 + self.weight)


def test_another_rule_stays_as_it_is() -> None:
    assert fuse_norms(torch.nn.ModuleList([OddRMSNorm()])) == 0
