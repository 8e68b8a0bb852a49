// Speed, acceptance length and latencies over the last minutes, of all calls: the differences between pages
// of metrics that are `WINDOW_S` apart.

import { Chart } from "./chart.js";
import { byId } from "./dom.js";
import { growth, increase, quantile, sums } from "./metrics.js";
import { digits, milliseconds } from "./units.js";

const WINDOW_S = 10, SHORTEST_S = 60, LONGEST_S = 900;
const TTFT = "eyas_time_to_first_token_seconds", TPOT = "eyas_inter_token_latency_seconds";

export class Plots {
  constructor() {
    this.pages = []; // { time, page }, oldest first, as far back as a window reaches
    this.times = [];
    this.rows = []; // what each moment showed, one list of values per chart
    this.charts = [
      new Chart("Tokens per second", [""], digits),
      new Chart("Acceptance length", [""], digits),
      new Chart("Time to first token", ["p50", "p99"], milliseconds, true),
      new Chart("Time per later token", ["p50", "p99"], milliseconds, true),
      new Chart("Failed calls per minute", ["429", "others"], digits),
    ];
    byId("charts").replaceChildren(...this.charts.map((chart) => chart.figure));
  }

  // Takes the page of metrics of this moment (`time` in seconds).
  add(time, page) {
    this.pages.push({ time, page });
    while (this.pages.length > 2 && time - this.pages[1].time >= WINDOW_S) this.pages.shift();
    if (this.pages.length < 2) return;
    this.times.push(time);
    this.rows.push(measured(this.pages[0], this.pages.at(-1)));
    while (time - this.times[0] > LONGEST_S) {
      this.times.shift();
      this.rows.shift();
    }
  }

  // Takes what was before the page opened (`now` in seconds, as for `add`), unless there is something already.
  begin(pages, now) {
    if (!this.pages.length) for (const { ago, page } of pages) this.add(now - ago, page);
  }

  draw() {
    const passed = this.times.length ? this.times.at(-1) - this.times[0] : 0;
    const spanned = Math.min(Math.max(SHORTEST_S * Math.ceil(passed / SHORTEST_S), SHORTEST_S), LONGEST_S);
    this.charts.forEach((chart, at) => chart.show(this.times, this.rows.map((row) => row[at]), spanned));
  }

  // What the picture of the cluster shows beside the workers.
  traffic() {
    const running = this.pages.length ? sums(this.pages.at(-1).page, "eyas_requests_running").get("") ?? 0 : 0;
    return { running, tokens: this.rows.at(-1)?.[0][0] ?? 0 };
  }

  // Links that ever moved pages, with the bytes per second of late.
  links() {
    if (!this.pages.length) return [];
    const [first, last] = [this.pages[0], this.pages.at(-1)];
    const name = ({ source, target, path }) => JSON.stringify([source, target, path]);
    const seconds = last.time - first.time || 1;
    return [...growth(first.page, last.page, "eyas_link_bytes_total", name)].map(([key, bytes]) => {
      const [source, target, path] = JSON.parse(key);
      return { source, target, path, rate: bytes / seconds };
    });
  }
}

// One list of values per chart: tokens per second, acceptance length, and quantiles in milliseconds.
function measured({ time: began, page: before }, { time: ended, page: after }) {
  const grown = (name) => increase(before, after, name);
  const steps = grown("eyas_verify_steps_total");
  const ms = (name, share) => {
    const seconds = quantile(before, after, name, share);
    return seconds === null ? null : 1000 * seconds;
  };
  const status = growth(before, after, "eyas_http_responses_total", (labels) => labels.status);
  const failures = (counts) => [...status].reduce((sum, [name, count]) => sum + (counts(name) ? count : 0), 0) * 60 / (ended - began);
  return [
    [grown("eyas_generation_tokens_total") / (ended - began)], // tokens count when their call ends
    [steps ? 1 + grown("eyas_draft_tokens_accepted_total") / steps : null],
    [ms(TTFT, 0.5), ms(TTFT, 0.99)],
    [ms(TPOT, 0.5), ms(TPOT, 0.99)],
    [failures((name) => name === "429"), failures((name) => Number(name) >= 400 && name !== "429")],
  ];
}
