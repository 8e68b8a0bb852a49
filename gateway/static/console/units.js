// Numbers as people read them.

const SIZES = ["B", "kB", "MB", "GB", "TB"];

// Three digits at most: 1234 as 1230, 12.34 as 12.3.
export function digits(value) {
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 3 });
}

export function bytes(count) {
  const power = count < 1 ? 0 : Math.min(Math.floor(Math.log10(count) / 3), SIZES.length - 1);
  return `${digits(count / 1000 ** power)} ${SIZES[power]}`;
}

export const perSecond = (count) => `${bytes(count)}/s`;

export function milliseconds(ms) {
  return ms < 1000 ? `${digits(ms)} ms` : `${digits(ms / 1000)} s`;
}

export function ago(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

// 1234567 as 1.23M: as narrow as a column is.
export function count(value) {
  if (value < 10000) return String(value);
  return value < 1e6 ? `${digits(value / 1e3)}k` : `${digits(value / 1e6)}M`;
}

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
