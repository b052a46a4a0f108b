// Elements and numbers as text.

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}\u00a0%`;
export const figure = (value) => (value === null ? "∞" : value.toFixed(3));
export const nats = (value) => `${figure(value)}\u00a0nats`;
export const quoted = (text) => `“${text}”`;
export const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;

/** An entry of a legend. */
export const key = (swatch, text) => make("span", { class: "key" }, make("i", { class: `swatch ${swatch}` }), text);

/** The numbers of a picture, for those who would rather read them. */
export function table(summary, heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map((row) => make("tr", {}, ...row.map((text) => make("td", {}, text))));
  const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": summary });
  scroll.append(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
  return make("details", {}, make("summary", {}, summary), scroll);
}
