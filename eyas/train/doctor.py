"""`eyas doctor head`: what a draft head is, whether it fits a target, and how well it drafts for it.

All that does not fit is reported at once: a folder's tensors stand beside what a model wants of them. A
model that is built from a `CheckpointInspection` is no model: it only says by what it takes which tensors it
needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from eyas.bench.answering import EnginePrompt
from eyas.common.errors import ConfigError
from eyas.engine.attention.torch_heads import torch_attention
from eyas.engine.checkpoint.config import DraftConfig, ModelConfig
from eyas.engine.checkpoint.weights import FolderWeights, Part, Shape
from eyas.engine.kv.pool import PoolShape
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.heads import head_family, head_spelling, read_head, target_alike
from eyas.engine.models.ops.torch_ops import TorchMachine
from eyas.engine.models.table import read_model
from eyas.flags import positive
from eyas.train.acceptance import ByDepth, served_acceptance, whole_chain
from eyas.train.conversations import ChatTokenizer, ConversationLine, as_chats, read_lines

SAMPLES = (
    "What is the capital of France?",
    "Count from one to twenty.",
    "Anna has 12 apples and gives 5 of them away. How many are left?",
    "Write a Python function that adds two numbers.",
    "List the planets of the solar system.",
    "Tell me a short story about a lighthouse.",
)
LEAST = 0.05  # of first drafts that must be right, or the head is hardly the target's
CAPTURED = "aux_hidden_state_layer_ids", "target_layer_ids"  # of config.json: ends of its keys
SHOWN = 6  # unread tensors by name


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas doctor head`."""
    add = parser.add_argument
    add("head", type=Path, metavar="DIR", help="the head's folder")
    add("--target", type=Path, metavar="DIR", help="the model that it is to draft for")
    add("--device", default="cpu", metavar="D", help="where acceptance is measured: cpu or cuda (cpu)")
    add("--prompts", type=Path, metavar="FILE", help="JSON lines as `eyas train eagle3` takes them (samples)")
    add("--num-prompts", type=positive, default=6, metavar="N", help="answered at most (6)")
    add("--max-answer", type=positive, default=64, metavar="N", help="tokens per answer at most (64)")


def run(args: argparse.Namespace) -> int:
    """Prints a report; returns the exit code: 0 without problems, else 1."""
    target = None if args.target is None else read_model(args.target, impl="eyas")
    try:
        head = read_head(args.head, target or target_alike(args.head))
    except ConfigError as error:
        return _end([error.message])
    print(f"{args.head}: {about(head)}")
    if target is None:
        print("--target DIR says whether it fits a model, and how well it drafts for it")
        return _end([])
    problems = check_tensors(head, target)
    if not problems:
        print(f"it fits {args.target}")
        problems = _measured(args, head, target)
    return _end(problems)


def about(head: DraftConfig) -> str:
    """Describes a head in a few words."""
    decoder = head.decoder
    attention = decoder.layers[0].attention
    words = [
        head_family(head.algorithm).NAME,
        f"{decoder.num_layers} layer{'s' * (decoder.num_layers != 1)} of {decoder.hidden_size}",
        f"{attention.num_heads} query and {attention.num_kv_heads} key heads",
        f"{head.draft_vocab_size} of {decoder.vocab_size} ids",
    ]
    if head.block is not None:
        words.append(f"up to {head.block.most} drafts in one pass")
    return ", ".join(words)


def check_tensors(head: DraftConfig, target: ModelConfig) -> list[str]:
    """Prints what the head is made of; every tensor that does not fit is a sentence."""
    problems = []
    inspected, error = _built(head, target, blank=False)
    if error is not None:  # what no shape tells, as a map to ids that the target lacks; there may be more
        problems.append(error.message)
        inspected, _ = _built(head, target, blank=True)
    parameters = f"{inspected.parameters / 1e6:.1f} M parameters"
    print(f"it reads {parameters}; the feature: {_feature(head, target)}")
    if (unread := inspected.unread) and head.folder.resolve() != target.folder.resolve():
        more = f" and {len(unread) - SHOWN} more" * (len(unread) > SHOWN)
        print(f"tensors that it has and nothing reads: {', '.join(unread[:SHOWN])}{more}")
    return problems + inspected.complaints


def _built(
    head: DraftConfig, target: ModelConfig, *, blank: bool
) -> tuple[CheckpointInspection, ConfigError | None]:
    """Builds the head of its tensors, and says what that was not possible for."""
    family = head_family(head.algorithm)
    backend = torch_attention(head.decoder, PoolShape(head.pool_format(16), pages=1, page_size=16))
    machine = TorchMachine(head.decoder, backend)
    with FolderWeights(target.folder, target.spelling, quantized=target.quantized) as weights:
        ends = ModelEnds.load(target, weights, machine)
    with CheckpointInspection(head, blank=blank) as inspected:
        try:
            family.load_tap(head, inspected, lambda rows: rows, machine)
            family.load_draft(head, inspected, ends, machine)
        except ConfigError as error:
            return inspected, error
        return inspected, None


