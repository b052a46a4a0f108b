// Free text: tokens as they come, shaded by how unsure the model was of each.

import { events, request } from "./api.js";
import { trusted } from "./doubt.js";
import { byId, count, figure, make, nats, percent, quoted, table } from "./dom.js";

const SHADES = {
  entropy: { name: "all uncertainty (entropy)", bounds: [0.1, 0.5, 1, 2] },
  aleatoric: { name: "in every draw (aleatoric)", bounds: [0.1, 0.5, 1, 2] },
  epistemic: { name: "between draws (epistemic)", bounds: [0.01, 0.05, 0.1, 0.3] },
};

let shade = "entropy";
let parts = []; // of the text that is shown: elements with their tokens

export function fitForm(evaluation) {
  byId("way").hidden = !evaluation.chat;
}

/** The request and where it goes, or the field that is missing with what to say of it. */
export function readForm() {
  const prompt = byId("prompt").value;
  if (!prompt.trim()) return { missing: byId("prompt"), why: "Write a prompt first." };
  const body = {
    stream: true,
    max_tokens: Number(byId("tokens").value),
    temperature: Number(byId("heat").value),
    agreement: byId("agreement").checked,
  };
  if (byId("text-samples").value) body.samples = Number(byId("text-samples").value);
  return document.querySelector("input[name=way]:checked").value === "chat"
    ? { path: "/v1/chat/completions", body: { ...body, messages: [{ role: "user", content: prompt }] } }
    : { path: "/v1/completions", body: { ...body, prompt } };
}

/** Writes into the place while tokens come; gives what is to say about the whole. */
export async function write(place, { path, body }, signal) {
  const reply = await request(path, body, signal);
  const text = make("p", { id: "written" }, make("span", { class: "soft" }, body.prompt ?? ""));
  const all = [];
  let waiting = []; // tokens whose text is not there yet, such as half a character
  let end = null;
  parts = [];
  place.replaceChildren(legend(), text);
  try {
    for await (const event of events(reply)) {
      const piece = event.choices[0];
      const tokens = piece.confidence?.tokens ?? [];
      const more = piece.text ?? piece.delta.content;
      all.push(...tokens);
      waiting.push(...tokens);
      if (more) text.append(span(more, waiting.splice(0)));
      if (piece.finish_reason) end = piece;
    }
  } finally {
    place.append(tokenTable(all));
  }
  const confidence = end.confidence;
  const why = end.finish_reason === "length" ? "stopped at the limit" : "ended by itself";
  const about = `${count(all.length, "token")} from ${count(confidence.samples, "draw")}, ${why}; ${nats(confidence.mutual_information)} between draws (epistemic) in all, log-likelihood ${figure(confidence.log_likelihood)}.`;
  if (confidence.value === null) return [make("span", {}, about)];
  place.insertBefore(others(confidence), place.lastChild);
  return [make("strong", {}, trusted(confidence)), make("span", {}, about)];
}

/** What every draw writes by itself: how many agree, and what the others say. */
function others({ agreement, alternatives }) {
  const said = alternatives.map(({ text, share }) => make("li", {}, `${percent(share, 0)}: ${text ? quoted(text) : "nothing"}`));
  const same = make("p", {}, `${percent(agreement, 0)} of the draws write the same by themselves${said.length ? "; others:" : "."}`);
  return make("div", { id: "others", class: "doubt" }, make("h3", {}, "What each draw writes"), same, ...(said.length ? [make("ul", {}, ...said)] : []));
}

function span(text, tokens) {
  const part = { element: make("span", { class: "token", title: tokens.map(described).join("\n") }, text), tokens };
  parts.push(part);
  recolour(part);
  return part.element;
}

const described = (token) =>
  `${JSON.stringify(token.token)}: ${percent(token.probability)}; ${nats(token.entropy)}, ${figure(token.aleatoric)} aleatoric and ${figure(token.epistemic)} epistemic`;

function recolour({ element, tokens }) {
  const doubt = Math.max(0, ...tokens.map((token) => token[shade]));
  element.dataset.shade = SHADES[shade].bounds.filter((bound) => doubt >= bound).length;
}

function legend() {
  const options = Object.entries(SHADES).map(([value, { name }]) => make("option", { value, selected: value === shade }, name));
  const select = make("select", { id: "shade" }, ...options);
  const keys = make("span", { class: "keys" });
  const show = () => {
    shade = select.value;
    parts.forEach(recolour);
    const names = [`below ${SHADES[shade].bounds[0]}`, ...SHADES[shade].bounds.map((bound) => `from ${bound}`)];
    keys.replaceChildren(...names.map((name, k) => make("span", { class: "token", "data-shade": k }, name)), " nats");
  };
  select.addEventListener("change", show);
  show();
  return make("div", { class: "legend small" }, make("label", { for: "shade" }, "Shaded by"), select, keys);
}

function tokenTable(tokens) {
  const figures = (token) => ["entropy", "aleatoric", "epistemic"].map((name) => figure(token[name]));
  const rows = tokens.map((token) => [JSON.stringify(token.token), percent(token.probability), ...figures(token)]);
  return table("All tokens as a table", ["Token", "Probability", "Entropy", "Aleatoric", "Epistemic"], rows);
}
