// Elements of the page. Text becomes text nodes and attributes only: nothing is ever read as HTML, whoever
// wrote it.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// An element with these attributes; children are nodes or texts, null for none.
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

// The same for a part of a drawing.
export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
