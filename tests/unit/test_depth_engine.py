"""Whole engines whose depth changes all the time: plain decoding's tokens, and the same drafts as ever."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from loopback import split_configs
from tiny import write_tiny_eagle3, write_tiny_llama
from wandering import wander

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.types import GenerationRequest, RequestDraftLimits
from eyas.engine.models.base import Drafted
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension
from eyas.engine.speculation.drafters import colocated
from eyas.engine.speculation.drafters.base import AcceptedRows, SequenceProposal
from eyas.engine.speculation.drafters.colocated import ColocatedDrafter
from tests.unit.depth_runs import VOCAB, answers, requests

pytestmark = pytest.mark.usefixtures("one_thread")

CHAIN = SpeculationConfig(5, 1, 6, adaptive=True)
TREE = SpeculationConfig(3, 2, 7, adaptive=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = tmp_path_factory.mktemp("models")
    write_tiny_llama(folder / "target", vocab=VOCAB, layers=6)
    write_tiny_eagle3(folder / "head", folder / "target")
    return EngineConfig(
        model=str(folder / "target"),
        draft=str(folder / "head"),
        num_pages=128,
        chunk_tokens=48,
        pool_dir=str(tmp_path_factory.mktemp("pools")),
        worker="unified",
    )


@pytest.fixture(scope="module")
def expected(base: EngineConfig) -> list[dict[int, list[int]]]:
    """Plain decoding's tokens."""
    return [result.tokens for result in answers(replace(base, draft=None))]


@pytest.mark.parametrize(
    ("spec", "split"),
    [
        pytest.param(CHAIN, False, id="unified chain"),
        pytest.param(TREE, True, id="split tree", marks=pytest.mark.slow),
        pytest.param(TREE, False, id="unified tree", marks=pytest.mark.slow),
        pytest.param(CHAIN, True, id="split chain", marks=pytest.mark.slow),
    ],
)
def test_whatever_the_depth_the_tokens_are_plain_decodings(
    base: EngineConfig,
    expected: list[dict[int, list[int]]],
    spec: SpeculationConfig,
    split: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policies, config = wander(monkeypatch), replace(base, speculation=spec)
    found = answers(*(split_configs(config) if split else (config,)))
    assert [result.tokens for result in found] == expected
    (policy,) = [policy for policy in policies if policy.chosen]
    assert set(policy.chosen) == set(policy.depths)
    offered = {entry.offered for result in found for entry in result.entries}
    assert offered >= ({0, 1, 3, 5} if spec is CHAIN else {0, 1, 3}) or split
    assert sum(entry.accepted for result in found for entry in result.entries)
    assert not any(entry.offered for entry in found[-1].entries)


@pytest.mark.parametrize(
    "split",
    [pytest.param(False, id="unified"), pytest.param(True, id="split", marks=pytest.mark.slow)],
)
def test_a_request_says_how_far_its_own_drafts_reach(
    base: EngineConfig, expected: list[dict[int, list[int]]], split: bool
) -> None:
    """Chains and smaller trees on a server of trees; the others' reach as far as ever."""
    config = replace(base, speculation=replace(TREE, adaptive=False))
    limits = [
        RequestDraftLimits(),
        RequestDraftLimits(steps=1),
        RequestDraftLimits(topk=1),
        RequestDraftLimits(draft_tokens=3),
    ]
    wanted = [msgspec.structs.replace(r, draft_limits=limits[i % 4]) for i, r in enumerate(requests())]
    found = answers(*(split_configs(config) if split else (config,)), wanted=wanted)
    assert [result.tokens for result in found] == expected
    deepest = [max(entry.offered for entry in result.entries) for result in found[:4]]
    assert all(depth <= most for depth, most in zip(deepest, (3, 1, 3, 2), strict=True))
    assert split or deepest == [3, 1, 3, 2], "far away some come late"


@pytest.mark.parametrize(
    "field", ["draft_tokens", *(pytest.param(name, marks=pytest.mark.slow) for name in ("steps", "topk"))]
)
def test_limits_beyond_the_servers_are_refused_by_name(base: EngineConfig, field: str) -> None:
    most = getattr(CHAIN, field)
    with pytest.raises(AssertionError, match=rf"speculative\.{field} is {most + 1}, and .* is {most}"):
        answers(replace(base, speculation=CHAIN), wanted=[_deeper(field)])


def _deeper(field: str) -> GenerationRequest:
    """A request for one more than the server drafts."""
    limits = RequestDraftLimits(**{field: getattr(CHAIN, field) + 1})
    return msgspec.structs.replace(requests()[0], draft_limits=limits)


def test_where_nothing_is_drafted_no_limit_is_refused(base: EngineConfig) -> None:
    request = _deeper("steps")
    undrafted = msgspec.structs.replace(request, speculative=False)
    assert answers(replace(base, speculation=CHAIN), wanted=[undrafted])
    assert answers(replace(base, draft=None), wanted=[request])


def test_adaptive_depth_by_itself(base: EngineConfig, expected: list[dict[int, list[int]]]) -> None:
    """No policy is put in its place: it chooses what it likes."""
    found = answers(replace(base, speculation=CHAIN))
    assert [result.tokens for result in found] == expected


Told = dict[tuple[str, int], list[list[int]]]


def drafts_of(config: EngineConfig) -> Told:
    """The tokens of every proposal, by request and place."""
    told: Told = {}
    take = ColocatedDrafter.take

    def heard(self: ColocatedDrafter) -> list[SequenceProposal]:
        found = take(self)
        for draft in found:
            generation = draft.seq.generation
            if len(generation.request.choices) == 1:
                told.setdefault((generation.id, draft.base), []).append(list(draft.tree.tokens))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ColocatedDrafter, "take", heard)
        answers(config)
    return told


