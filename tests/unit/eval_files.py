"""Small files of questions, as evaluations read them."""

from __future__ import annotations

import json
from pathlib import Path

PROBLEMS = [  # in the official format, calculator marks included
    (
        "A crate holds 12 pears. How many pears do 3 crates hold?",
        "3 crates hold 3*12=<<3*12=36>>36.\n#### 36",
    ),
    ("Ida had 9 coins and lost 4. How many are left?", "She has 9-4=<<9-4=5>>5 coins left.\n#### 5"),
    ("A bike costs $1,250. What do 2 bikes cost?", "They cost 2*1250=$<<2*1250=2500>>2,500.\n#### 2,500"),
    ("It was 3 degrees and fell by 8. How cold is it?", "It is 3-8=<<3-8=-5>>-5 degrees.\n#### -5"),
]
CHOICES = ['"Which is a colour, if any?",red,"two, or three",cold,fast,A', "2 + 2,3,4,5,6,B"]


def write_problems(path: Path, problems: list[tuple[str, str]] = PROBLEMS) -> str:
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in problems]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def write_subject(folder: Path, subject: str, test: list[str], dev: list[str] = CHOICES) -> str:
    for split, rows in (("dev", dev), ("test", test)):
        (folder / split).mkdir(exist_ok=True)
        (folder / split / f"{subject}_{split}.csv").write_text("\n".join(rows) + "\n")
    return str(folder)
