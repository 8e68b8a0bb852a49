"""`eyas train eagle3`, `eagle`, `mtp`, `peagle`, `dflash`: texts, answers, training, a folder, acceptance.

The composition root of heads for any target. Under `--out` stand the head and, in `training/`, what a killed
run goes on from. `--plot` draws loss, acceptance length and acceptance by depth over the steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from eyas.bench import plot_style
from eyas.bench.answering import EnginePrompt
from eyas.bench.output import append_line, check_writable
from eyas.bench.plot_style import check_plot
from eyas.common.errors import ConfigError
from eyas.common.machine.gpus import number_of
from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.models.heads import TAKING_UPDATES
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from eyas.flags import amount, positive, whole
from eyas.train.acceptance import served_acceptance
from eyas.train.answers import AnswerOptions, answers
from eyas.train.conversations import ChatTokenizer, ConversationLine, answered, read_lines
from eyas.train.head_run import HeadRun, HeadSettings, RunIntervals, TrainingTexts
from eyas.train.heads.table import OWN_VOCABULARY, head_kind
from eyas.train.packing import MOST_TEXTS, TrainingExample
from eyas.train.recipe import TrainingRecipe
from eyas.train.saving import TrainingCheckpoint, save_trained
from eyas.train.teacher import BatchLimit, PlainTeacher, TeacherModel
from eyas.train.updates import save_updates

DRAFT_VOCAB = 32_000  # of a head that has outputs of its own, unless the target has fewer ids
SHORTEST_ANSWER = 8  # tokens that a question must leave room for
SERVED = 16  # held-out questions that are answered through the engine
VOCABULARY_STEP = 16  # outputs of a head come in multiples: kernels want it
TITLES = (
    "Loss (lower is better)",
    "Acceptance length (higher is better)",
    "Acceptance by depth, held-out texts (higher is better)",
)
Line = Mapping[str, Any]


def load_teacher(folder: Path, device: str, room: BatchLimit) -> TeacherModel:
    """The target of a folder. Raises ConfigError if it cannot be served there."""
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"--device: {device} is not available: PyTorch sees no GPU here", param="device")
    config = read_model(folder, impl="eyas")
    if room.length > config.context_length:
        raise ConfigError(
            f"--max-length: {room.length} is more than the {config.context_length} tokens of {folder}",
            param="max-length",
        )
    placement = WeightPlacement(device, torch.float32 if device == "cpu" else torch.bfloat16)
    if device == "cpu":
        return PlainTeacher(config, placement, room)
    if why := refusal(config, config.vocab_size):
        raise ConfigError(f"--target: {folder} has no implementation for a GPU: {why}", param="target")
    from eyas.train.device_teacher import DeviceTeacher

    torch.cuda.set_device(number_of(device))  # of this thread: kernels run on the current device
    return DeviceTeacher(config, placement, room)


@dataclass(frozen=True)
class RunFolder:
    """The files that a run writes."""

    out: Path

    @property
    def answers(self) -> Path:
        """Tokens of the target's answers, a JSON line each."""
        return self.out / "training" / "answers.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The state that a killed run goes on from."""
        return self.out / "training" / "checkpoint.pt"

    @property
    def log(self) -> Path:
        """The file of all measurements, a JSON line each."""
        return self.out / "training" / "log.jsonl"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of all these commands; the parser says which command it is."""
    kind = parser.get_default("kind")
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="DIR", help="the model that the head drafts for")
    add("--data", type=Path, required=True, metavar="FILE", help="JSON lines: messages, prompt or text")
    add("--out", type=Path, required=True, metavar="DIR", help="the head's folder")
    add("--device", default="cpu", metavar="D", help="cpu or cuda (cpu)")
    add("--resume", action="store_true", help="go on where a killed run ended")
    add("--plot", type=Path, metavar="FILE", help="draw loss and acceptance (.svg, .png)")
    add("--seed", type=whole, default=0, metavar="N", help="(0)")
    add = parser.add_argument_group("texts").add_argument
    add("--keep-answers", action="store_true", help="learn the data's answers, not the target's own")
    add("--temperature", type=amount, default=0.0, metavar="T", help="of the target's own answers (0)")
    add("--max-answer", type=positive, default=512, metavar="N", help="their longest, in tokens (512)")
    add("--max-length", type=positive, default=1024, metavar="N", help="tokens of a text and of a row (1024)")
    add("--held-out", type=whole, default=64, metavar="N", help="lines kept for measurements (64)")
    if kind in OWN_VOCABULARY:
        add(
            "--draft-vocab", type=positive, metavar="N",
            help=f"the head's outputs: the ids that answers use most ({DRAFT_VOCAB}, or the target's)",
        )  # fmt: skip
    if kind in TAKING_UPDATES:
        text = "an EAGLE-3 head that it grows out of" if kind == "peagle" else "a head that it begins as"
        add("--begin-with", type=Path, metavar="DIR", help=text)
        text = "learn updates of this rank of its layers alone: the folder draft of an adapter"
        add("--updates", type=positive, metavar="RANK", help=text)
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=2000, metavar="N", help="(2000)")
    add("--batch-size", type=positive, default=8, metavar="N", help="rows of --max-length tokens (8)")
    add("--learning-rate", type=amount, default=1e-3, metavar="R", help="the highest (0.001)")
    add("--unroll", type=positive, metavar="N", help="steps of the training-time test (the kind's own)")
    add("--measure-every", type=positive, default=200, metavar="N", help="steps (200)")
    add("--save-every", type=positive, default=200, metavar="N", help="steps between checkpoints (200)")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder = RunFolder(args.out)
    _check(args, folder)
    lines, speech = read_lines(args.data), ChatTokenizer(args.target)
    heldout, learnt = _split(lines, args.held_out, args.seed)
    examples = _examples(args, speech, lines, folder)
    texts = TrainingTexts(*([examples[i] for i in some if i in examples] for some in (learnt, heldout)))
    if not texts.learnt:
        raise ConfigError(f"--data: {args.data} has no text to learn", param="data")
    history = _trained(args, texts, folder)
    if args.plot:
        plot_training(history, args.plot, f"{args.kind} for {args.target.name}")
    console = Console()
    console.print(f"{folder.out}: {_summary(history[-1])}", soft_wrap=True)
    served = heldout[:SERVED]
    prompts = [EnginePrompt(i, q, args.max_answer) for i in served if (q := speech.question(lines[i]))]
    if prompts and not vars(args).get("updates"):  # no folder of a head
        console.print(_served(args, prompts), soft_wrap=True)
    return 0


def _check(args: argparse.Namespace, folder: RunFolder) -> None:
    """Raises ConfigError for flags that cannot work, before anything is loaded."""
    if args.plot:
        check_plot(args.plot)
    if folder.checkpoint.exists() and not args.resume:
        raise ConfigError(f"--out: {folder.out} has a checkpoint: --resume goes on with it", param="out")
    read_model(args.target, impl="eyas")
    unroll = args.unroll or head_kind(args.kind).UNROLL
    if args.max_length < unroll + 2:  # a pair, and the token of each step
        text = f"--max-length: {args.max_length} tokens are too few for --unroll {unroll}"
        raise ConfigError(text, param="max-length")
    if vars(args).get("updates") and not args.begin_with:
        raise ConfigError("--updates: of which head? (--begin-with)", param="updates")
    if (begin := vars(args).get("begin_with")) and not (begin / "model.safetensors").exists():
        raise ConfigError(f"--begin-with: {begin} has no model.safetensors", param="begin-with")
    if (size := vars(args).get("draft_vocab")) and size % VOCABULARY_STEP:
        text = f"--draft-vocab: {size} is not a multiple of {VOCABULARY_STEP}"
        raise ConfigError(text, param="draft-vocab")
    try:
        folder.log.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {folder.out} cannot be written: {error.strerror}", param="out") from error
    check_writable("plot", args.plot)  # it may lie in the head's own folder


# --- texts -----------------------------------------------------------------------------------------------


def _split(lines: Sequence[ConversationLine], heldout: int, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the lines that are held out, a tenth at most, and of the others."""
    order = list(range(len(lines)))
    random.Random(seed).shuffle(order)
    heldout = min(heldout, len(lines) // 10)
    return sorted(order[:heldout]), sorted(order[heldout:])


def _examples(
    args: argparse.Namespace, speech: ChatTokenizer, lines: Sequence[ConversationLine], folder: RunFolder
) -> dict[int, TrainingExample]:
    """The text of each line that has one which fits, by the line's number."""
    given = {
        i: speech.as_given(line) for i, line in enumerate(lines) if args.keep_answers or line.text is not None
    }
    questions = {i: speech.question(line) for i, line in enumerate(lines) if i not in given}
    room = args.max_length - SHORTEST_ANSWER
    fitting = {i: ids for i, ids in questions.items() if len(ids) <= room}
    if left := len(questions) - len(fitting):
        Console(stderr=True).print(f"{left} questions are longer than {room} tokens and are left out")
    said: Mapping[int, Sequence[int]] = {}
    if fitting:
        asking = AnswerOptions(
            target=str(args.target),
            device=args.device,
            temperature=args.temperature,
            longest=args.max_answer,
            length=args.max_length,
            seed=args.seed,
        )
        said = answers(asking, fitting, folder.answers)
    return given | {i: answered(fitting[i], answer) for i, answer in said.items()}


# --- training --------------------------------------------------------------------------------------------


def _trained(args: argparse.Namespace, texts: TrainingTexts, folder: RunFolder) -> list[dict[str, Any]]:
    """Trains the head and writes its folder; its measurements. Nothing is left on the device."""
    room = BatchLimit(args.batch_size * args.max_length, args.batch_size * MOST_TEXTS, args.max_length)
    teacher = load_teacher(args.target, args.device, room)
    try:
        training = _run_of(args, teacher, texts, folder)
        training.train(
            RunIntervals(args.measure_every, args.save_every), lambda line: append_line(folder.log, line)
        )
        unroll = args.unroll or head_kind(args.kind).UNROLL
        if rank := vars(args).get("updates"):
            save_updates(training.head, rank, folder.out)
        else:
            save_trained(training.head, head_kind(args.kind).described(training.head, unroll), folder.out)
        return training.progress.history
    finally:
        teacher.close()


def _run_of(
    args: argparse.Namespace, teacher: TeacherModel, texts: TrainingTexts, folder: RunFolder
) -> HeadRun:
    """The run, at its start or where its checkpoint is."""
    unroll = args.unroll or head_kind(args.kind).UNROLL
    recipe = TrainingRecipe(args.steps, args.batch_size, args.max_length, rate=args.learning_rate)
    vocab = vars(args).get("draft_vocab") or min(DRAFT_VOCAB, teacher.config.vocab_size)
    own, begin = vocab if args.kind in OWN_VOCABULARY else None, vars(args).get("begin_with")
    updates = vars(args).get("updates") or 0
    settings = HeadSettings(args.kind, recipe, unroll, args.seed, own, begin, updates)
    shared = {
        "kind": args.kind,
        "target": str(args.target.resolve()),
        "data": str(args.data.resolve()),
        "steps": args.steps,
        "batch-size": args.batch_size,
        "max-length": args.max_length,
        "learning-rate": args.learning_rate,
        "unroll": unroll,
        "draft-vocab": settings.draft_vocab,
        "keep-answers": args.keep_answers,
        "held-out": args.held_out,
        "seed": args.seed,
        "begin-with": None if begin is None else str(begin.resolve()),
        "updates": updates,
    }
    training = HeadRun(settings, teacher, texts, TrainingCheckpoint(folder.checkpoint, shared))
    if args.resume and folder.checkpoint.exists():
        training.resume()
    folder.log.write_text("".join(json.dumps(line) + "\n" for line in training.progress.history))
    return training


# --- the report ------------------------------------------------------------------------------------------


def _summary(line: Mapping[str, Any]) -> str:
    text = f"{line['step']} steps in {line['seconds']:.0f} s, loss {line['loss']:.4f}"
    if "acceptance_length" in line:
        text += f"; held-out texts: {_said(line['acceptance_length'], line['acceptance_by_depth'])}"
    return text


def _served(args: argparse.Namespace, prompts: Sequence[EnginePrompt]) -> str:
    """Measures chains through an engine, with the memory that training had."""
    if args.device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()
    counts = served_acceptance(args.device, args.target, args.out, prompts)
    return f"served, {len(prompts)} held-out questions: {_said(counts.length, counts.shares)}"


def _said(length: float, by_depth: Sequence[float]) -> str:
    shares = ", ".join(f"{share:.2f}" for share in by_depth)
    return f"acceptance length {length:.2f}; by depth {shares}"


def plot_training(history: Sequence[Line], path: Path, heading: str) -> None:
    """Writes the figure of a run's measurements. Raises ConfigError as `plot_style.check_plot`."""
    plot_style.check_plot(path)
    measured = [line for line in history if "acceptance_length" in line]
    figure, axes = plot_style.panels(TITLES if measured else TITLES[:1], heading)
    steps = [line["step"] for line in history]
    plot_style.draw(axes[0], plot_style.LOOKS[0], steps, [line["loss"] for line in history])
    if measured:
        steps = [line["step"] for line in measured]
        plot_style.draw(axes[1], plot_style.LOOKS[0], steps, [line["acceptance_length"] for line in measured])
        depths = len(measured[-1]["acceptance_by_depth"])
        for depth, look in zip(range(depths), plot_style.LOOKS, strict=False):
            plot_style.draw(axes[2], look, steps, [line["acceptance_by_depth"][depth] for line in measured])
        axes[2].set_ylim(0, 1)
        plot_style.legend(
            figure, [f"depth {depth + 1}" for depth in range(min(depths, len(plot_style.LOOKS)))]
        )
    for panel in axes:
        panel.set_xlabel("steps", fontsize=9)
    plot_style.save(figure, path)
