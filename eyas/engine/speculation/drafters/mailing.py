"""Chooses the sequences that have a mailbox in the channel to their draft worker, and the size of a place.

An adaptive depth is chosen when a step lands, and told with each commit: by the fronts. Where a device
writes its rounds and takes its drafts, so goes all that needs the host in every round: a grammar, which cuts
drafts, and what is looked up, which competes with them.
"""

from __future__ import annotations

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.sequence import Sequence
from eyas.engine.ipc.mailbox import MailLayout
from eyas.engine.ipc.row_ring import ring_rows


def mail_place(spec: SpeculationConfig) -> MailLayout:
    """For the rows and proposals of one sequence."""
    return MailLayout(ring_rows(spec.deepest + 1), max(spec.steps, spec.draft_tokens))


def may_mail(spec: SpeculationConfig) -> bool:
    """May a device mail rounds of any sequence?"""
    return not (spec.adaptive or spec.ngram)


def mails(seq: Sequence, spec: SpeculationConfig) -> bool:
    """May it those of this one?"""
    request = seq.generation.request
    return may_mail(spec) and request.params.grammar is None and not request.predicted
