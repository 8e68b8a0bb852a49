"""Translates JSON Schema into the rules of a grammar, as far as an output can be held to it.

What is accepted is followed to the letter: every text that the rules let through is JSON that fits the
schema. They may let through less (properties come in the order of the schema). What cannot be followed is
refused with a JSON pointer into the schema.
"""

from __future__ import annotations

from typing import Any

from eyas.common.grammars.schemas.branches import SchemaLiteral
from eyas.common.grammars.schemas.document import SchemaDocument
from eyas.common.grammars.schemas.terms import SchemaTerms, term_of
from eyas.common.grammars.schemas.writer import RuleWriter


def rules_of(schema: Any, pointer: str = "#") -> str:
    """Rules (GBNF) of the JSON values that fit the schema. `pointer` is where it stands.

    Raises InvalidRequest with a JSON pointer for what cannot be followed, and for what is too large.
    """
    terms, term = _read(schema, pointer)
    return RuleWriter(terms).of(term)


def types_of(schema: Any, pointer: str = "#") -> set[str]:
    """The types of the values that fit the schema; whole numbers are numbers. Raises InvalidRequest."""
    terms, term = _read(schema, pointer)
    return {case.kind for case in terms.cases(term)}


def _read(schema: Any, pointer: str) -> tuple[SchemaTerms, tuple[SchemaLiteral, ...]]:
    document = SchemaDocument(schema, pointer)
    document.read_all()
    return SchemaTerms(document), term_of([SchemaLiteral(document.root)])
