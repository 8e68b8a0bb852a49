"""The interface that objects and arrays need of the writer of all rules."""

from __future__ import annotations

from typing import Protocol

from eyas.common.grammars.schemas.branches import Term, ValueCase
from eyas.common.grammars.schemas.terms import SchemaTerms


class GrammarRules(Protocol):
    """Rules that grow, one for each term."""

    terms: SchemaTerms

    def put(self, name: str, side: str) -> str:
        """Adds a rule; its name."""

    def value(self, term: Term) -> str:
        """The name of the rule for the values of a term."""

    def is_dead(self, term: Term) -> bool:
        """Whether no value of the term can be written."""

    def cases(self, term: Term) -> list[ValueCase]:
        """The term's cases that have values."""

    def side(self, case: ValueCase, name: str) -> str:
        """The right side of a rule for the values of a case."""
