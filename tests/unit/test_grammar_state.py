"""A state is a function of the grammar and the tokens: a node of a tree is as if its path were committed."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_cases import CASES, EOS, table

from eyas.common.config import NANO
from eyas.common.errors import InvalidRequest
from eyas.common.grammars.compiler import GrammarCompiler, library
from eyas.common.grammars.notations import Grammar
from eyas.common.params import SamplingParams
from eyas.engine.batch.tree import ROOT, DraftTree
from eyas.engine.grammar.state import FEW_ENDS, GrammarState, MaskRoom

VOCAB = 4096


@cache
def compiled(grammar: Grammar) -> Any:
    return compiler().compile(grammar)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Path(NANO), VOCAB, (EOS,))


def state(grammar: Grammar, output: list[int] | None = None, **params: Any) -> GrammarState:
    made = GrammarState(compiled(grammar), SamplingParams(**params), (EOS,), table())
    made.follow(output or [])
    return made


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def wander(grammar: Grammar, pick: random.Random, steps: int) -> list[int]:
    """Tokens that the grammar allows, one after the other, before its end."""
    output: list[int] = []
    for _ in range(steps):
        (mask,) = state(grammar, output).masks(None)
        assert mask is not None
        ids = [id for id in allowed(mask) if id != EOS]
        if not ids:
            break
        output.append(pick.choice(ids))
    return output


def some_tree(grammar: Grammar, output: list[int], pick: random.Random, nodes: int) -> DraftTree:
    """Drafts of which about half are allowed, and ends among them."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(nodes):
        parent = pick.randrange(-1, node)
        path = DraftTree(tokens, parents).path(parent) if parent >= 0 else []
        try:
            (mask,) = state(grammar, [*output, *(tokens[i] for i in path)]).masks(None)
            ids = allowed(mask) if mask is not None else [5]
        except InvalidRequest:
            ids = [5]
        tokens.append(pick.choice(ids) if pick.random() < 0.6 else pick.choice((EOS, 7, 40)))
        parents.append(parent)
    return DraftTree(tokens, parents)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_masks_of_a_tree_are_those_of_its_paths(number: int) -> None:
    grammar, pick = CASES[number][0], random.Random(number)
    reached = dead = 0
    for _ in range(8):
        output = wander(grammar, pick, pick.randrange(6))
        tree = some_tree(grammar, output, pick, 10)
        here = state(grammar, output)
        before = here.masks(None)[0]
        root, *nodes = here.masks(tree)
        in_room = state(grammar, output).masks(tree, MaskRoom(np.full((11, len(root)), 7, np.int32)))  # type: ignore[arg-type]
        for one, other in zip(in_room, (root, *nodes), strict=True):
            assert (one is None) == (other is None) and (one is None or np.array_equal(one, other))  # type: ignore[arg-type]
        kept = here.cut(tree)
        again = here.masks(None)[0]
        assert before is not None and again is not None and root is not None
        assert (before == again).all() and (root == before).all()  # it was taken back
        possible = []
        for node, mask in enumerate(nodes):
            path = [*output, *(tree.tokens[i] for i in tree.path(node))]
            try:
                alone = state(grammar, path)
            except InvalidRequest:
                assert mask is None
                dead += 1
                continue
            possible.append(node)
            if tree.tokens[node] == EOS:
                assert mask is None
            else:
                reached += 1
                assert mask is not None and (mask == alone.masks(None)[0]).all()
        assert kept == tree.keep(possible)
    assert reached and dead


def test_what_is_not_allowed_is_an_error_that_says_where() -> None:
    grammar = Grammar.choice(["Paris"])
    with pytest.raises(InvalidRequest, match="token 40 at place 0"):
        state(grammar, [40])


def test_ends_that_come_too_early_are_taken_out_while_anything_else_is_left() -> None:
    open_ended, closed = Grammar.regex("a*"), Grammar.regex("a?")
    a = table().index(b"a")
    assert EOS in allowed(state(open_ended).masks(None)[0])  # type: ignore[arg-type]
    for params in ({"min_tokens": 1}, {"ignore_eos": True}):
        assert EOS not in allowed(state(open_ended, **params).masks(None)[0])  # type: ignore[arg-type]
    assert EOS in allowed(state(open_ended, [a], min_tokens=1).masks(None)[0])  # type: ignore[arg-type]
    assert allowed(state(closed, [a], min_tokens=9, ignore_eos=True).masks(None)[0]) == [EOS]  # type: ignore[arg-type]
    both = {"ignore_eos": True, "stop_token_ids": (77,)}
    ends = set(allowed(state(open_ended, **both).masks(None)[0])) & {EOS, 77}  # type: ignore[arg-type]
    assert ends == {77}