def _feature(head: DraftConfig, target: ModelConfig) -> str:
    if not head.capture_layers:
        return "a token's id"
    if head.capture_layers == (target.num_layers,):
        return "what leaves the target's last layer"
    return f"what enters the target's layers {', '.join(map(str, head.capture_layers))}"


# --- acceptance ------------------------------------------------------------------------------------------


def _measured(args: argparse.Namespace, head: DraftConfig, target: ModelConfig) -> list[str]:
    """Prints the acceptance of chains; a head that is hardly ever right is a problem."""
    prompts, chain = _prompts(args), whole_chain(head)
    counts = served_acceptance(args.device, args.target, args.head, prompts, chain=chain)
    print(f"chains of {chain.steps} on {len(prompts)} prompts: {_said(counts)}")
    for layers in _other_readings(head, target):
        other = served_acceptance(args.device, args.target, args.head, prompts, layers, chain)
        print(f"with --draft-capture-layers {','.join(map(str, layers))}: {_said(other)}")
    if counts.shares and counts.shares[0] >= LEAST:
        return []
    return [f"fewer than {LEAST:.0%} of first drafts are right: was it trained for another target?"]


def _other_readings(head: DraftConfig, target: ModelConfig) -> list[tuple[int, ...]]:
    """The layers that config.json would name if they were counted from another one.

    Some name layers whose input is captured, some those whose output is, under the same name.
    """
    last = target.num_layers
    named = any(key in (head.folder / "config.json").read_text() for key in CAPTURED)
    if not named or head.capture_layers == (last,):  # a head of the last hidden state takes no other
        return []
    shifted = [tuple(layer + by for layer in head.capture_layers) for by in (-1, 1)]
    return [layers for layers in shifted if 0 <= min(layers) and max(layers) <= last]


def _prompts(args: argparse.Namespace) -> Sequence[EnginePrompt]:
    speech = ChatTokenizer(args.target)
    if args.prompts is not None:
        lines = read_lines(args.prompts, "prompts")
    elif speech.chats:
        lines = as_chats([[{"role": "user", "content": text}] for text in SAMPLES])
    else:
        lines = [ConversationLine(text, prompt=text) for text in SAMPLES]
    questions = [ids for line in lines if (ids := speech.question(line))][: args.num_prompts]
    if not questions:
        raise ConfigError(f"--prompts: {args.prompts} asks nothing", param="prompts")
    return [EnginePrompt(i, ids, args.max_answer) for i, ids in enumerate(questions)]


def _said(counts: ByDepth) -> str:
    shares = ", ".join(f"{share:.2f}" for share in counts.shares)
    return f"acceptance length {counts.length:.2f}; by depth {shares}"


def _end(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"problem: {problem}")
    print("all is well" if not problems else f"{len(problems)} found")
    return 1 if problems else 0


class CheckpointInspection(FolderWeights):
    """Notes in `complaints`, a sentence each, which tensors are missing, of another shape, or not finite.

    `blank`: whole numbers are given as zeros, for who has seen already that they cannot be used.
    """

    def __init__(self, head: DraftConfig, *, blank: bool) -> None:
        decoder = head.decoder
        super().__init__(head.folder, head_spelling(head), quantized=decoder.quantized, fused=decoder.fused)
        self._blank = blank
        self._shapes = {name: self._shape(name) for name in self._home}
        self._taken: set[str] = set()
        self.complaints: list[str] = []

    @property
    def unread(self) -> list[str]:
        """The tensors that were not taken, in the model's spelling."""
        return sorted(self._shapes.keys() - self._taken)

    @property
    def parameters(self) -> int:
        """Elements of the tensors that were taken."""
        return sum(torch.Size(self._shapes[name]).numel() for name in self._taken)

    def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
        if name not in self:
            self.complaints.append(f"tensor {name} is missing")
            return torch.zeros(shape, dtype=dtype)
        self._taken.add(name)
        if self._shapes[name] != shape:
            self.complaints.append(f"tensor {name} is {_shown(self._shapes[name])}, not {_shown(shape)}")
            return torch.zeros(shape, dtype=dtype)
        if self._blank and not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)
        return super()._load(name, shape, part, dtype)

    def _complain(self, broken: list[str]) -> None:
        self.complaints += [f"tensor {name} holds NaN or infinity" for name in broken]


def _shown(shape: Shape) -> str:
    return " x ".join(map(str, shape))
