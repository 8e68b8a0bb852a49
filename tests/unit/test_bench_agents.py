"""Sessions of agents, invented and recorded: what they send and when, and what is counted turn by turn."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_stub import Script, serving

from eyas import cli
from eyas.bench.agents import TURNS, agent_sessions
from eyas.bench.backends import BACKENDS
from eyas.bench.cases import make_case
from eyas.bench.datasets import DATASETS, DatasetOptions
from eyas.bench.jobs import LoadJob
from eyas.bench.records import RequestRecord
from eyas.bench.turns import by_turn, hit_rate, table
from eyas.common.errors import ConfigError


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


def words(job: LoadJob) -> int:
    return len(job.system.split()) + sum(
        len(str(turn.prompt).split()) + turn.max_tokens for turn in job.turns
    )


def test_sessions_are_long_share_their_beginning_and_end_at_the_context() -> None:
    jobs = agent_sessions(24, 100_000, None, 1.0, seed=3)
    assert jobs[:2] == agent_sessions(2, 100_000, None, 1.0, 3) != agent_sessions(2, 100_000, None, 1.0, 4)
    lengths = [words(job) for job in jobs]
    assert max(lengths) <= 100_000 < 1.3 * max(lengths) and statistics.median(lengths) > 40_000
    assert all(len(job.turns) <= TURNS[1] for job in jobs)
    assert statistics.median(len(job.turns) for job in jobs) > TURNS[0]
    assert len({job.system for job in jobs}) == 1 and len(jobs[0].system.split()) == 6000
    begins = {" ".join(str(job.turns[0].prompt).split()[:2000]) for job in jobs}
    assert 1 < len(begins) <= 4, "projects"
    assert len({job.turns[0].prompt for job in jobs}) == 24
    thinks = [turn.think_s for job in jobs for turn in job.turns[1:]]
    assert 1 < statistics.median(thinks) < 3 and 20 < max(thinks) <= 120
    assert any(turn.subagents for job in jobs for turn in job.turns)
    assert sum(job.requests for job in jobs) > sum(len(job.turns) for job in jobs)


def test_sub_agents_go_on_from_the_conversation_and_their_parent_waits(url: str, script: Script) -> None:
    path = ("bench", "serve", "--url", url, "--dataset-name", "agents", "--num-prompts", "2")
    assert cli.main([*path, "--agent-context", "900", "--trace-slowdown", "1e-6", "--seed", "2"]) == 0
    asked = [body["messages"] for _, body in script.asked[1:]]
    jobs = agent_sessions(2, 900, None, 1e-6, 2)
    assert len(asked) == sum(job.requests for job in jobs)
    assert all(messages[0] == {"role": "system", "content": jobs[0].system} for messages in asked)
    for job in jobs:
        said: list[Any] = [asked[0][0]]
        for turn in job.turns:
            for subagent in turn.subagents:
                begins = [*said, {"role": "user", "content": subagent.turns[0].prompt}]
                assert begins in asked and asked.index(begins) < len(asked)
            said = [*said, {"role": "user", "content": turn.prompt}]
            assert said in asked
            if turn.subagents:
                ends = [{"role": "user", "content": each.turns[-1].prompt} for each in turn.subagents]
                before = [place for place, messages in enumerate(asked) if messages[-1] in ends]
                assert max(before) < asked.index(said)
            answer = "".join(f"{number} " for number in range(turn.max_tokens))
            said = [*said, {"role": "assistant", "content": answer}]


def jobs_of(path: Path, *lines: dict[str, Any], **options: Any) -> list[LoadJob]:
    path.write_text("\n".join(map(json.dumps, lines)))
    return DATASETS["agents"].jobs(DatasetOptions(path=path, **options))


def test_recorded_sessions_have_their_times_and_share_blocks(tmp_path: Path) -> None:
    one, two, alone = jobs_of(
        tmp_path / "trace.jsonl",
        {"session_id": "a", "input_length": 700, "output_length": 20, "hash_ids": [0, 1], "timestamp": 1000},
        {
            "session_id": "b",
            "input_length": 600,
            "output_length": 30,
            "hash_ids": [0, 2],
            "timestamp": 3000.0,
        },
        {"session_id": "a", "input_length": 40, "output_length": 5, "hash_ids": [3], "delay": 2500.0},
        {"session_id": "a", "input_length": 40, "output_length": 5, "timestamp": 5000},
        {"input_length": 512, "output_length": 9, "hash_ids": [0], "timestamp": 2000},
        slowdown=2.0,
    )
    assert [job.due_s for job in (one, two, alone)] == [0.0, 4.0, 2.0]
    assert [turn.think_s for turn in one.turns] == [0.0, 5.0, 3.0]
    assert [turn.max_tokens for turn in one.turns] == [20, 5, 5]
    texts = [str(job.turns[0].prompt).split() for job in (one, two, alone)]
    assert [len(text) for text in texts] == [700, 600, 512]
    assert texts[0][:512] == texts[1][:512] == texts[2] and texts[0][512:] != texts[1][512:612]


def test_recorded_messages_are_sent_as_they_are(url: str, script: Script, tmp_path: Path) -> None:
    hello, hi, bye = (
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("tool", "c"))
    )
    whole = {"session_id": "w", "output_length": 2}
    delta = {"session_id": "d", "output_length": 2, "message_mode": "delta"}
    jobs_of(
        tmp_path / "trace.jsonl",
        {**whole, "messages": [hello], "timestamp": 0},
        {**delta, "messages": [hello], "timestamp": 0},
        {**whole, "messages": [hello, hi, bye], "delay": 1},
        {**delta, "messages": [bye], "delay": 1},
    )
    flags = ("--url", url, "--dataset-name", "agents", "--dataset-path", str(tmp_path / "trace.jsonl"))
    assert cli.main(["bench", "serve", *flags, "--warmup-requests", "0"]) == 0
    asked = [body["messages"] for _, body in script.asked]
    answered = {"role": "assistant", "content": "0 1 "}
    assert sorted(asked, key=len)[:2] == [[hello], [hello]]
    assert [hello, hi, bye] in asked and [hello, answered, bye] in asked


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"session_id": 7}, "session_id is not a text"),
        ({"delay": -1}, "delay is not a number from 0 on"),
        ({"input_length": 0}, "input_length is not a positive whole number"),
        ({"input_length": 513, "hash_ids": [1]}, "input_length 513 needs 2 hash_ids, not 1"),
        ({"messages": []}, "messages is not a list of objects with a role"),
        (
            {"messages": [{"role": "user"}], "message_mode": "all"},
            "message_mode is none of history and delta",
        ),
        ({"session_id": "a"}, "it has neither a delay nor a timestamp"),
        ({"session_id": "a", "delay": 1, "messages": [{"role": "user"}]}, "its session mixes"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: dict[str, Any], says: str) -> None:
    usual = {"input_length": 5, "output_length": 5}
    first = usual | {"session_id": "a", "timestamp": 0}
    with pytest.raises(ConfigError, match=f"--dataset-path: .*, line 2: {says}"):
        jobs_of(tmp_path / "trace.jsonl", first, usual | line)


def test_what_was_cached_is_read_and_counted_by_turn() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    event = json.dumps({"choices": [], "usage": usage}).encode()
    assert BACKENDS["sglang-oai-chat"].read(event).cached_tokens == 8
    meta = json.dumps({"text": "a", "meta_info": {"prompt_tokens": 10, "cached_tokens": 4}}).encode()
    assert BACKENDS["sglang"].read(meta).cached_tokens == 4
    records = [
        RequestRecord(100, 5, ttft_s=0.2, latency_s=0.6, cached_tokens=cached, turn=turn)
        for turn, cached in ((1, 0), (2, 50), (3, 90), (12, 100))
    ]
    assert hit_rate(records) == 0.6 and hit_rate([RequestRecord(9, 9)]) is None
    rows = by_turn(records)
    assert [(row["first_turn"], row["last_turn"], row["cache_hit_rate"]) for row in rows] == [
        (1, 1, 0.0),
        (2, 3, 0.7),
        (11, 12, 1.0),
    ]
    assert rows[0]["median_tokens_per_s"] == pytest.approx(10) and by_turn(records[:1]) == []
    assert "2-3" in "\n".join(table(rows)) and "70.0%" in "\n".join(table(rows))


def test_the_small_case_is_one_of_the_suite() -> None:
    case = make_case("agents4")
    assert case.concurrency == len(case.jobs) == 4
    assert all(len(job.turns) <= 12 and words(job) <= 640 for job in case.jobs)
