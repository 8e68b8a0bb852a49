// The lines of the picture: requests from the gateway, KV pages between workers, drafts for decode.

import { byId, shape } from "./dom.js";

const THIN = 1.5, THICK = 7, BOW = 30;
const narrow = window.matchMedia("(max-width: 45rem)"); // where the columns are rows, as in cluster.css

// `cards`: element by worker, and "gateway". A line of pages is the thicker the more bytes move.
export function drawLinks(cards, workers, links) {
  const svg = byId("links"), frame = svg.getBoundingClientRect();
  const place = (card) => {
    const box = card.getBoundingClientRect();
    return { left: box.left - frame.left, right: box.right - frame.left, top: box.top - frame.top,
      bottom: box.bottom - frame.top };
  };
  const join = (source, target, attributes) => {
    const [from, to] = [cards.get(source), cards.get(target)];
    return from && to ? [shape("path", { d: curve(place(from), place(to)), ...attributes })] : [];
  };
  const with_role = (role) => workers.filter((worker) => worker.roles.includes(role));
  const entries = workers.filter((worker) => worker.roles.some((role) => role !== "draft"));
  const busiest = Math.max(...links.map((link) => link.rate), 1);
  const asks = entries.filter((worker) => worker.roles.includes("prefill"))
    .flatMap((worker) => join("gateway", worker.worker, { class: worker.in_flight ? "ask busy" : "ask" }));
  const drafts = with_role("draft").filter((worker) => worker.roles.length === 1).flatMap((drafter) =>
    with_role("decode").flatMap((worker) => join(worker.worker, drafter.worker, { class: "proposals" })));
  const pages = merged(links).flatMap(({ source, target, rate }) => {
    const width = rate > 0 ? THIN + (THICK - THIN) * Math.sqrt(rate / busiest) : THIN;
    return join(source, target, { class: rate > 0 ? "pages moving" : "pages", "stroke-width": width });
  });
  svg.replaceChildren(...asks, ...drafts, ...pages);
}

// One line per pair, whatever its paths.
function merged(links) {
  const pairs = new Map();
  for (const link of links) {
    const key = `${link.source} ${link.target}`;
    const known = pairs.get(key) ?? { ...link, rate: 0 };
    pairs.set(key, { ...known, rate: known.rate + link.rate });
  }
  return [...pairs.values()];
}

// From side to side between columns, from below to above between rows, in a bow inside a column.
function curve(from, to) {
  const middle = (low, high) => (low + high) / 2;
  if (narrow.matches && to.top >= from.bottom) {
    const [x, y, u, v] = [middle(from.left, from.right), from.bottom, middle(to.left, to.right), to.top];
    return `M${x},${y} C${x},${middle(y, v)} ${u},${middle(y, v)} ${u},${v}`;
  }
  const between = to.left >= from.right;
  const [x, y, u, v] = [from.right, middle(from.top, from.bottom), between ? to.left : to.right, middle(to.top, to.bottom)];
  const bend = between ? middle(x, u) : Math.max(x, u) + BOW;
  return `M${x},${y} C${bend},${y} ${bend},${v} ${u},${v}`;
}
