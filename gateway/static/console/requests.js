// The last requests as bars: how long each queued, computed its prompt, pulled pages and decoded. The rows
// open and tell more.

import { byId, element } from "./dom.js";
import { ago, bytes, count, digits, milliseconds, plural } from "./units.js";

const SHOWN = 60, FAILURES = 12;

export class Waterfall {
  constructor() {
    this.rows = new Map(); // by request
    this.requests = [];
    byId("own-scale").addEventListener("change", () => this.draw());
  }

  // `requests` as /requests tells them, of one gateway process; those of others seen before are kept.
  show(requests, now) {
    if (byId("hold").checked) return;
    const known = new Map([...this.requests, ...requests].map((request) => [keyOf(request), request]));
    this.requests = [...known.values()].sort((one, other) => other.ended - one.ended).slice(0, SHOWN);
    this.draw(now);
  }

  draw(now = Date.now() / 1000) {
    const longest = Math.max(...this.requests.map((request) => request.total_ms), 1);
    const own = byId("own-scale").checked;
    const kept = new Map();
    for (const request of this.requests) {
      const key = keyOf(request), row = this.rows.get(key) ?? new Row(request);
      row.place(own ? request.total_ms : longest, now);
      kept.set(key, row);
    }
    this.rows = kept;
    const box = byId("waterfall"), nodes = [...kept.values()].map((row) => row.node);
    if (nodes.some((node, at) => box.children[at] !== node)) box.replaceChildren(...nodes);
    byId("requests-note").hidden = nodes.length > 0;
  }
}

// The last calls that failed, newest first, of the gateway process that was asked.
export function showFailures(failures, now) {
  byId("failures-note").hidden = failures.length > 0;
  const rows = failures.slice(0, FAILURES).map((failure) => element("tr", { title: `request ${failure.id}` },
    element("td", {}, ago(now - failure.time)),
    element("td", {}, String(failure.status)),
    element("td", {}, failure.path),
    element("td", {}, failure.reason || failure.code)));
  byId("failures").replaceChildren(element("table", {}, element("tbody", {}, ...rows)));
}

const keyOf = (request) => `${request.id} ${request.ended}`;

class Row {
  constructor(request) {
    this.request = request;
    this.when = element("span", { class: "when" });
    this.bars = request.parts.map((part) => bar(part, lanes(request)));
    this.first = request.first_token_ms === null ? null
      : element("span", { class: "first", title: `first token after ${milliseconds(request.first_token_ms)}` });
    const lane = element("span", { class: "lanes", "aria-hidden": "true" }, ...this.bars, this.first);
    this.summary = element("summary", {}, this.when, lane,
      element("span", { class: "total" }, milliseconds(request.total_ms)),
      element("span", { class: "prompt", title: `${request.cached_tokens} of ${plural(request.prompt_tokens, "prompt token")} from a cache` },
        `${count(request.prompt_tokens)} in`, request.cached_tokens ? ` (${count(request.cached_tokens)} cached)` : ""),
      element("span", { class: "tokens" }, `${count(request.completion_tokens)} out`),
      element("span", { class: "accepted", title: "acceptance length" },
        request.acceptance_length === null ? "" : `×${digits(request.acceptance_length)}`));
    this.node = element("details", { class: "request" }, this.summary);
    this.node.addEventListener("toggle", () => this.open(), { once: true });
  }

  // `scale`: the milliseconds that the width stands for.
  place(scale, now) {
    this.when.textContent = ago(now - this.request.ended);
    const share = (ms) => `${Math.min(Math.max(100 * ms / scale, 0), 100)}%`;
    this.request.parts.forEach((part, at) => {
      Object.assign(this.bars[at].style, { left: share(part.start_ms), width: share(part.ms) });
    });
    if (this.first) this.first.style.left = share(this.request.first_token_ms);
  }

  open() {
    const { request } = this;
    const offered = request.accepted_tokens + request.rejected_tokens;
    const facts = [
      ["id", request.id],
      ["ended", `${new Date(1000 * request.ended).toLocaleTimeString()}, ${request.finish.join(", ") || "early: failed or cancelled"}`],
      ["prompt", `${plural(request.prompt_tokens, "token")}, ${request.cached_tokens} from a cache`],
      ["first token", request.first_token_ms === null ? "none" : `after ${milliseconds(request.first_token_ms)}`],
      ["drafts", offered ? `${request.accepted_tokens} of ${offered} accepted in ${plural(request.verify_steps, "step")}` : "none"],
    ];
    const list = facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
    this.node.append(element("dl", {}, ...list), table(request.parts));
  }
}

// The lane of each part: one per worker in the order of their work, decode in the last.
function lanes(request) {
  const workers = [...new Set(request.parts.map((part) => part.worker).filter(Boolean))];
  return (part) => Math.min(part.worker ? workers.indexOf(part.worker) : workers.length - 1, 1);
}

function bar(part, laneOf) {
  return element("span", { class: `part ${part.name} lane-${Math.max(laneOf(part), 0)}`,
    title: `${part.name} ${milliseconds(part.ms)}` });
}

function table(parts) {
  const head = ["part", "from", "took", "worker", "pages"].map((name) => element("th", { scope: "col" }, name));
  const rows = [...parts].sort((one, other) => one.start_ms - other.start_ms).map((part) => element("tr", {},
    element("td", {}, element("span", { class: `swatch ${part.name}` }, part.name)),
    element("td", {}, milliseconds(part.start_ms)),
    element("td", {}, milliseconds(part.ms)),
    element("td", {}, part.worker ?? ""),
    element("td", {}, part.path ? `${bytes(part.bytes)} by ${part.path}` : "")));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}
