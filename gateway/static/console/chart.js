// A line chart in SVG: some series over the last minutes, the newest value written out. It redraws itself
// whole. A pointer over it, or the arrow keys, show the values of one moment.

import { element, shape } from "./dom.js";

const HEIGHT = 120, LEFT = 46, BOTTOM = 16, TOP = 6, RIGHT = 6;

export class Chart {
  // `lines`: the name of each series; its class is `line-0`, `line-1`. `format`: a value as text.
  // `logarithmic`: each line of the grid stands for ten times the one below, so that p50 is read beside p99.
  constructor(title, lines, format, logarithmic = false) {
    Object.assign(this, { title, lines, format, logarithmic, times: [], values: [], spanned: 1, at: null });
    this.told = element("span", { class: "told" });
    this.svg = shape("svg", { class: "chart", height: HEIGHT, role: "img", tabindex: "0" });
    this.figure = element("figure", {}, element("figcaption", {}, element("b", {}, title), this.told), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(this.index(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  // `times` in seconds, oldest first; `values[i]` has one value per line, null where there is none.
  // `spanned`: the seconds that the width stands for.
  show(times, values, spanned) {
    const dropped = this.times.length && times.length ? this.times.findIndex((time) => time >= times[0]) : 0;
    Object.assign(this, { times, values, spanned, at: this.at === null ? null : Math.max(this.at - dropped, 0) });
    this.draw();
  }

  point(at) {
    this.at = at;
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.times.length) return;
    event.preventDefault();
    const last = this.times.length - 1;
    this.point(Math.min(Math.max((this.at ?? last + 1) + step, 0), last));
  }

  index(x) {
    if (!this.times.length) return null;
    const time = this.times.at(-1) - this.spanned * (1 - (x - LEFT) / (this.width - LEFT - RIGHT));
    const distance = (at) => Math.abs(this.times[at] - time);
    return this.times.reduce((best, _, at) => (distance(at) < distance(best) ? at : best), 0);
  }

  draw() {
    this.width = this.svg.clientWidth || 300;
    const known = this.values.flat().filter((value) => value !== null);
    const top = this.logarithmic ? decades(known) : { low: 0, high: ceiling(Math.max(...known, 0)) };
    this.svg.replaceChildren(...this.grid(top), ...this.lines.map((_, line) => this.path(line, top)), ...this.cursor(top));
    this.tell();
  }

  x(time) {
    return LEFT + (this.width - LEFT - RIGHT) * (1 - (this.times.at(-1) - time) / this.spanned);
  }

  y(value, { low, high }) {
    const share = this.logarithmic ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : value / high;
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share);
  }

  grid(top) {
    const marks = this.marks(top).flatMap((value) => [
      shape("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(value, top), y2: this.y(value, top) }),
      shape("text", { x: LEFT - 5, y: this.y(value, top) + 4, "text-anchor": "end" }, this.format(value)),
    ]);
    const minutes = Math.round(this.spanned / 60);
    return [...marks,
      shape("text", { x: LEFT, y: HEIGHT - 3 }, `${minutes} min ago`),
      shape("text", { x: this.width - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "now")];
  }

  marks({ low, high }) {
    if (!this.logarithmic) return [0, high / 2, high];
    const powers = Math.round(Math.log10(high / low)), step = Math.ceil(powers / 4);
    return Array.from({ length: Math.floor(powers / step) + 1 }, (_, at) => low * 10 ** (at * step));
  }

  // Moments without a value are left open.
  path(line, top) {
    let open = false;
    const parts = this.values.map((row, at) => {
      if (row[line] === null) { open = false; return ""; }
      const step = `${open ? "L" : "M"}${this.x(this.times[at]).toFixed(1)},${this.y(row[line], top).toFixed(1)}`;
      const alone = !open && (this.values[at + 1]?.[line] ?? null) === null;
      open = true;
      return alone ? `${step}h1` : step;
    });
    return shape("path", { class: `line line-${line}`, d: parts.join("") });
  }

  cursor(top) {
    if (this.at === null || !this.times.length) return [];
    const x = this.x(this.times[this.at]);
    const dots = this.values[this.at].flatMap((value, line) => (value === null ? []
      : [shape("circle", { class: `line-${line}`, cx: x, cy: this.y(value, top), r: 3 })]));
    return [shape("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }), ...dots];
  }

  // The values of the moment that is pointed at, else the newest ones.
  tell() {
    const row = this.values[this.at ?? this.values.length - 1] ?? this.lines.map(() => null);
    const words = this.lines.map((name, line) => [name, row[line] === null ? "–" : this.format(row[line])]);
    const when = this.at === null ? "" : `${Math.round(this.times.at(-1) - this.times[this.at])} s ago: `;
    this.told.replaceChildren(when, ...words.map(([name, value], line) =>
      element("span", { class: `value line-${line}` }, name ? `${name} ${value}` : value)));
    const said = words.map(([name, value]) => `${name} ${value}`.trim()).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${when || "now "}${said}`);
  }
}

// The powers of ten around all values.
export function decades(values) {
  const known = values.filter((value) => value > 0);
  if (!known.length) return { low: 1, high: 10 };
  const low = 10 ** Math.floor(Math.log10(Math.min(...known)));
  return { low, high: Math.max(10 ** Math.ceil(Math.log10(Math.max(...known))), 10 * low) };
}

// The least round number that is not below the value.
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value);
}
