"""`eyas evals nano`: the held-out questions, asked of a running server over HTTP.

It knows OpenAI's chat API and the question sets; the questions and how they are judged are `heldout`'s.
"""

from __future__ import annotations

import asyncio

import httpx
from rich.console import Console

from eyas.common.errors import EyasError, Unavailable
from eyas.evals.heldout import Question, QuestionSet, question_sets, unbroken
from eyas.evals.table import Score, score_table

CONCURRENCY = 8
TIMEOUT_S = 120.0
LONGEST_ANSWER = 512
SEED = 1


def evaluate(url: str, size: int) -> int:
    """Prints a line a set; 0 if every bar is met. Raises EyasError if a question gets no answer."""
    scores = asyncio.run(_scores(url, size))
    Console(width=120).print(score_table(scores))
    return 0 if all(score.passed for score in scores) else 1


async def _scores(url: str, size: int) -> list[Score]:
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
        try:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            return [await _score(http, model, questions) for questions in question_sets(size, SEED)]
        except httpx.HTTPError as error:
            raise Unavailable(f"no answer from {url}: {error or type(error).__name__}") from error


async def _score(http: httpx.AsyncClient, model: str, questions: QuestionSet) -> Score:
    places = asyncio.Semaphore(CONCURRENCY)
    score = Score(questions.name, questions.bar)

    async def ask(question: Question) -> None:
        async with places:
            answer, ended = await _answer(http, model, question.prompt)
        score.add(question.judge(answer, question.expected), ended, unbroken(answer))

    await asyncio.gather(*map(ask, questions.questions))
    return score


async def _answer(http: httpx.AsyncClient, model: str, prompt: str) -> tuple[str, bool]:
    """The answer, and whether it ended its turn by itself."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": LONGEST_ANSWER,
    }
    reply = await http.post("/v1/chat/completions", json=body)
    if reply.status_code != 200:
        raise EyasError(f"HTTP {reply.status_code}: {reply.text[:200]}")
    choice = reply.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"] == "stop"
