"""The check of counted work sees one message, one launch or a bit of time more than is recorded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_svc import servicer
from eyas.common.config import SHARED_MEMORY
from eyas.common.types import Role
from eyas.engine.device.program import StepProgram
from eyas.engine.ipc.messages import RequestAdmitted, StepReply
from eyas.engine.loop.engine import Engine
from tests.counted import baseline, engines, host, launches, wires
from tests.counted.__main__ import BASELINE, main

Counting = Callable[[Path], baseline.Table]
pytestmark = pytest.mark.usefixtures("one_thread")

ALL = (Role.PREFILL, Role.DECODE, Role.DRAFT)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "baseline.toml"


def check(record: Path, counting: Counting) -> int:
    return main([], counting, record)


def renew(record: Path, counting: Counting) -> None:
    assert main(["--renew"], counting, record) == 0
    assert check(record, counting) == 0, "what was just counted is not found again"


def one_answer(_: Path) -> baseline.Table:
    return {"wires": asyncio.run(wires.answer(ALL)).messages}


def one_engine(folder: Path) -> baseline.Table:
    return {"engines": {"messages": len(engines.run(engines.plain(folder), engines.requests()[:1]).messages)}}


def one_step(folder: Path) -> baseline.Table:
    return {"launches": launches.counts(folder)}


# --- the power of the check ------------------------------------------------------------------------------


def test_one_more_message_per_token_is_seen(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between a worker and its gateway: every step is followed by a message that says nothing new."""
    renew(record, one_answer)
    on_event = servicer._DecodeStream._on_event

    def talkative(session: Any, event: Any) -> None:
        on_event(session, event)
        if isinstance(event, StepReply):
            on_event(session, RequestAdmitted(event.entries[0].id, event.entries[0].attempt))

    monkeypatch.setattr(servicer._DecodeStream, "_on_event", talkative)
    assert check(record, one_answer) == 1
    said = capsys.readouterr().err
    name = "wires: DecodeServiceSessionResponse admitted"
    assert f"{name}: 1 is recorded, {1 + wires.TOKENS} now: more work" in said
    assert baseline.RENEW in said and "say why" in said


@pytest.mark.slow
def test_one_more_message_per_step_of_an_engine_is_seen(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew(record, one_engine)
    tell = Engine._tell

    def talkative(engine: Engine) -> None:
        tell(engine)
        if engine._busy:
            engine._link.send([engine._load()])

    monkeypatch.setattr(Engine, "_tell", talkative)
    assert check(record, one_engine) == 1


@pytest.mark.parametrize(
    "operation",
    [torch.clone, pytest.param(lambda chosen: chosen[0].item(), id="item", marks=pytest.mark.slow)],
)
def test_one_more_operation_per_step_is_seen(
    operation: Callable[[torch.Tensor], object],
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    renew(record, one_step)
    rest = StepProgram.rest

    def slower(program: StepProgram, chosen: torch.Tensor) -> None:
        operation(chosen)
        rest(program, chosen)

    monkeypatch.setattr(StepProgram, "rest", slower)
    assert check(record, one_step) == 1
    complaints = [line for line in capsys.readouterr().err.splitlines() if "more work" in line]
    assert len(complaints) == 9 and all("torch operations" in line for line in complaints)


def test_a_slower_step_is_seen() -> None:
    """Three times as long; and a step that takes as long as before is not complained of."""
    count = 64

    def measured(times: int) -> baseline.Table:
        busy = host.Busy(count)

        def step() -> None:
            for _ in range(times):
                busy.step()

        return {"host": {"step": host.ratio(step, host.TIMED // times)}}

    slower = baseline.differences(measured(1), measured(3))
    assert [difference.name for difference in slower] == ["host: step"]


def test_what_is_counted_leaves_no_file_behind(tmp_path: Path) -> None:
    def pools() -> set[Path]:
        return set(Path(SHARED_MEMORY).glob(f"eyas-{os.getpid()}-*"))

    before = pools()
    launches.counts(tmp_path)
    engines.run(engines.plain(tmp_path), engines.requests()[:1])
    assert pools() <= before


# --- the record ------------------------------------------------------------------------------------------


def test_counts_are_exact_and_ratios_are_not() -> None:
    old: baseline.Table = {"a": {"count": 10, "time": 2.0}}
    assert not baseline.differences(old, {"a": {"count": 10, "time": 2.0 * baseline.SLACK}})
    assert not baseline.differences(old, {"a": {"count": 10, "time": 2.0 / baseline.SLACK}})
    for count, time in ((11, 2.0), (9, 2.0), (10, 2.1 * baseline.SLACK), (10, 1.9 / baseline.SLACK)):
        assert len(baseline.differences(old, {"a": {"count": count, "time": time}})) == 1


def test_less_work_is_to_be_recorded_too() -> None:
    (difference,) = baseline.differences({"a": {"count": 10}}, {"a": {"count": 9}})
    assert str(difference) == "a: count: 10 is recorded, 9 now: less work"


def test_what_is_counted_first_or_no_more_is_named() -> None:
    first, last = baseline.differences({"a": {"old": 1}}, {"b": {"new": 2}})
    assert str(first) == "a: old: 1 is recorded, and it is not counted any more"
    assert str(last) == "b: new: 2 now, and nothing is recorded"


def test_a_renewal_prints_what_it_changes_and_leaves_noise_alone(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renew(record, lambda _: {"a": {"count": 10, "time": 2.0}})
    capsys.readouterr()
    renew(record, lambda _: {"a": {"count": 11, "time": 2.1}})
    said = capsys.readouterr().out
    assert '-"count" = 10' in said and '+"count" = 11' in said and "time" not in said
    assert baseline.read(record) == {"a": {"count": 11, "time": 2.0}}
    renew(record, lambda _: {"a": {"count": 11, "time": 2.1}})
    assert "nothing has changed" in capsys.readouterr().out


def test_the_record_is_sorted_and_says_how_to_renew_it() -> None:
    text, table = BASELINE.read_text(), baseline.read(BASELINE)
    assert baseline.text(table) == text and baseline.RENEW in text
    assert set(table) == {"engines", "host", "launches", "wires"}
