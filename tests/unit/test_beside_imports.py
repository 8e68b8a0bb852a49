"""What is made while an engine imports: of this machine's parts, what there is."""

from __future__ import annotations

import pytest
from triton.runtime.cache import triton_key

from eyas.engine.loading import beside_imports
from kv_transfer.gpu.driver import DriverError


def test_triton_knows_its_name_and_a_machine_without_a_gpu_has_no_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def driver(number: int) -> None:
        made.append(number)
        raise DriverError("no GPU")

    monkeypatch.setattr(beside_imports, "CudaDriver", driver)
    triton_key.cache_clear()
    for thread in beside_imports.prepare("cuda:1"):
        thread.join(60)
    assert made == [1]
    assert triton_key.cache_info().currsize == 1
    assert beside_imports.prepare("cpu") == []
