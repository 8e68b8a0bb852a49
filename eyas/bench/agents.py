"""Agents as a load: sessions of many turns with results of tools, times to think, and sub-agents.

Invented sessions follow what is published of coding agents: one text of instructions and tools for all, a
project's text for some, then turn by turn a tool's result and a short answer, so that nearly all of a prompt
was seen before. Texts are rows of common words, each a token or more. Lengths are shares of the context, at
which a session ends.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from eyas.bench.jobs import JobTurn, LoadJob, generator

SESSIONS = 8
TURNS = (20, 80)
PROJECTS = 4
SYSTEM, PROJECT, TASK = 0.06, 0.02, 0.003  # of the context
RESULT, RESULT_SPREAD, LONGEST_RESULT = 0.005, 1.1, 0.08  # the median, and of its logarithm the deviation
ANSWER, ANSWER_SPREAD, LONGEST_ANSWER = 0.0015, 0.7, 0.01
FEWEST_WORDS, FEWEST_TOKENS = 3, 8
TOOL_S, PERSON_S, LONGEST_S = 1.5, 20.0, 120.0  # medians
EVERY_PERSON = 8  # turns per turn that waits for a person
EVERY_SUBAGENTS = 16
SUBAGENTS, SUBAGENT_TURNS = (1, 3), (3, 8)
WORDS = (
    "the and for that with this from have they will would there their what about which when make like time "
    "just know take people into year your good some could them see other than then now look only come over "
    "think also back after use two how our work first well way even new want because any these give day most"
).split()


def agent_sessions(count: int, context: int, most_turns: int | None, pace: float, seed: int) -> list[LoadJob]:
    """`count` sessions of `context` words at most. `most_turns`: of each; None: as many as are drawn. `pace`:
    times to think are multiplied by it.
    """
    system = say(generator(seed, "instructions"), _share(SYSTEM, context))
    makers = [
        _Session(generator(seed, f"session {number}"), context, most_turns, pace) for number in range(count)
    ]
    projects = [
        say(generator(seed, f"project {number}"), _share(PROJECT, context)) for number in range(PROJECTS)
    ]
    return [maker.job(system, maker.rng.choice(projects)) for maker in makers]


def say(rng: random.Random, count: int) -> str:
    """A row of common words."""
    return " ".join(rng.choices(WORDS, k=count))


class _Session:
    """The draws of one session."""

    def __init__(self, rng: random.Random, context: int, most_turns: int | None, pace: float) -> None:
        self.rng = rng
        self._context, self._pace = context, pace
        self._turns = min(rng.randint(*TURNS), most_turns or TURNS[1])

    def job(self, system: str, project: str) -> LoadJob:
        """The session, in front of which the instructions and a project stand."""
        words = sum(len(text.split()) for text in (system, project))
        return LoadJob(tuple(self._main(f"{project} {self._text(TASK)}", words)), system=system)

    def _main(self, task: str, words: int) -> Iterator[JobTurn]:
        text = task
        for turn in range(self._turns):
            answer = self._answer()
            words += len(text.split()) + answer
            if turn and words > self._context:
                return
            subagents: tuple[LoadJob, ...] = ()
            if turn and self.rng.randrange(EVERY_SUBAGENTS) == 0:
                number = self.rng.randint(*SUBAGENTS)
                subagents = tuple(self._subagent(self._context - words) for _ in range(number))
            yield JobTurn(text, answer, self._thinks(turn), subagents)
            text = say(self.rng, self._drawn(RESULT, RESULT_SPREAD, LONGEST_RESULT))

    def _subagent(self, room: int) -> LoadJob:
        """A task of its own behind the conversation so far, of `room` words and answers at most."""
        turns: list[JobTurn] = []
        text, longest = self._text(TASK), self.rng.randint(*SUBAGENT_TURNS)
        while len(turns) < longest:
            answer = self._answer()
            room -= len(text.split()) + answer
            if turns and room < 0:
                break
            turns.append(JobTurn(text, answer, self._thinks(len(turns), person=False)))
            text = say(self.rng, self._drawn(RESULT, RESULT_SPREAD, LONGEST_RESULT))
        return LoadJob(tuple(turns))

    def _text(self, share: float) -> str:
        return say(self.rng, _share(share, self._context))

    def _drawn(self, median: float, spread: float, most: float) -> int:
        return _share(min(median * self.rng.lognormvariate(0, spread), most), self._context)

    def _answer(self) -> int:
        return max(self._drawn(ANSWER, ANSWER_SPREAD, LONGEST_ANSWER), FEWEST_TOKENS)

    def _thinks(self, turn: int, *, person: bool = True) -> float:
        """Seconds from an answer to the next turn: a tool's, or now and then a person's."""
        if not turn:
            return 0.0
        waits = person and self.rng.randrange(EVERY_PERSON) == 0
        drawn = (PERSON_S if waits else TOOL_S) * self.rng.lognormvariate(0, 0.8)
        return self._pace * min(drawn, LONGEST_S)


def _share(share: float, context: int) -> int:
    return max(round(share * context), FEWEST_WORDS)
