"""Heads of several MTP layers against the paper's equations: dense, unpaged, in the paper's own rows.

There row i of layer k is made of the state of row i in the layer before, and of the token of position
i + k + 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import AttentionSpec
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models import mtp
from eyas.engine.models.heads import read_head
from eyas.engine.models.ops.torch_ops import TorchMtpStates
from eyas.engine.models.table import read_model
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.mtp_equations import Equations, Form, close
from tests.unit.tiny_mtp import MIMO, THETA, nextn_prefix, write_tiny_mimo, write_tiny_nextn

STAGES = 3
PIECES = (1, 2, 41, 70)  # where the certain rows of the first round are cut: rows of more than one block
N = PIECES[-1]
AGAIN = 2  # certain rows of the second round, which two of the drafts do not survive
STEPS = 5  # two drafts are deeper than there are layers
NEWS = torch.randint(256, (N + AGAIN + 1,), generator=torch.Generator().manual_seed(3)).tolist()
FORMS = {
    "mimo": Form(
        MIMO, ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), True, True, THETA
    ),
    "nextn": Form("", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), False, False, 10000.0),
}


@dataclass(frozen=True)
class Rule:
    """Which state and which token a layer's rows join, and each trap as a change to it."""

    layers: tuple[int, ...] = (0, 1, 2)  # which stored layer each stage is
    states: bool = True  # of the layer before, not the target's
    ahead: int = 1  # tokens by which each layer is ahead of the one before
    shared: bool = False  # one KV for all layers
    deeper: int = 2  # the layer that drafts what is deeper


class Paper:
    """All layers over `features` of certain rows and the tokens after them, drafts included."""

    def __init__(self, folder: Path, form: Form, rule: Rule) -> None:
        stored = [MIMO[:-1] + str(i) if form.prefix else nextn_prefix(folder, i) for i in range(STAGES)]
        self.rule, self.certain = rule, 0
        self.layers = [Equations(folder, folder, replace(form, prefix=stored[i])) for i in rule.layers]
        if rule.shared:
            for layer in self.layers[1:]:
                layer.read = self.layers[0].read
        self.states: list[list[torch.Tensor]] = [[] for _ in self.layers]

    def drafted(self, features: torch.Tensor, tokens: list[int], depth: int) -> torch.Tensor:
        """The state of which the draft after all `tokens` is made; `depth` of them are drafts themselves."""
        count = features.shape[0]
        for k in range(min(depth + 1, STAGES)):
            enter = features if k == 0 or not self.rule.states else self.states[k - 1]
            while len(self.states[k]) < min(count, len(tokens) - k * self.rule.ahead):
                i = len(self.states[k])
                self.states[k].append(self.layers[k].row(enter[i], tokens[i + k * self.rule.ahead])[0])
        last = self.states[self.rule.deeper]
        if depth >= STAGES:
            last.append(self.layers[self.rule.deeper].row(last[-1], tokens[-1])[0])
            return last[-1]
        return self.states[depth][-1]


def wanted(folder: Path, form: Form, rule: Rule, features: torch.Tensor, drafts: list[list[int]]) -> list:
    """What the drafts of both rounds are made of: by round and depth."""
    rounds = []
    for count, own in zip((N, N + AGAIN), drafts, strict=True):
        paper, tokens = Paper(folder, form, rule), NEWS[1 : count + 1]
        rounds.append(
            [paper.drafted(features[:count], tokens + own[:depth], depth) for depth in range(STEPS)]
        )
    return rounds


@dataclass(frozen=True)
class Case:
    folder: Path
    form: Form


@dataclass(frozen=True)
class Run:
    """What the head makes of some features: by round and depth the rows for its logits, and its drafts."""

    features: torch.Tensor
    rows: list[list[torch.Tensor]]
    drafts: list[list[int]]
    values: list[torch.Tensor]  # of each layer's certain rows


