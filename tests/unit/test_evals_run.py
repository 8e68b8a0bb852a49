"""`eyas eval` against scripted servers: what is asked, counted, written, compared, and the exit code."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from eyas import cli
from eyas.commands import USAGE_ERROR
from eyas.common.errors import ConfigError
from eyas.evals.asking import EvalSide, SideOutcome, TaskAnswer, read_side
from eyas.evals.questions import EvalQuestion, EvalTask
from eyas.evals.scores import JudgedOutcome, compare, figures, judge, mcnemar
from tests.unit.eval_files import CHOICES, PROBLEMS, write_problems, write_subject
from tests.unit.scripted_server import Body, scripted

USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 13,
    "completion_tokens_details": {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 12},
}
DRAFTED = {"usage": USAGE, "timings": {"verify_steps": 4}}


def asked(body: Body) -> str:
    """The last question of a prompt."""
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return str(text).split("Question: ")[-1].removesuffix("\nAnswer:")


def solve(body: Body) -> str:
    return f" {dict(PROBLEMS)[asked(body)]}"


@pytest.fixture
def problems(tmp_path: Path) -> tuple[str, ...]:
    return ("eval", "gsm8k", "--data", write_problems(tmp_path / "test.jsonl"), "--shots", "0")


def lines(path: Path) -> list[Body]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_gsm8k_is_asked_counted_and_written(
    problems: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    one_wrong = lambda body: " I think 7." if "bike" in asked(body) else solve(body)  # noqa: E731
    with scripted(one_wrong, DRAFTED) as server:
        rc = cli.main(
            [*problems, *server.flag, "--output-file", str(out), "--output-details", "--api-key", "k"]
        )
    (line,) = lines(out)
    assert rc == 0
    assert (line["task"], line["model"], line["num_requests"], line["completed"]) == (
        "gsm8k",
        "scripted",
        4,
        4,
    )
    settings = {"shots": 0, "chat": False, "limit": None, "max_tokens": None, "parallel": 8, "seed": 1}
    assert line == {**line, **settings, "temperature": 0.0}
    assert line["accuracy"] == line["accuracy_strict-match"] == line["accuracy_last-number"] == 0.75
    assert line["accuracy_stderr"] == pytest.approx(0.25)  # sqrt(0.75 * 0.25 / 3)
    assert (line["accept_rate"], line["accept_length"]) == (0.4, 3.0)  # 8 of 20 drafts, in 4 steps
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (200, 52)
    assert 0 < line["median_e2e_latency_ms"] <= line["p90_e2e_latency_ms"]
    assert line["output_throughput"] == pytest.approx(52 / line["duration"])
    assert [entry["right"] for entry in line["questions"]] == [True, True, False, True]
    assert line["questions"][2]["text"] == " I think 7."
    said = capsys.readouterr().out
    assert (
        "75.0%" in said and "25.0%" in said and "40% of drafts accepted; 3.00 tokens per verify step" in said
    )
    assert set(server.paths) == {"/v1/completions"} and set(server.keys) == {"Bearer k"}
    assert all(
        body == {**body, "model": "scripted", "temperature": 0.0, "max_tokens": 512} for body in server.bodies
    )
    assert not any("speculative" in body or "seed" in body for body in server.bodies)


def test_flags_reach_the_requests(problems: tuple[str, ...]) -> None:
    flags = ("--chat", "--no-speculative", "--temperature", "0.5", "--seed", "9", "--max-tokens", "33")
    with scripted(solve) as server:
        assert cli.main([*problems, *server.flag, *flags, "--model", "m", "--limit", "2"]) == 0
    assert server.paths == ["/v1/chat/completions"] * 2
    assert sorted(body.pop("seed") for body in server.bodies) == [9, 10]
    for body in server.bodies:
        del body["messages"]
        assert body == {
            "model": "m",
            "temperature": 0.5,
            "max_tokens": 33,
            "stop": ["Question:", "</s>", "<|im_end|>"],
            "speculative": False,
            "timings": True,
        }


def test_parallel_bounds_the_requests_at_a_time(problems: tuple[str, ...]) -> None:
    pair = threading.Barrier(2, timeout=10)  # the first two must be there together

    def meet(body: Body) -> str:
        pair.wait()
        return solve(body)

    with scripted(meet) as server:
        assert cli.main([*problems, *server.flag, "--parallel", "2"]) == 0
    assert server.at_once == 2


def test_failed_requests_are_counted_and_fail_the_command(
    problems: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = (429, {"error": {"message": "the queue is full"}})
    with scripted(lambda body: refusal if "bike" in asked(body) else solve(body)) as server:
        assert cli.main([*problems, *server.flag, "--output-file", str(tmp_path / "o.jsonl")]) == 1
    (line,) = lines(tmp_path / "o.jsonl")
    assert (line["completed"], line["failed"], line["accuracy"]) == (3, 1, 1.0)
    assert line["first_error"] == "HTTP 429: the queue is full"
    said = capsys.readouterr().out
    assert "1 of 4 requests FAILED, and count in no share: HTTP 429: the queue is full" in said


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((500, {"error": {"message": "broken"}}), "HTTP 500: broken"),
        ((404, "no such route"), 'HTTP 404: "no such route"'),
        ((200, {"choices": []}), "not an answer in OpenAI's shape"),
        ((200, [1]), "not an answer in OpenAI's shape"),
        ((200, b"\xff\xfe"), "not an answer in OpenAI's shape"),
        ((502, b"caf\xe9"), "HTTP 502: caf"),
    ],
)
def test_no_answer_at_all_is_an_error(
    problems: tuple[str, ...], reply: tuple[int, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(lambda body: reply) as server:
        assert cli.main([*problems, *server.flag]) == 1
    told = capsys.readouterr().err
    assert "no question was answered" in told and said in told


def test_a_server_that_is_not_there_is_named(
    problems: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = ("--url", "http://127.0.0.1:1")
    assert cli.main([*problems, *nowhere]) == 1
    assert "nothing listens at http://127.0.0.1:1" in capsys.readouterr().err


def test_another_server_gets_no_fields_of_eyas(
    problems: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(solve, models=(200, {"data": [{"id": "gpt", "owned_by": "another"}]})) as server:
        assert cli.main([*problems, *server.flag]) == 0
        assert not any("timings" in body for body in server.bodies)
        assert cli.main([*problems, *server.flag, "--against", "no-speculative"]) == 1
    assert f"no-speculative: {server.url} is not Eyas" in capsys.readouterr().err


def test_a_server_without_a_list_of_models_needs_a_name(
    problems: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(solve, models=(404, {})) as server:
        assert cli.main([*problems, *server.flag]) == 1
        assert "lists no model at /v1/models: name one with --model" in capsys.readouterr().err
        assert cli.main([*problems, *server.flag, "--model", "m"]) == 0


def test_a_wanted_key_is_named(problems: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(solve, models=(401, {"error": {"message": "no"}})) as server:
        assert cli.main([*problems, *server.flag]) == 1
    assert "wants an API key: give --api-key" in capsys.readouterr().err
    with scripted(solve, models=(503, {"error": {"message": "starting"}})) as server:
        assert cli.main([*problems, *server.flag, "--model", "m"]) == 1
    assert "HTTP 503: starting" in capsys.readouterr().err
    with scripted(solve, models=(502, b"caf\xe9")) as server:
        assert cli.main([*problems, *server.flag, "--model", "m"]) == 1
    assert "HTTP 502: caf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--require-identical",), "--require-identical: needs --against"),
        (("--output-details",), "--output-details: needs --output-file"),
        (("--output-file", "/no/such/folder/f"), "--output-file: /no/such/folder/f: No such file"),
        (("--temperature", "3"), "--temperature: 3.0 is not in 0 to 2"),
        (("--against", "nonsense"), "--against: 'nonsense' is none of a URL, model=ID"),
        (("--against", "speculative"), "--against: both sides are the same"),
    ],
)
def test_flags_that_do_not_fit(
    problems: tuple[str, ...], flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*problems, *flags]) == USAGE_ERROR
    assert said in capsys.readouterr().err


def test_mmlu_is_counted_per_subject(tmp_path: Path) -> None:
    for subject in ("x", "y"):
        folder = write_subject(tmp_path, subject, CHOICES)
    out = tmp_path / "o.jsonl"
    with scripted(lambda body: " A" if "about x" in body["prompt"] else " B") as server:
        flags = ("--shots", "1", "--output-file", str(out))
        assert cli.main(["eval", "mmlu", "--data", folder, *flags, *server.flag]) == 0
    (line,) = lines(out)
    assert line["groups"] == {"x": {"completed": 2, "right": 1}, "y": {"completed": 2, "right": 1}}
    assert line["accuracy"] == 0.5


def test_a_missed_bar_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(lambda body: "I do not know.") as server:
        assert cli.main(["eval", "nano", "--limit", "2", *server.flag]) == 1
    assert capsys.readouterr().out.count("MISS") == 8


# --- two sides ---------------------------------------------------------------------------------------------


def test_a_side_is_read_from_settings() -> None:
    first = EvalSide("http://a", "k", "m", True)
    assert read_side("no-speculative", first) == EvalSide("http://a", "k", "m", False)
    assert read_side("http://b:1/,model=n,api-key=z", first) == EvalSide("http://b:1", "z", "n", True)
    assert read_side("speculative", EvalSide("http://a", speculative=False)).speculative
    assert "api_key" not in repr(first)
    with pytest.raises(ConfigError, match="'model=' is none of"):
        read_side("model=", first)


def test_two_servers_are_compared(
    problems: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "o.jsonl"
    with scripted(solve) as right, scripted(lambda body: " 5") as other:
        flags = (*right.flag, "--against", f"{other.url},model=m", "--output-file", str(out))
        assert cli.main([*problems, *flags]) == 0
        assert cli.main([*problems, *flags, "--require-identical"]) == 1
        assert cli.main([*problems, *flags[:2], "--against", "model=m", "--require-identical"]) == 0
    first, second, *_ = lines(out)
    assert "against_first" not in first and (first["accuracy"], second["accuracy"]) == (1.0, 0.25)
    assert second["url"] == other.url and second["model"] == "m"
    assert second["against_first"] == {
        "compared": 4,
        "identical": 0,
        "only_first_right": 3,
        "only_second_right": 0,
        "p_value": 0.25,
    }
    assert "exact McNemar p = 0.25" in capsys.readouterr().out


def test_one_server_with_and_without_speculation(problems: tuple[str, ...]) -> None:
    with scripted(lambda body: " 6" if body.get("speculative") is False else " 5") as server:
        flags = (*server.flag, "--against", "no-speculative")
        assert cli.main([*problems, *flags]) == 0
        assert cli.main([*problems, *flags, "--require-identical"]) == 1
    assert sum(body.get("speculative") is False for body in server.bodies) == 8


@pytest.mark.parametrize(
    ("counts", "p_value"),
    [
        ((0, 0), 1.0),
        ((5, 5), 1.0),
        ((1, 9), 22 / 1024),
        ((9, 1), 22 / 1024),
        ((0, 10), 2 / 1024),
        ((4, 16), 0.011818),  # binomial test of 4 in 20
        ((700, 1300), 0.0),
    ],
)
def test_mcnemar_is_exact(counts: tuple[int, int], p_value: float) -> None:
    assert mcnemar(*counts) == pytest.approx(p_value, abs=1e-6)


def judged(*texts: str | None) -> JudgedOutcome:
    """Answers to as many questions, to each of which "yes" is right; None: the request failed."""
    questions = [EvalQuestion("?", "yes", str.__eq__) for _ in texts]
    answers = [TaskAnswer(error="gone") if text is None else TaskAnswer(text) for text in texts]
    task = EvalTask("t", tuple(questions), 1)
    return judge(task, SideOutcome(EvalSide("http://a"), 1.0, tuple(answers)), lambda: None)


def test_only_questions_that_both_answered_are_compared() -> None:
    found = compare(judged("yes", "no", "yes", None, "no"), judged("yes", "yes", None, "yes", "maybe"))
    assert (found.compared, found.identical) == (3, 1)
    assert (found.only_first_right, found.only_second_right) == (0, 1)


def test_without_drafts_there_is_no_acceptance() -> None:
    told = figures(judged("yes", None), details=False)
    assert told["accept_rate"] is told["accept_length"] is None and (told["completed"], told["failed"]) == (
        1,
        1,
    )
    assert figures(judged(None), details=False)["accuracy"] is None
