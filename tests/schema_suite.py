"""JSON Schema's official test suite against the masks: `python -m tests.schema_suite`.

Without a folder it is taken from the source of the package `jsonschema`, which pip brings into a temporary
one. A group of the suite is a schema with instances. Each instance, as a JSON printer writes it, goes through
the schema's compiled grammar: an invalid one must not pass; a valid one that does not pass is "narrower".
It writes a table by keyword, as docs/structured-output.md has it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eyas.common.config import NANO
from eyas.common.errors import InvalidRequest
from eyas.common.grammars.compiler import GrammarCompiler, library
from eyas.common.grammars.notations import Grammar


class Tally(NamedTuple):
    """Of one file: groups, those refused; valid instances, those that pass; invalid ones, those that do."""

    groups: int = 0
    refused: int = 0
    valid: int = 0
    passed: int = 0
    invalid: int = 0
    wrong: int = 0

    def plus(self, other: Tally) -> Tally:
        """The sum."""
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))


def main() -> int:
    """Judges the suite and prints the table; 1 if an invalid instance passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="of the suite; else pip brings it")
    parser.add_argument("--draft", default="draft2020-12")
    parser.add_argument("--say", action="store_true", help="print refusals, and what passes or does not")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or brought(Path(scratch))
        tallies = judged(folder / "tests" / args.draft, args.say)
    print("\n".join(table(tallies)))
    return int(any(tally.wrong for tally in tallies.values()))


def brought(scratch: Path) -> Path:
    """The suite's folder, from a package's source."""
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(scratch)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, "jsonschema>=4.26"], check=True)
    (source,) = scratch.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(scratch, filter="data")
    (suite,) = scratch.glob("*/json")
    return suite


def judged(folder: Path, say: bool = False) -> dict[str, Tally]:
    """A tally of each file, by its name."""
    compiler = GrammarCompiler(Path(NANO))
    found = {}
    for file in (*sorted(folder.glob("*.json")), *sorted(folder.glob("optional/*.json"))):
        tally = Tally()
        for group in json.loads(file.read_text()):
            tally = tally.plus(_group(compiler, group, file.stem if say else ""))
        found[str(file.relative_to(folder).with_suffix(""))] = tally
    return found


def _group(compiler: GrammarCompiler, group: dict[str, Any], say: str) -> Tally:
    try:
        compiled = compiler.compile(Grammar.json_schema(group["schema"]))
    except InvalidRequest as error:
        if say:
            print(f"{say}: {group['description']}: refused: {error.message}")
        return Tally(1, 1)
    tally = Tally(1)
    for test in group["tests"]:
        passes = any(_passes(compiled, text) for text in _printed(test["data"]))
        if say and passes is not test["valid"]:
            print(
                f"{say}: {group['description']}: {test['description']}: {'WRONG' if passes else 'narrower'}"
            )
        if test["valid"]:
            tally = tally.plus(Tally(valid=1, passed=int(passes)))
        else:
            tally = tally.plus(Tally(invalid=1, wrong=int(passes)))
    return tally


def _printed(value: Any) -> Iterator[str]:
    """As printers write it; names in every order that a schema may have them in are not tried."""
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, separators=(",", ":"))
    if isinstance(value, dict) and len(value) > 1:
        yield json.dumps(dict(reversed(value.items())), ensure_ascii=False)
        yield json.dumps(value, ensure_ascii=False, sort_keys=True)


def _passes(compiled: Any, text: str) -> bool:
    matcher = library().GrammarMatcher(compiled, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text.encode("utf-8", "surrogatepass")) and matcher.is_completed())


def table(tallies: dict[str, Tally]) -> list[str]:
    """The rows of a table by keyword, and their sum."""
    rows = [
        "| keyword | groups | refused | valid instances that pass | invalid instances that pass |",
        "| --- | --- | --- | --- | --- |",
    ]
    total = Tally()
    for name, tally in tallies.items():
        rows.append(_row(name, tally))
        total = total.plus(tally)
    return [*rows, _row("all", total)]


def _row(name: str, tally: Tally) -> str:
    passed, wrong = f"{tally.passed} of {tally.valid}", f"{tally.wrong} of {tally.invalid}"
    return f"| {name} | {tally.groups} | {tally.refused} | {passed} | {wrong} |"


if __name__ == "__main__":
    sys.exit(main())