def test_drafts_are_walked_once_for_each_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forced behind a round needs the masks that the round had; a token later they are others."""
    a, walks = table().index(b"a"), []
    here, tree = state(Grammar.regex("a{0,3}")), DraftTree([a, a], [-1, 0])
    walk = here._walk
    monkeypatch.setattr(here, "_walk", lambda tree, **how: walks.append(tree) or walk(tree, **how))
    first = here.masks(tree)
    here.forced_after(tree, 4)
    assert here.masks(tree)[1] is first[1] and walks == [tree]
    here.follow([a])
    assert [allowed(mask) for mask in here.masks(tree)] == [[EOS, a], [EOS, a], [EOS]]  # type: ignore[arg-type]
    assert walks == [tree, tree]


def test_a_mask_that_is_known_is_not_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aside, because it is slow: a step that verifies no drafts takes it. What looks ahead of a step has the
    masks of that one.
    """
    a, b, fills = table().index(b"a"), table().index(b"b"), []
    here, (mask,) = state(Grammar.regex("[ab]a{9}")), state(Grammar.regex("[ab]a{9}")).masks(None)
    assert mask is not None
    room = MaskRoom(np.empty((9, len(mask)), np.int32))
    (known,), (same,) = here.masks(None), here.masks(DraftTree([], []), room)
    assert same is known and not room.used
    here.follow([a])
    fill = here._mask
    monkeypatch.setattr(here, "_mask", lambda depth, *more: fills.append(depth) or fill(depth, *more))
    tree = DraftTree([a, b], [-1, -1])
    masks = here.masks(tree, room)
    assert here.forced_after(tree, 4) and here.masks(tree)[0] is masks[0] and 0 not in fills


def test_a_depth_counts_for_min_tokens() -> None:
    a = table().index(b"a")
    root, first, second = state(Grammar.regex("a*"), min_tokens=2).masks(DraftTree([a, a], [-1, 0]))
    assert root is not None and first is not None and second is not None
    assert [EOS in allowed(mask) for mask in (root, first, second)] == [False, False, True]


def test_a_dead_end_ends() -> None:
    """A grammar that no text fulfils allows nothing: the output ends instead of going on at random."""
    grammar = Grammar.ebnf(r'root ::= "a" [^\x00-\U0010ffff]')
    assert allowed(state(grammar, [table().index(b"a")]).masks(None)[0]) == [EOS]  # type: ignore[arg-type]


def test_a_model_without_an_end_needs_a_stop_token() -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        GrammarState(compiled(Grammar.regex("a")), SamplingParams(), (), table())
    GrammarState(compiled(Grammar.regex("a")), SamplingParams(stop_token_ids=(5,)), (), table())


@pytest.mark.parametrize("case", range(len(CASES)))
def test_forced_tokens_are_the_beginning_of_what_must_be_written(case: int) -> None:
    """By the library's own word, or nothing but an end may come. Looking at them changes no state."""
    grammar, pick = CASES[case][0], random.Random(case)
    for _ in range(12):
        output = wander(grammar, pick, pick.randrange(12))
        here = state(grammar, output)
        before = here.masks(None)[0]
        forced = here.forced(6)
        assert np.array_equal(here.masks(None)[0], before) and np.array_equal(here._mask(0), before)
        text = b"".join(table()[token] for token in forced if token != EOS)
        assert must_follow(grammar, output).startswith(text)
        here.follow([*output, *forced])  # all of them are allowed


def must_follow(grammar: Grammar, output: list[int]) -> bytes:
    matcher = library().GrammarMatcher(compiled(grammar), override_stop_tokens=[EOS])
    assert all(map(matcher.accept_token, output))
    try:
        return str(matcher.find_jump_forward_string()).encode()
    except UnicodeDecodeError as error:
        return bytes(error.object)


def test_what_is_forced_behind_a_round_is_what_is_forced_once_it_is_known() -> None:
    """Behind every end of it at which few tokens may stand, and behind no other. No state changes."""
    pick, found = random.Random(5), 0
    for grammar, _ in CASES:
        for _ in range(4):
            output = wander(grammar, pick, pick.randrange(9))
            here, tree = state(grammar, output), drafted(grammar, output, pick)
            masks, before = here.masks(tree), here.masks(None)[0]
            behind = {(one.accepted, one.token): one.drafts for one in here.forced_after(tree, 4)}
            assert np.array_equal(here.masks(None)[0], before) and np.array_equal(here._mask(0), before)
            expected = {}
            for depth, mask in enumerate(masks):
                few = allowed(mask) if mask is not None else []
                for token in few if len(few) <= FEW_ENDS else ():
                    forced = state(grammar, [*output, *tree.tokens[:depth], token]).forced(4)
                    expected |= {(depth, token): forced} if forced else {}
            assert behind == expected
            found += len(behind)
    assert found > 20


def drafted(grammar: Grammar, output: list[int], pick: random.Random) -> DraftTree:
    """A chain of up to three drafts, the last of which may be wrong."""
    here = state(grammar, output)
    tokens: list[int] = []
    while len(tokens) < 3 and not here._matcher.is_terminated():
        may = [id for id in allowed(here.masks(None)[0]) if id != EOS]  # type: ignore[arg-type]
        if not may or pick.random() < 0.2:
            break
        tokens.append(pick.choice(may))
        here.follow([*output, *tokens])
    if pick.random() < 0.3:
        tokens = [*tokens[:2], pick.randrange(len(table()))]
    return DraftTree(tokens, range(ROOT, len(tokens) - 1))


def test_a_text_without_a_choice_is_forced_to_its_end() -> None:
    here = state(Grammar.choice(["Paris is the capital."]))
    forced = here.forced(50)
    assert forced[-1] == EOS and b"".join(map(table().__getitem__, forced[:-1])) == b"Paris is the capital."
    assert len(forced) < 12 and here.forced(2) == forced[:2] and here.forced(-1) == []
    assert state(Grammar.regex("[a-z]+")).forced(3) == []
    assert state(Grammar.regex("a+"), [table().index(b"a")]).forced(3) == []
    assert state(Grammar.regex("ab?"), [table().index(b"ab")]).forced(3) == [EOS]
