"""What a run sends: the same for a seed, whatever the vocabulary. Malformed lines of files are named."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.bench.agents import WORDS
from eyas.bench.cases import make_case
from eyas.bench.datasets import BLOCK_TOKENS, DATASETS, DatasetOptions
from eyas.bench.jobs import LoadJob, arrivals, draw_lengths, fit, generator, poisson, unlike
from eyas.common.config import NANO
from eyas.common.errors import ConfigError

TRACE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 600, "output_length": 9, "hash_ids": [0, 4]},
]


def lengths(jobs: list[LoadJob]) -> list[tuple[int, int]]:
    return [(len(turn.prompt), turn.max_tokens) for job in jobs for turn in job.turns]


def ids(job: LoadJob) -> tuple[int, ...]:
    (turn,) = job.turns
    assert isinstance(turn.prompt, tuple)
    return turn.prompt


def lines(path: Path, *values: object) -> Path:
    path.write_text(
        "".join(value if isinstance(value, str) else json.dumps(value) + "\n" for value in values)
    )
    return path


# --- cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [4096, 128256])
@pytest.mark.parametrize(
    ("name", "tokens_in", "tokens_out", "first"),
    [
        ("s1k", 104_322, 99_701, [(276, 49), (639, 64), (497, 877)]),
        ("s8k", 799_379, 93_099, [(2202, 328), (2550, 58), (7847, 549)]),
    ],
)
def test_an_open_case_is_the_one_that_other_servers_were_measured_with(
    vocab_size: int, name: str, tokens_in: int, tokens_out: int, first: list[tuple[int, int]]
) -> None:
    drawn = lengths(fit(make_case(name).jobs, vocab_size))
    assert drawn[:3] == first
    assert tuple(map(sum, zip(*drawn, strict=True))) == (tokens_in, tokens_out)


def test_ids_and_arrivals_of_an_open_case_are_known_too() -> None:
    jobs = fit(make_case("s1k").jobs, 4096)
    assert ids(jobs[0])[:5] == (1068, 762, 3014, 2055, 109)
    dues = [job.due_s for job in jobs]
    assert dues[:3] == [0.0, 0.008370913462046579, 0.1428928806778382]
    assert dues[-1] == pytest.approx(13.565305922883786, rel=1e-12)
    assert all(job.due_s == 0.0 for job in make_case("inf1k").jobs)


def test_a_case_of_a_shape_is_known() -> None:
    case = make_case("2x3x5x2")
    assert [ids(job) for job in fit(case.jobs, 4096)] == [(1277, 1068, 762), (3014, 2055, 109)]
    assert (case.concurrency, case.rate, {job.turns[0].max_tokens for job in case.jobs}) == (2, None, {5})


@pytest.mark.parametrize("name", ["bs2", "1x2x3", "0x1x1x1", "chat0", ""])
def test_what_is_no_case_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="CASE"):
        make_case(name)


# --- jobs --------------------------------------------------------------------------------------------------


def test_lengths_are_uniform_from_the_ratio_on() -> None:
    drawn = draw_lengths(generator(1, "lengths"), 10, 0.55, 2000)
    assert (min(drawn), max(drawn)) == (5, 10)
    assert all(250 < drawn.count(length) < 420 for length in range(5, 11))
    assert set(draw_lengths(generator(1, "lengths"), 10, 0.0, 500)) == set(range(1, 11))
    assert set(draw_lengths(generator(1, "lengths"), 10, 1.0, 20)) == {10}


def test_arrivals_are_drawn_by_the_seed_alone() -> None:
    jobs = [LoadJob.single((1,), 1)] * 4
    dues = arrivals(jobs, 2.0, seed=1)
    assert dues == arrivals([LoadJob.single("a text", 9)] * 4, 2.0, seed=1)
    assert dues[0] == 0.0 and dues != arrivals(jobs, 2.0, seed=2)
    assert [due / 2 for due in dues] == pytest.approx(arrivals(jobs, 4.0, seed=1))
    assert arrivals(jobs, float("inf"), seed=1) == [0.0] * 4
    gaps = list(itertools.islice(poisson(generator(3, "arrivals"), 16.0), 4001))
    assert gaps[-1] / 4000 == pytest.approx(1 / 16, rel=0.05)


def test_what_a_job_says_itself_comes_before_the_arrivals() -> None:
    jobs = [LoadJob.single((1,), 1, due_s=5.0), LoadJob.single((1,), 1)]
    assert arrivals(jobs, float("inf"), seed=1) == [5.0, 0.0]


def test_a_warm_up_prompt_shares_no_prefix() -> None:
    assert unlike((1, 2, 3)) == (3, 2, 1)
    assert unlike("a b c") == "c b a"


# --- datasets ----------------------------------------------------------------------------------------------


def test_random_is_pinned_whatever_the_vocabulary() -> None:
    drawn = DATASETS["random"].jobs(DatasetOptions(count=3, seed=1))
    assert lengths(drawn) == [(160, 8), (148, 34), (60, 76)]
    assert ids(drawn[0])[:3] == (49508, 26898, 126574)
    for size, first in {4096: (476, 2382, 3994), 128256: (49508, 26898, 126574)}.items():
        fitted = fit(drawn, size)
        assert lengths(fitted) == lengths(drawn)
        assert ids(fitted[0])[:3] == first
        assert all(10 <= id < size for job in fitted for id in ids(job))
    assert lengths(DATASETS["random"].jobs(DatasetOptions(count=3, seed=2))) != lengths(drawn)


def test_more_requests_begin_with_the_same_ones() -> None:
    few, many = (DATASETS["random"].jobs(DatasetOptions(count=count)) for count in (3, 9))
    assert many[:3] == few


def test_other_lengths_of_answers_leave_prompts_alone() -> None:
    short, long = (
        DATASETS["random"].jobs(DatasetOptions(count=5, output_len=length)) for length in (4, 4000)
    )
    assert [ids(job) for job in short] == [ids(job) for job in long]


def test_multi_turn_invents_conversations() -> None:
    drawn = DATASETS["multi-turn"].jobs(DatasetOptions(count=3, turns=2, input_len=8, range_ratio=1.0))
    assert [len(job.turns) for job in drawn] == [2, 2, 2]
    said = [str(turn.prompt).split() for job in drawn for turn in job.turns]
    assert all(len(words) == 8 and set(words) <= set(WORDS) for words in said)
    assert len({tuple(words) for words in said}) == 6


def test_a_trace_keeps_its_times_and_shared_blocks(tmp_path: Path) -> None:
    path = lines(tmp_path / "trace.jsonl", TRACE[0], "\n", *TRACE[1:])
    drawn = DATASETS["trace"].jobs(DatasetOptions(path=path))
    assert [job.due_s for job in drawn] == pytest.approx([2.0, 0.0, 0.5])
    assert lengths(drawn) == [(1100, 7), (1024, 5), (600, 9)]
    first, second, third = map(ids, drawn)
    assert first[:1024] == second and second[:BLOCK_TOKENS] == third[:BLOCK_TOKENS]
    assert second[BLOCK_TOKENS : BLOCK_TOKENS + 8] != third[BLOCK_TOKENS : BLOCK_TOKENS + 8]
    assert [job.due_s for job in DATASETS["trace"].jobs(DatasetOptions(path=path, slowdown=3.0))] == [
        6.0,
        0.0,
        1.5,
    ]
    assert ids(DATASETS["trace"].jobs(DatasetOptions(path=path, seed=2))[1]) != second
    assert len(DATASETS["trace"].jobs(DatasetOptions(path=path, count=2))) == 2


def conversation(*said: str) -> dict[str, object]:
    turns = [
        {"from": who, "value": text}
        for who, text in zip(itertools.cycle(["human", "gpt"]), said, strict=False)
    ]
    return {"conversations": turns}


LONG = "one two three four five six"
TALKS = [
    conversation(LONG, "a short answer", "and a second question", "with an answer"),
    conversation("nothing follows this one at all"),
    conversation("hi", LONG),  # one token
    conversation(LONG * 10, LONG),
]


def test_sharegpt_is_filtered_as_sglang_filters(tmp_path: Path) -> None:
    path = lines(tmp_path / "talks.json", TALKS)
    drawn = DATASETS["sharegpt"].jobs(DatasetOptions(path=path))
    assert sorted((str(job.turns[0].prompt)[:9], job.turns[0].max_tokens) for job in drawn) == [
        ("one two t", 4),
        ("one two t", 7),
    ]
    assert lengths(DATASETS["sharegpt"].jobs(DatasetOptions(path=path, context_len=20))) == [(len(LONG), 4)]
    assert {
        n for _, n in lengths(DATASETS["sharegpt"].jobs(DatasetOptions(path=path, fixed_output_len=9)))
    } == {9}
    orders = {
        tuple(lengths(DATASETS["sharegpt"].jobs(DatasetOptions(path=path, seed=seed)))) for seed in range(8)
    }
    assert len(orders) == 2, "the seed draws the order"


def test_sharegpt_counts_by_a_tokenizer_where_there_is_one(tmp_path: Path) -> None:
    path = lines(tmp_path / "talks.json", TALKS[:1])
    (job,) = DATASETS["sharegpt"].jobs(DatasetOptions(path=path, tokenizer=NANO))
    assert job.turns[0].max_tokens == 3, "'a short answer' is three words of that vocabulary"


def test_multi_turn_takes_whole_conversations_of_a_file(tmp_path: Path) -> None:
    path = lines(tmp_path / "talks.json", TALKS[:2])
    (job,) = DATASETS["multi-turn"].jobs(DatasetOptions(path=path))
    assert [turn.prompt for turn in job.turns] == [LONG, "and a second question"]
    assert len(DATASETS["multi-turn"].jobs(DatasetOptions(path=path, turns=1))[0].turns) == 1


def test_schema_has_a_set_of_its_own_or_a_file(tmp_path: Path) -> None:
    built_in = DATASETS["schema"].jobs(DatasetOptions(count=8))
    assert len(built_in) == 8 and built_in[0] == built_in[6]
    assert all(job.may_stop and job.schema is not None and job.schema["type"] for job in built_in)
    path = lines(tmp_path / "s.jsonl", {"prompt": "p", "schema": {"type": "object"}, "max_tokens": 3})
    (job,) = DATASETS["schema"].jobs(DatasetOptions(path=path))
    assert (job.turns[0].prompt, job.turns[0].max_tokens, job.schema) == ("p", 3, {"type": "object"})


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("trace", "{", "line 2: no JSON"),
        ("trace", "[1]", "line 2: not a JSON object"),
        ("trace", {**TRACE[0], "timestamp": "x"}, "line 2: timestamp is not a number"),
        ("trace", {**TRACE[0], "timestamp": float("inf")}, "line 2: timestamp is not a number"),
        ("trace", {**TRACE[0], "input_length": 0}, "line 2: input_length is not a positive whole number"),
        ("trace", {**TRACE[0], "hash_ids": [0]}, "line 2: input_length 1100 needs 3 hash_ids, not 1"),
        ("trace", {**TRACE[0], "hash_ids": ["a", "b", "c"]}, "line 2: hash_ids is not a list of whole"),
        ("schema", {"prompt": 1, "schema": {}}, "line 2: prompt is not a text"),
        ("schema", {"prompt": "p", "schema": []}, "line 2: schema is not a JSON object"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, name: str, wrong: object, says: str) -> None:
    good = TRACE[0] if name == "trace" else {"prompt": "p", "schema": {}}
    path = lines(tmp_path / "file.jsonl", good, wrong)
    with pytest.raises(ConfigError, match=says) as refused:
        DATASETS[name].jobs(DatasetOptions(path=path))
    assert str(path) in str(refused.value)


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"prompt": "one\u2028two", "schema": {}}\n', encoding="utf-8")
    (job,) = DATASETS["schema"].jobs(DatasetOptions(path=path))
    assert job.turns[0].prompt == "one\u2028two"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[\n{]", "line 2: no JSON"),
        ("{}", "no list of conversations"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 1 is no conversation"),
        ("[]", "no conversation that fits"),
    ],
)
@pytest.mark.parametrize("name", ["sharegpt", "multi-turn"])
def test_a_file_of_no_conversations_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DATASETS[name].jobs(DatasetOptions(path=lines(tmp_path / "talks.json", text)))


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda folder: DatasetOptions(), "--dataset-path: this dataset needs a file"),
        (lambda folder: DatasetOptions(path=folder / "none"), "none: No such file"),
        (lambda folder: DatasetOptions(path=folder), "Is a directory"),
    ],
)
def test_a_dataset_without_its_file_says_so(
    tmp_path: Path, draw: Callable[[Path], DatasetOptions], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        DATASETS["trace"].jobs(draw(tmp_path))


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "talks.json", TALKS)
    with pytest.raises(ConfigError, match="--tokenizer: "):
        DATASETS["sharegpt"].jobs(DatasetOptions(path=path, tokenizer=tmp_path))
