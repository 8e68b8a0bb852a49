"""Answers judged and counted: right ones per group, speed, two sides compared, and how it is printed.

Failed requests are counted, and enter no share and no latency. Of two sides that were asked the same
questions it counts where one is right and the other is not; whether that is chance, McNemar's exact test
says.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from eyas.evals.asking import SideOutcome, TaskAnswer
from eyas.evals.questions import EvalTask

JUDGES = 2  # at a time: some run programs
ENDED_BAR = 0.99  # where a group has a bar: the share of answers that must end their turn by themselves


@dataclass(frozen=True)
class JudgedOutcome:
    """One side's outcome, and for each question whether the answer is right; None where none came."""

    task: EvalTask
    outcome: SideOutcome
    right: tuple[bool | None, ...]

    @property
    def answered(self) -> list[TaskAnswer]:
        """The answers that came."""
        return [answer for answer in self.outcome.answers if not answer.error]

    @property
    def errors(self) -> list[str]:
        """The errors of the requests that were not answered."""
        return [answer.error for answer in self.outcome.answers if answer.error]

    def scores(self) -> list[GroupScore]:
        """A score per group if the questions have groups, then one for all of them."""
        groups: dict[str, GroupScore] = {}
        total = GroupScore(self.task.metric)
        for question, answer, right in zip(
            self.task.questions, self.outcome.answers, self.right, strict=True
        ):
            name = question.group
            group = groups.setdefault(name, GroupScore(name, self.task.bars.get(name)))
            if right is not None:
                for score in (group, total):
                    score.add(right, answer.ended, unbroken(answer.text))
        return [*(groups.values() if any(groups) else ()), total]

    def other_scores(self) -> list[GroupScore]:
        """The scores by the task's other judges."""
        scores = []
        for name, judge in self.task.also.items():
            score = GroupScore(name)
            for question, answer in zip(self.task.questions, self.outcome.answers, strict=True):
                if not answer.error:
                    right = judge(answer.text, question.expected)
                    score.add(right, answer.ended, unbroken(answer.text))
            scores.append(score)
        return scores

    @property
    def accept_rate(self) -> float | None:
        """The share of drafted tokens that were accepted; None where usage tells of no drafts."""
        accepted = sum(answer.accepted for answer in self.answered)
        offered = accepted + sum(answer.rejected for answer in self.answered)
        return accepted / offered if offered else None

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step, its own included; None where the server tells of no such steps."""
        speculative = [answer for answer in self.answered if answer.verify_steps]
        steps = sum(answer.verify_steps or 0 for answer in speculative)
        return 1 + sum(answer.accepted for answer in speculative) / steps if steps else None


def judge(task: EvalTask, outcome: SideOutcome, judged: Callable[[], None]) -> JudgedOutcome:
    """Judges every answer; calls `judged` after each."""

    def is_right(index: int) -> bool | None:
        question, answer = task.questions[index], outcome.answers[index]
        right = None if answer.error else question.judge(answer.text, question.expected)
        judged()
        return right

    with ThreadPoolExecutor(JUDGES) as pool:
        return JudgedOutcome(task, outcome, tuple(pool.map(is_right, range(len(task.questions)))))


def figures(judged: JudgedOutcome, details: bool) -> dict[str, Any]:
    """One flat object, with the names of `eyas bench` where it has one. `details`: also every answer."""
    *groups, total = judged.scores()
    side, seconds, answered = judged.outcome.side, judged.outcome.seconds, judged.answered
    outputs = sum(answer.output_tokens for answer in answered)
    out: dict[str, Any] = {
        "task": judged.task.name,
        "url": side.url,
        "model": side.model,
        "speculative": side.speculative,
        "num_requests": len(judged.task.questions),
        "completed": len(answered),
        "failed": len(judged.errors),
        "first_error": next(iter(judged.errors), None),
        "metric": judged.task.metric,
        "accuracy": total.share if answered else None,
        "accuracy_stderr": total.error if answered else None,
        **{f"accuracy_{score.name}": score.share for score in judged.other_scores() if answered},
        "groups": {score.name: {"completed": score.questions, "right": score.right} for score in groups},
        "duration": seconds,
        "total_input_tokens": sum(answer.prompt_tokens for answer in answered),
        "total_output_tokens": outputs,
        "request_throughput": len(answered) / seconds,
        "output_throughput": outputs / seconds,
        **latencies(answered),
        "accept_rate": judged.accept_rate,
        "accept_length": judged.accept_length,
    }
    return out | ({"questions": _details(judged)} if details else {})


def latencies(answers: list[TaskAnswer]) -> dict[str, float | None]:
    """The median and the 90th percentile of whole requests, in milliseconds; None without any."""
    times = [1e3 * answer.latency_s for answer in answers]
    if not times:
        return {"median_e2e_latency_ms": None, "p90_e2e_latency_ms": None}
    p90 = statistics.quantiles(times, n=10, method="inclusive")[-1] if len(times) > 1 else times[0]
    return {"median_e2e_latency_ms": statistics.median(times), "p90_e2e_latency_ms": p90}


def _details(judged: JudgedOutcome) -> list[dict[str, Any]]:
    return [
        {"prompt": question.prompt, "expected": question.expected, "right": right, **asdict(answer)}
        for question, answer, right in zip(
            judged.task.questions, judged.outcome.answers, judged.right, strict=True
        )
    ]


def unbroken(answer: str) -> bool:
    """True if the answer holds no replacement character, the trace of a broken UTF-8 sequence."""
    return "\ufffd" not in answer


@dataclass
class GroupScore:
    """The counts of one group of questions. `bar`: the share that must be right, if one is demanded."""

    name: str
    bar: float | None = None
    questions: int = 0
    right: int = 0
    ended: int = 0
    unbroken: int = 0

    def add(self, right: bool, ended: bool, unbroken: bool) -> None:
        """Count one answer."""
        self.questions += 1
        self.right += right
        self.ended += ended
        self.unbroken += unbroken

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right / max(1, self.questions)

    @property
    def error(self) -> float:
        """The standard error of the share, from the sample's own variance; 0 for fewer than two answers."""
        return math.sqrt(self.share * (1 - self.share) / max(1, self.questions - 1))

    @property
    def passed(self) -> bool:
        """True if the bar, if any, is met, the turns ended, and no character was broken."""
        if self.bar is None:
            return True
        ends = self.ended >= ENDED_BAR * self.questions
        return self.share >= self.bar and ends and self.unbroken == self.questions


