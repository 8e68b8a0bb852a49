// The cluster as a picture: a card per worker, in columns by role, and what each pulls from others.

import { byId, element } from "./dom.js";
import { drawLinks } from "./links.js";
import { digits, perSecond, plural } from "./units.js";

const ROLES = ["prefill", "decode", "draft"];
const SHOWN_PULLS = 4; // per card; the rest are added up

// Draws `cluster`, as /cluster tells it. `links`: source, target, path and rate (bytes per second) of each.
// `traffic`: calls that run, and tokens per second.
export function drawCluster(cluster, links, traffic) {
  const cards = new Map([["gateway", gatewayCard(cluster, traffic)]]);
  const columns = new Map([["gateway", [cards.get("gateway")]]]);
  for (const worker of sorted(cluster.workers)) {
    const title = ROLES.filter((role) => worker.roles.includes(role)).join(" + ");
    const card = workerCard(worker, links.filter((link) => link.target === worker.worker));
    cards.set(worker.worker, card);
    if (!columns.has(title)) columns.set(title, []);
    columns.get(title).push(card);
  }
  byId("groups").replaceChildren(...[...columns].map(([title, column]) => group(title, column)));
  byId("cluster-note").textContent = note(cluster, links);
  drawLinks(cards, cluster.workers, links);
}

// Columns stand in the order of the work.
function sorted(workers) {
  const place = (worker) => Math.min(...worker.roles.map((role) => ROLES.indexOf(role)));
  return [...workers].sort((one, other) => place(one) - place(other)
    || one.worker.localeCompare(other.worker, "en", { numeric: true }));
}

function note(cluster, links) {
  if (!cluster.workers.length) return "No worker is known.";
  const rate = links.reduce((sum, link) => sum + link.rate, 0);
  const moving = rate > 0 ? `${perSecond(rate)} of KV pages move between them` : "no KV pages move right now";
  return `${plural(cluster.workers.length, "worker")}; ${moving}.`;
}

function group(title, cards) {
  const heading = element("h3", {}, cards.length > 1 ? `${title} (${cards.length})` : title);
  return element("div", { class: "group" }, heading, ...cards);
}

function gatewayCard(cluster, traffic) {
  return element("article", { class: "card gateway", "aria-label": "The gateway" },
    name(window.location.host, "good"),
    element("p", {}, `${traffic.running} running`),
    element("p", {}, `${digits(traffic.tokens)} tokens/s`));
}

function workerCard(worker, pulls) {
  const [state, word] = condition(worker);
  const first = ROLES.find((role) => worker.roles.includes(role));
  return element("article", { class: `card ${first}`, "aria-label": `Worker ${worker.worker}` },
    name(worker.worker, state),
    word ? element("p", { class: `state ${state}` }, word) : null,
    element("p", {}, `${worker.running} running, ${worker.waiting} waiting`),
    worker.pages_total ? memory(worker) : null,
    ...pulling(pulls));
}

// A name that is cut where there is no room stands in full in the title.
function name(text, state) {
  return element("p", { class: "name", title: text }, element("span", { class: `dot ${state}` }), text);
}

function condition(worker) {
  if (worker.starting) return ["waiting", "starting"];
  if (!worker.serving) return ["waiting", "takes no new requests"];
  if (worker.roles.includes("decode") && !worker.connected) return ["bad", "not connected"];
  return ["good", worker.synthetic ? "accepts drafts by chance" : ""];
}

function memory(worker) {
  const share = worker.pages_used / worker.pages_total;
  const fill = element("span", { class: share > 0.9 ? "fill full" : "fill" });
  fill.style.width = `${100 * share}%`;
  const title = `${worker.pages_used} of ${worker.pages_total} KV pages are in use`;
  const meter = element("span", { class: "meter", role: "meter", "aria-label": title, title,
    "aria-valuemin": "0", "aria-valuemax": worker.pages_total, "aria-valuenow": worker.pages_used }, fill);
  return element("p", { class: "memory" }, "KV ", meter, ` ${Math.round(100 * share)} %`);
}

function pulling(pulls) {
  const busiest = [...pulls].sort((one, other) => other.rate - one.rate);
  const rows = busiest.slice(0, SHOWN_PULLS).map((link) => element("p",
    { class: link.rate > 0 ? "pull moving" : "pull", title: `pulled from ${link.source} by ${link.path}` },
    `← ${link.rate > 0 ? perSecond(link.rate) : "idle"} `, element("span", { class: "path" }, link.path),
    ` ${port(link.source)}`));
  if (busiest.length > SHOWN_PULLS) {
    const rest = busiest.slice(SHOWN_PULLS).reduce((sum, link) => sum + link.rate, 0);
    rows.push(element("p", { class: "pull" }, `← ${perSecond(rest)} from ${busiest.length - SHOWN_PULLS} more`));
  }
  return rows;
}

// Workers of one host differ by their ports alone.
const port = (worker) => worker.replace(/^(127\.0\.0\.1|localhost|\[::1\]):/, ":");
