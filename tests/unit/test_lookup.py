"""What drafts are looked up, and when they take the place of a head's: the rule, and the plain drafter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup_rig import ScriptedHead, sequence

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.tree import DraftTree
from eyas.engine.speculation.drafters.base import Drafter, SequenceProposal
from eyas.engine.speculation.drafters.lookup import (
    AT_FIRST,
    CERTAIN,
    LONGEST,
    SHORTEST,
    LookupDrafter,
    SequenceText,
    learned,
    look_up,
    prefers,
)

# --- the rule -------------------------------------------------------------------------------------------


def found(ids: str, predicted: str = "", *, prompt: int = 1, depth: int = 3, history: bool = True) -> str:
    """The proposal for a text of letters."""
    text = SequenceText(list(map(ord, ids)), prompt, list(map(ord, predicted)))
    proposal = look_up(text, depth, history=history)
    return "" if proposal is None else "".join(map(chr, proposal.tokens))


@pytest.mark.parametrize(
    ("ids", "proposal"),
    [
        ("abcd_ab", "cd_"),
        ("abc_abd_ab", "d_a"),  # of equal matches the last
        ("xabc_abd_xab", "c_a"),  # a longer match wins
        ("abcdefgh1_abcdefgh2_abcdefgh", "2_a"),
        ("1abcdefgh3_abcdefgh2_1abcdefgh", "2_1"),  # longer ones than are compared are equal
        ("ababab", "aba"),  # a copy runs into what it has just proposed
        ("zzz", "zzz"),
        ("a_b_a", ""),  # one token is no match
        ("abcd", ""),
        ("a", ""),
        ("aa", ""),
    ],
)
def test_the_texts_own_past(ids: str, proposal: str) -> None:
    assert found(ids) == proposal
    assert found(ids, history=False) == ""


@pytest.mark.parametrize(
    ("ids", "predicted", "proposal"),
    [
        ("?", "", ""),
        ("xy?", "hello", "hel"),  # before any token: from its start
        ("xy?h", "hello", "ell"),
        ("xy?hell", "hello", "o"),  # as much as there is
        ("xy?hello", "hello", ""),
        ("xy?J", "hello", ""),  # not what was predicted
        ("xy?Jel", "hello", "lo"),  # and after the difference it is again
        ("xy?hXllo w", "hello world", "orl"),
        ("xy?ab", "abXabY", "Xab"),  # of equal matches the one where the answer stands
        ("xy?abXab", "abXabY", "Y"),
        ("xy?abZab", "1abX_abY_", "Y_"),  # of two that are as near the later one
        ("pq1_?pq", "..pq2", "2"),  # the prediction wins a match of the same length
        ("apq1_?.apq", "..pq2", "1_?"),  # and loses against a longer one
    ],
)
def test_a_prediction(ids: str, predicted: str, proposal: str) -> None:
    assert found(ids, predicted, prompt=ids.index("?") + 1) == proposal


def from_most_to_least(ids: list[int], prompt: int, predicted: list[int], depth: int) -> list[int] | None:
    """The rule in other words: for each length from the longest on, every place is looked at."""
    told = ids[:prompt] + predicted
    for size in range(LONGEST, SHORTEST - 1, -1):
        end = ids[-size:]
        if len(end) < size:
            continue
        in_told = [i for i in range(prompt, len(told)) if i >= size and told[i - size : i] == end]
        if in_told:
            best = min(in_told, key=lambda i: (abs(i - len(ids)), -i))
            return told[best : best + depth]
        own = [i for i in range(size, len(ids)) if ids[i - size : i] == end]
        if own:
            longer = list(ids)
            for i in range(depth):
                longer.append(longer[own[-1] + i])
            return longer[-depth:]
    return None


letters = st.lists(st.integers(0, 2), max_size=24)


@given(letters, letters, letters, st.integers(1, 7))
def test_the_rule_in_other_words(prompt: list[int], output: list[int], told: list[int], depth: int) -> None:
    """The head of the prompt differs, so that no match is shorter only because the text begins there."""
    prompt = [*range(10, 10 + LONGEST), *prompt]
    proposal = look_up(SequenceText(prompt + output, len(prompt), told), depth)
    expected = from_most_to_least(prompt + output, len(prompt), told, depth)
    assert (None if proposal is None else list(proposal.tokens)) == expected


def test_which_source_proposes() -> None:
    assert not any(prefers(0, lookup, head) for lookup in (0, CERTAIN) for head in (0, CERTAIN))
    assert [prefers(match, *AT_FIRST) for match in (1, 3, 6, 7, LONGEST)] == [False, False, False, True, True]
    assert prefers(LONGEST, CERTAIN * 9 // 10, CERTAIN // 2) and not prefers(LONGEST, 512, CERTAIN)
    better = [prefers(match, rate, 600) for rate in range(0, CERTAIN, 64) for match in range(1, LONGEST + 1)]
    for i, wins in enumerate(better):  # a longer match, or a better rate, never makes it worse
        assert not wins or all(better[i + 1 : i - i % LONGEST + LONGEST]) and all(better[i::LONGEST])


def test_rates_follow_what_came() -> None:
    rate = AT_FIRST[1]
    falling = [rate := learned(rate, False) for _ in range(60)]
    assert falling == sorted(falling, reverse=True) and 0 <= rate < 8
    rising = [rate := learned(rate, True) for _ in range(60)]
    assert rising == sorted(rising) and CERTAIN - 8 <= rate <= CERTAIN
    assert learned(512, True) - 512 == 512 - learned(512, False) == 64


# --- the drafter ----------------------------------------------------------------------------------------

NGRAM = SpeculationConfig(steps=3, draft_tokens=4, ngram=True)
HEADS = DraftTree((90, 91), (-1, 0))


def taken(drafter: LookupDrafter, seq: Sequence) -> list[int] | None:
    drafter.grew(seq)
    drafts = drafter.take()
    assert all(draft.base == len(seq) - 1 for draft in drafts) and len(drafts) <= 1
    return list(drafts[0].tree.tokens) if drafts else None


def test_alone_it_proposes_a_chain() -> None:
    drafter, seq = LookupDrafter(NGRAM), sequence((1, 2, 3, 4), [1, 2])
    drafter.grew(seq)
    (draft,) = drafter.take()
    assert draft == SequenceProposal(seq, 5, DraftTree((3, 4, 1), range(-1, 2)))
    assert drafter.take() == [] and not drafter.owed() and not drafter.local_kv
    assert not drafter.open(seq, 5, None) and drafter.outgoing() == []


def test_without_ngram_only_predictions_are_searched() -> None:
    drafter = LookupDrafter(SpeculationConfig(steps=3, draft_tokens=4))
    assert taken(drafter, sequence((1, 2, 3, 4), [1, 2])) is None
    assert taken(drafter, sequence((1, 2, 3, 4), [1, 2], (7, 1, 2, 8))) == [8]


def test_beside_a_tree_it_goes_no_deeper_than_the_head() -> None:
    spec = SpeculationConfig(steps=2, topk=4, draft_tokens=8, ngram=True)
    assert taken(LookupDrafter(spec), sequence((1, 2, 3, 4), [1, 2])) == [3, 4]
    narrow = SpeculationConfig(steps=5, topk=4, draft_tokens=3, ngram=True)
    assert taken(LookupDrafter(narrow), sequence((1, 2, 3, 4), [1, 2])) == [3, 4]


def beside(seq: Sequence, drafter: LookupDrafter, head: ScriptedHead, tree: DraftTree = HEADS) -> list[int]:
    head.drafts = [SequenceProposal(seq, len(seq) - 1, tree)]
    return taken(drafter, seq) or []


def test_the_better_source_proposes() -> None:
    """A long match of a text that does not go on as before loses its place to the head, and gets it back."""
    head = ScriptedHead()
    drafter = LookupDrafter(NGRAM, head)
    period = [1, 2, 3, 4, 5, 6, 7, 8]
    seq = sequence((9, 8, 7), [*period, 50, *period])
    heads = []
    for i in range(12):
        heads.append(beside(seq, drafter, head)[0] == 90)
        seq.output += [100 + i, *period]  # never what followed before, and more than one token
    assert not heads[0] and heads == sorted(heads) and heads[-1]
    heads = []
    for i in range(24):
        heads.append(beside(seq, drafter, head)[0] == 90)
        seq.output += [period[i % 8]]  # one token, which is what followed before
    assert heads[0] and heads == sorted(heads, reverse=True) and not heads[-1]


def test_a_head_that_is_late_or_empty_gives_way() -> None:
    head = ScriptedHead()
    drafter, seq = LookupDrafter(NGRAM, head), sequence((1, 2, 3, 4), [1, 2])
    assert taken(drafter, seq) == [3, 4, 1]
    assert beside(seq, drafter, head, DraftTree((), ())) == [3, 4, 1]
    other = sequence((1, 2, 3, 4), [5, 2], slot=1)
    assert beside(other, drafter, head) == [90, 91]  # nothing is found
    head.drafts = [SequenceProposal(other, len(other) - 1, HEADS)]
    assert drafter.take() == [SequenceProposal(other, len(other) - 1, HEADS)]  # it has no new token


def test_a_head_hears_what_it_would_hear_alone() -> None:
    head = ScriptedHead()
    drafter, seq = LookupDrafter(NGRAM, head), sequence((1, 2), [])
    assert drafter.open(seq, 0, None) and drafter.local_kv and drafter.owed()
    drafter.post([])
    drafter.close(seq)
    assert head.heard == ["open", "post", "close"]


def test_whatever_drafters_are_asked_a_head_is_asked() -> None:
    asked = {name for name in vars(Drafter) if not name.startswith("_")}
    assert asked > {"open", "missed_rounds"} and asked <= set(vars(LookupDrafter))


def test_who_is_gone_is_forgotten() -> None:
    drafter, seq = LookupDrafter(NGRAM), sequence((1, 2, 3, 4), [1, 2])
    taken(drafter, seq)
    drafter.grew(seq)
    drafter.close(seq)
    assert drafter.take() == [] and not drafter._records
