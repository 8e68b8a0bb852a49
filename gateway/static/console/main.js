// The console: asks the gateway once a second while somebody looks, and hands what it says to the parts of
// the page.

import { read, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { drawCluster } from "./cluster.js";
import { byId } from "./dom.js";
import { pagesOf, parse } from "./metrics.js";
import { Plots } from "./plots.js";
import { Waterfall, showFailures } from "./requests.js";
import { followTheme } from "./theme.js";

const EVERY_MS = 1000;
const REQUESTS_EVERY = 2; // rounds: they are the longest answer

const plots = new Plots();
const waterfall = new Waterfall();
let cluster = null;
let asking = false;
let round = 0;
let begun = false;

async function ask() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    if (!begun) plots.begin(pagesOf(await (await read("history")).json()), performance.now() / 1000);
    begun = true;
    const due = round++ % REQUESTS_EVERY === 0;
    const [told, page, recent] = await Promise.all([read("cluster"), read("metrics"), due ? read("requests") : null]);
    cluster = await told.json();
    plots.add(performance.now() / 1000, parse(await page.text()));
    if (recent) {
      const { requests, failures } = await recent.json();
      waterfall.show(requests, Date.now() / 1000);
      showFailures(failures, Date.now() / 1000);
    }
    plots.draw();
    draw();
    tell(...healthOf(cluster.health));
  } catch (error) {
    tell("bad", error.status === 401 ? "The API key is missing or wrong" : `The gateway does not answer: ${error.message}`);
  } finally {
    asking = false;
  }
}

function draw() {
  if (!cluster) return;
  byId("model").textContent = cluster.model;
  drawCluster(cluster, plots.links(), plots.traffic());
}

function healthOf({ problem, degraded }) {
  if (problem) return ["bad", problem];
  return degraded ? ["waiting", degraded] : ["good", "healthy"];
}

// The words are read out when they change, not every second.
function tell(state, words) {
  const health = byId("health");
  health.className = state;
  if (health.textContent !== words) health.textContent = words;
}

followTheme(byId("theme"));
new Chat();
byId("key").addEventListener("change", () => { useKey(byId("key").value); ask(); });
document.addEventListener("visibilitychange", ask);
window.addEventListener("resize", () => { draw(); plots.draw(); });
setInterval(ask, EVERY_MS);
ask();
