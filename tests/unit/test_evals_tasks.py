"""Datasets become the public prompts, bad files are named by line, and judges bear tricky answers."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pytest

from eyas import cli
from eyas.common.errors import ConfigError
from eyas.evals import gsm8k, humaneval, mmlu, nano
from eyas.evals.guarded import SUCCESS
from eyas.evals.questions import EvalTask
from tests.unit.eval_files import CHOICES, PROBLEMS, write_problems, write_subject

HEAD = 'def double(x: int) -> int:\n    """Twice x."""\n'
FUNCTION = {
    "prompt": HEAD,
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(-1) == -2\n",
}


def args(*flags: str) -> argparse.Namespace:
    return cli._parser().parse_args(["eval", *flags])


# --- gsm8k -------------------------------------------------------------------------------------------------


def gsm8k_task(*flags: str) -> EvalTask:
    return gsm8k.load(args("gsm8k", *flags))


def test_the_gsm8k_prompt_is_the_public_one(tmp_path: Path) -> None:
    test = write_problems(tmp_path / "test.jsonl", PROBLEMS[2:])
    train = write_problems(tmp_path / "train.jsonl", PROBLEMS[:2])
    task = gsm8k_task("--data", test, "--train", train, "--shots", "2")
    assert task.questions[0].prompt == (
        "Question: A crate holds 12 pears. How many pears do 3 crates hold?\n"
        "Answer: 3 crates hold 3*12=<<3*12=36>>36.\n#### 36\n\n"
        "Question: Ida had 9 coins and lost 4. How many are left?\n"
        "Answer: She has 9-4=<<9-4=5>>5 coins left.\n#### 5\n\n"
        "Question: A bike costs $1,250. What do 2 bikes cost?\nAnswer:"
    )
    assert [question.expected for question in task.questions] == ["2,500", "-5"]
    assert (task.stop[0], task.max_tokens, task.chat) == ("Question:", 512, False)


def test_without_a_train_file_the_examples_are_not_asked(tmp_path: Path) -> None:
    task = gsm8k_task("--data", write_problems(tmp_path / "t.jsonl"), "--shots", "3")
    assert len(task.questions) == 1 and task.questions[0].prompt.count("Question:") == 4
    assert len(gsm8k_task("--data", str(tmp_path / "t.jsonl"), "--shots", "0", "--limit", "2").questions) == 2


@pytest.mark.parametrize(
    ("answer", "expected", "strict", "flexible", "last"),
    [
        (" 2*1250=2500.\n#### 2,500", "2,500", True, True, True),
        (" That makes $2,500.", "2,500", False, True, True),
        (" That makes $2,500.00", "2,500", False, False, False),
        ("#### 5\n\nCheck: 9 - 5 = 4", "5", True, False, False),
        ("#### 4\n#### 5", "5", False, True, True),
        ("It is -5 degrees.", "-5", False, True, True),
        ("It is 5 degrees.", "-5", False, False, True),
        ("#### -5", "5", False, False, True),
        ("The answer is 36!", "36", False, True, True),
        ("####36", "36", False, True, True),
        ("I do not know.", "36", False, False, False),
        ("Well... ", "36", False, False, False),
        ("1" * 5000, "36", False, False, False),
        ("", "36", False, False, False),
    ],
)
def test_judges_of_numbers(answer: str, expected: str, strict: bool, flexible: bool, last: bool) -> None:
    assert gsm8k.strict_match(answer, expected) is strict
    assert gsm8k.flexible_extract(answer, expected) is flexible
    assert gsm8k.last_number(answer, expected) is last


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"test\.jsonl:2: not JSON"),
        ("[1]", r"test\.jsonl:2: not a JSON object"),
        ('{"question": "Why?"}', r'test\.jsonl:2: the field "answer" is missing'),
        ('{"question": "Why?", "answer": 4}', r'test\.jsonl:2: the field "answer" .* is not text'),
        ('{"question": "Why?", "answer": "4"}', r"test\.jsonl:2: the answer does not end in \"#### NUMBER\""),
        ('{"question": "Why?", "answer": "#### "}', r"test\.jsonl:2: the answer does not end"),
        ('{"question": "Why?", "answer": "#### \\ud800 1"}', r'test\.jsonl:2: the field "answer" holds half'),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": "Q", "answer": "#### 1"}) + f"\n{line}\n")
    with pytest.raises(ConfigError, match=said):
        gsm8k_task("--data", str(path), "--shots", "1")


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl cannot be read: No such file"):
        gsm8k_task("--data", str(tmp_path / "gone.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no question"):
        gsm8k_task("--data", str(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match="--shots: 4 worked examples and a question are more"):
        gsm8k_task("--data", write_problems(tmp_path / "few.jsonl"), "--shots", "4")
    (tmp_path / "odd.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"odd\.jsonl is not UTF-8"):
        gsm8k_task("--data", str(tmp_path / "odd.jsonl"))


def test_a_line_may_hold_any_character(tmp_path: Path) -> None:
    row = {"question": "One\u2028line?", "answer": "#### 1"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    assert (
        "One\u2028line?"
        in gsm8k_task("--data", str(tmp_path / "t.jsonl"), "--shots", "0").questions[0].prompt
    )


# --- mmlu --------------------------------------------------------------------------------------------------


def mmlu_task(*flags: str) -> EvalTask:
    return mmlu.load(args("mmlu", *flags))


def test_the_mmlu_prompt_is_the_public_one(tmp_path: Path) -> None:
    folder = write_subject(tmp_path, "plain_words", CHOICES)
    task = mmlu_task("--data", folder, "--shots", "1")
    assert task.questions[1].prompt == (
        "The following are multiple choice questions (with answers) about plain words.\n\n"
        "Which is a colour, if any?\nA. red\nB. two, or three\nC. cold\nD. fast\nAnswer: A\n\n"
        "2 + 2\nA. 3\nB. 4\nC. 5\nD. 6\nAnswer:"
    )
    assert [(q.expected, q.group) for q in task.questions] == [("A", "plain_words"), ("B", "plain_words")]
    assert task.max_tokens == 1


def test_subjects_are_chosen_and_limited(tmp_path: Path) -> None:
    for subject in ("b", "a"):
        folder = write_subject(tmp_path, subject, CHOICES)
    assert [q.group for q in mmlu_task("--data", folder, "--shots", "0").questions] == ["a", "a", "b", "b"]
    chosen = mmlu_task("--data", folder, "--shots", "0", "--subjects", "b", "--limit", "1")
    assert [q.group for q in chosen.questions] == ["b"]
    with pytest.raises(ConfigError, match="--subjects: 'c' is none of a, b"):
        mmlu_task("--data", folder, "--subjects", "c")


def test_unusable_mmlu_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no test/SUBJECT_test.csv"):
        mmlu_task("--data", str(tmp_path))
    folder = write_subject(tmp_path, "a", ["q,1,2,3,4,A", "q,1,2,3,A"])
    with pytest.raises(ConfigError, match=r"a_test\.csv:2: not a question, 4 choices and a letter"):
        mmlu_task("--data", folder)
    write_subject(tmp_path, "a", ["q,1,2,3,4,E"])
    with pytest.raises(ConfigError, match=r"a_test\.csv:1: not a question"):
        mmlu_task("--data", folder)
    write_subject(tmp_path, "a", [f'"{"q" * 200_000}", 1,2,3,4,A'])
    with pytest.raises(ConfigError, match=r"a_test\.csv:1: field larger than field limit"):
        mmlu_task("--data", folder)
    write_subject(tmp_path, "a", CHOICES)
    with pytest.raises(ConfigError, match="--shots: a has 2 worked examples"):
        mmlu_task("--data", folder)


@pytest.mark.parametrize(
    ("answer", "right"),
    [(" B", True), ("B", True), ("B.", True), ("(B)", True), ("\n**B**", True), (" A", False), ("", False)]
    + [("Because", False), ("b", False), ("The answer is B", False)],
)
def test_the_first_letter_is_the_answer(answer: str, right: bool) -> None:
    assert mmlu.chooses(answer, "B") is right


# --- humaneval ---------------------------------------------------------------------------------------------


def test_humaneval_runs_code_only_if_allowed(tmp_path: Path) -> None:
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(FUNCTION).encode()))
    with pytest.raises(ConfigError, match="--allow-code-execution: without it"):
        humaneval.load(args("humaneval", "--data", str(packed)))
    allowed = ("humaneval", "--data", str(packed), "--allow-code-execution")
    task = humaneval.load(args(*allowed))
    assert task.questions[0].prompt == HEAD and "\ndef" in task.stop
    assert "```python\n" + HEAD in humaneval.load(args(*allowed, "--chat")).questions[0].prompt


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return x + x\n", True),
        ("    return x * 3\n", False),
        ("```python\ndef double(x):\n    return x + x\n```\nIt adds.", True),
        ("Here it is:\n```\n    return x + x\n```", True),
        ("```python\ndef double(x):\n    return x + x", True),
        ("It adds x to itself.", False),
        ("    raise SystemExit(0)\n", False),
        (f"    raise SystemExit({SUCCESS})\n", False),
        ("    return twice(x)\ndef twice(x: Undefined):\n    return x + x\n", False),
        ("    return x + x\nimport sys\nsys.exit(0)\n", False),
        ("    import socket\n    socket.socket()\n    return x + x\n", False),
        ("    import os\n    os.system('true')\n    return x + x\n", False),
        ("    import subprocess\n    subprocess.run('true')\n    return x + x\n", False),
        ("    open('/tmp/eyas-was-here', 'w')\n    return x + x\n", False),
        ("    [0] * 10**9\n    return x + x\n", False),
        ("    print('x' * 10**6)\n    return x + x\n", True),
    ],
)
def test_functions_are_run_and_held_back(answer: str, right: bool) -> None:
    assert humaneval.passes(FUNCTION, answer, "double") is right


def test_a_program_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.evals.humaneval.WALL_S", 1.0)
    assert not humaneval.passes(FUNCTION, "    while True: pass\n", "double")


# --- nano --------------------------------------------------------------------------------------------------


def test_the_held_out_sets_are_groups_with_bars() -> None:
    task = nano.load(args("nano", "--limit", "3"))
    assert len(task.questions) == 24 and set(task.bars) == {question.group for question in task.questions}
    assert task.chat and task.bars["capitals"] == 0.95
    assert (
        task
        == nano.load(args("nano", "--limit", "3"))
        != nano.load(args("nano", "--limit", "3", "--seed", "2"))
    )
