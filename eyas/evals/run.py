"""One evaluation: asks each side, judges, prints, appends to a file, and decides the exit code."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eyas.common.errors import ConfigError, EyasError
from eyas.evals.asking import EvalSide, TaskOptions, ask_all, sides_of
from eyas.evals.questions import EvalTask
from eyas.evals.scores import JudgedOutcome, PairedComparison, compare, figures, judge, score_table

SETTINGS = (
    "shots",
    "chat",
    "limit",
    "max_tokens",
    "parallel",
    "temperature",
    "seed",
)  # in the report


def evaluate(args: argparse.Namespace, task: EvalTask) -> int:
    """Asks one side or two, and tells what came of it.

    Gives 1 if a request failed, a bar was missed, or answers differ that must not; else 0. Raises EyasError
    for flags that do not fit, a server that is not there, and a side without any answer.
    """
    sides = sides_of(args)
    _check(args, len(sides))
    asking = TaskOptions(args.parallel, args.temperature, args.seed, args.max_tokens)
    outcomes = [_judged(side, task, asking) for side in sides]
    comparison = compare(*outcomes) if len(outcomes) > 1 else None
    if args.output_file:
        _append(args, outcomes, comparison)
    console = Console()
    for judged in outcomes:
        _show(console, judged)
    if comparison:
        _show_comparison(console, comparison)
    for judged in outcomes:
        if not judged.answered:
            raise EyasError(f"{judged.outcome.side}: no question was answered: {judged.errors[0]}")
    return 0 if _is_well(outcomes, comparison, args.require_identical) else 1


def _check(args: argparse.Namespace, sides: int) -> None:
    if args.require_identical and sides == 1:
        raise ConfigError("--require-identical: needs --against", param="require-identical")
    if args.output_details and not args.output_file:
        raise ConfigError("--output-details: needs --output-file", param="output-details")
    if not 0.0 <= args.temperature <= 2.0:
        raise ConfigError(f"--temperature: {args.temperature} is not in 0 to 2", param="temperature")
    if args.output_file:
        try:
            args.output_file.open("a").close()
        except OSError as error:
            raise ConfigError(f"--output-file: {args.output_file}: {error.strerror}") from error


def _judged(side: EvalSide, task: EvalTask, asking: TaskOptions) -> JudgedOutcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        answered = progress.add_task(f"{task.name}: answers", total=len(task.questions))
        outcome = asyncio.run(ask_all(side, task, asking, lambda: progress.advance(answered)))
        judged = progress.add_task(f"{task.name}: judged", total=len(task.questions))
        return judge(task, outcome, lambda: progress.advance(judged))


def _is_well(outcomes: list[JudgedOutcome], comparison: PairedComparison | None, identical: bool) -> bool:
    whole = not any(judged.errors for judged in outcomes)
    passed = all(score.passed for judged in outcomes for score in judged.scores())
    same = comparison is None or comparison.identical == comparison.compared
    return whole and passed and (same or not identical)


# --- the report --------------------------------------------------------------------------------------------


def _append(
    args: argparse.Namespace, outcomes: list[JudgedOutcome], comparison: PairedComparison | None
) -> None:
    """A line for each side; the second's tells the comparison with the first."""
    settings = {name: value for name, value in vars(args).items() if name in SETTINGS}
    path: Path = args.output_file
    with path.open("a") as file:
        for position, judged in enumerate(outcomes):
            line = {**settings, **figures(judged, args.output_details)}
            if position and comparison:
                line["against_first"] = comparison.figures()
            file.write(json.dumps(line) + "\n")


def _show(console: Console, judged: JudgedOutcome) -> None:
    console.print(score_table(judged.scores() + judged.other_scores(), str(judged.outcome.side)))
    line = figures(judged, details=False)
    if judged.answered:
        parts = [
            f"{line['completed']} answers in {line['duration']:.1f} s",
            f"{line['output_throughput']:.1f} output tokens per second",
            f"latency {line['median_e2e_latency_ms']:.0f} ms median, {line['p90_e2e_latency_ms']:.0f} ms p90",
        ]
        if line["accept_rate"] is not None:
            parts.append(f"{line['accept_rate']:.0%} of drafts accepted")
        if line["accept_length"] is not None:
            parts.append(f"{line['accept_length']:.2f} tokens per verify step")
        console.print("; ".join(parts), soft_wrap=True)
    if judged.errors:
        failed = f"{line['failed']} of {line['num_requests']} requests FAILED, and count in no share"
        console.print(f"{failed}: {judged.errors[0]}", markup=False, soft_wrap=True)


def _show_comparison(console: Console, pairs: PairedComparison) -> None:
    parts = [
        f"of {pairs.compared} questions that both answered, {pairs.identical} answers are identical",
        f"right by the first alone {pairs.only_first_right}, by the second alone {pairs.only_second_right}",
        f"exact McNemar p = {pairs.p_value:.3g}",
    ]
    console.print("; ".join(parts), soft_wrap=True)
