"""What nvidia-smi says of the GPUs here, by a script in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.common.errors import ConfigError
from eyas.common.machine import gpus

SIX = """#!/bin/sh
case "$1" in *compute_cap) set -- 10.3 9.0;; *) set -- 81559 143771;; esac
for i in 0 1 2 3 4; do echo "$i, GPU-a$i, $1"; done
echo "5, GPU-b5, $2"
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six GPUs, of which the last is another; the file may be written anew."""
    path = tmp_path / "nvidia-smi"
    path.write_text(SIX)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return path


@pytest.mark.usefixtures("driver")
def test_every_gpu_has_a_size_and_a_capability() -> None:
    assert gpus.memory() == (81559 << 20,) * 5 + (143771 << 20,)
    assert [gpus.capability(device) for device in ("cuda", "cuda:1", "cuda:5")] == [103, 103, 90]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("visible", "sizes"),
    [
        ("5", [143771]),
        ("3, 5", [81559, 143771]),
        ("GPU-b,0", [143771, 81559]),
        ("5,6,0", [143771]),  # what stands after a name that means none is not seen
        ("5,,0", [143771]),
        ("MIG-1/2/3,5", [None, 143771]),
    ],
)
def test_a_gpu_is_known_by_its_visible_number(
    visible: str, sizes: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.memory() == tuple(None if size is None else size << 20 for size in sizes)


@pytest.mark.usefixtures("driver")
def test_a_capability_is_that_of_the_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,MIG-1")
    assert gpus.capability("cuda:1") == 90
    for device in ("cuda:2", "cuda:3"):
        with pytest.raises(ConfigError, match=f"the driver does not tell what {device} can do"):
            gpus.capability(device)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("visible", ["", "-1", "9"])
def test_hidden_gpus_are_none(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match="there is no GPU here: CUDA_VISIBLE_DEVICES shows none"):
        gpus.memory()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("#!/bin/sh\necho broken\necho driver\nexit 9\n", "nvidia-smi ended with code 9: broken$"),
        ("#!/bin/sh\nexit 9\n", "nvidia-smi ended with code 9: it said nothing$"),
        ("#!/bin/sh\nexec sleep 60\n", "nvidia-smi did not answer within 0.2 s$"),
        ("not a program", "nvidia-smi, which comes with its driver, cannot be run$"),
    ],
)
def test_a_driver_that_does_not_answer_is_one_sentence(
    script: str, says: str, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "TIMEOUT_S", 0.2 if "sleep" in script else 30)
    driver.write_text(script)
    with pytest.raises(ConfigError, match=says) as refused:
        gpus.memory()
    assert refused.value.param == "device" and "\n" not in refused.value.message
