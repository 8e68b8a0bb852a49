"""`eyas evals nano`: the held-out questions, asked through an OpenAI-compatible server.

It knows one endpoint, `/v1/chat/completions`, at temperature 0. It refuses to know models and questions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.progress import Progress

from eyas.client.reach import bearer, nothing_listens
from eyas.common.errors import EyasError
from eyas.evals.heldout import Question, QuestionSet, question_sets, unbroken
from eyas.evals.table import Score, score_table

LONGEST_ANSWER = 512
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Evaluation:
    """What to ask which server: `size` questions per set, drawn by `seed`; `parallel` requests at a time.

    `model` None: the first that the server at `url` lists.
    """

    url: str
    api_key: str | None
    model: str | None
    size: int
    parallel: int
    seed: int


def ask(client: httpx.Client, model: str, question: Question) -> tuple[str, bool]:
    """The greedy answer, and whether the model ended its turn by itself."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.prompt}],
        "temperature": 0,
        "max_tokens": LONGEST_ANSWER,
    }
    reply = client.post("/v1/chat/completions", json=body)
    choice = reply.json()["choices"][0]
    return choice["message"]["content"] or "", choice["finish_reason"] == "stop"


def score_set(client: httpx.Client, model: str, questions: QuestionSet, parallel: int) -> Score:
    """Asks one set, `parallel` questions at a time."""
    score = Score(questions.name, questions.bar)
    with ThreadPoolExecutor(parallel) as pool:
        answers = pool.map(lambda question: ask(client, model, question), questions.questions)
        for question, (answer, ended) in zip(questions.questions, answers, strict=True):
            score.add(question.judge(answer, question.expected), ended, unbroken(answer))
    return score


def evaluate(plan: Evaluation) -> int:
    """Asks every set and prints the scores. Gives 1 if a bar is missed, else 0.

    Raises EyasError if nothing listens there or a request is refused.
    """
    sets = question_sets(plan.size, plan.seed)
    scores = []
    with _connected(plan) as client, Progress(console=Console(stderr=True)) as bar:
        model = plan.model or client.get("/v1/models").json()["data"][0]["id"]
        for questions in bar.track(sets, description="held-out sets"):
            scores.append(score_set(client, model, questions, plan.parallel))
    Console().print(score_table(scores))
    return 0 if all(score.passed for score in scores) else 1


@contextlib.contextmanager
def _connected(plan: Evaluation) -> Iterator[httpx.Client]:
    """A client of the server. Its failures become EyasErrors."""
    hooks = {"response": [httpx.Response.raise_for_status]}
    try:
        with httpx.Client(
            base_url=plan.url,
            headers=bearer(plan.api_key),
            timeout=TIMEOUT_S,
            event_hooks=hooks,
            trust_env=False,
        ) as client:
            yield client
    except httpx.ConnectError as error:
        raise nothing_listens(plan.url) from error
    except httpx.HTTPError as error:
        raise EyasError(f"{plan.url}: {error}") from error
