"""The console's Markdown, run by Node over a toy document: what is drawn, and that text stays text."""

from __future__ import annotations

import pytest

from tests.unit.console_node import needs_node, run

DOCUMENT = """
const shown = (node) => typeof node === "string" ? node
  : `<${node.name}>${node.children.map(shown).join("")}</${node.name}>`;
globalThis.document = { createElement: (name) => ({
  name, tagName: name.toUpperCase(), children: [],
  get childNodes() { return this.children; },
  append(...nodes) { this.children.push(...nodes); },
}) };
"""

pytestmark = needs_node


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        (
            "a *b* **c** `d*e*` snake_case_x 2 * 3 * 4",
            "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code> snake_case_x 2 * 3 * 4</p>",
        ),
        ("# One\ntwo\nthree", "<h1>One</h1><p>two\nthree</p>"),
        ("1. a\n   - b\n\n   c\n2. d", "<ol><li>a<ul><li>b</li></ul><p>c</p></li><li>d</li></ol>"),
        ("```py\n* x\n\n# y\n```\nz", "<pre><code>* x\n\n# y</code></pre><p>z</p>"),
        ("```\nstill open", "<pre><code>still open</code></pre>"),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        (
            "|a|b|\n|-|-|\n|1|2|",
            "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>",
        ),
        ("[x](https://a.b) [y](javascript:alert(1))", "<p><a>x</a> [y](javascript:alert(1))</p>"),
        ("", ""),
    ],
)
def test_markdown_is_drawn(text: str, drawn: str) -> None:
    program = 'const { markdown } = await use("markdown.js"); return markdown(given).map(shown).join("");'
    assert run(DOCUMENT + program, text) == drawn
