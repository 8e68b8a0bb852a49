// Markdown to DOM nodes, for answers in the console. Text becomes text nodes only: nothing that a model says
// is ever read as HTML. An unfinished block (an open fence, half a list) is drawn as far as it goes.

const FENCE = /^\s*(```+|~~~+)\s*(\S*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp([
  "(?<tick>`+)(?<code>.+?)\\k<tick>(?!`)",
  "\\*\\*(?<strong>\\S(?:.*?\\S)?)\\*\\*",
  "(?<![\\w*])\\*(?<em>[^\\s*](?:[^*]*[^\\s*])?)\\*(?![\\w*])",
  "(?<!\\w)_(?<under>[^\\s_](?:[^_]*[^\\s_])?)_(?!\\w)",
  "~~(?<del>\\S(?:.*?\\S)?)~~",
  "\\[(?<label>[^\\]]+)\\]\\((?<url>https?://[^\\s)]+)\\)",
  "\\\\(?<escaped>[!-/:-@[-`{-~])",
].join("|"), "gs");

// The nodes of a whole text.
export function markdown(text) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"));
}

function blocks(lines) {
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [node, next] = block(lines, at);
    nodes.push(node);
    at = next;
  }
  return nodes;
}

// The block that starts in line `at`, and the line after it.
function block(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return fence(lines, at);
  if (RULE.test(line)) return [element("hr"), at + 1];
  const heading = line.match(HEADING);
  if (heading) return [element(`h${heading[1].length}`, inline(heading[2].replace(/\s+#+\s*$/, ""))), at + 1];
  if (QUOTE.test(line)) {
    const end = ending(lines, at, (later) => QUOTE.test(later));
    return [element("blockquote", blocks(lines.slice(at, end).map((quoted) => quoted.match(QUOTE)[1]))), end];
  }
  if (ITEM.test(line)) return list(lines, at);
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return table(lines, at);
  const end = ending(lines, at, (later) => later.trim() && !starts(later));
  return [element("p", inline(lines.slice(at, end).map((part) => part.trimStart()).join("\n"))), end];
}

// Whether a line ends the paragraph before it.
function starts(line) {
  return [FENCE, RULE, HEADING, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

// The first line after `at` that does not belong.
function ending(lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && belongs(lines[end])) end += 1;
  return end;
}

function fence(lines, at) {
  const mark = lines[at].match(FENCE)[1];
  const closes = (line) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
  const end = ending(lines, at, (line) => !closes(line));
  return [element("pre", [element("code", [lines.slice(at + 1, end).join("\n")])]), end + 1];
}

// Items of one kind and what is indented below them, blank lines between them included.
function list(lines, at) {
  const [, indent, mark] = lines[at].match(ITEM);
  const ordered = /\d/.test(mark);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(mark, 10);
  while (at < lines.length) {
    const item = lines[at].match(ITEM);
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== ordered) break;
    const inner = item[1].length + item[2].length + 1;
    const end = ending(lines, at, (line) => !line.trim() || line.search(/\S/) > indent.length);
    const below = lines.slice(at + 1, end).map((line) => line.slice(Math.min(inner, Math.max(line.search(/\S/), 0))));
    const body = [item[3], ...below];
    const parts = blocks(body);
    // A short item is no paragraph of its own.
    if (parts[0]?.tagName === "P") parts.splice(0, 1, ...parts[0].childNodes);
    node.append(element("li", parts));
    at = end;
  }
  return [node, at];
}

function table(lines, at) {
  const end = ending(lines, at, (line) => line.includes("|"));
  const row = (line, cell) => element("tr", cells(line).map((text) => element(cell, inline(text))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  return [element("table", [element("thead", [row(lines[at], "th")]), element("tbody", body)]), end];
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// Text, code, emphasis and links of one block.
function inline(text) {
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(at, found.index), styled(found.groups));
    at = found.index + found[0].length;
  }
  return [...nodes, text.slice(at)];
}

function styled({ code, strong, em, under, del, label, url, escaped }) {
  if (code !== undefined) return element("code", [code.trim()]);
  if (strong !== undefined) return element("strong", inline(strong));
  if (em ?? under) return element("em", inline(em ?? under));
  if (del !== undefined) return element("del", inline(del));
  if (escaped !== undefined) return escaped;
  const link = element("a", inline(label));
  Object.assign(link, { href: url, target: "_blank", rel: "noopener noreferrer" });
  return link;
}

function element(name, children = []) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}
