"""Does on the device what a `StepInput` says: copies it there, runs its program, copies the result back.

A shape with a graph is replayed, any other is launched kernel by kernel; both are the same `StepProgram`.
Nothing is decided here, so tensor-parallel ranks can run it from messages alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from eyas.engine.attention.prompts import PromptBuffers
from eyas.engine.batch.prompt_scores import ScoreRequest
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.batch.tables import SlotTables
from eyas.engine.device.program import DeviceState, StepProgram
from eyas.engine.device.special import SLICE, padding_rows, score
from eyas.engine.device.step import (
    ArrivedState,
    CatchUp,
    FeatureRequest,
    JoinBatch,
    MailedPrompts,
    RowMasks,
    StepInput,
    StepShape,
)
from eyas.engine.kernels.drafts.forced import HEAD, draft_forced
from eyas.engine.kernels.launch.recording import GraphRecorder
from eyas.engine.kernels.sampling.special import mask_words
from eyas.engine.kernels.states.rings import remake
from eyas.engine.models.ops.recording import ExpertRecorder
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.sampling.scores import TokenScores, score_slices

IN_FLIGHT = 3  # steps whose host buffers may be in use at once: one running, one launched, one being written
WORDS = 1 << 18  # of a step's array, at most; and of what all ranks tell of it


class DeviceEvent(Protocol):
    """An event that passes when the device has done a step, such as a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Blocks until the device has passed it."""
        ...

    def query(self) -> bool:
        """True if the device has passed it."""
        ...


@dataclass(frozen=True)
class CapturedStep:
    """A program whose launches are recorded: the forward, and everything after it. `room`: from which its
    prompt rows are planned, if they are.
    """

    program: StepProgram
    forward: torch.cuda.CUDAGraph
    rest: torch.cuda.CUDAGraph
    room: PromptBuffers | None = None

    def takes(self, step: StepInput) -> bool:
        """True if the graphs are for the step's prompt rows too, whose plan they are given then."""
        return self.room is None or self.room.fill(step.spans)


@dataclass(frozen=True)
class CapturedCatchUp:
    """A recorded catch-up. `words`: the device memory from which the graph reads `CatchUp.words`."""

    words: torch.Tensor
    graph: torch.cuda.CUDAGraph


