"""The load of `python -m tools.bench.agent_tiers`: sessions in mid-day, and what is counted of them."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from eyas.bench.agent_traces import RecordedSessions
from eyas.bench.agents import agent_sessions
from tools.bench.agent_tiers import EMBEDDED, SEED, Session, Sizes, report, token_bytes


def test_a_session_in_mid_day_asks_what_the_whole_one_did() -> None:
    def refuse(number: int, text: str) -> None:
        raise AssertionError((number, text))

    drawn = agent_sessions(5, 400, None, 0.0, SEED)
    recorded = RecordedSessions(SEED, 1.0, refuse)  # type: ignore[arg-type]  # it raises
    number = 0
    for name, job in enumerate(drawn):
        for line in Session.of(job, 4, name).lines(f"{name}"):
            number += 1
            recorded.add(number, json.loads(json.dumps(line)))
    for whole, part in zip(drawn, recorded.jobs(), strict=True):
        assert [turn.max_tokens for turn in part.turns] == [turn.max_tokens for turn in whole.turns[-4:]]
        said = [each["content"] for turn in part.turns for each in turn.messages if each["role"] == "user"]
        assert said == [turn.prompt for turn in whole.turns]
        assert part.turns[0].messages[0] == {"role": "system", "content": whole.system}


def test_sizes_follow_the_tokenizer_and_the_models_layers() -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    session = Session.of(agent_sessions(1, 400, None, 0.0, SEED)[0], 4, 0)
    words = sum(len(each["content"].split()) for each in session.past)
    assert session.tokens(tokenizer) > words > 200
    assert token_bytes(EMBEDDED, 4) == 2 * token_bytes(EMBEDDED, 2)
    sizes = Sizes(64_000, 1500, 64, 1 << 20)
    assert sizes.pages(8) == int(1.2 * 8000) // 16 and sizes.pages(1) == int(1.2 * 1500) // 16
    assert sizes.host_gb == pytest.approx(65.625)


def test_ways_are_compared() -> None:
    def figures(rate: float, cached: float) -> dict[str, float]:
        of = {"median_ttft_ms": 1.0, "p90_ttft_ms": 2.0, "duration": 3.0, "failed": 0}
        return {**of, "output_throughput": rate, "cache_hit_rate": cached}

    lines = list(report({"few": figures(2, 0.1), "tiers": figures(7, 0.6), "all": figures(9, 0.8)}))
    assert lines[-2:] == ["tiers are 3.50 times as fast as few", "tiers have 0.750 of what all has cached"]
    assert len(list(report({"few": figures(2, 0.1)}))) == 2
