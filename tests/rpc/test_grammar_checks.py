"""Grammars are checked before a worker hears of them, in a process that has limits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from http_client import CHAT, GENERATE, client_of, refused
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.config import NANO
from eyas.common.errors import EyasError, InvalidRequest, Overloaded, Unavailable
from eyas.common.grammars.notations import Grammar
from gateway.grammars import checks as grammar_checks
from gateway.grammars.checks import GrammarBackend, GrammarChecks

BOMB = Grammar.json_schema(
    {"anyOf": [{"properties": {f"{i}_{j}": {"type": "string"} for j in range(30)}} for i in range(60)]}
)
GOOD = Grammar.json_object()
ALSO_GOOD = Grammar.regex("b+")
BAD = Grammar.regex("(a")
HIDDEN = (  # what is ambiguous comes at once, late, or in one of two branches
    'root ::= (([^q]*)*)* "x"',
    'root ::= [a-z ]{120} (([a-z ]*)* [a-z ]*)* "x"',
    'root ::= [a-z ]{1000} (([a-z ]*)* [a-z ]*)* "x"',
    'root ::= "a" | [a-z ]{100} (([a-z ]*)* [a-z ]*)* "x"',
)


@pytest.fixture
async def checks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarChecks]:
    monkeypatch.setattr(grammar_checks, "WALKS_S", 60)  # it may be busy where this runs
    checks = GrammarChecks(Path(NANO))
    yield checks
    await checks.aclose()


async def test_a_refusal_names_the_field_that_asked(checks: GrammarChecks) -> None:
    backend = ScriptedBackend(nano_tokenizer())
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", CHAT | {"guided_regex": "(a"}, "guided_regex"),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
        ("/generate", GENERATE | {"sampling_params": {"regex": "(a"}}, "sampling_params.regex"),
    ]
    async with client_of(GrammarBackend(backend, checks), tokenizer=backend.tokenizer) as client:  # type: ignore[arg-type]
        for path, body, field in asked:
            message = refused(await client.post(path, json=body), field)
            assert message.startswith(f"{field} cannot be followed: ")
        assert not backend.requests
        good = CHAT | {"response_format": {"type": "json_object"}}
        assert (await client.post("/v1/chat/completions", json=good)).status_code == 200
    assert [request.params.grammar for request in backend.requests] == [GOOD]


async def test_what_was_found_is_remembered(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_REMEMBERED", 2)
    for _ in range(2):
        await checks.check(GOOD)
        with pytest.raises(InvalidRequest, match="bracket is not closed"):
            await checks.check(BAD)
    asked: list[Grammar] = []
    compile_one = checks._compile

    async def count(grammar: Grammar) -> str | None:
        asked.append(grammar)
        return await compile_one(grammar)

    monkeypatch.setattr(checks, "_compile", count)
    await checks.check(GOOD)
    with pytest.raises(InvalidRequest):
        await checks.check(BAD)
    assert not asked
    new = Grammar.regex("a")
    await asyncio.gather(*(checks.check(new) for _ in range(5)))
    assert asked == [new]
    await checks.check(GOOD)  # the oldest was forgotten
    assert asked == [new, GOOD]


async def test_time_is_bounded_and_what_follows_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the process's own time, and what it says is remembered."""
    monkeypatch.setattr(grammar_checks, "WALKS_S", 60)  # it may be busy where this runs
    checks = GrammarChecks(Path(NANO), compile_s=0.02)
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="more than 0.02 s"):
                await checks.check(BOMB)
        checks._compile_s = 10
        with pytest.raises(InvalidRequest, match="more than 0.02 s"):
            await checks.check(BOMB)  # as it was found
        await checks.check(Grammar.regex("a+"))
    finally:
        await checks.aclose()