@pytest.fixture(scope="module", params=[pytest.param("mimo", marks=pytest.mark.slow), "nextn"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    write = {"mimo": write_tiny_mimo, "nextn": write_tiny_nextn}[request.param]
    return Case(write(tmp_path_factory.mktemp("models") / "m", stages=STAGES), FORMS[request.param])


@pytest.fixture(scope="module")
def run(case: Case) -> Run:
    return served(case.folder)


def served(folder: Path) -> Run:
    """Two rounds: certain rows in pieces, then a chain; then a few rows more over what was drafted."""
    rig = Rig(folder)
    draft, table = HeadRig(folder, rig), rig.table(N + AGAIN + STEPS)
    features = torch.randn(N + AGAIN, 64, generator=torch.Generator().manual_seed(5))
    cuts, rows, drafts = [0, *PIECES], [], []
    for _ in range(2):
        for first, end in zip(cuts, cuts[1:], strict=False):
            span = QuerySpan(table, first, end - first)
            last = draft.drafted(features[first:end], [span], NEWS[first + 1 : end + 1])
        last = type(last)(last.rows[-1:], last.features[-1:])
        made, own = [last.rows[0]], []
        for depth in range(1, STEPS):
            own.append(int(draft.head.logits(last.rows)[0].argmax()))
            last = draft.drafted(last.features, [QuerySpan(table, end + depth - 1, 1)], own[-1:], depth)
            made.append(last.rows[0])
        rows.append(made)
        drafts.append(own)
        cuts = [N, N + AGAIN]
    values = [draft.pool.layer(k)[table, 1].flatten(0, 1)[: N + AGAIN] for k in range(STAGES)]
    return Run(features, rows, drafts, values)


def same(found: list[list[torch.Tensor]], paper: list[list[torch.Tensor]]) -> list[list[bool]]:
    return [
        [close(a, b) for a, b in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(found, paper, strict=True)
    ]


def test_every_draft_is_the_papers(case: Case, run: Run) -> None:
    paper = wanted(case.folder, case.form, Rule(), run.features, run.drafts)
    assert same(run.rows, paper) == [[True] * STEPS] * 2
    assert run.drafts[0] != run.drafts[1]


def test_each_layer_has_rows_of_its_own(case: Case, run: Run) -> None:
    """Row i of layer k lies at i + k, and none of it is a draft's that became certain otherwise."""
    paper = Paper(case.folder, case.form, Rule())
    paper.drafted(run.features, NEWS[1:], STAGES - 1)
    for k, values in enumerate(run.values):
        rows = N + AGAIN - k
        assert close(values[k:], paper.layers[k].project("v")[:rows])


TRAPS = {
    "layers in another order": (Rule(layers=(0, 2, 1)), 1),
    "the target's state for all": (Rule(states=False), 1),
    "the same token for all": (Rule(ahead=0), 1),
    "one KV for all": (Rule(shared=True), 1),
    "another layer for what is deeper": (Rule(deeper=0), 3),
}
QUICK = ("one KV for all",)


@pytest.mark.parametrize(
    "trap", [pytest.param(trap, marks=() if trap in QUICK else pytest.mark.slow) for trap in TRAPS]
)
def test_the_comparison_notices_other_rules(case: Case, run: Run, trap: str) -> None:
    """Power check: from the depth on that they are about."""
    rule, first = TRAPS[trap]
    paper = wanted(case.folder, case.form, rule, run.features, run.drafts)
    for compared in same(run.rows, paper):
        assert all(compared[:first]) and not compared[first]


def test_it_notices_the_other_half_first(case: Case, run: Run) -> None:
    form = replace(case.form, hidden_first=not case.form.hidden_first)
    for compared in same(run.rows, wanted(case.folder, form, Rule(), run.features, run.drafts)):
        assert not any(compared)


@pytest.mark.parametrize(
    "wrong", ["unseen", *(pytest.param(name, marks=pytest.mark.slow) for name in ("newest", "numbers"))]
)
def test_wrong_heads_are_noticed(case: Case, run: Run, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are none, seen; a piece that begins as if nothing were before it; layers by their names."""
    if wrong == "unseen":
        monkeypatch.setattr(mtp, "_stages", lambda layer, count: (layer,) * count)
    elif wrong == "newest":
        monkeypatch.setattr(TorchMtpStates, "before", lambda self, gave, stage: gave.roll(1, 0))
    else:
        monkeypatch.setattr(mtp, "prefixes_among", lambda names, own=mtp.prefixes_among: sorted(own(names)))
    found = served(case.folder)
    paper = wanted(case.folder, case.form, Rule(), found.features, found.drafts)
    right = wrong == "numbers" and case.form.prefix != ""  # three of MiMo's have one digit each
    assert all(same(found.rows, paper)[0]) == right


def test_a_tree_is_its_paths(case: Case, run: Run) -> None:
    """Two nodes below the root, one of them with a child; rows as a tree has them."""
    rig = Rig(case.folder)
    draft, table = HeadRig(case.folder, rig), rig.table(N + 4)
    last = draft.drafted(run.features[:N], [QuerySpan(table, 0, N)], NEWS[1 : N + 1])
    below = last.features[-1:]
    first = draft.drafted(below.repeat(2, 1), [QuerySpan(table, N, 2, ((N,), (N + 1,)))], [5, 6], 1)
    second = draft.drafted(first.features[1:], [QuerySpan(table, N, 1, ((N + 1, N + 2),))], [7], 2)
    found = [first.rows[0], first.rows[1], second.rows[0]]
    for row, path in zip(found, ([5], [6], [6, 7]), strict=True):
        paper = Paper(case.folder, case.form, Rule())
        tokens = NEWS[1 : N + 1]
        states = [
            paper.drafted(run.features[:N], tokens + path[:depth], depth) for depth in range(len(path) + 1)
        ]
        assert close(row, states[-1])


def test_a_window_has_no_rows_before_it(case: Case, run: Run) -> None:
    """A sequence that is opened in its middle is one that begins there; MiMo's has no blank embedding."""
    rig = Rig(case.folder)
    draft, table = HeadRig(case.folder, rig), rig.table(9)
    draft.pool.tensor.fill_(1e3)
    last = draft.drafted(run.features[:8], [QuerySpan(table, 0, 8, offset=40)], NEWS[1:9])
    found = draft.drafted(last.features[-1:], [QuerySpan(table, 8, 1, offset=40)], [5], 1)
    paper = Paper(case.folder, replace(case.form, first_is_blank=False), Rule())
    paper.drafted(run.features[:8], NEWS[1:9], 0)
    assert close(found.rows[0], paper.drafted(run.features[:8], [*NEWS[1:9], 5], 1))


def test_sequences_share_a_batch(case: Case, run: Run) -> None:
    rig = Rig(case.folder)
    draft = HeadRig(case.folder, rig)
    tables = [rig.table(N) for _ in range(3)]
    alone = draft.drafted(run.features[:N], [QuerySpan(tables[0], 0, N)], NEWS[1 : N + 1])
    spans = [QuerySpan(tables[1], 0, 33), QuerySpan(tables[2], 0, N)]
    both, tokens = torch.cat((run.features[:33], run.features[:N])), NEWS[1:34] + NEWS[1 : N + 1]
    together = draft.drafted(both, spans, tokens)
    assert torch.equal(together.features, torch.cat((alone.features[:33], alone.features)))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_what_a_folder_says(case: Case, load_format: str) -> None:
    target = read_model(case.folder)
    head = read_head(case.folder, target, load_format)
    assert head.stages == STAGES and head.decoder.num_layers == STAGES
    ends = [f"{MIMO[:-1]}{i}." if case.form.prefix else f"model.layers.{8 + i}." for i in range(STAGES)]
    assert head.prefixes == tuple(ends)
    assert [layer.attention.unseen for layer in head.decoder.layers] == [0, 1, 2]
    assert replace(head.decoder.layers[2].attention, unseen=0) == target.layers[-1].attention
    assert isinstance(head.decoder.layers[0].attention, AttentionSpec)


def test_a_page_has_room_for_what_its_newest_row_gave(case: Case) -> None:
    """One layer more where that is enough: 2 states of 64 elements, beside 1,024 of 16 rows."""
    head = read_head(case.folder, read_model(case.folder))
    row = 2 * head.decoder.num_kv_heads * head.decoder.head_dim
    for page_size in (1, 2, 16):
        kept = -(-(STAGES - 1) * 64 // (page_size * row))
        assert head.pool_format(page_size).layers == STAGES + kept


def test_layers_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = write_tiny_mimo(tmp_path / "m", stages=2)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 3}))
    with pytest.raises(
        ConfigError, match="num_nextn_predict_layers is 3, and its tensors are of 2 MTP layers"
    ):
        read_head(folder, read_model(folder))


def test_ranks_cannot_share_them(case: Case) -> None:
    config = EngineConfig(model=str(case.folder), draft=str(case.folder), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor-parallel-size: draft head .* has 3 MTP layers"):
        EngineSpec.of(config)
