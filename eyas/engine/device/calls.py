"""Steps as calls to the other ranks: what rank 0's executor is asked for, as integers and bytes, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np

from eyas.engine.batch.prompt_scores import ScoreRequest
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.device.step import ArrivedState, CatchUp, JoinBatch, RowMasks, StepInput, StepShape
from eyas.engine.parallel.ranks import RankCall

BEGIN = "begin"
SCORE = "score"
MASK = "mask"
SAMPLE = "sample"
FEATURES = "features"
FINISH = "finish"
JOIN = "join"
CATCH_UP = "catch_up"
COPY_PAGE = "copy_page"
COPY_STATE = "copy_state"
READ_ADAPTER = "read_adapter"
FILL_ADAPTER = "fill_adapter"
FORGET_ADAPTER = "forget_adapter"
RENEW_ADAPTER = "renew_adapter"


def begin(step: StepInput) -> RankCall:
    """The numbers: the step's shape; how many words of `data` are its array, its pokes, its spans, the slots
    whose drafts are wanted, its new states, its forced drafts; and whether it is scored.
    """
    others = (step.drafted_slots, step.arrived, step.forced)
    slots, arrived, forced = (np.array(each, np.int32).reshape(-1) for each in others)
    parts = (step.data, step.writes.reshape(-1), _flat(step.spans), slots, arrived, forced)
    sizes = (*dataclasses.astuple(step.shape), *(len(part) for part in parts), step.scored)
    numbers = tuple(map(int, sizes))  # the wire takes no bool for one
    return RankCall(BEGIN, numbers, np.concatenate(parts, dtype=np.int32).tobytes())


def step_of(call: RankCall) -> StepInput:
    """Decodes the step that `begin` encoded, on the rank that receives it."""
    *sizes, headless, adapted, words, writes, spans, slots, new, _, scored = call.numbers
    array = np.frombuffer(bytearray(call.data), np.int32)  # writable: torch takes no other
    parts = np.split(array, np.cumsum([words, writes, spans, slots, new]))
    data, poked, spanned, drafted, arrived, forced = parts
    return StepInput(
        StepShape(*sizes, headless=bool(headless), adapted=bool(adapted)),
        data,
        poked.reshape(2, -1),
        spans=_spans(spanned.tolist()),
        scored=bool(scored),
        drafted_slots=drafted.tolist(),
        arrived=[ArrivedState(*each) for each in arrived.reshape(-1, 3).tolist()],
        forced=forced.tolist(),
    )


def score(request: ScoreRequest) -> RankCall:
    """`request`: prompt tokens whose log-probabilities are wanted."""
    return RankCall(
        SCORE, (request.row, request.places.start, request.top), np.array(request.tokens, np.int32).tobytes()
    )


def score_request_of(call: RankCall) -> ScoreRequest:
    """Decodes the request that `score` encoded."""
    row, first, top = call.numbers
    tokens = np.frombuffer(call.data, np.int32).tolist()
    return ScoreRequest(row, range(first, first + len(tokens)), tuple(tokens), top)


def mask(rows: RowMasks) -> RankCall:
    """`rows`: as `StepExecutor.mask` takes them."""
    return RankCall(MASK, rows.masks.shape, rows.places.tobytes() + rows.masks.tobytes())


def masked_of(call: RankCall) -> RowMasks:
    """Decodes the rows that `mask` encoded."""
    count = call.numbers[0]
    array = np.frombuffer(bytearray(call.data), np.int32)
    return RowMasks(array[:count], array[count:].reshape(call.numbers))


def sample(rows: np.ndarray) -> RankCall:
    """`rows`: int32 [n, columns], as `StepExecutor.sample` takes them."""
    return RankCall(SAMPLE, rows.shape, rows.tobytes())


def join(joined: JoinBatch) -> RankCall:
    """`joined`: as `StepExecutor.join` takes it."""
    parts = (joined.words.reshape(-1), joined.features.view(np.int32).reshape(-1), joined.writes.reshape(-1))
    numbers = (*joined.features.shape, joined.width)
    return RankCall(JOIN, numbers, np.concatenate(parts, dtype=np.int32).tobytes())


def joined_of(call: RankCall) -> JoinBatch:
    """Decodes the batch that `join` encoded."""
    count, width, rows = call.numbers
    array = np.frombuffer(bytearray(call.data), np.int32)
    words, features, writes = np.split(array, [4 * count, (4 + width) * count])
    rows_of_features = features.view(np.float32).reshape(count, width)
    return JoinBatch(words.reshape(4, count), rows_of_features, rows, writes.reshape(2, -1))


def catch_up(batch: CatchUp) -> RankCall:
    """`batch`: as `StepExecutor.catch_up` takes it."""
    return RankCall(CATCH_UP, (batch.width,), batch.words.tobytes())


def catch_up_of(call: RankCall) -> CatchUp:
    """Decodes the batch that `catch_up` encoded."""
    words = np.frombuffer(bytearray(call.data), np.int32).reshape(2, -1)
    return CatchUp(words, call.numbers[0])


def features(rows: SequenceOf[int]) -> RankCall:
    """Encodes a request for features. `rows`: rows of the step in progress."""
    return RankCall(FEATURES, tuple(rows))


def rows_of(call: RankCall) -> np.ndarray:
    """Decodes the rows that `sample` encoded: int32 [n, columns], writable."""
    return np.frombuffer(bytearray(call.data), np.int32).reshape(call.numbers)


def finish() -> RankCall:
    """The step that was begun is complete."""
    return RankCall(FINISH, ())


def copy_page(source: int, target: int) -> RankCall:
    """Page `source` is copied to page `target`, in every pool."""
    return RankCall(COPY_PAGE, (source, target))


def copy_state(source: int, target: int) -> RankCall:
    """Slot `source` of states is copied to slot `target`."""
    return RankCall(COPY_STATE, (source, target))


def read_adapter(folder: Path) -> RankCall:
    """The folder of an adapter is read; the answer is its id, or nothing."""
    return RankCall(READ_ADAPTER, (), str(folder).encode())


def fill_adapter(slot: int, folder: Path, name: str) -> RankCall:
    """What was read there, the adapter of this id, is copied into a slot."""
    return RankCall(FILL_ADAPTER, (slot,), _words(folder, name))


def forget_adapter(folder: Path, name: str) -> RankCall:
    """What was read there, the adapter of this id, is not needed any more."""
    return RankCall(FORGET_ADAPTER, (), _words(folder, name))


def renew_adapter(folder: Path, name: str) -> RankCall:
    """What was read there, the adapter of this id, becomes what the new weights make of it."""
    return RankCall(RENEW_ADAPTER, (), _words(folder, name))


def folder_of(call: RankCall) -> Path:
    """Decodes what `read_adapter` encoded."""
    return Path(call.data.decode())


def adapter_of(call: RankCall) -> tuple[Path, str]:
    """Decodes what `fill_adapter`, `forget_adapter` and `renew_adapter` encoded: the folder and the id."""
    name, _, folder = call.data.decode().partition(" ")
    return Path(folder), name


def _words(folder: Path, name: str) -> bytes:
    """An adapter's folder and id."""
    return f"{name} {folder}".encode()


def _flat(spans: SequenceOf[QuerySpan]) -> np.ndarray:
    """Encodes each span as its start, its count, the number of its pages, and the pages."""
    words = [word for span in spans for word in (span.start, span.count, len(span.pages), *span.pages)]
    return np.array(words, np.int32)


def _spans(words: list[int]) -> list[QuerySpan]:
    spans, at = [], 0
    while at < len(words):
        start, count, pages = words[at : at + 3]
        at += 3
        spans.append(QuerySpan(words[at : at + pages], start, count))
        at += pages
    return spans
