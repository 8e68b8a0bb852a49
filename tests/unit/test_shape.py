"""The code has no import cycles, and its documentation does not fall below what docs/shape.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import shape
from tests.hops import Hops

PAGE = shape.ROOT / "docs" / "shape.md"
ONE = '''
"""One."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pack.two import Thing as Other

class Thing:
    """A thing."""
    def said(self):
        """Says."""
    def silent(self): ...

def add(xs):
    total = 0
    for x in xs:
        if x:
            total += x
    print(total)
    return total
'''
TWO = '''
"""Two."""
from pack.one import Thing as Base

class Thing(Base):
    def said(self): ...
    def more(self): ...
    def _own(self): ...

def sums(values):
    """Sums."""
    result = 0
    for value in values:
        if value:
            result += value
    print(result)
    return result
'''


@pytest.fixture(scope="module")
def code() -> list[shape.Module]:
    return shape.modules(*shape.INSTALLED)


@pytest.fixture
def planted(tmp_path: Path) -> list[shape.Module]:
    """Two modules with a cycle for types alone, a class name twice, and one function under two names."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "one.py").write_text(ONE)
    (tmp_path / "pack" / "two.py").write_text(TWO)
    return shape.modules("pack", root=tmp_path)


def test_no_modules_import_one_another(code: list[shape.Module]) -> None:
    assert shape.cycles(shape.imports(code)) == []


def test_no_class_name_stands_for_two_things(code: list[shape.Module]) -> None:
    assert shape.duplicate_classes(code) == {}


def test_documentation_does_not_fall(code: list[shape.Module]) -> None:
    found = shape.definitions(code)
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| what is installed |"))
    promised = int(re.findall(r"(\d+)%", row)[-1])
    silent = [f"{d.module}:{d.name} ({d.kind})" for d in found if not d.documented]
    assert round(100 * shape.coverage(found)) >= promised, "\n".join(silent)


def test_a_cycle_for_types_alone_is_found(planted: list[shape.Module]) -> None:
    assert shape.cycles(shape.imports(planted)) == [["pack.one", "pack.two"]]


def test_duplicates_are_found(planted: list[shape.Module]) -> None:
    assert shape.duplicate_classes(planted) == {"Thing": ["pack.one", "pack.two"]}
    assert shape.duplicate_bodies(planted) == [["pack.one.add", "pack.two.sums"]]


def test_classes_of_one_word_are_counted(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    names = ("Thing", "_Thing", "TwoWords", "KV", "KVPages", "Http2", "HTTPServer")
    (tmp_path / "pack" / "names.py").write_text("\n".join(f"class {name}: ..." for name in names))
    assert shape.one_word(shape.modules("pack", root=tmp_path)) == (4, 7)


def test_modules_with_one_importer_are_counted(planted: list[shape.Module]) -> None:
    """Each of the two is imported by the other alone, in the same folder."""
    assert shape.fragments(planted) == shape.Fragments(2, 2, 2)


def test_what_is_public_and_undocumented_is_found(planted: list[shape.Module]) -> None:
    found = shape.definitions(planted)
    silent = [f"{d.module}:{d.name}" for d in found if not d.documented]
    assert silent == ["pack.one:Thing.silent", "pack.one:add", "pack.two:Thing", "pack.two:Thing.more"]
    assert "Thing.said" not in [d.name for d in found if d.module == "pack.two"]  # its base documents it


@pytest.mark.slow
def test_the_page_has_every_package_and_every_section() -> None:
    text, fresh = PAGE.read_text(), shape.page([Hops(1, 2, 3, 4, 5)])
    labels = re.compile(r"^\| ([\w. ]+) \||^\*\*([\w ]+):", re.MULTILINE)
    assert labels.findall(text) == labels.findall(fresh)
