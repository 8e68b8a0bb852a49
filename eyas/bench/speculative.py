"""`eyas bench speculative`: which speculation pays at which batch, for a model and its draft head.

A grid of chains and trees, and the model without drafts: each in an engine of its own, which answers real
prompts with a constant number of them at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.bench.one_batch import config_for, modes_of
from eyas.bench.output import TablePrinter, check_writable
from eyas.bench.plot_style import check_plot
from eyas.bench.plots import plot_speculative
from eyas.common.config import MOST_NODES, MOST_ROWS, MOST_STEPS, MOST_TOPK, EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.model_folder import model_name
from eyas.configuration import drafts
from eyas.flags import add_engine, positive

if TYPE_CHECKING:
    from eyas.bench.answering import EnginePrompt

Line = dict[str, Any]
PLAIN = "no drafts"
GRID = {"spec_steps": "steps", "spec_topk": "topk", "spec_draft_tokens": "draft-tokens"}
OF_DRAFTS = (
    *("spec_ngram", "spec_suffix", "spec_adaptive", "draft_capture_layers"),
    *("speculative_token_map", "rejection_sample_method"),
    *("synthetic_acceptance_rates", "synthetic_acceptance_length"),
)
"""Flags that an engine without drafts has not."""

COLUMNS = {
    "drafts": "setting",
    "batch": "batch_size",
    "step p50 ms": "median_step_ms",
    "tok/step": "accept_length",
    "tok/s": "output_throughput",
    "x plain": "speedup",
}


@dataclass(frozen=True)
class DraftSetting:
    """One point of the grid; None: no drafts."""

    spec: SpeculationConfig | None

    @property
    def name(self) -> str:
        """The name for people."""
        spec = self.spec
        if spec is None:
            return PLAIN
        if spec.topk == 1:
            return f"chain of {spec.steps}"
        return f"tree {spec.steps} x {spec.topk}, {spec.draft_tokens} nodes"

    @property
    def flags(self) -> str:
        """The flags of an engine."""
        spec = self.spec
        if spec is None:
            return "--draft none"
        flags = f"--spec-steps {spec.steps} --spec-topk {spec.topk}"
        return flags if spec.topk == 1 else f"{flags} --spec-draft-tokens {spec.draft_tokens}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas bench speculative`."""
    add = parser.add_argument_group("grid").add_argument
    add("--batch-size", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="(1 8 32)")
    add("--steps", type=positive, nargs="+", default=[2, 4, 6], metavar="N", help="drafts in depth (2 4 6)")
    add("--topk", type=positive, nargs="+", default=[1, 4], metavar="N", help="1: chains, else trees (1 4)")
    nodes = "nodes of trees, with the root (8 16 32)"
    add("--draft-tokens", type=positive, nargs="+", default=[8, 16, 32], metavar="N", help=nodes)
    add = parser.add_argument_group("prompts").add_argument
    lines = "JSON lines as `eyas train eagle3` takes them (the embedded model has its own)"
    add("--prompts", type=Path, metavar="FILE", help=lines)
    add("--num-prompts", type=positive, default=64, metavar="N", help="answered for each batch size (64)")
    add("--max-answer", type=positive, default=128, metavar="N", help="tokens per answer at most (128)")
    add = parser.add_argument_group("results").add_argument
    add("--output-file", type=Path, metavar="FILE", help="append a JSON line per batch and setting")
    add("--plot", type=Path, metavar="FILE", help="draw throughput and acceptance (.svg, .png)")
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Measures the grid, prints it and the best of it; 1 if anything failed."""
    from eyas.bench.fits import check
    from eyas.bench.parts import ChildPart, run_parts

    _check(args)
    batches = sorted(set(args.batch_size))
    configs = [(setting, _config(args, setting)) for setting in settings(args)]
    check(configs[-1][1])
    prompts = prompts_of(args)
    lines: list[Line] = []
    table = TablePrinter(COLUMNS, args.output_file, show=_shown, first=max(len(s.name) for s, _ in configs))

    def tell(line: Line) -> None:
        if "error" not in line:
            line = with_speedup(line, lines)
            lines.append(line)
        table.tell(line)

    parts = [
        ChildPart(setting.name, functools.partial(measure, config, setting, batches, prompts))
        for setting, config in configs
    ]
    failed = run_parts(parts, tell)
    for line in best(lines):
        gain = f"{line['setting']}, {line['speedup']:.2f} x plain"
        print(f"batch {line['batch_size']}: {line['flags']} ({gain})")
    if args.plot and lines:
        plot_speculative(lines, args.plot, f"Speculation for {model_name(args.model)}")
    return int(bool(failed or table.failed))


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that cannot work, before anything is measured."""
    for name, flag in GRID.items():
        if getattr(args, name) != args.parser.get_default(name):
            text = f"--{name.replace('_', '-')}: a grid has many: give --{flag}"
            raise ConfigError(text, param=flag)
    check_writable("output-file", args.output_file)
    if args.plot:
        check_writable("plot", args.plot)
        check_plot(args.plot)
    if max(args.batch_size) > args.num_prompts:
        text = f"--num-prompts: {args.num_prompts} cannot fill a batch of {max(args.batch_size)}"
        raise ConfigError(text, param="num-prompts")


