"""What the console computes: figures of two pages of metrics, and which parts of an answer were drafted."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tests.unit.console_node import FOLDER, needs_node, run

HOSTILE = 'a"b\\c\nd<img src=x onerror=alert(1)>'


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_no_script_reads_text_as_html_or_code(path: Any) -> None:
    text = path.read_text()
    sinks = ("innerHTML", "outerHTML", "insertAdjacentHTML", "createContextualFragment", "srcdoc", "eval")
    sinks = (*sinks, "Function", "document.write")
    assert [sink for sink in sinks if re.search(rf"\b{re.escape(sink)}\b", text)] == []
    assert text.count("\n") <= 400
    assert text.startswith("//")


def test_the_page_has_nothing_inline() -> None:
    page = (FOLDER / "console.html").read_text()
    assert re.findall(r"<style|<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|javascript:|https?://", page) == []
    for name in re.findall(r'(?:href|src)="console/([^"]+)"', page):
        assert (FOLDER / name).is_file(), name
    ids = re.findall(r'\bid="([\w-]+)"', page)
    assert len(ids) == len(set(ids))
    asked = {id for path in FOLDER.glob("*.js") for id in re.findall(r'byId\("([\w-]+)"\)', path.read_text())}
    assert asked and asked <= set(ids)


@needs_node
def test_metrics_are_read_back_as_they_were_written() -> None:
    registry = CollectorRegistry()
    counter = Counter("eyas_link_bytes", "x", ["source"], registry=registry)
    counter.labels(HOSTILE).inc(7)
    counter.labels("b").inc(1.5e12)
    page = generate_latest(registry).decode()
    found = run(
        'const { parse } = await use("metrics.js"); return parse(given).get("eyas_link_bytes_total");', page
    )
    assert found == [
        {"labels": {"source": HOSTILE}, "value": 7},
        {"labels": {"source": "b"}, "value": 1.5e12},
    ]


def histogram_page(values: list[float], process: str) -> str:
    registry = CollectorRegistry()
    histogram = Histogram("eyas_t_seconds", "x", ["process"], buckets=(0.1, 0.2, 0.4, 0.8), registry=registry)
    for value in values:
        histogram.labels(process).observe(value)
    return generate_latest(registry).decode()


QUANTILE = """
const { parse, quantile, increase } = await use("metrics.js");
const [before, after] = given.map(parse);
return [[0.5, 0.99].map((share) => quantile(before, after, "eyas_t_seconds", share)),
  increase(before, after, "eyas_t_seconds_count")];
"""


@needs_node
def test_quantiles_are_those_of_the_time_between_two_pages_of_all_processes() -> None:
    old = histogram_page([5.0] * 50, "gateway-0")
    # Another process begins anew: what it has counted since then is all growth.
    new = histogram_page([5.0] * 50 + [0.15] * 10, "gateway-0") + histogram_page([0.3] * 10, "gateway-1")
    (median, high), count = run(QUANTILE, [old, new])
    assert count == 20
    assert median == pytest.approx(0.2)  # the 10th of 20: the end of the bucket 0.1 .. 0.2
    assert high == pytest.approx(0.2 + 0.2 * (19.8 - 10) / 10)
    assert run(QUANTILE, [new, new]) == [[None, None], 0]
    assert run(QUANTILE, ["", histogram_page([9.0], "x")])[0] == [0.8, 0.8]  # beyond the last bound


@needs_node
def test_a_counter_that_fell_began_anew() -> None:
    program = """
    const { parse, increase } = await use("metrics.js");
    return increase(...given.map(parse), "eyas_a_total");
    """
    assert run(program, ["eyas_a_total 90\n", "eyas_a_total 4\n"]) == 4
    assert run(program, ["eyas_a_total 90\n", "eyas_a_total 94\n"]) == 4


TRACED = """
const { DraftTrace } = await use("drafts.js");
return given.map((events) => {
  const trace = new DraftTrace(), pieces = [];
  for (const { tokens, accepted, rejected, text } of events) {
    const told = tokens.map((token) => ({ token, logprob: -1 }));
    trace.step(told, { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected });
    pieces.push(...trace.pieces(text));
  }
  return { pieces, steps: trace.steps };
});
"""


def trace(*events: tuple[list[str], int, int, str]) -> Any:
    """The pieces of events: (tokens, accepted so far, rejected so far, text)."""
    names = ("tokens", "accepted", "rejected", "text")
    (found,) = run(TRACED, [[dict(zip(names, event, strict=True)) for event in events]])
    return [(piece["text"], piece["kind"], piece["rejected"]) for piece in found["pieces"]]


@needs_node
def test_drafts_show_in_the_text() -> None:
    assert trace(
        (["The"], 0, 0, "The"),
        ([" cap", "ital", " of"], 2, 0, " capital of"),
        ([" Fr", "ance"], 3, 3, " France"),
        ([" is"], 3, 5, " is"),
    ) == [
        ("The", "first", 0),
        (" cap", "accepted", 0),
        ("ital", "accepted", 0),
        (" of", "bonus", 0),
        (" Fr", "accepted", 0),
        ("ance", "correction", 3),
        (" is", "correction", 2),
    ]


@needs_node
def test_text_that_comes_late_cut_or_without_its_tags_stays_whole() -> None:
    # Half a character waits for its step; the tags around reasoning are no text; the last token is silent.
    assert trace(
        (["<think>"], 0, 0, ""),
        (["a", "\ufffd"], 1, 0, "a"),
        (["\ufffd", "b"], 2, 0, "éb"),
        (["</think>", "c"], 3, 2, "c"),
        (["<|end|>"], 3, 2, ""),
    ) == [
        ("a", "accepted", 0),
        ("é", "bonus", 0),
        ("b", "bonus", 0),
        ("c", "correction", 2),
    ]


@needs_node
def test_any_text_keeps_its_characters_and_kinds() -> None:
    dice = random.Random(7)
    streams, expected = [], []
    for _ in range(60):
        events, kinds, accepted, rejected = [], [], 0, 0
        for _ in range(dice.randint(1, 12)):
            tokens = [
                "".join(dice.choices("ab <&é\n", k=dice.randint(1, 3))) for _ in range(dice.randint(1, 4))
            ]
            drafted, missed = len(tokens) - 1, dice.choice((0, 0, 2))
            accepted, rejected = accepted + drafted, rejected + missed
            own = "correction" if missed else "bonus" if drafted else "first"
            kinds += [(token, "accepted") for token in tokens[:-1]] + [(tokens[-1], own)]
            events.append(
                {"tokens": tokens, "accepted": accepted, "rejected": rejected, "text": "".join(tokens)}
            )
        streams.append(events)
        expected.append(kinds)
    for found, kinds in zip(run(TRACED, streams), expected, strict=True):
        assert [(piece["text"], piece["kind"]) for piece in found["pieces"]] == kinds
