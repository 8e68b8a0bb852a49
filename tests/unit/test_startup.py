"""The stopwatch of a start."""

from __future__ import annotations

import time

import psutil
import pytest

from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.types import Role
from eyas.engine.loading import startup
from eyas.engine.loading.startup import EngineStart, StartPhases


class Clock:
    def __init__(self) -> None:
        self.now = psutil.Process().create_time() + 6.1

    def __call__(self) -> float:
        return self.now


def test_seconds_by_phase_from_the_start_of_the_process() -> None:
    clock = Clock()
    phases = StartPhases(clock)
    for name, seconds in (("weights", 3.0), ("kernels", 12.0), ("weights", 1.2)):
        with phases(name):
            clock.now += seconds
    assert phases.summary() == "ready in 22.3 s: import 6.1, weights 4.2, kernels 12.0"
    clock.now += 0.9
    assert phases.summary().endswith("kernels 12.0, other 0.9")


def test_a_phase_that_fails_is_timed_too() -> None:
    clock = Clock()
    phases = StartPhases(clock)
    with pytest.raises(ValueError), phases("weights"):
        clock.now += 2.0
        raise ValueError
    assert "weights 2.0" in phases.summary()


def test_import_time_is_that_of_this_process() -> None:
    before = time.time() - psutil.Process().create_time()
    said = float(StartPhases().summary().removeprefix("ready in ").partition(" ")[0])
    assert before - 0.06 <= said <= time.time() - psutil.Process().create_time() + 0.06


class Warmup:
    """In place of the real one: what it was asked to compile."""

    def __init__(self, recipe: str, args: tuple[EngineConfig], capability: int, processes: int) -> None:
        self.asked = recipe, args, capability
        assert processes >= 1


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "KernelWarmup", Warmup)
    monkeypatch.setattr(startup, "capability", lambda device: 90)


def _asked(device: str, **changes: object) -> object:
    warmup = EngineStart.of(resolve_engine(device, draft=None, **changes)).warmup
    return None if warmup is None else warmup.asked


@pytest.mark.usefixtures("no_compiling")
def test_kernels_do_not_depend_on_an_address_or_on_memory() -> None:
    """What was compiled for one worker is found by the next."""
    asked = _asked("cuda", worker="127.0.0.1:1")
    assert asked == _asked("cuda", worker="127.0.0.1:2", num_pages=99)
    shared = {"roles": (Role.DECODE,), "mem_fraction_static": 0.44, "pool_dir": "/dev/shm/another"}
    assert asked == _asked("cuda:1", threads=2, **shared)
    assert asked != _asked("cuda", dtype="float16")


@pytest.mark.usefixtures("no_compiling")
def test_nothing_is_compiled_for_the_torch_backend() -> None:
    assert _asked("cpu") is None and _asked("cuda", attention_backend="torch") is None


@pytest.mark.usefixtures("no_compiling")
def test_a_draft_worker_has_a_list_of_its_own() -> None:
    drafts, all_roles = (_asked("cuda", roles=roles) for roles in ((Role.DRAFT,), tuple(Role)))
    assert drafts is not None and drafts != all_roles


def test_a_gpu_that_does_not_answer_is_not_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says it in one sentence, once torch is there."""
    monkeypatch.setenv("PATH", "")
    assert _asked("cuda") is None