def score_table(scores: list[GroupScore], title: str) -> Table:
    """A table with one line per score."""
    table = Table("", "answered", "right", "± error", "bar", "ended", "whole", "", title=title)
    for score in scores:
        bar, verdict = "", ""
        if score.bar is not None:
            bar, verdict = f"{score.bar:.0%}", "pass" if score.passed else "MISS"
        table.add_row(
            score.name,
            str(score.questions),
            f"{score.share:.1%}",
            f"{score.error:.1%}",
            bar,
            f"{score.ended / max(1, score.questions):.1%}",
            f"{score.unbroken / max(1, score.questions):.1%}",
            verdict,
        )
    return table


@dataclass(frozen=True)
class PairedComparison:
    """The counts of the questions that both sides answered."""

    compared: int
    identical: int
    """Answers with the same text."""
    only_first_right: int
    only_second_right: int

    @property
    def p_value(self) -> float:
        """The chance of a difference at least this large, if both sides were equally good."""
        return mcnemar(self.only_first_right, self.only_second_right)

    def figures(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return {**asdict(self), "p_value": self.p_value}


def compare(first: JudgedOutcome, second: JudgedOutcome) -> PairedComparison:
    """Compares two sides, question by question."""
    mine, other = first.outcome.answers, second.outcome.answers
    both = [index for index in range(len(mine)) if not mine[index].error and not other[index].error]
    return PairedComparison(
        compared=len(both),
        identical=sum(mine[index].text == other[index].text for index in both),
        only_first_right=sum(first.right[index] is True and not second.right[index] for index in both),
        only_second_right=sum(second.right[index] is True and not first.right[index] for index in both),
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test, from the questions that one side alone has right."""
    differ = only_first + only_second
    tail = sum(math.comb(differ, k) for k in range(min(only_first, only_second) + 1))
    return float(min(1.0, 2 * tail / 2**differ))
