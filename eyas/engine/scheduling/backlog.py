"""The work and the free room of an engine, counted for routers.

It counts requests and their rows.
"""

from __future__ import annotations

from eyas.common.step_times import UNSEEN, StepPace
from eyas.common.types import WorkerBacklog
from eyas.engine.batch.sequence import GenerationKind
from eyas.engine.scheduling.requests import RequestTable


def backlog(requests: RequestTable, prompt_share: float, pace: StepPace = UNSEEN) -> WorkerBacklog:
    """The backlog of now. The rooms are 0 while it drains; rows that a cache may hold count as queued."""
    scheduler = requests.scheduler
    decoding = context = coming = 0
    lent = set(requests.pulls.coming())
    for generation in requests.table.values():
        if generation.kind is GenerationKind.PREFILL:
            continue
        if not generation.sequences:  # its pages are waited for
            decoding += len(generation.request.choices)
            context += len(generation.request.choices) * len(generation.request.prompt_ids)
            coming += 0 if generation in lent else len(generation.request.prompt_ids)
        for seq in generation.sequences:
            decoding += 1 + len(seq.forks)
            context += (1 + len(seq.forks)) * len(seq)
    queued = sum(max(seq.missing - 1, 0) for seqs in (scheduler.running, scheduler.waiting) for seq in seqs)
    room = 0 if requests.draining else max(requests.admission.max_waiting - requests.queued, 0)
    seats = 0 if requests.draining else max(scheduler.slots - len(scheduler.running), 0)
    coming += sum(len(seq) for seq in scheduler.waiting)
    free = scheduler.tables.rows_in(scheduler.unowned)
    kv_room = None if requests.draining else max(free - coming, 0)
    return WorkerBacklog(decoding, context, queued, prompt_share, room, room + seats, pace, kv_room)