def settings(args: argparse.Namespace) -> list[DraftSetting]:
    """The model without drafts, all chains, and all trees that there can be.

    Raises ConfigError if no draft is among them.
    """
    drafted = [
        DraftSetting(spec)
        for steps, topk in itertools.product(sorted(set(args.steps)), sorted(set(args.topk)))
        for spec in _shapes(steps, topk, args.draft_tokens)
    ]
    if not drafted:
        raise ConfigError("--draft-tokens: no tree of --steps and --topk has as many", param="draft-tokens")
    return [DraftSetting(None), *drafted]


def _shapes(steps: int, topk: int, nodes: Sequence[int]) -> Iterator[SpeculationConfig]:
    if steps > MOST_STEPS or topk > min(MOST_TOPK, MOST_ROWS // steps):
        return
    if topk == 1:
        yield SpeculationConfig(steps, 1, steps + 1)
        return
    most = min(SpeculationConfig(steps, topk).most_draft_tokens, MOST_NODES)
    for count in sorted(set(nodes)):
        if steps < count <= most:
            yield SpeculationConfig(steps, topk, count)


def _config(args: argparse.Namespace, setting: DraftSetting) -> EngineConfig:
    """The engine of one setting, launched as it serves. Raises ConfigError if nothing is drafted."""
    given = argparse.Namespace(**vars(args))
    if setting.spec is not None and not drafts(args):
        raise ConfigError("--draft: a draft head is needed", param="draft")
    if setting.spec is None:
        given.draft = "none"
        for name in OF_DRAFTS:
            setattr(given, name, args.parser.get_default(name))
    else:
        for name, value in zip(GRID, dataclasses.astuple(setting.spec), strict=False):
            setattr(given, name, value)
    config = config_for(given, max(args.batch_size))
    *_, (_, served) = modes_of(config)
    return served


def prompts_of(args: argparse.Namespace) -> list[EnginePrompt]:
    """The questions of a file, or held-out ones of the embedded model, repeated up to the requested
    number.
    """
    from eyas.bench.answering import EnginePrompt
    from eyas.cluster.hub import model_folder
    from eyas.configuration import is_nano
    from eyas.train.conversations import ChatTokenizer, as_chats, read_lines

    if args.prompts is not None:
        lines = read_lines(args.prompts, "prompts")
    elif is_nano(args.model):
        from eyas.evals.heldout import heldout_prompts

        lines = as_chats(heldout_prompts()[: args.num_prompts])
    else:
        raise ConfigError("--prompts: a model needs questions of its kind", param="prompts")
    speech = ChatTokenizer(Path(model_folder(args.model, weights=False)))
    questions = [ids for line in lines if (ids := speech.question(line))]
    if not questions:
        raise ConfigError(f"--prompts: {args.prompts} asks nothing", param="prompts")
    endless = itertools.islice(itertools.cycle(questions), args.num_prompts)
    return [EnginePrompt(i, ids, args.max_answer) for i, ids in enumerate(endless)]


def measure(
    config: EngineConfig,
    setting: DraftSetting,
    batches: Sequence[int],
    prompts: Sequence[EnginePrompt],
    tell: Any,
) -> None:
    """Runs every batch size in one engine, and tells a line for each. In the process of a part."""
    from eyas.bench.answering import busy
    from eyas.bench.one_batch import about

    constant = about(config) | {"setting": setting.name, "flags": setting.flags}
    for size, figures in busy(config, batches, prompts):
        tell(constant | {"batch_size": size} | figures)


def with_speedup(line: Line, before: Sequence[Line]) -> Line:
    """The line with its throughput as a multiple of that without drafts, which was measured first."""
    plain = [one for one in before if one["setting"] == PLAIN and one["batch_size"] == line["batch_size"]]
    reference = plain[0] if plain else line
    return line | {"speedup": line["output_throughput"] / reference["output_throughput"]}


def best(lines: Sequence[Line]) -> list[Line]:
    """The fastest setting of each batch size."""
    sizes = sorted({line["batch_size"] for line in lines})
    return [
        max((line for line in lines if line["batch_size"] == size), key=lambda one: one["output_throughput"])
        for size in sizes
    ]


def _shown(name: str, value: Any) -> str:
    if name == "output_throughput":
        return f"{value:,.0f}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
