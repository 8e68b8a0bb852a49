"""Which sequences have a mailbox at their draft worker, and how large a place there is.

What needs the decode engine's host in every round keeps the way by the host. That is a grammar, which cuts
drafts; what is looked up, which competes with them; and an adaptive depth, which is chosen when a step lands.
"""

from __future__ import annotations

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.sequence import Sequence
from eyas.engine.ipc.mailbox import MailLayout
from eyas.engine.ipc.row_ring import kept_rows


def mail_place(spec: SpeculationConfig) -> MailLayout:
    """For the rows and proposals of one sequence."""
    return MailLayout(kept_rows(spec.deepest + 1), max(spec.steps, spec.draft_tokens))


def may_mail(spec: SpeculationConfig) -> bool:
    """May any sequence have a place?"""
    return not (spec.adaptive or spec.ngram)


def mails(seq: Sequence, spec: SpeculationConfig) -> bool:
    """May this one?"""
    request = seq.generation.request
    return may_mail(spec) and request.params.grammar is None and not request.predicted
