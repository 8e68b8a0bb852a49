// One answer of the playground as it is drawn: reasoning and calls that fold, text whose drafts are coloured,
// and a bar per step.

import { DraftTrace } from "./drafts.js";
import { element } from "./dom.js";
import { markdown } from "./markdown.js";

const TITLES = {
  first: "without a draft to check",
  accepted: "an accepted draft",
  bonus: "the model's own, after accepted drafts",
  correction: "the model's own, in the place of a rejected draft",
};

export class AnswerBox {
  // `coloured()`: whether drafts are shown, else Markdown.
  constructor(coloured) {
    this.coloured = coloured;
    this.message = { role: "assistant", content: "" };
    this.trace = new DraftTrace();
    this.text = element("div", { class: "coloured" });
    this.prose = element("div", { class: "prose" });
    this.calls = element("div", { class: "calls" });
    this.steps = element("div", { class: "steps", "aria-hidden": "true" });
    this.node = element("article", { class: "said assistant", "aria-label": "Answer" },
      this.text, this.prose, this.calls, this.steps);
    this.drawing = 0;
  }

  get empty() {
    return !this.message.content && !this.message.tool_calls && !this.message.reasoning_content;
  }

  // Takes an event of the stream.
  add({ choices: [choice], usage }) {
    if (!choice) return;
    const before = this.trace.steps.length;
    if (usage) this.trace.step(choice.logprobs?.content ?? [], usage.completion_tokens_details);
    this.steps.append(...this.trace.steps.slice(before).map(stack));
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (thought) this.think(thought);
    for (const call of calls ?? []) this.call(call);
    if (content) {
      this.message.content += content;
      this.text.append(...this.tokens(content));
      if (!this.coloured()) this.drawing ||= requestAnimationFrame(() => this.draw());
    }
  }

  // The answer has ended: what is known of it is shown.
  end() {
    const unseen = this.trace.unseen();
    if (unseen) this.text.append(mark(unseen));
    this.draw();
  }

  // Once a frame, however many tokens come in it.
  draw() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    this.prose.replaceChildren(...markdown(this.message.content));
  }

  think(text) {
    if (!this.message.reasoning_content) {
      this.message.reasoning_content = "";
      this.thought = element("div", { class: "coloured" });
      this.text.before(element("details", { class: "fold reasoning", open: "" },
        element("summary", {}, "Reasoning"), this.thought));
    }
    this.message.reasoning_content += text;
    this.thought.append(...this.tokens(text));
  }

  call({ index, id, function: { name, arguments: text } }) {
    this.message.tool_calls ??= [];
    if (id) {
      this.message.tool_calls[index] = { id, type: "function", function: { name, arguments: "" } };
      this.calls.append(element("details", { class: "fold call", open: "" },
        element("summary", {}, "Calls ", element("code", {}, name)), element("pre", { class: "coloured" })));
    }
    this.message.tool_calls[index].function.arguments += text;
    if (text) this.calls.children[index].lastChild.append(...this.tokens(text));
  }

  tokens(text) {
    return this.trace.pieces(text).flatMap((piece) => {
      const chance = piece.logprob === null ? "" : `; the model gave it ${percent(Math.exp(piece.logprob))}`;
      const span = element("span", { class: `token ${piece.kind}`, title: `${TITLES[piece.kind]}${chance}` }, piece.text);
      return piece.rejected ? [mark(piece.rejected), span] : [span];
    });
  }
}

// What the draft went on with was dropped here; its tokens are not told.
function mark(count) {
  const title = `${count} draft token${count === 1 ? "" : "s"} rejected here`;
  return element("span", { class: "rejected", title, "aria-label": title }, `×${count}`);
}

const percent = (share) => (share >= 0.001 ? `${(100 * share).toFixed(1)} %` : "less than 0.1 %");

// A step as a pile of squares: accepted drafts, the model's own token, rejected drafts.
function stack({ accepted, rejected, own, kind }) {
  const squares = [["accepted", accepted], [kind, own], ["dropped", rejected]];
  return element("span", { class: "step" }, ...squares.flatMap(([kind, count]) =>
    Array.from({ length: count }, () => element("i", { class: kind }))));
}