async def test_a_process_that_is_stopped_refuses_nothing(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether the grammar can be followed, so nothing is remembered."""
    await checks.check(GOOD)
    assert checks._child is not None
    checks._child.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as hasty:
        hasty.setattr(grammar_checks, "WALKS_S", 0.1)
        hasty.setattr(checks, "_compile_s", 0.1)
        with pytest.raises(Unavailable, match="did not answer: try again") as error:
            await checks.check(ALSO_GOOD)
    assert error.value.http_status == 503
    await checks.check(ALSO_GOOD)


async def test_a_process_that_others_end_costs_no_grammar(checks: GrammarChecks) -> None:
    await checks.check(GOOD)
    assert checks._child is not None
    checks._child.kill()
    await checks.check(ALSO_GOOD)


@pytest.mark.parametrize("ended_by, error", [("SIGKILL", Unavailable), ("SIGSEGV", InvalidRequest)])
async def test_what_ends_each_process_is_the_grammars_fault_or_not(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch, ended_by: str, error: type[EyasError]
) -> None:
    """One that breaks what compiles it is refused for good; one whose processes are killed is not."""
    asked = []

    def die(grammar: Grammar) -> bytes:
        asked.append(grammar)
        return b""

    with monkeypatch.context() as dying:
        dying.setattr(checks, "_line_about", die)
        dying.setattr(checks, "_end", lambda grace_s: signal.Signals[ended_by])
        for _ in range(2):
            with pytest.raises(error):
                await checks.check(GOOD)
    assert len(asked) == (4 if error is Unavailable else 2)


async def test_memory_is_bounded(checks: GrammarChecks) -> None:
    huge = Grammar.regex("((a{0,99}){0,99}b{0,99}){0,999}")
    try:
        await checks.check(huge)
    except InvalidRequest as error:
        assert "cannot be followed" in error.message
    await checks.check(GOOD)


async def test_masks_that_take_long_are_refused(checks: GrammarChecks) -> None:
    """They compile at once, and would hold up every stream of an engine."""
    for rules in HIDDEN:
        with pytest.raises(InvalidRequest, match="too ambiguous"):
            await checks.check(Grammar.ebnf(rules))
    await checks.check(Grammar.regex(".*x"))
    await checks.check(Grammar.regex("[a-z ]{1500}"))


async def test_waiting_is_bounded(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 1)
    gate = asyncio.Event()

    async def compile(_: Grammar) -> None:
        await gate.wait()

    monkeypatch.setattr(checks, "_compile", compile)
    first = asyncio.create_task(checks.check(BAD))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checks.check(GOOD)
    gate.set()
    await first
    await checks.check(GOOD)


async def test_waiting_is_bounded_in_time(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "WAIT_S", 0.2)
    gate, compiled = asyncio.Event(), []

    async def compile(grammar: Grammar) -> None:
        await gate.wait()
        compiled.append(grammar)

    monkeypatch.setattr(checks, "_compile", compile)
    first = asyncio.create_task(checks.check(GOOD))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="longer than 0.2 s"):
        await checks.check(BAD)
    gate.set()
    await first
    await checks.check(BAD)  # its turn is not lost for good
    assert compiled == [GOOD, BAD]


async def test_callers_take_turns(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for many delays another by two of them at most, and cannot use up its places."""
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 3)
    compiled: list[str] = []

    async def compile(grammar: Grammar) -> None:
        compiled.append(grammar.text)
        await asyncio.sleep(0.01)

    monkeypatch.setattr(checks, "_compile", compile)
    many = [asyncio.create_task(checks.check(Grammar.regex(f"many{i}"), "many")) for i in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checks.check(Grammar.regex("many3"), "many")
    other = asyncio.create_task(checks.check(Grammar.regex("other"), "few"))
    await asyncio.gather(checks.check(Grammar.regex("few"), "few"), other, *many)
    assert compiled == ["many0", "many1", "other", "many2", "few"]
    await checks.check(Grammar.regex("many3"), "many")
    assert not checks._waiting and not checks._pending


async def test_a_model_without_a_tokenizer_refuses_all(tmp_path: Path) -> None:
    checks = GrammarChecks(tmp_path)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        await checks.check(GOOD)
    await checks.aclose()


async def test_a_cancellation_that_comes_with_the_turn_is_kept(checks: GrammarChecks) -> None:
    """Else the gateway would end only when what it no longer wants is compiled."""
    entered: list[str] = []

    async def turn(name: str) -> None:
        async with checks._turn(name):
            entered.append(name)

    async with checks._turn("first"):
        second = asyncio.create_task(turn("second"))
        await asyncio.sleep(0.01)
    second.cancel()  # its turn has come in this very moment
    with pytest.raises(asyncio.CancelledError):
        await second
    await turn("third")
    assert entered == ["third"]


async def test_a_library_that_cannot_be_loaded_is_named(
    checks: GrammarChecks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xgrammar.py").write_text("raise TypeError('built for another tvm_ffi')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(InvalidRequest, match="cannot be used here: TypeError.*another tvm_ffi"):
        await checks.check(GOOD)
