// Prometheus' text, and what two pages of it say about the time between them. Several gateway processes show
// their series on one page: all are added up.

const LINE = /^(eyas_\w+)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { n: "\n", '"': '"', "\\": "\\" };

// name -> series, each with its labels and its value.
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const [, name, labels, value] = line.match(LINE) ?? [];
    if (!name) continue;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels: labelled(labels ?? ""), value: Number(value) });
  }
  return found;
}

// The samples of /history as pages like those of `parse`, each with its time in seconds before the last one.
export function pagesOf({ series, samples }) {
  const last = samples.at(-1)?.[0] ?? 0;
  return samples.map(([time, values]) => {
    const page = new Map();
    values.forEach((value, at) => {
      const { name, labels } = series[at];
      if (!page.has(name)) page.set(name, []);
      page.get(name).push({ labels, value });
    });
    return { ago: last - time, page };
  });
}

function labelled(text) {
  const pairs = [...text.matchAll(LABEL)];
  return Object.fromEntries(pairs.map(([, name, value]) => [name, value.replace(/\\(.)/g, (_, sign) => ESCAPED[sign] ?? sign)]));
}

// The sums over all series that have the same text `group(labels)`.
export function sums(page, name, group = () => "") {
  const total = new Map();
  for (const { labels, value } of page.get(name) ?? []) {
    const key = group(labels);
    total.set(key, (total.get(key) ?? 0) + value);
  }
  return total;
}

// How much each sum grew from `before` to `after`; a counter that fell began anew.
export function growth(before, after, name, group) {
  const old = sums(before, name, group);
  const grown = [...sums(after, name, group)].map(([key, value]) => {
    const start = old.get(key) ?? 0;
    return [key, value < start ? value : value - start];
  });
  return new Map(grown);
}

export const increase = (before, after, name) => growth(before, after, name).get("") ?? 0;

// The quantile of what a histogram saw between two pages, linear inside a bucket; null if it saw nothing.
export function quantile(before, after, name, share) {
  const buckets = [...growth(before, after, `${name}_bucket`, (labels) => labels.le)]
    .map(([bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), count])
    .sort((one, other) => one[0] - other[0]);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!total) return null;
  let low = 0, below = 0;
  for (const [high, count] of buckets) {
    if (count >= share * total) {
      return high === Infinity ? low : low + (high - low) * (share * total - below) / (count - below || 1);
    }
    [low, below] = [high, count];
  }
  return low;
}
