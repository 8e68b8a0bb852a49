"""`python -m eyas.evals.nano --url URL`: the held-out questions, asked through an OpenAI-compatible server.

Knows one endpoint, `/v1/chat/completions`, greedy. Knows no model and no question.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import httpx
from rich.console import Console
from rich.progress import Progress

from eyas.evals.heldout import Question, QuestionSet, question_sets, unbroken
from eyas.evals.table import Score, score_table

LONGEST_ANSWER = 512
TIMEOUT_S = 120.0


def ask(client: httpx.Client, model: str, question: Question) -> tuple[str, bool]:
    """The greedy answer, and whether the model ended its turn by itself."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.prompt}],
        "temperature": 0,
        "max_tokens": LONGEST_ANSWER,
    }
    reply = client.post("/v1/chat/completions", json=body)
    reply.raise_for_status()
    choice = reply.json()["choices"][0]
    return choice["message"]["content"] or "", choice["finish_reason"] == "stop"


def score_set(client: httpx.Client, model: str, questions: QuestionSet, parallel: int) -> Score:
    """Ask one set, some questions at a time."""
    score = Score(questions.name, questions.bar)
    with ThreadPoolExecutor(parallel) as pool:
        answers = pool.map(lambda question: ask(client, model, question), questions.questions)
        for question, (answer, ended) in zip(questions.questions, answers, strict=True):
            score.add(question.judge(answer, question.expected), ended, unbroken(answer))
    return score


def main() -> None:
    """The command line; the exit status is 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m eyas.evals.nano", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="eyas-nano")
    parser.add_argument("--api-key")
    parser.add_argument("--size", type=int, default=50, help="questions a set")
    parser.add_argument("--parallel", type=int, default=8, help="requests at a time")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    headers = {"Authorization": f"Bearer {given.api_key}"} if given.api_key else {}
    sets, scores = question_sets(given.size, given.seed), []
    with httpx.Client(base_url=given.url, headers=headers, timeout=TIMEOUT_S) as client, Progress() as bar:
        for questions in bar.track(sets, description="held-out sets"):
            scores.append(score_set(client, given.model, questions, given.parallel))
    Console().print(score_table(scores))
    raise SystemExit(0 if all(score.passed for score in scores) else 1)


if __name__ == "__main__":
    main()