@pytest.fixture(scope="module")
def always(base: EngineConfig) -> Told:
    """Of an engine whose depth is ever the same."""
    return drafts_of(replace(base, speculation=replace(CHAIN, adaptive=False)))


def alike(base: EngineConfig, always: Told, patch: pytest.MonkeyPatch) -> float:
    """Which part of the drafts after plain rounds are those of an engine without plain rounds."""
    wander(patch, [0] * 18 + [5, 0, 0, 3])
    found = drafts_of(replace(base, speculation=CHAIN))
    both = found.keys() & always.keys()
    pairs = [(mine, theirs) for place in both for mine in found[place] for theirs in always[place]]
    assert len(pairs) > 5
    return sum(mine == theirs[: len(mine)] for mine, theirs in pairs) / len(pairs)


@pytest.mark.slow
def test_plain_rounds_leave_no_gap_in_draft_kv(
    base: EngineConfig, always: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more of them follow each other than wait for the head at most."""
    assert colocated.WAITING_ROWS < 18
    assert alike(base, always, monkeypatch) == 1.0


def test_a_gap_would_be_seen(base: EngineConfig, always: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: ColocatedDrafter, commit: AcceptedRows) -> AcceptedRows | None:
        return None if commit.spec is None and commit.generated else commit

    monkeypatch.setattr(ColocatedDrafter, "_due", forgets)
    assert alike(base, always, monkeypatch) < 0.9


def test_plain_rounds_call_the_head_rarely(base: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per `WAITING_ROWS` rows of a sequence, beside its prompt."""
    rows: list[int] = []
    extend = colocated.DraftRunner.extend

    def counted(self: colocated.DraftRunner, extensions: SequenceOf[DraftExtension]) -> list[Drafted]:
        rows.extend(len(one.tokens) for one in extensions)
        return extend(self, extensions)

    monkeypatch.setattr(colocated.DraftRunner, "extend", counted)
    wander(monkeypatch, [0])
    answers(replace(base, speculation=CHAIN, chunk_tokens=96))  # no prompt is cut
    assert (
        rows.count(colocated.WAITING_ROWS) >= 5 and rows.count(1) <= 2
    )  # of forks, which begin with the last row of their prompt