class StepExecutor:
    """Runs steps on one device: `begin`, what is asked of the step's rows, then `finish`."""

    def __init__(self, state: DeviceState) -> None:
        self.state = state
        self._captured: dict[StepShape, CapturedStep] = {}
        self._captured_catch_ups: dict[tuple[int, int], CapturedCatchUp] = {}  # by sequences and width
        self._program: StepProgram | None = None
        self._replayed: CapturedStep | None = None  # of the step that was begun
        self._rows: torch.Tensor | None = None  # of the step that was begun, if they are to be scored
        self._recorder: ExpertRecorder | None = None  # once experts were asked for
        self.certain: torch.Tensor | None = None  # features requested of the step that was finished
        self._inputs = torch.zeros(WORDS, dtype=torch.int32, device=state.device)
        self._results = torch.zeros(WORDS, dtype=torch.int32, device=state.device)
        self._outgoing = [_host(WORDS, state.device) for _ in range(IN_FLIGHT)]
        self._incoming = [_host(WORDS, state.device) for _ in range(IN_FLIGHT)]
        self._mask_memory: dict[tuple[int, int], torch.Tensor] = {}  # by turn and rank
        self._turn = 0
        self._drafts: torch.Tensor | None = None  # of the step that was begun, for its `held` ..
        self._drafts_read: DeviceEvent | None = None  # .. once this has passed

    @property
    def tables(self) -> SlotTables:
        """The device's page tables."""
        return self.state.tables

    @property
    def _vocab_size(self) -> int:
        return self.state.model.config.vocab_size

    # --- a step ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def join(self, joined: JoinBatch) -> None:
        """Writes the tables and drafts for the sequences that join, before the next step.

        Where there is no head, these are looked up alone, and have features of no width.
        """
        self._apply(joined.writes)
        self._join(joined)

    def _join(self, joined: JoinBatch) -> None:
        words = _pinned(joined.words, self.state.device).to(self.state.device, non_blocking=True)
        if self.state.drafter is not None:
            features = _pinned(joined.features, self.state.device).to(self.state.device, non_blocking=True)
            self.state.drafter.of(adapted=True).join(words, features, joined.width)
        self.state.look_up(words[0].clone())  # on 16 bytes, as kernels like it

    @torch.inference_mode()
    def catch_up(self, batch: CatchUp) -> None:
        """Lets the draft head take rows that wait for it, before the next step."""
        self._catch_up(batch)

    def _catch_up(self, batch: CatchUp) -> None:
        words, captured = _pinned(batch.words, self.state.device), self._captured_catch_ups.get(batch.shape)
        if captured is None:
            self._take_waiting_rows(words.to(self.state.device, non_blocking=True), batch.width)
        else:
            captured.words.copy_(words, non_blocking=True)
            captured.graph.replay()

    def _take_waiting_rows(self, words: torch.Tensor, width: int) -> None:
        assert self.state.drafter is not None
        self.state.drafter.of(adapted=True).catch_up(words, width)
        if width > 1:
            self.state.look_up(words[0].clone())

    @torch.inference_mode()
    def begin(self, step: StepInput) -> None:
        """Everything up to the logits."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        self._send(step)
        if step.arrived:
            self._remake(step.arrived)
        if step.forced:
            self._draft_forced(step.forced)
        if step.drafted_slots:
            self._read_drafts(step.drafted_slots)
        self._rows = None
        captured = self._replayed = self._graphs(step)
        if captured is None:
            planned = self.state.prompts is not None and self.state.prompts.plan(step.spans)
            self._program = StepProgram(self.state, step.shape, self._inputs, self._results, planned)
            with self._recording() if step.recorded else contextlib.nullcontext():
                rows = self._program.forward(every=step.scored)
            if step.scored:
                self._rows = rows
        else:
            self._program = captured.program
            captured.forward.replay()

    def _recording(self) -> AbstractContextManager[None]:
        """Hears which experts the rows of a forward take."""
        self._recorder = self._recorder or ExpertRecorder(self.state.model.config)
        return self._recorder.hearing(self.state.model)

    def _remake(self, arrived: SequenceOf[ArrivedState]) -> None:
        words = _pinned(np.array(arrived, np.int32).T.copy(), self.state.device)
        remake(self.state.state_layers, words.to(self.state.device, non_blocking=True))

    def _draft_forced(self, rows: SequenceOf[int]) -> None:
        words = np.array(rows, np.int32).reshape(-1, HEAD + self.tables.drafts.shape[1])
        pinned = _pinned(words, self.state.device)
        draft_forced(self.tables, pinned.to(self.state.device, non_blocking=True))

    def drafts(self) -> np.ndarray:
        """The drafts that the step in progress verifies for each of its `drafted_slots`, and their parents,
        as `SlotTables` has them: int32 [ranks, n, 2, drafts]. Waits for the steps before, not for its
        forward.
        """
        assert self._drafts is not None
        if self._drafts_read is not None:
            self._drafts_read.synchronize()
        drafts: np.ndarray = self._drafts.numpy()
        return drafts

    def _read_drafts(self, slots: SequenceOf[int]) -> None:
        index = _pinned(np.array(slots, np.int64), self.state.device)
        index = index.to(self.state.device, non_blocking=True)
        both = [table.index_select(0, index) for table in (self.tables.drafts, self.tables.parents)]
        self._drafts = self.state.all_gather_rows(torch.stack(both, 1)).to("cpu", non_blocking=True)
        self._drafts_read = self._event()

    def mask_rows(self, count: int, rank: int = 0) -> np.ndarray:
        """Memory for as many masks of a rank's rows of the step that was begun, int32 [count, words], from
        which the device may copy them.
        """
        words, place = mask_words(self._vocab_size), (self._turn, rank)
        if place not in self._mask_memory or len(self._mask_memory[place]) < count * words:
            self._mask_memory[place] = _host(count * words, self.state.device)
        rows: np.ndarray = self._mask_memory[place][: count * words].view(count, words).numpy()
        return rows

    @torch.inference_mode()
    def mask(self, rows: RowMasks) -> None:
        """Masks rows of the step that was begun, before its `finish`."""
        assert self._program is not None
        if len(rows.places):
            places = _pinned(rows.places, self.state.device).to(self.state.device, non_blocking=True)
            masks = torch.from_numpy(rows.masks).to(self.state.device, non_blocking=True)
            self._program.mask(places, masks)

    @torch.inference_mode()
    def sample(self, rows: np.ndarray) -> list[torch.Tensor]:
        """Special rows int32 [n, columns] of the step that was begun: their tokens, before its `finish`.

        Returns their reports, slice by slice; valid once the event of that `finish` has passed. All that is
        returned of a step is as `DeviceState.all_gather_rows` has it.
        """
        assert self._program is not None
        reports = []
        for first in range(0, len(rows), SLICE):
            pinned = _pinned(rows[first : first + SLICE], self.state.device)
            results = self._program.sample_special(pinned)
            reports.append(self.state.all_gather_rows(results).to("cpu", non_blocking=True, copy=True))
        return reports

    @torch.inference_mode()
    def finish(self, step: StepInput) -> tuple[torch.Tensor, DeviceEvent | None]:
        """The rest. Returns the result's copy on the host, and its event, which also covers `certain`."""
        assert self._program is not None
        captured = self._replayed
        if captured is None:
            self._program.rest(self._program.choose())
        else:
            captured.rest.replay()
        if step.mailed is not None:
            self._mail(self._program, step.mailed)
        self.certain = (
            None if step.feature_request is None else self._certain(self._program, step.feature_request)
        )
        return self._fetch(self._program.result_words)

    def _graphs(self, step: StepInput) -> CapturedStep | None:
        """The graphs of a step; None for a shape that has none, where rows are needed that a graph keeps to
        itself, and for prompt rows that it cannot plan.
        """
        captured = None if step.scored else self._captured.get(step.shape)
        return captured if captured is not None and captured.takes(step) else None

    @torch.inference_mode()
    def score(self, request: ScoreRequest) -> TokenScores:
        """Scores rows of the step in progress; valid once the event of its `finish` has passed."""
        assert self._rows is not None and self._program is not None
        return self._score(self._rows, self._program.adapters, request)

    def _score(self, rows: torch.Tensor, adapters: torch.Tensor | None, request: ScoreRequest) -> TokenScores:
        device = self.state.device
        places = _pinned(np.array(request.places, np.int32), device).to(device, non_blocking=True)
        tokens = _pinned(np.array(request.tokens, np.int64), device).to(device, non_blocking=True)
        logits = partial(self.state.slice_logits, rows, adapters)
        scores = score_slices(places, tokens, request.top, logits, score)
        if request.experts:
            assert self._recorder is not None
            scores = replace(scores, experts=self._recorder.rows(places))
        return scores.each(self.state.all_gather_rows).to_host()

    @torch.inference_mode()
    def features(self, rows: SequenceOf[int]) -> torch.Tensor:
        """Float32 [ranks, len(rows), head width]: of rows of the step that was begun; valid as of `score`."""
        assert self._program is not None
        return self._features(self._program, rows)

    def _features(self, program: StepProgram, rows: SequenceOf[int]) -> torch.Tensor:
        places = _pinned(np.array(rows, np.int64), self.state.device)
        features = program.features(places.to(self.state.device, non_blocking=True))
        return self.state.all_gather_rows(features.float()).to("cpu", non_blocking=True)

    def _certain(self, program: StepProgram, request: FeatureRequest) -> torch.Tensor:
        device, count = self.state.device, len(request.decoded)
        pinned = _pinned(np.array([*request.decoded, *request.rows], np.int64), device)
        places, parts = pinned.to(device, non_blocking=True), []
        if request.decoded:
            parts.append(program.certain.index_select(0, places[:count]))
        if request.rows:
            parts.append(program.features(places[count:]))
        return torch.cat(parts).float().to("cpu", non_blocking=True)

    def _mail(self, program: StepProgram, prompts: MailedPrompts) -> None:
        """Posts the ends of prompts that have landed."""
        parts = prompts.slots, prompts.rows, prompts.words
        pinned = _pinned(np.concatenate([part.reshape(-1) for part in parts]), self.state.device)
        packed = pinned.to(self.state.device, non_blocking=True).split([part.size for part in parts])
        slots, rows, words = (each.clone() for each in packed)  # on 16 bytes, as kernels like it
        program.mail(slots, rows.long(), words.view(prompts.words.shape))

    def copy_page(self, source: int, target: int, rank: int = 0) -> None:
        """Copies a page in every pool, after the steps before it and before those after it.

        `rank`: of several that attend with pages of their own.
        """
        assert rank == 0, "the other ranks get it from rank 0"
        for pool in self.state.pools:
            pool.copy_page(source, target)

    @torch.inference_mode()
    def copy_state(self, source: int, target: int) -> None:
        """Copies a slot of states, in the same order."""
        assert self.state.pool.states is not None
        self.state.pool.states.copy(source, target)

    def _send(self, step: StepInput) -> None:
        words, writes = step.data.shape[0], step.writes
        if words > self._inputs.shape[0]:
            raise ValueError(f"a step of {words} words; {self._inputs.shape[0]} is the most")
        out = self._outgoing[self._turn]
        out[:words] = torch.from_numpy(step.data)
        self._inputs[:words].copy_(out[:words], non_blocking=True)
        self._apply(writes)

    def _apply(self, writes: np.ndarray) -> None:
        if writes.shape[1]:
            self.tables.apply(_pinned(writes, self.state.device).to(self.state.device, non_blocking=True))

    def _fetch(self, words: int) -> tuple[torch.Tensor, DeviceEvent | None]:
        room = words if self.state.sharers is None else ProcessGroup.exchanged(words)
        gathered = self.state.all_gather_rows(self._results[:room])
        host = self._incoming[self._turn][: gathered.numel()].view(gathered.shape)
        host.copy_(gathered, non_blocking=True)
        return host[:, :words], self._event()

    def _event(self) -> DeviceEvent | None:
        """An event that passes when the device has done all that was launched until now."""
        if self.state.device == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    # --- before the first step -----------------------------------------------------------------------

    @torch.inference_mode()
    def rehearse(
        self, shape: StepShape, spans: SequenceOf[QuerySpan] = (), brief: bool = False
    ) -> StepProgram:
        """Run a step in which every row is padding, without a graph. `spans`: of its prompt rows, if they are
        to be planned. `brief`: it loads its kernels, and takes as few layers for that as it can.
        """
        planned = bool(spans) and self.state.prompts is not None and self.state.prompts.plan(spans)
        state = self._brief if brief else self.state
        program = StepProgram(state, shape, self._inputs, self._results, planned)
        self._rehearse(program, shape)
        return program

    @property
    def _brief(self) -> DeviceState:
        return replace(self.state, model=self.state.model.brief())

    def _rehearse(self, program: StepProgram, shape: StepShape) -> None:
        program.blank()
        rows = program.forward()
        if shape.chunk:
            self._score(rows, program.adapters, ScoreRequest(0, range(1), (0,), 1))
        if shape.sampled:
            special = padding_rows(min(shape.sampled, SLICE), self.tables.padding_slot, self._vocab_size)
            program.sample_special(_pinned(special, self.state.device))
            masks = torch.full((1, mask_words(self._vocab_size)), -1, dtype=torch.int32)
            program.mask(*(each.to(self.state.device) for each in (masks[0, :1] + 1, masks)))
        program.rest(program.choose())
        if shape.width > 1:
            padding = [self.tables.padding_slot, *[-1] * (HEAD - 1 + self.tables.drafts.shape[1])]
            self._draft_forced(padding)  # of a length that no slot has
        if self.state.tap is not None:
            self._certain(program, FeatureRequest(range(min(shape.round_rows, 1)), [0]))
            if self.state.tap.mails:
                self._mail(program, MailedPrompts.padding(self.tables.padding_slot))
        self.wait()

    @torch.inference_mode()
    def rehearse_forward(self, shape: StepShape) -> None:
        """Launches the model's part of a step in which every row is padding, and waits for nothing."""
        program = StepProgram(self.state, shape, self._inputs, self._results)
        program.blank()
        program.forward()

    @torch.inference_mode()
    def rehearse_join(self, program: StepProgram) -> None:
        """Fetch a feature of what was rehearsed, and draft with it for a sequence of padding."""
        features = self._features(program, [0])
        self.wait()
        own = features[0].numpy()  # of several attention ranks one's is as good
        words = np.array([[self.state.tables.padding_slot], [0], [0], [-1]], np.int32)
        self._join(JoinBatch(words, own, self.tables.sizes.width, np.zeros((2, 0), np.int32)))
        self.wait()

    @torch.inference_mode()
    def rehearse_catch_up(self, count: int, width: int) -> None:
        """Let `count` sequences of padding catch up."""
        self._catch_up(CatchUp.padding(count, width, self.tables.padding_slot))
        self.wait()

    @torch.inference_mode()
    def rehearse_arrival(self) -> None:
        """Make again what follows from a slot without rows."""
        self._remake([ArrivedState(0, 0, 0)])
        self.wait()

    def wait(self) -> None:
        """Waits until the device has done all that was launched."""
        if self.state.device != "cpu":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def capture(self, shapes: SequenceOf[StepShape], catch_ups: SequenceOf[tuple[int, int]]) -> None:
        """Record a graph for each shape, all in one pool of memory; no two are replayed at once.

        `catch_ups`: as many sequences that catch up before rounds of such a width.
        """
        if not shapes:
            return
        recorder, brief = GraphRecorder(), self._brief
        most, vocab = max(shape.sampled for shape in shapes), self._vocab_size
        logits = torch.empty(most, vocab, dtype=torch.float32, device=self.state.device)
        for shape in track(
            shapes, description="capturing graphs", console=Console(stderr=True), transient=True
        ):
            room = self._room_for(shape)
            made = partial(StepProgram, planned=room is not None, logits=logits)
            # Kernels are loaded before they are recorded; for that a layer of each kind does.
            self._rehearse(made(brief, shape, self._inputs, self._results), shape)
            program = made(self.state, shape, self._inputs, self._results)
            forward, rest = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with recorder.recording(forward):
                program.forward()
            with recorder.recording(rest):
                program.rest(program.choose())
            self._captured[shape] = CapturedStep(program, forward, rest, room)
        for count, width in catch_ups:
            self.rehearse_catch_up(count, width)
            padding = CatchUp.padding(count, width, self.tables.padding_slot)
            words, graph = torch.from_numpy(padding.words).to(self.state.device), torch.cuda.CUDAGraph()
            with recorder.recording(graph):
                self._take_waiting_rows(words, width)
            self._captured_catch_ups[padding.shape] = CapturedCatchUp(words, graph)

    def _room_for(self, shape: StepShape) -> PromptBuffers | None:
        """The room from which the shape's graph plans its prompt rows: alone in a step, in layers without
        states, behind which turns are short and contexts are long.
        """
        prompts = None if shape.round_rows or self.state.pool.states is not None else self.state.prompts
        return prompts.room(shape.chunk, shape.prompts) if prompts is not None and shape.chunk else None

    # --- after the last step -------------------------------------------------------------------------

    def close(self) -> bool:
        """Gives up the graphs. False: the device may hang, so nothing waits for it any more."""
        self._program = self._replayed = self._rows = None
        self.forget_graphs()
        return True

    def forget_graphs(self) -> None:
        """Every step is launched kernel by kernel from now on."""
        self._captured.clear()
        self._captured_catch_ups.clear()


def _host(words: int, device: str) -> torch.Tensor:
    return torch.zeros(words, dtype=torch.int32, pin_memory=device != "cpu")


def _pinned(array: np.ndarray, device: str) -> torch.Tensor:
    if device == "cpu":
        return torch.from_numpy(array)
    tensor = torch.from_numpy(array[:0]).new_empty(array.shape, pin_memory=True)
    tensor.numpy()[...] = array  # torch's own copy wakes threads on all cores for large ones, and they spin
    return tensor
